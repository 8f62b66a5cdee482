// The router's choice (DeepSeek-V2 section 2.1.2, DeepSeek-V3 section 2.1.2), and the sorting of (token, expert) pairs. Numbers of pairs
// per expert never leave the device.
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
  if (plan.drawn != nullptr && block == 0 && thread < 2) plan.drawn[thread] = 0;
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

}  // namespace cachalot::cuda
