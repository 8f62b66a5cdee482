// The router's choice without groups (DeepSeek-V2 section 2.1.2, DeepSeek-V3 section 2.1.2), by one warp, all in registers.
#pragma once

#include "cuda/device.cuh"
#include "cuda/kernels.h"

namespace cachalot::cuda {

// The order of floats as unsigned integers; NaN below everything.
__device__ __forceinline__ uint32_t ordered(float v) {
  const uint32_t bits = __float_as_uint(v);
  return isnan(v) ? 0u : (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// Of up to 32 kEach experts for row t. Lane l holds the logits (and what steers the choice) of experts l, l + 32, ...; those past the last
// are ignored.
template <int kEach>
__device__ __forceinline__ void choose_plain(const RouteArgs& a, int t, const float (&logits)[kEach], const float (&bias)[kEach]) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  float score[kEach];
  uint32_t choice[kEach];
  float highest = -INFINITY, total = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    score[i] = i * 32 + lane < a.n_experts ? logits[i] : -INFINITY;
    highest = fmaxf(highest, score[i]);
  }
  if (!a.sigmoid) highest = warp_max(highest);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    score[i] = a.sigmoid ? 1.0f / (1.0f + expf(-score[i])) : expf(score[i] - highest);
    total += score[i];
  }
  if (!a.sigmoid) total = warp_sum(total);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (!a.sigmoid) score[i] /= total;
    choice[i] = i * 32 + lane < a.n_experts ? ordered(score[i] + bias[i]) + 1u : 0u;  // 0: not there, or taken
  }
  float sum = 0.0f, mine = 0.0f;
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

}  // namespace cachalot::cuda
