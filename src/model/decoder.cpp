// The forward pass of every family, top to bottom.
#include "model/decoder.h"

#include <set>

namespace cachalot {

void Decoder::forward(Ops& o, const Batch& b, KvLayers kv, View logits, View hidden) const {
  const Config& c = config_;
  const int n_layers = static_cast<int>(layers_.size());
  CACHALOT_CHECK(static_cast<int>(kv.size()) >= n_layers, "{} KV layers for {} layers", kv.size(), n_layers);
  const Scope scope(o);
  const Step step{o, c, b, rope_};
  const View x = hidden ? hidden : o.temp(DType::f32, b.n_tokens, c.hidden);                                       // the residual stream
  const View xn = o.temp(o.activation(), b.n_tokens, c.hidden), y = o.temp(o.activation(), b.n_tokens, c.hidden);  // normed input, output
  o.embed(embed_, b.tokens, x);
  o.rmsnorm(x, layers_[0].attn_norm.view, c.rms_eps, xn);
  for (int l = 0; l < n_layers; ++l) {
    const Layer& layer = layers_[static_cast<size_t>(l)];
    std::visit([&](const auto& w) { attention(step, w, kv[static_cast<size_t>(l)], xn, y); }, layer.attn);
    add_ffn(step, layer.ffn_norm, layer.ffn, l + 1 < n_layers ? layers_[static_cast<size_t>(l) + 1].attn_norm : final_norm_, x, xn, y);
  }
  const int n_logits = b.logit_rows.n_cols();
  if (n_logits == 0) return;
  if (b.scores_all) return o.linear(xn, lm_head_, logits);
  const View last = o.temp(o.activation(), n_logits, c.hidden);
  o.gather_rows(xn, b.logit_rows, last);
  o.linear(last, lm_head_, logits);
}

void Decoder::predict(Ops& o, const Batch& b, const KvLayer& kv, bool normed, View hidden, View logits) const {
  CACHALOT_CHECK(mtp_.has_value());
  const Config& c = config_;
  const Scope scope(o);
  const Step step{o, c, b, rope_};
  const View both = o.temp(o.activation(), b.n_tokens, 2 * c.hidden);  // token | hidden state
  const View xn = o.temp(o.activation(), b.n_tokens, c.hidden), y = o.temp(o.activation(), b.n_tokens, c.hidden);
  if (normed) o.rmsnorm(hidden, final_norm_.view, c.rms_eps, hidden);
  o.rmsnorm(hidden, mtp_->hidden_norm.view, c.rms_eps, both.cols(c.hidden, c.hidden));
  const View x = hidden;  // from here on the layer's own residual stream
  o.embed(embed_, b.tokens, x);
  o.rmsnorm(x, mtp_->token_norm.view, c.rms_eps, both.cols(0, c.hidden));
  o.linear(both, mtp_->combine, x);
  o.rmsnorm(x, mtp_->layer.attn_norm.view, c.rms_eps, xn);
  std::visit([&](const auto& w) { attention(step, w, kv, xn, y); }, mtp_->layer.attn);
  add_ffn(step, mtp_->layer.ffn_norm, mtp_->layer.ffn, mtp_->norm, x, xn, y);
  const int n_logits = b.logit_rows.n_cols();
  if (n_logits == 0) return;
  const View last = o.temp(o.activation(), n_logits, c.hidden);
  o.gather_rows(xn, b.logit_rows, last);
  o.linear(last, lm_head_, logits);
}

size_t Decoder::weight_bytes() const {
  std::set<const Packed*> packed;
  const auto add = [&](const Linear& w) {
    if (w) packed.insert(w.packed.get());
  };
  add(embed_);
  add(lm_head_);
  const auto add_layer = [&](const Layer& layer) {
    if (const auto* g = std::get_if<GqaWeights>(&layer.attn)) {
      for (const Linear* w : {&g->qkv, &g->o}) add(*w);
    } else {
      const auto& m = std::get<MlaWeights>(layer.attn);
      for (const Linear* w : {&m.qkv_a, &m.q_b, &m.kv_b, &m.uk_t, &m.uv, &m.o}) add(*w);
    }
    if (const auto* d = std::get_if<DenseFfn>(&layer.ffn)) {
      for (const Linear* w : {&d->gate_up, &d->down}) add(*w);
    } else {
      const auto& m = std::get<MoeFfn>(layer.ffn);
      for (const Linear* w : {&m.router, &m.experts.gate_up, &m.experts.down, &m.experts.shared_gate_up, &m.experts.shared_down}) add(*w);
    }
  };
  for (const Layer& layer : layers_) add_layer(layer);
  if (mtp_) {
    add(mtp_->combine);
    add_layer(mtp_->layer);
  }
  size_t total = 0;
  for (const Packed* p : packed) total += p->bytes();
  return total;
}

}  // namespace cachalot
