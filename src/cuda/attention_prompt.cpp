// CudaOps: attention of prompts, whose context is laid out in rows first: keys and values of GQA as they are, latent rows of MLA expanded.
// Sequences are taken together as long as their contexts fit, a longer one alone, by chunks of its context.
#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "cuda/cuda_ops_impl.h"

namespace cachalot::cuda {
namespace {

// Context rows that are laid out at a time: 8192 x 16 heads x 256 numbers in bf16 are 64 MiB.
constexpr int kContextChunk = 8192;
constexpr int kFlashRows = 16;  // query rows of a sequence from which the tiled kernels pay for GQA

int padded(int n_keys) { return (n_keys + kFlashKeys - 1) / kFlashKeys * kFlashKeys; }

// What one sequence of a batch is to a launch; its rows of context come behind the others'.
ContextRun run_of(const Batch& batch, const Rows& rows, int seq) {
  const auto at = static_cast<size_t>(seq);
  ContextRun run;
  run.seq = seq;
  run.q_begin = batch.host_q_start[at] - rows.row_begin;
  run.n_q = batch.host_q_start[at + 1] - batch.host_q_start[at];
  run.n_keys = batch.host_kv_len[at];
  run.q_position = run.n_keys - run.n_q;
  return run;
}

// Runs that are laid out together.
struct Group {
  ContextRuns runs;
  int n_rows = 0;
  [[nodiscard]] bool fits(const ContextRun& run) const { return runs.n < kContextRuns && n_rows + padded(run.n_keys) <= kContextChunk; }
  void add(ContextRun run) {
    run.kv_begin = n_rows;
    n_rows += padded(run.n_keys);
    runs.run[runs.n++] = run;
  }
  // What to take memory for: of several sequences as much as any may need, so that one rehearsed step shows it.
  [[nodiscard]] int most_rows() const { return runs.n > 1 ? std::max(n_rows, kContextChunk) : n_rows; }
};

}  // namespace

void CudaOps::launch_flash_any(const FlashArgs& args, const char* op) {
  done(hopper_ && flash_wgmma_supports(args) ? launch_flash_wgmma(args, n_multiprocessors_, stream_) : launch_flash(args, stream_), op);
}

// Prompts of models with separate values. Sequences with few rows, and captured steps, whose plan must not depend on lengths, take the
// kernels of single rows.
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
                  .v_head = l.v_dim,
                  .out = mat_of(out)};
  if (capturing_ || l.v_is_k_prefix || b.max_q < kFlashRows || b.host_kv_len.empty() || b.host_q_start.empty() || !flash_supports(flash))
    return false;
  Group group;
  const auto finish = [&] {
    if (group.runs.n == 0) return;
    const size_t mark = temp_mark();
    const View k = temp(DType::bf16, group.most_rows(), l.heads * l.k_dim).rows(0, group.n_rows),
               v = temp(DType::bf16, group.most_rows(), l.heads * l.v_dim).rows(0, group.n_rows);
    done(launch_kv_gather(attn.kv.k, l, args.block_table, args.table_stride, group.runs, mat_of(k), stream_), "attend");
    done(launch_kv_gather(attn.kv.v, l, args.block_table, args.table_stride, group.runs, mat_of(v), stream_), "attend");
    flash.k = k.data;
    flash.v = v.data;
    flash.n_kv_rows = group.n_rows;
    flash.runs = group.runs;
    launch_flash_any(flash, "attend");
    temp_release(mark);
    group = {};
  };
  // Sequences with few rows that follow each other go together.
  int few_begin = 0, few_end = 0, few_kv = 0;
  const auto finish_few = [&] {
    if (few_begin == few_end) return;
    AttendArgs some = args;
    some.row_begin += few_begin;
    some.n_rows = few_end - few_begin;
    some.q = mat_of(q.rows(few_begin, some.n_rows));
    some.out = mat_of(out.rows(few_begin, some.n_rows));
    attend_rows(some, few_kv);
    few_begin = few_end = few_kv = 0;
  };
  for (int s = args.seq_begin; s < args.seq_begin + args.n_seqs; ++s) {
    const ContextRun run = run_of(b, attn.rows, s);
    if (run.n_q <= 0) continue;
    if (run.n_q < kFlashRows || run.n_keys <= 0) {
      if (run.q_begin != few_end) finish_few();
      if (few_begin == few_end) few_begin = run.q_begin;
      few_end = run.q_begin + run.n_q;
      few_kv = std::max(few_kv, run.n_keys);
      continue;
    }
    if (!group.fits(run)) finish();
    group.add(run);
  }
  finish_few();
  finish();
  return true;
}

void CudaOps::kv_gather(const Attn& attn, int seq, int begin, int n, View out) {
  const KvLayout& l = attn.kv.layout;
  CACHALOT_CHECK(out.n_rows() == n && out.n_cols() == l.heads * l.k_dim);
  if (n == 0) return;
  ContextRuns runs;
  runs.n = 1;
  runs.run[0] = {.seq = seq, .kv_position = begin, .n_keys = n};
  gather(attn, runs, out, "kv_gather");
}

void CudaOps::gather(const Attn& attn, const ContextRuns& runs, View out, const char* op) {
  const View& table = attn.batch->block_table;
  done(launch_kv_gather(attn.kv.k, attn.kv.layout, static_cast<const int*>(table.data), table.stride[0], runs, mat_of(out), stream_), op);
}

void CudaOps::attend_ragged(const RaggedChunk& chunk, View q, View latent, View kv, View out, View lse) {
  if (q.n_rows() == 0 || kv.n_rows() == 0) return;
  ContextRuns runs;
  runs.n = 1;
  runs.run[0] = {.n_q = q.n_rows(), .q_position = chunk.q_position, .kv_position = chunk.kv_position, .n_keys = kv.n_rows()};
  attend_runs(chunk.dims, chunk.scale, runs, q, latent, kv, out, lse);
}

void CudaOps::attend_runs(const MlaDims& d, float scale, const ContextRuns& runs, View q, View latent, View kv, View out, View lse) {
  CACHALOT_CHECK(q.n_cols() == d.n_heads * (d.nope + d.rope_dim) && kv.n_cols() == d.n_heads * (d.nope + d.v_dim) &&
                 latent.n_cols() == d.kv_rank + d.rope_dim && out.n_cols() == d.n_heads * d.v_dim && latent.n_rows() == kv.n_rows());
  CACHALOT_CHECK(!lse || (lse.n_cols() == d.n_heads && lse.stride[0] == d.n_heads));
  const auto element = static_cast<int64_t>(size_of(kv.dtype));
  const FlashArgs flash{.heads = d.n_heads,
                        .share = 1,
                        .k_dim = d.nope,
                        .rope = d.rope_dim,
                        .v_dim = d.v_dim,
                        .scale = scale,
                        .runs = runs,
                        .q = mat_of(q),
                        .k = kv.data,
                        .k_rope = static_cast<std::byte*>(latent.data) + d.kv_rank * element,
                        .v = static_cast<std::byte*>(kv.data) + d.nope * element,
                        .n_kv_rows = kv.n_rows(),
                        .k_stride = kv.stride[0],
                        .k_rope_stride = latent.stride[0],
                        .v_stride = kv.stride[0],
                        .k_head = d.nope + d.v_dim,
                        .v_head = d.nope + d.v_dim,
                        .out = mat_of(out),
                        .lse = static_cast<float*>(lse.data)};
  if (kv.dtype == DType::bf16 && flash_supports(flash)) return launch_flash_any(flash, "attend_ragged");
  for (int i = 0; i < runs.n; ++i) {
    const ContextRun& run = runs.run[i];
    const RaggedArgs args{.heads = d.n_heads,
                          .nope = d.nope,
                          .rope = d.rope_dim,
                          .v_dim = d.v_dim,
                          .scale = scale,
                          .q_position = run.q_position,
                          .kv_position = run.kv_position,
                          .q = mat_of(q.rows(run.q_begin, run.n_q)),
                          .latent = mat_of(latent.rows(run.kv_begin, run.n_keys)),
                          .kv = mat_of(kv.rows(run.kv_begin, run.n_keys)),
                          .latent_rope_at = d.kv_rank,
                          .out = mat_of(out.rows(run.q_begin, run.n_q)),
                          .lse = lse ? static_cast<float*>(lse.rows(run.q_begin, run.n_q).data) : nullptr};
    done(launch_attend_ragged(args, stream_), "attend_ragged");
  }
}

void CudaOps::attend_expanded(const Attn& attn, const MlaDims& d, View q, const Linear& kv_b, View out) {
  CACHALOT_CHECK(q.n_rows() == attn.rows.n_rows && out.n_rows() == attn.rows.n_rows && kv_b.out == d.n_heads * (d.nope + d.v_dim));
  const auto clear = [&](const View& v) {
    if (v.n_rows() == 0) return;
    check_cuda(cudaMemset2DAsync(v.data, static_cast<size_t>(v.stride[0]) * size_of(v.dtype), 0, v.row_bytes(),
                                 static_cast<size_t>(v.n_rows()), stream_),
               "attend_expanded");
  };
  const auto expand = [&](const Group& group, View sum, View lse) {
    const size_t mark = temp_mark();
    const View latent = temp(activation(), group.most_rows(), d.kv_rank + d.rope_dim).rows(0, group.n_rows),
               kv = temp(activation(), group.most_rows(), kv_b.out).rows(0, group.n_rows);
    gather(attn, group.runs, latent, "attend_expanded");
    linear(latent.cols(0, d.kv_rank), kv_b, kv, 0.0f);
    attend_runs(d, attn.scale, group.runs, q, latent, kv, sum, lse);
    temp_release(mark);
  };
  Group group;
  const auto finish = [&] {
    if (group.runs.n > 0) expand(group, out, {});
    group = {};
  };
  for (int s = attn.rows.seq_begin; s < attn.rows.seq_begin + attn.rows.n_seqs; ++s) {
    const ContextRun whole = run_of(*attn.batch, attn.rows, s);
    if (whole.n_q <= 0) continue;
    const View rows = out.rows(whole.q_begin, whole.n_q);
    if (whole.n_keys <= 0) {
      clear(rows);
      continue;
    }
    if (whole.n_keys <= kContextChunk) {
      if (!group.fits(whole)) finish();
      group.add(whole);
      continue;
    }
    const size_t mark = temp_mark();
    // The parts join those before in f32, in memory that has rows for all queries so that the run's numbers hold.
    const View sum = out.dtype == DType::f32 ? out : temp(DType::f32, out.n_rows(), out.n_cols()),
               lse = temp(DType::f32, out.n_rows(), d.n_heads), my_sum = sum.rows(whole.q_begin, whole.n_q);
    clear(my_sum);
    done(launch_fill(lse.row<float>(whole.q_begin), -INFINITY, static_cast<int64_t>(whole.n_q) * d.n_heads, stream_), "attend_expanded");
    for (int context = 0; context < whole.n_keys; context += kContextChunk) {
      ContextRun part = whole;
      part.kv_position = context;
      part.n_keys = std::min(kContextChunk, whole.n_keys - context);
      Group alone;
      alone.add(part);
      expand(alone, sum, lse);
    }
    if (sum.data != out.data) done(launch_gather_rows(mat_of(my_sum), nullptr, mat_of(rows), stream_), "attend_expanded");
    temp_release(mark);
  }
  finish();
}

}  // namespace cachalot::cuda
