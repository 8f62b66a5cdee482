// The plan of the experts of some rows each, and their rows of x in place: one launch.
#include <algorithm>

#include "cuda/mid_rows.cuh"

namespace cachalot::cuda {
namespace {

constexpr int kRowsThreads = 512, kIdsAtOnce = 8, kMostBlockPairs = 512, kMostExperts = 1024, kMostPairs = 0x7fff;

// So few registers that a block of the launch behind has room beside one.
#if __CUDA_ARCH__ == 890
constexpr int kRowsBlocks = 3;
#else
constexpr int kRowsBlocks = 4;
#endif

// A block per `each` tokens: finds the places of their pairs and puts their rows there. Every block counts all pairs by itself: a row's
// place is the number of pairs before it that go to its expert. Tile e is the first one of expert e, so that its weights are known before
// the routing; further tiles follow behind those.
template <bool kParts>
__global__ __launch_bounds__(kRowsThreads, kRowsBlocks) void mid_rows_kernel(Mat x, const MidPlan plan, MidRows routed, MidRows shared,
                                                                             int each) {
  // Of experts how many pairs, those before this block's in the upper half; then its first further tile.
  extern __shared__ int counts[];
  pdl_trigger();
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, tile = plan.tile, n_experts = plan.n_experts;
  const int first = static_cast<int>(blockIdx.x) * each, n_tokens = min(each, x.rows - first), n_mine = n_tokens * plan.top_k;
  int *further = counts + n_experts, *ids = further + n_experts, *places = ids + n_mine, *largest = places + n_mine;
  for (int i = thread; i < n_experts; i += kRowsThreads) counts[i] = 0;
  for (int i = thread; i < n_tokens; i += kRowsThreads) largest[i] = 0;
  __syncthreads();
  pdl_wait();
  int some[kIdsAtOnce];
  const auto ask_for_ids = [&](int begin) {
#pragma unroll
    for (int j = 0; j < kIdsAtOnce; ++j) {
      const int i = begin + j * kRowsThreads;
      some[j] = i < plan.n_pairs ? __ldcg(plan.ids + i) : -1;
    }
  };
  ask_for_ids(thread);  // together with the first numbers of x
  const int n_groups = x.cols / kMidGroup, unit = thread & 15;
  for (int i = kParts ? thread >> 4 : n_tokens * n_groups; i < n_tokens * n_groups; i += kRowsThreads / 16) {
    const int token = i / n_groups, group = i % n_groups;
    const uint4 v = load16(static_cast<const bf16*>(x.data) + (first + token) * x.stride + group * kMidGroup + unit * 8);
    float most = 0.0f;
    for (const uint32_t w : {v.x, v.y, v.z, v.w})
      most = fmaxf(most, fmaxf(fabsf(__uint_as_float(w << 16)), fabsf(__uint_as_float(w & 0xffff0000u))));
    atomicMax(&largest[token], __float_as_int(most));
  }
  for (int begin = thread; begin < plan.n_pairs; begin += kIdsAtOnce * kRowsThreads) {
    if (begin != thread) ask_for_ids(begin);
#pragma unroll
    for (int j = 0; j < kIdsAtOnce; ++j) {
      const int i = begin + j * kRowsThreads, mine = i - first * plan.top_k;
      if (i < plan.n_pairs && mine >= 0 && mine < n_mine) ids[mine] = some[j];
      if (some[j] >= 0) atomicAdd(&counts[some[j]], mine < 0 ? 0x10001 : 1);
    }
  }
  __syncthreads();
  if (thread < 32) {
    int total = 0;
    for (int base = 0; base < n_experts; base += 32) {
      const int i = base + lane, own = i < n_experts ? max(0, ((counts[i] & 0xffff) - 1) / tile) : 0;
      int sum = own;
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        const int v = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += v;
      }
      if (i < n_experts) further[i] = n_experts + total + sum - own;
      total += __shfl_sync(~0u, sum, 31);
    }
    if (blockIdx.x == 0) {
      for (int i = n_experts + total + lane; i < plan.max_tiles; i += 32) plan.tiles[i] = make_int2(0, 0);
      for (int i = lane; i < plan.n_states; i += 32) plan.state[i] = i == 1 ? n_experts + total : 0;
    }
  }
  __syncthreads();
  if (blockIdx.x == 0)
    for (int i = thread; i < n_experts; i += kRowsThreads) {
      const int count = counts[i] & 0xffff;
      plan.tiles[i] = make_int2(i, min(count, tile));
      for (int j = 1; j * tile < count; ++j) plan.tiles[further[i] + j - 1] = make_int2(i, min(count - j * tile, tile));
    }
  for (int i = thread; i < n_mine; i += kRowsThreads) {
    const int id = ids[i];
    int place = -1;  // a tile, and in the lower byte a row of it
    if (id >= 0) {
      int rank = counts[id] >> 16, in = id;
      for (int j = 0; j < i; ++j) rank += ids[j] == id ? 1 : 0;
      if (rank >= tile) in = further[id] + rank / tile - 1, rank %= tile;
      plan.pairs[in * tile + rank] = first * plan.top_k + i;
      place = in << 8 | rank;
    }
    places[i] = place;
  }
  __syncthreads();
  for (int i = thread >> 4; i < n_tokens * n_groups; i += kRowsThreads / 16) {
    const int token = i / n_groups, group = i % n_groups;
    const uint32_t* from =
        reinterpret_cast<const uint32_t*>(static_cast<const bf16*>(x.data) + (first + token) * x.stride + group * kMidGroup) +
        unit_word(unit);
    float2 scale = make_float2(1.0f, 1.0f);
    float sum = 0.0f;
    uint4 v;
    if constexpr (kParts) {
      scale = scales_for(__int_as_float(largest[token]));
      const auto pair = [&](int j) { return make_float2(__uint_as_float(from[4 * j] << 16), __uint_as_float(from[4 * j] & 0xffff0000u)); };
      v = split_unit(pair, unit, scale.x, sum);
    } else {
      v = scaled_unit({from[0], from[4], from[8], from[12]}, unit, sum);
      sum = sum_of_units(sum);
    }
    const auto store = [&](const MidRows& to, int in, int row) {
      const int64_t at = static_cast<int64_t>(in) * n_groups + group;
      *reinterpret_cast<uint4*>(to.x + at * tile * (2 * kMidGroup) + (kParts ? part_place(unit, row, tile) : unit_place(unit, row, tile))) =
          v;
      if (unit != 0) return;
      float* scales = to.sums + at * mid_scales(tile);
      scales[row] = sum * scale.x;
      if (!kParts) return;
      scales[tile + row] = scale.y;
      if (row == 0) scales[2 * tile] = kCodes;
    };
    for (int k = 0; k < plan.top_k; ++k)
      if (const int place = places[token * plan.top_k + k]; place >= 0) store(routed, place >> 8, place & 0xff);
    if (shared.x != nullptr) store(shared, (first + token) / tile, (first + token) % tile);
  }
}

}  // namespace

// Counts of pairs share a word with counts of those before.
bool mid_supports(const MidPlan& p) { return p.n_experts <= kMostExperts && p.n_pairs <= kMostPairs && p.top_k <= kMostBlockPairs; }

cudaError_t launch_mid_rows(Mat x, const MidPlan& plan, MidRows routed, MidRows shared, cudaStream_t stream) {
  const int each = std::max(1, std::min(ceil_div(x.rows, 128), kMostBlockPairs / plan.top_k));
  const auto bytes = static_cast<size_t>(8 * (plan.n_experts + each * plan.top_k) + 4 * each);
  return launch(mid_in_parts(plan.tile) ? mid_rows_kernel<true> : mid_rows_kernel<false>,
                dim3(static_cast<unsigned>(ceil_div(x.rows, each))), kRowsThreads, bytes, stream, x, plan, routed, shared, each);
}

}  // namespace cachalot::cuda
