// Vectors of 16 in AVX-512 (F, BW, DQ, VL). See simd_scalar.h for what each function means.
#pragma once

#include <immintrin.h>

#include "cpu/isa/kernels.h"

namespace cachalot::cpu {
namespace {

inline constexpr int kWidth = 16;
inline constexpr bool kTableLevels = true;              // 4-bit codes become numbers by table look-up rather than by arithmetic
inline constexpr int kTileTokens = 4, kGemvTokens = 4;  // 4 rows x 4 tokens of sums: 8 loads for 16 multiply-adds

using F = __m512;
using I = __m512i;

inline F zero() { return _mm512_setzero_ps(); }
inline F set1(float a) { return _mm512_set1_ps(a); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F vmax(F a, F b) { return _mm512_max_ps(a, b); }
inline F vmin(F a, F b) { return _mm512_min_ps(a, b); }
inline F if_nan(F x, F a, F b) { return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), b); }

inline __m128 quarters(F a) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
inline __m128 reduce4x4(__m128 a, __m128 b, __m128 c, __m128 d) {
  const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
  const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
  return _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab));
}
inline void reduce_add4(F a, F b, F c, F d, float* out) {
  _mm_storeu_ps(out, reduce4x4(quarters(a), quarters(b), quarters(c), quarters(d)));
}
inline constexpr bool kReducesTile = true;
// The sums of v[t][r], by the same tree as reduce_add4 but for all 16 at once: 45 instructions rather than 100. Each step adds the halves
// of two vectors into one.
inline void reduce_tile(const F (&v)[4][4], float (*out)[4]) {
  F quarter[4];  // quarter[r]: in 128 bits each, the quarters of v[r][t] added up, for t = 0..3
  for (int r = 0; r < 4; ++r) {
    const F a = v[r][0], b = v[r][1], c = v[r][2], d = v[r][3];
    const F ab = add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const F cd = add(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    quarter[r] = add(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  }
  const F first = add(_mm512_unpacklo_ps(quarter[0], quarter[1]), _mm512_unpackhi_ps(quarter[0], quarter[1]));
  const F second = add(_mm512_unpacklo_ps(quarter[2], quarter[3]), _mm512_unpackhi_ps(quarter[2], quarter[3]));
  const __m512d low = _mm512_castps_pd(first), high = _mm512_castps_pd(second);
  const F sums = add(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  _mm512_storeu_ps(&out[0][0], sums);
}
inline float reduce_add(F a) {
  const __m128 quarter = quarters(a);
  const __m128 two = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float reduce_max(F a) { return _mm512_reduce_max_ps(a); }

inline I load_u8(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline I load_i8(const uint8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline I load_u16(const uint8_t* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline I iset1(int a) { return _mm512_set1_epi32(a); }
inline I shr(I a, int n) { return _mm512_srli_epi32(a, static_cast<unsigned>(n)); }
inline I shl(I a, int n) { return _mm512_slli_epi32(a, static_cast<unsigned>(n)); }
inline I iand(I a, I b) { return _mm512_and_si512(a, b); }
inline I ior(I a, I b) { return _mm512_or_si512(a, b); }
inline I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
inline I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
inline I igreater(I a, I b) { return _mm512_movm_epi32(_mm512_cmpgt_epi32_mask(a, b)); }
inline I lanes_of_bits(uint32_t bits, int value) { return _mm512_maskz_set1_epi32(static_cast<__mmask16>(bits), value); }
inline F to_float(I a) { return _mm512_cvtepi32_ps(a); }
inline F as_float(I a) { return _mm512_castsi512_ps(a); }
inline I as_int(F a) { return _mm512_castps_si512(a); }
inline I round_to_int(F a) { return _mm512_cvtps_epi32(a); }

struct Table16 {
  F v;
};
inline Table16 load_table(const float* p) { return {load(p)}; }
inline Table16 scale_table(Table16 t, float a) { return {mul(t.v, set1(a))}; }
inline Table16 offset_table(Table16 t, float a) { return {add(t.v, set1(a))}; }
inline F look_up(const Table16& t, I index) { return _mm512_permutexvar_ps(index, t.v); }  // reads 4 bits of each index

inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
inline F load_f16(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline F if_magnitude(F a, float m, F b) {
  return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(_mm512_abs_ps(a), _mm512_set1_ps(m), _CMP_EQ_OQ), b);
}
inline F load_e4m3(const uint8_t* p) {  // the sign ends up in the two upper bits, one of which is cleared
  const __m256i code = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 8);
  return _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(code, 1), _mm256_set1_epi16(static_cast<int16_t>(0xbfff))));
}
// Four columns of E4M3, [2][16 rows][2], as load_e4m3 reads them.
inline void load_e4m3_columns(const uint8_t* p, F* v) {
  const I code = _mm512_loadu_si512(p), mask = _mm512_set1_epi16(static_cast<int16_t>(0xbf80));
  const I even = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(code, 8), 1), mask);
  const I odd = _mm512_and_si512(_mm512_srai_epi16(code, 1), mask);
  v[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(even));
  v[1] = _mm512_cvtph_ps(_mm512_castsi512_si256(odd));
  v[2] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(even, 1));
  v[3] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(odd, 1));
}
inline void store_f16(uint8_t* p, F a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_u16(uint8_t* p, I a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a)); }
inline F swap_pairs(F a) { return _mm512_permute_ps(a, 0xb1); }
inline F load_twice(const float* p) {
  const I index = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  return _mm512_permutexvar_ps(index, _mm512_castps256_ps512(_mm256_loadu_ps(p)));
}
inline F negate_even(F a) { return _mm512_mask_xor_ps(a, 0x5555, a, _mm512_set1_ps(-0.0f)); }

// Lane i of v[j] becomes lane j of v[i].
inline void transpose(F (&v)[16]) {
  F pair[16], quad[16];
  for (int i = 0; i < 16; i += 2) {
    pair[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
    pair[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      const __m512d low = _mm512_castps_pd(pair[i + j]), high = _mm512_castps_pd(pair[i + j + 2]);
      quad[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      quad[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  }
  // quad[4 q + i] holds, in 128 bits each, lanes i, i + 4, i + 8, i + 12 of v[4 q] to v[4 q + 3].
  for (int i = 0; i < 4; ++i) {
    const F ab = _mm512_shuffle_f32x4(quad[i], quad[i + 4], 0x88), cd = _mm512_shuffle_f32x4(quad[i + 8], quad[i + 12], 0x88);
    const F ef = _mm512_shuffle_f32x4(quad[i], quad[i + 4], 0xdd), gh = _mm512_shuffle_f32x4(quad[i + 8], quad[i + 12], 0xdd);
    v[i] = _mm512_shuffle_f32x4(ab, cd, 0x88);
    v[i + 8] = _mm512_shuffle_f32x4(ab, cd, 0xdd);
    v[i + 4] = _mm512_shuffle_f32x4(ef, gh, 0x88);
    v[i + 12] = _mm512_shuffle_f32x4(ef, gh, 0xdd);
  }
}

}  // namespace
}  // namespace cachalot::cpu
