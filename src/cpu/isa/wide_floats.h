// Products of weights that are floats (bf16, f16, FP8) in the wide layout with activations in f32. For the layout see cpu/wide_pack.h.
//
// A lane is a row, activations are broadcast: sums need no tree. part += w x over 128 columns in rising order, then total += part, times
// the block's scale for FP8. These operations, one chain per output, are the definition of the result: every instruction set gives the same
// bits, whatever the tokens and rows beside it. A few tokens read the weights as they lie; for more, 128 columns are opened to f32 once
// in the first cache and multiplied with tokens that were laid out column by column.
#pragma once

#include "cpu/isa/wide_finish.h"

namespace cachalot::cpu {
namespace {

inline constexpr int kEight = 8;                            // columns that are opened together
inline constexpr int kFloatBlock = 128;                     // columns of a part
inline constexpr int kFewTokens = 4;                        // up to here weights are opened in registers
inline constexpr int kBlockTokens = kWidth == 16 ? 12 : 6;  // times two vectors of rows: all registers but four
inline constexpr int kBlocksAtOnce = 504 / kBlockTokens;    // whose sums stay in the second cache while 128 columns pass
inline constexpr int kScratchFloats = 2 * kWidth * (kFloatBlock + kBlocksAtOnce * kBlockTokens);

// Opens eight columns of kWidth rows; p points at the first row's numbers.
template <Codec C>
struct Eight;
template <>
struct Eight<Codec::bf16> {
  static constexpr int kBytes = 256, kRowBytes = 4;
  static void open(const uint8_t* p, F (&v)[kEight]) {
    constexpr int kFirst[4] = {0, 4, 1, 5};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const I both = as_int(load(reinterpret_cast<const float*>(p + 64 * i)));
      v[kFirst[i]] = as_float(shl(both, 16));
      v[kFirst[i] + 2] = as_float(iand(both, iset1(static_cast<int>(0xffff0000u))));
    }
  }
};
template <>
struct Eight<Codec::f16> {
  static constexpr int kBytes = 256, kRowBytes = 2;
  static void open(const uint8_t* p, F (&v)[kEight]) {
    constexpr int kFirst[4] = {0, 4, 1, 5};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      v[kFirst[i]] = load_f16(p + 64 * i);
      v[kFirst[i] + 2] = load_f16(p + 64 * i + 32);
    }
  }
};
template <>
struct Eight<Codec::fp8> {  // read as f16, which is 2^8 too small
  static constexpr int kBytes = 128, kRowBytes = 2;
  static void open(const uint8_t* p, F (&v)[kEight]) {
    load_e4m3_columns(p, v);
    load_e4m3_columns(p + 64, v + 4);
  }
};

// Rows [row, row + kWidth) of a product.
template <Codec C>
struct FloatRows {
  const float* scales = nullptr;
  const uint8_t* codes;
  FloatRows(const WideRows& w, int row) {
    codes = w.data + static_cast<int64_t>(row / kWideRows) * w.unit_bytes;
    if constexpr (C == Codec::fp8) {
      scales = reinterpret_cast<const float*>(codes);
      codes += w.header_bytes;
    }
    codes += row % kWideRows * Eight<C>::kRowBytes;
  }
  FloatRows() = default;
  [[nodiscard]] F scale(int column) const { return set1(C == Codec::fp8 ? 256.0f * scales[column / kFloatBlock] : 1.0f); }
};
template <Codec C>
inline F add_part(F part, F scale, F total) {
  return C == Codec::fp8 ? fma(part, scale, total) : add(part, total);
}

// G registers of rows from `row` on times T tokens: as many chains as hide the latency of FMA.
template <Codec C, int G, int T>
inline void few_tokens(const WideRows& w, const WideProduct& p, int row, int t0) {
  constexpr int kAhead = 4096;
  const float* x[T];
  FloatRows<C> rows[G];
  F total[G][T], part[G][T];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
    rows[g] = FloatRows<C>(w, row + g * kWidth);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) total[g][t] = zero();
  }
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) x[t] = p.rows[t0 + t];
  for (int begin = 0; begin < w.unit_elems; begin += kFloatBlock) {
    const int end = w.unit_elems - begin < kFloatBlock ? w.unit_elems : begin + kFloatBlock;
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) part[g][t] = zero();
    for (int k = begin; k < end; k += kEight) {
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        if (t0 == 0) {
#pragma GCC unroll 4
          for (int i = 0; i < Eight<C>::kBytes; i += 64) __builtin_prefetch(rows[g].codes + kAhead + i);
        }
        F v[kEight];
        Eight<C>::open(rows[g].codes, v);
        rows[g].codes += Eight<C>::kBytes;
#pragma GCC unroll 8
        for (int c = 0; c < kEight; ++c)
#pragma GCC unroll 4
          for (int t = 0; t < T; ++t) part[g][t] = fma(v[c], set1(x[t][k + c]), part[g][t]);
      }
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const F scale = rows[g].scale(begin);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) total[g][t] = add_part<C>(part[g][t], scale, total[g][t]);
    }
  }
  for (int g = 0; g < G; ++g)
    for (int t = 0; t < T; ++t) finish_wide(p, row + g * kWidth, w.n_rows, t0 + t, total[g][t]);
}
template <Codec C, int T>
inline void few_tokens(const WideRows& w, const WideProduct& p, int t0) {
  constexpr int kGroups = kWidth == 16 ? (T > 2 ? 2 : 4) : (T > 2 ? 1 : 4 / T);
  int row = 0;
  for (; row + kGroups * kWidth < w.n_rows + kWidth; row += kGroups * kWidth) few_tokens<C, kGroups, T>(w, p, row, t0);
  if constexpr (kGroups > 1)
    for (; row < w.n_rows; row += kWidth) few_tokens<C, 1, T>(w, p, row, t0);
}

// Adds n columns of V opened registers of rows, w [n][V][kWidth], times T tokens, x [n][T], to total [T][V][kWidth].
template <bool kScaled, int V, int T>
void multiply_opened(const float* w, const float* x, int n, const F* scale, bool first, float* total) {
  F part[T][V];
#pragma GCC unroll 12
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) part[t][v] = zero();
  for (int k = 0; k < n; ++k, w += V * kWidth, x += T) {
    F row[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) row[v] = load(w + v * kWidth);
#pragma GCC unroll 12
    for (int t = 0; t < T; ++t) {
      const F activation = set1(x[t]);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) part[t][v] = fma(row[v], activation, part[t][v]);
    }
  }
#pragma GCC unroll 12
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v, total += kWidth) {
      const F before = first ? zero() : load(total);
      store(total, kScaled ? fma(part[t][v], scale[v], before) : add(part[t][v], before));
    }
}
using MultiplyOpened = void (*)(const float*, const float*, int, const F*, bool, float*);
template <bool kScaled, int V, int T = kBlockTokens>
inline MultiplyOpened multiply_for(int n_tokens) {
  if constexpr (T > 1) {
    if (n_tokens < T) return multiply_for<kScaled, V, T - 1>(n_tokens);
  }
  return multiply_opened<kScaled, V, T>;
}

// V registers of rows from `row` on times the blocks of tokens [begin, end).
template <Codec C, int V>
inline void many_tokens(const WideRows& w, const WideProduct& p, int row, int begin, int end) {
  constexpr bool kScaled = C == Codec::fp8;
  float* const opened = reinterpret_cast<float*>(p.scratch);  // [kFloatBlock][V][kWidth]
  float* const totals = opened + kFloatBlock * V * kWidth;    // [block][token][V][kWidth]
  const int n_cols = w.unit_elems, rest = p.n_tokens - (end - 1) * kBlockTokens;
  const MultiplyOpened whole = multiply_opened<kScaled, V, kBlockTokens>;
  const MultiplyOpened last = rest >= kBlockTokens ? whole : multiply_for<kScaled, V>(rest);
  FloatRows<C> rows[V];
  for (int v = 0; v < V; ++v) rows[v] = FloatRows<C>(w, row + v * kWidth);
  for (int k0 = 0; k0 < n_cols; k0 += kFloatBlock) {
    const int n = n_cols - k0 < kFloatBlock ? n_cols - k0 : kFloatBlock;
    F scale[V];
    for (int v = 0; v < V; ++v) {
      scale[v] = rows[v].scale(k0);
      for (int k = 0; k < n; k += kEight, rows[v].codes += Eight<C>::kBytes) {
        F columns[kEight];
        Eight<C>::open(rows[v].codes, columns);
#pragma GCC unroll 8
        for (int c = 0; c < kEight; ++c) store(opened + ((k + c) * V + v) * kWidth, columns[c]);
      }
    }
    float* total = totals;
    for (int b = begin; b < end; ++b, total += kBlockTokens * V * kWidth) {
      const bool short_one = b + 1 == end && rest < kBlockTokens;
      const int64_t width = short_one ? rest : kBlockTokens;
      (short_one ? last : whole)(opened, p.packed + static_cast<int64_t>(b) * kBlockTokens * n_cols + k0 * width, n, scale, k0 == 0, total);
    }
  }
  const float* total = totals;
  const int stop = end * kBlockTokens < p.n_tokens ? end * kBlockTokens : p.n_tokens;
  for (int t = begin * kBlockTokens; t < stop; ++t)
    for (int v = 0; v < V; ++v, total += kWidth) finish_wide(p, row + v * kWidth, w.n_rows, t, load(total));
}

template <Codec C>
void float_product(const WideRows& w, const WideProduct& p) {
  if (p.packed == nullptr) {
    int t = 0;
    for (; t + 4 <= p.n_tokens; t += 4) few_tokens<C, 4>(w, p, t);
    if (p.n_tokens - t == 3) few_tokens<C, 3>(w, p, t);
    if (p.n_tokens - t == 2) few_tokens<C, 2>(w, p, t);
    if (p.n_tokens - t == 1) few_tokens<C, 1>(w, p, t);
    return;
  }
  const int n_blocks = (p.n_tokens + kBlockTokens - 1) / kBlockTokens;
  for (int begin = 0; begin < n_blocks; begin += kBlocksAtOnce) {
    const int end = n_blocks - begin < kBlocksAtOnce ? n_blocks : begin + kBlocksAtOnce;
    int row = 0;
    for (; row + kWidth < w.n_rows; row += 2 * kWidth) many_tokens<C, 2>(w, p, row, begin, end);
    if (row < w.n_rows) many_tokens<C, 1>(w, p, row, begin, end);
  }
}

inline void pack_tokens(const float* const* x, int n_tokens, int n_cols, float* out) {
  for (int k = 0; k < n_cols; ++k)
    for (int t = 0; t < n_tokens; ++t) *out++ = x[t][k];
}

constexpr WideKernels with_floats(WideKernels k) {
  k.block_tokens = kBlockTokens;
  k.few_tokens = kFewTokens;
  k.scratch_bytes = kScratchFloats * sizeof(float);
  k.pack_tokens = pack_tokens;
  k.product[static_cast<int>(Codec::f16)] = float_product<Codec::f16>;
  k.product[static_cast<int>(Codec::bf16)] = float_product<Codec::bf16>;
  k.product[static_cast<int>(Codec::fp8)] = float_product<Codec::fp8>;
  return k;
}

}  // namespace
}  // namespace cachalot::cpu
