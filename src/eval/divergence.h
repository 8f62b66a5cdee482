// Divergence of a model from the one it was made of, both asked about the same positions of the same text. Statistics and their names are
// llama-perplexity's (--kl-divergence): means with standard errors, ratios with the errors that correlated pairs have, percentiles.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "eval/logit_file.h"

namespace cachalot {

struct Estimate {
  double value = 0.0, error = 0.0;  // one standard error
};

// Quantiles that are reported, between the smallest and the largest value.
constexpr std::array<double, 11> kQuantiles{0.001, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 0.999};
struct Quantiles {
  double least = 0.0, most = 0.0;
  std::array<double, kQuantiles.size()> at{};  // linear between neighbours
};

struct Divergence {
  int64_t tokens = 0;
  double base_nll = 0.0, nll = 0.0;  // mean negative log-likelihood of the text, nats
  double base_ppl = 0.0, ppl = 0.0;
  double ppl_ratio = 0.0;           // ppl / base_ppl
  double kl = 0.0, kl_error = 0.0;  // mean over positions of KL(base || model), nats, and its standard error
  double kl_median = 0.0, kl_p99 = 0.0, kl_max = 0.0;
  double top1 = 0.0;  // share of positions where both prefer the same token

  double base_ppl_error = 0.0, ppl_error = 0.0, ppl_ratio_error = 0.0, top1_error = 0.0;
  double correlation = 0.0;       // of both models' log-likelihoods
  Estimate log_ratio;             // ln(ppl / base_ppl)
  Estimate ppl_difference;        // ppl - base_ppl
  Quantiles kl_quantiles;         // of positions
  Estimate delta_p, delta_p_rms;  // model's minus base's probability of the text's token: mean and root of mean square
  Quantiles delta_p_quantiles;
};

class DivergenceMeter {
 public:
  // One position: logits of both models, and the token that the text has next.
  void add(std::span<const float> base, std::span<const float> model, int token);
  // The same with the base model's log-probabilities from a file, which end 16 nats below the largest.
  void add(const StoredLogits& base, std::span<const float> model, int token);
  // What was added there counts here as well.
  void merge(const DivergenceMeter& other);
  [[nodiscard]] double mean_kl() const { return kl_.empty() ? 0.0 : kl_sum_ / static_cast<double>(kl_.size()); }
  [[nodiscard]] Divergence result() const;

 private:
  void add(double base_nll, double nll, double kl, bool agreed);

  std::vector<float> base_nll_, nll_, kl_;  // of each position
  double kl_sum_ = 0.0;
  int64_t agreed_ = 0;
};

}  // namespace cachalot
