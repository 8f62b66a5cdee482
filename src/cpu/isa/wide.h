// Products of packed integer weights with activations rounded to 16 bits, over the operations of bytes_vnni.h or bytes_avx2.h, of which one
// was included before. For the layout see cpu/wide_pack.h.
//
// A chunk's products are summed exactly, as integers; then part += sum * scale - minimum * (sum of the activations), in f32 and in rising
// order, and after every 256 columns total += part * (activation scale). These operations, one chain per output, are the definition of
// the result: every instruction set gives the same bits, whatever the tokens and rows beside it.
#pragma once

#include "cpu/isa/wide_codecs.h"

namespace cachalot::cpu {
namespace {

// Where the products of codes start so that an offset of theirs is taken off: -kOffset times the sum of the activations.
template <int kOffset>
inline I start_of(int32_t minus_8_sum) {
  if constexpr (kOffset == 0) return iset1(0);
  if constexpr (kOffset % 8 != 0) return iset1(minus_8_sum / 8 * kOffset);
  if constexpr (kOffset == 8) return iset1(minus_8_sum);
  return shl(iset1(minus_8_sum), __builtin_ctz(kOffset / 8));
}

// part[t] += chunk c of the codec's rows times x[t].
template <Codec C, int T>
inline void add_chunk(const WideCodec<C>& codec, int c, const ActivationChunk* const* x, F* part) {
  using D = WideCodec<C>;
  static_assert(D::kOffset % 8 != 0 || (D::kOffset & (D::kOffset - 1)) == 0, "see start_of");
  I codes[kSteps], start[T], dot[T];
  codec.codes(c, codes);
  if constexpr (D::kSub == 16) {
    for (int h = 0; h < 2; ++h) {
      for (int t = 0; t < T; ++t) start[t] = start_of<D::kOffset>(x[t]->minus_8_half_sum[h]);
      dot_steps<4, T>(codes + 4 * h, x, 4 * h, start, dot);
      const F scale = codec.scale(2 * c + h);
      for (int t = 0; t < T; ++t) part[t] = fma(to_float(dot[t]), scale, part[t]);
    }
  } else {
    for (int t = 0; t < T; ++t) start[t] = start_of<D::kOffset>(x[t]->minus_8_sum);
    dot_steps<8, T>(codes, x, 0, start, dot);
    const F scale = codec.scale(c);
    for (int t = 0; t < T; ++t) part[t] = fma(to_float(dot[t]), scale, part[t]);
    if constexpr (D::kMinimum) {
      const F minimum = codec.minimum(c);
      for (int t = 0; t < T; ++t) part[t] = fnma(set1(x[t]->float_sum), minimum, part[t]);
    }
  }
}

// A group of 16 rows times T tokens. All its registers of rows pass together, so that memory works while they are computed.
template <Codec C, int T>
inline void wide_tile(const WideRows& w, const WideProduct& p, int row, int t0, bool asks) {
  using D = WideCodec<C>;
  constexpr int kVectors = kWideRows / kWidth;
  const int unit_chunks = D::kChunks > 0 ? D::kChunks : w.unit_elems / kChunk;
  const int64_t n_chunks = static_cast<int64_t>(w.n_units) * unit_chunks, chunk_bytes = w.unit_bytes / unit_chunks;
  const uint8_t* unit = w.data + static_cast<int64_t>(row / kWideRows) * w.n_units * w.unit_bytes;
  const ActivationChunk* x[T];
  F total[kVectors][T], part[kVectors][T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    x[t] = p.x[t0 + t].chunks;
    for (int v = 0; v < kVectors; ++v) total[v][t] = part[v][t] = zero();
  }
  const auto add_next = [&](int v, const D& codec, int c, int64_t chunk) __attribute__((always_inline)) {
    if (asks && v == 0) ask_ahead(unit + c * chunk_bytes, chunk_bytes);
    const ActivationChunk* at[T];
    for (int t = 0; t < T; ++t) at[t] = x[t] + chunk;
    add_chunk<C, T>(codec, c, at, part[v]);
  };
  const auto close = [&](int64_t group) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const F scale = set1(p.x[t0 + t].scale[group]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        total[v][t] = fma(part[v][t], scale, total[v][t]);
        part[v][t] = zero();
      }
    }
  };
  int64_t chunk = 0;
  if constexpr (D::kChunks == 1) {
    for (int64_t group = 0; chunk < n_chunks; ++group) {
      const int64_t end = n_chunks - chunk < kScaleChunks ? n_chunks : chunk + kScaleChunks;
      for (; chunk < end; ++chunk, unit += w.unit_bytes)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) add_next(v, D(Unit{unit, v * kWidth}), 0, chunk);
      close(group);
    }
  } else {
    for (int u = 0; u < w.n_units; ++u, unit += w.unit_bytes) {
      const auto codec = [&](int v) { return D(Unit{unit, v * kWidth}); };
      const D codecs[2] = {codec(0), codec(kVectors - 1)};
      for (int c = 0; c < unit_chunks; ++c) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) add_next(v, codecs[v], c, chunk);
        if (++chunk % kScaleChunks == 0) close(chunk / kScaleChunks - 1);
      }
    }
    if (chunk % kScaleChunks != 0) close(chunk / kScaleChunks);
  }
  for (int v = 0; v < kVectors && row + v * kWidth < w.n_rows; ++v)
    for (int t = 0; t < T; ++t) finish_wide(p, row + v * kWidth, w.n_rows, t0 + t, total[v][t]);
}

// Calls tile(token, tokens as a constant) for the tokens [begin, end) in the largest tiles first.
template <typename Tile>
inline void for_token_tiles(int begin, int end, const Tile& tile) {
  int t = begin;
  if constexpr (kWidth == 16)
    for (; t + 8 <= end; t += 8) tile.template operator()<8>(t);
  for (; t + 4 <= end; t += 4) tile.template operator()<4>(t);
  if (t + 2 <= end) {
    tile.template operator()<2>(t);
    t += 2;
  }
  if (t < end) tile.template operator()<1>(t);
}

// Few rows of weights stay in the first cache while tokens pass, each tile of them through all rows. Otherwise a block of tokens stays in
// the second cache while the rows pass, and a register's rows in the first while the block's tokens pass.
template <Codec C>
void wide_product(const WideRows& w, const WideProduct& p) {
  constexpr int64_t kFewBytes = 24 * 1024, kBlockBytes = 256 * 1024;
  const int64_t row_bytes = static_cast<int64_t>(w.n_units) * w.unit_elems / kChunk * static_cast<int64_t>(sizeof(ActivationChunk));
  const int n_groups = (w.n_rows + kWideRows - 1) / kWideRows;
  if (static_cast<int64_t>(n_groups) * w.n_units * w.unit_bytes <= kFewBytes) {
    for_token_tiles(0, p.n_tokens, [&]<int T>(int t) {
      for (int row = 0; row < w.n_rows; row += kWideRows) wide_tile<C, T>(w, p, row, t, t == 0);
    });
    return;
  }
  const auto fitting = static_cast<int>(kBlockBytes / row_bytes) / 8 * 8, block = fitting < 8 ? 8 : fitting;
  for (int t0 = 0; t0 < p.n_tokens; t0 += block) {
    const int end = p.n_tokens - t0 < block ? p.n_tokens : t0 + block;
    for (int row = 0; row < w.n_rows; row += kWideRows)
      for_token_tiles(t0, end, [&]<int T>(int t) { wide_tile<C, T>(w, p, row, t, t == 0); });
  }
}

inline void quantise_row(const float* x, int n, ActivationChunk* chunks, float* scale) {
  constexpr int kGroup = kScaleChunks * kChunk;
  constexpr float kTop = 127 * 256 + 127, kLeast = 1e-30f;  // below kLeast, where kTop / largest would overflow, all codes are 0
  for (int begin = 0; begin < n; begin += kGroup) {
    const int end = n - begin < kGroup ? n : begin + kGroup;
    F largest = zero(), marked = zero();  // marked: NaN where an x is, which must not vanish
    for (int k = begin; k < end; k += kWidth) {
      const F a = load(x + k);
      largest = vmax(largest, vabs(a));
      marked = if_nan(a, marked, a);
    }
    const float top = reduce_max(largest);
    scale[begin / kGroup] = (top >= kLeast ? top / kTop : 0.0f) + 0.0f * reduce_add(marked);
    const F inverse = set1(top >= kLeast ? kTop / top : 0.0f);
    for (int k = begin; k < end; k += kChunk) {
      ActivationChunk& chunk = chunks[k / kChunk];
      F half[2] = {zero(), zero()};  // sums of codes: integers below 2^24, exact
      for (int i = 0; i < kChunk; i += kWidth) {
        const I code = round_to_int(mul(load(x + k + i), inverse));
        store_codes(chunk.q, i, code);
        half[i / 16] = add(half[i / 16], to_float(code));
      }
      const float first = reduce_add(half[0]), second = reduce_add(half[1]);
      chunk.minus_8_half_sum[0] = static_cast<int32_t>(-8.0f * first);
      chunk.minus_8_half_sum[1] = static_cast<int32_t>(-8.0f * second);
      chunk.minus_8_sum = static_cast<int32_t>(-8.0f * (first + second));
      chunk.float_sum = first + second;
    }
  }
}

template <Codec C>
struct OpensInRegisters {
  static void product(const WideRows& w, const WideProduct& p) { wide_product<C>(w, p); }
};
template <template <Codec> class P, Codec... kCodecs>
constexpr void fill_products(WideKernels& k) {
  ((k.product[static_cast<int>(kCodecs)] = P<kCodecs>::product), ...);
}
// P<C>::product multiplies weights of C.
template <template <Codec> class P>
constexpr WideKernels make_wide_kernels() {
  WideKernels k;
  k.quantise = quantise_row;
  fill_products<P, Codec::q4_0, Codec::q4_1, Codec::q5_0, Codec::q5_1, Codec::q8_0, Codec::q4_k, Codec::q5_k, Codec::q6_k, Codec::iq4_nl,
                Codec::iq4_xs, Codec::mxfp4, Codec::int4, Codec::int8>(k);
  return k;
}

}  // namespace
}  // namespace cachalot::cpu
