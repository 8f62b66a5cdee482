// wgmma (sm_90a) as attention of prompts uses it: 64 query rows times 128 keys with both operands in shared memory, and 64 rows of softmax
// weights in registers times 128 columns of the values as they lie.
#pragma once

#include "cuda/wgmma.cuh"

namespace cachalot::cuda {

constexpr int kFlashBoxBytes = 128 * 128;  // 128 rows of 64 numbers in bf16, swizzled by 128 bytes

// B as [keys][columns] with the columns as wgmma's N: boxes of 64 columns, one after the other.
__device__ __forceinline__ uint64_t wgmma_values_operand(const void* at) {
  constexpr uint64_t kStrideOfBoxes = kFlashBoxBytes >> 4, kStrideOfEightRows = 1024 >> 4, kSwizzle128 = 1;
  return ((shared_address(at) & 0x3ffffu) >> 4) | (kStrideOfBoxes << 16) | (kStrideOfEightRows << 32) | (kSwizzle128 << 62);
}

// d (+)= a b^T: 64 rows x 128 keys, 16 columns of both.
__device__ __forceinline__ void wgmma_flash_scores(float (&d)[64], uint64_t a, uint64_t b, int add) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" CACHALOT_WGMMA_NAMES_64
               "}, %64, %65, p, 1, 1, 0, 0;}"
               : CACHALOT_WGMMA_SUMS_64(d, 0)
               : "l"(a), "l"(b), "r"(add));
}

// d += a b: 64 rows x 128 columns, 16 keys.
__device__ __forceinline__ void wgmma_flash_values(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" CACHALOT_WGMMA_NAMES_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
               : CACHALOT_WGMMA_SUMS_64(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

}  // namespace cachalot::cuda
