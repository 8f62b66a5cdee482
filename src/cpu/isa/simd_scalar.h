// Vectors of 8 as plain arrays: the baseline that any x86-64 (or other) CPU runs. No fused multiply-add, so fma() rounds twice.
#pragma once

#include "cpu/isa/kernels.h"

namespace cachalot::cpu {
namespace {

inline constexpr int kWidth = 8;
inline constexpr bool kTableLevels = false;             // 4-bit codes become numbers by table look-up rather than by arithmetic
inline constexpr int kTileTokens = 1, kGemvTokens = 1;  // tokens of the register tiles of gemm and gemv

struct F {
  float v[kWidth];
};
struct I {
  int32_t v[kWidth];
};

#define CACHALOT_EACH_LANE for (int i = 0; i < kWidth; ++i)

inline uint32_t bits_of(float value) {
  uint32_t out;
  __builtin_memcpy(&out, &value, sizeof out);
  return out;
}
inline float float_of(uint32_t bits) {
  float out;
  __builtin_memcpy(&out, &bits, sizeof out);
  return out;
}

inline F zero() { return {}; }
inline F set1(float a) {
  F out;
  CACHALOT_EACH_LANE out.v[i] = a;
  return out;
}
inline F load(const float* p) {
  F out;
  __builtin_memcpy(&out, p, sizeof out);
  return out;
}
inline void store(float* p, F a) { __builtin_memcpy(p, &a, sizeof a); }
inline F add(F a, F b) {
  CACHALOT_EACH_LANE a.v[i] += b.v[i];
  return a;
}
inline F sub(F a, F b) {
  CACHALOT_EACH_LANE a.v[i] -= b.v[i];
  return a;
}
inline F mul(F a, F b) {
  CACHALOT_EACH_LANE a.v[i] *= b.v[i];
  return a;
}
inline F div(F a, F b) {
  CACHALOT_EACH_LANE a.v[i] /= b.v[i];
  return a;
}
inline F fma(F a, F b, F c) {
  CACHALOT_EACH_LANE c.v[i] += a.v[i] * b.v[i];
  return c;
}
inline F vmax(F a, F b) {
  CACHALOT_EACH_LANE a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline F vmin(F a, F b) {
  CACHALOT_EACH_LANE a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return a;
}
// b where a lane of x is NaN, otherwise a.
inline F if_nan(F x, F a, F b) {
  CACHALOT_EACH_LANE a.v[i] = x.v[i] != x.v[i] ? b.v[i] : a.v[i];
  return a;
}
inline float reduce_add(F a) { return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7])); }
inline float reduce_max(F a) {
  float out = a.v[0];
  CACHALOT_EACH_LANE out = out > a.v[i] ? out : a.v[i];
  return out;
}
inline void reduce_add4(F a, F b, F c, F d, float* out) {
  out[0] = reduce_add(a);
  out[1] = reduce_add(b);
  out[2] = reduce_add(c);
  out[3] = reduce_add(d);
}

inline constexpr bool kReducesTile = false;  // see simd_avx512.h
inline void reduce_tile(const F (&)[4][4], float (*)[4]) {}

inline I load_u8(const uint8_t* p) {
  I out;
  CACHALOT_EACH_LANE out.v[i] = p[i];
  return out;
}
inline I load_i8(const uint8_t* p) {
  I out;
  CACHALOT_EACH_LANE out.v[i] = static_cast<int8_t>(p[i]);
  return out;
}
inline I load_u16(const uint8_t* p) {
  uint16_t half[kWidth];
  __builtin_memcpy(half, p, sizeof half);
  I out;
  CACHALOT_EACH_LANE out.v[i] = half[i];
  return out;
}
inline I iset1(int a) {
  I out;
  CACHALOT_EACH_LANE out.v[i] = a;
  return out;
}
inline I shr(I a, int n) {
  CACHALOT_EACH_LANE a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) >> n);
  return a;
}
inline I shl(I a, int n) {
  CACHALOT_EACH_LANE a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << n);
  return a;
}
inline I iand(I a, I b) {
  CACHALOT_EACH_LANE a.v[i] &= b.v[i];
  return a;
}
inline I ior(I a, I b) {
  CACHALOT_EACH_LANE a.v[i] |= b.v[i];
  return a;
}
inline I iadd(I a, I b) {
  CACHALOT_EACH_LANE a.v[i] += b.v[i];
  return a;
}
inline I isub(I a, I b) {
  CACHALOT_EACH_LANE a.v[i] -= b.v[i];
  return a;
}
// All ones where a > b (signed).
inline I igreater(I a, I b) {
  CACHALOT_EACH_LANE a.v[i] = a.v[i] > b.v[i] ? -1 : 0;
  return a;
}
// value in the lanes whose bit is set in the low bits of `bits`, otherwise 0.
inline I lanes_of_bits(uint32_t bits, int value) {
  I out;
  CACHALOT_EACH_LANE out.v[i] = (bits >> i) & 1u ? value : 0;
  return out;
}
inline F to_float(I a) {
  F out;
  CACHALOT_EACH_LANE out.v[i] = static_cast<float>(a.v[i]);
  return out;
}
inline F as_float(I a) {
  F out;
  __builtin_memcpy(&out, &a, sizeof out);
  return out;
}
inline I as_int(F a) {
  I out;
  __builtin_memcpy(&out, &a, sizeof out);
  return out;
}
// The integer nearest to each lane, ties to even, for |a| < 2^22.
inline I round_to_int(F a) {
  I out;
  CACHALOT_EACH_LANE out.v[i] = static_cast<int32_t>(bits_of(a.v[i] + 12582912.0f)) - 0x4b400000;
  return out;
}

// A table of 16 values, read by the low 4 bits of each lane.
struct Table16 {
  float v[16];
};
inline Table16 load_table(const float* p) {
  Table16 out;
  __builtin_memcpy(&out, p, sizeof out);
  return out;
}
inline Table16 scale_table(Table16 t, float a) {
  for (float& value : t.v) value *= a;
  return t;
}
inline Table16 offset_table(Table16 t, float a) {
  for (float& value : t.v) value += a;
  return t;
}
inline F look_up(const Table16& t, I index) {
  F out;
  CACHALOT_EACH_LANE out.v[i] = t.v[index.v[i] & 15];
  return out;
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
  if (exponent == 31) return float_of(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return float_of(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return sign != 0 ? -magnitude : magnitude;
}
inline uint16_t float_to_half(float value) {
  const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
    return static_cast<uint16_t>(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13));
}
inline F load_f16(const uint8_t* p) {
  const I half = load_u16(p);
  F out;
  CACHALOT_EACH_LANE out.v[i] = half_to_float(static_cast<uint16_t>(half.v[i]));
  return out;
}
// a, but b where the magnitude of a lane is exactly m.
inline F if_magnitude(F a, float m, F b) {
  CACHALOT_EACH_LANE a.v[i] = a.v[i] == m || a.v[i] == -m ? b.v[i] : a.v[i];
  return a;
}
// The codes of E4M3 as binary16 bit patterns: 2^-8 times their value.
inline F load_e4m3(const uint8_t* p) {
  F out;
  CACHALOT_EACH_LANE out.v[i] = half_to_float(static_cast<uint16_t>(((p[i] & 0x80u) << 8) | ((p[i] & 0x7fu) << 7)));
  return out;
}
inline void store_f16(uint8_t* p, F a) {
  uint16_t half[kWidth];
  CACHALOT_EACH_LANE half[i] = float_to_half(a.v[i]);
  __builtin_memcpy(p, half, sizeof half);
}
// The low 16 bits of each lane.
inline void store_u16(uint8_t* p, I a) {
  uint16_t half[kWidth];
  CACHALOT_EACH_LANE half[i] = static_cast<uint16_t>(a.v[i]);
  __builtin_memcpy(p, half, sizeof half);
}
// Pairs swapped: lane 2i takes 2i + 1 and the reverse.
inline F swap_pairs(F a) {
  F out;
  CACHALOT_EACH_LANE out.v[i] = a.v[i ^ 1];
  return out;
}
// kWidth / 2 values, each in two neighbouring lanes.
inline F load_twice(const float* p) {
  F out;
  CACHALOT_EACH_LANE out.v[i] = p[i / 2];
  return out;
}
// The sign of even lanes changed.
inline F negate_even(F a) {
  CACHALOT_EACH_LANE a.v[i] = i % 2 == 0 ? -a.v[i] : a.v[i];
  return a;
}
// Lane i of v[j] becomes lane j of v[i].
inline void transpose(F (&v)[kWidth]) {
  for (int i = 0; i < kWidth; ++i) {
    for (int j = 0; j < i; ++j) {
      const float other = v[i].v[j];
      v[i].v[j] = v[j].v[i];
      v[j].v[i] = other;
    }
  }
}

#undef CACHALOT_EACH_LANE

}  // namespace
}  // namespace cachalot::cpu
