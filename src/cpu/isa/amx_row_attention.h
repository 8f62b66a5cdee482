// Attention with AMX tiles on rows that are opened on their way to them: while the tiles multiply 32 rows of 32 numbers, the vector units
// bring the next ones into the form of tiles. What is opened stays in the first cache: to store a tile of context in the second takes
// longer than to open it twice, for its keys and its values, and again for each group of queries until there are a few of them.
//
// Rows of f32 and f16 are as exact as in f32: a number is the sum of parts of bf16, each the upper half of what those before it have left,
// so that no step rounds: three parts, of f16 two. Of the products of two numbers' parts those are summed that reach into the 24 bits of a
// significand. Rows of bf16 have one part, and queries and weights are rounded to one.
#pragma once

#include "cpu/isa/amx_rows.h"
#include "cpu/isa/bf16_form.h"

namespace cachalot::cpu {
namespace {

constexpr int kMostHalves = kTileRows / kChunk;  // of 32 rows
constexpr int kMostParts = 3;

// Sets: 32 rows of 32 numbers as [part][2 tiles of 16 rows, or of 16 numbers].
template <Element E>
struct Opened {
  static constexpr int kRowParts = E == Element::bf16 ? 1 : E == Element::f16 ? 2 : 3;
  static constexpr int kParts = E == Element::bf16 ? 1 : kMostParts;  // of queries and weights
  static constexpr int kSetBytes = 2 * kRowParts * kTileBytes;
  static constexpr int kChunkBytes = kChunk * kElementBytes<E>;
  static constexpr int kProducts = E == Element::bf16 ? 1 : E == Element::f16 ? 5 : 6;  // of the parts of two numbers
  static constexpr int kRowPart[6] = {0, 0, 0, 1, 1, 2}, kPart[6] = {0, 1, 2, 0, 1, 0};
};

// The working memory: two sets, the one that is opened and the one that is multiplied, and a group's weights [32 rows][part].
template <Element E>
struct OpenedScratch {
  uint8_t* memory;
  [[nodiscard]] uint8_t* opened(int set) const { return memory + set % 2 * Opened<E>::kSetBytes; }
  [[nodiscard]] uint8_t* weights(int half) const { return memory + 2 * Opened<E>::kSetBytes + half * Opened<E>::kParts * kTileBytes; }
};
template <Element E>
size_t opened_scratch_bytes(int, int) {
  return 2 * Opened<E>::kSetBytes + kMostHalves * Opened<E>::kParts * kTileBytes;
}

// Parts of `low` and `high` in pairs: a row of tiles that lie `step` bytes apart.
template <int kParts>
inline __attribute__((always_inline)) void open_pair(F low, F high, uint8_t* to, int step) {
  const I upper = iset1(static_cast<int>(0xffff0000u));
#pragma GCC unroll 3
  for (int p = 0; p < kParts; ++p, to += step) {
    _mm512_storeu_si512(to, _mm512_ternarylogic_epi32(upper, as_int(high), shr(as_int(low), 16), 0xea));  // (upper & high) | low
    low = sub(low, as_float(iand(as_int(low), upper)));
    high = sub(high, as_float(iand(as_int(high), upper)));
  }
}

// Row i of a set of keys: its numbers j and j + 16 in pairs, of bf16 2 j and 2 j + 1.
template <Element E>
inline __attribute__((always_inline)) void open_keys(const uint8_t* const* rows, int64_t offset, uint8_t* to, int i) {
  const uint8_t* const from = rows[i] + offset;
  if constexpr (E == Element::bf16) {
    _mm512_store_si512(to + i * kRowBytes, _mm512_loadu_si512(from));
  } else {
    open_pair<Opened<E>::kRowParts>(load_element<E>(from), load_element<E>(from + kWidth * kElementBytes<E>), to + i * kRowBytes,
                                    2 * kTileBytes);
  }
}
// Numbers 16 (i % 2) and up of the rows j = i / 2 and j + 16 in pairs. Of bf16: those of rows 2 j and 2 j + 1, in the order of Bf16Form.
template <Element E>
inline __attribute__((always_inline)) void open_values(const uint8_t* const* rows, int64_t offset, uint8_t* to, int i) {
  uint8_t* const row = to + i % 2 * kTileBytes + i / 2 * kRowBytes;
  if constexpr (E == Element::bf16) {
    const I first = _mm512_loadu_si512(rows[i / 2 * 2] + offset), second = _mm512_loadu_si512(rows[i / 2 * 2 + 1] + offset);
    _mm512_store_si512(row, i % 2 == 0 ? _mm512_unpacklo_epi16(first, second) : _mm512_unpackhi_epi16(first, second));
  } else {
    const int64_t at = offset + i % 2 * kWidth * kElementBytes<E>;
    open_pair<Opened<E>::kRowParts>(load_element<E>(rows[i / 2] + at), load_element<E>(rows[i / 2 + 16] + at), row, 2 * kTileBytes);
  }
}

// Tiles 0 to 3 are sums, 4 to 6 the parts of queries or weights, which a set shares, 7 a part of its rows.
template <int kParts>
inline void load_shared(const uint8_t* parts) {
  tile_load<4>(parts, kRowBytes);
  if constexpr (kParts > 1) {
    tile_load<5>(parts + kTileBytes, kRowBytes);
    tile_load<6>(parts + 2 * kTileBytes, kRowBytes);
  }
}
// Loads what product n of a set needs beyond the one before it.
template <Element E, int kProduct>
inline void load_part(const uint8_t* set) {
  using O = Opened<E>;
  constexpr int kPair = kProduct % O::kProducts;
  if constexpr (kProduct < 2 * O::kProducts && O::kPart[kPair] == 0)
    tile_load<7>(set + (O::kRowPart[kPair] * 2 + kProduct / O::kProducts) * kTileBytes, kRowBytes);
}

// A set is multiplied, into tiles kSum and kSum + 1, while another is opened, in 32 steps of open(step).
template <Element E, bool kOpens, bool kMultiplies, int kSum, bool kSharedIsLeft, int kStep = 0, class Open>
inline __attribute__((always_inline)) void set_steps(const Open& open, const uint8_t* multiplied, Ahead& ahead) {
  if constexpr (kStep < kChunk) {
    using O = Opened<E>;
    constexpr int kAll = 2 * O::kProducts, kProduct = kStep * kAll / kChunk;
    if constexpr (kMultiplies && kStep == 0) load_part<E, 0>(multiplied);
    if constexpr (kOpens) open(kStep);
    if constexpr (kMultiplies && (kStep + 1) * kAll / kChunk > kProduct) {
      constexpr int kTile = kSum + kProduct / O::kProducts, kPart = 4 + O::kPart[kProduct % O::kProducts];
      if constexpr (kSharedIsLeft) {
        tile_dot_bf16<kTile, kPart, 7>();
      } else {
        tile_dot_bf16<kTile, 7, kPart>();
      }
      load_part<E, kProduct + 1>(multiplied);
    }
    if constexpr (kStep % 8 == 7) ahead.step();
    set_steps<E, kOpens, kMultiplies, kSum, kSharedIsLeft, kStep + 1>(open, multiplied, ahead);
  }
}

// A group's scores. Set c * kHalves + h is chunk c of the numbers of 32 rows.
template <Element E, int kHalves>
inline void score_opened(const AttentionTile& t, const OpenedScratch<E>& s, const uint8_t* const* rows, int group, Ahead& ahead) {
  using O = Opened<E>;
  constexpr int kSharedBytes = O::kParts * kTileBytes, kLastSum = 2 * (kHalves - 1);
  const int n_chunks = t.k_dim / kChunk;
  const uint8_t* queries = static_cast<const uint8_t*>(t.queries) + static_cast<int64_t>(group) * n_chunks * kSharedBytes;
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  const auto open = [&](int c, int half) __attribute__((always_inline)) {
    return [ at = rows + half * kChunk, offset = c * O::kChunkBytes, to = s.opened(c * kHalves + half) ](int i)
        __attribute__((always_inline)) {
      open_keys<E>(at, offset, to, i);
    };
  };
  set_steps<E, true, false, 0, false>(open(0, 0), nullptr, ahead);
  for (int c = 0; c < n_chunks; ++c, queries += kSharedBytes) {
    const uint8_t *const first = s.opened(c * kHalves), *const last = s.opened(c * kHalves + kHalves - 1);
    load_shared<O::kParts>(queries);
    if constexpr (kHalves == 2) set_steps<E, true, true, 0, false>(open(c, 1), first, ahead);
    if (c + 1 < n_chunks) {
      set_steps<E, true, true, kLastSum, false>(open(c + 1, 0), last, ahead);
    } else {
      set_steps<E, false, true, kLastSum, false>(0, last, ahead);
    }
  }
  auto* const to = reinterpret_cast<uint8_t*>(t.scores);
  tile_store<0>(to, kRowBytes);
  tile_store<1>(to + kTileBytes, kRowBytes);
  if constexpr (kHalves == 2) {
    tile_store<2>(to + 2 * kTileBytes, kRowBytes);
    tile_store<3>(to + 3 * kTileBytes, kRowBytes);
  }
}

// Weights of a group in pairs of rows, as Bf16Form makes them, as tiles of queries: [32 rows].
inline void turn_weights(const float* from, int padded_rows, int n_halves, uint8_t* to) {
  for (int h = 0; h < n_halves; ++h, to += kTileBytes) {
    I pairs[16];
    for (int i = 0; i < 16; ++i) pairs[i] = 32 * h + 2 * i < padded_rows ? as_int(load(from + (16 * h + i) * kWidth)) : iset1(0);
    transpose(pairs);
    for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * kRowBytes, pairs[i]);
  }
}
// Weights in f32 as tiles of queries, [32 rows][part], in the pairs of open_values. Weights too small to change a sum of f32 are left out,
// as tiles take the smallest numbers for zero, and vector units take long over them.
inline void open_weights(const float* from, int n_halves, uint8_t* to) {
  const F least = set1(0x1p-80f);
  const auto load_weights = [&](int row) {
    const F w = load(from + row * kWidth);
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(w, least, _CMP_NLT_UQ), w);
  };
  for (int h = 0; h < n_halves; ++h, to += kMostParts * kTileBytes) {
    F low[16], high[16];
    for (int i = 0; i < 16; ++i) {
      low[i] = load_weights(h * kChunk + i);
      high[i] = load_weights(h * kChunk + 16 + i);
    }
    transpose(low);
    transpose(high);
    for (int i = 0; i < 16; ++i) open_pair<kMostParts>(low[i], high[i], to + i * kRowBytes, kTileBytes);
  }
}

// What the group has summed up so far shrinks by its correction.
inline void correct_group(const AttentionTile& t, int group) {
  const float* const correction = t.correction + group * kWidth;
  if (_mm512_cmp_ps_mask(load(correction), set1(1.0f), _CMP_NEQ_UQ) == 0) return;
  for (int q = 0; q < kWidth; ++q) {
    float* const out = t.out + static_cast<int64_t>(group * kWidth + q) * t.v_dim;
    const F factor = set1(correction[q]);
    for (int d = 0; d < t.v_dim; d += kWidth) store(out + d, mul(load(out + d), factor));
  }
}

// A group's sums of values, 32 numbers at a time.
template <Element E, int kHalves>
inline void sum_opened(const AttentionTile& t, const OpenedScratch<E>& s, const uint8_t* const* rows, int group, Ahead& ahead) {
  using O = Opened<E>;
  const int n_chunks = t.v_dim / kChunk;
  const int64_t stride = static_cast<int64_t>(t.v_dim) * 4;
  float* to = t.out + static_cast<int64_t>(group) * kWidth * t.v_dim;
  const auto open = [&](int c, int half) __attribute__((always_inline)) {
    return [ at = rows + half * kChunk, offset = c * O::kChunkBytes, to = s.opened(c * kHalves + half) ](int i)
        __attribute__((always_inline)) {
      open_values<E>(at, offset, to, i);
    };
  };
  set_steps<E, true, false, 0, true>(open(0, 0), nullptr, ahead);
  for (int c = 0; c < n_chunks; ++c, to += kChunk) {
    const uint8_t *const first = s.opened(c * kHalves), *const last = s.opened(c * kHalves + kHalves - 1);
    if (t.first) {
      tile_zero<0>();
      tile_zero<1>();
    } else {
      tile_load<0>(to, stride);
      tile_load<1>(to + kWidth, stride);
    }
    load_shared<O::kParts>(s.weights(0));
    if constexpr (kHalves == 2) {
      set_steps<E, true, true, 0, true>(open(c, 1), first, ahead);
      load_shared<O::kParts>(s.weights(1));
    }
    if (c + 1 < n_chunks) {
      set_steps<E, true, true, 0, true>(open(c + 1, 0), last, ahead);
    } else {
      set_steps<E, false, true, 0, true>(0, last, ahead);
    }
    tile_store<0>(to, stride);
    tile_store<1>(to + kWidth, stride);
  }
}

template <Element E, int kHalves>
inline void attend_halves(const AttentionTile& t) {
  const OpenedScratch<E> s{static_cast<uint8_t*>(t.scratch)};
  const int n_groups = (t.n_queries + kWidth - 1) / kWidth;
  const uint8_t *keys[kTileRows], *values[kTileRows];
  for (int i = 0; i < kHalves * kChunk; ++i) {
    keys[i] = static_cast<const uint8_t*>(t.keys[i < t.n_rows ? i : t.n_rows - 1]);
    values[i] = static_cast<const uint8_t*>(t.values[i < t.n_rows ? i : t.n_rows - 1]);
  }
  Ahead ahead(t, n_groups * kHalves * (t.k_dim + t.v_dim) / 8);
  for (int group = 0; group < n_groups; ++group) {
    score_opened<E, kHalves>(t, s, keys, group, ahead);
    if constexpr (E == Element::bf16) {
      softmax_group<Bf16Form>(t, group, kHalves * kChunk, t.scores);
      turn_weights(t.scores, kHalves * kChunk, kHalves, s.weights(0));
    } else {
      softmax_group<F32Form>(t, group, kHalves * kChunk, t.scores);
      open_weights(t.scores, kHalves, s.weights(0));
    }
    if (!t.first) correct_group(t, group);
    sum_opened<E, kHalves>(t, s, values, group, ahead);
  }
}
// k_dim and v_dim are multiples of 32.
template <Element E>
inline void attend_opened(const AttentionTile& t) {
  const TileScope scope(kBf16Shapes);
  if (t.n_rows > kChunk) return attend_halves<E, 2>(t);
  attend_halves<E, 1>(t);
}

// Queries as tiles: [groups][32 numbers][part][pairs][lanes].
inline void pack_opened_queries(const float* const* q, int n, int dim, float scale, void* out) {
  auto* to = static_cast<uint8_t*>(out);
  const F factor = set1(scale);
  for (int first = 0; first < n; first += kWidth) {
    for (int k = 0; k < dim; k += kChunk, to += kMostParts * kTileBytes) {
      F low[kWidth], high[kWidth];
      for (int i = 0; i < kWidth; ++i) {
        low[i] = first + i < n ? mul(load(q[first + i] + k), factor) : zero();
        high[i] = first + i < n ? mul(load(q[first + i] + k + kWidth), factor) : zero();
      }
      transpose(low);
      transpose(high);
      for (int i = 0; i < kWidth; ++i) open_pair<kMostParts>(low[i], high[i], to + i * kRowBytes, kTileBytes);
    }
  }
}

template <Element E>
constexpr AttentionKernels make_exact_attention() {
  AttentionKernels k = make_attention<F32Form>();
  k.k_multiple = kChunk;
  k.v_multiple = kChunk;
  k.query_bytes = kMostParts * static_cast<int>(sizeof(uint16_t));
  k.pack_queries = pack_opened_queries;
  k.make_row = [](const float* src, int n, void* row) { store_row(E, src, n, row); };
  k.attend = attend_opened<E>;
  k.scratch_bytes = opened_scratch_bytes<E>;
  return k;
}

}  // namespace
}  // namespace cachalot::cpu
