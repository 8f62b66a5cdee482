// Matrix products: gemv (weights decoded in registers), decode (weights to an f32 panel) and gemm (panel times activations).
//
// All keep one accumulator vector per output, summed over k in steps of the vector width, and reduce it by the same tree; so an output does
// not depend on which of them computed it. Four rows at a time give four independent chains per token, enough to hide the latency of FMA.
#pragma once

#include "cpu/isa/codecs.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/vector_math.h"

namespace cachalot::cpu {
namespace {

// Reduces and stores the sums of rows [row, row + 4) for tokens [t0, t0 + T).
template <int T>
inline void finish(const Product& p, int row, int n_rows, int t0, const F (&sum)[kGroupRows][T]) {
  alignas(64) float sums[T][kGroupRows];
  if constexpr (kReducesTile && T == 4) {
    reduce_tile(sum, sums);
  } else {
    for (int t = 0; t < T; ++t) reduce_add4(sum[0][t], sum[1][t], sum[2][t], sum[3][t], sums[t]);
  }
  const bool plain = p.bias == nullptr && p.beta == 0.0f && row + kGroupRows <= n_rows;
  const int n = n_rows - row < kGroupRows ? n_rows - row : kGroupRows;
  for (int t = 0; t < T; ++t) {
    float* const y = p.y[t0 + t] + p.y_col + row;
    if (plain) {
      __builtin_memcpy(y, sums[t], sizeof sums[t]);
      continue;
    }
    for (int r = 0; r < n; ++r) {
      float value = sums[t][r];
      if (p.bias != nullptr) value += p.bias[row + r];
      if (p.beta != 0.0f) value += p.beta * y[r];
      y[r] = value;
    }
  }
}

// The scales of the FP8 blocks that a group's rows lie in; a group never crosses a border, 128 being a multiple of 4.
inline const float* group_scales(const WeightRows& w, int row) { return w.scales + (w.first_row + row) / 128 * w.scale_stride; }

// Memory is asked for what comes a few kilobytes later, so that it works while several tokens are computed.
template <Codec C, int T>
void gemv_tokens(const WeightRows& w, const Product& p, int t0) {
  using D = Decoder<C>;
  constexpr int64_t kAhead = 4096;
  const int n_chunks = D::kChunks > 0 ? D::kChunks : w.block_elems / kChunk;
  const float* x[T];
  for (int t = 0; t < T; ++t) x[t] = p.x[t0 + t];
  const uint8_t* block = w.data;
  for (int row = 0; row < w.n_rows; row += kGroupRows) {
    const float* scales = C == Codec::fp8 ? group_scales(w, row) : nullptr;
    F sum[kGroupRows][T];
    for (int r = 0; r < kGroupRows; ++r)
      for (int t = 0; t < T; ++t) sum[r][t] = zero();
    int k = 0;
    for (int b = 0; b < w.n_blocks; ++b) {
      if (t0 == 0)
        for (int64_t i = 0; i < kGroupRows * w.block_bytes; i += 64) __builtin_prefetch(block + kAhead + i);
      typename D::Block opened[kGroupRows];
#pragma GCC unroll 4
      for (int r = 0; r < kGroupRows; ++r) D::open(block + r * w.block_bytes, C == Codec::fp8 ? scales[k / 128] : 0.0f, opened[r]);
#pragma GCC unroll 8
      for (int c = 0; c < n_chunks; ++c, k += kChunk) {
#pragma GCC unroll 4
        for (int r = 0; r < kGroupRows; ++r) {
          F values[kVecs];
          D::chunk(opened[r], c, values);
#pragma GCC unroll 4
          for (int v = 0; v < kVecs; ++v)
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) sum[r][t] = fma(values[v], load(x[t] + k + v * kWidth), sum[r][t]);
        }
      }
      block += kGroupRows * w.block_bytes;
    }
    finish<T>(p, row, w.n_rows, t0, sum);
  }
}

template <Codec C>
void gemv(const WeightRows& w, const Product& p) {
  int t = 0;
  if constexpr (kGemvTokens >= 4)
    for (; t + 4 <= p.n_tokens; t += 4) gemv_tokens<C, 4>(w, p, t);
  if constexpr (kGemvTokens >= 2)
    for (; t + 2 <= p.n_tokens; t += 2) gemv_tokens<C, 2>(w, p, t);
  for (; t < p.n_tokens; ++t) gemv_tokens<C, 1>(w, p, t);
}

template <Codec C>
void decode(const WeightRows& w, float* panel, int64_t stride) {
  using D = Decoder<C>;
  const int n_chunks = D::kChunks > 0 ? D::kChunks : w.block_elems / kChunk;
  const uint8_t* block = w.data;
  for (int row = 0; row < w.n_rows; row += kGroupRows) {
    const float* scales = C == Codec::fp8 ? group_scales(w, row) : nullptr;
    int k = 0;
    for (int b = 0; b < w.n_blocks; ++b, k += n_chunks * kChunk) {
      for (int r = 0; r < kGroupRows; ++r) {
        typename D::Block opened;
        D::open(block + r * w.block_bytes, C == Codec::fp8 ? scales[k / 128] : 0.0f, opened);
        float* out = panel + (row + r) * stride + k;
#pragma GCC unroll 8
        for (int c = 0; c < n_chunks; ++c) {
          F values[kVecs];
          D::chunk(opened, c, values);
          for (int v = 0; v < kVecs; ++v) store(out + c * kChunk + v * kWidth, values[v]);
        }
      }
      block += kGroupRows * w.block_bytes;
    }
  }
}

template <Element E, int T>
void gemm_tile(const Panel& w, const Product& p, int row, int t0) {
  const float* x[T];
  for (int t = 0; t < T; ++t) x[t] = p.x[t0 + t];
  const uint8_t* rows[kGroupRows];  // behind the last row its neighbour again, whose sums finish() drops
  for (int r = 0; r < kGroupRows; ++r)
    rows[r] = static_cast<const uint8_t*>(w.data) + (row + r < w.n_rows ? row + r : w.n_rows - 1) * w.stride;
  F sum[kGroupRows][T];
  for (int r = 0; r < kGroupRows; ++r)
    for (int t = 0; t < T; ++t) sum[r][t] = zero();
  for (int k = 0; k < w.n_cols; k += kWidth) {
    F activation[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) activation[t] = load(x[t] + k);
#pragma GCC unroll 4
    for (int r = 0; r < kGroupRows; ++r) {
      const F value = load_element<E>(rows[r] + k * kElementBytes<E>);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) sum[r][t] = fma(value, activation[t], sum[r][t]);
    }
  }
  finish<T>(p, row, w.n_rows, t0, sum);
}

// Tokens outside: their rows of x stay in the first cache while the panel passes from the second.
template <Element E>
void gemm(const Panel& w, const Product& p) {
  int t = 0;
  for (; t + kTileTokens <= p.n_tokens; t += kTileTokens)
    for (int row = 0; row < w.n_rows; row += kGroupRows) gemm_tile<E, kTileTokens>(w, p, row, t);
  const int rest = p.n_tokens - t;
  for (int row = 0; row < w.n_rows && rest > 0; row += kGroupRows) {
    if constexpr (kTileTokens > 3)
      if (rest == 3) gemm_tile<E, 3>(w, p, row, t);
    if constexpr (kTileTokens > 2)
      if (rest == 2) gemm_tile<E, 2>(w, p, row, t);
    if constexpr (kTileTokens > 1)
      if (rest == 1) gemm_tile<E, 1>(w, p, row, t);
  }
}

}  // namespace
}  // namespace cachalot::cpu
