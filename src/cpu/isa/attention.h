// The two kernels between which attention alternates, tile by tile of context: a softmax that carries its state, and the sum of values.
#pragma once

#include "cpu/isa/vector_math.h"

namespace cachalot::cpu {
namespace {

inline float softmax_step(float* s, int valid, int n, float scale, SoftmaxState& state) {
  if (valid == 0) {
    for (int i = 0; i < n; ++i) s[i] = 0.0f;
    return 1.0f;
  }
  const float kLowest = -__builtin_inff();
  for (int i = valid; i < n; ++i) s[i] = kLowest;
  F top = set1(kLowest);
  for (int i = 0; i < n; i += kWidth) {
    const F scores = mul(load(s + i), set1(scale));
    store(s + i, scores);
    top = vmax(top, scores);
  }
  for (int i = valid; i < n; ++i) s[i] = kLowest;  // also when scale is negative or zero
  if (scale <= 0.0f) {
    top = set1(kLowest);
    for (int i = 0; i < n; i += kWidth) top = vmax(top, load(s + i));
  }
  const float here = reduce_max(top), before = state.largest, largest = here > before ? here : before;
  F sum = zero();
  for (int i = 0; i < n; i += kWidth) {
    const F p = vexp(sub(load(s + i), set1(largest)));
    store(s + i, p);
    sum = add(sum, p);
  }
  float correction[kWidth];
  store(correction, vexp(set1(before - largest)));  // 0 at first, when `before` is -inf
  state.largest = largest;
  state.sum = state.sum * correction[0] + reduce_add(sum);
  return correction[0];
}

// R rows of outputs, V vectors of each.
template <Element E, int R, int V>
inline void weighted_sum_tile(const WeightedSum& a, int row, int d) {
  F sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = mul(load(a.o + (row + r) * a.o_stride + d + v * kWidth), set1(a.correction[row + r]));
  for (int b = 0; b < a.n_values; ++b) {
    F value[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v)
      value[v] = load_element<E>(static_cast<const uint8_t*>(a.v) + b * a.v_stride + (d + v * kWidth) * kElementBytes<E>);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const F p = set1(a.p[(row + r) * a.p_stride + b]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[r][v] = fma(p, value[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(a.o + (row + r) * a.o_stride + d + v * kWidth, sum[r][v]);
}

template <Element E, int R>
inline void weighted_sum_rows(const WeightedSum& a, int row) {
  constexpr int kVectors = kWidth == 16 ? 4 : 2;  // 16 sums of 32 registers, or 8 of 16
  int d = 0;
  for (; d + kVectors * kWidth <= a.dim; d += kVectors * kWidth) weighted_sum_tile<E, R, kVectors>(a, row, d);
  for (; d + kWidth <= a.dim; d += kWidth) weighted_sum_tile<E, R, 1>(a, row, d);
  const int rest = a.dim - d;
  if (rest == 0) return;
  // The last numbers through a vector of their own, so that they are rounded like the others.
  for (int r = row; r < row + R; ++r) {
    float values[kWidth] = {};
    float* const o = a.o + r * a.o_stride + d;
    for (int i = 0; i < rest; ++i) values[i] = o[i];
    F sum = mul(load(values), set1(a.correction[r]));
    for (int b = 0; b < a.n_values; ++b) {
      uint8_t bytes[4 * kWidth] = {};
      const uint8_t* const from = static_cast<const uint8_t*>(a.v) + b * a.v_stride + d * kElementBytes<E>;
      for (int i = 0; i < rest * kElementBytes<E>; ++i) bytes[i] = from[i];
      sum = fma(set1(a.p[r * a.p_stride + b]), load_element<E>(bytes), sum);
    }
    store(values, sum);
    for (int i = 0; i < rest; ++i) o[i] = values[i];
  }
}

template <Element E>
inline void weighted_sum(const WeightedSum& a) {
  int row = 0;
  for (; row + 4 <= a.n_rows; row += 4) weighted_sum_rows<E, 4>(a, row);
  const int rest = a.n_rows - row;
  if (rest == 3) weighted_sum_rows<E, 3>(a, row);
  if (rest == 2) weighted_sum_rows<E, 2>(a, row);
  if (rest == 1) weighted_sum_rows<E, 1>(a, row);
}

}  // namespace
}  // namespace cachalot::cpu
