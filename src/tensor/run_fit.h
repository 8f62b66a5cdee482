// Fits the scale (and offset) of one run of N weights to a set of levels by weighted least squares: candidates of the scale around the one
// that just spans the run, each followed by the exact solution for the codes that it gives. Private to src/tensor.
// Sums are trees over N lanes, so that they vectorise and still have one order everywhere.
#pragma once

#include <algorithm>
#include <cmath>

#include "tensor/dequant.h"

namespace cachalot {

// To the nearest integer, ties to even, for |value| < 2^22: adding 1.5 * 2^23 leaves no bits for a fraction.
inline float round_even(float value) {
  constexpr float kMagic = 12582912.0f;
  return (value + kMagic) - kMagic;
}

template <int N>
float tree_sum(float (&v)[N]) {
  for (int n = N / 2; n > 0; n /= 2)
    for (int j = 0; j < n; ++j) v[j] += v[j + n];
  return v[0];
}

// Codes 0 .. top of x = scale * code + offset, kept as floats.
template <int N>
void affine_codes(const float* x, float scale, float offset, float top, float (&q)[N]) {
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  for (int j = 0; j < N; ++j) q[j] = std::min(std::max(round_even(std::min((x[j] - offset) * inverse, 1e6f)), 0.0f), top);
}

// Weighted squared error when codes are chosen for (scale, offset).
template <int N>
float affine_error(const float* x, const float* w, float scale, float offset, float top) {
  float q[N], e[N];
  affine_codes<N>(x, scale, offset, top, q);
  for (int j = 0; j < N; ++j) {
    const float r = x[j] - (scale * q[j] + offset);
    e[j] = w[j] * r * r;
  }
  return tree_sum(e);
}

struct AffineFit {
  float scale = 0.0f, offset = 0.0f, error = 0.0f;
};

// The least-squares scale and offset for the codes that (scale, offset) gives; offset at most 0 when `offset_below_zero`.
template <int N>
AffineFit solve_affine(const float* x, const float* w, AffineFit from, float top, bool offset_below_zero) {
  float q[N], sw[N], swq[N], swqq[N], swx[N], swqx[N];
  affine_codes<N>(x, from.scale, from.offset, top, q);
  for (int j = 0; j < N; ++j) {
    const float wq = w[j] * q[j];
    sw[j] = w[j];
    swq[j] = wq;
    swqq[j] = wq * q[j];
    swx[j] = w[j] * x[j];
    swqx[j] = wq * x[j];
  }
  const float W = tree_sum(sw), Q = tree_sum(swq), QQ = tree_sum(swqq), X = tree_sum(swx), QX = tree_sum(swqx);
  const float determinant = W * QQ - Q * Q;
  if (determinant <= 0.0f) return from;
  AffineFit to{(W * QX - Q * X) / determinant, (QQ * X - Q * QX) / determinant};
  if (offset_below_zero && to.offset > 0.0f) to = {QQ > 0.0f ? QX / QQ : 0.0f, 0.0f};
  if (!(to.scale > 0.0f)) return from;
  return to;
}

template <int N>
AffineFit fit_affine(const float* x, const float* w, int n_codes, bool offset_below_zero) {
  const float top = static_cast<float>(n_codes - 1);
  float low = x[0], high = x[0];
  for (int j = 1; j < N; ++j) {
    low = std::min(low, x[j]);
    high = std::max(high, x[j]);
  }
  if (offset_below_zero) low = std::min(low, 0.0f);
  AffineFit best{(high - low) / top, low};
  if (!(high > low)) {
    best.scale = 0.0f;
    best.error = affine_error<N>(x, w, 0.0f, low, top);
    return best;
  }
  best.error = affine_error<N>(x, w, best.scale, best.offset, top);
  // A finer grid than the span asks for clips the ends, a coarser one leaves codes unused; few codes gain more from clipping, at both ends.
  const bool few = n_codes <= 4;
  const int n_steps = few ? 14 : 18, n_lows = few ? 4 : 1;
  const float first = few ? -0.8f : -1.0f, step = 0.15f;
  for (int c = 0; c < n_lows; ++c) {
    const float from = low + (high - low) * 0.08f * static_cast<float>(c);
    for (int i = 0; i < n_steps; ++i) {
      const float codes = top + first + step * static_cast<float>(i);
      AffineFit fit =
          solve_affine<N>(x, w, {(high - from) / codes, std::min(from, offset_below_zero ? 0.0f : from)}, top, offset_below_zero);
      fit.error = affine_error<N>(x, w, fit.scale, fit.offset, top);
      if (fit.error < best.error) best = fit;
    }
  }
  for (int i = 0; i < 3; ++i) {
    AffineFit fit = solve_affine<N>(x, w, best, top, offset_below_zero);
    fit.error = affine_error<N>(x, w, fit.scale, fit.offset, top);
    if (!(fit.error < best.error)) break;
    best = fit;
  }
  return best;
}

// Levels low, low + 1, .. high.
struct UniformLevels {
  float low, high;
  [[nodiscard]] float nearest(float v) const { return std::min(std::max(round_even(std::min(std::max(v, -1e6f), 1e6f)), low), high); }
};

// IQ4's levels.
struct Iq4LevelSet {
  float low = -127.0f, high = 113.0f;
  [[nodiscard]] float nearest(float v) const {
    float level = static_cast<float>(kIq4Levels[0]);
    for (int i = 1; i < 16; ++i) {
      const float middle = 0.5f * static_cast<float>(kIq4Levels[i - 1] + kIq4Levels[i]);
      level = v > middle ? static_cast<float>(kIq4Levels[i]) : level;
    }
    return level;
  }
};

// Weighted squared error of x = scale * level.
template <int N, typename Levels>
float scaled_error(const float* x, const float* w, float scale, const Levels& levels) {
  const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
  float e[N];
  for (int j = 0; j < N; ++j) {
    const float r = x[j] - scale * levels.nearest(x[j] * inverse);
    e[j] = w[j] * r * r;
  }
  return tree_sum(e);
}

// The scale, of either sign, that fits best. Sxx - Sxl^2 / Sll is the error of the best scale for given levels l, so the gain is compared.
template <int N, typename Levels>
float fit_scale(const float* x, const float* w, const Levels& levels) {
  float extreme = 0.0f;
  for (int j = 0; j < N; ++j) extreme = std::fabs(x[j]) > std::fabs(extreme) ? x[j] : extreme;
  if (extreme == 0.0f) return 0.0f;
  float best_gain = -1.0f, best = 0.0f;
  const auto consider = [&](float inverse) {
    float xl[N], ll[N];
    for (int j = 0; j < N; ++j) {
      const float l = levels.nearest(x[j] * inverse);
      xl[j] = w[j] * x[j] * l;
      ll[j] = w[j] * l * l;
    }
    const float sum_xl = tree_sum(xl), sum_ll = tree_sum(ll);
    if (!(sum_ll > 0.0f)) return false;
    const float gain = sum_xl * sum_xl / sum_ll;
    if (!(gain > best_gain)) return false;
    best_gain = gain;
    best = sum_xl / sum_ll;
    return true;
  };
  constexpr int kSteps = 9;
  for (const float end : {levels.low, levels.high})
    for (int i = -kSteps; i <= kSteps; ++i) consider(end * (1.0f + 0.022f * static_cast<float>(i)) / extreme);
  for (int i = 0; i < 3 && best != 0.0f; ++i)
    if (!consider(1.0f / best)) break;
  return best;
}

}  // namespace cachalot
