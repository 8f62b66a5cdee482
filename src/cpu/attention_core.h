// Attention over tiles of context, shared by the paged and the expanded form. Private to src/cpu.
//
// A task is M = rows x heads queries that see the same keys. Context passes in tiles, tiles form partitions of 256 tokens and partitions
// groups of 16, all counted from the start of the context. Each partition and each group starts afresh and is then folded into what came
// before, in rising order. So a query's result depends on its own context only, whether its partitions ran in one task or in several, and
// whatever queries came with it: tokens of a tile that it does not see add exact zeros.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu/isa/kernels.h"

namespace cachalot::cpu {

inline constexpr int kPartition = 256;          // tokens
inline constexpr int kGroup = 16 * kPartition;  // tokens

template <typename T>
constexpr T round_up(T n, T multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// What all tasks of a call share.
struct AttentionShape {
  const AttentionKernels& kernels;
  Element element = Element::f32;  // of the rows that the kernels read
  int k_dim = 0, v_dim = 0;
  float scale = 1.0f;

  // As the kernels see it: keys are exact multiples, values may be padded with zeros.
  [[nodiscard]] int v() const { return round_up(v_dim, kernels.v_multiple); }
  [[nodiscard]] int element_bytes() const { return element == Element::f32 ? 4 : 2; }
  [[nodiscard]] int lanes(int n_queries) const { return round_up(n_queries, kernels.lanes); }
  [[nodiscard]] size_t query_floats(int n_queries) const {
    return static_cast<size_t>(lanes(n_queries)) * static_cast<size_t>(k_dim * kernels.query_bytes) / sizeof(float);
  }
  [[nodiscard]] size_t out_floats(int n_queries) const {
    return static_cast<size_t>(round_up(n_queries, std::max(kernels.lanes, 8))) * static_cast<size_t>(v());
  }
  [[nodiscard]] size_t scratch_floats() const {
    return kernels.scratch_bytes == nullptr ? 0 : round_up(kernels.scratch_bytes(k_dim, v()) / sizeof(float), size_t{16});
  }
};

// Keys of so many numbers and more, for so many query heads each, are multiplied on tiles although every part of a number is by itself.
inline constexpr int kManyHeads = 8, kWideKeys = 256;

// The kernels for rows of `stored`, or those of f32 when there are none or the dimensions do not suit them. They depend on the heads that
// share a row, not on the rows of a call, so that a row's result does not depend on the others.
inline AttentionShape attention_shape(const KernelTable& table, Element stored, int heads_per_kv_head, int k_dim, int v_dim, float scale) {
  const auto fit = [&](const AttentionKernels& k) { return k.attend != nullptr && k_dim % k.k_multiple == 0 && v_dim % k.v_multiple == 0; };
  const AttentionKernels &own = table.attention[static_cast<int>(stored)], &tiles = table.exact_tile_attention[static_cast<int>(stored)];
  if (heads_per_kv_head >= kManyHeads && k_dim >= kWideKeys && fit(tiles)) return {tiles, stored, k_dim, v_dim, scale};
  if (fit(own)) return {own, stored, k_dim, v_dim, scale};
  return {table.attention[static_cast<int>(Element::f32)], Element::f32, k_dim, v_dim, scale};
}

struct AttentionTask {
  int seq = 0, kv_head = 0;
  int first_head = 0, n_heads = 0;  // query heads
  int first_row = 0, n_rows = 0;    // rows of q
  int position = 0;                 // of the first row within the context
  int end = 0;                      // of the context that the last row sees
  [[nodiscard]] int n_queries() const { return n_heads * n_rows; }
};

inline constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Sums of exp(score - largest) v over a part of the context, for all queries of a task: out [queries rounded up to lanes, 8 at least][v],
// and the state of the softmax [lanes].
struct Sums {
  float *out = nullptr, *largest = nullptr, *sum = nullptr;
};

// total += part, of one query.
inline void fold(const AttentionShape& shape, const Sums& part, const Sums& total, int query) {
  const float here = part.largest[query], before = total.largest[query];
  if (here == kNothing && part.sum[query] == 0.0f) return;
  const float largest = std::max(here, before), keep = std::exp(before - largest), add = std::exp(here - largest);
  const int64_t row = static_cast<int64_t>(query) * shape.v();
  shape.kernels.merge(keep, total.out + row, add, part.out + row, shape.v());
  total.largest[query] = largest;
  total.sum[query] = total.sum[query] * keep + part.sum[query] * add;
}

// Hands out pieces of a worker's memory, each aligned to 64 bytes.
struct Carver {
  float* at;
  float* take(size_t n) {
    float* const out = at;
    at += round_up(n, size_t{16});
    return out;
  }
};

// Takes what Sums need for n_queries.
inline Sums take_sums(const AttentionShape& shape, int n_queries, Carver& carver) {
  const auto lanes = static_cast<size_t>(shape.lanes(n_queries));
  return {carver.take(shape.out_floats(n_queries)), carver.take(lanes), carver.take(lanes)};
}
inline size_t sums_floats(const AttentionShape& shape, int n_queries) {
  return round_up(shape.out_floats(n_queries), size_t{16}) + 2 * round_up(static_cast<size_t>(shape.lanes(n_queries)), size_t{16});
}

// One worker's memory for a task of at most max_queries.
struct AttentionMemory {
  AttentionMemory(float* at, const AttentionShape& shape, int max_queries) {
    Carver c{at};
    const auto lanes = static_cast<size_t>(shape.lanes(max_queries));
    queries = c.take(shape.query_floats(max_queries));
    scores = c.take(lanes * kTileRows);
    correction = c.take(lanes);
    visible = reinterpret_cast<int*>(c.take(lanes));
    key_copies = reinterpret_cast<std::byte*>(c.take(key_floats(shape)));
    value_copies = reinterpret_cast<std::byte*>(c.take(value_floats(shape)));
    scratch = c.take(shape.scratch_floats());
    total = take_sums(shape, max_queries, c);
    group = take_sums(shape, max_queries, c);
    part = take_sums(shape, max_queries, c);
  }
  static size_t floats(const AttentionShape& shape, int max_queries) {
    const auto lanes = static_cast<size_t>(shape.lanes(max_queries));
    return shape.query_floats(max_queries) + lanes * (kTileRows + 2) + key_floats(shape) + value_floats(shape) + shape.scratch_floats() +
           3 * sums_floats(shape, max_queries) + size_t{6} * 16;
  }
  static size_t key_floats(const AttentionShape& shape) { return static_cast<size_t>(kTileRows) * static_cast<size_t>(shape.k_dim); }
  static size_t value_floats(const AttentionShape& shape) { return static_cast<size_t>(kTileRows) * static_cast<size_t>(shape.v()); }

  float* queries;  // packed; may be set to others
  float *scores, *correction;
  int* visible;
  std::byte *key_copies, *value_copies;  // [kTileRows] rows of k_dim and of v numbers
  float* scratch;                        // of the kernels
  Sums total, group, part;
  const void *keys[kTileRows], *values[kTileRows], *ahead[2][kTileRows];
};

// Packs queries [first, first + n) of a task: q [row][head][k_dim].
inline void pack_queries(const AttentionShape& shape, const AttentionTask& task, const float* q, int64_t q_stride, int first, int n,
                         float* out) {
  constexpr int kAtOnce = 64;
  for (int done = 0; done < n; done += kAtOnce) {
    const float* rows[kAtOnce];
    const int count = std::min(kAtOnce, n - done);
    for (int i = 0; i < count; ++i) {
      const int query = first + done + i;
      rows[i] = q + (task.first_row + query / task.n_heads) * q_stride +
                static_cast<int64_t>(task.first_head + query % task.n_heads) * shape.k_dim;
    }
    shape.kernels.pack_queries(rows, count, shape.k_dim, shape.scale, out + shape.query_floats(done));
  }
}

// What will be read once a task has ended: a place in the context of the same or of another task.
struct Next {
  const AttentionTask* task = nullptr;
  int begin = 0;
};

// Takes the leading queries that see nothing of the tile at `at` out of it, in whole vectors.
inline void skip_blind(const AttentionShape& shape, const AttentionTask& task, int at, AttentionTile& tile) {
  const int blind = std::clamp(at - task.position, 0, task.n_rows) * task.n_heads / shape.kernels.lanes * shape.kernels.lanes;
  if (blind == 0) return;
  const int64_t numbers = static_cast<int64_t>(blind) * tile.v_dim;
  if (tile.first) {
    std::fill_n(tile.largest, blind, kNothing);
    std::fill_n(tile.sum, blind, 0.0f);
    std::fill_n(tile.out, numbers, 0.0f);
  }
  tile.n_queries -= blind;
  tile.visible += blind;
  tile.queries = static_cast<const float*>(tile.queries) + shape.query_floats(blind);
  tile.largest += blind;
  tile.sum += blind;
  tile.correction += blind;
  tile.out += numbers;
}

// Context [begin, end) into `to`. The source gives the rows of a tile: source.rows(task, at, n, m) fills the first n of m.keys and
// m.values, source.ahead(task, at, m, tile) names in `tile` what rows() of the tile at `at` will read.
template <typename Source>
void attend_partition(const AttentionShape& shape, const AttentionTask& task, int begin, int end, Next next, const Source& source,
                      AttentionMemory& m, const Sums& to) {
  for (int at = begin; at < end; at += kTileRows) {
    const int n = std::min(kTileRows, end - at);
    source.rows(task, at, n, m);
    for (int i = n; i < round_up(n, kRowMultiple); ++i) {
      m.keys[i] = m.keys[n - 1];
      m.values[i] = m.values[n - 1];
    }
    AttentionTile tile{.keys = m.keys,
                       .values = m.values,
                       .n_rows = n,
                       .n_queries = task.n_queries(),
                       .k_dim = shape.k_dim,
                       .v_dim = shape.v(),
                       .queries = m.queries,
                       .scores = m.scores,
                       .largest = to.largest,
                       .sum = to.sum,
                       .correction = m.correction,
                       .out = to.out,
                       .scratch = m.scratch,
                       .first = at == begin};
    if (at + n > task.position + 1) {  // the first row does not see all
      for (int i = 0, query = 0; i < task.n_rows; ++i)
        for (int h = 0; h < task.n_heads; ++h) m.visible[query++] = std::clamp(task.position + i + 1 - at, 0, n);
      for (int query = task.n_queries(); query < shape.lanes(task.n_queries()); ++query) m.visible[query] = n;
      tile.visible = m.visible;
    }
    skip_blind(shape, task, at, tile);
    if (at + n < end) {
      source.ahead(task, at + n, m, tile);
    } else if (next.task != nullptr) {
      source.ahead(*next.task, next.begin, m, tile);
    }
    shape.kernels.attend(tile);
  }
}

// Context [begin, end), begin a multiple of kPartition and not beyond a group, into `to`.
template <typename Source>
void attend_group(const AttentionShape& shape, const AttentionTask& task, int begin, int end, Next next, const Source& source,
                  AttentionMemory& m, const Sums& to) {
  for (int at = begin; at < end; at += kPartition) {
    const int stop = std::min(at + kPartition, end);
    attend_partition(shape, task, at, stop, stop < end ? Next{&task, stop} : next, source, m, at == begin ? to : m.part);
    if (at == begin) continue;
    for (int query = 0; query < task.n_queries(); ++query) fold(shape, m.part, to, query);
  }
}

// The whole context of a task into m.total.
template <typename Source>
void attend_context(const AttentionShape& shape, const AttentionTask& task, Next next, const Source& source, AttentionMemory& m) {
  for (int at = 0; at < task.end; at += kGroup) {
    const int stop = std::min(at + kGroup, task.end);
    attend_group(shape, task, at, stop, stop < task.end ? Next{&task, stop} : next, source, m, at == 0 ? m.total : m.group);
    if (at == 0) continue;
    for (int query = 0; query < task.n_queries(); ++query) fold(shape, m.group, m.total, query);
  }
}

}  // namespace cachalot::cpu
