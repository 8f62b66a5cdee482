// Products on AMX tiles in bf16: of weights in the wide layout, and of decoded rows.
//
// Two groups of 16 rows pass together, with up to three tiles of tokens: six tiles of sums stay in registers for all columns. While the
// tiles of one chunk of columns are multiplied, the vector units open the weights of a later one.
#pragma once

#include "cpu/isa/amx_open.h"
#include "cpu/isa/amx_tiles.h"
#include "cpu/isa/bf16_form.h"

namespace cachalot::cpu {
namespace {

constexpr int kPairBytes = 2 * kTileBytes;  // of a chunk of two groups, opened
constexpr int kMostTiles = 3;               // of tokens at a time
constexpr int kAheadChunks = 2;             // opened before they are multiplied: tiles cannot read stores that are still on their way
constexpr int kRingChunks = 8;              // of opened weights: they stay in the first cache

constexpr TileShapes bf16_shapes() {
  TileShapes s;
  for (int t = 0; t < 8; ++t) s.set(t, kTileTokenRows, kRowBytes);
  return s;
}
constexpr TileShapes kBf16Shapes = bf16_shapes();

// Sums of tile m of tokens with group n are in tile 2 m + n.
template <int M>
inline void zero_sums() {
  tile_zero<0>();
  tile_zero<1>();
  if constexpr (M > 1) {
    tile_zero<2>();
    tile_zero<3>();
  }
  if constexpr (M > 2) {
    tile_zero<4>();
    tile_zero<5>();
  }
}
template <int M>
inline void store_sums(uint8_t* to) {
  tile_store<0>(to, kRowBytes);
  tile_store<1>(to + kTileBytes, kRowBytes);
  if constexpr (M > 1) {
    tile_store<2>(to + 2 * kTileBytes, kRowBytes);
    tile_store<3>(to + 3 * kTileBytes, kRowBytes);
  }
  if constexpr (M > 2) {
    tile_store<4>(to + 4 * kTileBytes, kRowBytes);
    tile_store<5>(to + 5 * kTileBytes, kRowBytes);
  }
}
// One chunk in six steps of a product or none: a [M] tiles of tokens a_step apart, first and second the weights of the two groups.
template <int M, int kStep>
inline void multiply_step(const uint8_t* a, int64_t a_step, const uint8_t* first, const uint8_t* second) {
  if constexpr (M == 2) {  // registers for all four
    if constexpr (kStep == 0) {
      tile_load<4>(a, kRowBytes);
      tile_load<6>(first, kRowBytes);
      tile_dot_bf16<0, 4, 6>();
    } else if constexpr (kStep == 1) {
      tile_load<7>(second, kRowBytes);
      tile_dot_bf16<1, 4, 7>();
    } else if constexpr (kStep == 3) {
      tile_load<5>(a + a_step, kRowBytes);
      tile_dot_bf16<2, 5, 6>();
    } else if constexpr (kStep == 4) {
      tile_dot_bf16<3, 5, 7>();
    }
  } else if constexpr (kStep == 0) {
    tile_load<6>(a, kRowBytes);
    tile_load<7>(first, kRowBytes);
    tile_dot_bf16<0, 6, 7>();
  } else if constexpr (kStep == 1) {
    tile_load<7>(second, kRowBytes);
    tile_dot_bf16<1, 6, 7>();
  } else if constexpr (M == 3 && kStep == 2) {
    tile_load<6>(a + a_step, kRowBytes);
    tile_dot_bf16<3, 6, 7>();
  } else if constexpr (M == 3 && kStep == 3) {
    tile_load<7>(first, kRowBytes);
    tile_dot_bf16<2, 6, 7>();
  } else if constexpr (M == 3 && kStep == 4) {
    tile_load<6>(a + 2 * a_step, kRowBytes);
    tile_dot_bf16<4, 6, 7>();
  } else if constexpr (M == 3 && kStep == 5) {
    tile_load<7>(second, kRowBytes);
    tile_dot_bf16<5, 6, 7>();
  }
}
template <int M>
inline void multiply_chunk(const uint8_t* a, int64_t a_step, const uint8_t* first, const uint8_t* second) {
  multiply_step<M, 0>(a, a_step, first, second);
  multiply_step<M, 1>(a, a_step, first, second);
  multiply_step<M, 2>(a, a_step, first, second);
  multiply_step<M, 3>(a, a_step, first, second);
  multiply_step<M, 4>(a, a_step, first, second);
  multiply_step<M, 5>(a, a_step, first, second);
}

// Two groups of rows, which may be of different matrices of one shape.
struct RowPair {
  const WideRows& shape;
  const uint8_t* group[2];
  RowFactors factors[2];
  [[nodiscard]] int chunks_per_unit() const { return shape.unit_elems / kChunk; }
  [[nodiscard]] int64_t chunks() const { return static_cast<int64_t>(shape.n_units) * chunks_per_unit(); }
};
template <Codec C>
inline RowPair row_pair(const WideRows& w, const uint8_t* first, const uint8_t* second) {
  return {.shape = w, .group = {first, second}, .factors = {row_factors<C>(w, first), row_factors<C>(w, second)}};
}

inline void ask_for_pair(const uint8_t* first, const uint8_t* second, int64_t begin, int64_t end) {
  constexpr int64_t kAhead = 4096;
  for (int64_t i = begin; i < end; i += kRowBytes) {
    __builtin_prefetch(first + kAhead + i, 0, 2);
    __builtin_prefetch(second + kAhead + i, 0, 2);
  }
}

// Opens the pair, a few chunks at a time into the ring b, and multiplies it with M tiles of tokens; their sums go to `sums`.
template <Codec C, int M>
void open_and_multiply(const RowPair& w, const uint8_t* a, int64_t a_step, uint8_t* b, uint8_t* sums) {
  const int n_units = w.shape.n_units, per_unit = w.chunks_per_unit();
  const int64_t unit_bytes = w.shape.unit_bytes, chunk_bytes = unit_bytes / per_unit;
  int64_t opened = 0, done = 0;
  zero_sums<M>();
  const uint8_t *first = w.group[0], *second = w.group[1];
  for (int u = 0; u < n_units; ++u, first += unit_bytes, second += unit_bytes) {
    const WideCodec<C> codec_0(Unit{first, 0}), codec_1(Unit{second, 0});
    const OpenUnit<C> unit_0(codec_0, w.shape, w.factors[0].up), unit_1(codec_1, w.shape, w.factors[1].up);
    for (int c = 0; c < per_unit; ++c, ++opened) {
      ask_for_pair(first, second, c * chunk_bytes, (c + 1) * chunk_bytes);
      uint8_t* const to = b + opened % kRingChunks * kPairBytes;
      if (opened < kAheadChunks) {
        unit_0.open(c, to, [](auto) {});
        unit_1.open(c, to + kTileBytes, [](auto) {});
        continue;
      }
      const uint8_t *const a_now = a + done * kTileBytes, *const b_now = b + done % kRingChunks * kPairBytes;
      const auto multiply = [&]<int kStep>() { multiply_step<M, kStep>(a_now, a_step, b_now, b_now + kTileBytes); };
      unit_0.open(c, to, [&](auto step) { multiply.template operator()<step.value>(); });
      unit_1.open(c, to + kTileBytes, [&](auto step) { multiply.template operator()<3 + step.value>(); });
      ++done;
    }
  }
  for (; done < opened; ++done) {
    const uint8_t* const b_now = b + done % kRingChunks * kPairBytes;
    multiply_chunk<M>(a + done * kTileBytes, a_step, b_now, b_now + kTileBytes);
  }
  store_sums<M>(sums);
}
// Weights of bf16 are tiles as they lie.
template <int M>
void multiply_as_they_lie(const RowPair& w, const uint8_t* a, int64_t a_step, bool asks, uint8_t* sums) {
  zero_sums<M>();
  for (int64_t at = 0; at < w.chunks() * kTileBytes; at += kTileBytes) {
    if (asks) ask_for_pair(w.group[0], w.group[1], at, at + kTileBytes);
    multiply_chunk<M>(a + at, a_step, w.group[0] + at, w.group[1] + at);
  }
  store_sums<M>(sums);
}
template <Codec C, int M>
inline void multiply_tiles(const RowPair& w, const uint8_t* a, int64_t a_step, bool asks, uint8_t* ring, uint8_t* sums) {
  if constexpr (C == Codec::bf16) {
    multiply_as_they_lie<M>(w, a, a_step, asks, sums);
  } else {
    open_and_multiply<C, M>(w, a, a_step, ring, sums);
  }
}

// Calls finish(sums, first token tile, tiles) for the pair's products with tiles [begin, end) of tokens. Weights are opened again for every
// three tiles: a buffer of all columns would leave the first cache, and sums that leave the tiles after each block of columns take longer.
template <Codec C, typename Finish>
inline void multiply_pair(const RowPair& w, const uint8_t* tiles, int begin, int end, uint8_t* scratch, const Finish& finish) {
  const int64_t step = w.chunks() * kTileBytes;
  const int n = end - begin, blocks = (n + kMostTiles - 1) / kMostTiles;
  uint8_t* const sums = scratch + kRingChunks * kPairBytes;
  int tile = begin;
  for (int i = 0; i < blocks; ++i) {
    const int m = (n + i) / blocks;
    const uint8_t* const a = tiles + tile * step;
    if (m == 1) multiply_tiles<C, 1>(w, a, step, i == 0, scratch, sums);
    if (m == 2) multiply_tiles<C, 2>(w, a, step, i == 0, scratch, sums);
    if (m == 3) multiply_tiles<C, 3>(w, a, step, i == 0, scratch, sums);
    finish(sums, tile, m);
    tile += m;
  }
}

// Tiles of tokens that stay in the second cache while all rows pass.
inline int tokens_block(int64_t chunks) {
  constexpr int64_t kBytes = 1024 * 1024;
  const int64_t fitting = kBytes / (chunks * kTileBytes) / kMostTiles * kMostTiles;
  return static_cast<int>(fitting < kMostTiles ? kMostTiles : fitting);
}
inline F sums_row(const uint8_t* sums, int tile, int t, int group) {
  return load(reinterpret_cast<const float*>(sums + (2 * tile + group) * kTileBytes + t * kRowBytes));
}

// Where the pair's results go: rows [row, row + 32) of a product, or as many as it has.
struct PairResults {
  const WideProduct& p;
  int row, n_rows, n_groups;

  // The sums of m tiles of tokens.
  void finish(const RowFactors* factors, const uint8_t* sums, int tile, int m) const {
    const F first = factors[0].down, second = factors[1].down;
    const bool whole = row + 2 * kWideRows <= n_rows && p.bias == nullptr;
    for (int i = 0; i < m; ++i) {
      const int t0 = (tile + i) * kTileTokenRows, n = p.n_tokens - t0 < kTileTokenRows ? p.n_tokens - t0 : kTileTokenRows;
      if (whole && p.factors != nullptr) {
        for (int t = 0; t < n; ++t) {
          float* const y = p.y[t0 + t] + p.y_col + row;
          const F factor = set1(p.factors[t0 + t]);
          store(y, fma(mul(sums_row(sums, i, t, 0), first), factor, load(y)));
          store(y + kWidth, fma(mul(sums_row(sums, i, t, 1), second), factor, load(y + kWidth)));
        }
      } else if (whole && p.beta == 0.0f) {
        for (int t = 0; t < n; ++t) {
          float* const y = p.y[t0 + t] + p.y_col + row;
          store(y, mul(sums_row(sums, i, t, 0), first));
          store(y + kWidth, mul(sums_row(sums, i, t, 1), second));
        }
      } else {
        for (int t = 0; t < n; ++t)
          for (int g = 0; g < n_groups; ++g) finish_group(g, t0 + t, mul(sums_row(sums, i, t, g), factors[g].down));
      }
    }
  }
  void finish_group(int g, int t, F sum) const {
    const int at = row + g * kWideRows;
    if (p.factors == nullptr) return finish_wide(p, at, n_rows, t, sum);
    float* const y = p.y[t] + p.y_col + at;
    const int n = n_rows - at < kWideRows ? n_rows - at : kWideRows;
    const auto lanes = static_cast<__mmask16>((1u << n) - 1);
    _mm512_mask_storeu_ps(y, lanes, fma(set1(p.factors[t]), sum, _mm512_maskz_loadu_ps(lanes, y)));
  }
};

template <Codec C>
void bf16_product(const WideRows& w, const WideProduct& p) {
  const TileScope scope(kBf16Shapes);
  const int64_t group_bytes = static_cast<int64_t>(w.n_units) * w.unit_bytes;
  const int64_t chunks = static_cast<int64_t>(w.n_units) * w.unit_elems / kChunk;
  const int n_tiles = (p.n_tokens + kTileTokenRows - 1) / kTileTokenRows, n_groups = (w.n_rows + kWideRows - 1) / kWideRows;
  const int block = tokens_block(chunks);
  for (int begin = 0; begin < n_tiles; begin += block) {
    const int end = n_tiles - begin < block ? n_tiles : begin + block;
    for (int g = 0; g < n_groups; g += 2) {
      const PairResults results{p, g * kWideRows, w.n_rows, g + 1 < n_groups ? 2 : 1};
      const RowPair pair = row_pair<C>(w, w.data + g * group_bytes, w.data + (g + results.n_groups - 1) * group_bytes);
      multiply_pair<C>(pair, p.tiles, begin, end, p.scratch,
                       [&](const uint8_t* from, int tile, int m) { results.finish(pair.factors, from, tile, m); });
    }
  }
}

// Within 7e-5, of which rounding to bf16 leaves nothing.
inline F swiglu(F gate, F up) {
  const F e = Bf16Form::exp_of(vmin(set1(100.0f), sub(zero(), gate)));  // the minimum keeps NaN, which is its second operand
  return mul(mul(gate, up), _mm512_rcp14_ps(add(set1(1.0f), e)));
}

// As rows of tiles for the next product: [token tile][h_chunks] from column p.y_col on.
template <Codec C>
void bf16_swiglu(const WideRows& gate, const WideRows& up, const WideProduct& p, uint8_t* h, int h_chunks) {
  const TileScope scope(kBf16Shapes);
  const int64_t group_bytes = static_cast<int64_t>(gate.n_units) * gate.unit_bytes;
  const int64_t chunks = static_cast<int64_t>(gate.n_units) * gate.unit_elems / kChunk;
  const int n_tiles = (p.n_tokens + kTileTokenRows - 1) / kTileTokenRows, n_groups = (gate.n_rows + kWideRows - 1) / kWideRows;
  const int block = tokens_block(chunks);
  const F factor = set1(kActivationFactor);
  const __m512i order = _mm512_set_epi32(15, 13, 11, 9, 14, 12, 10, 8, 7, 5, 3, 1, 6, 4, 2, 0);
  for (int begin = 0; begin < n_tiles; begin += block) {
    const int end = n_tiles - begin < block ? n_tiles : begin + block;
    for (int g = 0; g < n_groups; ++g) {
      const RowPair pair = row_pair<C>(gate, gate.data + g * group_bytes, up.data + g * group_bytes);
      const int column = p.y_col + g * kWideRows;
      multiply_pair<C>(pair, p.tiles, begin, end, p.scratch, [&](const uint8_t* from, int tile, int m) {
        for (int i = 0; i < m; ++i) {
          uint8_t* const to = h + (static_cast<int64_t>(tile + i) * h_chunks + column / kChunk) * kTileBytes + column % kChunk * 2;
          for (int t = 0; t < kTileTokenRows; ++t) {
            const F y = swiglu(mul(sums_row(from, i, t, 0), pair.factors[0].down), mul(sums_row(from, i, t, 1), pair.factors[1].down));
            const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_permutexvar_ps(order, mul(y, factor)));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + t * kRowBytes), reinterpret_cast<__m256i>(rounded));
          }
        }
      });
    }
  }
}

inline void gather_bf16(const float* const* x, int n_tokens, int n_cols, uint8_t* tiles) {
  for (int k = 0; k < n_cols; k += kChunk)
    for (int t = 0; t < kTileTokenRows; ++t, tiles += kRowBytes)
      _mm512_storeu_si512(tiles, t < n_tokens ? tile_row(load(x[t] + k), load(x[t] + k + kWidth)) : iset1(0));
}

}  // namespace
}  // namespace cachalot::cpu
