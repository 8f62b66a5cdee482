// LayerQuantizer: quantizes one layer of a model by a recipe, from the calibration tokens' residual streams at that layer. Attention goes
// first, stage by stage, each stage calibrated on what the stages before it have become; then the FFN, experts one after another.
//
// Two checkpoints describe the result: `smooth`, the original with AWQ's factors folded in (the same function), and `quantized` on top of
// it.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "quant/awq.h"
#include "quant/earlier_errors.h"
#include "quant/layer_runner.h"
#include "quant/overlay.h"
#include "quant/recipe.h"

namespace cachalot {

// What happened to one matrix, or stack.
struct MatrixRecord {
  std::string name;
  Scheme scheme, wanted;
  std::string method;  // that was applied: "rtn", "gptq", "awq", "awq+gptq", "kept"
  double bits = 0.0;   // per weight, all included
  int64_t n_weights = 0;
  double error = 0.0;  // relative: of the outputs on calibration inputs, or of the weights where no inputs were seen
  bool error_is_of_outputs = false;
  std::vector<std::string> notes;
};

// Calibration tokens that reached an expert by routing.
struct ExpertLoad {
  int layer = 0, expert = 0;
  int64_t tokens = 0;
  bool starved = false;  // tokens of other experts were added
};

struct LayerResult {
  std::vector<MatrixRecord> matrices;
  std::vector<ExpertLoad> experts;
};

// What the methods make of one input: each when first asked for, once for all matrices that read it.
class CalibratedInput {
 public:
  // All must outlive this.
  CalibratedInput(Ops& ops, ThreadPool& pool, const Moments& moments, const GptqOptions& gptq)
      : ops_(ops), pool_(pool), moments_(moments), gptq_(gptq) {}
  [[nodiscard]] const Moments& moments() const { return moments_; }
  // The first matrix, values [out, in], decides on the damping where the recipe leaves it open.
  const ErrorFeedback& feedback(const Scheme& scheme, std::span<const float> values, int out, std::span<const float> importance,
                                RangeSearch search) {
    if (feedback_) return *feedback_;
    GptqOptions options = gptq_;
    if (!(options.damping > 0.0f)) options.damping = best_damping(ops_, pool_, moments_, scheme, values, out, importance, search);
    feedback_ = std::make_unique<ErrorFeedback>(ops_, pool_, moments_, options);
    return *feedback_;
  }
  EarlierErrors& earlier_errors() {
    if (!earlier_errors_) earlier_errors_ = std::make_unique<EarlierErrors>(ops_, pool_, moments_);
    return *earlier_errors_;
  }

 private:
  Ops& ops_;
  ThreadPool& pool_;
  const Moments& moments_;
  const GptqOptions& gptq_;
  std::unique_ptr<ErrorFeedback> feedback_;
  std::unique_ptr<EarlierErrors> earlier_errors_;
};

class LayerQuantizer {
 public:
  // All must outlive this.
  LayerQuantizer(const Checkpoint& base, const Config& config, Ops& ops, ThreadPool& pool, const Recipe& recipe, int window);

  // Whether the recipe looks at calibration inputs at all.
  [[nodiscard]] bool needs_calibration() const;
  // The halves of a layer, in this order. The streams stand before the half, and are not moved on; `stream` is the quantized model's,
  // `original` the unquantized one's (null unless the recipe meets earlier errors). Both null when no calibration is needed.
  void attention(int layer, TokenStream* stream, TokenStream* original, LayerResult& result);
  void ffn(int layer, TokenStream* stream, TokenStream* original, LayerResult& result);
  // Embedding and head, rounded to nearest where the plan says so.
  void globals(LayerResult& result);

  [[nodiscard]] const std::vector<PlannedMatrix>& planned() const { return plan_; }
  [[nodiscard]] const Overlay& quantized() const { return quantized_; }
  // What is rounded: without experts, the original's function.
  [[nodiscard]] const Overlay& smooth() const { return smooth_; }
  // Frees what a layer became, once it was written and the streams have moved on.
  void drop_layer(int layer);
  [[nodiscard]] LayerRunner& runner() { return runner_; }

 private:
  // Linears of attention that share an input.
  struct Point {
    std::vector<std::string> tensors;
    std::function<const Linear&(const AttentionWeights&)> linear;  // the packed form that sees the input
    std::string norm;                                              // whose output it is, where AWQ folds; "" for attention's own output
  };
  struct GatedFfn;

  [[nodiscard]] const PlannedMatrix& planned(const std::string& name) const;
  [[nodiscard]] bool wants_gram() const { return recipe_.uses_gptq() || recipe_.uses_awq(); }
  [[nodiscard]] LinearSource source(const Checkpoint& from, const std::string& name) const;
  [[nodiscard]] std::vector<float> smooth_values(const std::string& name, int m) const;
  void put_smooth(const std::string& name, std::vector<float> values);
  void fold_columns(const std::string& name, const std::vector<float>& scale);
  void fold_vector(const std::string& name, const std::vector<float>& scale);
  void note_scale(const std::string& name, double error_without, double error_with);

  [[nodiscard]] std::vector<std::vector<Point>> attention_stages() const;
  [[nodiscard]] std::vector<Moments> attention_moments(int layer, const std::vector<Point>& points, const Checkpoint& weights,
                                                       TokenStream& stream, TokenStream* original);
  void scale_attention(int layer, TokenStream& stream);
  void fold_into_values(const std::vector<float>& scale);
  void quantize_tensors(const std::vector<std::string>& tensors, const Moments* moments, LayerResult& result);
  void quantize_kv_b_parts(const Moments* moments, LayerResult& result);

  // Rounds or feeds back one matrix, values [out, in], which may change; input: null when none was seen. Returns squared error and size, of
  // outputs with a Gram matrix.
  ErrorSums quantize_matrix(QuantizedStack& stack, int m, std::vector<float>& values, CalibratedInput* input);

  // Chooses the tokens by which it is checked how far to meet earlier errors.
  void hold_out(const TokenStream* stream);
  // Rows of one gated FFN's input, and of the unquantized model's (or none).
  struct GatedInput {
    View x, original;
    const float* weight = nullptr;      // [rows], or null: 1
    const uint8_t* held_out = nullptr;  // [rows]
  };
  void quantize_gated(GatedFfn& ffn, int m, const GatedInput& input);
  void finish_gated(GatedFfn& ffn, LayerResult& result);
  void moe(int layer, TokenStream* stream, TokenStream* original, LayerResult& result);
  [[nodiscard]] std::vector<float> normed(int layer, const Checkpoint& weights, TokenStream& stream);
  void scale_ffn_input(int layer, View x, const std::vector<std::string>& names);
  void record(const std::string& name, const ErrorSums& sums, bool of_outputs, bool fed_back, LayerResult& result);

  const Checkpoint& base_;
  const Config& config_;
  Ops& ops_;
  ThreadPool& pool_;
  const Recipe& recipe_;
  std::vector<PlannedMatrix> plan_;
  std::map<std::string, size_t> plan_by_name_;
  Overlay smooth_, quantized_;
  LayerRunner runner_;
  std::string prefix_;                                      // "blk.3."
  std::map<std::string, std::string> notes_;                // on this layer's matrices
  std::map<std::string, std::pair<double, int>> met_;       // what is left of earlier errors' squares: sum over matrices of a stack, number
  std::vector<uint8_t> held_out_;                           // calibration tokens
  std::map<std::string, std::vector<float>> column_scale_;  // AWQ's factors of expert stacks, applied when their weights are read
};

}  // namespace cachalot
