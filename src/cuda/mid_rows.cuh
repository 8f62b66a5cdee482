// Rows of x as the kernels of some rows per expert take them (moe_mid.h): groups of 128 columns in 16 units of 16 bytes per row, each made
// of four pairs of neighbouring columns, 8 apart, in the order of the codes that they meet.
#pragma once

#include "cuda/formats.cuh"
#include "cuda/moe_mid.h"

namespace cachalot::cuda {

// The weights beside them: a stage has two groups of 16 row tiles.
constexpr TileInfo kInfo = tile_info(Tile::q4g128);
constexpr int kGroupBytes = 2 * kInfo.bytes;  // of a row tile
constexpr int kStageGroups = 2, kRowTiles = 16, kSlotBytes = kStageGroups * kGroupBytes;

// x in bf16 times 2^80, or 2^76 where codes count 16-fold (moe_mid.cu); sums times 2^-53, since results come 2^-53 times too large.
constexpr float kXScale = 0x1p80f, kXScale16 = 0x1p76f, kSumScale = 0x1p-53f;
constexpr float kMostX = 0x1.fep47f;  // times 2^80 the largest bf16
constexpr float kCodes = 0x1p9f;      // codes as e4m3 (moe_mid_parts.cu) are so many times smaller

// Eight columns of x as words of two, those of unit `unit` of a group; and their sum.
__device__ __forceinline__ uint4 scaled_unit(const uint32_t (&words)[4], int unit, float& sum) {
  const float scale = unit % 2 == 0 ? kXScale : kXScale16;
  uint32_t out[4];
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float v[2] = {__uint_as_float(words[i] << 16), __uint_as_float(words[i] & 0xffff0000u)};
#pragma unroll
    for (float& x : v) {
      if (fabsf(x) > kMostX) x = copysignf(kMostX, x);
      sum += x;
    }
    out[i] = pack_bf16(v[0] * scale, v[1] * scale);
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}
// Where unit `unit` of row `row` goes within a group of tiles of `rows` rows, and the first of its pairs (the others follow 4 apart).
__device__ __forceinline__ int unit_place(int unit, int row, int rows) {
  return (unit >> 3) * rows * 128 + row * 128 + (((unit & 7) ^ (row & 7)) << 4);
}
__device__ __forceinline__ int unit_word(int unit) { return (unit >> 2) * 16 + (unit & 3); }
// The sum of a row's 16 units, which half a warp holds.
__device__ __forceinline__ float sum_of_units(float sum) {
  const unsigned half = 0xffffu << (threadIdx.x & 16u);
#pragma unroll
  for (int m = 8; m > 0; m >>= 1) sum += __shfl_xor_sync(half, sum, m);
  return sum * kSumScale;
}

// The powers of two that bring numbers of which `largest` is the largest below 256, and back.
__device__ __forceinline__ float2 scales_for(float largest) {
  const uint32_t exponent = min(max(__float_as_uint(largest) >> 23, 8u), 252u);
  return make_float2(__uint_as_float((261u - exponent) << 23), __uint_as_float((exponent - 7u) << 23));
}
__device__ __forceinline__ uint32_t pack_e4m3(float low, float high) {
  uint16_t out = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
#endif
  return out;
}
__device__ __forceinline__ float2 unpack_e4m3(uint32_t v) {
  uint32_t out = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"(static_cast<uint16_t>(v)));
#endif
  return half2_of(out);
}
// Half a warp has a group of a row, each lane four pairs of neighbouring columns, 8 apart. Together they make of x * scale the 16 units of
// 16 bytes of both its parts (the nearest e4m3, and what is left, which is exact for all but small numbers); a lane gets one. And their
// sum.
template <typename Pair>
__device__ __forceinline__ uint4 split_unit(const Pair& pair, int lane, float scale, float& sum) {
  uint32_t parts[2][2] = {};
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = pair(i);
    sum += x.x + x.y;
    const uint32_t first = pack_e4m3(x.x * scale, x.y * scale);
    const float2 there = unpack_e4m3(first);
    const uint32_t second = pack_e4m3(fmaf(x.x, scale, -there.x), fmaf(x.y, scale, -there.y));
    parts[0][i >> 1] |= first << (16 * (i & 1)), parts[1][i >> 1] |= second << (16 * (i & 1));
  }
  const unsigned half = 0xffffu << (threadIdx.x & 16u);
#pragma unroll
  for (int m = 8; m > 0; m >>= 1) sum += __shfl_xor_sync(half, sum, m);
  const bool of_second = (lane & 2) != 0;  // else this lane gets a unit of the first part
  uint32_t out[4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t mine = of_second ? parts[1][i] : parts[0][i], other = __shfl_xor_sync(half, of_second ? parts[0][i] : parts[1][i], 2),
                   a = of_second ? other : mine, b = of_second ? mine : other;
    out[2 * i] = __byte_perm(a, b, 0x5140), out[2 * i + 1] = __byte_perm(a, b, 0x7362);
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}
// The same as unit_place for the unit that split_unit gives to lane `lane` of half a warp.
__device__ __forceinline__ int part_place(int lane, int row, int rows) {
  return unit_place((lane >> 1 & 1) * 8 + (lane >> 2) * 2 + (lane & 1), row, rows);
}

}  // namespace cachalot::cuda
