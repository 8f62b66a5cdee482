// The feed-forward half of a layer: SwiGLU (Shazeer 2020), dense or as routed experts beside a shared one (DeepSeekMoE).
#include "model/decoder.h"

namespace cachalot {

void ffn(const Step& step, const DenseFfn& w, View x, View y) {
  auto& [o, c, b, rope] = step;
  const Scope scope(o);
  const View h = o.temp(x.dtype, b.n_tokens, w.down.in);
  o.linear_swiglu(x, w.gate_up, h);
  o.linear(h, w.down, y);
}

void ffn(const Step& step, const MoeFfn& w, View x, View y) {
  auto& [o, c, b, rope] = step;
  const Scope scope(o);
  const View logits = o.temp(DType::f32, b.n_tokens, c.n_experts);
  const Routing routing{o.temp(DType::i32, b.n_tokens, c.router.top_k), o.temp(DType::f32, b.n_tokens, c.router.top_k)};
  o.linear(x, w.router, logits);
  o.route(logits, w.router_bias.view, c.router, routing);
  o.moe(x, w.experts, routing, y);
}

}  // namespace cachalot
