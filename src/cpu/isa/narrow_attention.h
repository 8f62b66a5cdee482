// Attention of up to four queries on keys of f32, in AVX-512: with queries in the lanes twelve of sixteen would idle.
//
// Sixteen keys lie in the lanes instead, turned in registers sixteen numbers at a time; the softmax runs over vectors of four rows times
// four queries. Each number takes the same operations in the same order as in attention.h, so the results are the same to the bit.
#pragma once

#include "cpu/isa/vector_math.h"

namespace cachalot::cpu {
namespace {

inline constexpr int kNarrowQueries = 4;
inline constexpr int kNarrowKeys = 16;  // in the lanes; also the multiple of k_dim

inline bool is_narrow(const AttentionTile& t) { return t.n_queries <= kNarrowQueries && t.k_dim % kNarrowKeys == 0; }

// One number of each of four queries, to all four rows.
inline F four_times(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }

// Scores of sixteen keys as [4][4 rows][4 queries].
inline void narrow_scores(const AttentionTile& t, int row, int padded_rows) {
  const auto* const queries = static_cast<const float*>(t.queries);  // [k_dim][kWidth]
  F sum[2][kNarrowQueries];
#pragma GCC unroll 4
  for (int q = 0; q < kNarrowQueries; ++q) sum[0][q] = sum[1][q] = zero();
  for (int k = 0; k < t.k_dim; k += kNarrowKeys) {
    F block[kNarrowKeys];
#pragma GCC unroll 16
    for (int j = 0; j < kNarrowKeys; ++j)
      block[j] = load(static_cast<const float*>(t.keys[row + j < padded_rows ? row + j : padded_rows - 1]) + k);
    transpose(block);
#pragma GCC unroll 16
    for (int i = 0; i < kNarrowKeys; ++i)
#pragma GCC unroll 4
      for (int q = 0; q < kNarrowQueries; ++q) sum[i % 2][q] = fma(set1(queries[(k + i) * kWidth + q]), block[i], sum[i % 2][q]);
  }
  F s[kNarrowQueries];
#pragma GCC unroll 4
  for (int q = 0; q < kNarrowQueries; ++q) s[q] = add(sum[0][q], sum[1][q]);
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(s[0], s[1])), b = _mm512_castps_pd(_mm512_unpackhi_ps(s[0], s[1]));
  const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(s[2], s[3])), d = _mm512_castps_pd(_mm512_unpackhi_ps(s[2], s[3]));
  // Quarter i of each: key 4 i, 4 i + 1, 4 i + 2, 4 i + 3.
  const F first = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c)), second = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
  const F third = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d)), fourth = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  const F low_even = _mm512_shuffle_f32x4(first, second, 0x44), low_odd = _mm512_shuffle_f32x4(third, fourth, 0x44);
  const F high_even = _mm512_shuffle_f32x4(first, second, 0xee), high_odd = _mm512_shuffle_f32x4(third, fourth, 0xee);
  float* const to = t.scores + row * kNarrowQueries;
  store(to, _mm512_shuffle_f32x4(low_even, low_odd, 0x88));
  store(to + kWidth, _mm512_shuffle_f32x4(low_even, low_odd, 0xdd));
  store(to + 2 * kWidth, _mm512_shuffle_f32x4(high_even, high_odd, 0x88));
  store(to + 3 * kWidth, _mm512_shuffle_f32x4(high_even, high_odd, 0xdd));
}

// As softmax_group.
inline void narrow_softmax(const AttentionTile& t, int padded_rows) {
  const F lowest = set1(-__builtin_inff());
  const I rows = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  const I visible = t.visible != nullptr ? as_int(four_times(reinterpret_cast<const float*>(t.visible))) : iset1(t.n_rows);
  const int n = padded_rows * kNarrowQueries;
  F top = lowest;
  for (int i = 0; i < n; i += kWidth) {
    const __mmask16 seen = _mm512_cmpgt_epi32_mask(visible, iadd(rows, iset1(i / kNarrowQueries)));
    const F score = _mm512_mask_mov_ps(lowest, seen, load(t.scores + i));
    store(t.scores + i, score);
    top = vmax(top, score);
  }
  top = vmax(top, _mm512_shuffle_f32x4(top, top, 0x4e));
  top = vmax(top, _mm512_shuffle_f32x4(top, top, 0xb1));
  const F before = t.first ? lowest : four_times(t.largest), now = vmax(before, top);
  const F base = vmax(now, set1(-3e38f));
  F sums = zero();  // of rows 0, 1, 2, 3 modulo four
  for (int i = 0; i < n; i += kWidth) {
    const F p = vexp(sub(load(t.scores + i), base));
    store(t.scores + i, p);
    sums = add(sums, p);
  }
  const F pairs = add(sums, _mm512_shuffle_f32x4(sums, sums, 0xb1)), weights = add(pairs, _mm512_shuffle_f32x4(pairs, pairs, 0x4e));
  if (t.first) {
    store(t.sum, weights);
  } else {
    const F correction = vexp(sub(before, base));
    store(t.correction, correction);
    store(t.sum, fma(four_times(t.sum), correction, weights));
  }
  store(t.largest, now);
}

}  // namespace
}  // namespace cachalot::cpu
