// Operations on bytes for wide.h, in AVX-512 VNNI.
#pragma once

#include "cpu/isa/simd_avx512.h"

namespace cachalot::cpu {
namespace {

inline I load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline I bset1(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
inline I shr16(I a, int n) { return _mm512_srli_epi16(a, static_cast<unsigned>(n)); }
inline I shl16(I a, int n) { return _mm512_slli_epi16(a, static_cast<unsigned>(n)); }
inline I look_up_bytes(const uint8_t* table, I index) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), index);
}
inline I four_bytes(const uint8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, sizeof four);
  return iset1(four);
}
// dot[t] = start[t] + the exact products of N steps of codes with x[t]'s activations from step `first` on.
template <int N, int T>
inline void dot_steps(const I* codes, const ActivationChunk* const* x, int first, const I* start, I* dot) {
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    const uint8_t* const q = x[t]->q + 4 * first;
    I upper = iset1(0), lower = start[t];
#pragma GCC unroll 8
    for (int s = 0; s < N; ++s) {
      upper = _mm512_dpbusd_epi32(upper, codes[s], four_bytes(q + 4 * s));
      lower = _mm512_dpbusd_epi32(lower, codes[s], four_bytes(q + kChunk + 4 * s));
    }
    dot[t] = iadd(shl(upper, 8), lower);
  }
}
inline F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
inline F vabs(F a) { return _mm512_abs_ps(a); }
// Activations [i, i + 16) of a chunk.
inline void store_codes(uint8_t* q, int i, I v) {
  const I upper = _mm512_srai_epi32(iadd(v, iset1(128)), 8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(q + i), _mm512_cvtepi32_epi8(upper));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(q + kChunk + i), _mm512_cvtepi32_epi8(v));
}

}  // namespace
}  // namespace cachalot::cpu
