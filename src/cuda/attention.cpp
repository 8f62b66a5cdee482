// CudaOps: attention over the paged cache, and the expanded form of MLA by chunks of context.
#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "cuda/cuda_ops_impl.h"
#include "cuda/mla_few.h"

namespace cachalot::cuda {
namespace {

// Context rows that are expanded at a time: 8192 x 16 heads x 256 numbers in bf16 are 64 MiB.
constexpr int kContextChunk = 8192;
constexpr int kFlashRows = 16;  // query rows of a sequence from which the tiled kernel pays

AttendArgs attend_args(const Attn& attn, View q, View out) {
  const Batch& b = *attn.batch;
  AttendArgs a;
  a.layout = attn.kv.layout;
  a.k = attn.kv.k;
  a.v = attn.kv.v;
  a.q_start = static_cast<const int*>(b.q_start.data);
  a.kv_len = static_cast<const int*>(b.kv_len.data);
  a.block_table = static_cast<const int*>(b.block_table.data);
  a.table_stride = b.block_table.stride[0];
  a.seq_begin = attn.rows.seq_begin;
  a.n_seqs = attn.rows.n_seqs;
  a.row_begin = attn.rows.row_begin;
  a.n_rows = attn.rows.n_rows;
  a.heads = q.n_cols() / attn.kv.layout.k_dim;
  a.scale = attn.scale;
  a.q = mat_of(q);
  a.out = mat_of(out);
  return a;
}

PrologueArgs prologue_args(const MlaPrologue& p) {
  const MlaDims& d = p.dims;
  CACHALOT_CHECK(p.q.n_cols() == d.n_heads * (d.nope + d.rope_dim) && p.row.n_cols() == d.kv_rank + d.rope_dim &&
                 p.rope.dim == d.rope_dim && p.norm.n_cols() == d.kv_rank && p.kv.layout.v_is_k_prefix &&
                 p.kv.layout.k_dim == p.row.n_cols() && p.q.dtype == p.row.dtype);
  PrologueArgs a;
  a.q = mat_of(p.q);
  a.row = mat_of(p.row);
  a.heads = d.n_heads;
  a.head_dim = d.nope + d.rope_dim;
  a.rank = d.kv_rank;
  a.rope_dim = d.rope_dim;
  a.norm = static_cast<const float*>(p.norm.data);
  a.eps = p.eps;
  a.cos_sin = static_cast<const float*>(p.rope.cos_sin.data);
  a.cos_sin_stride = p.rope.cos_sin.stride[0];
  a.interleaved = p.rope.interleaved;
  a.positions = static_cast<const int*>(p.batch->positions.data);
  a.slots = static_cast<const int*>(p.batch->slots.data);
  a.pages = p.kv.k;
  a.format = p.kv.layout.format;
  return a;
}

}  // namespace

void CudaOps::mla_prologue(const MlaPrologue& p) {
  if (p.q.n_rows() > 0) done(launch_mla_prologue(prologue_args(p), stream_), "mla_prologue");
}

void CudaOps::mla_absorbed(const MlaAbsorbed& a, View context) {
  if (!mla_few(a, context)) Ops::mla_absorbed(a, context);
}

// Few rows in three launches, when they are all the rows.
bool CudaOps::mla_few(const MlaAbsorbed& a, View context) {
  const MlaPrologue& p = a.prologue;
  const MlaDims& d = p.dims;
  const int n = a.rows.n_rows;
  if (!hopper_ || n == 0 || n > kMlaFewRows || n != p.q.n_rows()) return false;
  const auto plain = [&](const Linear& w, int out, int in) -> const uint8_t* {
    const CudaPacked& packed = packed_of(w);
    const Segment& s = packed.segments[0];
    const bool fits = packed.segments.size() == 1 && !packed.bias && w.first == 0 && w.n_matrices == d.n_heads && s.tile == Tile::bf16 &&
                      s.out == out && s.in == in && s.cols == in;
    return fits ? s.data : nullptr;
  };
  MlaFewArgs args;
  args.uk = plain(*a.uk, kMlaValues, kMlaFewHead);
  args.uv = plain(*a.uv, kMlaFewHead, kMlaValues);
  if (args.uk == nullptr || args.uv == nullptr || d.kv_rank != kMlaValues || d.nope != kMlaFewHead || d.v_dim != kMlaFewHead) return false;
  const size_t mark = temp_mark();
  const View absorbed = temp(DType::bf16, n, d.n_heads * (d.kv_rank + d.rope_dim));
  args.prologue = prologue_args(p);
  args.attend = attend_args({p.kv, p.batch, a.rows, a.scale}, absorbed, absorbed);
  args.context = mat_of(context);
  const MlaKernel kernel = mla_decode_kernel_for(args.attend, hopper_);
  args.attend.n_splits = kernel == MlaKernel::none ? 1 : mla_decode_splits(kernel, n, d.n_heads, p.batch->max_kv);
  const bool can = mla_few_supports(args);
  if (can) {
    args.attend.partial = static_cast<float*>(temp(DType::f32, args.attend.n_splits * n, d.n_heads * (d.kv_rank + 1)).data);
    done(launch_mla_few(args, kernel, stream_), "mla_absorbed");
  }
  temp_release(mark);
  return can;
}

void CudaOps::attend(const Attn& attn, View q, View out) {
  const KvLayout& l = attn.kv.layout;
  AttendArgs args = attend_args(attn, q, out);
  CACHALOT_CHECK(q.n_rows() == args.n_rows && out.n_rows() == args.n_rows && q.n_cols() == args.heads * l.k_dim &&
                 args.heads % l.heads == 0 && out.n_cols() == args.heads * l.v_dim);
  if (args.n_rows == 0) return;
  if (attend_flash(attn, args, q, out)) return;
  const MlaKernel kernel = mla_decode_kernel_for(args, hopper_);
  if (kernel == MlaKernel::none) return done(launch_attend_generic(args, stream_), "attend");
  const size_t mark = temp_mark();
  args.n_splits = mla_decode_splits(kernel, args.n_rows, args.heads, attn.batch->max_kv);
  if (args.n_splits > 1) args.partial = static_cast<float*>(temp(DType::f32, args.n_splits * args.n_rows, args.heads * (l.v_dim + 1)).data);
  done(launch_mla_decode(args, kernel, stream_), "attend");
  temp_release(mark);
}

// Prompts of models with separate values: each sequence's pages are laid out in a row, then tiled attention. Sequences with few rows, and
// captured steps, whose plan must not depend on lengths, take the generic kernel.
bool CudaOps::attend_flash(const Attn& attn, const AttendArgs& args, View q, View out) {
  const KvLayout& l = attn.kv.layout;
  const Batch& b = *attn.batch;
  FlashArgs flash{.heads = args.heads,
                  .share = args.heads / l.heads,
                  .k_dim = l.k_dim,
                  .v_dim = l.v_dim,
                  .scale = attn.scale,
                  .q = mat_of(q),
                  .k = q.data,
                  .v = q.data,
                  .k_stride = l.heads * l.k_dim,
                  .v_stride = l.heads * l.v_dim,
                  .k_head = l.k_dim,
                  .v_head = l.v_dim};
  if (capturing_ || l.v_is_k_prefix || b.max_q < kFlashRows || b.host_kv_len.empty() || b.host_q_start.empty() || !flash_supports(flash))
    return false;
  for (int s = args.seq_begin; s < args.seq_begin + args.n_seqs; ++s) {
    const auto at = static_cast<size_t>(s);
    const int kv_len = b.host_kv_len[at], begin = b.host_q_start[at] - args.row_begin,
              n_q = b.host_q_start[at + 1] - args.row_begin - begin;
    if (n_q <= 0) continue;
    const View rows = out.rows(begin, n_q), queries = q.rows(begin, n_q);
    if (n_q < kFlashRows || kv_len <= 0) {
      AttendArgs some = args;
      some.row_begin += begin;
      some.n_rows = n_q;
      some.q = mat_of(queries);
      some.out = mat_of(rows);
      done(launch_attend_generic(some, stream_), "attend");
      continue;
    }
    const size_t mark = temp_mark();
    const View k = temp(DType::bf16, kv_len, l.heads * l.k_dim), v = temp(DType::bf16, kv_len, l.heads * l.v_dim);
    const int* table = b.block_table.row<const int>(s);
    done(launch_kv_gather(attn.kv.k, l, table, 0, mat_of(k), stream_), "attend");
    done(launch_kv_gather(attn.kv.v, l, table, 0, mat_of(v), stream_), "attend");
    flash.q = mat_of(queries);
    flash.out = mat_of(rows);
    flash.k = k.data;
    flash.v = v.data;
    flash.n_keys = kv_len;
    flash.q_position = kv_len - n_q;
    done(launch_flash(flash, stream_), "attend");
    temp_release(mark);
  }
  return true;
}

void CudaOps::kv_gather(const Attn& attn, int seq, int begin, int n, View out) {
  const KvLayout& l = attn.kv.layout;
  CACHALOT_CHECK(out.n_rows() == n && out.n_cols() == l.heads * l.k_dim);
  if (n == 0) return;
  const View& table = attn.batch->block_table;
  done(launch_kv_gather(attn.kv.k, l, table.row<const int>(seq), begin, mat_of(out), stream_), "kv_gather");
}

void CudaOps::attend_ragged(const RaggedChunk& chunk, View q, View latent, View kv, View out, View lse) {
  const MlaDims& d = chunk.dims;
  CACHALOT_CHECK(q.n_cols() == d.n_heads * (d.nope + d.rope_dim) && kv.n_cols() == d.n_heads * (d.nope + d.v_dim) &&
                 latent.n_cols() == d.kv_rank + d.rope_dim && out.n_cols() == d.n_heads * d.v_dim && latent.n_rows() == kv.n_rows());
  CACHALOT_CHECK(!lse || (lse.n_cols() == d.n_heads && lse.stride[0] == d.n_heads));
  if (q.n_rows() == 0 || kv.n_rows() == 0) return;
  const auto element = static_cast<int64_t>(size_of(kv.dtype));
  FlashArgs flash{.heads = d.n_heads,
                  .share = 1,
                  .k_dim = d.nope,
                  .rope = d.rope_dim,
                  .v_dim = d.v_dim,
                  .scale = chunk.scale,
                  .q_position = chunk.q_position,
                  .kv_position = chunk.kv_position,
                  .n_keys = kv.n_rows(),
                  .q = mat_of(q),
                  .k = kv.data,
                  .k_rope = static_cast<std::byte*>(latent.data) + d.kv_rank * element,
                  .v = static_cast<std::byte*>(kv.data) + d.nope * element,
                  .k_stride = kv.stride[0],
                  .k_rope_stride = latent.stride[0],
                  .v_stride = kv.stride[0],
                  .k_head = d.nope + d.v_dim,
                  .v_head = d.nope + d.v_dim,
                  .out = mat_of(out),
                  .lse = static_cast<float*>(lse.data)};
  if (q.n_rows() >= kFlashRows && kv.dtype == DType::bf16 && flash_supports(flash))
    return done(launch_flash(flash, stream_), "attend_ragged");
  const RaggedArgs args{.heads = d.n_heads,
                        .nope = d.nope,
                        .rope = d.rope_dim,
                        .v_dim = d.v_dim,
                        .scale = chunk.scale,
                        .q_position = chunk.q_position,
                        .kv_position = chunk.kv_position,
                        .q = mat_of(q),
                        .latent = mat_of(latent),
                        .kv = mat_of(kv),
                        .latent_rope_at = d.kv_rank,
                        .out = mat_of(out),
                        .lse = static_cast<float*>(lse.data)};
  done(launch_attend_ragged(args, stream_), "attend_ragged");
}

void CudaOps::attend_expanded(const Attn& attn, const MlaDims& d, View q, const Linear& kv_b, View out) {
  const Batch& batch = *attn.batch;
  CACHALOT_CHECK(q.n_rows() == attn.rows.n_rows && out.n_rows() == attn.rows.n_rows && kv_b.out == d.n_heads * (d.nope + d.v_dim));
  const auto clear = [&](const View& v) {
    if (v.n_rows() == 0) return;
    check_cuda(cudaMemset2DAsync(v.data, static_cast<size_t>(v.stride[0]) * size_of(v.dtype), 0, v.row_bytes(),
                                 static_cast<size_t>(v.n_rows()), stream_),
               "attend_expanded");
  };
  const size_t mark = temp_mark();
  for (int s = attn.rows.seq_begin; s < attn.rows.seq_begin + attn.rows.n_seqs; ++s) {
    const auto at = static_cast<size_t>(s);
    const int kv_len = batch.host_kv_len[at], begin = batch.host_q_start[at] - attn.rows.row_begin;
    const int n_q = batch.host_q_start[at + 1] - attn.rows.row_begin - begin;
    if (n_q <= 0) continue;
    const View rows = out.rows(begin, n_q);
    if (kv_len <= 0) {
      clear(rows);
      continue;
    }
    const size_t sequence_mark = temp_mark();
    const bool whole = kv_len <= kContextChunk;
    View sum = rows, lse;
    if (!whole) {
      if (out.dtype != DType::f32) sum = temp(DType::f32, n_q, out.n_cols());
      lse = temp(DType::f32, n_q, d.n_heads);
      clear(sum);
      done(launch_fill(static_cast<float*>(lse.data), -INFINITY, static_cast<int64_t>(n_q) * d.n_heads, stream_), "attend_expanded");
    }
    for (int context = 0; context < kv_len; context += kContextChunk) {
      const size_t chunk_mark = temp_mark();
      const int n = std::min(kContextChunk, kv_len - context);
      const View latent = temp(activation(), n, d.kv_rank + d.rope_dim), kv = temp(activation(), n, kv_b.out);
      kv_gather(attn, s, context, n, latent);
      linear(latent.cols(0, d.kv_rank), kv_b, kv, 0.0f);
      attend_ragged({.dims = d, .scale = attn.scale, .q_position = kv_len - n_q, .kv_position = context}, q.rows(begin, n_q), latent, kv,
                    sum, lse);
      temp_release(chunk_mark);
    }
    if (sum.data != rows.data) done(launch_gather_rows(mat_of(sum), nullptr, mat_of(rows), stream_), "attend_expanded");
    temp_release(sequence_mark);
  }
  temp_release(mark);
}

}  // namespace cachalot::cuda
