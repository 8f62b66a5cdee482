// Operations on bytes for wide.h, in AVX2: codes are widened to 16 bits, as VPMADDUBSW would saturate.
#pragma once

#include "cpu/isa/simd_avx2.h"

namespace cachalot::cpu {
namespace {

inline I load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline I bset1(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
inline I shr16(I a, int n) { return _mm256_srli_epi16(a, n); }
inline I shl16(I a, int n) { return _mm256_slli_epi16(a, n); }
inline I look_up_bytes(const uint8_t* table, I index) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), index);
}
inline I load_words(const int16_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store_words(int16_t* p, I a) { _mm256_store_si256(reinterpret_cast<__m256i*>(p), a); }
inline I two_words(const uint8_t* p) {
  int32_t two;
  __builtin_memcpy(&two, p, sizeof two);
  return iset1(two);
}
// A sum up to here. GCC would reorder such sums, and for that keep all products in memory until the end.
inline void keep_here(I& sum) { __asm__("" : "+x"(sum)); }
// dot[t] = start[t] + the exact products of N steps of codes with x[t]'s activations from step `first` on.
template <int N, int T>
inline void dot_steps(const I* codes, const ActivationChunk* const* x, int first, const I* start, I* dot) {
  for (int t = 0; t < T; ++t) dot[t] = start[t];
#pragma GCC unroll 8
  for (int s = 0; s < N; ++s) {
    const I even = iand(codes[s], _mm256_set1_epi16(255)), odd = shr16(codes[s], 8);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const uint8_t* const q = x[t]->q + 8 * (first + s);
      const I sum = iadd(_mm256_madd_epi16(even, two_words(q)), _mm256_madd_epi16(odd, two_words(q + 4)));
      dot[t] = iadd(dot[t], sum);
      keep_here(dot[t]);
    }
  }
}
inline F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
inline F vabs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
// Activations [i, i + 8) of a chunk.
inline void store_codes(uint8_t* q, int i, I v) {
  const I words = _mm256_shufflelo_epi16(_mm256_packs_epi32(v, v), _MM_SHUFFLE(3, 1, 2, 0));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(q + 2 * i), _mm256_castsi256_si128(words));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(q + 2 * i + 8), _mm256_extracti128_si256(words, 1));
}

}  // namespace
}  // namespace cachalot::cpu
