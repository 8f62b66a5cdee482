// Divergence of a model from the one it was made of: both models' logits at the same positions of the same text.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace cachalot {

struct Divergence {
  int64_t tokens = 0;
  double base_nll = 0.0, nll = 0.0;  // mean negative log-likelihood of the text, nats
  double base_ppl = 0.0, ppl = 0.0;
  double ppl_ratio = 0.0;           // ppl / base_ppl
  double kl = 0.0, kl_error = 0.0;  // mean over positions of KL(base || model), nats, and its standard error
  double kl_median = 0.0, kl_p99 = 0.0, kl_max = 0.0;
  double top1 = 0.0;  // share of positions where both prefer the same token
};

class DivergenceMeter {
 public:
  // One position: logits of both models, and the token that the text has next.
  void add(std::span<const float> base, std::span<const float> model, int token);
  // What was added there counts here as well.
  void merge(const DivergenceMeter& other);
  [[nodiscard]] Divergence result() const;

 private:
  double base_nll_ = 0.0, nll_ = 0.0, kl_sum_ = 0.0, kl_squares_ = 0.0;
  int64_t agreed_ = 0;
  std::vector<float> kl_;  // of each position
};

}  // namespace cachalot
