// Attention on rows of bf16 with AMX tiles, in the layouts of attention.h: a group of 16 queries is the right factor of its scores as
// pack_queries leaves it, keys are the left one; softmax weights, turned, are the left factor of the sums of values. Many groups share rows
// that are laid out once.
#pragma once

#include "cpu/isa/amx_row_attention.h"

namespace cachalot::cpu {
namespace {

constexpr int kMostKeyTiles = kTileRows / kTileTokenRows, kMostKeyChunks = kTileRows / kChunk;

// The working memory: keys [chunk of 32 numbers][tile of 16 keys], values [32 numbers][32 keys][2 tiles], the weights of two groups, and
// the queries' last numbers where those are no whole chunk.
struct AttentionScratch {
  uint8_t *keys, *values, *weights, *last_queries;
  int key_chunks, value_blocks;
  AttentionScratch(void* memory, int k_dim, int v_dim)
      : keys(static_cast<uint8_t*>(memory)), key_chunks((k_dim + kChunk - 1) / kChunk), value_blocks(v_dim / kChunk) {
    values = keys + key_chunks * kMostKeyTiles * kTileBytes;
    weights = values + value_blocks * kMostKeyChunks * 2 * kTileBytes;
    last_queries = weights + 2 * kMostKeyChunks * kTileBytes;
  }
  [[nodiscard]] uint8_t* weights_of(int group) const { return weights + group % 2 * kMostKeyChunks * kTileBytes; }
};
inline size_t attention_scratch_bytes(int k_dim, int v_dim) {
  const AttentionScratch end(nullptr, k_dim, v_dim);
  return static_cast<size_t>(end.last_queries - end.keys) + kTileBytes;
}

inline void lay_out_keys(const AttentionTile& t, const AttentionScratch& s, int n_tiles) {
  const int rest = t.k_dim % kChunk;
  for (int row = 0; row < n_tiles * kTileTokenRows; ++row) {
    const auto* const key = static_cast<const uint16_t*>(t.keys[row < t.n_rows ? row : t.n_rows - 1]);
    uint8_t* to = s.keys + row * kRowBytes;
    for (int c = 0; c < s.key_chunks; ++c, to += kMostKeyTiles * kTileBytes) {
      const __mmask32 there = c + 1 == s.key_chunks && rest != 0 ? (1u << rest) - 1 : ~0u;
      _mm512_store_si512(to, _mm512_maskz_loadu_epi16(there, key + c * kChunk));
    }
  }
}
inline void lay_out_values(const AttentionTile& t, const AttentionScratch& s, int n_chunks) {
  for (int pair = 0; pair < n_chunks * kChunk / 2; ++pair) {
    uint8_t* to = s.values + (pair / 16 * 2) * kTileBytes + pair % 16 * kRowBytes;
    const auto row_at = [&](int row) { return static_cast<const uint16_t*>(t.values[row < t.n_rows ? row : t.n_rows - 1]); };
    const uint16_t *const first = row_at(2 * pair), *const second = row_at(2 * pair + 1);
    const __mmask32 first_there = 2 * pair < t.n_rows ? ~0u : 0u, second_there = 2 * pair + 1 < t.n_rows ? ~0u : 0u;
    for (int d = 0; d < s.value_blocks; ++d, to += kMostKeyChunks * 2 * kTileBytes) {
      const I a = _mm512_maskz_loadu_epi16(first_there, first + d * kChunk),
              b = _mm512_maskz_loadu_epi16(second_there, second + d * kChunk);
      _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(to + kTileBytes, _mm512_unpackhi_epi16(a, b));
    }
  }
}

// Tile k of keys times the chunk's queries, into tile k.
template <int kKeys>
inline void score_chunk(const uint8_t* keys, const uint8_t* queries) {
  tile_load<7>(queries, kRowBytes);
  tile_load<4>(keys, kRowBytes);
  tile_dot_bf16<0, 4, 7>();
  if constexpr (kKeys > 1) {
    tile_load<5>(keys + kTileBytes, kRowBytes);
    tile_dot_bf16<1, 5, 7>();
  }
  if constexpr (kKeys > 2) {
    tile_load<6>(keys + 2 * kTileBytes, kRowBytes);
    tile_dot_bf16<2, 6, 7>();
    tile_load<4>(keys + 3 * kTileBytes, kRowBytes);
    tile_dot_bf16<3, 4, 7>();
  }
}
// Rows that some query of a group sees, rounded up: those behind them would get weight 0.
inline int rows_of_group(const AttentionTile& t, int group) {
  int rows = t.n_rows;
  if (t.visible != nullptr) {
    const int n = t.n_queries - group * kWidth;
    const auto lanes = static_cast<__mmask16>(n < kWidth ? (1u << n) - 1 : 0xffffu);
    rows = _mm512_mask_reduce_max_epi32(lanes, _mm512_maskz_loadu_epi32(lanes, t.visible + group * kWidth));
  }
  return rows < 1 ? kRowMultiple : (rows + kRowMultiple - 1) / kRowMultiple * kRowMultiple;
}
inline int key_tiles(int rows) {
  const int tiles = (rows + kTileTokenRows - 1) / kTileTokenRows;
  return tiles == 3 ? 4 : tiles;
}

inline int key_chunks_of(const AttentionTile& t, int group) { return (rows_of_group(t, group) + kChunk - 1) / kChunk; }

// Two groups have scores at a time: they stay in the first cache.
inline float* scores_of(const AttentionTile& t, int group) { return t.scores + group % 2 * kTileRows * kWidth; }

// What tiles do beside the softmax of a group: the scores of one group, then the sums of another, 32 numbers a step.
class TileWork {
 public:
  TileWork(const AttentionTile& t, const AttentionScratch& s, Ahead& ahead) : t_(t), s_(s), ahead_(ahead) {}
  // Groups beyond the last, or below 0: nothing. They come in so many softmax steps.
  void begin(int scored, int summed, int n_steps) {
    const int n_groups = (t_.n_queries + kWidth - 1) / kWidth;
    score_chunk_ = scored < n_groups ? 0 : s_.key_chunks;
    sum_block_ = summed >= 0 ? 0 : s_.value_blocks;
    const int parts = s_.key_chunks - score_chunk_ + s_.value_blocks - sum_block_;
    parts_per_step_ = (parts + n_steps - 1) / n_steps;
    if (score_chunk_ == 0) {
      n_key_tiles_ = key_tiles(rows_of_group(t_, scored));
      queries_ = static_cast<const uint8_t*>(t_.queries) + static_cast<int64_t>(scored) * (t_.k_dim / 2) * kRowBytes;
      scores_ = reinterpret_cast<uint8_t*>(scores_of(t_, scored));
    }
    if (sum_block_ == 0) {
      n_chunks_ = key_chunks_of(t_, summed);
      weights_ = s_.weights_of(summed);
      out_ = t_.out + static_cast<int64_t>(summed) * kWidth * t_.v_dim;
    }
  }
  void step() {
    for (int i = 0; i < parts_per_step_; ++i) part();
  }
  void finish() {
    while (part()) {
    }
  }

 private:
  bool part() {
    if (score_chunk_ < s_.key_chunks) {
      score();
      return true;
    }
    if (sum_block_ < s_.value_blocks) {
      sum();
      return true;
    }
    return false;
  }
  void score() {
    const uint8_t *from = queries_ + score_chunk_ * kTileBytes, *const keys = s_.keys + score_chunk_ * kMostKeyTiles * kTileBytes;
    const int rest = t_.k_dim / 2 % (kChunk / 2);
    if (score_chunk_ == 0) {
      tile_zero<0>();
      tile_zero<1>();
      tile_zero<2>();
      tile_zero<3>();
    }
    const bool last = ++score_chunk_ == s_.key_chunks;
    if (last && rest != 0) {
      __builtin_memset(s_.last_queries, 0, kTileBytes);
      __builtin_memcpy(s_.last_queries, from, static_cast<size_t>(rest) * kRowBytes);
      from = s_.last_queries;
    }
    if (n_key_tiles_ == 4) {
      score_chunk<4>(keys, from);
    } else if (n_key_tiles_ == 2) {
      score_chunk<2>(keys, from);
    } else {
      score_chunk<1>(keys, from);
    }
    if (!last) return;
    tile_store<0>(scores_, kRowBytes);
    if (n_key_tiles_ > 1) tile_store<1>(scores_ + kTileBytes, kRowBytes);
    if (n_key_tiles_ > 2) {
      tile_store<2>(scores_ + 2 * kTileBytes, kRowBytes);
      tile_store<3>(scores_ + 3 * kTileBytes, kRowBytes);
    }
  }
  void sum() {
    const int64_t stride = static_cast<int64_t>(t_.v_dim) * 4;
    const uint8_t* const values = s_.values + sum_block_ * kMostKeyChunks * 2 * kTileBytes;
    float* const to = out_ + sum_block_ * kChunk;
    if (sum_block_++ == 0) {
      tile_load<4>(weights_, kRowBytes);
      if (n_chunks_ == 2) tile_load<5>(weights_ + kTileBytes, kRowBytes);
    }
    if (t_.first) {
      tile_zero<0>();
      tile_zero<1>();
    } else {
      tile_load<0>(to, stride);
      tile_load<1>(to + kWidth, stride);
    }
    tile_load<6>(values, kRowBytes);
    tile_dot_bf16<0, 4, 6>();
    tile_load<7>(values + kTileBytes, kRowBytes);
    tile_dot_bf16<1, 4, 7>();
    if (n_chunks_ == 2) {
      tile_load<6>(values + 2 * kTileBytes, kRowBytes);
      tile_dot_bf16<0, 5, 6>();
      tile_load<7>(values + 3 * kTileBytes, kRowBytes);
      tile_dot_bf16<1, 5, 7>();
    }
    tile_store<0>(to, stride);
    tile_store<1>(to + kWidth, stride);
    ahead_.step();
  }

  const AttentionTile& t_;
  const AttentionScratch& s_;
  Ahead& ahead_;
  int score_chunk_ = 0, sum_block_ = 0, n_key_tiles_ = 0, n_chunks_ = 0, parts_per_step_ = 0;
  const uint8_t *queries_ = nullptr, *weights_ = nullptr;
  uint8_t* scores_ = nullptr;
  float* out_ = nullptr;
};

inline void attend_on_tiles(const AttentionTile& t) {
  constexpr int kFewGroups = 2;  // for which rows are opened anew, with the same results to the bit
  const int n_groups = (t.n_queries + kWidth - 1) / kWidth;
  if (n_groups <= kFewGroups && t.k_dim % kChunk == 0) return attend_opened<Element::bf16>(t);
  const TileScope scope(kBf16Shapes);
  const int padded_rows = (t.n_rows + kRowMultiple - 1) / kRowMultiple * kRowMultiple;
  const AttentionScratch s(t.scratch, t.k_dim, t.v_dim);
  lay_out_keys(t, s, key_tiles(padded_rows));
  lay_out_values(t, s, (padded_rows + kChunk - 1) / kChunk);
  Ahead ahead(t, n_groups * s.value_blocks);
  TileWork tiles(t, s, ahead);
  tiles.begin(0, -1, 1);
  tiles.finish();
  for (int group = 0; group < n_groups; ++group) {
    // While the vector units turn the group's scores into weights, tiles work on the next one's scores, then on the sums of the one before,
    // whose weights have reached the cache.
    const int rows = rows_of_group(t, group);
    tiles.begin(group + 1, group - 1, rows / 4);
    float* const scores = scores_of(t, group);
    softmax_group<Bf16Form>(t, group, rows, scores, tiles);
    turn_weights(scores, rows, key_chunks_of(t, group), s.weights_of(group));
    if (!t.first) correct_group(t, group);
    tiles.finish();
  }
  tiles.begin(n_groups, n_groups - 1, 1);
  tiles.finish();
}

constexpr AttentionKernels make_tile_attention() {
  AttentionKernels k = make_attention<Bf16Form>();
  k.attend = attend_on_tiles;
  k.scratch_bytes = attention_scratch_bytes;
  return k;
}

}  // namespace
}  // namespace cachalot::cpu
