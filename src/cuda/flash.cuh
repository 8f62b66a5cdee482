// What the kernels of prompts' attention share: a chunk's result joins that of the chunks before.
#pragma once

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
