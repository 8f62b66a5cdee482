// Sums over the decoder's layers.
#include "cli/bench_cost.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "runtime/runner.h"

namespace cachalot {
namespace {

void join(StoredWeights::Weight& to, const StoredWeights::Weight& w) {
  to.bytes += w.bytes;
  to.params += w.params;
}

// Not LinearSource::bytes(): the sources of a packed model have no bytes.
double stored_bytes(const LinearSource& s) {
  double bytes = static_cast<double>(matrix_bytes(s.format, s.out, s.in).value_or(0));
  const auto blocks = [](int n) { return (n + kFp8Block - 1) / kFp8Block; };
  if (s.format == Format::fp8_block) bytes += 4.0 * blocks(s.out) * blocks(s.in);
  if (s.group > 0) bytes += 3.0 * s.out * (s.in / s.group);  // f16 scale and u8 zero
  return bytes * s.n_matrices();
}

StoredWeights::Weight weight_of(const Constant& c) {
  const double n = c ? static_cast<double>(c.view.n_rows()) * c.view.n_cols() : 0.0;
  return {n * sizeof(float), n};
}

}  // namespace

void StoredWeights::add(std::span<const LinearSource> sources, const Linear& packed) {
  Weight& w = weights_[packed.packed.get()];
  w = {};
  for (const LinearSource& s : sources) {
    const double bytes = stored_bytes(s);
    w.bytes += bytes + static_cast<double>(s.bias.size() * sizeof(float));
    w.params += static_cast<double>(s.n_matrices()) * s.out * s.in + static_cast<double>(s.bias.size());
    bytes_of_format_[static_cast<size_t>(s.format)] += bytes;
  }
}

StoredWeights::Weight StoredWeights::of(const Linear& w) const {
  if (!w) return {};
  const auto found = weights_.find(w.packed.get());
  CACHALOT_CHECK(found != weights_.end(), "a weight of [{}, {}] was not told of", w.out, w.in);
  return found->second;
}

std::string StoredWeights::main_format() const {
  const auto most = std::max_element(bytes_of_format_.begin(), bytes_of_format_.end()) - bytes_of_format_.begin();
  std::string name(info(static_cast<Format>(most)).name);
  for (char& c : name) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return name;
}

StepCost& StepCost::operator+=(const StepCost& other) {
  weight_bytes += other.weight_bytes;
  kv_bytes += other.kv_bytes;
  flops += other.flops;
  return *this;
}

ModelCost::ModelCost(const Decoder& decoder, const StoredWeights& stored, double kv_token_bytes)
    : config_(decoder.config()), kv_token_bytes_(kv_token_bytes) {
  for (const Layer& layer : decoder.layers()) add_layer(layer, stored);
  join(fixed_, {config_.hidden * 4.0, static_cast<double>(config_.hidden)});  // the last norm
  head_ = stored.of(decoder.head());
  const Weight embedding = stored.of(decoder.embedding());
  embed_row_ = embedding.bytes / std::max(config_.vocab, 1);
  for (const Weight& w : {fixed_, experts_, head_, kv_b_}) join(total_, w);
  if (decoder.embedding().packed != decoder.head().packed) join(total_, embedding);
}

void ModelCost::add_layer(const Layer& layer, const StoredWeights& stored) {
  join(fixed_, weight_of(layer.attn_norm));
  join(fixed_, weight_of(layer.ffn_norm));
  if (const auto* g = std::get_if<GqaWeights>(&layer.attn)) {
    for (const Linear* w : {&g->qkv, &g->o}) join(fixed_, stored.of(*w));
    for (const Constant* c : {&g->q_norm, &g->k_norm}) join(fixed_, weight_of(*c));
  } else {
    const auto& m = std::get<MlaWeights>(layer.attn);
    for (const Linear* w : {&m.qkv_a, &m.q_b, &m.o}) join(fixed_, stored.of(*w));
    for (const Constant* c : {&m.q_a_norm, &m.kv_a_norm}) join(fixed_, weight_of(*c));
    // A file holds kv_b or its halves; the other form was made at load and may take more bytes.
    Weight halves = stored.of(m.uk_t);
    join(halves, stored.of(m.uv));
    const Weight whole = stored.of(m.kv_b);
    join(kv_b_, whole.bytes <= halves.bytes ? whole : halves);
  }
  if (const auto* d = std::get_if<DenseFfn>(&layer.ffn)) {
    for (const Linear* w : {&d->gate_up, &d->down}) join(fixed_, stored.of(*w));
  } else {
    const auto& m = std::get<MoeFfn>(layer.ffn);
    for (const Linear* w : {&m.router, &m.experts.shared_gate_up, &m.experts.shared_down}) join(fixed_, stored.of(*w));
    join(fixed_, weight_of(m.router_bias));
    for (const Linear* w : {&m.experts.gate_up, &m.experts.down}) join(experts_, stored.of(*w));
  }
}

StepCost ModelCost::step(std::span<const SequenceStep> sequences, int n_logits) const {
  const Config& c = config_;
  StepCost cost;
  double rows = 0.0;
  for (const SequenceStep& s : sequences) {
    const double n = s.n_new, context = s.n_cached + n;
    rows += n;
    cost.kv_bytes += kv_token_bytes_ * context;
    const double pairs = n * s.n_cached + n * (n + 1.0) / 2.0;  // of a query and a row that it sees
    double per_pair = 4.0 * c.head_dim;
    if (c.mla) {
      // kv_b is applied to each new row in the absorbed form, to each row of the context in the expanded one.
      const bool expanded = prefers_expanded(c.mla_dims(), s.n_new, s.n_cached);
      per_pair = expanded ? 2.0 * (c.nope + c.rope.dim + c.v_dim) : 2.0 * (2.0 * c.kv_rank + c.rope.dim);
      cost.flops += 2.0 * kv_b_.params * (expanded ? context : n);
    }
    cost.flops += c.n_layers * c.n_heads * per_pair * pairs;
  }
  cost.weight_bytes = fixed_.bytes + kv_b_.bytes + rows * embed_row_;
  cost.flops += 2.0 * fixed_.params * rows;
  if (c.n_experts > 0) {
    const double chosen = static_cast<double>(c.router.top_k) / c.n_experts;
    cost.weight_bytes += experts_.bytes * (1.0 - std::pow(1.0 - chosen, rows));
    cost.flops += 2.0 * experts_.params * chosen * rows;
  }
  if (n_logits > 0) {
    cost.weight_bytes += head_.bytes;
    cost.flops += 2.0 * head_.params * n_logits;
  }
  return cost;
}

}  // namespace cachalot
