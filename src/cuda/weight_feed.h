// Weights on their way to the device. The driver copies memory that is not pinned with one thread, at a quarter of what the bus takes, and
// weights lie in mapped files, whose pages come by faults. So several threads fill pinned parts, from which the device fetches.
#pragma once

#include <array>
#include <cstddef>
#include <memory>

#include "base/thread_pool.h"
#include "cuda/context.h"
#include "ops/ops.h"

namespace cachalot::cuda {

class WeightFeed {
 public:
  WeightFeed() = default;
  ~WeightFeed();
  WeightFeed(const WeightFeed&) = delete;
  WeightFeed& operator=(const WeightFeed&) = delete;
  // Enqueues the copy of `bytes` bytes. `host` has been read when this returns.
  void copy(void* device, const void* host, size_t bytes, cudaStream_t stream);
  // Gives its memory and threads back, until there is more to copy.
  void release();

 private:
  struct Part {
    Buffer memory;
    cudaEvent_t copied = nullptr;
  };
  std::unique_ptr<ThreadPool> pool_;
  std::array<Part, 4> parts_;
  size_t next_ = 0;
};

}  // namespace cachalot::cuda
