// The forward pass of every family, top to bottom.
#include "model/decoder.h"

#include <set>

namespace cachalot {

void Decoder::forward(Ops& o, const Batch& b, KvLayers kv, View logits, View hidden) const {
  const Config& c = config_;
  const int n_layers = static_cast<int>(layers_.size()), n_logits = b.logit_rows.n_cols();
  CACHALOT_CHECK(static_cast<int>(kv.size()) >= n_layers, "{} KV layers for {} layers", kv.size(), n_layers);
  const Scope scope(o);
  const Step step{o, c, b, rope_};
  View x = hidden ? hidden : o.temp(DType::f32, b.n_tokens, c.hidden);                                       // the residual stream
  View xn = o.temp(o.activation(), b.n_tokens, c.hidden), y = o.temp(o.activation(), b.n_tokens, c.hidden);  // normed input, output
  // Behind the last layer's attention only rows whose logits are wanted go on, unless the state of every row is.
  const bool narrows = n_logits < b.n_tokens && !hidden;
  o.embed(embed_, b.tokens, x);
  o.rmsnorm(x, layers_[0].attn_norm.view, c.rms_eps, xn);
  for (int l = 0; l < n_layers; ++l) {
    const Layer& layer = layers_[static_cast<size_t>(l)];
    const bool last = l + 1 == n_layers;
    if (last && narrows) y = y.rows(0, n_logits);
    std::visit([&](const auto& w) { attention(step, w, kv[static_cast<size_t>(l)], xn, y); }, layer.attn);
    if (last && n_logits == 0 && narrows) return;
    if (last && narrows) {
      const View all = x;
      x = o.temp(DType::f32, n_logits, c.hidden), xn = xn.rows(0, n_logits);
      o.gather_rows(all, b.logit_rows, x);
    }
    add_ffn(step, layer.ffn_norm, layer.ffn, last ? final_norm_ : layers_[static_cast<size_t>(l) + 1].attn_norm, x, xn, y);
  }
  if (n_logits == 0) return;
  if (!narrows && !b.scores_all) {
    const View all = xn;
    xn = o.temp(o.activation(), n_logits, c.hidden);
    o.gather_rows(all, b.logit_rows, xn);
  }
  o.linear(xn, lm_head_, logits);
}

void attention_output(const Step& step, View context, const Linear& w, View y) {
  Ops& o = step.ops;
  if (y.n_rows() == 0) return;
  if (y.n_rows() < context.n_rows()) {
    const View all = context;
    context = o.temp(all.dtype, y.n_rows(), all.n_cols());
    o.gather_rows(all, step.batch.logit_rows, context);
  }
  o.linear(context, w, y);
}

void Decoder::predict(Ops& o, const Batch& b, const KvLayer& kv, bool of_text, View hidden, View logits) const {
  CACHALOT_CHECK(mtp_.has_value());
  const Config& c = config_;
  const Scope scope(o);
  const Step step{o, c, b, rope_};
  const View both = o.temp(o.activation(), b.n_tokens, 2 * c.hidden);  // token | hidden state
  const View xn = o.temp(o.activation(), b.n_tokens, c.hidden), y = o.temp(o.activation(), b.n_tokens, c.hidden);
  if (of_text && c.mtp_input_normed) o.rmsnorm(hidden, final_norm_.view, c.rms_eps, hidden);
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
