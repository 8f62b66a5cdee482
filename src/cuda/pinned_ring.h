// Pinned memory in parts that are filled in turn while the device still reads others.
#pragma once

#include <array>
#include <cstddef>

#include "cuda/context.h"

namespace cachalot::cuda {

class PinnedRing {
 public:
  explicit PinnedRing(size_t part_bytes) : part_bytes_(part_bytes) {}
  ~PinnedRing() { clear(); }
  PinnedRing(const PinnedRing&) = delete;
  PinnedRing& operator=(const PinnedRing&) = delete;

  // The next part, as soon as what was enqueued on it has ended. Parts are made when they are first taken.
  void* take();
  // What reads the part that was taken last has been enqueued on the stream.
  void in_use_until(cudaStream_t stream);
  // Waits, and gives all memory back.
  void clear();

 private:
  struct Part {
    Buffer memory;
    cudaEvent_t read = nullptr;
  };
  std::array<Part, 4> parts_;
  size_t part_bytes_, taken_ = 0;
};

}  // namespace cachalot::cuda
