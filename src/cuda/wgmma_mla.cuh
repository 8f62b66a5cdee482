// wgmma (sm_90a) as absorbed MLA uses it: 64 heads times the cached rows, with both operands in shared memory or A in registers, and rows
// of the cache as they lie (64 columns per tile, 128-byte swizzle) read along their columns for the scores and along their rows for the
// values.
#pragma once

#include "cuda/wgmma.cuh"

namespace cachalot::cuda {

constexpr int kWgmmaTileBytes = 64 * 128;  // 64 rows of 64 numbers

// B as [keys][columns] with the columns as wgmma's N: tiles of 64 columns, one after the other.
__device__ __forceinline__ uint64_t wgmma_operand_by_rows(const void* at) {
  constexpr uint64_t kStrideOfTiles = kWgmmaTileBytes >> 4, kStrideOfEightRows = 1024 >> 4, kSwizzle128 = 1;
  return ((shared_address(at) & 0x3ffffu) >> 4) | (kStrideOfTiles << 16) | (kStrideOfEightRows << 32) | (kSwizzle128 << 62);
}

#define CACHALOT_WGMMA_SCORES(types)                                                                                                  \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." types " {" CACHALOT_WGMMA_NAMES_32 \
               "}, %32, %33, p, 1, 1, 0, 0;}"                                                                                         \
               : CACHALOT_WGMMA_SUMS_32(d, 0)                                                                                         \
               : "l"(a), "l"(b), "r"(add))
#define CACHALOT_WGMMA_256(types, by_rows)                                                                                              \
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." types " {" CACHALOT_WGMMA_NAMES_128 "}, %128, %129, 1, 1, 1, 0, " by_rows \
               ";"                                                                                                                      \
               : CACHALOT_WGMMA_SUMS_128(d, 0)                                                                                          \
               : "l"(a), "l"(b))

// Numbers in bf16, or f16 when kHalf.
// d (+)= a b^T: 64 rows x 64 keys, 16 columns of both.
template <bool kHalf>
__device__ __forceinline__ void wgmma_scores(float (&d)[32], uint64_t a, uint64_t b, int add) {
  if constexpr (kHalf)
    CACHALOT_WGMMA_SCORES("f16.f16");
  else
    CACHALOT_WGMMA_SCORES("bf16.bf16");
}

// d += a b: 64 rows x 256 columns, 16 keys.
template <bool kHalf>
__device__ __forceinline__ void wgmma_values(float (&d)[128], uint64_t a, uint64_t b) {
  if constexpr (kHalf)
    CACHALOT_WGMMA_256("f16.f16", "1");
  else
    CACHALOT_WGMMA_256("bf16.bf16", "1");
}
// d += a b^T: 64 rows x 256 rows of b, 16 columns of both.
__device__ __forceinline__ void wgmma_rows256(float (&d)[128], uint64_t a, uint64_t b) { CACHALOT_WGMMA_256("bf16.bf16", "0"); }
#undef CACHALOT_WGMMA_SCORES
#undef CACHALOT_WGMMA_256

}  // namespace cachalot::cuda
