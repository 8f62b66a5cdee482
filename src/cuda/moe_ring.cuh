// The ring of weights of moe_one.cu and its arithmetic: one block per multiprocessor, one warp of which asks for weights by bulk copies
// into a ring of stages while the other sixteen multiply. Codes of 4 bits meet x as whole numbers of 16 bits in two bytes, on the integer
// tensor cores: turning codes into bf16 takes 28 instructions per record and lane of a kind that starts every second clock, this takes 8.
#pragma once

#include "cuda/formats.cuh"
#include "cuda/whole_step.cuh"

namespace cachalot::cuda {

constexpr int kRingWarps = 16, kRingThreads = kRingWarps * 32 + 32, kMostStages = 8;

// A stage of records holds kChunks chunks of 64 columns of gate rows and as many of up rows, or 2 kChunks chunks of down rows; one of bf16
// 2 kChunks chunks of 16 rows, whose pitch lets 8 lanes read two rows without conflicts.
template <Tile kTile>
struct Stage {
  static constexpr bool kRows = kTile == Tile::bf16;
  static constexpr int kChunks = kRows ? 8 : tile_info(kTile).code_bits == 8 ? 16 : 32;
  static constexpr int kRecord = kRows ? kRecordCols * 2 : tile_info(kTile).bytes;
  static constexpr int kHalfPitch = kChunks * kRecord + 64, kWholePitch = 2 * kChunks * kRecord + 64;  // of rows
  static constexpr int kHalf = kRows ? kRecordRows * kHalfPitch : kChunks * kRecord;
  static constexpr int kBytes = 2 * kHalf;
  static constexpr bool kWhole = tile_info(kTile).has_min;     // 4-bit codes: x as whole numbers
  static constexpr int kUnit = kTile == Tile::q4g128 ? 2 : 1;  // chunks that a warp takes at once
  static constexpr int kGroup = kUnit == 2 ? WholeStep::kCols
                                : kWhole   ? tile_info(kTile).group
                                           : kRecordCols,
                       kGroups = kUnit == 2 ? 1 : kRecordCols / kGroup;  // per unit
};

__host__ __device__ inline int share_of(int n, int block, int blocks) { return (n - block + blocks - 1) / blocks; }

// The ring as its two sides see it: which stage is next, and how often the ring has gone round.
struct Ring {
  int stage = 0, stages;
  uint32_t round = 0;
  __device__ __forceinline__ void next() {
    if (++stage == stages) stage = 0, round ^= 1u;
  }
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ void prefetch_l2(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
}
__device__ __forceinline__ void meet_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(kRingWarps * 32) : "memory"); }

// Record `chunk` of a stage, or of bf16 that chunk of 16 rows `pitch` apart.
template <Tile kTile>
__device__ __forceinline__ Frag<kTile> stage_record(const uint8_t* stage, int chunk, int pitch, int lane) {
  const uint8_t* from = stage + chunk * Stage<kTile>::kRecord;
  Frag<kTile> f;
  if constexpr (kTile == Tile::bf16) {
    const uint8_t* row = from + (lane >> 2) * pitch + (lane & 3) * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) f.codes[i] = *reinterpret_cast<const uint4*>(row + (i & 1) * 8 * pitch + (i >> 1) * 64);
  } else {
    constexpr TileInfo kInfo = tile_info(kTile);
#pragma unroll
    for (int i = 0; i < Frag<kTile>::kCodeVectors; ++i) f.codes[i] = *reinterpret_cast<const uint4*>(from + 512 * i + lane * 16);
    const uint8_t* s = from + kInfo.scale_at;
    if constexpr (kTile == Tile::q4g32) {
      f.scales = *reinterpret_cast<const uint4*>(s + (lane >> 2) * 16);
    } else if constexpr (kTile == Tile::f8) {
      f.scales.x = *reinterpret_cast<const uint32_t*>(s);
    } else {
      const uint2 v = *reinterpret_cast<const uint2*>(s + (lane >> 2) * 8);
      f.scales.x = v.x, f.scales.y = v.y;
    }
  }
  return f;
}

// acc += rows g and g + 8 of a record of 4-bit codes times 64 columns of up to four rows of x in whole numbers: of the mma's eight columns
// the even ones are the high bytes of a row and the odd ones the low bytes; codes in the upper half of a byte count 16-fold. Lane 4g + c
// gives bytes of row g / 2 (`x`) and gets the sums of row c, whose groups' sums and scales are `groups`.
template <Tile kTile>
__device__ __forceinline__ void multiply_whole(const Frag<kTile>& w, const uint4& x, const float2 (&groups)[Stage<kTile>::kGroups],
                                               float (&acc)[2]) {
  using S = Stage<kTile>;
  constexpr uint32_t kLow = 0x0f0f0f0fu, kHigh = 0xf0f0f0f0u;
  const uint4 v = w.codes[0];
  int low[S::kGroups][4] = {}, high[S::kGroups][4] = {};
  if constexpr (S::kGroups == 1) {
    mma_k32(low[0], {v.x & kLow, v.y & kLow, v.z & kLow, v.w & kLow}, x.x, x.y);
    mma_k32(high[0], {v.x & kHigh, v.y & kHigh, v.z & kHigh, v.w & kHigh}, x.z, x.w);
  } else {
    mma_k16(low[0], v.x & kLow, v.y & kLow, x.x);
    mma_k16(low[1], v.z & kLow, v.w & kLow, x.y);
    mma_k16(high[0], v.x & kHigh, v.y & kHigh, x.z);
    mma_k16(high[1], v.z & kHigh, v.w & kHigh, x.w);
  }
#pragma unroll
  for (int i = 0; i < S::kGroups; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 scale = half2_of(S::kGroups == 1 ? (h == 0 ? w.scales.x : w.scales.y)
                                                    : (h == 0 ? (i == 0 ? w.scales.x : w.scales.y) : (i == 0 ? w.scales.z : w.scales.w)));
      const int sum = (low[i][2 * h] * 256 + low[i][2 * h + 1]) * 16 + (high[i][2 * h] * 256 + high[i][2 * h + 1]);
      acc[h] = fmaf(scale.x * groups[i].y, static_cast<float>(sum), acc[h]);
      acc[h] = fmaf(-scale.y, groups[i].x, acc[h]);
    }
}

// All blocks of the grid meet, which must all run at once; `barrier` counts the arrivals of all launches.
__device__ __forceinline__ void meet_blocks(unsigned long long* barrier, int n_blocks) {
  meet_consumers();
  if (threadIdx.x == 0) {
    const auto blocks = static_cast<unsigned long long>(n_blocks);
    unsigned long long there = 0;
    asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], 1;" : "=l"(there) : "l"(barrier) : "memory");
    const unsigned long long all = (there / blocks + 1) * blocks;
    do asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(there) : "l"(barrier) : "memory");
    while (there < all);
  }
  meet_consumers();
}
#endif

}  // namespace cachalot::cuda
