// CudaOps: attention over the paged cache.
#include "base/check.h"
#include "cuda/cuda_ops_impl.h"
#include "cuda/mla_few.h"

namespace cachalot::cuda {
namespace {

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
                 p.rope.dim == d.rope_dim && p.rope.dim <= 2 * kPrologueThreads && p.norm.n_cols() == d.kv_rank &&
                 p.kv.layout.v_is_k_prefix && p.kv.layout.k_dim == p.row.n_cols() && p.q.dtype == p.row.dtype);
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

void CudaOps::gqa_prologue(const GqaPrologue& p) {
  const KvLayout& l = p.kv.layout;
  if (l.v_is_k_prefix || l.k_dim != l.v_dim || l.k_dim > kMostGqaDim || l.format == KvFormat::fp8) return Ops::gqa_prologue(p);
  CACHALOT_CHECK(p.q.n_cols() % l.k_dim == 0 && p.k.n_cols() == l.heads * l.k_dim && p.v.n_cols() == l.heads * l.v_dim &&
                 p.rope.dim % 2 == 0 && p.rope.dim <= l.k_dim && p.q.dtype == p.k.dtype && p.q.dtype == p.v.dtype);
  if (p.q.n_rows() == 0) return;
  const GqaPrologueArgs args{.q = mat_of(p.q),
                             .k = mat_of(p.k),
                             .v = mat_of(p.v),
                             .heads = p.q.n_cols() / l.k_dim,
                             .kv_heads = l.heads,
                             .dim = l.k_dim,
                             .rope_dim = p.rope.dim,
                             .q_norm = static_cast<const float*>(p.q_norm.data),
                             .k_norm = static_cast<const float*>(p.k_norm.data),
                             .eps = p.eps,
                             .cos_sin = static_cast<const float*>(p.rope.cos_sin.data),
                             .cos_sin_stride = p.rope.cos_sin.stride[0],
                             .interleaved = p.rope.interleaved,
                             .positions = static_cast<const int*>(p.batch->positions.data),
                             .slots = static_cast<const int*>(p.batch->slots.data),
                             .k_pages = p.kv.k,
                             .v_pages = p.kv.v,
                             .format = l.format};
  done(launch_gqa_prologue(args, stream_), "gqa_prologue");
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
  args.attend.part_keys = mla_part_keys(p.batch->max_kv, args.attend.n_splits);
  args.attend.half_parts = kernel == MlaKernel::heads16 && n > 1;
  args.attend.q_as_operands = kernel == MlaKernel::heads16 && d.n_heads % kOperandHeads == 0;
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
  attend_rows(args, attn.batch->max_kv);
}

// Each row by itself, its context in parts where few rows would leave multiprocessors idle.
void CudaOps::attend_rows(AttendArgs args, int max_kv) {
  const MlaKernel kernel = mla_decode_kernel_for(args, hopper_);
  const bool gqa = kernel == MlaKernel::none && gqa_decode_supports(args);
  if (kernel == MlaKernel::none && !gqa) return done(launch_attend_generic(args, stream_), "attend");
  const size_t mark = temp_mark();
  args.n_splits = gqa ? gqa_decode_splits(args, max_kv) : mla_decode_splits(kernel, args.n_rows, args.heads, max_kv);
  args.part_keys = mla_part_keys(max_kv, args.n_splits);
  if (args.n_splits > 1)
    args.partial = static_cast<float*>(temp(DType::f32, args.n_splits * args.n_rows, args.heads * (args.layout.v_dim + 1)).data);
  done(gqa ? launch_gqa_decode(args, stream_) : launch_mla_decode(args, kernel, stream_), "attend");
  temp_release(mark);
}

}  // namespace cachalot::cuda
