#include "cuda/weight_feed.h"

#include <algorithm>
#include <cstring>

#include "cuda/cuda_ops_impl.h"

namespace cachalot::cuda {
namespace {

constexpr size_t kPartBytes = size_t{8} << 20, kTaskBytes = size_t{256} << 10;
constexpr size_t kLeastBytes = size_t{1} << 20;  // less than what pinned memory and threads are made for
constexpr int kMostThreads = 8;                  // fill a part faster than the bus empties it

}  // namespace

WeightFeed::~WeightFeed() { release(); }

void WeightFeed::release() {
  for (Part& part : parts_) {
    if (part.copied == nullptr) continue;
    cudaEventSynchronize(part.copied);
    cudaEventDestroy(part.copied);
    part = {};
  }
  pool_.reset();
}

void WeightFeed::copy(void* device, const void* host, size_t bytes, cudaStream_t stream) {
  if (bytes < kLeastBytes) {
    // The driver has taken such memory to a place of its own when it returns.
    CACHALOT_CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream));
    return;
  }
  if (!pool_) pool_ = std::make_unique<ThreadPool>(std::min(physical_cores(), kMostThreads));
  for (size_t begin = 0; begin < bytes; begin += kPartBytes) {
    const size_t n = std::min(kPartBytes, bytes - begin);
    Part& part = parts_[next_++ % parts_.size()];
    if (part.copied == nullptr) {
      part.memory = pinned_memory(kPartBytes);
      CACHALOT_CUDA_CHECK(cudaEventCreateWithFlags(&part.copied, cudaEventDisableTiming));
    }
    CACHALOT_CUDA_CHECK(cudaEventSynchronize(part.copied));
    auto* const to = static_cast<std::byte*>(part.memory.get());
    const auto* const from = static_cast<const std::byte*>(host) + begin;
    pool_->run(static_cast<int>((n + kTaskBytes - 1) / kTaskBytes), [&](int task, int) {
      const size_t at = static_cast<size_t>(task) * kTaskBytes;
      std::memcpy(to + at, from + at, std::min(kTaskBytes, n - at));
    });
    CACHALOT_CUDA_CHECK(cudaMemcpyAsync(static_cast<std::byte*>(device) + begin, to, n, cudaMemcpyHostToDevice, stream));
    CACHALOT_CUDA_CHECK(cudaEventRecord(part.copied, stream));
  }
}

}  // namespace cachalot::cuda
