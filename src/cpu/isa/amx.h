// Products on AMX tiles from the wide layout's bytes, and of decoded rows in bf16.
//
// Bytes: the codes of 16 rows are opened once per call and become B tiles; a tile product of 16 tokens, 16 rows and 32 columns gives exact
// integer sums of the upper and of the lower plane, which leave the tiles through a buffer and are then treated as in wide.h, operation by
// operation, one register of 16 rows per token. That treatment, five vector operations per token and chunk, is what the time goes to.
// Bf16: no scales are left after rounding, so sums stay in their tiles for all columns.
#pragma once

#include "cpu/isa/amx_tiles.h"
#include "cpu/isa/bytes_vnni.h"
#include "cpu/isa/wide_codecs.h"

namespace cachalot::cpu {
namespace {

constexpr int kRowBytes = 64;                       // of a tile's row
constexpr int kCodeTileBytes = kSteps * kRowBytes;  // 16 rows x 32 columns of codes

// Rows whose bf16 tiles are opened together, in groups of 16: as many as leave the second cache room for activations.
inline int bf16_groups(int64_t chunks) {
  constexpr int64_t kBytes = 512 * 1024;
  const int64_t fitting = kBytes / (chunks * kTileBytes) / 2 * 2;
  return static_cast<int>(fitting < 2 ? 2 : fitting > 8 ? 8 : fitting);
}
constexpr int kRing = 4, kSlotBytes = 4 * kTileBytes;  // of tiles of sums on their way out
// Scratch: the codes, scales per 16 columns and minima of 16 rows, or the bf16 tiles of some groups; then sums.
inline size_t scratch_bytes(int n_cols) {
  const int64_t chunks = n_cols / kChunk;
  return static_cast<size_t>(chunks * (bf16_groups(chunks) * kTileBytes) + kRing * kSlotBytes);
}

// ---- bytes ----

// 16 rows, opened.
struct OpenRows {
  uint8_t* codes;  // [n_chunks][8][16][4]
  float* scales;   // [n_chunks * 32 / kSub][16]
  float* minima;   // [n_chunks][16]
  uint8_t* ring;   // [kRing] slots
  int64_t n_chunks;
};

template <Codec C>
inline void open_rows(const WideRows& w, int row, const OpenRows& out) {
  using D = WideCodec<C>;
  const uint8_t* unit = w.data + static_cast<int64_t>(row / kWideRows) * w.n_units * w.unit_bytes;
  uint8_t* to = out.codes;
  float *scale = out.scales, *minimum = out.minima;
  for (int u = 0; u < w.n_units; ++u, unit += w.unit_bytes) {
    const D codec(Unit{unit, 0});
    for (int c = 0; c < w.unit_elems / kChunk; ++c, to += kCodeTileBytes) {
      I codes[kSteps];
      codec.codes(c, codes);
#pragma GCC unroll 8
      for (int s = 0; s < kSteps; ++s) _mm512_store_si512(to + kRowBytes * s, _mm512_sub_epi8(codes[s], bset1(D::kOffset)));
      for (int i = 0; i < kChunk / D::kSub; ++i, scale += kWideRows) store(scale, codec.scale(c * (kChunk / D::kSub) + i));
      if constexpr (D::kMinimum) {
        store(minimum, codec.minimum(c));
        minimum += kWideRows;
      }
    }
  }
}

// N tokens (a whole tile or half of one) times 16 rows, over all columns. total: [N].
template <int kSub, bool kMinimum, int N>
inline void byte_tile(const OpenRows& w, const uint8_t* tiles, const float* sums, const QuantisedRow* x, int n_tokens, F* total) {
  constexpr bool kSigned = !kMinimum;  // an offset was taken off
  // Sums leave through tiles 0 and 1, or in every second chunk 2 and 3, so that two chunks are on their way at once.
  const auto multiply = [&]<int kParity>(int64_t chunk) __attribute__((always_inline)) {
    constexpr int kUpper = kSub == 32 ? 2 * kParity : 0, kLower = kUpper + 1;
    const uint8_t *const a = tiles + chunk * kTileBytes, *const b = w.codes + chunk * kCodeTileBytes;
    uint8_t* const to = w.ring + chunk % kRing * kSlotBytes;
    tile_load<6>(b, kRowBytes);
    tile_load<4>(a, kRowBytes);
    tile_load<5>(a + kChunk, kRowBytes);
    tile_zero<kUpper>();
    tile_zero<kLower>();
    tile_dot_bytes<kUpper, 4, 6, kSigned>();
    tile_dot_bytes<kLower, 5, 6, kSigned>();
    tile_store<kUpper>(to, kRowBytes);
    tile_store<kLower>(to + kTileBytes, kRowBytes);
    if constexpr (kSub == 16) {
      tile_load<7>(b + kCodeTileBytes / 2, kRowBytes);
      tile_load<4>(a + 16, kRowBytes);
      tile_load<5>(a + kChunk + 16, kRowBytes);
      tile_zero<2>();
      tile_zero<3>();
      tile_dot_bytes<2, 4, 7, kSigned>();
      tile_dot_bytes<3, 5, 7, kSigned>();
      tile_store<2>(to + 2 * kTileBytes, kRowBytes);
      tile_store<3>(to + 3 * kTileBytes, kRowBytes);
    }
  };
  F part[N];
#pragma GCC unroll 16
  for (int t = 0; t < N; ++t) part[t] = total[t] = zero();
  const auto treat = [&](int64_t chunk) __attribute__((always_inline)) {
    const uint8_t* from = w.ring + chunk % kRing * kSlotBytes;
#pragma GCC unroll 2
    for (int i = 0; i < kChunk / kSub; ++i, from += 2 * kTileBytes) {
      const F scale = load(w.scales + (chunk * (kChunk / kSub) + i) * kWideRows);
#pragma GCC unroll 16
      for (int t = 0; t < N; ++t) {
        const I upper = _mm512_load_si512(from + kRowBytes * t), lower = _mm512_load_si512(from + kTileBytes + kRowBytes * t);
        part[t] = fma(to_float(iadd(shl(upper, 8), lower)), scale, part[t]);
      }
    }
    if constexpr (kMinimum) {
      const F minimum = load(w.minima + chunk * kWideRows);
      const float* const sum = sums + chunk * kTileTokenRows;
#pragma GCC unroll 16
      for (int t = 0; t < N; ++t) part[t] = fnma(set1(sum[t]), minimum, part[t]);
    }
    if ((chunk + 1) % kScaleChunks == 0 || chunk + 1 == w.n_chunks) {
#pragma GCC unroll 16
      for (int t = 0; t < N; ++t) {
        if (t < n_tokens) total[t] = fma(part[t], set1(x[t].scale[chunk / kScaleChunks]), total[t]);
        part[t] = zero();
      }
    }
  };
  // The tiles work two chunks ahead of the sums that are treated: it takes a hundred cycles until those can be read.
  multiply.template operator()<0>(0);
  if (w.n_chunks > 1) multiply.template operator()<1>(1);
  for (int64_t chunk = 0; chunk < w.n_chunks; chunk += 2) {
    if (chunk + 2 < w.n_chunks) multiply.template operator()<0>(chunk + 2);
    treat(chunk);
    if (chunk + 1 == w.n_chunks) break;
    if (chunk + 3 < w.n_chunks) multiply.template operator()<1>(chunk + 3);
    treat(chunk + 1);
  }
}

// Sums in tiles 0 to 3, activations in 4 and 5, codes in 6 and 7.
constexpr TileShapes byte_shapes(int n_tokens, int n_cols) {
  TileShapes s;
  for (int t = 0; t < 4; ++t) s.set(t, n_tokens, kRowBytes);
  for (int t = 4; t < 6; ++t) s.set(t, n_tokens, n_cols);
  for (int t = 6; t < 8; ++t) s.set(t, n_cols / 4, kRowBytes);
  return s;
}

template <Codec C>
void byte_product(const WideRows& w, const WideProduct& p) {
  using D = WideCodec<C>;
  constexpr int kHalf = kTileTokenRows / 2;
  const TileShapes whole = byte_shapes(kTileTokenRows, D::kSub), halves = byte_shapes(kHalf, D::kSub);
  const TileScope scope(whole);
  const int64_t chunks = static_cast<int64_t>(w.n_units) * w.unit_elems / kChunk;
  uint8_t* const scales = p.scratch + chunks * kCodeTileBytes;
  const OpenRows open{.codes = p.scratch,
                      .scales = reinterpret_cast<float*>(scales),
                      .minima = reinterpret_cast<float*>(scales + 2 * chunks * kRowBytes),
                      .ring = scales + 3 * chunks * kRowBytes,
                      .n_chunks = chunks};
  F total[kTileTokenRows];
  // A block of tokens stays in the second cache while the rows pass.
  constexpr int64_t kBlockBytes = 768 * 1024;
  const int64_t fitting = kBlockBytes / (chunks * kTileBytes);
  const int block = static_cast<int>(fitting < 1 ? 1 : fitting) * kTileTokenRows;
  for (int begin = 0; begin < p.n_tokens; begin += block) {
    const int end = p.n_tokens - begin < block ? p.n_tokens : begin + block;
    for (int row = 0; row < w.n_rows; row += kWideRows) {
      open_rows<C>(w, row, open);
      for (int t0 = begin; t0 < end; t0 += kTileTokenRows) {
        const int n = end - t0 < kTileTokenRows ? end - t0 : kTileTokenRows;
        const int64_t tile = t0 / kTileTokenRows * chunks;
        const float* const sums = p.sums + tile * kTileTokenRows;
        if (n > kHalf) {
          byte_tile<D::kSub, D::kMinimum, kTileTokenRows>(open, p.tiles + tile * kTileBytes, sums, p.x + t0, n, total);
        } else {
          TileScope::change(halves);
          byte_tile<D::kSub, D::kMinimum, kHalf>(open, p.tiles + tile * kTileBytes, sums, p.x + t0, n, total);
          TileScope::change(whole);
        }
        for (int t = 0; t < n; ++t) finish_wide(p, row, w.n_rows, t0 + t, total[t]);
      }
    }
  }
}

inline void gather_bytes(const QuantisedRow* x, int n_tokens, int n_cols, uint8_t* tiles, float* sums) {
  for (int chunk = 0; chunk < n_cols / kChunk; ++chunk) {
    for (int t = 0; t < kTileTokenRows; ++t, tiles += kRowBytes) {
      const bool there = t < n_tokens;
      _mm512_storeu_si512(tiles, there ? load_bytes(x[t].chunks[chunk].q) : iset1(0));
      *sums++ = there ? x[t].chunks[chunk].float_sum : 0.0f;
    }
  }
}

// ---- bf16 ----

// Memory that will be read next, asked for a few lines at a time while tiles are multiplied.
struct Ahead {
  const uint8_t *next = nullptr, *end = nullptr;
  void ask() {
    for (int i = 0; i < 4 && next < end; ++i, next += kRowBytes) __builtin_prefetch(next, 0, 2);
  }
};

// C[m][n] += A[m] B[n] over `chunks` tiles each; m < M tiles of 16 rows, n < N of 16 columns; c: [M][N] tiles of f32.
template <int M, int N>
inline void bf16_tiles(const uint8_t* a, int64_t a_step, const uint8_t* b, int64_t b_step, int64_t chunks, uint8_t* c, Ahead& ahead) {
  tile_zero<0>();
  if constexpr (N == 2) tile_zero<1>();
  if constexpr (M == 2) tile_zero<2>();
  if constexpr (M == 2 && N == 2) tile_zero<3>();
  for (int64_t chunk = 0; chunk < chunks; ++chunk, a += kTileBytes, b += kTileBytes) {
    ahead.ask();
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
inline void bf16_tiles(int m, int n, const uint8_t* a, const uint8_t* b, int64_t chunks, uint8_t* c, Ahead& ahead) {
  const int64_t step = chunks * kTileBytes;
  if (m == 2 && n == 2) return bf16_tiles<2, 2>(a, step, b, step, chunks, c, ahead);
  if (m == 2) return bf16_tiles<2, 1>(a, step, b, step, chunks, c, ahead);
  if (n == 2) return bf16_tiles<1, 2>(a, step, b, step, chunks, c, ahead);
  bf16_tiles<1, 1>(a, step, b, step, chunks, c, ahead);
}
constexpr TileShapes bf16_shapes() {
  TileShapes s;
  for (int t = 0; t < 8; ++t) s.set(t, kTileTokenRows, kRowBytes);
  return s;
}
constexpr TileShapes kBf16Shapes = bf16_shapes();

// Pairs of bf16, `low` in the lower half; ties are rounded up in magnitude. (VPERMT2W would need three operations where this needs two.)
inline I bf16_pairs(F low, F high) {
  const I half = iset1(0x8000);
  const I lower = _mm512_srli_epi32(iadd(as_int(low), half), 16);
  return _mm512_mask_mov_epi16(iadd(as_int(high), half), 0x55555555u, lower);
}

// The 16 rows' weights as bf16 tiles [n_chunks][16 pairs of columns][16 rows][2].
template <Codec C>
inline void round_rows(const WideRows& w, int row, uint8_t* to) {
  using D = WideCodec<C>;
  // A code beside this exponent is the number kBase + code: no conversion is needed, and the FMA takes kBase off with the offset.
  constexpr int kExponent = 0x47000000;
  constexpr float kBase = 32768.0f;
  const uint8_t* unit = w.data + static_cast<int64_t>(row / kWideRows) * w.n_units * w.unit_bytes;
  const I exponent = iset1(kExponent), mask = iset1(0xff00);
  for (int u = 0; u < w.n_units; ++u, unit += w.unit_bytes) {
    const D codec(Unit{unit, 0});
    for (int c = 0; c < w.unit_elems / kChunk; ++c) {
      I codes[kSteps];
      codec.codes(c, codes);
      F scale = zero(), base = zero();
#pragma GCC unroll 8
      for (int s = 0; s < kSteps; ++s, to += 2 * kRowBytes) {
        if (s % (D::kSub / 4) == 0) {
          scale = codec.scale(D::kSub == 32 ? c : 2 * c + s / 4);
          base = mul(scale, set1(-kBase - static_cast<float>(D::kOffset)));
          if constexpr (D::kMinimum) base = sub(base, codec.minimum(c));
        }
        const auto value = [&](I moved) {
          return fma(as_float(_mm512_ternarylogic_epi32(moved, mask, exponent, 0xea)), scale, base);
        };  // moved & mask | exponent
        _mm512_store_si512(to, bf16_pairs(value(shl(codes[s], 8)), value(codes[s])));
        _mm512_store_si512(to + kRowBytes, bf16_pairs(value(shr(codes[s], 8)), value(shr(codes[s], 16))));
      }
    }
  }
}

template <Codec C>
void bf16_product(const WideRows& w, const WideProduct& p) {
  const TileScope scope(kBf16Shapes);
  const int64_t chunks = static_cast<int64_t>(w.n_units) * w.unit_elems / kChunk, step = chunks * kTileBytes;
  const int64_t group_bytes = static_cast<int64_t>(w.n_units) * w.unit_bytes;
  const int n_tiles = (p.n_tokens + kTileTokenRows - 1) / kTileTokenRows, n_groups = (w.n_rows + kWideRows - 1) / kWideRows;
  const int block = bf16_groups(chunks);
  uint8_t* const sums = p.scratch + block * step;
  for (int first = 0; first < n_groups; first += block) {
    const int groups = n_groups - first < block ? n_groups - first : block;
    for (int g = 0; g < groups; ++g) round_rows<C>(w, (first + g) * kWideRows, p.scratch + g * step);
    // What follows: the next rows of this call, or those that its next sibling is likely to ask for.
    const uint8_t* const next = w.data + (first + groups) * group_bytes;
    Ahead ahead{.next = next, .end = next + groups * group_bytes};
    for (int tile = 0; tile < n_tiles; tile += 2) {
      const int m = tile + 1 < n_tiles ? 2 : 1;
      for (int g = 0; g < groups; g += 2) {
        const int n = g + 1 < groups ? 2 : 1;
        bf16_tiles(m, n, p.tiles + tile * step, p.scratch + g * step, chunks, sums, ahead);
        for (int i = 0; i < m * kTileTokenRows && tile * kTileTokenRows + i < p.n_tokens; ++i)
          for (int j = 0; j < n; ++j) {
            const uint8_t* const from = sums + (i / kTileTokenRows * n + j) * kTileBytes + i % kTileTokenRows * kRowBytes;
            finish_wide(p, (first + g + j) * kWideRows, w.n_rows, tile * kTileTokenRows + i, load(reinterpret_cast<const float*>(from)));
          }
      }
    }
  }
}

inline I load_bf16(const float* x) { return reinterpret_cast<I>(_mm512_cvtne2ps_pbh(load(x + kWidth), load(x))); }

inline void gather_bf16(const float* const* x, int n_tokens, int n_cols, uint8_t* tiles) {
  for (int k = 0; k < n_cols; k += kChunk)
    for (int t = 0; t < kTileTokenRows; ++t, tiles += kRowBytes) _mm512_storeu_si512(tiles, t < n_tokens ? load_bf16(x[t] + k) : iset1(0));
}

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

// Weights are the left factor here: a decoded row is a row of its tile as it lies. The sums' columns, tokens, are turned at the end.
inline void gemm_bf16(const Panel& w, const WideProduct& p) {
  const TileScope scope(kBf16Shapes);
  const int64_t chunks = w.n_cols / kChunk, step = chunks * kTileBytes;
  uint8_t* const sums = p.scratch + 2 * step;
  const int n_tiles = (p.n_tokens + kTileTokenRows - 1) / kTileTokenRows;
  Ahead nothing;
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
      bf16_tiles(m, n, p.scratch, p.tiles + tile * step, chunks, sums, nothing);
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

template <Codec C>
constexpr void fill_tiles(TileKernels& k) {
  k.bytes[static_cast<int>(C)] = byte_product<C>;
  k.bf16[static_cast<int>(C)] = bf16_product<C>;
}
constexpr TileKernels make_tile_kernels() {
  TileKernels k;
  k.scratch_bytes = scratch_bytes;
  k.gather_bytes = gather_bytes;
  k.gather_bf16 = gather_bf16;
  k.gather_pairs = gather_pairs;
  k.gemm_bf16 = gemm_bf16;
  fill_tiles<Codec::q4_0>(k);
  fill_tiles<Codec::q4_1>(k);
  fill_tiles<Codec::q5_0>(k);
  fill_tiles<Codec::q5_1>(k);
  fill_tiles<Codec::q8_0>(k);
  fill_tiles<Codec::q4_k>(k);
  fill_tiles<Codec::q5_k>(k);
  fill_tiles<Codec::q6_k>(k);
  fill_tiles<Codec::iq4_nl>(k);
  fill_tiles<Codec::iq4_xs>(k);
  fill_tiles<Codec::mxfp4>(k);
  fill_tiles<Codec::int4>(k);
  fill_tiles<Codec::int8>(k);
  return k;
}

}  // namespace
}  // namespace cachalot::cpu
