// RefOps: rotary embedding, the paged cache, and the three forms of attention, each with whole rows of scores in double.
#include <cmath>
#include <limits>

#include "ops/kv_codec.h"
#include "ops/ref_detail.h"
#include "ops/ref_ops.h"

namespace cachalot {
namespace {
using namespace ref;

// Where token `position` of sequence `seq` lies: a row number over all pages.
size_t slot_of(const Batch& batch, int seq, int position, int block_tokens) {
  const View& table = batch.block_table;
  CACHALOT_CHECK(table.dtype == DType::i32 && seq < table.n_rows() && position / block_tokens < table.n_cols(), "sequence {} position {}",
                 seq, position);
  const int block = table.row<int>(seq)[position / block_tokens];
  CACHALOT_CHECK(block >= 0, "sequence {} has no block for position {}", seq, position);
  return static_cast<size_t>(block) * static_cast<size_t>(block_tokens) + static_cast<size_t>(position % block_tokens);
}

// V's pages as those of K of a layout of their own.
KvLayout v_layout_of(KvLayout layout) {
  layout.k_dim = layout.v_dim;
  return layout;
}

// Rows [begin, begin + n) of a sequence from pages of K: [n, heads * k_dim].
std::vector<float> read_pages(const Batch& batch, const KvLayout& layout, const void* pages, int seq, int begin, int n) {
  const auto width = static_cast<size_t>(layout.heads) * static_cast<size_t>(layout.k_dim);
  std::vector<float> out(static_cast<size_t>(n) * width);
  for (int i = 0; i < n; ++i) {
    const size_t slot = slot_of(batch, seq, begin + i, layout.block_tokens);
    decode_kv_row(layout, static_cast<const std::byte*>(pages) + slot * layout.k_row_bytes(),
                  std::span(out).subspan(static_cast<size_t>(i) * width, width));
  }
  return out;
}

// One sequence's part of the work of an Attn.
struct SequenceRows {
  int seq = 0;    // in the batch
  int first = 0;  // first row within q and out
  int n_q = 0;
  int position = 0;  // of the first row
  int kv_len = 0;
};

// The sequences of attn.rows that have rows and context. Their rows are not those of padding.
std::vector<SequenceRows> sequences_of(const Attn& attn, const View& q, const View& out) {
  const Rows& rows = attn.rows;
  CACHALOT_CHECK(q.n_rows() == rows.n_rows && out.n_rows() == rows.n_rows, "{} and {} rows of {}", q.n_rows(), out.n_rows(), rows.n_rows);
  const auto q_start = ints(attn.batch->q_start), kv_len = ints(attn.batch->kv_len);
  std::vector<SequenceRows> found;
  for (int s = rows.seq_begin; s < rows.seq_begin + rows.n_seqs; ++s) {
    const auto i = static_cast<size_t>(s);
    if (kv_len[i] <= 0) continue;
    const int n_q = q_start[i + 1] - q_start[i], first = q_start[i] - rows.row_begin;
    CACHALOT_CHECK(first >= 0 && n_q >= 0 && first + n_q <= rows.n_rows && n_q <= kv_len[i], "sequence {}: {} rows from {} on {} tokens", s,
                   n_q, q_start[i], kv_len[i]);
    found.push_back({s, first, n_q, kv_len[i] - n_q, kv_len[i]});
  }
  return found;
}

void clear(const View& view) {
  for (int r = 0; r < view.n_rows(); ++r) std::fill_n(row_of(view, r), view.n_cols(), 0.0f);
}

// Turns scores into weights that sum to 1; returns the log of the sum of exponentials.
double softmax(std::vector<double>& scores) {
  double largest = -std::numeric_limits<double>::infinity(), sum = 0.0;
  for (const double s : scores) largest = std::max(largest, s);
  for (double& s : scores) sum += s = std::exp(s - largest);
  for (double& s : scores) s /= sum;
  return largest + std::log(sum);
}

double dot_double(const float* a, const double* b, int n) {
  double sum = 0.0;
  for (int i = 0; i < n; ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

}  // namespace

void RefOps::rope(View qk, View pos, const Rope& rope) {
  const auto positions = ints(pos);
  const int heads = qk.n_dims == 3 ? qk.shape[1] : 1, width = qk.n_dims == 3 ? qk.shape[2] : qk.shape[1], half = rope.dim / 2;
  CACHALOT_CHECK(rope.dim % 2 == 0 && rope.dim <= width && rope.cos_sin.n_cols() == rope.dim, "rope of {} on heads of {}", rope.dim, width);
  CACHALOT_CHECK(qk.n_rows() == static_cast<int>(positions.size()));
  for (int t = 0; t < qk.n_rows(); ++t) {
    const int position = positions[static_cast<size_t>(t)];
    if (position < 0) continue;
    CACHALOT_CHECK(position < rope.cos_sin.n_rows(), "position {} of {}", position, rope.cos_sin.n_rows());
    const float *cosine = row_of(rope.cos_sin, position), *sine = cosine + half;
    for (int h = 0; h < heads; ++h) {
      float* x = qk.row<float>(t) + (heads == 1 ? 0 : h * qk.stride[1]) + (width - rope.dim);
      for (int i = 0; i < half; ++i) {
        float &a = x[rope.interleaved ? 2 * i : i], &b = x[rope.interleaved ? 2 * i + 1 : i + half];
        const double re = a, im = b, c = cosine[i], s = sine[i];
        a = static_cast<float>(re * c - im * s);
        b = static_cast<float>(re * s + im * c);
      }
    }
  }
}

void RefOps::kv_write(const KvLayer& kv, const Batch& batch, View k, View v) {
  const auto slots = ints(batch.slots);
  const KvLayout& layout = kv.layout;
  CACHALOT_CHECK(k.n_cols() == layout.heads * layout.k_dim && k.n_rows() <= static_cast<int>(slots.size()));
  CACHALOT_CHECK(layout.v_is_k_prefix == !v && (layout.v_is_k_prefix || v.n_cols() == layout.heads * layout.v_dim));
  const auto write = [&](const KvLayout& form, void* pages, const View& rows) {
    for (int t = 0; t < rows.n_rows(); ++t) {
      if (slots[static_cast<size_t>(t)] < 0) continue;
      encode_kv_row(form, {row_of(rows, t), static_cast<size_t>(rows.n_cols())},
                    static_cast<std::byte*>(pages) + static_cast<size_t>(slots[static_cast<size_t>(t)]) * form.k_row_bytes());
    }
  };
  write(layout, kv.k, k);
  if (!layout.v_is_k_prefix) write(v_layout_of(layout), kv.v, v);
}

void RefOps::kv_gather(const Attn& attn, int seq, int begin, int n, View out) {
  const int width = attn.kv.layout.heads * attn.kv.layout.k_dim;
  CACHALOT_CHECK(out.n_rows() == n && out.n_cols() == width);
  const auto rows = read_pages(*attn.batch, attn.kv.layout, attn.kv.k, seq, begin, n);
  for (int i = 0; i < n; ++i) std::copy_n(rows.data() + static_cast<size_t>(i) * static_cast<size_t>(width), width, row_of(out, i));
}

void RefOps::attend(const Attn& attn, View q, View out) {
  const KvLayout& layout = attn.kv.layout;
  const int heads = q.n_cols() / layout.k_dim, share = heads / layout.heads;
  const int k_width = layout.heads * layout.k_dim, v_width = layout.v_is_k_prefix ? k_width : layout.heads * layout.v_dim;
  const int v_step = layout.v_is_k_prefix ? layout.k_dim : layout.v_dim;  // from one KV head's values to the next
  CACHALOT_CHECK(q.n_cols() == heads * layout.k_dim && heads == share * layout.heads && out.n_cols() == heads * layout.v_dim,
                 "{} query columns, {} output columns, {} KV heads of {} and {}", q.n_cols(), out.n_cols(), layout.heads, layout.k_dim,
                 layout.v_dim);
  clear(out);
  for (const SequenceRows& s : sequences_of(attn, q, out)) {
    const auto k = read_pages(*attn.batch, layout, attn.kv.k, s.seq, 0, s.kv_len);
    const auto v = layout.v_is_k_prefix ? k : read_pages(*attn.batch, v_layout_of(layout), attn.kv.v, s.seq, 0, s.kv_len);
    for (int i = 0; i < s.n_q; ++i) {
      for (int h = 0; h < heads; ++h) {
        std::vector<double> weights(static_cast<size_t>(s.position + i) + 1);
        const float* query = row_of(q, s.first + i) + h * layout.k_dim;
        for (size_t c = 0; c < weights.size(); ++c)
          weights[c] = dot(query, &k[c * static_cast<size_t>(k_width) + static_cast<size_t>(h / share * layout.k_dim)], layout.k_dim) *
                       static_cast<double>(attn.scale);
        softmax(weights);
        std::vector<double> sum(static_cast<size_t>(layout.v_dim));
        for (size_t c = 0; c < weights.size(); ++c) {
          const float* value = &v[c * static_cast<size_t>(v_width) + static_cast<size_t>(h / share * v_step)];
          for (size_t d = 0; d < sum.size(); ++d) sum[d] += weights[c] * static_cast<double>(value[d]);
        }
        float* to = row_of(out, s.first + i) + h * layout.v_dim;
        for (size_t d = 0; d < sum.size(); ++d) to[d] = static_cast<float>(sum[d]);
      }
    }
  }
}

void RefOps::attend_expanded(const Attn& attn, const MlaDims& dims, View q, const Linear& kv_b, View out) {
  const RefPacked& w = packed_of(kv_b);
  const int d_q = dims.nope + dims.rope_dim, d_kv = dims.nope + dims.v_dim, row = dims.kv_rank + dims.rope_dim;
  CACHALOT_CHECK(q.n_cols() == dims.n_heads * d_q && out.n_cols() == dims.n_heads * dims.v_dim);
  CACHALOT_CHECK(kv_b.out == dims.n_heads * d_kv && kv_b.in == dims.kv_rank && attn.kv.layout.heads == 1 && attn.kv.layout.k_dim == row);
  clear(out);
  for (const SequenceRows& s : sequences_of(attn, q, out)) {
    const auto latent = read_pages(*attn.batch, attn.kv.layout, attn.kv.k, s.seq, 0, s.kv_len);
    std::vector<double> kv(static_cast<size_t>(s.kv_len) * static_cast<size_t>(kv_b.out));  // [kv_len, H, nope + v_dim]
    for (int c = 0; c < s.kv_len; ++c)
      for (int r = 0; r < kv_b.out; ++r)
        kv[static_cast<size_t>(c) * static_cast<size_t>(kv_b.out) + static_cast<size_t>(r)] =
            dot(w.row(kv_b.first, r), &latent[static_cast<size_t>(c) * static_cast<size_t>(row)], dims.kv_rank);
    for (int i = 0; i < s.n_q; ++i) {
      for (int h = 0; h < dims.n_heads; ++h) {
        std::vector<double> weights(static_cast<size_t>(s.position + i) + 1), sum(static_cast<size_t>(dims.v_dim));
        const float* query = row_of(q, s.first + i) + h * d_q;
        const double* head = kv.data() + h * d_kv;
        for (size_t c = 0; c < weights.size(); ++c) {
          const float* rope_key = &latent[c * static_cast<size_t>(row) + static_cast<size_t>(dims.kv_rank)];
          weights[c] =
              (dot_double(query, head + c * static_cast<size_t>(kv_b.out), dims.nope) + dot(query + dims.nope, rope_key, dims.rope_dim)) *
              static_cast<double>(attn.scale);
        }
        softmax(weights);
        for (size_t c = 0; c < weights.size(); ++c)
          for (size_t d = 0; d < sum.size(); ++d)
            sum[d] += weights[c] * head[c * static_cast<size_t>(kv_b.out) + static_cast<size_t>(dims.nope) + d];
        float* to = row_of(out, s.first + i) + h * dims.v_dim;
        for (size_t d = 0; d < sum.size(); ++d) to[d] = static_cast<float>(sum[d]);
      }
    }
  }
}

void RefOps::attend_ragged(const RaggedChunk& chunk, View q, View latent, View kv, View out, View lse) {
  const MlaDims& dims = chunk.dims;
  const int d_q = dims.nope + dims.rope_dim, d_kv = dims.nope + dims.v_dim;
  CACHALOT_CHECK(latent.n_rows() == kv.n_rows() && q.n_rows() == out.n_rows() && q.n_rows() == lse.n_rows());
  CACHALOT_CHECK(q.n_cols() == dims.n_heads * d_q && kv.n_cols() == dims.n_heads * d_kv &&
                 latent.n_cols() == dims.kv_rank + dims.rope_dim && out.n_cols() == dims.n_heads * dims.v_dim &&
                 lse.n_cols() == dims.n_heads);
  for (int i = 0; i < q.n_rows(); ++i) {
    const int seen = std::min(kv.n_rows(), chunk.q_position + i - chunk.kv_position + 1);
    if (seen <= 0) continue;
    for (int h = 0; h < dims.n_heads; ++h) {
      std::vector<double> weights(static_cast<size_t>(seen)), sum(static_cast<size_t>(dims.v_dim));
      const float* query = row_of(q, i) + h * d_q;
      for (int c = 0; c < seen; ++c)
        weights[static_cast<size_t>(c)] =
            (dot(query, row_of(kv, c) + h * d_kv, dims.nope) + dot(query + dims.nope, row_of(latent, c) + dims.kv_rank, dims.rope_dim)) *
            static_cast<double>(chunk.scale);
      const double here = softmax(weights), before = row_of(lse, i)[h];
      for (int c = 0; c < seen; ++c)
        for (int d = 0; d < dims.v_dim; ++d)
          sum[static_cast<size_t>(d)] += weights[static_cast<size_t>(c)] * static_cast<double>(row_of(kv, c)[h * d_kv + dims.nope + d]);
      const double largest = std::max(here, before), total = largest + std::log(std::exp(here - largest) + std::exp(before - largest));
      const double keep = std::exp(before - total), add = std::exp(here - total);
      float* to = row_of(out, i) + h * dims.v_dim;
      for (int d = 0; d < dims.v_dim; ++d)
        to[d] = static_cast<float>((keep == 0.0 ? 0.0 : keep * static_cast<double>(to[d])) + add * sum[static_cast<size_t>(d)]);
      row_of(lse, i)[h] = static_cast<float>(total);
    }
  }
}

}  // namespace cachalot
