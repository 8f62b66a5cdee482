// wgmma (sm_90a): D += A B with 64 rows of A in the registers of a warpgroup and B in shared memory, K-major with the 128-byte swizzle.
#pragma once

#include "cuda/device.cuh"

namespace cachalot::cuda {

// Keeps the compiler from moving what computes these registers behind a following wgmma_fence, which must see them written.
template <int kCount>
__device__ __forceinline__ void wgmma_pin(uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void wgmma_pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Rows of 128 bytes, 8 of them a swizzle atom of 1024 bytes; `at` may lie 32, 64 or 96 bytes into the rows.
constexpr uint64_t wgmma_operand_at(uint32_t shared) {
  constexpr uint64_t kStrideOfEightRows = 1024 >> 4, kSwizzle128 = 1;
  return ((shared & 0x3ffffu) >> 4) | (1ull << 16) | (kStrideOfEightRows << 32) | (kSwizzle128 << 62);
}
__device__ __forceinline__ uint64_t wgmma_operand(const void* at) { return wgmma_operand_at(shared_address(at)); }

// The registers of sums of an instruction, as its text names them and as operands.
#define CACHALOT_WGMMA_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CACHALOT_WGMMA_NAMES_12 CACHALOT_WGMMA_NAMES_8 ", %8, %9, %10, %11"
#define CACHALOT_WGMMA_NAMES_16 CACHALOT_WGMMA_NAMES_12 ", %12, %13, %14, %15"
#define CACHALOT_WGMMA_NAMES_24 CACHALOT_WGMMA_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define CACHALOT_WGMMA_NAMES_32 CACHALOT_WGMMA_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define CACHALOT_WGMMA_NAMES_48 \
  CACHALOT_WGMMA_NAMES_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define CACHALOT_WGMMA_NAMES_64                                                      \
  CACHALOT_WGMMA_NAMES_32                                                            \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define CACHALOT_WGMMA_NAMES_128                                                                 \
  CACHALOT_WGMMA_NAMES_64                                                                        \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"             \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"             \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define CACHALOT_WGMMA_SUMS_8(d, i) \
  "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), "+f"(d[(i) + 4]), "+f"(d[(i) + 5]), "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
#define CACHALOT_WGMMA_SUMS_12(d, i) CACHALOT_WGMMA_SUMS_8(d, i), "+f"(d[(i) + 8]), "+f"(d[(i) + 9]), "+f"(d[(i) + 10]), "+f"(d[(i) + 11])
#define CACHALOT_WGMMA_SUMS_16(d, i) CACHALOT_WGMMA_SUMS_8(d, i), CACHALOT_WGMMA_SUMS_8(d, (i) + 8)
#define CACHALOT_WGMMA_SUMS_24(d, i) CACHALOT_WGMMA_SUMS_16(d, i), CACHALOT_WGMMA_SUMS_8(d, (i) + 16)
#define CACHALOT_WGMMA_SUMS_32(d, i) CACHALOT_WGMMA_SUMS_16(d, i), CACHALOT_WGMMA_SUMS_16(d, (i) + 16)
#define CACHALOT_WGMMA_SUMS_48(d, i) CACHALOT_WGMMA_SUMS_32(d, i), CACHALOT_WGMMA_SUMS_16(d, (i) + 32)
#define CACHALOT_WGMMA_SUMS_64(d, i) CACHALOT_WGMMA_SUMS_32(d, i), CACHALOT_WGMMA_SUMS_32(d, (i) + 32)
#define CACHALOT_WGMMA_SUMS_128(d, i) CACHALOT_WGMMA_SUMS_64(d, i), CACHALOT_WGMMA_SUMS_64(d, (i) + 64)

// acc[4 i + j]: as the results of mma.m16n8k16 for columns 8 i .. 8 i + 7; warp w of the group has rows 16 w .. 16 w + 15.
template <int kN>
__device__ __forceinline__ void wgmma_bf16(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b);

template <>
__device__ __forceinline__ void wgmma_bf16<32>(float (&d)[16], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" CACHALOT_WGMMA_NAMES_16 "}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
               : CACHALOT_WGMMA_SUMS_16(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <>
__device__ __forceinline__ void wgmma_bf16<64>(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" CACHALOT_WGMMA_NAMES_32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
               : CACHALOT_WGMMA_SUMS_32(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <>
__device__ __forceinline__ void wgmma_bf16<96>(float (&d)[48], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {" CACHALOT_WGMMA_NAMES_48 "}, {%48, %49, %50, %51}, %52, 1, 1, 1, 0;"
               : CACHALOT_WGMMA_SUMS_48(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <>
__device__ __forceinline__ void wgmma_bf16<128>(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" CACHALOT_WGMMA_NAMES_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
               : CACHALOT_WGMMA_SUMS_64(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// The same, d = a b where not `add`, which is a constant; of bf16, or of e4m3 numbers, 32 columns of them.
template <int kN>
__device__ __forceinline__ void wgmma_bf16_add(float (&d)[kN / 2], const uint32_t (&a)[4], uint32_t b, uint32_t b_high, int add);
template <int kN>
__device__ __forceinline__ void wgmma_e4m3_add(float (&d)[kN / 2], const uint32_t (&a)[4], uint32_t b, uint32_t b_high, int add);
// `types` is what follows the number of columns in the instruction's name, `layout` what follows the signs of its operands.
#define CACHALOT_WGMMA_ADD(name, types, layout, columns, sums, a0, a1, a2, a3, low, high, flag)                                           \
  template <>                                                                                                                             \
  __device__ __forceinline__ void name<columns>(float(&d)[sums], const uint32_t(&a)[4], uint32_t b, uint32_t b_high, int add) {           \
    asm volatile("{.reg .pred p; .reg .b64 x; setp.ne.b32 p, " flag ", 0; mov.b64 x, {" low ", " high                                     \
                 "}; wgmma.mma_async.sync.aligned.m64n" #columns types " {" CACHALOT_WGMMA_NAMES_##sums "}, {" a0 ", " a1 ", " a2 ", " a3 \
                                                                                                        "}, x, p, 1, 1" layout ";}"       \
                 : CACHALOT_WGMMA_SUMS_##sums(d, 0)                                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(b_high), "r"(add));                                            \
  }
#define CACHALOT_BF16 wgmma_bf16_add, "k16.f32.bf16.bf16", ", 0"
#define CACHALOT_E4M3 wgmma_e4m3_add, "k32.f32.e4m3.e4m3", ""
#define CACHALOT_WGMMA_ADD_OF(...) CACHALOT_WGMMA_ADD(__VA_ARGS__)
CACHALOT_WGMMA_ADD_OF(CACHALOT_BF16, 48, 24, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
CACHALOT_WGMMA_ADD_OF(CACHALOT_BF16, 64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
CACHALOT_WGMMA_ADD_OF(CACHALOT_E4M3, 48, 24, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
CACHALOT_WGMMA_ADD_OF(CACHALOT_E4M3, 32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
#undef CACHALOT_WGMMA_ADD_OF
#undef CACHALOT_E4M3
#undef CACHALOT_BF16
#undef CACHALOT_WGMMA_ADD

}  // namespace cachalot::cuda
