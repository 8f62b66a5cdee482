// Products on AMX tiles of decoded rows, in bf16: weights are the left factor, as a decoded row is a row of its tile as it lies; the sums'
// columns, tokens, are turned at the end.
#pragma once

#include "cpu/isa/amx_bf16.h"

namespace cachalot::cpu {
namespace {

// C[m][n] += A[m] B[n] over `chunks` tiles each; m < M tiles of 16 rows, n < N of 16 columns; c: [M][N] tiles of f32.
template <int M, int N>
inline void bf16_tiles(const uint8_t* a, int64_t a_step, const uint8_t* b, int64_t b_step, int64_t chunks, uint8_t* c) {
  tile_zero<0>();
  if constexpr (N == 2) tile_zero<1>();
  if constexpr (M == 2) tile_zero<2>();
  if constexpr (M == 2 && N == 2) tile_zero<3>();
  for (int64_t chunk = 0; chunk < chunks; ++chunk, a += kTileBytes, b += kTileBytes) {
    tile_load<4>(a, kRowBytes);
    tile_load<6>(b, kRowBytes);
    tile_dot_bf16<0, 4, 6>();
    if constexpr (N == 2) {
      tile_load<7>(b + b_step, kRowBytes);
      tile_dot_bf16<1, 4, 7>();
    }
    if constexpr (M == 2) {
      tile_load<5>(a + a_step, kRowBytes);
      tile_dot_bf16<2, 5, 6>();
      if constexpr (N == 2) tile_dot_bf16<3, 5, 7>();
    }
  }
  tile_store<0>(c, kRowBytes);
  if constexpr (N == 2) tile_store<1>(c + kTileBytes, kRowBytes);
  if constexpr (M == 2) tile_store<2>(c + N * kTileBytes, kRowBytes);
  if constexpr (M == 2 && N == 2) tile_store<3>(c + 3 * kTileBytes, kRowBytes);
}
inline void bf16_tiles(int m, int n, const uint8_t* a, const uint8_t* b, int64_t chunks, uint8_t* c) {
  const int64_t step = chunks * kTileBytes;
  if (m == 2 && n == 2) return bf16_tiles<2, 2>(a, step, b, step, chunks, c);
  if (m == 2) return bf16_tiles<2, 1>(a, step, b, step, chunks, c);
  if (n == 2) return bf16_tiles<1, 2>(a, step, b, step, chunks, c);
  bf16_tiles<1, 1>(a, step, b, step, chunks, c);
}
inline I load_bf16(const float* x) { return reinterpret_cast<I>(_mm512_cvtne2ps_pbh(load(x + kWidth), load(x))); }

// Rows become columns: 32 bits each.
inline void transpose(I (&r)[16]) {
  I s[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    s[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    s[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(s[4 * i], s[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(s[4 * i], s[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(s[4 * i + 1], s[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(s[4 * i + 1], s[4 * i + 3]);
  }
  // r[4 i + j], 128 bits at q: column 4 q + j of rows 4 i .. 4 i + 3.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    s[j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
    s[4 + j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
    s[8 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    s[12 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    r[j] = _mm512_shuffle_i32x4(s[j], s[8 + j], 0x88);
    r[8 + j] = _mm512_shuffle_i32x4(s[j], s[8 + j], 0xdd);
    r[4 + j] = _mm512_shuffle_i32x4(s[4 + j], s[12 + j], 0x88);
    r[12 + j] = _mm512_shuffle_i32x4(s[4 + j], s[12 + j], 0xdd);
  }
}

inline void gather_pairs(const float* const* x, int n_tokens, int n_cols, uint8_t* tiles) {
  for (int k = 0; k < n_cols; k += kChunk, tiles += kTileBytes) {
    I rows[16];
    for (int t = 0; t < kTileTokenRows; ++t) rows[t] = t < n_tokens ? load_bf16(x[t] + k) : iset1(0);
    transpose(rows);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(tiles + kRowBytes * i, rows[i]);
  }
}

inline void gemm_bf16(const Panel& w, const WideProduct& p) {
  const TileScope scope(kBf16Shapes);
  const int64_t chunks = w.n_cols / kChunk, step = chunks * kTileBytes;
  uint8_t* const sums = p.scratch + 2 * step;
  const int n_tiles = (p.n_tokens + kTileTokenRows - 1) / kTileTokenRows;
  for (int row = 0; row < w.n_rows; row += 2 * kWideRows) {
    const int m = row + kWideRows < w.n_rows ? 2 : 1;
    for (int r = 0; r < m * kWideRows; ++r) {
      const auto* const from =
          reinterpret_cast<const float*>(static_cast<const uint8_t*>(w.data) + (row + r < w.n_rows ? row + r : w.n_rows - 1) * w.stride);
      uint8_t* const to = p.scratch + r / kWideRows * step + r % kWideRows * kRowBytes;
      for (int64_t c = 0; c < chunks; ++c) _mm512_store_si512(to + c * kTileBytes, load_bf16(from + c * kChunk));
    }
    for (int tile = 0; tile < n_tiles; tile += 2) {
      const int n = tile + 1 < n_tiles ? 2 : 1;
      bf16_tiles(m, n, p.scratch, p.tiles + tile * step, chunks, sums);
      for (int i = 0; i < m; ++i) {
        for (int j = 0; j < n; ++j) {
          I rows[16];
          for (int r = 0; r < 16; ++r) rows[r] = _mm512_load_si512(sums + (i * n + j) * kTileBytes + r * kRowBytes);
          transpose(rows);
          const int t0 = (tile + j) * kTileTokenRows;
          for (int t = 0; t < kTileTokenRows && t0 + t < p.n_tokens; ++t)
            finish_wide(p, row + i * kWideRows, w.n_rows, t0 + t, as_float(rows[t]));
        }
      }
    }
  }
}

}  // namespace
}  // namespace cachalot::cpu
