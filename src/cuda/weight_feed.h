// Weights on their way to the device. The driver copies memory that is not pinned with one thread, at a quarter of what the bus takes, and
// weights lie in mapped files, whose pages come by faults. So several threads fill pinned parts, from which the device fetches.
#pragma once

#include <cstddef>
#include <memory>

#include "base/thread_pool.h"
#include "cuda/pinned_ring.h"

namespace cachalot::cuda {

class WeightFeed {
 public:
  WeightFeed();
  // Enqueues the copy of `bytes` bytes. `host` has been read when this returns.
  void copy(void* device, const void* host, size_t bytes, cudaStream_t stream);
  // Gives its memory and threads back, until there is more to copy.
  void release();

 private:
  std::unique_ptr<ThreadPool> pool_;
  PinnedRing ring_;
};

}  // namespace cachalot::cuda
