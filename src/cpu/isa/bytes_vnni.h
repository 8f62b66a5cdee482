// Operations on bytes for wide.h, in AVX-512 VNNI.
#pragma once

#include "cpu/isa/simd_avx512.h"

namespace cachalot::cpu {
namespace {

// What eight-bit codes, stored as unsigned bytes, exceed the multiplied signed number by.
inline constexpr int kByteOffset = 128;

inline I load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline I bset1(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
inline I shr16(I a, int n) { return _mm512_srli_epi16(a, static_cast<unsigned>(n)); }
inline I shl16(I a, int n) { return _mm512_slli_epi16(a, static_cast<unsigned>(n)); }
inline I look_up_bytes(const uint8_t* table, I index) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), index);
}
// acc + the sums of four products of codes and activations; codes below 128, or any.
inline I dot_small(I acc, I codes, I activations) { return _mm512_dpbusd_epi32(acc, codes, activations); }
inline I dot_bytes(I acc, I codes, I activations) { return _mm512_dpbusd_epi32(acc, codes, activations); }
inline F vabs(F a) { return _mm512_abs_ps(a); }
inline void store_i8(int8_t* p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a)); }

}  // namespace
}  // namespace cachalot::cpu
