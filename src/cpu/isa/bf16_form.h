// The Form of attention on rows of bf16: products of pairs, summed in f32. Queries and weights are rounded to bf16 like the rows; the
// softmax is computed in f32 and sums the rounded weights, so that the weights of a query add up to one. Needs AVX-512 BF16.
#pragma once

#include "cpu/isa/simd_avx512.h"
//
#include "cpu/isa/attention.h"

namespace cachalot::cpu {
namespace {

inline __m512bh pairs_of(F a) { return reinterpret_cast<__m512bh>(a); }
inline F as_f(__m512bh a) { return reinterpret_cast<F>(a); }

struct Bf16Form {
  static constexpr int kNumbers = 2;
  static constexpr int kStepRows = 2;
  static constexpr int kVMultiple = 2 * kWidth;
  static F dot(F a, F b, F c) { return _mm512_dpbf16_ps(c, pairs_of(a), pairs_of(b)); }
  // The numbers of two rows in pairs. Within 32 numbers they come in the order of the two unpack instructions; write_row puts them right.
  template <int V>
  static void values(const void* const* rows, int step, int d, F (&v)[V]) {
    static_assert(V == 2);
    const I first = _mm512_loadu_si512(static_cast<const uint16_t*>(rows[2 * step]) + d);
    const I second = _mm512_loadu_si512(static_cast<const uint16_t*>(rows[2 * step + 1]) + d);
    v[0] = as_float(_mm512_unpacklo_epi16(first, second));
    v[1] = as_float(_mm512_unpackhi_epi16(first, second));
  }
  // Moves only when weights would pass e^8, up to which they are as exact as below 1: what was summed up so far is seldom corrected.
  static F new_base(F before, F top) {
    return _mm512_mask_mov_ps(before, _mm512_cmp_ps_mask(top, add(before, set1(8.0f)), _CMP_GT_OQ), top);
  }
  static constexpr float kLog2E = 1.44269504f;
  // 2^y within 3e-6 of it, for y below infinity; exactly 1 for 0. The fraction of an infinity is 0, and of NaN NaN.
  static F exp2_of(F y) {
    const F f = _mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    F p = fma(set1(0.0134267006f), f, set1(0.0522424467f));
    p = fma(p, f, set1(0.241280213f));
    p = fma(p, f, set1(0.693044841f));
    p = fma(p, f, set1(1.0f));
    return _mm512_scalef_ps(p, y);  // takes the whole part of y
  }
  static F exp_of(F x) { return exp2_of(mul(x, set1(kLog2E))); }
  template <class Work>
  static F weights(float* s, int n_rows, F base, Work& beside) {
    // Where nothing was seen the base is -3e38, and -inf plus a finite number stays -inf.
    const F minus_base = vmin(mul(base, set1(-kLog2E)), set1(3e38f));
    const __m512bh ones = pairs_of(as_float(iset1(0x3f803f80)));
    // Word 2i of a pair is the first row's.
    const I interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3,
                                          18, 2, 17, 1, 16, 0);
    F sum[2] = {zero(), zero()};
    for (int r = 0; r < n_rows; r += 4) {
      for (int i = 0; i < 2; ++i) {
        const float* const at = s + (r + 2 * i) * kWidth;
        const F a = exp2_of(fma(load(at), set1(kLog2E), minus_base)), b = exp2_of(fma(load(at + kWidth), set1(kLog2E), minus_base));
        const I pair = _mm512_permutexvar_epi16(interleave, as_int(as_f(_mm512_cvtne2ps_pbh(b, a))));
        store(s + (r / 2 + i) * kWidth, as_float(pair));
        sum[i] = _mm512_dpbf16_ps(sum[i], pairs_of(as_float(pair)), ones);
      }
      beside.step();
    }
    return add(sum[0], sum[1]);
  }
  static F units(const float* q, F scale) { return as_f(_mm512_cvtne2ps_pbh(mul(load(q + kWidth), scale), mul(load(q), scale))); }
  static void make_row(const float* src, int n, void* row) {
    auto* const to = static_cast<uint16_t*>(row);
    int i = 0;
    for (; i + 2 * kWidth <= n; i += 2 * kWidth) store(reinterpret_cast<float*>(to + i), units(src + i, set1(1.0f)));
    if (i == n) return;
    float rest[2 * kWidth] = {};
    uint16_t rounded[2 * kWidth];
    for (int j = i; j < n; ++j) rest[j - i] = src[j];
    store(reinterpret_cast<float*>(rounded), units(rest, set1(1.0f)));
    for (int j = i; j < n; ++j) to[j] = rounded[j - i];
  }
  static void write_row(const float* row, float factor, int n, float* y) {
    const I low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const I high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int d = 0; d < n; d += 2 * kWidth) {
      const F a = mul(load(row + d), set1(factor)), b = mul(load(row + d + kWidth), set1(factor));
      store(y + d, _mm512_permutex2var_ps(a, low, b));
      store(y + d + kWidth, _mm512_permutex2var_ps(a, high, b));
    }
  }
};

}  // namespace
}  // namespace cachalot::cpu
