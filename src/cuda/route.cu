// The router's choice (DeepSeek-V2 section 2.1.2, DeepSeek-V3 section 2.1.2), the sorting of (token, expert) pairs, and the sum over
// experts. Numbers of pairs per expert never leave the device.
#include <cooperative_groups.h>

#include "cuda/device.cuh"
#include "cuda/kernels.h"
#include "cuda/route_choice.cuh"

namespace cachalot::cuda {
namespace {

constexpr int kMaxExperts = 1024;

// Of a warp's candidates the larger value, the lower index among equals; index -1 loses.
__device__ __forceinline__ void warp_best(float& value, int& index) {
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) {
    const float v = __shfl_xor_sync(~0u, value, m);
    const int i = __shfl_xor_sync(~0u, index, m);
    if (i >= 0 && (index < 0 || v > value || (v == value && i < index))) value = v, index = i;
  }
}

// The largest of values[0, n) that is not `taken`, in all lanes. A NaN counts as smallest.
__device__ int warp_largest(const float* values, const bool* taken, int n, int lane) {
  float best = -INFINITY;
  int index = -1;
  for (int i = lane; i < n; i += 32) {
    const float v = isnan(values[i]) ? -INFINITY : values[i];
    if (!taken[i] && (index < 0 || v > best)) best = v, index = i;
  }
  warp_best(best, index);
  return index;
}

// The choice without groups of up to 32 kEach experts, one warp per token.
template <int kEach>
__global__ void route_plain_kernel(const RouteArgs a) {
  pdl_trigger();
  const int t = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x);
  float bias[kEach], logits[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) bias[i] = a.bias != nullptr && i * 32 + lane < a.n_experts ? a.bias[i * 32 + lane] : 0.0f;
  pdl_wait();
#pragma unroll
  for (int i = 0; i < kEach; ++i) logits[i] = i * 32 + lane < a.n_experts ? a.logits[t * a.logits_stride + i * 32 + lane] : 0.0f;
  choose_plain(a, t, logits, bias);
}

// One warp per token, any number of experts, with groups.
__global__ void route_kernel(const RouteArgs a) {
  extern __shared__ float shared[];  // scores, choice [n_experts], group scores [n_group]; then flags
  pdl_trigger();
  pdl_wait();
  const int t = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x), n = a.n_experts;
  float *scores = shared, *choice = shared + n, *groups = shared + 2 * n;
  bool *taken = reinterpret_cast<bool*>(groups + a.n_group), *group_taken = taken + n;
  const float* logits = a.logits + t * a.logits_stride;
  if (a.sigmoid) {
    for (int i = lane; i < n; i += 32) scores[i] = 1.0f / (1.0f + expf(-logits[i]));
  } else {
    float highest = -INFINITY, sum = 0.0f;
    for (int i = lane; i < n; i += 32) highest = fmaxf(highest, logits[i]);
    highest = warp_max(highest);
    for (int i = lane; i < n; i += 32) sum += scores[i] = expf(logits[i] - highest);
    sum = warp_sum(sum);
    for (int i = lane; i < n; i += 32) scores[i] /= sum;
  }
  for (int i = lane; i < n; i += 32) {
    choice[i] = scores[i] + (a.bias != nullptr ? a.bias[i] : 0.0f);
    taken[i] = false;
  }
  __syncwarp();
  if (a.group_score != 0) {
    const int size = n / a.n_group;
    for (int g = lane; g < a.n_group; g += 32) {
      float first = -INFINITY, second = -INFINITY;
      for (int i = g * size; i < (g + 1) * size; ++i) {
        const float v = choice[i];
        if (v > first)
          second = first, first = v;
        else if (v > second)
          second = v;
      }
      groups[g] = a.group_score == 1 ? first : first + second;
      group_taken[g] = false;
    }
    __syncwarp();
    for (int k = 0; k < a.topk_group; ++k) {
      const int g = warp_largest(groups, group_taken, a.n_group, lane);
      if (lane == 0) group_taken[g] = true;
      __syncwarp();
    }
    for (int i = lane; i < n; i += 32)
      if (!group_taken[i / size]) choice[i] = a.group_score == 1 ? 0.0f : -INFINITY;
    __syncwarp();
  }
  float sum = 0.0f, mine = 0.0f;  // lane k keeps the k-th choice (top_k <= 32)
  int my_id = -1;
  for (int k = 0; k < a.top_k; ++k) {
    const int e = warp_largest(choice, taken, n, lane);
    sum += scores[e];
    if (lane == k) mine = scores[e], my_id = e;
    if (lane == 0) taken[e] = true;
    __syncwarp();
  }
  if (lane < a.top_k) {
    a.ids[t * a.ids_stride + lane] = my_id;
    a.weights[t * a.weights_stride + lane] = mine * (a.scale / (a.normalise ? sum + 1e-20f : 1.0f));
  }
}

// A counting sort. The order within an expert is free: it decides only which column of a product a pair takes. Many pairs are shared out
// to a cluster of blocks, since atomics on shared memory take about a clock each; every block needs the counts of the others.
constexpr int kPlanThreads = 1024, kPlanBlocks = 8, kPlanSharedFrom = 4096;
template <int kBlocks>
__global__ __launch_bounds__(kPlanThreads) void moe_plan_kernel(const MoePlan plan) {
  __shared__ int count[kMaxExperts], begin[kMaxExperts], warp_total[2][32];
  pdl_trigger();
  pdl_wait();
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5, block = static_cast<int>(blockIdx.x);
  count[thread] = 0;
  __syncthreads();
  // f(pair, its expert) for the pairs of this block; the reads of 4 pairs are under way together.
  const auto each_pair = [&](auto f) {
    constexpr int kAtOnce = 4, kStep = kPlanThreads * kBlocks;
    for (int base = block * kPlanThreads + thread; base < plan.n_pairs; base += kAtOnce * kStep) {
      int id[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) id[i] = base + i * kStep < plan.n_pairs ? plan.ids[base + i * kStep] : -1;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (id[i] >= 0) f(base + i * kStep, id[i]);
    }
  };
  each_pair([&](int, int expert) { atomicAdd(&count[expert], 1); });
  // Of this thread's expert: all pairs, and those of the blocks before.
  int mine = 0, before = 0;
  if constexpr (kBlocks > 1) {
#if __CUDA_ARCH__ >= 900
    const auto cluster = cooperative_groups::this_cluster();
    cluster.sync();
    for (int b = 0; b < kBlocks; ++b) {
      const int n = cluster.map_shared_rank(count, b)[thread];
      if (b < block) before += n;
      mine += n;
    }
    cluster.sync();  // nobody leaves while its counts are read
#endif
  } else {
    __syncthreads();
    mine = count[thread];
  }
  // Exclusive sums over the experts of pairs and of tiles.
  const int tiles = (mine + plan.tile - 1) / plan.tile;
  int pairs_to = mine, tiles_to = tiles;
  for (int d = 1; d < 32; d <<= 1) {
    const int a = __shfl_up_sync(~0u, pairs_to, d), b = __shfl_up_sync(~0u, tiles_to, d);
    if (lane >= d) pairs_to += a, tiles_to += b;
  }
  if (lane == 31) warp_total[0][warp] = pairs_to, warp_total[1][warp] = tiles_to;
  __syncthreads();
  for (int w = 0; w < warp; ++w) pairs_to += warp_total[0][w], tiles_to += warp_total[1][w];
  const int first_pair = pairs_to - mine, first_tile = tiles_to - tiles;
  begin[thread] = first_pair + before;
  if (block == 0) {
    for (int i = 0; i < tiles; ++i)
      plan.tiles[first_tile + i] = make_int3(thread, first_pair + i * plan.tile, min(plan.tile, mine - i * plan.tile));
    int total = 0;
    for (int w = 0; w < 32; ++w) total += warp_total[1][w];
    for (int i = total + thread; i < plan.max_tiles; i += kPlanThreads) plan.tiles[i] = make_int3(0, 0, 0);
  }
  __syncthreads();
  each_pair([&](int pair, int expert) { plan.order[atomicAdd(&begin[expert], 1)] = pair; });
}

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
  pdl_trigger();
  pdl_wait();
  const int t = static_cast<int>(blockIdx.y), i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * 8;
  if (i >= n) return;
  const auto read = [](auto* v, const auto* from) {  // 8 numbers
#pragma unroll
    for (int k = 0; k < static_cast<int>(sizeof(*v) * 8 / 16); ++k)
      reinterpret_cast<uint4*>(v)[k] = load16(reinterpret_cast<const uint4*>(from) + k);
  };
  alignas(16) float sum[8] = {};
  if (shared != nullptr) read(sum, shared + t * shared_stride + i);
#pragma unroll 4
  for (int k = 0; k < top_k; ++k) {
    if (ids[t * top_k + k] < 0) continue;
    const float weight = weights[t * weights_stride + k];
    alignas(16) In v[8];
    read(v, pairs + static_cast<int64_t>(t * top_k + k) * pair_stride + i);
#pragma unroll
    for (int c = 0; c < 8; ++c) sum[c] = fmaf(weight, to_f32(v[c]), sum[c]);
  }
  alignas(16) Out out[8];
#pragma unroll
  for (int c = 0; c < 8; ++c) out[c] = from_f32<Out>(sum[c]);
#pragma unroll
  for (int k = 0; k < static_cast<int>(sizeof(out) / 16); ++k)
    reinterpret_cast<uint4*>(y + t * y_stride + i)[k] = reinterpret_cast<const uint4*>(out)[k];
}

template <typename T>
bool aligned16(const T* p, int64_t stride) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride * static_cast<int64_t>(sizeof(T)) % 16 == 0;
}

}  // namespace

cudaError_t launch_route(const RouteArgs& args, cudaStream_t stream) {
  if (args.n_experts > kMaxExperts || args.top_k > 32) return cudaErrorInvalidValue;
  if (args.group_score == 0 && args.n_experts <= 256)
    return launch(args.n_experts <= 64 ? route_plain_kernel<2> : route_plain_kernel<8>, dim3(static_cast<unsigned>(args.n_tokens)), 32, 0,
                  stream, args);
  const size_t shared = (2 * static_cast<size_t>(args.n_experts) + static_cast<size_t>(args.n_group)) * 5 + 16;
  return launch(route_kernel, dim3(static_cast<unsigned>(args.n_tokens)), 32, shared, stream, args);
}

cudaError_t launch_moe_plan(const MoePlan& plan, cudaStream_t stream) {
  if (plan.n_experts > kMaxExperts) return cudaErrorInvalidValue;
  if (plan.n_pairs < kPlanSharedFrom || !plan.clusters) return launch(moe_plan_kernel<1>, dim3(1), kPlanThreads, 0, stream, plan);
  return launch_clusters(moe_plan_kernel<kPlanBlocks>, kPlanBlocks, dim3(kPlanBlocks), kPlanThreads, 0, stream, plan);
}

cudaError_t launch_moe_combine(Mat pairs, const int* ids, Mat weights, Mat shared, Mat y, cudaStream_t stream) {
  return with_activation(pairs.type, [&](auto in) {
    return with_activation(y.type, [&](auto out) {
      using In = decltype(in);
      using Out = decltype(out);
      const auto* from = static_cast<const In*>(pairs.data);
      const auto* others = static_cast<const float*>(shared.data);
      auto* to = static_cast<Out*>(y.data);
      const bool wide = y.rows >= kWideRows && y.cols % 8 == 0 && aligned16(from, pairs.stride) && aligned16(others, shared.stride) &&
                        aligned16(to, y.stride);
      const int threads = wide ? kWideThreads : 256;
      const dim3 grid(static_cast<unsigned>(ceil_div(y.cols, wide ? 8 * threads : threads)), static_cast<unsigned>(y.rows));
      return launch(wide ? combine_wide_kernel<In, Out> : combine_kernel<In, Out>, grid, threads, 0, stream, from, pairs.stride, ids,
                    static_cast<const float*>(weights.data), weights.stride, weights.cols, others, shared.stride, to, y.stride, y.cols);
    });
  });
}

}  // namespace cachalot::cuda
