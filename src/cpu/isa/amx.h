// Products on AMX tiles from the wide layout's bytes, and the table of all tile kernels.
//
// The codes of 16 rows are opened once per call and become B tiles; a tile product of 16 tokens, 16 rows and 32 columns gives exact
// integer sums of the upper and of the lower plane, which leave the tiles through a buffer and are then treated as in wide.h, operation by
// operation, one register of 16 rows per token. That treatment, five vector operations per token and chunk, is what the time goes to.
#pragma once

#include "cpu/isa/amx_bf16.h"
#include "cpu/isa/amx_rows.h"

namespace cachalot::cpu {
namespace {

constexpr int kCodeTileBytes = kSteps * kRowBytes;     // 16 rows x 32 columns of codes
constexpr int kRing = 4, kSlotBytes = 4 * kTileBytes;  // of tiles of sums on their way out
// Scratch: the codes, scales per 16 columns and minima of 16 rows, or tiles of bf16; then sums.
inline size_t scratch_bytes(int n_cols) {
  const int64_t chunks = n_cols / kChunk < kRingChunks ? kRingChunks : n_cols / kChunk;
  return static_cast<size_t>(chunks * kPairBytes + kRing * kSlotBytes);
}

// 16 rows, opened.
struct OpenRows {
  uint8_t* codes;  // [n_chunks][8][16][4]
  float* scales;   // [n_chunks * 32 / kSub][16]
  float* minima;   // [n_chunks][16]
  uint8_t* ring;   // [kRing] slots
  int64_t n_chunks;
};

template <Codec C>
inline void open_rows(const WideRows& w, int row, const OpenRows& out, bool asks) {
  using D = WideCodec<C>;
  const uint8_t* unit = w.data + static_cast<int64_t>(row / kWideRows) * w.n_units * w.unit_bytes;
  uint8_t* to = out.codes;
  float *scale = out.scales, *minimum = out.minima;
  const int64_t chunk_bytes = w.unit_bytes / (w.unit_elems / kChunk);
  for (int u = 0; u < w.n_units; ++u, unit += w.unit_bytes) {
    const D codec(Unit{unit, 0});
    for (int c = 0; c < w.unit_elems / kChunk; ++c, to += kCodeTileBytes) {
      if (asks) ask_ahead(unit + c * chunk_bytes, chunk_bytes);
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
      open_rows<C>(w, row, open, begin == 0);
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

template <Codec C>
constexpr void fill_tiles(TileKernels& k) {
  if constexpr (C != Codec::f16 && C != Codec::bf16 && C != Codec::fp8) k.bytes[static_cast<int>(C)] = byte_product<C>;
  k.bf16[static_cast<int>(C)] = bf16_product<C>;
  k.swiglu[static_cast<int>(C)] = bf16_swiglu<C>;
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
  fill_tiles<Codec::f16>(k);
  fill_tiles<Codec::bf16>(k);
  fill_tiles<Codec::fp8>(k);
  return k;
}

}  // namespace
}  // namespace cachalot::cpu
