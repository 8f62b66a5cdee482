// Records of codes in groups of 32 or 16 columns against rows of x in whole numbers. A group is one product of the integer tensor cores,
// which take the codes as they are (4 bits), or as signed bytes less their zero, at the upper end of the byte where they have 5 or 6 bits.
// The rows of x have one scale per 128 columns, so that the codes' scales alone meet the sums of each group.
#pragma once

#include "cuda/formats.cuh"
#include "cuda/whole_numbers.cuh"

namespace cachalot::cuda {

// d = a b: 16 rows of four f32 that f16 can hold times columns of four f32 of at most 11 bits.
__device__ __forceinline__ void mma_exact_k4(float (&d)[4], float a0, float a1, float b) {
  asm volatile("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(b)), "f"(0.0f));
}
// (a & b) ^ c in one instruction.
__device__ __forceinline__ uint32_t and_xor(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Some neighbouring records, which are a warp's step.
template <Tile kTile>
struct RecordStep {
  static constexpr TileInfo kInfo = tile_info(kTile);
  static constexpr int kRecords = kInfo.code_bits <= 5 ? 2 : 1;
  static constexpr int kBytes = kRecords * kInfo.bytes;
  static constexpr int kGroups = 32 / kInfo.group;              // per step of 32 columns of a record
  static constexpr bool kWide = kInfo.has_min || kGroups == 2;  // four words of scales for two rows
  // What the codes are larger by.
  static constexpr float kFactor = kInfo.code_bits == 5 ? 0.125f : kInfo.code_bits == 6 ? 0.25f : 1.0f;

  // Asks for the step, if it is `there`, as a group of cp.async. `to` and `from` are at 16 bytes of each lane.
  static __device__ __forceinline__ void ask(bool there, uint32_t to, const uint8_t* from, int lane, uint64_t policy) {
    constexpr int kPieces = kBytes / 16;
#pragma unroll
    for (int i = 0; i < kPieces; i += 32) {
      const int copied = static_cast<int>(there && (i + 32 <= kPieces || lane < kPieces - i));
      asm volatile(
          "{.reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %3;}" ::"r"(to + 16 * i),
          "l"(from + 16 * i), "r"(copied), "l"(policy)
          : "memory");
    }
    cp_async_commit();
  }

  // The codes of a record: of each step of 32 columns the A operand of one product, or of two of half as many columns.
  static __device__ __forceinline__ void codes(const uint8_t* record, int lane, uint32_t (&a)[2][4]) {
    const uint4 v = *reinterpret_cast<const uint4*>(record + lane * 16);
    if constexpr (kInfo.code_bits == 8) {
      const uint4 next = *reinterpret_cast<const uint4*>(record + 512 + lane * 16);
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const uint4 w = t == 0 ? v : next;
        a[t][0] = __byte_perm(w.x, w.y, 0x6240), a[t][1] = __byte_perm(w.z, w.w, 0x6240);
        a[t][2] = __byte_perm(w.x, w.y, 0x7351), a[t][3] = __byte_perm(w.z, w.w, 0x7351);
      }
    } else {
      uint32_t high[2] = {};
      if constexpr (kInfo.code_bits == 5) high[0] = high[1] = *reinterpret_cast<const uint32_t*>(record + kInfo.high_at + lane * 4);
      if constexpr (kInfo.code_bits == 6) {
        const uint2 both = *reinterpret_cast<const uint2*>(record + kInfo.high_at + lane * 8);
        high[0] = both.x, high[1] = both.y;
      }
#pragma unroll
      for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t word = t == 0 ? (h == 0 ? v.x : v.y) : (h == 0 ? v.z : v.w);
          uint32_t low = 0, upper = 0;  // codes 0, 4, 1, 5 and 2, 6, 3, 7
          if constexpr (kInfo.code_bits == 4) {
            low = word & 0x0f0f0f0fu, upper = (word >> 4) & 0x0f0f0f0fu;
          } else {
            constexpr bool kFive = kInfo.code_bits == 5;
            constexpr uint32_t kLow = kFive ? 0x78787878u : 0x3c3c3c3cu, kHigh = kFive ? 0x80808080u : 0xc0c0c0c0u;
            const int first = kFive ? 7 - high_bit(false, 2 * t + h, 0) : 6 - high_bit(true, h, 0), next = first - (kFive ? 1 : 2);
            low = and_xor(high[t] << first, kHigh, and_xor(kFive ? word << 3 : word << 2, kLow, 0x80808080u));
            upper = and_xor(high[t] << next, kHigh, and_xor(kFive ? word >> 1 : word >> 2, kLow, 0x80808080u));
          }
          a[t][h] = kGroups == 1 ? low : __byte_perm(low, upper, 0x6420);
          a[t][2 + h] = kGroups == 1 ? upper : __byte_perm(low, upper, 0x7531);
        }
    }
  }
  // The scale of row g + 8 h in group k of step t of 32 columns.
  static __device__ __forceinline__ float scale(const uint4& scales, int t, int h, int k) {
    if constexpr (kWide) {
      const float2 v = half2_of(h == 0 ? (t == 0 ? scales.x : scales.y) : (t == 0 ? scales.z : scales.w));
      return k == 0 ? v.x : v.y;
    } else {
      const float2 v = half2_of(h == 0 ? scales.x : scales.y);
      return t == 0 ? v.x : v.y;
    }
  }

  // The lane's first bytes of x: of columns 8c and on of each step of 32, or of those that hold columns 4c .. 4c + 3.
  static __device__ __forceinline__ int x_part(int c) { return kGroups == 1 ? c : c >> 1; }

  // acc += the columns of a step of rows g and g + 8 times those of the first kUsed sets of four rows of x. Lane 4g + c gives bytes
  // of row g / 2 of each set, the high ones where g is even: x(s, r, at) of record r; and, where the codes have a minimum, of the sum of
  // its columns 32 c .. 32 c + 31 the upper part or the lower one, sums(s). It gets the sums of row c, whose scale is x_scale(s).
  template <int kUsed, int kSets, typename X, typename Sums, typename Scale>
  static __device__ __forceinline__ void multiply(const uint8_t* step, int lane, const X& x, const Sums& sums, const Scale& x_scale,
                                                  float (&acc)[kSets][2]) {
    float mins[2] = {};
    if constexpr (kInfo.has_min) {
      static_assert(kRecords == 2 && kInfo.group == 32);  // four groups, one of which is the lane's
      const uint8_t* at = step + ((lane >> 1) & 1) * kInfo.bytes + kInfo.scale_at + (lane >> 2) * 16 + (lane & 1) * 4;
#pragma unroll
      for (int h = 0; h < 2; ++h) mins[h] = half2_of(*reinterpret_cast<const uint32_t*>(at + 8 * h)).y;
    }
#pragma unroll
    for (int r = 0; r < kRecords; ++r) {
      const uint8_t* record = step + r * kInfo.bytes;
      uint32_t a[2][4];
      codes(record, lane, a);
      uint4 scales{};
      if constexpr (kWide) {
        scales = *reinterpret_cast<const uint4*>(record + kInfo.scale_at + (lane >> 2) * 16);
      } else {
        const uint2 both = *reinterpret_cast<const uint2*>(record + kInfo.scale_at + (lane >> 2) * 8);
        scales.x = both.x, scales.y = both.y;
      }
#pragma unroll
      for (int s = 0; s < kUsed; ++s) {
        const uint4 v = x(s, r, 0);
        float part[2] = {};
        if constexpr (kGroups == 2) {
          const uint4 next = x(s, r, 32);
          const uint32_t order = (lane & 1) == 0 ? 0x6420u : 0x7531u;
#pragma unroll
          for (int t = 0; t < 2; ++t)
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              const uint4 w = k == 0 ? v : next;
              int d[4] = {};
              mma_k16<true>(d, a[t][2 * k], a[t][2 * k + 1], __byte_perm(t == 0 ? w.x : w.z, t == 0 ? w.y : w.w, order));
#pragma unroll
              for (int h = 0; h < 2; ++h)
                part[h] = fmaf(scale(scales, t, h, k), static_cast<float>(d[2 * h] * 256 + d[2 * h + 1]), part[h]);
            }
        } else {
          if constexpr (kInfo.has_min)
            if (r == 0) {
              float d[4];
              mma_exact_k4(d, mins[0], mins[1], sums(s));
              part[0] = -d[0] - d[1], part[1] = -d[2] - d[3];
            }
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            int d[4] = {};
            mma_k32<!kInfo.has_min>(d, a[t], t == 0 ? v.x : v.z, t == 0 ? v.y : v.w);
#pragma unroll
            for (int h = 0; h < 2; ++h) part[h] = fmaf(scale(scales, t, h, 0), static_cast<float>(d[2 * h] * 256 + d[2 * h + 1]), part[h]);
          }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) acc[s][h] = fmaf(x_scale(s), part[h], acc[s][h]);
      }
    }
  }
};

}  // namespace cachalot::cuda
