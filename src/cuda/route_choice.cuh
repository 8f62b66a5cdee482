// The router's choice without groups (DeepSeek-V2 section 2.1.2, DeepSeek-V3 section 2.1.2): by one warp, all in registers, or by eight.
#pragma once

#include "cuda/device.cuh"
#include "cuda/kernels.h"

namespace cachalot::cuda {

// The order of floats as unsigned integers; NaN below everything.
__device__ __forceinline__ uint32_t ordered(float v) {
  const uint32_t bits = __float_as_uint(v);
  return isnan(v) ? 0u : (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// The largest of a warp's numbers, in one step.
__device__ __forceinline__ float warp_max_ordered(float v) {
  const uint32_t most = __reduce_max_sync(~0u, ordered(v));
  return __uint_as_float((most & 0x80000000u) != 0 ? most & 0x7fffffffu : ~most);
}

// Scores of up to 32 kEach experts, and what is larger for an expert that is rather chosen; 0: not there. Lane l holds the logits (and what
// steers the choice) of experts l, l + 32, ...; those past the last are ignored.
template <int kEach>
__device__ __forceinline__ void score_experts(const RouteArgs& a, const float (&logits)[kEach], const float (&bias)[kEach],
                                              float (&score)[kEach], uint32_t (&choice)[kEach]) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  float highest = -INFINITY, total = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    score[i] = i * 32 + lane < a.n_experts ? logits[i] : -INFINITY;
    highest = fmaxf(highest, score[i]);
  }
  if (!a.sigmoid) highest = warp_max_ordered(highest);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    score[i] = a.sigmoid ? 1.0f / (1.0f + expf(-score[i])) : expf(score[i] - highest);
    total += score[i];
  }
  if (!a.sigmoid) total = warp_sum(total);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (!a.sigmoid) score[i] /= total;
    choice[i] = i * 32 + lane < a.n_experts ? ordered(score[i] + bias[i]) + 1u : 0u;
  }
}

// Of up to 32 kEach experts for row t.
template <int kEach>
__device__ __forceinline__ void choose_plain(const RouteArgs& a, int t, const float (&logits)[kEach], const float (&bias)[kEach]) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  float score[kEach], sum = 0.0f, mine = 0.0f;
  uint32_t choice[kEach];
  score_experts(a, logits, bias, score, choice);
  int my_id = -1;
  for (int k = 0; k < a.top_k; ++k) {
    uint32_t best = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) best = choice[i] > best ? choice[i] : best;
    best = __reduce_max_sync(~0u, best);
    uint32_t id = ~0u;
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i)
      if (choice[i] == best) id = static_cast<uint32_t>(i * 32 + lane);
    id = __reduce_min_sync(~0u, id);
    float value = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (id == static_cast<uint32_t>(i * 32 + lane)) value = score[i], choice[i] = 0;
    value = __shfl_sync(~0u, value, static_cast<int>(id & 31u));
    sum += value;
    if (lane == k) mine = value, my_id = static_cast<int>(id);
  }
  if (lane < a.top_k) {
    a.ids[t * a.ids_stride + lane] = my_id;
    a.weights[t * a.weights_stride + lane] = mine * (a.scale / (a.normalise ? sum + 1e-20f : 1.0f));
  }
}

// The same for up to 64 experts by a block of kChoiceThreads: each warp scores all of them and finds the places of eight by counting those
// that come before.
constexpr int kChoiceThreads = 256, kChoiceExperts = 64;
struct ChoiceShared {
  uint32_t choice[kChoiceThreads / 32][kChoiceExperts];
  float chosen[32];
};
__device__ __forceinline__ void choose_by_place(const RouteArgs& a, int t, const float (&logits)[2], const float (&bias)[2],
                                                ChoiceShared& shared) {
  const int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31;
  float score[2];
  uint32_t choice[2];
  score_experts(a, logits, bias, score, choice);
  uint32_t* all = shared.choice[warp];
  all[lane] = choice[0], all[lane + 32] = choice[1];
  __syncwarp();
  // Four lanes for an expert, 16 comparisons each. Of equals the first comes first.
  const int expert = warp * 8 + (lane >> 2), first = (lane & 3) * 16;
  const uint32_t mine = all[expert];
  int place = 0;
#pragma unroll
  for (int i = 0; i < 16; i += 4) {
    const uint4 v = *reinterpret_cast<const uint4*>(all + first + i);
    const uint32_t others[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) place += others[j] > mine - (first + i + j < expert ? 1u : 0u) ? 1 : 0;
  }
  place += __shfl_xor_sync(~0u, place, 1);
  place += __shfl_xor_sync(~0u, place, 2);
  float weight = __shfl_sync(~0u, warp < 4 ? score[0] : score[1], expert & 31);
  const bool is_chosen = expert < a.n_experts && place < a.top_k && (lane & 3) == 0;
  if (a.normalise) {
    if (is_chosen) shared.chosen[place] = weight;
    __syncthreads();
    float sum = 1e-20f;
    for (int k = 0; k < a.top_k; ++k) sum += shared.chosen[k];
    weight /= sum;
  }
  if (is_chosen) {
    a.ids[t * a.ids_stride + place] = expert;
    a.weights[t * a.weights_stride + place] = weight * a.scale;
  }
}

}  // namespace cachalot::cuda
