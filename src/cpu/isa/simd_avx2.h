// Vectors of 8 in AVX2 with FMA and F16C. See simd_scalar.h for what each function means.
#pragma once

#include <immintrin.h>

#include "cpu/isa/kernels.h"

namespace cachalot::cpu {
namespace {

inline constexpr int kWidth = 8;
inline constexpr bool kTableLevels = false;  // 4-bit codes become numbers by table look-up rather than by arithmetic
inline constexpr int kTileTokens = 3;        // of gemm: 4 rows x 3 tokens of sums, 3 activations and a weight fill the 16 registers
inline constexpr int kGemvTokens = 2;        // of gemv, whose decoder needs registers too

using F = __m256;
using I = __m256i;

inline F zero() { return _mm256_setzero_ps(); }
inline F set1(float a) { return _mm256_set1_ps(a); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F a) { _mm256_storeu_ps(p, a); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F vmax(F a, F b) { return _mm256_max_ps(a, b); }
inline F vmin(F a, F b) { return _mm256_min_ps(a, b); }
inline F if_nan(F x, F a, F b) { return _mm256_blendv_ps(a, b, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }

inline __m128 halves(F a) { return _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)); }
// The sums of the four lanes of each argument.
inline __m128 reduce4x4(__m128 a, __m128 b, __m128 c, __m128 d) {
  const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));  // a0+a2 b0+b2 a1+a3 b1+b3
  const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
  return _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab));
}
inline void reduce_add4(F a, F b, F c, F d, float* out) { _mm_storeu_ps(out, reduce4x4(halves(a), halves(b), halves(c), halves(d))); }
inline float reduce_add(F a) {
  const __m128 half = halves(a);
  const __m128 two = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float reduce_max(F a) {
  const __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 two = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline constexpr bool kReducesTile = false;  // see simd_avx512.h
inline void reduce_tile(const F (&)[4][4], float (*)[4]) {}

inline I load_u8(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
inline I load_i8(const uint8_t* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
inline I load_u16(const uint8_t* p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline I iset1(int a) { return _mm256_set1_epi32(a); }
inline I shr(I a, int n) { return _mm256_srli_epi32(a, n); }
inline I shl(I a, int n) { return _mm256_slli_epi32(a, n); }
inline I iand(I a, I b) { return _mm256_and_si256(a, b); }
inline I ior(I a, I b) { return _mm256_or_si256(a, b); }
inline I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
inline I isub(I a, I b) { return _mm256_sub_epi32(a, b); }
inline I igreater(I a, I b) { return _mm256_cmpgt_epi32(a, b); }
inline I lanes_of_bits(uint32_t bits, int value) {
  const I lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const I set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane), lane);
  return _mm256_and_si256(set, _mm256_set1_epi32(value));
}
inline F to_float(I a) { return _mm256_cvtepi32_ps(a); }
inline F as_float(I a) { return _mm256_castsi256_ps(a); }
inline I as_int(F a) { return _mm256_castps_si256(a); }
inline I round_to_int(F a) { return _mm256_cvtps_epi32(a); }

struct Table16 {
  F low, high;
};
inline Table16 load_table(const float* p) { return {load(p), load(p + 8)}; }
inline Table16 scale_table(Table16 t, float a) { return {mul(t.low, set1(a)), mul(t.high, set1(a))}; }
inline Table16 offset_table(Table16 t, float a) { return {add(t.low, set1(a)), add(t.high, set1(a))}; }
inline F look_up(const Table16& t, I index) {
  const F upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));  // bit 3 becomes the sign that the blend tests
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(t.low, index), _mm256_permutevar8x32_ps(t.high, index), upper);
}

inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
inline F load_f16(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline F if_magnitude(F a, float m, F b) {
  return _mm256_blendv_ps(a, b, _mm256_cmp_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a), _mm256_set1_ps(m), _CMP_EQ_OQ));
}
inline F load_e4m3(const uint8_t* p) {  // the sign ends up in the two upper bits, one of which is cleared
  const __m128i code = _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(code, 1), _mm_set1_epi16(static_cast<int16_t>(0xbfff))));
}
inline void load_e4m3_columns(const uint8_t* p, F* v) {  // see simd_avx512.h; p points at the first of eight rows
  const I code = _mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(p + 32), reinterpret_cast<const __m128i*>(p));
  const I mask = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
  const I even = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(code, 8), 1), mask);
  const I odd = _mm256_and_si256(_mm256_srai_epi16(code, 1), mask);
  v[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(even));
  v[1] = _mm256_cvtph_ps(_mm256_castsi256_si128(odd));
  v[2] = _mm256_cvtph_ps(_mm256_extracti128_si256(even, 1));
  v[3] = _mm256_cvtph_ps(_mm256_extracti128_si256(odd, 1));
}
inline void store_f16(uint8_t* p, F a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_u16(uint8_t* p, I a) {
  const I packed = _mm256_packus_epi32(_mm256_and_si256(a, _mm256_set1_epi32(0xffff)), _mm256_setzero_si256());
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}
inline F swap_pairs(F a) { return _mm256_permute_ps(a, 0xb1); }
inline F load_twice(const float* p) {
  return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
}
inline F negate_even(F a) { return _mm256_xor_ps(a, _mm256_setr_ps(-0.0f, 0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f, 0.0f)); }

inline void transpose(F (&v)[8]) {  // see simd_avx512.h
  F pair[8], quad[8];
  for (int i = 0; i < 8; i += 2) {
    pair[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
    pair[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      quad[i + 2 * j] = _mm256_shuffle_ps(pair[i + j], pair[i + j + 2], 0x44);
      quad[i + 2 * j + 1] = _mm256_shuffle_ps(pair[i + j], pair[i + j + 2], 0xee);
    }
  }
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x20);
    v[i + 4] = _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x31);
  }
}

}  // namespace
}  // namespace cachalot::cpu
