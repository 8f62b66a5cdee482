// Attention over tiles of context, shared by the paged and the ragged form. Private to src/cpu.
//
// A task is M = rows x heads queries that see the same keys. Context passes in tiles (scores, softmax that carries its state, weighted sum)
// and tiles form partitions of 256 tokens counted from the start of the context. Each partition starts afresh and is then folded into the
// total in rising order. So a query's result depends on its own context only, whether its partitions ran in one task or in several, and
// whatever rows came with it: extra tokens of a tile add exact zeros.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/isa/kernels.h"

namespace cachalot::cpu {

inline constexpr int kPartition = 256;
inline constexpr int kMaxQueries = 64;  // M of a task

struct AttentionShape {
  int k_dim = 0, v_dim = 0;
  float scale = 1.0f;
  [[nodiscard]] int padded_k() const { return (k_dim + kChunk - 1) / kChunk * kChunk; }
  // Tokens of a tile: its keys take at most 72 KiB, for 576 numbers each.
  [[nodiscard]] int tile() const { return padded_k() > 256 ? 32 : 64; }
};

struct AttentionTask {
  int seq = 0, kv_head = 0;
  int first_head = 0, n_heads = 0;  // query heads
  int first_row = 0, n_rows = 0;    // rows of q
  int position = 0;                 // of the first row within the context
  int begin = 0, end = 0;           // context, begin a multiple of kPartition
  [[nodiscard]] int n_queries() const { return n_heads * n_rows; }
};

// Values of a tile of context.
struct ValueTile {
  const float* data;
  int64_t stride;
};

inline constexpr SoftmaxState kEmptySoftmax{-std::numeric_limits<float>::infinity(), 0.0f};

// total += part, both sums of exp(score - largest) v with their state.
inline void fold(const float* part, const SoftmaxState& state, int dim, float* total, SoftmaxState& total_state) {
  if (state.sum == 0.0f && state.largest == kEmptySoftmax.largest) return;
  const float largest = std::max(state.largest, total_state.largest);
  const float keep = std::exp(total_state.largest - largest), add = std::exp(state.largest - largest);
  for (int d = 0; d < dim; ++d) total[d] = total[d] * keep + part[d] * add;
  total_state = {largest, total_state.sum * keep + state.sum * add};
}

// One worker's memory for a task, carved out of its scratch.
struct AttentionMemory {
  AttentionMemory(float* at, const AttentionShape& shape) {
    const auto take = [&at](int64_t n) {
      float* out = at;
      at += (n + 15) / 16 * 16;
      return out;
    };
    const int tile = shape.tile();
    keys = take(static_cast<int64_t>(tile) * shape.padded_k());
    values = take(static_cast<int64_t>(tile) * shape.v_dim);
    scores = take(static_cast<int64_t>(kMaxQueries) * tile);
    part = take(static_cast<int64_t>(kMaxQueries) * shape.v_dim);
    total = take(static_cast<int64_t>(kMaxQueries) * shape.v_dim);
    queries = take(static_cast<int64_t>(kMaxQueries) * shape.padded_k());
    correction = take(kMaxQueries);
  }
  static size_t floats(const AttentionShape& shape) {
    const auto tile = static_cast<size_t>(shape.tile()), k = static_cast<size_t>(shape.padded_k()), v = static_cast<size_t>(shape.v_dim);
    return tile * (k + v + kMaxQueries) + kMaxQueries * (2 * v + k + 1) + 7 * 16;
  }

  float *keys, *values, *scores, *part, *total, *queries, *correction;
  SoftmaxState part_state[kMaxQueries], total_state[kMaxQueries];
  const float* query_rows[kMaxQueries];
  float* score_rows[kMaxQueries];
};

// Points memory.query_rows at the task's queries: q [row][head][k_dim], copied when their length must be padded.
inline void set_queries(const AttentionShape& shape, const AttentionTask& task, const float* q, int64_t q_stride, AttentionMemory& m) {
  const int padded = shape.padded_k(), tile = shape.tile();
  for (int i = 0, at = 0; i < task.n_rows; ++i) {
    for (int h = 0; h < task.n_heads; ++h, ++at) {
      const float* query = q + (task.first_row + i) * q_stride + static_cast<int64_t>(task.first_head + h) * shape.k_dim;
      if (padded != shape.k_dim) {
        float* copy = m.queries + static_cast<int64_t>(at) * padded;
        std::copy_n(query, shape.k_dim, copy);
        std::fill(copy + shape.k_dim, copy + padded, 0.0f);
        query = copy;
      }
      m.query_rows[at] = query;
      m.score_rows[at] = m.scores + static_cast<int64_t>(at) * tile;
    }
  }
  if (padded != shape.k_dim)
    for (int b = 0; b < tile; ++b)
      std::fill(m.keys + static_cast<int64_t>(b) * padded + shape.k_dim, m.keys + static_cast<int64_t>(b + 1) * padded, 0.0f);
}

// Context [begin, end) of one partition into m.part and m.part_state. The source gives what a tile [at, at + n) needs:
// source.score(at, n) fills m.score_rows, source.add_values(at, n) corrects m.part and adds the values weighted by the scores.
template <typename Source>
void attend_partition(const KernelTable& kernels, const AttentionShape& shape, const AttentionTask& task, int begin, int end,
                      const Source& source, AttentionMemory& m) {
  const int n_queries = task.n_queries(), tile = shape.tile();
  std::fill_n(m.part_state, n_queries, kEmptySoftmax);
  std::fill_n(m.part, static_cast<int64_t>(n_queries) * shape.v_dim, 0.0f);
  for (int at = begin; at < end; at += tile) {
    const int n = std::min(tile, end - at);
    source.score(at, n);
    for (int i = 0, query = 0; i < task.n_rows; ++i) {
      const int valid = std::clamp(task.position + i + 1 - at, 0, n);
      for (int h = 0; h < task.n_heads; ++h, ++query)
        m.correction[query] =
            kernels.softmax_step(m.score_rows[query], valid, (n + kChunk - 1) / kChunk * kChunk, shape.scale, m.part_state[query]);
    }
    source.add_values(at, n);
  }
}

// A source whose tiles are copied to f32 first, by load(at, n), which fills m.keys and returns the values.
template <typename Load>
struct CopiedSource {
  const KernelTable& kernels;
  const AttentionShape& shape;
  const AttentionTask& task;
  AttentionMemory& m;
  const Load& load;
  mutable ValueTile values{};

  void score(int at, int n) const {
    values = load(at, n);
    const int padded = shape.padded_k();
    kernels.gemm[static_cast<int>(Element::f32)](
        {.data = m.keys, .stride = padded * static_cast<int64_t>(sizeof(float)), .n_rows = n, .n_cols = padded},
        {.x = m.query_rows, .y = m.score_rows, .n_tokens = task.n_queries()});
  }
  void add_values(int, int n) const {
    kernels.weighted_sum[static_cast<int>(Element::f32)]({.p = m.scores,
                                                          .p_stride = shape.tile(),
                                                          .v = values.data,
                                                          .v_stride = values.stride * static_cast<int64_t>(sizeof(float)),
                                                          .o = m.part,
                                                          .o_stride = shape.v_dim,
                                                          .correction = m.correction,
                                                          .n_rows = task.n_queries(),
                                                          .n_values = n,
                                                          .dim = shape.v_dim});
  }
};

// The whole context of a task into m.total and m.total_state.
template <typename Source>
void attend_context(const KernelTable& kernels, const AttentionShape& shape, const AttentionTask& task, const Source& source,
                    AttentionMemory& m) {
  std::fill_n(m.total_state, task.n_queries(), kEmptySoftmax);
  std::fill_n(m.total, static_cast<int64_t>(task.n_queries()) * shape.v_dim, 0.0f);
  for (int at = task.begin; at < task.end; at += kPartition) {
    attend_partition(kernels, shape, task, at, std::min(at + kPartition, task.end), source, m);
    for (int query = 0; query < task.n_queries(); ++query) {
      const int64_t offset = static_cast<int64_t>(query) * shape.v_dim;
      fold(m.part + offset, m.part_state[query], shape.v_dim, m.total + offset, m.total_state[query]);
    }
  }
}

}  // namespace cachalot::cpu
