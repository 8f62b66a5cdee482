// Reading the records of layout.h: as mma operands (Frag), and one weight at a time (record_weight).
#pragma once

#include "cuda/device.cuh"
#include "cuda/layout.h"

namespace cachalot::cuda {

// bf16 pairs. 0x4300 is 128: codes below 128 fit its low mantissa bits exactly, so that subtracting 128 leaves the code.
// Before sm_90 there is only the fused form: a * 1 - b and a * b - 0 round alike.
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ uint32_t sub_bf16x2(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 900
  uint32_t d;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  return fma_bf16x2(a, 0x3f803f80u, b ^ 0x80008000u);
#endif
}
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 900
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  return fma_bf16x2(a, b, 0x80008000u);
#endif
}
// (a & mask) | bits in one instruction; with both constants as immediates the compiler takes two.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
  return d;
}
__device__ __forceinline__ float2 half2_of(uint32_t bits) {
  __half2 h;
  memcpy(&h, &bits, 4);
  return __half22float2(h);
}

// Where the high bits of code 2i lie: of word 2s + h of the codes (q5), or of row h (q6). Those of code 2i + 1 are 16 further.
__host__ __device__ constexpr int high_bit(bool q6, int word, int i) { return 8 * (i >> 1) + (q6 ? 2 : 1) * (2 * word + (i & 1)); }

// What one lane holds of 16 rows x 64 columns.
template <Tile kTile>
struct Frag {
  static constexpr TileInfo kInfo = tile_info(kTile);
  static constexpr int kCodeVectors = kTile == Tile::bf16 ? 4 : kInfo.code_bits == 8 ? 2 : 1;
  uint4 codes[kCodeVectors];
  uint32_t high[kTile == Tile::q6g16 ? 2 : 1];
  uint4 scales;

  // `from` is the record and `next` its scales_from; for bf16 `from` is the first element of the chunk in row g, and `next` the distance to
  // row g + 8 in elements.
  // When not `there`, nothing is read and the content is undefined.
  __device__ __forceinline__ void load(bool there, const uint8_t* from, int lane, int64_t next) {
    if constexpr (kTile == Tile::bf16) {
      const auto* row = reinterpret_cast<const bf16*>(from) + (lane & 3) * 8;
      load_stream(codes[0], row, there);
      load_stream(codes[1], row + next, there);
      load_stream(codes[2], row + 32, there);
      load_stream(codes[3], row + next + 32, there);
    } else {
#pragma unroll
      for (int i = 0; i < kCodeVectors; ++i) load_stream(codes[i], from + 512 * i + lane * 16, there);
      if constexpr (kTile == Tile::q5g32) load_word(high[0], from + kInfo.high_at + lane * 4, there);
      if constexpr (kTile == Tile::q6g16) load_pair(high[0], high[1], from + kInfo.high_at + lane * 8, there);
      const uint8_t* s = from + kInfo.scale_at;
      if constexpr (kTile == Tile::q4g32 || kTile == Tile::q6g16) {
        load_stream(scales, s + (lane >> 2) * 16, there);
      } else if constexpr (kTile == Tile::f8) {
        load_word(scales.x, s, there);
      } else if constexpr (kTile == Tile::q4g128) {
        s += next + (lane >> 2) * 4;
        load_word(scales.x, s, there);
        load_word(scales.y, s + kInfo.bytes, there);
      } else {
        load_pair(scales.x, scales.y, s + (lane >> 2) * 8, there);
      }
    }
  }

  // The integers of step `s` as the A operands of its two mmas: code - zero, or code + 128 for formats with a minimum, which absorbs it.
  __device__ __forceinline__ void operands(int s, uint32_t (&a)[2][4]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t pair[4];
      if constexpr (kTile == Tile::bf16) {
        const uint4 v = codes[2 * s + h];
        pair[0] = v.x, pair[1] = v.y, pair[2] = v.z, pair[3] = v.w;
      } else if constexpr (kTile == Tile::q8g32) {
        const uint4 v = codes[s];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t word = h == 0 ? (i < 2 ? v.x : v.y) : (i < 2 ? v.z : v.w), bytes = word >> (8 * (i & 1));
          // two's complement: low 7 bits, minus 128 when the top bit is set (bit 7 turns 128 into 256)
          pair[i] = sub_bf16x2(and_or(bytes, 0x007f007fu, 0x43004300u), and_or(bytes, 0x00800080u, 0x43004300u));
        }
      } else if constexpr (kTile == Tile::f8) {
        const uint4 v = codes[s];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t word = h == 0 ? (i < 2 ? v.x : v.y) : (i < 2 ? v.z : v.w), bytes = (i & 1) ? word : word << 8;
          // E4M3's exponent and mantissa in bf16's place are 2^-120 of the value, subnormals included
          pair[i] = mul_bf16x2(and_or(bytes, 0x80008000u, (bytes & 0x7f007f00u) >> 4), 0x7b807b80u);
        }
      } else {
        const uint32_t word = s == 0 ? (h == 0 ? codes[0].x : codes[0].y) : (h == 0 ? codes[0].z : codes[0].w);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t v = and_or(word >> (4 * i), 0x000f000fu, 0x43004300u);
          if constexpr (kTile == Tile::q5g32) {
            const int p = high_bit(false, 2 * s + h, i);
            v = and_or(p < 4 ? high[0] << (4 - p) : high[0] >> (p - 4), 0x00100010u, v);
          }
          if constexpr (kTile == Tile::q6g16) {
            const int p = high_bit(true, h, i);
            v = and_or(p < 4 ? high[s] << (4 - p) : high[s] >> (p - 4), 0x00300030u, v);
          }
          constexpr uint32_t kZero = kTile == Tile::q5g32 ? 0x43104310u : 0x43204320u;
          pair[i] = kInfo.has_min ? v : sub_bf16x2(v, kZero);
        }
      }
      a[0][h] = pair[0], a[0][2 + h] = pair[1];
      a[1][h] = pair[2], a[1][2 + h] = pair[3];
    }
  }
  // Scale (x) and what is subtracted (y) of row g + 8 h for mma `m` of step `s`.
  __device__ __forceinline__ float2 scale(int s, int m, int h) const {
    if constexpr (kTile == Tile::q4g32) {
      const float2 v = half2_of(h == 0 ? (s == 0 ? scales.x : scales.y) : (s == 0 ? scales.z : scales.w));
      return make_float2(v.x, fmaf(128.0f, v.x, v.y));
    } else if constexpr (kTile == Tile::q4g64 || kTile == Tile::q4g128) {
      const float2 v = half2_of(h == 0 ? scales.x : scales.y);
      return make_float2(v.x, fmaf(128.0f, v.x, v.y));
    } else if constexpr (kTile == Tile::q6g16) {
      const float2 v = half2_of(h == 0 ? (s == 0 ? scales.x : scales.y) : (s == 0 ? scales.z : scales.w));
      return make_float2(m == 0 ? v.x : v.y, 0.0f);
    } else if constexpr (kTile == Tile::f8) {
      return make_float2(__uint_as_float(scales.x), 0.0f);
    } else {
      const float2 v = half2_of(h == 0 ? scales.x : scales.y);
      return make_float2(s == 0 ? v.x : v.y, 0.0f);
    }
  }
  // The weights of step `s` themselves as A operands, scaled in f32 and rounded once to bf16. (Scaling in bf16 pairs takes a third fewer
  // instructions and gained 2 to 5%, but the rounded scales tripled the error.)
  __device__ __forceinline__ void weights(int s, uint32_t (&a)[2][4]) const {
    operands(s, a);
    if constexpr (kTile != Tile::bf16) {
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 sm = scale(s, m, i & 1);
          const float low = __uint_as_float(a[m][i] << 16), high_value = __uint_as_float(a[m][i] & 0xffff0000u);
          a[m][i] =
              kInfo.has_min ? pack_bf16(fmaf(low, sm.x, -sm.y), fmaf(high_value, sm.x, -sm.y)) : pack_bf16(low * sm.x, high_value * sm.x);
        }
    }
  }
};

// The column, within its step of 32, of code j of lane part c; and its inverse.
__host__ __device__ inline int step_column(bool q6, int c, int j) { return q6 ? (j >> 2) * 16 + 4 * c + (j & 3) : 8 * c + j; }
__host__ __device__ inline void step_place(bool q6, int k, int& c, int& j) {
  if (q6) {
    c = (k & 15) >> 2;
    j = ((k >> 4) << 2) | (k & 3);
  } else {
    c = k >> 3;
    j = k & 7;
  }
}

// The weight at (row, col) of a matrix of records `cols` wide.
__device__ inline float record_weight(Tile tile, const uint8_t* matrix, int cols, int row, int col) {
  const TileInfo t = tile_info(tile);
  const uint8_t* record = matrix + (static_cast<int64_t>(row >> 4) * (cols >> 6) + (col >> 6)) * t.bytes;
  const int r = row & 15, g = r & 7, h = r >> 3, k = col & 63, s = k >> 5;
  int c = 0, j = 0;
  step_place(tile == Tile::q6g16, k & 31, c, j);
  const int lane = 4 * g + c, i = j >> 1, odd = j & 1;
  const auto f16_at = [&](int index) { return __half2float(*reinterpret_cast<const __half*>(record + t.scale_at + 2 * index)); };
  if (t.code_bits == 8) {
    const int word = 2 * h + (j >> 2), byte = ((j & 1) << 1) | ((j >> 1) & 1);
    const uint8_t code = record[512 * s + lane * 16 + word * 4 + byte];
    if (tile == Tile::f8) {
      const __nv_bfloat16_raw raw{static_cast<unsigned short>(((code & 0x80) << 8) | ((code & 0x7f) << 4))};
      return to_f32(bf16(raw)) * 0x1p120f * *reinterpret_cast<const float*>(record + t.scale_at);
    }
    return f16_at(4 * g + 2 * h + s) * static_cast<float>(static_cast<int8_t>(code));
  }
  const uint32_t word = reinterpret_cast<const uint32_t*>(record)[lane * 4 + 2 * s + h];
  int code = static_cast<int>((word >> (4 * (i + 4 * odd))) & 15u);
  if (tile == Tile::q5g32) {
    const uint32_t high = reinterpret_cast<const uint32_t*>(record + t.high_at)[lane];
    code |= static_cast<int>((high >> (high_bit(false, 2 * s + h, i) + 16 * odd)) & 1u) << 4;
    return f16_at(4 * g + 2 * h + s) * static_cast<float>(code - 16);
  }
  if (tile == Tile::q6g16) {
    const uint32_t high = reinterpret_cast<const uint32_t*>(record + t.high_at)[2 * lane + s];
    code |= static_cast<int>((high >> (high_bit(true, h, i) + 16 * odd)) & 3u) << 4;
    return f16_at(8 * g + 4 * h + 2 * s + (j >> 2)) * static_cast<float>(code - 32);
  }
  if (tile == Tile::q4g128) record += scales_from(tile, col >> 6) + h * t.bytes;
  const int at = tile == Tile::q4g128 ? 2 * g : tile == Tile::q4g32 ? 8 * g + 4 * h + 2 * s : 4 * g + 2 * h;
  return fmaf(f16_at(at), static_cast<float>(code), -f16_at(at + 1));
}

}  // namespace cachalot::cuda
