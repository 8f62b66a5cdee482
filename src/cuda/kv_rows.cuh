// Rows of the KV cache on the device, one number at a time, and groups of fp8 rows written. The arithmetic is that of ops/kv_codec.h.
#pragma once

#include <cuda_fp8.h>

#include <cfloat>

#include "cuda/device.cuh"
#include "ops/kv_layout.h"

namespace cachalot::cuda {

struct Fp8Row {};  // as an element type: rows are bytes

// Calls f with a value of the element type that rows are made of.
template <typename F>
cudaError_t with_rows(KvFormat format, F&& f) {
  switch (format) {
    case KvFormat::f32: return f(float{});
    case KvFormat::f16: return f(__half{});
    case KvFormat::bf16: return f(bf16{});
    case KvFormat::fp8: return f(Fp8Row{});
  }
  return cudaErrorInvalidValue;
}

__host__ __device__ inline int fp8_tail_at(int rank) { return rank + 4 * ((rank + kKvScaleGroup - 1) / kKvScaleGroup); }
__host__ __device__ inline int64_t fp8_bytes(int rank, int width) { return fp8_tail_at(rank) + 2 * (width - rank); }

__device__ __forceinline__ float e4m3_value(uint8_t code) { return to_f32(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3))); }

// Number i of a row of `width`; rank: how many of them fp8 rows hold as codes.
template <typename Kv>
__device__ __forceinline__ float read_kv(const void* pages, int64_t slot, int width, int rank, int i) {
  if constexpr (std::is_same_v<Kv, Fp8Row>) {
    const uint8_t* row = static_cast<const uint8_t*>(pages) + slot * fp8_bytes(rank, width);
    if (i < rank) return e4m3_value(row[i]) * *reinterpret_cast<const float*>(row + rank + i / kKvScaleGroup * 4);
    return to_f32(*reinterpret_cast<const bf16*>(row + fp8_tail_at(rank) + 2 * (i - rank)));
  } else {
    return to_f32(static_cast<const Kv*>(pages)[slot * width + i]);
  }
}

// A warp writes one group: v holds the numbers at 4 * lane of it, zeros from `rank` on.
__device__ __forceinline__ void write_fp8_group(uint8_t* row, int rank, int group, const float (&v)[4]) {
  const int lane = static_cast<int>(threadIdx.x) & 31, at = group * kKvScaleGroup + 4 * lane;
  const float largest = warp_max(fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3]))));
  const float scale = fmaxf(largest / 448.0f, FLT_MIN);
  if (lane == 0) *reinterpret_cast<float*>(row + rank + 4 * group) = scale;
  if (at >= rank) return;
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) codes |= static_cast<uint32_t>(__nv_cvt_float_to_fp8(v[i] / scale, __NV_SATFINITE, __NV_E4M3)) << (8 * i);
  *reinterpret_cast<uint32_t*>(row + at) = codes;
}

}  // namespace cachalot::cuda
