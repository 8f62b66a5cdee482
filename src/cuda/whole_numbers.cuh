// Activations as whole numbers of 16 bits in two bytes, which meet codes of 4 bits on the integer tensor cores.
#pragma once

#include "cuda/device.cuh"
#include "cuda/layout.h"

namespace cachalot::cuda {

// d += a b: codes of 16 rows times columns of signed bytes.
template <bool kSigned = false>
__device__ __forceinline__ void mma_k32(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kSigned)
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <bool kSigned = false>
__device__ __forceinline__ void mma_k16(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  if constexpr (kSigned)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a0), "r"(a1), "r"(b));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a0), "r"(a1), "r"(b));
}

// Eight columns of x, which are a lane's in a step of a record, as whole numbers of at most 127 * 256: the high and low bytes in the order
// of its codes (first, first + 4, first + 1, first + 5 for first = 0 and 2), and the sum and 1 / 16 of the scale of their group.
struct WholePart {
  uint32_t high[2], low[2];
  float2 group;
};
__device__ __forceinline__ WholePart whole_part(const float (&x)[8], float sum_of_group, float largest_of_group) {
  constexpr float kMost = 127.0f * 256.0f;
  const float inverse = largest_of_group > 0.0f ? kMost / largest_of_group : 0.0f;
  int q[8], high[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    q[j] = __float2int_rn(x[j] * inverse), high[j] = (q[j] + 128) >> 8;
    q[j] -= high[j] * 256;
  }
  const auto bytes = [](const int(&b)[8], int first) {
    return static_cast<uint32_t>((b[first] & 255) | (b[first + 4] & 255) << 8 | (b[first + 1] & 255) << 16 | (b[first + 5] & 255) << 24);
  };
  return {
      {bytes(high, 0), bytes(high, 2)}, {bytes(q, 0), bytes(q, 2)}, make_float2(sum_of_group, largest_of_group * (1.0f / (16.0f * kMost)))};
}
// Of `sum` and `largest` of eight columns each, those of the kLanes neighbouring lanes that call together.
template <int kLanes>
__device__ __forceinline__ void join_parts(float& sum, float& largest) {
#pragma unroll
  for (int m = 1; m < kLanes; m *= 2) {
    sum += __shfl_xor_sync(~0u, sum, m);
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, m));
  }
}
// The same for eight bf16, whose group's neighbouring kGroup / 8 lanes call together.
template <int kGroup>
__device__ __forceinline__ WholePart whole_part(const uint4& v) {
  const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
  float x[8], sum = 0.0f, largest = 0.0f;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    x[j] = __uint_as_float((j & 1) == 0 ? pairs[j / 2] << 16 : pairs[j / 2] & 0xffff0000u);
    sum += x[j];
    largest = fmaxf(largest, fabsf(x[j]));
  }
  join_parts<kGroup / 8>(sum, largest);
  return whole_part(x, sum, largest);
}
// The sum of the part's whole numbers.
__device__ __forceinline__ int whole_sum(const WholePart& part) {
  constexpr int kOnes = 0x01010101;
  const auto sum = [](const uint32_t(&bytes)[2]) {
    return __dp4a(static_cast<int>(bytes[0]), kOnes, __dp4a(static_cast<int>(bytes[1]), kOnes, 0));
  };
  return sum(part.high) * 256 + sum(part.low);
}
// Where they go, for part i (columns 8 i and on) of a row: per chunk of 64 columns 64 high bytes, then 64 low ones, each of the four lanes'
// words being [step 0, step 1] of first = 0, then of 2; or, for weights in groups of a step or less, both words of step 0, then of 1.
template <bool kFine = false>
__device__ __forceinline__ void store_whole(uint8_t* row, int i, const WholePart& part) {
  constexpr int kNext = kFine ? 1 : 2;
  uint32_t* at = reinterpret_cast<uint32_t*>(row + (i >> 3) * (kRecordCols * 2) + (i & 3) * 16) + ((i >> 2) & 1) * (3 - kNext);
  at[0] = part.high[0], at[kNext] = part.high[1];
  at[16] = part.low[0], at[16 + kNext] = part.low[1];
}

}  // namespace cachalot::cuda
