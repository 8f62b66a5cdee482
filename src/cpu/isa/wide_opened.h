// Products of packed integer weights with many tokens in AVX2: the codes of 16 rows and 256 columns are opened once, to words whose offset
// is taken off, and stay in the first cache while a block of tokens passes. Outputs are the chains of operations of wide.h, to the bit.
#pragma once

#include "cpu/isa/wide.h"

namespace cachalot::cpu {
namespace {

constexpr int kOpenTokens = 5;      // from here opening costs less than it saves
constexpr int kOpenedTokens = 128;  // whose sums lie beside the opened weights

// 16 rows of the columns that share a scale of the activations. Words lie as ActivationChunk's do: columns 0 and 2, then 1 and 3 of a step.
struct alignas(64) OpenedRows {
  int16_t codes[kScaleChunks][2 * kSteps][kWideRows][2];
  float scales[kScaleChunks][2][kWideRows];  // one or two per chunk
  float minima[kScaleChunks][kWideRows];
};

// Chunks [first, first + n) of the 16 rows from `row` on.
template <Codec C>
inline void open_rows(const WideRows& w, int row, int64_t first, int n, bool asks, OpenedRows& out) {
  using D = WideCodec<C>;
  const int unit_chunks = w.unit_elems / kChunk;
  const int64_t chunk_bytes = w.unit_bytes / unit_chunks;
  const uint8_t* const rows = w.data + static_cast<int64_t>(row / kWideRows) * w.n_units * w.unit_bytes;
  const I low_bytes = _mm256_set1_epi16(255), offset = _mm256_set1_epi16(D::kOffset);
  for (int i = 0; i < n; ++i) {
    const uint8_t* const unit = rows + (first + i) / unit_chunks * w.unit_bytes;
    const int c = static_cast<int>((first + i) % unit_chunks);
    if (asks) ask_ahead(unit + c * chunk_bytes, chunk_bytes);
    for (int lane = 0; lane < kWideRows; lane += kWidth) {
      const D codec(Unit{unit, lane});
      I codes[kSteps];
      codec.codes(c, codes);
#pragma GCC unroll 8
      for (int s = 0; s < kSteps; ++s) {
        store_words(out.codes[i][2 * s][lane], _mm256_sub_epi16(iand(codes[s], low_bytes), offset));
        store_words(out.codes[i][2 * s + 1][lane], _mm256_sub_epi16(shr16(codes[s], 8), offset));
      }
      for (int h = 0; h < kChunk / D::kSub; ++h) store(out.scales[i][h] + lane, codec.scale(c * (kChunk / D::kSub) + h));
      if constexpr (D::kMinimum) store(out.minima[i] + lane, codec.minimum(c));
    }
  }
}

// total[t] += the opened rows times n chunks of x[t], whose scale is scale[t].
template <int kSub, bool kMinimum, int T>
[[gnu::noinline]] void add_opened(const OpenedRows& w, int n, const ActivationChunk* const* x, const float* scale,
                                  float (*total)[kWideRows]) {
  constexpr int kVectors = kWideRows / kWidth, kWords = 2 * kSteps * kSub / kChunk;  // registers of rows; pairs of columns of a scale
  F part[T][kVectors];
  for (int t = 0; t < T; ++t)
    for (int v = 0; v < kVectors; ++v) part[t][v] = zero();
  for (int i = 0; i < n; ++i) {
#pragma GCC unroll 2
    for (int h = 0; h < kChunk / kSub; ++h) {
      I dot[T][kVectors];
      for (int t = 0; t < T; ++t)
        for (int v = 0; v < kVectors; ++v) dot[t][v] = iset1(0);
#pragma GCC unroll 16
      for (int k = h * kWords; k < (h + 1) * kWords; ++k) {
        I codes[kVectors];
        for (int v = 0; v < kVectors; ++v) codes[v] = load_words(w.codes[i][k][v * kWidth]);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          const I activations = two_words(x[t][i].q + 4 * k);
          for (int v = 0; v < kVectors; ++v) {
            dot[t][v] = iadd(dot[t][v], _mm256_madd_epi16(codes[v], activations));
            keep_here(dot[t][v]);
          }
        }
      }
      for (int v = 0; v < kVectors; ++v) {
        const F factor = load(w.scales[i][h] + v * kWidth);
        for (int t = 0; t < T; ++t) part[t][v] = fma(to_float(dot[t][v]), factor, part[t][v]);
      }
    }
    if constexpr (kMinimum) {
      for (int v = 0; v < kVectors; ++v) {
        const F minimum = load(w.minima[i] + v * kWidth);
        for (int t = 0; t < T; ++t) part[t][v] = fnma(set1(x[t][i].float_sum), minimum, part[t][v]);
      }
    }
  }
  for (int t = 0; t < T; ++t)
    for (int v = 0; v < kVectors; ++v) {
      float* const to = total[t] + v * kWidth;
      store(to, fma(part[t][v], set1(scale[t]), load(to)));
    }
}

template <Codec C>
void opened_product(const WideRows& w, const WideProduct& p) {
  using D = WideCodec<C>;
  constexpr int64_t kBlockBytes = 512 * 1024;  // of activations, which stay in the second cache while the rows pass
  const int64_t n_chunks = static_cast<int64_t>(w.n_units) * w.unit_elems / kChunk;
  const auto fitting = static_cast<int>(kBlockBytes / (n_chunks * static_cast<int64_t>(sizeof(ActivationChunk)))) / 4 * 4;
  const int block = fitting < kOpenTokens ? kOpenTokens : fitting < kOpenedTokens ? fitting : kOpenedTokens;
  OpenedRows opened;
  alignas(64) float total[kOpenedTokens][kWideRows];
  for (int begin = 0; begin < p.n_tokens; begin += block) {
    const int end = p.n_tokens - begin < block ? p.n_tokens : begin + block;
    for (int row = 0; row < w.n_rows; row += kWideRows) {
      __builtin_memset(total, 0, sizeof total[0] * static_cast<size_t>(end - begin));
      for (int64_t chunk = 0; chunk < n_chunks; chunk += kScaleChunks) {
        const int n = n_chunks - chunk < kScaleChunks ? static_cast<int>(n_chunks - chunk) : kScaleChunks;
        open_rows<C>(w, row, chunk, n, begin == 0, opened);
        for_token_tiles(begin, end, [&]<int T>(int t0) {
          const ActivationChunk* x[T];
          float scale[T];
          for (int t = 0; t < T; ++t) {
            x[t] = p.x[t0 + t].chunks + chunk;
            scale[t] = p.x[t0 + t].scale[chunk / kScaleChunks];
          }
          add_opened<D::kSub, D::kMinimum, T>(opened, n, x, scale, total + (t0 - begin));
        });
      }
      for (int t = begin; t < end; ++t)
        for (int lane = 0; lane < kWideRows && row + lane < w.n_rows; lane += kWidth)
          finish_wide(p, row + lane, w.n_rows, t, load(total[t - begin] + lane));
    }
  }
}

template <Codec C>
struct OpensForMany {
  static void product(const WideRows& w, const WideProduct& p) {
    if (p.n_tokens >= kOpenTokens) return opened_product<C>(w, p);
    wide_product<C>(w, p);
  }
};

}  // namespace
}  // namespace cachalot::cpu
