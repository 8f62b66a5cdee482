// The FFN half of a layer: dense, shared and routed experts, one gated FFN at a time.
#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "quant/layer_quantizer.h"
#include "quant/observe_ops.h"

namespace cachalot {

// One stack of gate, up and down matrices on its way.
struct LayerQuantizer::GatedFfn {
  std::string gate, up, down;  // full names
  QuantizedStack gate_stack, up_stack, down_stack;
  ErrorSums gate_sums, up_sums, down_sums;
  double without = 0.0, with = 0.0;  // AWQ on the inputs of down: sums over matrices of the relative error
  int n_scaled = 0;
  bool of_outputs = false, fed_back = false;

  GatedFfn(const LayerQuantizer& q, const std::string& suffix)
      : gate(q.prefix_ + "ffn_gate" + suffix + ".weight"),
        up(q.prefix_ + "ffn_up" + suffix + ".weight"),
        down(q.prefix_ + "ffn_down" + suffix + ".weight"),
        gate_stack(stack_of(q, gate)),
        up_stack(stack_of(q, up)),
        down_stack(stack_of(q, down)) {}

 private:
  static QuantizedStack stack_of(const LayerQuantizer& q, const std::string& name) {
    const PlannedMatrix& p = q.planned(name);
    return {name, p.scheme, p.matrix.n_matrices, p.matrix.out, p.matrix.in};
  }
};

namespace {

LinearSource one_matrix(const LinearSource& stack, int m) {
  LinearSource source = stack;
  source.matrices = {stack.matrices[static_cast<size_t>(m)]};
  return source;
}

LinearSource view_of(const std::vector<float>& values, int out, int in) {
  LinearSource source{.name = "weights", .format = Format::f32, .out = out, .in = in};
  source.matrices.push_back({.data = std::as_bytes(std::span<const float>(values))});
  return source;
}

void add(ErrorSums& to, const ErrorSums& more) {
  to.error += more.error;
  to.size += more.size;
}

}  // namespace

// AWQ's factor on the input is folded by now.
void LayerQuantizer::quantize_gated(GatedFfn& ffn, int m, const GatedInput& input) {
  const View &x = input.x, &original = input.original;
  std::vector<float> gate = smooth_values(ffn.gate, m), up = smooth_values(ffn.up, m), down = smooth_values(ffn.down, m);
  const int inner = ffn.up_stack.source().out, hidden = ffn.up_stack.source().in;
  if (x.n_rows() == 0) {
    add(ffn.gate_sums, quantize_matrix(ffn.gate_stack, m, gate, nullptr));
    add(ffn.up_sums, quantize_matrix(ffn.up_stack, m, up, nullptr));
    add(ffn.down_sums, quantize_matrix(ffn.down_stack, m, down, nullptr));
    return;
  }
  constexpr int kRows = 2048;
  // Adds the hidden activations of `rows`, and of `others` under `other_weights`, to moments.
  const auto add_hidden = [&](Moments& moments, const Linear& weights, const Linear* other_weights) {
    for (int begin = 0; begin < x.n_rows(); begin += kRows) {
      const Scope scope(ops_);
      const int n = std::min(kRows, x.n_rows() - begin);
      const View h = ops_.temp(DType::f32, n, inner), other = other_weights != nullptr ? ops_.temp(DType::f32, n, inner) : View{};
      ops_.linear_swiglu(x.rows(begin, n), weights, h);
      if (other_weights != nullptr) ops_.linear_swiglu(original.rows(begin, n), *other_weights, other);
      moments.add(ops_, h, input.weight != nullptr ? input.weight + begin : nullptr, other, input.held_out + begin);
    }
  };
  const auto pack = [&](const LinearSource& a, const LinearSource& b) {
    const LinearSource segments[] = {a, b};
    return ops_.pack(segments);
  };

  if (recipe_.uses_awq()) {
    Moments hidden_moments(inner, true, false);
    add_hidden(hidden_moments, pack(view_of(gate, inner, hidden), view_of(up, inner, hidden)), nullptr);
    const AwqMatrix matrix{.values = down, .out = hidden, .scheme = ffn.down_stack.scheme()};
    const AwqScale scale = search_awq_scale(ops_, pool_, hidden_moments, {&matrix, 1}, recipe_.search);
    for (size_t i = 0; i < down.size(); ++i) down[i] *= scale.scale[i % static_cast<size_t>(inner)];
    for (size_t i = 0; i < up.size(); ++i) up[i] /= scale.scale[i / static_cast<size_t>(hidden)];
    ffn.without += scale.error_without;
    ffn.with += scale.error_with;
    ++ffn.n_scaled;
  }

  const bool corrects = wants_gram() && static_cast<bool>(original);
  Moments in_moments(hidden, wants_gram(), corrects);
  in_moments.add(ops_, x, input.weight, original, input.held_out);
  ffn.of_outputs = ffn.fed_back = wants_gram();
  const std::vector<float> unquantized_gate = gate, unquantized_up = up;
  {
    CalibratedInput calibrated(ops_, pool_, in_moments, recipe_.gptq);
    add(ffn.gate_sums, quantize_matrix(ffn.gate_stack, m, gate, &calibrated));
    add(ffn.up_sums, quantize_matrix(ffn.up_stack, m, up, &calibrated));
  }

  Moments down_moments(inner, wants_gram(), corrects);
  const Linear now = pack(one_matrix(ffn.gate_stack.source(), m), one_matrix(ffn.up_stack.source(), m));
  Linear before;
  if (corrects) before = pack(view_of(unquantized_gate, inner, hidden), view_of(unquantized_up, inner, hidden));
  add_hidden(down_moments, now, corrects ? &before : nullptr);
  CalibratedInput calibrated(ops_, pool_, down_moments, recipe_.gptq);
  add(ffn.down_sums, quantize_matrix(ffn.down_stack, m, down, &calibrated));
}

void LayerQuantizer::finish_gated(GatedFfn& ffn, LayerResult& result) {
  if (ffn.n_scaled > 0) note_scale(ffn.down, ffn.without / ffn.n_scaled, ffn.with / ffn.n_scaled);
  const auto finish = [&](const std::string& name, const QuantizedStack& stack, const ErrorSums& sums) {
    quantized_.put(name, stack.source());
    record(name, sums, ffn.of_outputs, ffn.fed_back && stack.has_grid(), result);
  };
  finish(ffn.gate, ffn.gate_stack, ffn.gate_sums);
  finish(ffn.up, ffn.up_stack, ffn.up_sums);
  finish(ffn.down, ffn.down_stack, ffn.down_sums);
}

std::vector<float> LayerQuantizer::normed(int layer, const Checkpoint& weights, TokenStream& stream) {
  const std::string name = "blk." + std::to_string(layer) + ".ffn_norm.weight";
  const Constant norm = ops_.constant(weights.vector(name, config_.hidden), 1, config_.hidden);
  std::vector<float> out(stream.x.size());
  runner_.for_each_chunk(stream, [&](int begin, View x) {
    float* const to = out.data() + static_cast<size_t>(begin) * static_cast<size_t>(config_.hidden);
    ops_.rmsnorm(x, norm.view, config_.rms_eps, View::matrix(to, DType::f32, x.n_rows(), config_.hidden));
  });
  return out;
}

// One factor for all that reads the FFN's norm; folded into the norm, `names` (gate and up of every kind) and the router.
void LayerQuantizer::scale_ffn_input(int layer, View x, const std::vector<std::string>& names) {
  Moments moments(config_.hidden, true, false);
  for (int begin = 0; begin < x.n_rows(); begin += 2048) moments.add(ops_, x.rows(begin, std::min(2048, x.n_rows() - begin)), nullptr);
  std::vector<std::vector<float>> values;
  std::vector<AwqMatrix> matrices;
  const auto hidden = static_cast<size_t>(config_.hidden);
  for (const std::string& name : names) {
    const PlannedMatrix& p = planned(name);
    if (is_float(p.scheme.format)) continue;
    // Rows sampled from all matrices of a stack; an expert sees its share of the tokens only.
    const LinearSource from = source(smooth_, name);
    const int rows = std::max(16, 1024 / p.matrix.n_matrices), step = std::max(1, p.matrix.out / rows);
    std::vector<float>& sampled = values.emplace_back();
    int n = 0;
    for (int m = 0; m < p.matrix.n_matrices; ++m)
      for (int r = 0; r < p.matrix.out; r += step, ++n) {
        sampled.resize(sampled.size() + hidden);
        dequant_row_by_input(from, m, r, sampled.data() + sampled.size() - hidden);
      }
    const double share = p.matrix.n_matrices > 1 ? static_cast<double>(config_.router.top_k) / config_.n_experts : 1.0;
    const double weight = share * p.matrix.n_matrices * p.matrix.out / n / (p.matrix.n_matrices > 1 ? config_.router.top_k : 1);
    matrices.push_back({.values = {}, .out = n, .scheme = p.scheme, .weight = weight});
  }
  if (matrices.empty()) return;
  for (size_t i = 0; i < values.size(); ++i) matrices[i].values = values[i];
  const AwqScale scale = search_awq_scale(ops_, pool_, moments, matrices, recipe_.search);
  fold_vector("blk." + std::to_string(layer) + ".ffn_norm.weight", scale.scale);
  for (const std::string& name : names) {
    if (planned(name).matrix.n_matrices > 1)
      column_scale_[name] = scale.scale;
    else
      fold_columns(name, scale.scale);
  }
  if (config_.is_moe_layer(layer)) {
    const std::string router = prefix_ + "ffn_gate_inp.weight";
    std::vector<float> rows = dequant_matrix(smooth_.linear(router, 1, config_.n_experts, config_.hidden), 0, pool_);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] *= scale.scale[i % hidden];
    smooth_.put(router, make_linear_source(router, Format::f32, rows, 1, config_.n_experts, config_.hidden));
  }
  for (int r = 0; r < x.n_rows(); ++r)
    for (size_t k = 0; k < hidden; ++k) x.row<float>(r)[k] /= scale.scale[k];
  for (const std::string& name : names) note_scale(name, scale.error_without, scale.error_with);
}

void LayerQuantizer::ffn(int layer, TokenStream* stream, TokenStream* original, LayerResult& result) {
  prefix_ = "blk." + std::to_string(layer) + ".";
  column_scale_.clear();
  hold_out(stream);
  if (config_.is_moe_layer(layer)) return moe(layer, stream, original, result);
  std::vector<float> x, other;
  View x_view{}, other_view{};
  x_view.shape = {0, config_.hidden, 1};
  if (stream != nullptr) {
    x = normed(layer, quantized_, *stream);
    x_view = View::matrix(x.data(), DType::f32, stream->n_tokens(), config_.hidden);
    if (recipe_.uses_awq()) scale_ffn_input(layer, x_view, {prefix_ + "ffn_gate.weight", prefix_ + "ffn_up.weight"});
    if (original != nullptr && wants_gram()) {
      other = normed(layer, smooth_, *original);
      other_view = View::matrix(other.data(), DType::f32, original->n_tokens(), config_.hidden);
    }
  }
  GatedFfn dense(*this, "");
  quantize_gated(dense, 0, {.x = x_view, .original = other_view, .held_out = held_out_.data()});
  finish_gated(dense, result);
}

void LayerQuantizer::moe(int layer, TokenStream* stream, TokenStream* original, LayerResult& result) {
  const int n_experts = config_.n_experts, top_k = config_.router.top_k, hidden = config_.hidden;
  GatedFfn experts(*this, "_exps");
  std::unique_ptr<GatedFfn> shared;
  if (config_.n_shared > 0) shared = std::make_unique<GatedFfn>(*this, "_shexp");
  View none{};
  none.shape = {0, hidden, 1};
  if (stream == nullptr) {
    for (int e = 0; e < n_experts; ++e) quantize_gated(experts, e, {.x = none});
    finish_gated(experts, result);
    if (shared) quantize_gated(*shared, 0, {.x = none});
    if (shared) finish_gated(*shared, result);
    return;
  }
  const int n_tokens = stream->n_tokens();
  std::vector<float> x = normed(layer, quantized_, *stream), other;
  const View x_view = View::matrix(x.data(), DType::f32, n_tokens, hidden);
  if (recipe_.uses_awq()) {
    std::vector<std::string> names{experts.gate, experts.up};
    if (shared) names.insert(names.end(), {shared->gate, shared->up});
    scale_ffn_input(layer, x_view, names);
  }
  View other_view{};
  if (original != nullptr && wants_gram()) {
    other = normed(layer, smooth_, *original);
    other_view = View::matrix(other.data(), DType::f32, n_tokens, hidden);
  }

  std::vector<int> ids(static_cast<size_t>(n_tokens) * static_cast<size_t>(top_k));
  std::vector<float> weights(ids.size());
  {
    const std::string router = prefix_ + "ffn_gate_inp.weight", bias = prefix_ + "exp_probs_b.bias";
    const LinearSource rows = make_linear_source(
        router, Format::f32, dequant_matrix(smooth_.linear(router, 1, n_experts, hidden), 0, pool_), 1, n_experts, hidden);
    const Linear packed = ops_.pack({&rows, 1});
    Constant bias_values;
    if (base_.has(bias)) bias_values = ops_.constant(base_.vector(bias, n_experts), 1, n_experts);
    const Routing all{View::matrix(ids.data(), DType::i32, n_tokens, top_k), View::matrix(weights.data(), DType::f32, n_tokens, top_k)};
    for (int begin = 0; begin < n_tokens; begin += 2048) {
      const Scope scope(ops_);
      const int n = std::min(2048, n_tokens - begin);
      const View logits = ops_.temp(DType::f32, n, n_experts);
      ops_.linear(x_view.rows(begin, n), packed, logits);
      ops_.route(logits, bias_values.view, config_.router, {all.ids.rows(begin, n), all.weights.rows(begin, n)});
    }
  }

  double mean_weight = 0.0;
  for (const float w : weights) mean_weight += static_cast<double>(w) / static_cast<double>(weights.size());
  const float unrouted = recipe_.unrouted_weight * static_cast<float>(mean_weight);
  for (int e = 0; e < n_experts; ++e) {
    std::vector<float> token_weight(static_cast<size_t>(n_tokens));
    int routed = 0;
    for (size_t i = 0; i < ids.size(); ++i)
      if (ids[i] == e) {
        token_weight[i / static_cast<size_t>(top_k)] = weights[i];
        ++routed;
      }
    const bool starved = routed < std::min(recipe_.min_expert_tokens, n_tokens);
    result.experts.push_back({layer, e, routed, starved});
    // A starved expert is filled up with evenly spaced tokens of others, at a small weight.
    const int wanted = recipe_.all_experts ? n_tokens : std::min(recipe_.min_expert_tokens, n_tokens);
    const int step = std::max(1, n_tokens / std::max(1, wanted));
    std::vector<float> rows, other_rows, row_weight;
    std::vector<uint8_t> held_out;
    for (int t = 0; t < n_tokens; ++t) {
      float w = token_weight[static_cast<size_t>(t)];
      if (w <= 0.0f && (recipe_.all_experts || (starved && t % step == 0))) w = unrouted;
      if (w <= 0.0f) continue;
      rows.insert(rows.end(), x_view.row<float>(t), x_view.row<float>(t) + hidden);
      if (other_view) other_rows.insert(other_rows.end(), other_view.row<float>(t), other_view.row<float>(t) + hidden);
      row_weight.push_back(w);
      held_out.push_back(held_out_[static_cast<size_t>(t)]);
    }
    const auto n = static_cast<int>(row_weight.size());
    quantize_gated(experts, e,
                   {.x = View::matrix(rows.data(), DType::f32, n, hidden),
                    .original = other_view ? View::matrix(other_rows.data(), DType::f32, n, hidden) : View{},
                    .weight = row_weight.data(),
                    .held_out = held_out.data()});
  }
  finish_gated(experts, result);
  if (shared) {
    quantize_gated(*shared, 0, {.x = x_view, .original = other_view, .held_out = held_out_.data()});
    finish_gated(*shared, result);
  }
}

}  // namespace cachalot
