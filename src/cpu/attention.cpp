// CpuOps: attention over the pages, in one pass when there are enough tasks, otherwise with the context split among the workers; and the
// ragged form that attend_expanded is made of.
#include <algorithm>

#include "cpu/attention_core.h"
#include "cpu/cpu_ops_impl.h"

namespace cachalot::cpu {
namespace {

// Where rows [begin, begin + n) of a sequence lie: calls f(slot, first, count) for each run within a page.
template <typename Function>
void for_each_page(const Batch& batch, int seq, int begin, int n, int block_tokens, const Function& f) {
  const View& table = batch.block_table;
  CACHALOT_CHECK(table.dtype == DType::i32 && seq < table.n_rows() && (begin + n + block_tokens - 1) / block_tokens <= table.n_cols(),
                 "sequence {} positions {}+{}", seq, begin, n);
  for (int i = 0; i < n;) {
    const int block = table.row<int>(seq)[(begin + i) / block_tokens], offset = (begin + i) % block_tokens;
    CACHALOT_CHECK(block >= 0, "sequence {} has no block for position {}", seq, begin + i);
    const int count = std::min(n - i, block_tokens - offset);
    f(static_cast<size_t>(block) * static_cast<size_t>(block_tokens) + static_cast<size_t>(offset), i, count);
    i += count;
  }
}

// Into the second cache. Not the builtin: GCC takes a function that does nothing else for one without effect and drops its calls.
void prefetch_line(const std::byte* p) {
#if defined(__x86_64__)
  __asm__ volatile("prefetcht1 %0" : : "m"(*p));
#else
  __builtin_prefetch(p, 0, 2);
#endif
}

// Up to here each page is converted as it is read, for all queries at once in registers; with more it is copied to f32 first.
constexpr int kDirectQueries = 8;

// One KV head of one sequence in the pages.
struct Pages {
  const KernelTable& kernels;
  const Attn& attn;
  const AttentionShape& shape;
  const AttentionTask& task;
  AttentionMemory& m;

  [[nodiscard]] Element element() const { return element_of(attn.kv.layout.format); }
  [[nodiscard]] size_t row_bytes(bool values) const {
    return values && !attn.kv.layout.v_is_k_prefix ? attn.kv.layout.v_row_bytes() : attn.kv.layout.k_row_bytes();
  }
  // Calls f(rows, first, count) for each run of keys, or of values, within a page.
  template <typename Function>
  void for_each_run(bool values, int begin, int n, const Function& f) const {
    const KvLayout& layout = attn.kv.layout;
    const bool from_v = values && !layout.v_is_k_prefix;
    const size_t head =
        static_cast<size_t>(task.kv_head) * static_cast<size_t>(from_v ? layout.v_dim : layout.k_dim) * size_of(dtype_of(layout.format));
    const auto* const pages = static_cast<const std::byte*>(from_v ? attn.kv.v : attn.kv.k);
    for_each_page(*attn.batch, task.seq, begin, n, layout.block_tokens,
                  [&](size_t slot, int first, int count) { f(pages + slot * row_bytes(values) + head, first, count); });
  }

  // Copied: the load of a CopiedSource.
  ValueTile operator()(int begin, int n) const {
    for_each_run(false, begin, n, [&](const std::byte* rows, int first, int count) {
      kernels.load_rows(element(), rows, row_bytes(false), count, shape.k_dim, m.keys + static_cast<int64_t>(first) * shape.padded_k(),
                        shape.padded_k());
    });
    if (attn.kv.layout.v_is_k_prefix) return {m.keys, shape.padded_k()};
    for_each_run(true, begin, n, [&](const std::byte* rows, int first, int count) {
      kernels.load_rows(element(), rows, row_bytes(true), count, shape.v_dim, m.values + static_cast<int64_t>(first) * shape.v_dim,
                        shape.v_dim);
    });
    return {m.values, shape.v_dim};
  }

  // Asks for the rows of a tile ahead of their use: a head's part of a row is too short, and too far from the next, for the hardware to
  // see.
  void prefetch(bool values, int begin, int n) const {
    const int dim = values ? shape.v_dim : shape.k_dim;
    const size_t bytes = static_cast<size_t>(dim) * size_of(dtype_of(attn.kv.layout.format)), step = row_bytes(values);
    for_each_run(values, begin, n, [&](const std::byte* rows, int, int count) {
      for (int r = 0; r < count; ++r)
        for (size_t b = 0; b < bytes; b += 64) prefetch_line(rows + static_cast<size_t>(r) * step + b);
    });
  }
  // Direct: a source of attend_partition.
  void score(int at, int n) const {
    if (at == task.begin) prefetch(false, at, n);
    for_each_run(false, at, n, [&](const std::byte* rows, int first, int count) {
      if (!attn.kv.layout.v_is_k_prefix) prefetch(true, at + first, count);
      kernels.gemm[static_cast<int>(element())](
          {.data = rows, .stride = static_cast<int64_t>(row_bytes(false)), .n_rows = count, .n_cols = shape.k_dim},
          {.x = m.query_rows, .y = m.score_rows, .y_col = first, .n_tokens = task.n_queries()});
    });
  }
  void add_values(int at, int n) const {
    for_each_run(true, at, n, [&](const std::byte* rows, int first, int count) {
      const int next = at + shape.tile() + first;
      if (next < task.end) prefetch(false, next, std::min(count, task.end - next));
      kernels.weighted_sum[static_cast<int>(element())]({.p = m.scores + first,
                                                         .p_stride = shape.tile(),
                                                         .v = rows,
                                                         .v_stride = static_cast<int64_t>(row_bytes(true)),
                                                         .o = m.part,
                                                         .o_stride = shape.v_dim,
                                                         .correction = m.correction,
                                                         .n_rows = task.n_queries(),
                                                         .n_values = count,
                                                         .dim = shape.v_dim});
      std::fill_n(m.correction, task.n_queries(), 1.0f);
    });
  }
};

// Calls f(source) with the way of reading that suits the task.
template <typename Function>
void with_source(const Pages& pages, const Function& f) {
  if (pages.task.n_queries() <= kDirectQueries && pages.shape.padded_k() == pages.shape.k_dim) {
    f(pages);
  } else {
    f(CopiedSource<Pages>{pages.kernels, pages.shape, pages.task, pages.m, pages});
  }
}

// Output row of query `index` of a task.
float* output_of(const AttentionTask& task, const View& out, int v_dim, int index) {
  return out.row<float>(task.first_row + index / task.n_heads) + static_cast<int64_t>(task.first_head + index % task.n_heads) * v_dim;
}

void write_output(const float* sum, const SoftmaxState& state, int dim, float* out) {
  const float factor = 1.0f / state.sum;
  for (int d = 0; d < dim; ++d) out[d] = sum[d] * factor;
}

// Cuts n_q rows x `share` heads into tasks of at most kMaxQueries; calls add(first row, rows, first head, heads).
template <typename Function>
void cut_queries(int n_q, int share, const Function& add) {
  const int heads = std::min(share, kMaxQueries), rows = kMaxQueries / heads;
  for (int row = 0; row < n_q; row += rows)
    for (int head = 0; head < share; head += heads) add(row, std::min(rows, n_q - row), head, std::min(heads, share - head));
}

}  // namespace

void CpuOps::kv_gather(const Attn& attn, int seq, int begin, int n, View out) {
  const KvLayout& layout = attn.kv.layout;
  const int width = layout.heads * layout.k_dim;
  CACHALOT_CHECK(out.n_rows() == n && out.n_cols() == width && out.dtype == DType::f32);
  for_each_page(*attn.batch, seq, begin, n, layout.block_tokens, [&](size_t slot, int first, int count) {
    kernels_.load_rows(element_of(layout.format), static_cast<const std::byte*>(attn.kv.k) + slot * layout.k_row_bytes(),
                       layout.k_row_bytes(), count, width, out.row<float>(first), out.row_stride());
  });
}

void CpuOps::attend(const Attn& attn, View q, View out) {
  const KvLayout& layout = attn.kv.layout;
  const Rows& rows = attn.rows;
  const AttentionShape shape{.k_dim = layout.k_dim, .v_dim = layout.v_dim, .scale = attn.scale};
  const int heads = q.n_cols() / layout.k_dim, share = heads / layout.heads;
  CACHALOT_CHECK(q.n_cols() == heads * layout.k_dim && heads == share * layout.heads && out.n_cols() == heads * layout.v_dim,
                 "{} query columns, {} output columns, {} KV heads of {} and {}", q.n_cols(), out.n_cols(), layout.heads, layout.k_dim,
                 layout.v_dim);
  CACHALOT_CHECK(q.n_rows() == rows.n_rows && out.n_rows() == rows.n_rows && q.dtype == DType::f32 && out.dtype == DType::f32);
  const int *q_start = attn.batch->q_start.row<int>(0), *kv_len = attn.batch->kv_len.row<int>(0);
  const Scope scope(*this);

  int n_tasks = 0, n_covered = 0, longest = 0;
  const auto for_each_task = [&](const auto& add) {
    for (int s = rows.seq_begin; s < rows.seq_begin + rows.n_seqs; ++s) {
      if (kv_len[s] <= 0) continue;
      const int n_q = q_start[s + 1] - q_start[s], first = q_start[s] - rows.row_begin, position = kv_len[s] - n_q;
      CACHALOT_CHECK(first >= 0 && n_q >= 0 && first + n_q <= rows.n_rows && position >= 0, "sequence {}: {} rows from {} on {} tokens", s,
                     n_q, q_start[s], kv_len[s]);
      for (int kv_head = 0; kv_head < layout.heads; ++kv_head) {
        cut_queries(n_q, share, [&](int row, int n_rows, int head, int n_heads) {
          add(AttentionTask{.seq = s,
                            .kv_head = kv_head,
                            .first_head = kv_head * share + head,
                            .n_heads = n_heads,
                            .first_row = first + row,
                            .n_rows = n_rows,
                            .position = position + row,
                            .begin = 0,
                            .end = position + row + n_rows});
        });
      }
      n_covered += n_q;
    }
  };
  for_each_task([&](const AttentionTask& task) {
    ++n_tasks;
    longest = std::max(longest, task.end);
  });
  if (n_covered != rows.n_rows)
    for (int r = 0; r < rows.n_rows; ++r) std::fill_n(out.row<float>(r), out.n_cols(), 0.0f);
  AttentionTask* const tasks = take<AttentionTask>(static_cast<size_t>(n_tasks));
  int at = 0;
  for_each_task([&](const AttentionTask& task) { tasks[at++] = task; });

  constexpr int kEnoughPerWorker = 4;
  if (n_tasks < kEnoughPerWorker * pool_->size() && longest > kPartition && pool_->size() > 1) {
    attend_split(attn, {tasks, static_cast<size_t>(n_tasks)}, q, out);
    return;
  }
  const auto run = [&](int index, int worker) {
    const AttentionTask& task = tasks[index];
    AttentionMemory m(scratch(worker, AttentionMemory::floats(shape)), shape);
    set_queries(shape, task, q.row<float>(0), q.row_stride(), m);
    with_source(Pages{kernels_, attn, shape, task, m}, [&](const auto& source) { attend_context(kernels_, shape, task, source, m); });
    for (int i = 0; i < task.n_queries(); ++i)
      write_output(m.total + static_cast<int64_t>(i) * shape.v_dim, m.total_state[i], shape.v_dim, output_of(task, out, shape.v_dim, i));
  };
  pool_->run(n_tasks, std::cref(run));
}

void CpuOps::attend_split(const Attn& attn, std::span<const AttentionTask> tasks, View q, View out) {
  const AttentionShape shape{.k_dim = attn.kv.layout.k_dim, .v_dim = attn.kv.layout.v_dim, .scale = attn.scale};
  // Partition p of task i has its parts at index first[i] + p.
  int* const first = take<int>(tasks.size() + 1);
  first[0] = 0;
  for (size_t i = 0; i < tasks.size(); ++i) first[i + 1] = first[i] + (tasks[i].end + kPartition - 1) / kPartition;
  const int n_parts = first[tasks.size()];
  float** const parts = take<float*>(static_cast<size_t>(n_parts));
  SoftmaxState** const states = take<SoftmaxState*>(static_cast<size_t>(n_parts));
  int* const task_of = take<int>(static_cast<size_t>(n_parts));
  for (size_t i = 0; i < tasks.size(); ++i) {
    const auto n = static_cast<size_t>(tasks[i].n_queries());
    for (int p = first[i]; p < first[i + 1]; ++p) {
      parts[p] = take<float>(n * static_cast<size_t>(shape.v_dim));
      states[p] = take<SoftmaxState>(n);
      task_of[p] = static_cast<int>(i);
    }
  }
  const auto run = [&](int index, int worker) {
    const auto i = static_cast<size_t>(task_of[index]);
    const AttentionTask& task = tasks[i];
    AttentionMemory m(scratch(worker, AttentionMemory::floats(shape)), shape);
    m.part = parts[index];
    set_queries(shape, task, q.row<float>(0), q.row_stride(), m);
    const int begin = (index - first[i]) * kPartition;
    with_source(Pages{kernels_, attn, shape, task, m}, [&](const auto& source) {
      attend_partition(kernels_, shape, task, begin, std::min(begin + kPartition, task.end), source, m);
    });
    std::copy_n(m.part_state, task.n_queries(), states[index]);
  };
  pool_->run(n_parts, std::cref(run));
  const auto merge = [&](int index, int worker) {
    const AttentionTask& task = tasks[static_cast<size_t>(index)];
    float* const total = scratch(worker, static_cast<size_t>(shape.v_dim));
    for (int query = 0; query < task.n_queries(); ++query) {
      std::fill_n(total, shape.v_dim, 0.0f);
      SoftmaxState state = kEmptySoftmax;
      for (int p = first[index]; p < first[index + 1]; ++p)
        fold(parts[p] + static_cast<int64_t>(query) * shape.v_dim, states[p][query], shape.v_dim, total, state);
      write_output(total, state, shape.v_dim, output_of(task, out, shape.v_dim, query));
    }
  };
  pool_->run(static_cast<int>(tasks.size()), std::cref(merge));
}

void CpuOps::attend_ragged(const RaggedChunk& chunk, View q, View latent, View kv, View out, View lse) {
  const MlaDims& dims = chunk.dims;
  const int d_q = dims.nope + dims.rope_dim, d_kv = dims.nope + dims.v_dim, n_q = q.n_rows();
  CACHALOT_CHECK(latent.n_rows() == kv.n_rows() && n_q == out.n_rows() && n_q == lse.n_rows());
  CACHALOT_CHECK(q.n_cols() == dims.n_heads * d_q && kv.n_cols() == dims.n_heads * d_kv &&
                 latent.n_cols() == dims.kv_rank + dims.rope_dim && out.n_cols() == dims.n_heads * dims.v_dim &&
                 lse.n_cols() == dims.n_heads);
  CACHALOT_CHECK(q.dtype == DType::f32 && latent.dtype == DType::f32 && kv.dtype == DType::f32 && out.dtype == DType::f32);
  const AttentionShape shape{.k_dim = d_q, .v_dim = dims.v_dim, .scale = chunk.scale};
  const int row_blocks = (n_q + kMaxQueries - 1) / kMaxQueries, padded = shape.padded_k();
  const auto run = [&](int index, int worker) {
    const int head = index % dims.n_heads, row = index / dims.n_heads * kMaxQueries, n_rows = std::min(kMaxQueries, n_q - row);
    const int position = chunk.q_position + row - chunk.kv_position;
    const AttentionTask task{.kv_head = head,
                             .first_head = head,
                             .n_heads = 1,
                             .first_row = row,
                             .n_rows = n_rows,
                             .position = position,
                             .begin = 0,
                             .end = std::clamp(position + n_rows, 0, kv.n_rows())};
    AttentionMemory m(scratch(worker, AttentionMemory::floats(shape)), shape);
    set_queries(shape, task, q.row<float>(0), q.row_stride(), m);
    const auto load = [&](int begin, int n) {
      for (int c = 0; c < n; ++c) {
        float* const key = m.keys + static_cast<int64_t>(c) * padded;
        std::copy_n(kv.row<float>(begin + c) + static_cast<int64_t>(head) * d_kv, dims.nope, key);
        std::copy_n(latent.row<float>(begin + c) + dims.kv_rank, dims.rope_dim, key + dims.nope);
      }
      return ValueTile{kv.row<float>(begin) + static_cast<int64_t>(head) * d_kv + dims.nope, kv.row_stride()};
    };
    attend_context(kernels_, shape, task, CopiedSource<decltype(load)>{kernels_, shape, task, m, load}, m);
    for (int i = 0; i < n_rows; ++i) {
      const SoftmaxState& state = m.total_state[i];
      if (state.largest == kEmptySoftmax.largest && state.sum == 0.0f) continue;
      float* const before = lse.row<float>(row + i) + head;
      const float here = state.largest + std::log(state.sum), largest = std::max(here, *before);
      const float total = largest + std::log(std::exp(here - largest) + std::exp(*before - largest));
      const float keep = std::exp(*before - total), add = std::exp(here - total) / state.sum;
      float* const to = output_of(task, out, dims.v_dim, i);
      const float* const sum = m.total + static_cast<int64_t>(i) * dims.v_dim;
      for (int d = 0; d < dims.v_dim; ++d) to[d] = (keep == 0.0f ? 0.0f : keep * to[d]) + add * sum[d];
      *before = total;
    }
  };
  pool_->run(row_blocks * dims.n_heads, std::cref(run));
}

}  // namespace cachalot::cpu
