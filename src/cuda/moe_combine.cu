// The sum over a row's experts and its shared one; and, where the residual stream and the next norm wait for it, these in the same launch.
#include <cooperative_groups.h>

#include <type_traits>
#include <utility>

#include "cuda/device.cuh"
#include "cuda/kernels.h"

namespace cachalot::cuda {
namespace {

// What may be added up is asked for together, whether it counts or not: one trip to L2.
constexpr int kCombinedAtOnce = 8;
template <typename In, typename Out>
__global__ void combine_kernel(const In* pairs, int64_t pair_stride, const int* ids, const float* weights, int64_t weights_stride,
                               int top_k, const float* shared, int64_t shared_stride, Out* y, int64_t y_stride, int n) {
  pdl_trigger();
  pdl_wait();
  const int t = static_cast<int>(blockIdx.y), i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= n) return;
  float sum = shared != nullptr ? shared[t * shared_stride + i] : 0.0f;
  pairs += static_cast<int64_t>(t) * top_k * pair_stride + i, ids += t * top_k, weights += t * weights_stride;
  for (int first = 0; first < top_k; first += kCombinedAtOnce) {
    int id[kCombinedAtOnce];
    float weight[kCombinedAtOnce];
    In v[kCombinedAtOnce];
#pragma unroll
    for (int k = 0; k < kCombinedAtOnce; ++k) {
      const bool there = first + k < top_k;
      id[k] = there ? ids[first + k] : -1;
      if (there) weight[k] = weights[first + k], v[k] = pairs[(first + k) * pair_stride];
    }
#pragma unroll
    for (int k = 0; k < kCombinedAtOnce; ++k)
      if (id[k] >= 0) sum = fmaf(weight[k], to_f32(v[k]), sum);
  }
  y[t * y_stride + i] = from_f32<Out>(sum);
}

// The same for many rows that are aligned, n in multiples of 8: 8 columns per thread. (Few rows want more blocks.)
constexpr int kWideRows = 64, kWideThreads = 128;
template <typename In, typename Out>
__global__ __launch_bounds__(kWideThreads) void combine_wide_kernel(const In* pairs, int64_t pair_stride, const int* ids,
                                                                    const float* weights, int64_t weights_stride, int top_k,
                                                                    const float* shared, int64_t shared_stride, Out* y, int64_t y_stride,
                                                                    int n) {
  pdl_wait();
  pdl_trigger();  // before, the next launch's blocks would crowd on the multiprocessors that are free first
  const int t = static_cast<int>(blockIdx.y), i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * 8;
  if (i >= n) return;
  const auto read = [](auto* v, const auto* from) {  // 8 numbers
#pragma unroll
    for (int k = 0; k < static_cast<int>(sizeof(*v) * 8 / 16); ++k)
      reinterpret_cast<uint4*>(v)[k] = load16(reinterpret_cast<const uint4*>(from) + k);
  };
  alignas(16) float sum[8] = {};
  if (shared != nullptr) read(sum, shared + t * shared_stride + i);
  constexpr int kAtOnce = sizeof(In) == 2 ? kCombinedAtOnce : kCombinedAtOnce / 2;
  pairs += static_cast<int64_t>(t) * top_k * pair_stride + i, ids += t * top_k, weights += t * weights_stride;
  for (int first = 0; first < top_k; first += kAtOnce) {
    int id[kAtOnce];
    float weight[kAtOnce];
    alignas(16) In v[kAtOnce][8];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const bool there = first + k < top_k;
      id[k] = there ? ids[first + k] : -1;
      if (there) weight[k] = weights[first + k], read(v[k], pairs + (first + k) * pair_stride);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (id[k] < 0) continue;
#pragma unroll
      for (int c = 0; c < 8; ++c) sum[c] = fmaf(weight[k], to_f32(v[k][c]), sum[c]);
    }
  }
  alignas(16) Out out[8];
#pragma unroll
  for (int c = 0; c < 8; ++c) out[c] = from_f32<Out>(sum[c]);
#pragma unroll
  for (int k = 0; k < static_cast<int>(sizeof(out) / 16); ++k)
    reinterpret_cast<uint4*>(y + t * y_stride + i)[k] = reinterpret_cast<const uint4*>(out)[k];
}

// `n` numbers, 16 bytes at a time.
template <typename T>
__device__ __forceinline__ void read_floats(const T* from, float* to, int n) {
#pragma unroll
  for (int i = 0; i < n; i += 16 / static_cast<int>(sizeof(T))) {
    const uint4 v = load16(from + i);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (std::is_same_v<T, float>)
        to[i + w] = __uint_as_float(words[w]);
      else
        to[i + 2 * w] = __uint_as_float(words[w] << 16), to[i + 2 * w + 1] = __uint_as_float(words[w] & 0xffff0000u);
    }
  }
}

// A cluster of kBlocks blocks per row. With few rows everything is asked for at once; with many, blocks beside each other hide the second
// trip, and there are more of them the fewer registers each takes.
constexpr int kMostNormThreads = 512, kMostBlocks = 8, kFewRows = 64, kManyRows = 1024, kManyAtOnce = 4;
template <typename In>
constexpr int kNormEach = 16 / static_cast<int>(sizeof(In));  // columns of a thread
template <typename In, int kBlocks, bool kMany>
__global__ __launch_bounds__(kMostNormThreads, kMany ? 2 : 1) void combine_norm_kernel(const __grid_constant__ CombineArgs a) {
  constexpr int kEach = kNormEach<In>, kAtOnce = kMany ? kManyAtOnce : kCombinedAtOnce;
  [[maybe_unused]] __shared__ float reduce[33], of_block[kBlocks];
  const int t = static_cast<int>(blockIdx.x) / kBlocks, rank = static_cast<int>(blockIdx.x) % kBlocks,
            thread = static_cast<int>(threadIdx.x);
  const int n = a.y.cols, top_k = a.weights.cols, at = (rank * static_cast<int>(blockDim.x) + thread) * kEach;
  const bool mine = at < n;
#if __CUDA_ARCH__ >= 900
  auto started = cooperative_groups::this_cluster().barrier_arrive();
#endif
  float norm[kEach], r[kEach] = {}, sum[kEach] = {};
  if (mine && !kMany) read_floats(a.norm + at, norm, kEach);
  if (!a.alone) pdl_trigger();
  pdl_wait();
  if (a.alone) pdl_trigger();
  float* residual = static_cast<float*>(a.residual.data) + t * a.residual.stride + at;
  const In* pairs = static_cast<const In*>(a.pairs.data) + static_cast<int64_t>(t) * top_k * a.pairs.stride + at;
  const int* ids = a.ids + t * top_k;
  const float* weights = static_cast<const float*>(a.weights.data) + t * a.weights.stride;
  if (mine) {
    read_floats(residual, r, kEach);
    if (a.shared.data != nullptr) read_floats(static_cast<const float*>(a.shared.data) + t * a.shared.stride + at, sum, kEach);
    for (int first = 0; first < top_k; first += kAtOnce) {
      int id[kAtOnce];
      float weight[kAtOnce];
      uint4 v[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const bool there = first + k < top_k;
        id[k] = there ? ids[first + k] : -1;
        if (there) weight[k] = weights[first + k], v[k] = load16(pairs + (first + k) * a.pairs.stride);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (id[k] < 0) continue;
        const uint32_t words[4] = {v[k].x, v[k].y, v[k].z, v[k].w};
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const uint32_t word = words[i * static_cast<int>(sizeof(In)) / 4];
          const float x = __uint_as_float(kEach == 4 ? word : (i & 1) == 0 ? word << 16 : word & 0xffff0000u);
          sum[i] = fmaf(weight[k], x, sum[i]);
        }
      }
    }
  }
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) r[i] += sum[i], squares = fmaf(r[i], r[i], squares);
  squares = block_sum(squares, reduce);
#if __CUDA_ARCH__ >= 900
  const auto cluster = cooperative_groups::this_cluster();
  cluster.barrier_wait(std::move(started));  // nobody writes to a block that has not begun
  if constexpr (kBlocks > 1) {
    if (thread < kBlocks) cluster.map_shared_rank(of_block, thread)[rank] = squares;
    cluster.sync();
    squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) squares += of_block[i];
  }
#endif
  if (!mine) return;
  if (kMany) read_floats(a.norm + at, norm, kEach);
  const float factor = rsqrtf(squares / static_cast<float>(n) + a.eps);
#pragma unroll
  for (int i = 0; i < kEach; i += 4) *reinterpret_cast<float4*>(residual + i) = make_float4(r[i], r[i + 1], r[i + 2], r[i + 3]);
  uint32_t y[kEach / 2];
#pragma unroll
  for (int i = 0; i < kEach / 2; ++i) y[i] = pack_bf16(r[2 * i] * factor * norm[2 * i], r[2 * i + 1] * factor * norm[2 * i + 1]);
  bf16* to = static_cast<bf16*>(a.y.data) + t * a.y.stride + at;
#pragma unroll
  for (int i = 0; i < kEach / 2; i += 2) *reinterpret_cast<uint2*>(to + 2 * i) = make_uint2(y[i], y[i + 1]);
}

template <typename T>
bool aligned16(const T* p, int64_t stride) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride * static_cast<int64_t>(sizeof(T)) % 16 == 0;
}

}  // namespace

cudaError_t launch_moe_combine(const CombineArgs& a, cudaStream_t stream) {
  return with_activation(a.pairs.type, [&](auto in) {
    return with_activation(a.y.type, [&](auto out) {
      using In = decltype(in);
      using Out = decltype(out);
      const auto* from = static_cast<const In*>(a.pairs.data);
      const auto* others = static_cast<const float*>(a.shared.data);
      auto* to = static_cast<Out*>(a.y.data);
      const bool wide = a.y.rows >= kWideRows && a.y.cols % 8 == 0 && aligned16(from, a.pairs.stride) &&
                        aligned16(others, a.shared.stride) && aligned16(to, a.y.stride);
      const int threads = wide ? kWideThreads : 256;
      const dim3 grid(static_cast<unsigned>(ceil_div(a.y.cols, wide ? 8 * threads : threads)), static_cast<unsigned>(a.y.rows));
      return launch(wide ? combine_wide_kernel<In, Out> : combine_kernel<In, Out>, grid, threads, 0, stream, from, a.pairs.stride, a.ids,
                    static_cast<const float*>(a.weights.data), a.weights.stride, a.weights.cols, others, a.shared.stride, to, a.y.stride,
                    a.y.cols);
    });
  });
}

bool combine_norm_supports(Mat residual, Mat y, bool clusters) {
  return residual.type == DType::f32 && y.type == DType::bf16 && y.cols % 8 == 0 &&
         y.cols <= kNormEach<float> * kMostNormThreads * (clusters ? kMostBlocks : 1) &&
         aligned16(static_cast<const float*>(residual.data), residual.stride) && aligned16(static_cast<const bf16*>(y.data), y.stride);
}

cudaError_t launch_moe_combine_norm(const CombineArgs& a, cudaStream_t stream) {
  return with_activation(a.pairs.type, [&](auto in) {
    using In = decltype(in);
    const int least = ceil_div(a.y.cols, kNormEach<In> * kMostNormThreads), few = a.clusters && a.y.rows <= kFewRows ? 2 : 1,
              want = least > few ? least : few,
              blocks = want <= 1   ? 1
                       : want <= 2 ? 2
                       : want <= 4 ? 4
                                   : 8;
    const int threads = ceil_div(ceil_div(a.y.cols, kNormEach<In> * blocks), 32) * 32;
    const auto kernel = blocks == 1 && a.y.rows >= kManyRows ? combine_norm_kernel<In, 1, true>
                        : blocks == 1                        ? combine_norm_kernel<In, 1, false>
                        : blocks == 2                        ? combine_norm_kernel<In, 2, false>
                        : blocks == 4                        ? combine_norm_kernel<In, 4, false>
                                                             : combine_norm_kernel<In, 8, false>;
    return launch_clusters(kernel, blocks, dim3(static_cast<unsigned>(blocks * a.y.rows)), threads, 0, stream, a);
  });
}

}  // namespace cachalot::cuda
