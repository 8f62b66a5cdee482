#include "cuda/weight_feed.h"

#include <algorithm>
#include <cstring>

namespace cachalot::cuda {
namespace {

constexpr size_t kPartBytes = size_t{8} << 20, kTaskBytes = size_t{256} << 10;
constexpr size_t kLeastBytes = size_t{1} << 20;  // less than what pinned memory and threads are made for
constexpr int kMostThreads = 8;                  // fill a part faster than the bus empties it

}  // namespace

WeightFeed::WeightFeed() : ring_(kPartBytes) {}

void WeightFeed::release() {
  ring_.clear();
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
    auto* const to = static_cast<std::byte*>(ring_.take());
    const auto* const from = static_cast<const std::byte*>(host) + begin;
    pool_->run(static_cast<int>((n + kTaskBytes - 1) / kTaskBytes), [&](int task, int) {
      const size_t at = static_cast<size_t>(task) * kTaskBytes;
      std::memcpy(to + at, from + at, std::min(kTaskBytes, n - at));
    });
    CACHALOT_CUDA_CHECK(cudaMemcpyAsync(static_cast<std::byte*>(device) + begin, to, n, cudaMemcpyHostToDevice, stream));
    ring_.in_use_until(stream);
  }
}

}  // namespace cachalot::cuda
