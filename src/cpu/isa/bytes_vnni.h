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
// dot += codes times the same four activations in every lane. Both instructions of GCC 12's intrinsics, one to spread the four bytes and
// one to multiply, take a third longer than the one that does both.
inline I dot_step(I dot, I codes, const uint8_t* four_activations) {
  struct Four {
    uint8_t bytes[4];
  };
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(dot) : "v"(codes), "m"(*reinterpret_cast<const Four*>(four_activations)));
  return dot;
}
// dot[t] = start[t] + the exact products of N steps of codes with x[t]'s activations from step `first` on.
template <int N, int T>
inline void dot_steps(const I* codes, const ActivationChunk* const* x, int first, const I* start, I* dot) {
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    const uint8_t* q = x[t]->q + 4 * first;
    __asm__("" : "+r"(q));  // one register for all steps; GCC would keep pointers to each of them
    I upper = iset1(0), lower = start[t];
#pragma GCC unroll 8
    for (int s = 0; s < N; ++s) {
      upper = dot_step(upper, codes[s], q + 4 * s);
      lower = dot_step(lower, codes[s], q + kChunk + 4 * s);
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
