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

// part[t] += chunk c of the codec's rows times x[t].
template <Codec C, int T>
inline void add_chunk(const WideCodec<C>& codec, int c, const I* codes, const ActivationChunk* const* x, F* part) {
  using D = WideCodec<C>;
  int start[T];
  I dot[T];
  if constexpr (D::kSub == 16) {
    for (int h = 0; h < 2; ++h) {
      for (int t = 0; t < T; ++t) start[t] = -D::kOffset * x[t]->half_sum[h];
      dot_steps<4, T>(codes + 4 * h, x, 4 * h, start, dot);
      const F scale = codec.scale(2 * c + h);
      for (int t = 0; t < T; ++t) part[t] = fma(to_float(dot[t]), scale, part[t]);
    }
  } else {
    for (int t = 0; t < T; ++t) start[t] = -D::kOffset * x[t]->sum;
    dot_steps<8, T>(codes, x, 0, start, dot);
    const F scale = codec.scale(c);
    for (int t = 0; t < T; ++t) part[t] = fma(to_float(dot[t]), scale, part[t]);
    if constexpr (D::kMinimum) {
      const F minimum = codec.minimum(c);
      for (int t = 0; t < T; ++t) part[t] = fnma(set1(x[t]->float_sum), minimum, part[t]);
    }
  }
}

// `asks`: memory is asked for what comes a few kilobytes later, so that it works while a tile of several tokens is computed.
template <Codec C, int T>
inline void wide_tile(const WideRows& w, const WideProduct& p, int row, int t0, bool asks) {
  constexpr int64_t kAhead = 4096, kLine = 64;
  const int n_chunks = w.unit_elems / kChunk;
  const int64_t chunk_bytes = w.unit_bytes / n_chunks, asked = asks ? kAhead + chunk_bytes : 0;
  const uint8_t* unit = w.data + static_cast<int64_t>(row / kWideRows) * w.n_units * w.unit_bytes;
  const ActivationChunk* x[T];
  F total[T], part[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    x[t] = p.x[t0 + t].chunks;
    total[t] = part[t] = zero();
  }
  int64_t chunk = 0;
  const auto close = [&](int64_t group) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      total[t] = fma(part[t], set1(p.x[t0 + t].scale[group]), total[t]);
      part[t] = zero();
    }
  };
  for (int u = 0; u < w.n_units; ++u, unit += w.unit_bytes) {
    const WideCodec<C> codec(Unit{unit, row % kWideRows});
    for (int c = 0; c < n_chunks; ++c) {
      for (int64_t i = kAhead; i < asked; i += kLine) __builtin_prefetch(unit + c * chunk_bytes + i);
      I codes[kSteps];
      codec.codes(c, codes);
      const ActivationChunk* at[T];
      for (int t = 0; t < T; ++t) at[t] = x[t] + chunk;
      add_chunk<C, T>(codec, c, codes, at, part);
      if (++chunk % kScaleChunks == 0) close(chunk / kScaleChunks - 1);
    }
  }
  if (chunk % kScaleChunks != 0) close(chunk / kScaleChunks);
  for (int t = 0; t < T; ++t) finish_wide(p, row, w.n_rows, t0 + t, total[t]);
}

// A block of tokens stays in the second cache while the rows pass, and a group of rows in the first while the block's tokens pass.
template <Codec C>
void wide_product(const WideRows& w, const WideProduct& p) {
  constexpr int kBlockBytes = 256 * 1024;
  const int64_t row_bytes = static_cast<int64_t>(w.n_units) * w.unit_elems / kChunk * static_cast<int64_t>(sizeof(ActivationChunk));
  const auto fitting = static_cast<int>(kBlockBytes / row_bytes) / 8 * 8, block = fitting < 8 ? 8 : fitting;
  for (int t0 = 0; t0 < p.n_tokens; t0 += block) {
    const int end = p.n_tokens - t0 < block ? p.n_tokens : t0 + block;
    for (int row = 0; row < w.n_rows; row += kWidth) {
      int t = t0;
      if constexpr (kWidth == 16)
        for (; t + 8 <= end; t += 8) wide_tile<C, 8>(w, p, row, t, t == 0);
      for (; t + 4 <= end; t += 4) wide_tile<C, 4>(w, p, row, t, t == 0);
      if (t + 2 <= end) {
        wide_tile<C, 2>(w, p, row, t, t == 0);
        t += 2;
      }
      if (t < end) wide_tile<C, 1>(w, p, row, t, t == 0);
    }
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
      chunk.half_sum[0] = static_cast<int32_t>(first);
      chunk.half_sum[1] = static_cast<int32_t>(second);
      chunk.float_sum = first + second;
      chunk.sum = static_cast<int32_t>(first + second);
    }
  }
}

template <Codec C>
constexpr void fill_wide(WideKernels& k) {
  k.product[static_cast<int>(C)] = wide_product<C>;
}
constexpr WideKernels make_wide_kernels() {
  WideKernels k;
  k.quantise = quantise_row;
  fill_wide<Codec::q4_0>(k);
  fill_wide<Codec::q4_1>(k);
  fill_wide<Codec::q5_0>(k);
  fill_wide<Codec::q5_1>(k);
  fill_wide<Codec::q8_0>(k);
  fill_wide<Codec::q4_k>(k);
  fill_wide<Codec::q5_k>(k);
  fill_wide<Codec::q6_k>(k);
  fill_wide<Codec::iq4_nl>(k);
  fill_wide<Codec::iq4_xs>(k);
  fill_wide<Codec::mxfp4>(k);
  fill_wide<Codec::int4>(k);
  fill_wide<Codec::int8>(k);
  return k;
}

}  // namespace
}  // namespace cachalot::cpu
