// Grouped-query attention: one fused projection, optional norms per head, rope, paged attention.
#include "model/decoder.h"

namespace cachalot {

void attention(const Step& step, const GqaWeights& w, const KvLayer& kv, View x, View y) {
  auto& [o, c, b, rope] = step;
  const Scope scope(o);
  const int T = b.n_tokens, n_q = c.n_heads * c.head_dim, n_kv = c.n_kv_heads * c.head_dim;
  const View qkv = o.temp(x.dtype, T, n_q + 2 * n_kv);  // [T, q | k | v]
  o.linear(x, w.qkv, qkv);
  const View q = qkv.cols(0, n_q), k = qkv.cols(n_q, n_kv), v = qkv.cols(n_q + n_kv, n_kv);
  o.gqa_prologue(
      {.kv = kv, .batch = &b, .q = q, .k = k, .v = v, .q_norm = w.q_norm.view, .k_norm = w.k_norm.view, .eps = c.rms_eps, .rope = rope});
  const View context = o.temp(x.dtype, T, n_q);
  for (const Rows& rows : {b.decode, b.prefill})
    if (rows.n_rows > 0)
      o.attend({kv, &b, rows, c.softmax_scale}, q.rows(rows.row_begin, rows.n_rows), context.rows(rows.row_begin, rows.n_rows));
  attention_output(step, context, w.o, y);
}

}  // namespace cachalot
