// The feed-forward half of a layer: SwiGLU (Shazeer 2020), dense or as routed experts beside a shared one (DeepSeekMoE).
#include "model/decoder.h"

namespace cachalot {

void ffn(const Step& step, const DenseFfn& w, View x, View y) { step.ops.swiglu_ffn(x, w.gate_up, w.down, y); }

void ffn(const Step& step, const MoeFfn& w, View x, View y) {
  auto& [o, c, b, rope] = step;
  const Scope scope(o);
  const View logits = o.temp(DType::f32, x.n_rows(), c.n_experts);
  const Routing routing{o.temp(DType::i32, x.n_rows(), c.router.top_k), o.temp(DType::f32, x.n_rows(), c.router.top_k)};
  o.linear(x, w.router, logits);
  o.route(logits, w.router_bias.view, c.router, routing);
  o.moe(x, w.experts, routing, y);
}

void add_ffn(const Step& step, const Constant& norm, const FfnWeights& w, const Constant& next_norm, View x, View xn, View y) {
  auto& [o, c, b, rope] = step;
  const auto* moe = std::get_if<MoeFfn>(&w);
  if (moe == nullptr) {
    o.add_rmsnorm(x, y, norm.view, c.rms_eps, xn);
    ffn(step, std::get<DenseFfn>(w), xn, y);
    return o.add_rmsnorm(x, y, next_norm.view, c.rms_eps, xn);
  }
  const Scope scope(o);
  const Routing routing{o.temp(DType::i32, x.n_rows(), c.router.top_k), o.temp(DType::f32, x.n_rows(), c.router.top_k)};
  o.moe_prologue({.residual = x,
                  .delta = y,
                  .norm = norm.view,
                  .eps = c.rms_eps,
                  .y = xn,
                  .router = &moe->router,
                  .bias = moe->router_bias.view,
                  .how = c.router,
                  .out = routing});
  o.moe_add_rmsnorm(xn, moe->experts, routing, {.residual = x, .norm = next_norm.view, .eps = c.rms_eps, .y = xn});
}

}  // namespace cachalot
