#include "cuda/pinned_ring.h"

#include "cuda/cuda_ops_impl.h"

namespace cachalot::cuda {

void* PinnedRing::take() {
  taken_ = (taken_ + 1) % parts_.size();
  Part& part = parts_[taken_];
  if (part.read == nullptr) {
    part.memory = pinned_memory(part_bytes_);
    CACHALOT_CUDA_CHECK(cudaEventCreateWithFlags(&part.read, cudaEventDisableTiming));
  }
  CACHALOT_CUDA_CHECK(cudaEventSynchronize(part.read));
  return part.memory.get();
}

void PinnedRing::in_use_until(cudaStream_t stream) { CACHALOT_CUDA_CHECK(cudaEventRecord(parts_[taken_].read, stream)); }

void PinnedRing::clear() {
  for (Part& part : parts_) {
    if (part.read == nullptr) continue;
    cudaEventSynchronize(part.read);
    cudaEventDestroy(part.read);
    part = {};
  }
}

}  // namespace cachalot::cuda
