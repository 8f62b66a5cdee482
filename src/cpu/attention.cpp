// CpuOps: attention over the pages, each task by one worker when there are enough of them, otherwise with its context split among the
// workers. The expanded form of latent attention is in attention_expanded.cpp.
#include <algorithm>

#include "cpu/attention_core.h"
#include "cpu/cpu_ops_impl.h"

namespace cachalot::cpu {
namespace {

constexpr int kMaxQueries = 128;                  // of a task
constexpr size_t kPartsBytes = size_t{16} << 20;  // of partial sums, before whole groups are split rather than partitions

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

// The rows of a KV head in the pages: read in place, or converted when the kernels do not read their format or width.
struct Pages {
  const KernelTable& table;
  const Attn& attn;
  const AttentionShape& shape;
  bool in_place;

  Pages(const KernelTable& kernels, const Attn& a, const AttentionShape& s)
      : table(kernels),
        attn(a),
        shape(s),
        in_place(a.kv.layout.format != KvFormat::fp8 && s.element == element_of(a.kv.layout.format) && s.v() == s.v_dim) {}

  [[nodiscard]] bool separate_values() const { return !attn.kv.layout.v_is_k_prefix; }
  [[nodiscard]] size_t number_bytes() const { return size_of(dtype_of(attn.kv.layout.format)); }

  // Calls f(rows, stride, first, count) for each run of keys, or of values, within a page.
  template <typename Function>
  void for_each_run(const AttentionTask& task, bool values, int begin, int n, const Function& f) const {
    const KvLayout& layout = attn.kv.layout;
    const bool from_v = values && separate_values();
    const size_t head = static_cast<size_t>(task.kv_head) * static_cast<size_t>(from_v ? layout.v_dim : layout.k_dim) * number_bytes();
    const size_t stride = from_v ? layout.v_row_bytes() : layout.k_row_bytes();
    const auto* const pages = static_cast<const std::byte*>(from_v ? attn.kv.v : attn.kv.k);
    for_each_page(*attn.batch, task.seq, begin, n, layout.block_tokens,
                  [&](size_t slot, int first, int count) { f(pages + slot * stride + head, stride, first, count); });
  }
  void point(const AttentionTask& task, bool values, int begin, int n, const void** rows) const {
    for_each_run(task, values, begin, n, [&](const std::byte* run, size_t stride, int first, int count) {
      for (int i = 0; i < count; ++i) rows[first + i] = run + static_cast<size_t>(i) * stride;
    });
  }
  void copy(const AttentionTask& task, bool values, int begin, int n, int dim, int padded, std::byte* memory, const void** rows) const {
    auto* const to = reinterpret_cast<float*>(memory);
    for_each_run(task, values, begin, n, [&](const std::byte* run, size_t stride, int first, int count) {
      load_kv_rows(table, attn.kv.layout, run, stride, count, dim, to + static_cast<int64_t>(first) * padded, padded);
    });
    for (int i = 0; i < n; ++i) {
      float* const row = to + static_cast<int64_t>(i) * padded;
      std::fill(row + dim, row + padded, 0.0f);
      rows[i] = row;
    }
  }

  // Rows of another format as bf16. They take half of `memory`, which has room for f32; one row of numbers goes behind them.
  void round(const AttentionTask& task, bool values, int begin, int n, int dim, std::byte* memory, const void** rows) const {
    const size_t row_bytes = static_cast<size_t>(dim) * sizeof(uint16_t);
    auto* const numbers = reinterpret_cast<float*>(memory + kTileRows * row_bytes);
    for_each_run(task, values, begin, n, [&](const std::byte* run, size_t stride, int first, int count) {
      for (int i = 0; i < count; ++i) {
        std::byte* const row = memory + static_cast<size_t>(first + i) * row_bytes;
        load_kv_rows(table, attn.kv.layout, run + static_cast<size_t>(i) * stride, stride, 1, dim, numbers, dim);
        shape.kernels.make_row(numbers, dim, row);
        rows[first + i] = row;
      }
    });
  }

  void rows(const AttentionTask& task, int begin, int n, AttentionMemory& m) const {
    if (!in_place && shape.element == Element::bf16) {
      round(task, false, begin, n, shape.k_dim, m.key_copies, m.keys);
      if (separate_values()) round(task, true, begin, n, shape.v_dim, m.value_copies, m.values);
    } else if (in_place) {
      point(task, false, begin, n, m.keys);
      if (separate_values()) point(task, true, begin, n, m.values);
    } else {
      copy(task, false, begin, n, shape.k_dim, shape.k_dim, m.key_copies, m.keys);
      if (separate_values() || shape.v() != shape.v_dim) copy(task, true, begin, n, shape.v_dim, shape.v(), m.value_copies, m.values);
    }
    if (!separate_values() && shape.v() == shape.v_dim) std::copy_n(m.keys, n, m.values);
  }
  void ahead(const AttentionTask& task, int begin, AttentionMemory& m, AttentionTile& tile) const {
    const int n = std::min(kTileRows, task.end - begin);
    point(task, false, begin, n, m.ahead[0]);
    tile.ahead[0] = m.ahead[0];
    const KvLayout& layout = attn.kv.layout;
    tile.ahead_bytes[0] =
        static_cast<int>(layout.format == KvFormat::fp8 ? layout.k_row_bytes() : static_cast<size_t>(layout.k_dim) * number_bytes());
    if (separate_values()) {
      point(task, true, begin, n, m.ahead[1]);
      tile.ahead[1] = m.ahead[1];
      tile.ahead_bytes[1] = shape.v_dim * static_cast<int>(number_bytes());
    }
    tile.n_ahead = n;
  }
};

// Writes the result of one query of a task.
void write_query(const AttentionShape& shape, const AttentionTask& task, const Sums& sums, int query, const View& out) {
  float* const to =
      out.row<float>(task.first_row + query / task.n_heads) + static_cast<int64_t>(task.first_head + query % task.n_heads) * shape.v_dim;
  shape.kernels.write_row(sums.out + static_cast<int64_t>(query) * shape.v(), 1.0f / sums.sum[query], shape.v_dim, to);
}

// Cuts n_q rows x `share` heads into tasks of at most max_queries; calls add(first row, rows, first head, heads).
template <typename Function>
void cut_queries(int n_q, int share, int max_queries, const Function& add) {
  const int heads = std::min(share, max_queries), rows = max_queries / heads;
  for (int row = 0; row < n_q; row += rows)
    for (int head = 0; head < share; head += heads) add(row, std::min(rows, n_q - row), head, std::min(heads, share - head));
}

// Calls add(task) for each task of a call, the rows that see most first.
template <typename Function>
void for_each_task(const Attn& attn, int share, int max_queries, const Function& add) {
  const Rows& rows = attn.rows;
  const int *q_start = attn.batch->q_start.row<int>(0), *kv_len = attn.batch->kv_len.row<int>(0);
  for (int s = rows.seq_begin; s < rows.seq_begin + rows.n_seqs; ++s) {
    if (kv_len[s] <= 0) continue;
    const int n_q = q_start[s + 1] - q_start[s], first = q_start[s] - rows.row_begin, position = kv_len[s] - n_q;
    CACHALOT_CHECK(first >= 0 && n_q >= 0 && first + n_q <= rows.n_rows && position >= 0, "sequence {}: {} rows from {} on {} tokens", s,
                   n_q, q_start[s], kv_len[s]);
    for (int kv_head = 0; kv_head < attn.kv.layout.heads; ++kv_head) {
      cut_queries(n_q, share, max_queries, [&](int row, int n_rows, int head, int n_heads) {
        add(AttentionTask{.seq = s,
                          .kv_head = kv_head,
                          .first_head = kv_head * share + head,
                          .n_heads = n_heads,
                          .first_row = first + row,
                          .n_rows = n_rows,
                          .position = position + row,
                          .end = position + row + n_rows});
      });
    }
  }
}

}  // namespace

void CpuOps::kv_gather(const Attn& attn, int seq, int begin, int n, View out) {
  const KvLayout& layout = attn.kv.layout;
  const int width = layout.heads * layout.k_dim;
  CACHALOT_CHECK(out.n_rows() == n && out.n_cols() == width && out.dtype == DType::f32);
  for_each_page(*attn.batch, seq, begin, n, layout.block_tokens, [&](size_t slot, int first, int count) {
    load_kv_rows(kernels_, layout, static_cast<const std::byte*>(attn.kv.k) + slot * layout.k_row_bytes(), layout.k_row_bytes(), count,
                 width, out.row<float>(first), out.row_stride());
  });
}

// Sequences of many rows have their products in bf16 where tiles are; sequences that lie side by side and are alike go together.
void CpuOps::attend(const Attn& attn, View q, View out) {
  const Rows& rows = attn.rows;
  CACHALOT_CHECK(q.n_rows() == rows.n_rows && out.n_rows() == rows.n_rows);
  const int* const q_start = attn.batch->q_start.row<int>(0);
  const auto many = [&](int seq) { return in_bf16(q_start[seq + 1] - q_start[seq]); };
  const int seq_end = rows.seq_begin + rows.n_seqs, row_end = rows.row_begin + rows.n_rows;
  for (int seq = rows.seq_begin, row = rows.row_begin; seq < seq_end;) {
    int next = seq + 1;
    while (next < seq_end && many(next) == many(seq)) ++next;
    const int n = (next < seq_end ? q_start[next] : row_end) - row, first = row - rows.row_begin;
    Attn part = attn;
    part.rows = {.row_begin = row, .n_rows = n, .seq_begin = seq, .n_seqs = next - seq};
    attend_rows(part, many(seq) ? Element::bf16 : element_of(attn.kv.layout.format), q.rows(first, n), out.rows(first, n));
    seq = next;
    row += n;
  }
}

void CpuOps::attend_rows(const Attn& attn, Element element, View q, View out) {
  const KvLayout& layout = attn.kv.layout;
  const int heads = q.n_cols() / layout.k_dim, share = heads / layout.heads;
  const AttentionShape shape = attention_shape(kernels_, element, share, layout.k_dim, layout.v_dim, attn.scale);
  CACHALOT_CHECK(q.n_cols() == heads * layout.k_dim && heads == share * layout.heads && out.n_cols() == heads * layout.v_dim,
                 "{} query columns, {} output columns, {} KV heads of {} and {}", q.n_cols(), out.n_cols(), layout.heads, layout.k_dim,
                 layout.v_dim);
  CACHALOT_CHECK(q.dtype == DType::f32 && out.dtype == DType::f32);
  const Scope scope(*this);

  // Large tasks use what they read most often, small ones keep all workers busy.
  constexpr int kEnoughPerWorker = 4;
  int max_queries = kMaxQueries, n_tasks = 0, n_covered = 0, longest = 0, most_queries = 0;
  const auto count = [&] {
    n_tasks = n_covered = 0;
    for_each_task(attn, share, max_queries, [&](const AttentionTask& task) {
      ++n_tasks;
      longest = std::max(longest, task.end);
      n_covered += task.n_queries();
    });
    return n_tasks < kEnoughPerWorker * pool_->size();
  };
  while (count() && max_queries > 32 && attn.batch->max_q > max_queries / share) max_queries /= 2;
  if (n_covered != attn.rows.n_rows * heads)
    for (int r = 0; r < out.n_rows(); ++r) std::fill_n(out.row<float>(r), out.n_cols(), 0.0f);
  AttentionTask* const tasks = take<AttentionTask>(static_cast<size_t>(n_tasks));
  int at = 0;
  for_each_task(attn, share, max_queries, [&](const AttentionTask& task) {
    tasks[at++] = task;
    most_queries = std::max(most_queries, task.n_queries());
  });

  if (n_tasks < kEnoughPerWorker * pool_->size() && longest > kPartition && pool_->size() > 1) {
    attend_split(attn, shape, {tasks, static_cast<size_t>(n_tasks)}, most_queries, q, out);
    return;
  }
  // From the last: of a prompt's rows those that see most come first, and no long task is left for the end.
  const Pages pages(kernels_, attn, shape);
  const int n_workers = pool_->size();
  const auto run = [&](int index, int worker) {
    const AttentionTask& task = tasks[n_tasks - 1 - index];
    const Next next = index + n_workers < n_tasks ? Next{&tasks[n_tasks - 1 - index - n_workers], 0} : Next{};
    AttentionMemory m(scratch(worker, AttentionMemory::floats(shape, most_queries)), shape, most_queries);
    pack_queries(shape, task, q.row<float>(0), q.row_stride(), 0, task.n_queries(), m.queries);
    attend_context(shape, task, next, pages, m);
    for (int query = 0; query < task.n_queries(); ++query) write_query(shape, task, m.total, query, out);
  };
  pool_->run(n_tasks, std::cref(run));
}

void CpuOps::attend_split(const Attn& attn, const AttentionShape& shape, std::span<const AttentionTask> tasks, int most_queries, View q,
                          View out) {
  const auto n_tasks = static_cast<int>(tasks.size());
  const auto parts_of = [&](int step) {
    int n = 0;
    for (const AttentionTask& task : tasks) n += (task.end + step - 1) / step;
    return n;
  };
  const bool small = static_cast<size_t>(parts_of(kPartition)) * sums_floats(shape, most_queries) * sizeof(float) <= kPartsBytes;
  const int step = small ? kPartition : kGroup, n_parts = parts_of(step);

  struct Part {
    int task, begin;
    Sums sums;
  };
  // In the order in which they run: the same context of all tasks, which may be heads of the same pages, at about the same time.
  Part* const parts = take<Part>(static_cast<size_t>(n_parts));
  Part** const of_task = take<Part*>(static_cast<size_t>(n_parts));  // by task, then by context
  int* const first = take<int>(static_cast<size_t>(n_tasks) + 1);
  float** const queries = take<float*>(static_cast<size_t>(n_tasks));
  first[0] = 0;
  int longest = 0;
  for (int i = 0; i < n_tasks; ++i) {
    const AttentionTask& task = tasks[static_cast<size_t>(i)];
    first[i + 1] = first[i] + (task.end + step - 1) / step;
    longest = std::max(longest, task.end);
    queries[i] = take<float>(shape.query_floats(task.n_queries()));
  }
  for (int begin = 0, n = 0; begin < longest; begin += step) {
    for (int i = 0; i < n_tasks; ++i) {
      const AttentionTask& task = tasks[static_cast<size_t>(i)];
      if (begin >= task.end) continue;
      Carver carver{take<float>(sums_floats(shape, task.n_queries()))};
      parts[n] = {i, begin, take_sums(shape, task.n_queries(), carver)};
      of_task[first[i] + begin / step] = &parts[n++];
    }
  }

  const auto pack = [&](int i, int) {
    const AttentionTask& task = tasks[static_cast<size_t>(i)];
    pack_queries(shape, task, q.row<float>(0), q.row_stride(), 0, task.n_queries(), queries[i]);
  };
  parallel(n_tasks, n_tasks == 1, pack);
  const Pages pages(kernels_, attn, shape);
  const int n_workers = pool_->size();
  const auto run = [&](int index, int worker) {
    const Part& part = parts[index];
    const AttentionTask& task = tasks[static_cast<size_t>(part.task)];
    const Part* const later = index + n_workers < n_parts ? &parts[index + n_workers] : nullptr;  // likely this worker's next
    const Next next = later != nullptr ? Next{&tasks[static_cast<size_t>(later->task)], later->begin} : Next{};
    AttentionMemory m(scratch(worker, AttentionMemory::floats(shape, most_queries)), shape, most_queries);
    m.queries = queries[part.task];
    attend_group(shape, task, part.begin, std::min(part.begin + step, task.end), next, pages, m, part.sums);
  };
  pool_->run(n_parts, std::cref(run));

  // Folds the parts in the order of attend_context: partitions into their group, groups into the first.
  constexpr int kQueriesAtOnce = 8;
  const int blocks = (most_queries + kQueriesAtOnce - 1) / kQueriesAtOnce, per_group = kGroup / step;
  const auto merge = [&](int index, int) {
    const int i = index / blocks, begin = index % blocks * kQueriesAtOnce, n = first[i + 1] - first[i];
    const AttentionTask& task = tasks[static_cast<size_t>(i)];
    Part* const* const own = of_task + first[i];
    for (int query = begin; query < std::min(begin + kQueriesAtOnce, task.n_queries()); ++query) {
      for (int p = 0; p < n; p += per_group) {
        for (int other = p + 1; other < std::min(p + per_group, n); ++other) fold(shape, own[other]->sums, own[p]->sums, query);
        if (p > 0) fold(shape, own[p]->sums, own[0]->sums, query);
      }
      write_query(shape, task, own[0]->sums, query, out);
    }
  };
  pool_->run(n_tasks * blocks, std::cref(merge));
}

}  // namespace cachalot::cpu
