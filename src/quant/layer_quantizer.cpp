// Attention, and what both halves share. The FFN is in layer_quantizer_ffn.cpp.
#include "quant/layer_quantizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "base/error.h"
#include "model/mla_weights.h"
#include "quant/imatrix.h"
#include "quant/observe_ops.h"
#include "quant/refine.h"

namespace cachalot {

LayerQuantizer::LayerQuantizer(const Checkpoint& base, const Config& config, Ops& ops, ThreadPool& pool, const Recipe& recipe, int window)
    : base_(base),
      config_(config),
      ops_(ops),
      pool_(pool),
      recipe_(recipe),
      plan_(plan(recipe, config)),
      smooth_(base),
      quantized_(static_cast<const Checkpoint&>(smooth_)),
      runner_(ops, config, window) {
  for (size_t i = 0; i < plan_.size(); ++i) plan_by_name_[plan_[i].matrix.name] = i;
}

bool LayerQuantizer::needs_calibration() const {
  if (recipe_.method != Method::rtn) return true;
  if (recipe_.imatrix) return false;
  return recipe_.importance && std::any_of(plan_.begin(), plan_.end(), [](const PlannedMatrix& p) {
           return p.matrix.name.starts_with("blk.") && !is_float(p.scheme.format) && p.scheme.format != Format::fp8_block &&
                  p.scheme.format != Format::q8_0;
         });
}

void LayerQuantizer::drop_layer(int layer) {
  const std::string prefix = "blk." + std::to_string(layer) + ".";
  quantized_.drop(prefix);
  smooth_.drop(prefix);
}

const PlannedMatrix& LayerQuantizer::planned(const std::string& name) const {
  const auto found = plan_by_name_.find(name);
  CACHALOT_CHECK(found != plan_by_name_.end(), "{} is not planned", name);
  return plan_[found->second];
}

LinearSource LayerQuantizer::source(const Checkpoint& from, const std::string& name) const {
  const ModelMatrix& m = planned(name).matrix;
  return from.linear(name, m.n_matrices, m.out, m.in);
}

std::vector<float> LayerQuantizer::smooth_values(const std::string& name, int m) const {
  std::vector<float> values = dequant_matrix(source(smooth_, name), m, pool_);
  if (const auto found = column_scale_.find(name); found != column_scale_.end())
    for (size_t i = 0; i < values.size(); ++i) values[i] *= found->second[i % found->second.size()];
  return values;
}

void LayerQuantizer::put_smooth(const std::string& name, std::vector<float> values) {
  const ModelMatrix& m = planned(name).matrix;
  smooth_.put(name, make_linear_source(name, Format::f32, values, 1, m.out, m.in));
}

void LayerQuantizer::fold_columns(const std::string& name, const std::vector<float>& scale) {
  std::vector<float> values = smooth_values(name, 0);
  for (size_t i = 0; i < values.size(); ++i) values[i] *= scale[i % scale.size()];
  put_smooth(name, std::move(values));
}

void LayerQuantizer::fold_vector(const std::string& name, const std::vector<float>& scale) {
  std::vector<float> values = smooth_.vector(name, static_cast<int>(scale.size()));
  for (size_t i = 0; i < values.size(); ++i) values[i] /= scale[i];
  smooth_.put(name, std::move(values));
}

void LayerQuantizer::record(const std::string& name, const ErrorSums& sums, bool of_outputs, bool fed_back, LayerResult& result) {
  const PlannedMatrix& p = planned(name);
  MatrixRecord r{.name = name, .scheme = p.scheme, .wanted = p.wanted};
  r.bits = bits_per_weight(p.scheme, p.matrix.in);
  r.n_weights = p.matrix.n_weights();
  r.error = sums.size > 0.0 ? std::sqrt(std::max(0.0, sums.error) / sums.size) : 0.0;
  r.error_is_of_outputs = of_outputs;
  r.method = is_float(p.scheme.format) ? "kept" : fed_back ? name_of(recipe_.method) : recipe_.uses_awq() ? "awq" : "rtn";
  if (const auto found = notes_.find(name); found != notes_.end()) r.notes.push_back(found->second);
  if (const auto found = met_.find(name); found != met_.end())
    r.notes.push_back(fmt::format("errors of layers before, squared, on held-out tokens: {:.0f}% met",
                                  100.0 * (1.0 - found->second.first / found->second.second)));
  if (p.fell_back())
    r.notes.push_back(fmt::format("rows of {} do not divide for {}: {} instead", p.matrix.in, name_of(p.wanted), name_of(p.scheme)));
  result.matrices.push_back(std::move(r));
}

// The last quarter of windows, of as many, evenly spread, as give 2,048 tokens.
void LayerQuantizer::hold_out(const TokenStream* stream) {
  constexpr int kTokens = 2048, kShare = 4;
  held_out_.clear();
  if (stream == nullptr) return;
  const int window = stream->window, from_each = std::max(1, window / kShare),
            step = std::max(1, stream->n_windows() * from_each / kTokens);
  for (int t = 0; t < stream->n_tokens(); ++t) held_out_.push_back(t % window >= window - from_each && t / window % step == 0 ? 1 : 0);
}

ErrorSums LayerQuantizer::quantize_matrix(QuantizedStack& stack, int m, std::vector<float>& values, CalibratedInput* input) {
  const LinearSource& s = stack.source();
  const Moments* const moments = input != nullptr ? &input->moments() : nullptr;
  const std::vector<float> importance = recipe_.imatrix      ? recipe_.imatrix->importance(planned(s.name).matrix, m)
                                        : moments != nullptr ? moments->importance()
                                                             : std::vector<float>{};
  const bool weigh = !importance.empty() && (is_planar(s.format) || recipe_.importance);
  // A copy only where values change: of an embedding it would be as large as all else together.
  const bool feeds = wants_gram() && moments != nullptr && stack.has_grid(), meets = feeds && moments->has_original();
  const std::vector<float> before = meets ? values : std::vector<float>{};
  const std::span<const float> wanted = meets ? before : values;
  if (meets) {
    input->earlier_errors().meet(values, s.out);
    auto& [left, matrices] = met_[s.name];
    left += input->earlier_errors().choice().error;
    ++matrices;
  }
  const std::span<const float> weights = weigh ? std::span<const float>(importance) : std::span<const float>{};
  stack.round_to_nearest(m, values, weights, recipe_.search, pool_);
  if (feeds && recipe_.uses_gptq()) {
    const ErrorFeedback& feedback = input->feedback(stack.scheme(), values, s.out, weights, recipe_.search);
    feedback.choose_codes(stack, m, values);
    refine_codes(ops_, *moments, feedback.damping(), stack, m, values, pool_);
  }
  if (moments == nullptr || !moments->has_gram()) return weighted_error(stack, m, wanted, importance);
  // A sample of rows is enough to report by; of a stack, fewer of each matrix.
  const int step = std::max(1, s.out / std::clamp(1024 / s.n_matrices(), 16, 256));
  const auto in = static_cast<size_t>(s.in);
  std::vector<float> difference, size, row(in);
  int rows = 0;
  for (int r = 0; r < s.out; r += step, ++rows) {
    stack.dequant(m, r, row.data());
    const float* const want = wanted.data() + static_cast<size_t>(r) * in;
    size.insert(size.end(), want, want + in);
    for (size_t k = 0; k < in; ++k) difference.push_back(want[k] - row[k]);
  }
  const double factor = static_cast<double>(s.out) / rows;
  return {factor * output_error(ops_, *moments, difference, rows), factor * output_error(ops_, *moments, size, rows)};
}

std::vector<std::vector<LayerQuantizer::Point>> LayerQuantizer::attention_stages() const {
  const auto mla = [](Linear MlaWeights::*member) {
    return [member](const AttentionWeights& w) -> const Linear& { return std::get<MlaWeights>(w).*member; };
  };
  const auto gqa = [](Linear GqaWeights::*member) {
    return [member](const AttentionWeights& w) -> const Linear& { return std::get<GqaWeights>(w).*member; };
  };
  if (!config_.mla)
    return {{{{"attn_q.weight", "attn_k.weight", "attn_v.weight"}, gqa(&GqaWeights::qkv), "attn_norm.weight"}},
            {{{"attn_output.weight"}, gqa(&GqaWeights::o), ""}}};
  std::vector<Point> second;
  if (config_.q_rank > 0) second.push_back({{"attn_q_b.weight"}, mla(&MlaWeights::q_b), "attn_q_a_norm.weight"});
  second.push_back({{"attn_kv_b.weight"}, mla(&MlaWeights::kv_b), "attn_kv_a_norm.weight"});
  const std::string q = config_.q_rank > 0 ? "attn_q_a.weight" : "attn_q.weight";
  return {{{{q, "attn_kv_a_mqa.weight"}, mla(&MlaWeights::qkv_a), "attn_norm.weight"}},
          std::move(second),
          {{{"attn_output.weight"}, mla(&MlaWeights::o), ""}}};
}

std::vector<Moments> LayerQuantizer::attention_moments(int layer, const std::vector<Point>& points, const Checkpoint& weights,
                                                       TokenStream& stream, TokenStream* original) {
  // One pass over a chunk, inputs copied: [points][rows * in].
  ObserveOps observe(ops_);
  std::vector<std::vector<float>> seen(points.size());
  std::vector<int> widths(points.size());
  observe.set_sink([&](int id, View x) {
    auto& to = seen[static_cast<size_t>(id)];
    for (int r = 0; r < x.n_rows(); ++r) to.insert(to.end(), x.row<float>(r), x.row<float>(r) + x.n_cols());
  });
  const auto watch = [&](const AttentionWeights& w) {
    for (size_t i = 0; i < points.size(); ++i) {
      const Linear& linear = points[i].linear(w);
      observe.watch(linear, static_cast<int>(i));
      widths[i] = linear.in;
    }
  };
  const auto norm_of = [&](const Checkpoint& from) {
    return ops_.constant(from.vector(prefix_ + "attn_norm.weight", config_.hidden), 1, config_.hidden);
  };
  const LoadOptions exact{.exact_derived = true};
  const AttentionWeights now = load_attention(weights, config_, ops_, layer, exact);
  const Constant norm = norm_of(weights);
  watch(now);
  AttentionWeights before;
  Constant original_norm;
  if (original != nullptr) {
    before = load_attention(smooth_, config_, ops_, layer, exact);
    original_norm = norm_of(smooth_);
    watch(before);
  }
  std::vector<Moments> moments;
  for (const int width : widths) moments.emplace_back(width, wants_gram(), original != nullptr);
  runner_.for_each_chunk(stream, [&](int begin, View x) {
    for (auto& rows : seen) rows.clear();
    std::vector<std::vector<float>> others;
    if (original != nullptr) {
      const View all = View::matrix(original->x.data(), DType::f32, original->n_tokens(), config_.hidden);
      runner_.watch_attention(observe, before, original_norm.view, all.rows(begin, x.n_rows()));
      others = std::move(seen);
      seen.assign(points.size(), {});
    }
    runner_.watch_attention(observe, now, norm.view, x);
    for (size_t i = 0; i < points.size(); ++i) {
      const int rows = static_cast<int>(seen[i].size()) / widths[i];
      CACHALOT_CHECK(rows == x.n_rows(), "{} rows of {} were seen", rows, x.n_rows());
      moments[i].add(ops_, View::matrix(seen[i].data(), DType::f32, rows, widths[i]), nullptr,
                     original != nullptr ? View::matrix(others[i].data(), DType::f32, rows, widths[i]) : View{}, held_out_.data() + begin);
    }
  });
  return moments;
}

void LayerQuantizer::note_scale(const std::string& name, double error_without, double error_with) {
  notes_[name] = fmt::format("channel scales: output error by rounding {:.4f} -> {:.4f}", error_without, error_with);
}

// The factors of attention's output become factors of the rows that make values.
void LayerQuantizer::fold_into_values(const std::vector<float>& scale) {
  const std::string name = prefix_ + (config_.mla ? "attn_kv_b.weight" : "attn_v.weight");
  const ModelMatrix shape =
      config_.mla ? ModelMatrix{name, 1, config_.n_heads * (config_.nope + config_.v_dim), config_.kv_rank} : planned(name).matrix;
  std::vector<float> values = dequant_matrix(smooth_.linear(name, 1, shape.out, shape.in), 0, pool_);
  const int v_dim = config_.mla ? config_.v_dim : config_.head_dim, stride = config_.mla ? config_.nope + v_dim : v_dim;
  for (size_t i = 0; i < scale.size(); ++i) {
    const int head = static_cast<int>(i) / v_dim, row = head * stride + (stride - v_dim) + static_cast<int>(i) % v_dim;
    for (int k = 0; k < shape.in; ++k)
      values[static_cast<size_t>(row) * static_cast<size_t>(shape.in) + static_cast<size_t>(k)] /= scale[i];
  }
  smooth_.put(name, make_linear_source(name, Format::f32, values, 1, shape.out, shape.in));
  if (!config_.mla && config_.qkv_bias) fold_vector(prefix_ + "attn_v.bias", scale);
}

void LayerQuantizer::scale_attention(int layer, TokenStream& stream) {
  std::vector<Point> points;
  for (const auto& stage : attention_stages()) points.insert(points.end(), stage.begin(), stage.end());
  const std::vector<Moments> moments = attention_moments(layer, points, quantized_, stream, nullptr);
  const bool values_fold = config_.mla || config_.n_heads == config_.n_kv_heads;
  for (size_t i = 0; i < points.size(); ++i) {
    const Point& point = points[i];
    if (point.norm.empty() && !values_fold) continue;  // heads share the rows that would take the factors
    std::vector<std::vector<float>> values;
    std::vector<AwqMatrix> matrices;
    for (const std::string& tensor : point.tensors) {
      const std::string name = prefix_ + tensor;
      const bool parts = tensor == "attn_kv_b.weight" && recipe_.split_kv_b;
      const Scheme scheme = planned(parts ? prefix_ + "attn_v_b.weight" : name).scheme;
      if (is_float(scheme.format)) continue;
      const int out = parts ? config_.n_heads * (config_.nope + config_.v_dim) : planned(name).matrix.out;
      values.push_back(dequant_matrix(smooth_.linear(name, 1, out, moments[i].n), 0, pool_));
      matrices.push_back({.values = {}, .out = out, .scheme = scheme});
    }
    if (matrices.empty()) continue;
    for (size_t j = 0; j < values.size(); ++j) matrices[j].values = values[j];
    const AwqScale scale = search_awq_scale(ops_, pool_, moments[i], matrices, recipe_.search);
    for (const std::string& tensor : point.tensors) {
      const std::string name = prefix_ + tensor;
      if (tensor == "attn_kv_b.weight") {
        const int out = config_.n_heads * (config_.nope + config_.v_dim);
        std::vector<float> all = dequant_matrix(smooth_.linear(name, 1, out, moments[i].n), 0, pool_);
        for (size_t k = 0; k < all.size(); ++k) all[k] *= scale.scale[k % scale.scale.size()];
        smooth_.put(name, make_linear_source(name, Format::f32, all, 1, out, moments[i].n));
      } else {
        fold_columns(name, scale.scale);
      }
      note_scale(name, scale.error_without, scale.error_with);
    }
    if (point.norm.empty())
      fold_into_values(scale.scale);
    else
      fold_vector(prefix_ + point.norm, scale.scale);
  }
}

void LayerQuantizer::quantize_tensors(const std::vector<std::string>& tensors, const Moments* moments, LayerResult& result) {
  std::optional<CalibratedInput> input;
  if (moments != nullptr) input.emplace(ops_, pool_, *moments, recipe_.gptq);
  for (const std::string& tensor : tensors) {
    const std::string name = prefix_ + tensor;
    const PlannedMatrix& p = planned(name);
    const LinearSource stored = source(smooth_, name);
    if (is_float(p.scheme.format) && stored.format == p.scheme.format) {
      record(name, {}, false, false, result);
      continue;
    }
    QuantizedStack stack(name, p.scheme, 1, p.matrix.out, p.matrix.in);
    std::vector<float> values = smooth_values(name, 0);
    const ErrorSums sums = quantize_matrix(stack, 0, values, input ? &*input : nullptr);
    quantized_.put(name, stack.source());
    record(name, sums, moments != nullptr && moments->has_gram(), wants_gram() && moments != nullptr && stack.has_grid(), result);
  }
}

void LayerQuantizer::quantize_kv_b_parts(const Moments* moments, LayerResult& result) {
  const MlaSources parts = mla_sources(smooth_, prefix_, config_.mla_dims(), /*exact=*/true);
  const std::string k_b = prefix_ + "attn_k_b.weight", v_b = prefix_ + "attn_v_b.weight";
  for (const std::string& name : {k_b, v_b}) {
    const LinearSource& from = name == k_b ? parts.uk_t : parts.uv;
    const PlannedMatrix& p = planned(name);
    QuantizedStack stack(name, p.scheme, p.matrix.n_matrices, p.matrix.out, p.matrix.in);
    // k_b multiplies queries, whose moments nobody collected: it is kept fine instead.
    const Moments* const seen = name == v_b ? moments : nullptr;
    std::optional<CalibratedInput> input;
    if (seen != nullptr) input.emplace(ops_, pool_, *seen, recipe_.gptq);
    ErrorSums sums;
    for (int m = 0; m < p.matrix.n_matrices; ++m) {
      std::vector<float> values = dequant_matrix(from, m, pool_);
      const ErrorSums one = quantize_matrix(stack, m, values, input ? &*input : nullptr);
      sums.error += one.error;
      sums.size += one.size;
    }
    quantized_.put(name, stack.source());
    record(name, sums, seen != nullptr && seen->has_gram(), wants_gram() && seen != nullptr && stack.has_grid(), result);
  }
  quantized_.hide(prefix_ + "attn_kv_b.weight");
}

void LayerQuantizer::attention(int layer, TokenStream* stream, TokenStream* original, LayerResult& result) {
  prefix_ = "blk." + std::to_string(layer) + ".";
  notes_.clear();
  met_.clear();
  hold_out(stream);
  if (recipe_.uses_awq()) scale_attention(layer, *stream);
  for (const auto& stage : attention_stages()) {
    std::vector<Moments> moments;
    if (stream != nullptr) moments = attention_moments(layer, stage, quantized_, *stream, original);
    for (size_t i = 0; i < stage.size(); ++i) {
      const Moments* const seen = moments.empty() ? nullptr : &moments[i];
      if (recipe_.split_kv_b && stage[i].tensors[0] == "attn_kv_b.weight")
        quantize_kv_b_parts(seen, result);
      else
        quantize_tensors(stage[i].tensors, seen, result);
    }
  }
}

void LayerQuantizer::globals(LayerResult& result) {
  prefix_.clear();
  for (const char* name : {"token_embd.weight", "output.weight"})
    if (plan_by_name_.contains(name)) quantize_tensors({name}, nullptr, result);
}

}  // namespace cachalot
