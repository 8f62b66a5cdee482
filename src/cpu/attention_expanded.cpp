// CpuOps: the expanded form of latent attention. Context passes in chunks whose keys and values are rebuilt per head in f32; each task, the
// rows of one head, takes them in the form that the kernels for the cache's format read, and folds the chunk into its running result.
#include <algorithm>
#include <cmath>

#include "cpu/attention_core.h"
#include "cpu/cpu_ops_impl.h"

namespace cachalot::cpu {
namespace {

constexpr int kMaxQueries = 256;    // of a task: each tile is converted once for all of them
constexpr int kContextChunk = 512;  // tokens whose keys and values exist at a time: at most 64 MiB for 128 heads of 256 numbers

// The rows of one head in a chunk of expanded context.
struct Chunk {
  const AttentionShape& shape;
  const MlaDims& dims;
  const View& latent;  // [n, kv_rank + rope]
  const View& kv;      // [n, heads * (nope + v)]

  [[nodiscard]] const float* head_of(const AttentionTask& task, int row) const {
    return kv.row<float>(row) + static_cast<int64_t>(task.kv_head) * (dims.nope + dims.v_dim);
  }
  void rows(const AttentionTask& task, int begin, int n, AttentionMemory& m) const {
    const auto bytes = static_cast<size_t>(shape.element_bytes());
    const bool values_in_place = shape.element == Element::f32 && shape.v() == shape.v_dim;
    for (int i = 0; i < n; ++i) {
      std::byte* const key = m.key_copies + static_cast<size_t>(i) * static_cast<size_t>(shape.k_dim) * bytes;
      const float* const head = head_of(task, begin + i);
      shape.kernels.make_row(head, dims.nope, key);
      shape.kernels.make_row(latent.row<float>(begin + i) + dims.kv_rank, dims.rope_dim, key + static_cast<size_t>(dims.nope) * bytes);
      m.keys[i] = key;
      if (values_in_place) {
        m.values[i] = head + dims.nope;
        continue;
      }
      std::byte* const value = m.value_copies + static_cast<size_t>(i) * static_cast<size_t>(shape.v()) * bytes;
      std::fill_n(value, static_cast<size_t>(shape.v()) * bytes, std::byte{0});
      shape.kernels.make_row(head + dims.nope, dims.v_dim, value);
      m.values[i] = value;
    }
  }
  void ahead(const AttentionTask& task, int begin, AttentionMemory& m, AttentionTile& tile) const {
    tile.n_ahead = std::min(kTileRows, task.end - begin);
    for (int i = 0; i < tile.n_ahead; ++i) m.ahead[0][i] = head_of(task, begin + i);
    tile.ahead[0] = m.ahead[0];
    tile.ahead_bytes[0] = (dims.nope + dims.v_dim) * static_cast<int>(sizeof(float));
  }
};

}  // namespace

void CpuOps::attend_ragged(const RaggedChunk& chunk, View q, View latent, View kv, View out, View lse) {
  attend_chunk(chunk, Element::f32, q, latent, kv, out, lse);
}

void CpuOps::attend_chunk(const RaggedChunk& chunk, Element element, View q, View latent, View kv, View out, View lse) {
  const MlaDims& dims = chunk.dims;
  const int d_q = dims.nope + dims.rope_dim, d_kv = dims.nope + dims.v_dim, n_q = q.n_rows();
  CACHALOT_CHECK(latent.n_rows() == kv.n_rows() && n_q == out.n_rows() && n_q == lse.n_rows());
  CACHALOT_CHECK(q.n_cols() == dims.n_heads * d_q && kv.n_cols() == dims.n_heads * d_kv &&
                 latent.n_cols() == dims.kv_rank + dims.rope_dim && out.n_cols() == dims.n_heads * dims.v_dim &&
                 lse.n_cols() == dims.n_heads);
  CACHALOT_CHECK(q.dtype == DType::f32 && latent.dtype == DType::f32 && kv.dtype == DType::f32 && out.dtype == DType::f32);
  const AttentionShape shape = attention_shape(kernels_, element, 1, d_q, dims.v_dim, chunk.scale);

  constexpr int kEnoughPerWorker = 4;
  int rows_at_once = kMaxQueries;
  const auto blocks = [&] { return (n_q + rows_at_once - 1) / rows_at_once; };
  while (blocks() * dims.n_heads < kEnoughPerWorker * pool_->size() && rows_at_once > 32) rows_at_once /= 2;
  const Chunk source{shape, dims, latent, kv};
  const int n_tasks = blocks() * dims.n_heads;
  const auto run = [&](int index, int worker) {
    // The last rows first: they see most.
    const int head = index % dims.n_heads, row = (blocks() - 1 - index / dims.n_heads) * rows_at_once;
    const int n_rows = std::min(rows_at_once, n_q - row), position = chunk.q_position + row - chunk.kv_position;
    const AttentionTask task{.kv_head = head,
                             .first_head = head,
                             .n_heads = 1,
                             .first_row = row,
                             .n_rows = n_rows,
                             .position = position,
                             .end = std::clamp(position + n_rows, 0, kv.n_rows())};
    if (task.end == 0) return;
    AttentionMemory m(scratch(worker, AttentionMemory::floats(shape, rows_at_once)), shape, rows_at_once);
    pack_queries(shape, task, q.row<float>(0), q.row_stride(), 0, n_rows, m.queries);
    attend_context(shape, task, Next{}, source, m);
    float* const result = reinterpret_cast<float*>(m.value_copies);
    for (int i = 0; i < n_rows; ++i) {
      const float sum = m.total.sum[i];
      if (m.total.largest[i] == kNothing && sum == 0.0f) continue;
      float *const before = lse.row<float>(row + i) + head, *const to = out.row<float>(row + i) + static_cast<int64_t>(head) * dims.v_dim;
      const float here = m.total.largest[i] + std::log(sum), largest = std::max(here, *before);
      const float total = largest + std::log(std::exp(here - largest) + std::exp(*before - largest));
      const float keep = std::exp(*before - total), add = std::exp(here - total) / sum;
      const float* const row_sum = m.total.out + static_cast<int64_t>(i) * shape.v();
      if (keep == 0.0f) {
        shape.kernels.write_row(row_sum, add, dims.v_dim, to);
      } else {
        shape.kernels.write_row(row_sum, add, dims.v_dim, result);
        for (int d = 0; d < dims.v_dim; ++d) to[d] = keep * to[d] + result[d];
      }
      *before = total;
    }
  };
  pool_->run(n_tasks, std::cref(run));
}

void CpuOps::attend_expanded(const Attn& attn, const MlaDims& dims, View q, const Linear& kv_b, View out) {
  const Batch& batch = *attn.batch;
  CACHALOT_CHECK(out.dtype == DType::f32 && q.n_rows() == attn.rows.n_rows && out.n_rows() == q.n_rows());
  const Scope whole(*this);
  const View lse = temp(DType::f32, out.n_rows(), dims.n_heads);
  for (int r = 0; r < out.n_rows(); ++r) {
    std::fill_n(out.row<float>(r), out.n_cols(), 0.0f);
    std::fill_n(lse.row<float>(r), dims.n_heads, kNothing);
  }
  for (int s = attn.rows.seq_begin; s < attn.rows.seq_begin + attn.rows.n_seqs; ++s) {
    const int kv_len = batch.host_kv_len[static_cast<size_t>(s)], begin = batch.host_q_start[static_cast<size_t>(s)] - attn.rows.row_begin;
    const int n_q = batch.host_q_start[static_cast<size_t>(s) + 1] - attn.rows.row_begin - begin;
    if (kv_len <= 0 || n_q <= 0) continue;
    const Element element = in_bf16(n_q) ? Element::bf16 : element_of(attn.kv.layout.format);
    for (int context = 0; context < kv_len; context += kContextChunk) {
      const Scope chunk_scope(*this);
      const int n = std::min(kContextChunk, kv_len - context);
      const View latent = temp(DType::f32, n, dims.kv_rank + dims.rope_dim), kv = temp(DType::f32, n, kv_b.out);
      kv_gather(attn, s, context, n, latent);
      linear(latent.cols(0, dims.kv_rank), kv_b, kv);
      attend_chunk({.dims = dims, .scale = attn.scale, .q_position = kv_len - n_q, .kv_position = context}, element, q.rows(begin, n_q),
                   latent, kv, out.rows(begin, n_q), lse.rows(begin, n_q));
    }
  }
}

}  // namespace cachalot::cpu
