// Fits the scale (and offset) of runs of N weights to a set of levels by weighted least squares, 16 runs at a time: candidates of the scale
// around the one that just spans the run, each followed by the exact solution for the codes that it gives. Private to src/tensor.
#pragma once

#include "tensor/dequant.h"
#include "tensor/lanes.h"

namespace cachalot {

// Element j of 16 runs, and the weights of their errors.
template <int N>
struct Runs {
  Lanes x[N], w[N];
};

// ---- x = scale * code + offset, codes 0 .. top ----

CACHALOT_LANES_INLINE Lanes affine_code(Lanes x, Lanes inverse, Lanes offset, Lanes top) {
  return round_even(clamped((x - offset) * inverse, spread(0.0f), top));
}

// Weighted squared error when codes are chosen for (scale, offset).
template <int N>
CACHALOT_LANES_INLINE Lanes affine_error(const Runs<N>& runs, Lanes scale, Lanes offset, float top) {
  const Lanes inverse = inverse_or_zero(scale), last = spread(top);
  Lanes error = spread(0.0f);
  for (int j = 0; j < N; ++j) {
    const Lanes r = runs.x[j] - (scale * affine_code(runs.x[j], inverse, offset, last) + offset);
    error += runs.w[j] * r * r;
  }
  return error;
}

struct AffineFit {
  Lanes scale, offset, error;
};

// Sums over a run that do not depend on codes.
struct RunSums {
  Lanes w, wx;
};
template <int N>
CACHALOT_LANES_INLINE RunSums run_sums(const Runs<N>& runs) {
  RunSums s{spread(0.0f), spread(0.0f)};
  for (int j = 0; j < N; ++j) {
    s.w += runs.w[j];
    s.wx += runs.w[j] * runs.x[j];
  }
  return s;
}

// The least-squares scale and offset for the codes that (scale, offset) gives, with the error of the nearest codes for them; offset at
// most 0 when `below_zero`. Where there is no solution the error is huge.
template <int N>
CACHALOT_LANES_INLINE AffineFit solve_affine(const Runs<N>& runs, const RunSums& sums, Lanes scale, Lanes offset, float top,
                                             bool below_zero) {
  const Lanes inverse = inverse_or_zero(scale), last = spread(top), zero = spread(0.0f);
  Lanes q1 = zero, q2 = zero, qx = zero;
  for (int j = 0; j < N; ++j) {
    const Lanes q = affine_code(runs.x[j], inverse, offset, last), wq = runs.w[j] * q;
    q1 += wq;
    q2 += wq * q;
    qx += wq * runs.x[j];
  }
  const Lanes determinant = sums.w * q2 - q1 * q1;
  const Lanes divisor = determinant > zero ? determinant : spread(1.0f);
  AffineFit to{(sums.w * qx - q1 * sums.wx) / divisor, (q2 * sums.wx - q1 * qx) / divisor, spread(1e38f)};
  if (below_zero) {
    to.scale = to.offset > zero ? qx / (q2 > zero ? q2 : spread(1.0f)) : to.scale;
    to.offset = to.offset > zero ? zero : to.offset;
  }
  const Lanes error = affine_error(runs, to.scale, to.offset, top);
  to.error = determinant > zero ? error : to.error;
  to.error = to.scale > zero ? to.error : spread(1e38f);
  return to;
}

CACHALOT_LANES_INLINE void keep_better(AffineFit& best, const AffineFit& other) {
  best.scale = other.error < best.error ? other.scale : best.scale;
  best.offset = other.error < best.error ? other.offset : best.offset;
  best.error = smaller(other.error, best.error);
}

template <int N>
CACHALOT_LANES_INLINE AffineFit fit_affine(const Runs<N>& runs, int n_codes, bool below_zero) {
  const float top = static_cast<float>(n_codes - 1);
  Lanes low = runs.x[0], high = runs.x[0];
  for (int j = 1; j < N; ++j) {
    low = smaller(low, runs.x[j]);
    high = larger(high, runs.x[j]);
  }
  if (below_zero) low = smaller(low, spread(0.0f));
  const RunSums sums = run_sums(runs);
  AffineFit best{(high - low) / top, low, spread(1e38f)};
  // A finer grid than the span asks for clips the ends, a coarser one leaves codes unused; few codes gain more from clipping, at both ends.
  const bool few = n_codes <= 4;
  const int n_steps = few ? 14 : 18, n_lows = few ? 4 : 1;
  const float first = few ? -0.8f : -1.0f, step = 0.15f;
  for (int c = 0; c < n_lows; ++c) {
    const Lanes from = low + (high - low) * (0.08f * static_cast<float>(c));
    const Lanes offset = below_zero ? smaller(from, spread(0.0f)) : from;
    for (int i = 0; i < n_steps; ++i)
      keep_better(best, solve_affine(runs, sums, (high - from) / (top + first + step * static_cast<float>(i)), offset, top, below_zero));
  }
  for (int i = 0; i < 2; ++i) keep_better(best, solve_affine(runs, sums, best.scale, best.offset, top, below_zero));
  const AffineFit flat{spread(0.0f), low, spread(0.0f)};
  best.scale = high > low ? best.scale : flat.scale;
  best.offset = high > low ? best.offset : flat.offset;
  return best;
}

// ---- x = scale * level ----

// Levels low, low + 1, .. high.
struct UniformLevels {
  float low, high;
  int n_steps;  // candidates on each side of the scale that puts the largest weight on an end
  bool both_ends;
  CACHALOT_LANES_INLINE Lanes nearest(Lanes v) const { return round_even(clamped(v, spread(low), spread(high))); }
};

// IQ4's levels.
struct Iq4LevelSet {
  float low = -127.0f, high = 113.0f;
  int n_steps = 6;
  bool both_ends = true;
  // A comparison is a product that is cut off: masks would have to be kept for all levels.
  CACHALOT_LANES_INLINE static Lanes step_at(Lanes v, int i, float height) {
    const float middle = 0.5f * static_cast<float>(kIq4Levels[i - 1] + kIq4Levels[i]);
    return clamped((v - middle) * 1e6f, spread(0.0f), spread(height));
  }
  CACHALOT_LANES_INLINE Lanes nearest(Lanes v) const {
    Lanes level = spread(low);
#pragma GCC unroll 15
    for (int i = 1; i < 16; ++i) level += step_at(v, i, static_cast<float>(kIq4Levels[i] - kIq4Levels[i - 1]));
    return level;
  }
  CACHALOT_LANES_INLINE static Lanes code(Lanes v) {
    Lanes code = spread(0.0f);
#pragma GCC unroll 15
    for (int i = 1; i < 16; ++i) code += step_at(v, i, 1.0f);
    return round_even(code);
  }
};

// Weighted squared error of x = scale * level.
template <int N, typename Levels>
CACHALOT_LANES_INLINE Lanes scaled_error(const Runs<N>& runs, Lanes scale, const Levels& levels) {
  const Lanes inverse = inverse_or_zero(scale);
  Lanes error = spread(0.0f);
  for (int j = 0; j < N; ++j) {
    const Lanes r = runs.x[j] - scale * levels.nearest(runs.x[j] * inverse);
    error += runs.w[j] * r * r;
  }
  return error;
}

// The best scale for the levels that x * inverse is nearest to, if it gains more than `best_gain`. Sxx - Sxl^2 / Sll is the error of the
// best scale for given levels l, so the gain Sxl^2 / Sll is compared.
template <int N, typename Levels>
CACHALOT_LANES_INLINE void consider_scale(const Runs<N>& runs, Lanes inverse, const Levels& levels, Lanes& best_gain, Lanes& best) {
  const Lanes zero = spread(0.0f);
  Lanes xl = zero, ll = zero;
  for (int j = 0; j < N; ++j) {
    const Lanes l = levels.nearest(runs.x[j] * inverse), wl = runs.w[j] * l;
    xl += wl * runs.x[j];
    ll += wl * l;
  }
  const Lanes scale = xl / (ll > zero ? ll : spread(1.0f)), gain = scale * xl;
  best = gain > best_gain ? scale : best;
  best_gain = larger(gain, best_gain);
}

// The scale, of either sign, that fits best.
template <int N, typename Levels>
CACHALOT_LANES_INLINE Lanes fit_scale(const Runs<N>& runs, const Levels& levels) {
  Lanes extreme = spread(0.0f);
  for (int j = 0; j < N; ++j) extreme = absolute(runs.x[j]) > absolute(extreme) ? runs.x[j] : extreme;
  const Lanes unit = inverse_or_zero(extreme);
  Lanes best_gain = spread(-1.0f), best = spread(0.0f);
  const float width = 0.2f / static_cast<float>(levels.n_steps);
  for (int end = 0; end < (levels.both_ends ? 2 : 1); ++end)
    for (int i = -levels.n_steps; i <= levels.n_steps; ++i)
      consider_scale(runs, (end == 0 ? levels.low : levels.high) * (1.0f + width * static_cast<float>(i)) * unit, levels, best_gain, best);
  for (int i = 0; i < 2; ++i) consider_scale(runs, inverse_or_zero(best), levels, best_gain, best);
  return best;
}

}  // namespace cachalot
