// Attention over one tile of context: scores, a softmax that carries its state, and the weighted sum of the values.
//
// Scores keep queries in the lanes and broadcast the numbers of a key, so they need no sums across lanes and the softmax runs down the
// rows. The sum of values keeps the numbers of a value in the lanes and broadcasts weights. Every output has one order of summation.
// A Form says what 4 bytes hold: F32Form here, pairs of bf16 in avx512bf16.cpp.
#pragma once

#include "cpu/isa/vector_math.h"
#if defined(__AVX512F__)
#include "cpu/isa/narrow_attention.h"
#endif

namespace cachalot::cpu {
namespace {

inline constexpr bool kManyRegisters = kWidth == 16;          // 32 vector registers rather than 16
inline constexpr int kScoreRows = kManyRegisters ? 8 : 4;     // times one group, or half as many rows times two: with two sums each
inline constexpr int kValueQueries = kManyRegisters ? 8 : 4;  // times two vectors of values

inline float float_at(const void* p) {
  float out;
  __builtin_memcpy(&out, p, sizeof out);
  return out;
}

// Asks for the next tile, a few lines at each step of the work on this one.
struct Ahead {
  const AttentionTile& tile;
  int lines_per_step;
  int list = 0, row = 0, offset = 0;

  Ahead(const AttentionTile& t, int n_steps) : tile(t) {
    const int lines = t.n_ahead * ((t.ahead_bytes[0] + 63) / 64 + (t.ahead_bytes[1] + 63) / 64);
    lines_per_step = (lines + n_steps - 1) / n_steps;
  }
  void step() {
    for (int i = 0; i < lines_per_step; ++i) {
      while (offset >= tile.ahead_bytes[list]) {
        offset = 0;
        if (++row < tile.n_ahead) continue;
        row = 0;
        if (++list == 2) {
          lines_per_step = 0;
          return;
        }
      }
      const uint8_t* const line = static_cast<const uint8_t*>(tile.ahead[list][row]) + offset;
#if defined(__x86_64__)
      __asm__ volatile("prefetcht1 %0" : : "m"(*line));
#else
      __builtin_prefetch(line, 0, 2);
#endif
      offset += 64;
    }
  }
};

// Work that is done beside another: step() does a part of it.
struct NoWork {
  void step() {}
};

struct F32Form {
  static constexpr int kNumbers = 1;   // of a row in 4 bytes
  static constexpr int kStepRows = 1;  // rows of context whose weights share 4 bytes
  static constexpr int kVMultiple = kWidth;
  static F dot(F a, F b, F c) { return fma(a, b, c); }
  // Vectors of the row of this step from its number d on.
  template <int V>
  static void values(const void* const* rows, int step, int d, F (&v)[V]) {
    const float* const row = static_cast<const float*>(rows[step]) + d;
    for (int i = 0; i < V; ++i) v[i] = load(row + i * kWidth);
  }
  static F exp_of(F x) { return vexp(x); }
  // The base of weights exp(score - base), when `top` is the largest new score.
  static F new_base(F before, F top) { return vmax(before, top); }
  // n_rows vectors of scores become weights; returns their sum. A step of `beside` for every four.
  template <class Work>
  static F weights(float* s, int n_rows, F base, Work& beside) {
    F sum[4] = {zero(), zero(), zero(), zero()};
    for (int r = 0; r < n_rows; r += 4) {
      for (int i = 0; i < 4; ++i) {
        const F p = vexp(sub(load(s + (r + i) * kWidth), base));
        store(s + (r + i) * kWidth, p);
        sum[i] = add(sum[i], p);
      }
      beside.step();
    }
    return add(add(sum[0], sum[1]), add(sum[2], sum[3]));
  }
  // kWidth units of a query.
  static F units(const float* q, F scale) { return mul(load(q), scale); }
  static void make_row(const float* src, int n, void* row) { __builtin_memcpy(row, src, static_cast<size_t>(n) * sizeof(float)); }
  static void write_row(const float* row, float factor, int n, float* y) {
    map(row, n, y, [factor](F a) { return mul(a, set1(factor)); });
  }
};

// Scores of R rows from `row` on and of V groups from `group` on.
template <class Form, int R, int V>
inline void score_block(const AttentionTile& t, int group, int row) {
  const int n_units = t.k_dim / Form::kNumbers;
  const float* const queries = static_cast<const float*>(t.queries) + static_cast<int64_t>(group) * n_units * kWidth;
  const uint8_t* keys[R];
  for (int r = 0; r < R; ++r) keys[r] = static_cast<const uint8_t*>(t.keys[row + r]);
  F sum[2][R][V];
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sum[half][r][v] = zero();
  const auto add_unit = [&](int i, F(&to)[R][V]) {
    F query[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) query[v] = load(queries + (static_cast<int64_t>(v) * n_units + i) * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F key = set1(float_at(keys[r] + 4 * i));
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) to[r][v] = Form::dot(query[v], key, to[r][v]);
    }
  };
  int i = 0;
  for (; i + 2 <= n_units; i += 2) {
    add_unit(i, sum[0]);
    add_unit(i + 1, sum[1]);
  }
  if (i < n_units) add_unit(i, sum[0]);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store(t.scores + ((group + v) * kTileRows + row + r) * kWidth, add(sum[0][r][v], sum[1][r][v]));
}

// The scores s of a group become weights, and its state moves on. Rows behind the last get weight 0.
template <class Form, class Work>
inline void softmax_group(const AttentionTile& t, int group, int padded_rows, float* s, Work& beside) {
  const F lowest = set1(-__builtin_inff());
  if (t.visible != nullptr) {
    int limits[kWidth];
    __builtin_memcpy(limits, t.visible + group * kWidth, sizeof limits);
    I visible;
    __builtin_memcpy(&visible, limits, sizeof limits);
    for (int r = 0; r < padded_rows; ++r) {
      const I seen = igreater(visible, iset1(r));
      store(s + r * kWidth, as_float(ior(iand(seen, as_int(load(s + r * kWidth))), iand(igreater(iset1(r + 1), visible), as_int(lowest)))));
    }
  } else {
    for (int r = t.n_rows; r < padded_rows; ++r) store(s + r * kWidth, lowest);
  }
  F top[4] = {lowest, lowest, lowest, lowest};
  for (int r = 0; r < padded_rows; r += 4)
    for (int i = 0; i < 4; ++i) top[i] = vmax(top[i], load(s + (r + i) * kWidth));
  float *const largest = t.largest + group * kWidth, *const sum = t.sum + group * kWidth;
  const F before = t.first ? lowest : load(largest);
  const F now = Form::new_base(before, vmax(vmax(top[0], top[1]), vmax(top[2], top[3])));
  const F base = vmax(now, set1(-3e38f));  // finite where nothing was seen, so that -inf - base is -inf
  const F weights = Form::weights(s, padded_rows, base, beside);
  if (t.first) {
    store(sum, weights);
  } else {
    const F correction = Form::exp_of(sub(before, base));
    store(t.correction + group * kWidth, correction);
    store(sum, fma(load(sum), correction, weights));
  }
  store(largest, now);
}
template <class Form>
inline void softmax_group(const AttentionTile& t, int group, int padded_rows, float* s) {
  NoWork none;
  softmax_group<Form>(t, group, padded_rows, s, none);
}

// Adds the weighted values of the tile to numbers [d, d + V vectors) of Q queries; weights lie [rows or their pairs][L].
template <class Form, int Q, int V, int L = kWidth>
inline void value_block(const AttentionTile& t, int query, int d, Ahead* ahead) {
  float* const out = t.out + static_cast<int64_t>(query) * t.v_dim + d;
  F sum[Q][V];
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v)
      sum[q][v] = t.first ? zero() : mul(load(out + static_cast<int64_t>(q) * t.v_dim + v * kWidth), set1(t.correction[query + q]));
  const float* const weights = t.scores + query / kWidth * kTileRows * kWidth + query % kWidth;
  const int n_steps = (t.n_rows + Form::kStepRows - 1) / Form::kStepRows;
  for (int i = 0; i < n_steps; ++i) {
    F value[V];
    Form::values(t.values, i, d, value);
    const float* const w = weights + i * L;
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
      const F p = set1(float_at(w + q));
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sum[q][v] = Form::dot(p, value[v], sum[q][v]);
    }
    if (ahead != nullptr) ahead->step();
  }
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store(out + static_cast<int64_t>(q) * t.v_dim + v * kWidth, sum[q][v]);
}

template <class Form, int V>
inline void value_column(const AttentionTile& t, int d, Ahead& ahead) {
  int query = 0;
  for (; query + kValueQueries <= t.n_queries; query += kValueQueries)
    value_block<Form, kValueQueries, V>(t, query, d, query == 0 ? &ahead : nullptr);
  if constexpr (kValueQueries > 4) {
    if (t.n_queries - query > 4) {
      value_block<Form, kValueQueries, V>(t, query, d, query == 0 ? &ahead : nullptr);
      query = t.n_queries;
    }
  }
  if (query < t.n_queries) value_block<Form, 4, V>(t, query, d, query == 0 ? &ahead : nullptr);
}

#if defined(__AVX512F__)
template <class Form>
void attend_narrow(const AttentionTile& t, int padded_rows) {
  for (int row = 0; row < padded_rows; row += kNarrowKeys) narrow_scores(t, row, padded_rows);
  narrow_softmax(t, padded_rows);
  Ahead ahead(t, (t.v_dim + 2 * kWidth - 1) / (2 * kWidth) * t.n_rows);
  int d = 0;
  for (; d + 2 * kWidth <= t.v_dim; d += 2 * kWidth) value_block<Form, kNarrowQueries, 2, kNarrowQueries>(t, 0, d, &ahead);
  if (d < t.v_dim) value_block<Form, kNarrowQueries, 1, kNarrowQueries>(t, 0, d, &ahead);
}
#endif

template <class Form>
void attend_tile(const AttentionTile& t) {
  const int n_groups = (t.n_queries + kWidth - 1) / kWidth, padded_rows = (t.n_rows + kRowMultiple - 1) / kRowMultiple * kRowMultiple;
#if defined(__AVX512F__)
  if constexpr (Form::kNumbers == 1) {
    if (is_narrow(t)) return attend_narrow<Form>(t, padded_rows);
  }
#endif
  int group = 0;
  for (; group + 2 <= n_groups; group += 2)
    for (int row = 0; row < padded_rows; row += kScoreRows / 2) score_block<Form, kScoreRows / 2, 2>(t, group, row);
  for (int row = 0; group < n_groups && row < padded_rows; row += kScoreRows) score_block<Form, kScoreRows, 1>(t, group, row);
  for (group = 0; group < n_groups; ++group) softmax_group<Form>(t, group, padded_rows, t.scores + group * kTileRows * kWidth);
  Ahead ahead(t, (t.v_dim + 2 * kWidth - 1) / (2 * kWidth) * ((t.n_rows + Form::kStepRows - 1) / Form::kStepRows));
  int d = 0;
  for (; d + 2 * kWidth <= t.v_dim; d += 2 * kWidth) value_column<Form, 2>(t, d, ahead);
  if constexpr (Form::kVMultiple == kWidth)
    if (d < t.v_dim) value_column<Form, 1>(t, d, ahead);
}

template <class Form>
void pack_queries(const float* const* q, int n, int dim, float scale, void* out) {
  constexpr int kStep = kWidth * Form::kNumbers;
  const int n_units = dim / Form::kNumbers;
  const F factor = set1(scale);
  for (int first = 0; first < n; first += kWidth) {
    float* const to = static_cast<float*>(out) + static_cast<int64_t>(first) * n_units;
    for (int k = 0; k < dim; k += kStep) {
      F block[kWidth];
      for (int i = 0; i < kWidth; ++i) {
        if (first + i >= n) {
          block[i] = zero();
        } else if (k + kStep <= dim) {
          block[i] = Form::units(q[first + i] + k, factor);
        } else {
          float rest[kStep] = {};
          for (int j = k; j < dim; ++j) rest[j - k] = q[first + i][j];
          block[i] = Form::units(rest, factor);
        }
      }
      transpose(block);
      const int unit = k / Form::kNumbers;
      for (int i = 0; i < kWidth && unit + i < n_units; ++i) store(to + static_cast<int64_t>(unit + i) * kWidth, block[i]);
    }
  }
}

inline void merge_rows(float keep, float* total, float add, const float* part, int n) {
  for (int i = 0; i < n; i += kWidth) store(total + i, fma(load(part + i), set1(add), mul(load(total + i), set1(keep))));
}

template <class Form>
constexpr AttentionKernels make_attention() {
  return {.lanes = kWidth,
          .k_multiple = Form::kNumbers,
          .v_multiple = Form::kVMultiple,
          .query_bytes = 4 / Form::kNumbers,
          .pack_queries = pack_queries<Form>,
          .make_row = Form::make_row,
          .attend = attend_tile<Form>,
          .merge = merge_rows,
          .write_row = Form::write_row};
}

}  // namespace
}  // namespace cachalot::cpu
