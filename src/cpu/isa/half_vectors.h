// Arithmetic on 32 f16 in a register, AVX-512 FP16. Included only by amx.cpp: every CPU with AMX has these instructions, and VBMI.
#pragma once

#include "cpu/isa/simd_avx512.h"

namespace cachalot::cpu {
namespace {

inline I half_sub(I a, I b) { return _mm512_castph_si512(_mm512_sub_ph(_mm512_castsi512_ph(a), _mm512_castsi512_ph(b))); }
inline I half_mul(I a, I b) { return _mm512_castph_si512(_mm512_mul_ph(_mm512_castsi512_ph(a), _mm512_castsi512_ph(b))); }
inline I half_fma(I a, I b, I c) {
  return _mm512_castph_si512(_mm512_fmadd_ph(_mm512_castsi512_ph(a), _mm512_castsi512_ph(b), _mm512_castsi512_ph(c)));
}
inline I halves_of_words(I a) { return _mm512_castph_si512(_mm512_cvtepu16_ph(a)); }

}  // namespace
}  // namespace cachalot::cpu
