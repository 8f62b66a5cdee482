// Operations on bytes for wide.h, in AVX2. VPMADDUBSW adds two products in 16 bits and would saturate with codes of 128 and more: those are
// made signed first, and their magnitude multiplied with the activation of the code's sign.
#pragma once

#include "cpu/isa/simd_avx2.h"

namespace cachalot::cpu {
namespace {

inline constexpr int kByteOffset = 0;

inline I load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline I bset1(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
inline I shr16(I a, int n) { return _mm256_srli_epi16(a, n); }
inline I shl16(I a, int n) { return _mm256_slli_epi16(a, n); }
inline I look_up_bytes(const uint8_t* table, I index) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), index);
}
inline I add_pairs(I acc, I products) { return _mm256_add_epi32(acc, _mm256_madd_epi16(products, _mm256_set1_epi16(1))); }
inline I dot_small(I acc, I codes, I activations) { return add_pairs(acc, _mm256_maddubs_epi16(codes, activations)); }
inline I dot_bytes(I acc, I codes, I activations) {
  const I number = _mm256_xor_si256(codes, bset1(128));  // code - 128; its magnitude is at most 128, an activation's 127
  return add_pairs(acc, _mm256_maddubs_epi16(_mm256_abs_epi8(number), _mm256_sign_epi8(activations, number)));
}
inline F vabs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline void store_i8(int8_t* p, I a) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

}  // namespace
}  // namespace cachalot::cpu
