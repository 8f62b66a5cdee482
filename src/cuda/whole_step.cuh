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
};

// acc += 128 columns of rows g and g + 8 times those of up to 4 kSets rows of x, four of which are a set: lane 4g + c gives bytes of row
// g / 2 of each set, the high ones where g is even, and gets the sums of row c.
template <int kSets>
__device__ __forceinline__ void multiply_step(const WholeStep& w, const uint4 (&x)[kSets][2], const float2 (&group)[kSets],
                                              float (&acc)[kSets][2]) {
  constexpr uint32_t kLow = 0x0f0f0f0fu, kHigh = 0xf0f0f0f0u;
  int low[kSets][4] = {}, high[kSets][4] = {};  // codes in the upper half of a byte count 16-fold
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint4 v = w.codes[r];
    const uint32_t a[4] = {v.x & kLow, v.y & kLow, v.z & kLow, v.w & kLow}, b[4] = {v.x & kHigh, v.y & kHigh, v.z & kHigh, v.w & kHigh};
#pragma unroll
    for (int s = 0; s < kSets; ++s) {
      mma_k32(low[s], a, x[s][r].x, x[s][r].y);
      mma_k32(high[s], b, x[s][r].z, x[s][r].w);
      if (r == 0) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 scale = half2_of(w.scales[h]);
        const int sum = (low[s][2 * h] * 256 + low[s][2 * h + 1]) * 16 + (high[s][2 * h] * 256 + high[s][2 * h + 1]);
        acc[s][h] = fmaf(scale.x * group[s].y, static_cast<float>(sum), acc[s][h]);
        acc[s][h] = fmaf(-scale.y, group[s].x, acc[s][h]);
      }
    }
  }
}

}  // namespace cachalot::cuda
