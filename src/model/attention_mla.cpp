// Multi-head latent attention, in the two forms that give the same result. P = nope, S = rope_dim, V = v_dim, R = kv_rank, H heads.
//
// The cache holds one row of R + S numbers per token: c = rmsnorm(latent), and the rotated key k_r that all heads share.
//   Expanded: k_h = [W_UK,h c | k_r], v_h = W_UV,h c; ordinary attention with heads of P + S and V. Costs 2(P + S + V) per head and
//             (query, context) pair, plus 2R(P + V) per head to rebuild K and V of every context token.
//   Absorbed: q_h = [W_UK,h^T q_n | q_r] against the cached rows themselves (keys of R + S, values of R, one KV head), then W_UV,h on
//             the result. Costs 2(2R + S) per pair and rebuilds nothing.
// So few query rows over a long context want the absorbed form, many want the expanded one; Batch says which rows are which.
#include "model/decoder.h"

namespace cachalot {

void attention(const Step& step, const MlaWeights& w, const KvLayer& kv, View x, View y) {
  auto& [o, c, b, rope] = step;
  const Scope scope(o);
  const int H = c.n_heads, T = b.n_tokens, R = c.kv_rank, S = rope.dim, d_q = c.nope + S;
  const int n_q = w.q_b ? c.q_rank : H * d_q;
  const View a = o.temp(x.dtype, T, n_q + R + S);  // [T, q | latent | k_rope]
  o.linear(x, w.qkv_a, a);
  const View row = a.cols(n_q, R + S);  // latent, and the rope key
  View q = a.cols(0, n_q);
  if (w.q_b) {
    o.rmsnorm(q, w.q_a_norm.view, c.rms_eps, q);
    const View full = o.temp(x.dtype, T, H * d_q);
    o.linear(q, w.q_b, full);
    q = full;
  }
  const MlaPrologue prologue{
      .kv = kv, .batch = &b, .dims = c.mla_dims(), .q = q, .row = row, .norm = w.kv_a_norm.view, .eps = c.rms_eps, .rope = rope};

  const View context = o.temp(x.dtype, T, H * c.v_dim);
  if (const Rows& rows = b.decode; rows.n_rows > 0)
    o.mla_absorbed({prologue, rows, c.softmax_scale, &w.uk_t, &w.uv}, context.rows(rows.row_begin, rows.n_rows));
  else
    o.mla_prologue(prologue);
  if (const Rows& rows = b.prefill; rows.n_rows > 0)
    o.attend_expanded({kv, &b, rows, c.softmax_scale}, c.mla_dims(), q.rows(rows.row_begin, rows.n_rows), w.kv_b,
                      context.rows(rows.row_begin, rows.n_rows));
  attention_output(step, context, w.o, y);
}

}  // namespace cachalot
