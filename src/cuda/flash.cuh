// What the kernels of prompts' attention share: a chunk's result joins that of the chunks before.
#pragma once

#include "cuda/attention_kernels.h"
#include "cuda/device.cuh"

namespace cachalot::cuda {

// Weights of both results, and the log of the sum of all exponentials.
struct LseMerge {
  float before, here, total;
  __device__ LseMerge(float lse_here, float lse_before) {
    const float m = fmaxf(lse_here, lse_before);
    total = m + logf(expf(lse_here - m) + expf(lse_before - m));
    before = expf(lse_before - total);
    here = expf(lse_here - total);
  }
};

// What a row's sums are multiplied by, and what is there; a quad of lanes has one row. lse_here: log of its sum of exponentials, `sum`.
struct RowWeights {
  float before = 0.0f, here;
  __device__ RowWeights(const FlashArgs& a, int row, int head, float lse_here, float sum) : here(1.0f / sum) {
    if (a.lse == nullptr) return;
    const int lane = static_cast<int>(threadIdx.x) & 31;
    float& lse = a.lse[static_cast<int64_t>(row) * a.heads + head];
    const LseMerge merge(lse_here, lse);
    before = merge.before, here *= merge.here;
    __syncwarp(0xfu << (lane & ~3));
    if ((lane & 3) == 0) lse = merge.total;
  }
};

// x, y plus `before` times what is there, which is not read when it counts nothing.
template <typename Out>
__device__ __forceinline__ void store_pair(Out* out, float x, float y, float before) {
  if (before != 0.0f) x = fmaf(before, to_f32(out[0]), x), y = fmaf(before, to_f32(out[1]), y);
  if constexpr (std::is_same_v<Out, bf16>) {
    *reinterpret_cast<uint32_t*>(out) = pack_bf16(x, y);
  } else {
    out[0] = from_f32<Out>(x);
    out[1] = from_f32<Out>(y);
  }
}

}  // namespace cachalot::cuda
