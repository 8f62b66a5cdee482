// Two neighbouring records of 4-bit codes in groups of 128 against rows of x in whole numbers.
#pragma once

#include "cuda/formats.cuh"
#include "cuda/whole_numbers.cuh"

namespace cachalot::cuda {

// What a lane holds of the records: codes, and scale and minimum of rows g and g + 8.
struct WholeStep {
  static constexpr TileInfo kInfo = tile_info(Tile::q4g128);
  static constexpr int kCols = 128, kBytes = 2 * kInfo.bytes;
  uint4 codes[2];
  uint32_t scales[2];

  __device__ __forceinline__ void load(bool there, const uint8_t* from, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      load_stream(codes[r], from + r * kInfo.bytes + lane * 16, there);
      load_word(scales[r], from + r * kInfo.bytes + kInfo.scale_at + (lane >> 2) * 4, there);
    }
  }
  __device__ __forceinline__ void load_shared(const uint8_t* from, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      codes[r] = *reinterpret_cast<const uint4*>(from + r * kInfo.bytes + lane * 16);
      scales[r] = *reinterpret_cast<const uint32_t*>(from + r * kInfo.bytes + kInfo.scale_at + (lane >> 2) * 4);
    }
  }
};

// Asks for the records that are `there`, as a group of cp.async: a lane's codes, and by lanes below 4 scales and minima, those of rows
// 0 .. 7 in the first record and of rows 8 .. 15 in the second. `to` and `from` are at the lane's codes.
__device__ __forceinline__ void ask_for_step(bool there, uint32_t to, const uint8_t* from, int lane, uint64_t policy) {
  constexpr TileInfo kInfo = WholeStep::kInfo;
  const int scales = (lane >> 1) * kInfo.bytes + kInfo.scale_at + (lane & 1) * 16 - lane * 16;
  asm volatile(
      "{.reg .pred p, q;\n"
      "setp.ne.u32 p, %4, 0;\n"
      "setp.lt.and.u32 q, %5, 4, p;\n"
      "@p cp.async.cg.shared.global.L2::cache_hint [%0], [%2], 16, %7;\n"
      "@p cp.async.cg.shared.global.L2::cache_hint [%0+%6], [%2+%6], 16, %7;\n"
      "@q cp.async.cg.shared.global.L2::cache_hint [%1], [%3], 16, %7;\n"
      "cp.async.commit_group;}" ::"r"(to),
      "r"(to + scales), "l"(from), "l"(from + scales), "r"(static_cast<int>(there)), "r"(lane), "n"(kInfo.bytes), "l"(policy)
      : "memory");
}

// acc += 128 columns of rows g and g + 8 times those of the first n_sets of kSets times four rows of x. Lane 4g + c gives bytes of row g /
// 2 of each set, the high ones where g is even: x(s, r) of record r; and gets the sums of row c, whose sum and scale are group(s).
template <int kSets, typename X, typename Group>
__device__ __forceinline__ void multiply_step(const WholeStep& w, int n_sets, const X& x, const Group& group, float (&acc)[kSets][2]) {
  constexpr uint32_t kLow = 0x0f0f0f0fu, kHigh = 0xf0f0f0f0u;
  uint32_t a[2][4], b[2][4];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint4 v = w.codes[r];
    a[r][0] = v.x & kLow, a[r][1] = v.y & kLow, a[r][2] = v.z & kLow, a[r][3] = v.w & kLow;
    b[r][0] = v.x & kHigh, b[r][1] = v.y & kHigh, b[r][2] = v.z & kHigh, b[r][3] = v.w & kHigh;
  }
  const float2 scale[2] = {half2_of(w.scales[0]), half2_of(w.scales[1])};
#pragma unroll
  for (int s = 0; s < kSets; ++s) {
    if (s >= n_sets) break;
    int low[4] = {}, high[4] = {};  // codes in the upper half of a byte count 16-fold
    const float2 of_group = group(s);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4 v = x(s, r);
      mma_k32(low, a[r], v.x, v.y);
      mma_k32(high, b[r], v.z, v.w);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int sum = (low[2 * h] * 256 + low[2 * h + 1]) * 16 + (high[2 * h] * 256 + high[2 * h + 1]);
      acc[s][h] = fmaf(scale[h].x * of_group.y, static_cast<float>(sum), acc[s][h]);
      acc[s][h] = fmaf(-scale[h].y, of_group.x, acc[s][h]);
    }
  }
}

}  // namespace cachalot::cuda
