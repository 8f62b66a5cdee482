// Blocks of tile products in bf16: M tiles of tokens times two groups of 16 weight rows, whose sums stay in tiles for all columns. Three
// are the most that eight tiles hold: six of sums, one of tokens and one of weights, seven loads for the six products of a chunk of
// columns.
#pragma once

#include "cpu/isa/amx_open.h"
#include "cpu/isa/amx_tiles.h"

namespace cachalot::cpu {
namespace {

// Tiles 0 to 5 are sums, 6 tokens, 7 weights.
constexpr TileShapes bf16_shapes(int tile_rows) {
  TileShapes s;
  for (int t = 0; t < 7; ++t) s.set(t, tile_rows, kRowBytes);
  s.set(7, kWideRows, kRowBytes);
  return s;
}
constexpr TileShapes kBf16Shapes = bf16_shapes(kTileTokenRows);

// Sums of tokens m and group n are in tile 2 m + n.
template <int M>
struct TileBlock {
  static_assert(M >= 1 && M <= 3);
  static constexpr int kProducts = 2 * M;

  template <int kTile = 0>
  static void zero() {
    if constexpr (kTile < kProducts) {
      tile_zero<kTile>();
      zero<kTile + 1>();
    }
  }
  // Tiles of sums, those of a tile of tokens `step` bytes apart.
  template <int kTile = 0>
  static void store(uint8_t* to, int64_t step) {
    if constexpr (kTile < kProducts) {
      tile_store<kTile>(to + kTile / 2 * step + kTile % 2 * kTileBytes, kRowBytes);
      store<kTile + 1>(to, step);
    }
  }
  // Product number kProduct of a chunk, with the loads that it needs: tiles of tokens lie a_step apart, groups of weights b_step. Every
  // second tile of tokens begins with the second group, which is still in its register.
  template <int kProduct>
  static void multiply(const uint8_t* a, int64_t a_step, const uint8_t* b, int64_t b_step) {
    constexpr int m = kProduct / 2, turn = kProduct % 2, n = m % 2 == 0 ? turn : 1 - turn;
    if constexpr (turn == 0) tile_load<6>(a + m * a_step, kRowBytes);
    if constexpr (m == 0 || turn == 1) tile_load<7>(b + n * b_step, kRowBytes);
    tile_dot_bf16<2 * m + n, 6, 7>();
  }
  // The same with tiles of tokens at a[0..M) and groups of weights side by side, by tile_load_piece.
  template <int kProduct>
  static void multiply_piece(const uint8_t* const* a, const uint8_t* b) {
    constexpr int m = kProduct / 2, turn = kProduct % 2, n = m % 2 == 0 ? turn : 1 - turn;
    if constexpr (turn == 0) tile_load_piece<6, 0>(a[m]);
    if constexpr (m == 0 || turn == 1) tile_load_piece<7, n * kTileBytes>(b);
    tile_dot_bf16<2 * m + n, 6, 7>();
  }
  template <int kBegin = 0, int kEnd = kProducts>
  static void multiply_pieces(const uint8_t* const* a, const uint8_t* b) {
    if constexpr (kBegin < kEnd) {
      multiply_piece<kBegin>(a, b);
      multiply_pieces<kBegin + 1, kEnd>(a, b);
    }
  }
  // Products [kBegin, kEnd) of a chunk.
  template <int kBegin = 0, int kEnd = kProducts>
  static void multiply_range(const uint8_t* a, int64_t a_step, const uint8_t* b, int64_t b_step) {
    if constexpr (kBegin < kEnd) {
      multiply<kBegin>(a, a_step, b, b_step);
      multiply_range<kBegin + 1, kEnd>(a, a_step, b, b_step);
    }
  }
};

}  // namespace
}  // namespace cachalot::cpu
