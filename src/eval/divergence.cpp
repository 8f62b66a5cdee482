// KL divergence and its companions.
#include "eval/divergence.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace cachalot {
namespace {

struct Normaliser {
  double log_sum = 0.0;  // log of the sum of exponentials
  size_t best = 0;
};
Normaliser normaliser_of(std::span<const float> logits) {
  const auto best = std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const float l : logits) sum += std::exp(l - *best);
  return {std::log(sum) + static_cast<double>(*best), static_cast<size_t>(best - logits.begin())};
}

}  // namespace

void DivergenceMeter::add(std::span<const float> base, std::span<const float> model, int token) {
  CACHALOT_CHECK(base.size() == model.size() && token >= 0 && static_cast<size_t>(token) < base.size(), "{} and {} logits, token {}",
                 base.size(), model.size(), token);
  const Normaliser b = normaliser_of(base), m = normaliser_of(model);
  const float shift = static_cast<float>(b.log_sum);
  double sum = 0.0;  // of p (base - model)
  for (size_t i = 0; i < base.size(); ++i) {
    const float log_p = base[i] - shift;
    if (log_p > -30.0f) sum += static_cast<double>(std::exp(log_p)) * (base[i] - model[i]);
  }
  const double kl = std::max(0.0, sum + m.log_sum - b.log_sum);
  base_nll_ += b.log_sum - static_cast<double>(base[static_cast<size_t>(token)]);
  nll_ += m.log_sum - static_cast<double>(model[static_cast<size_t>(token)]);
  kl_sum_ += kl;
  kl_squares_ += kl * kl;
  agreed_ += b.best == m.best ? 1 : 0;
  kl_.push_back(static_cast<float>(kl));
}

void DivergenceMeter::merge(const DivergenceMeter& other) {
  base_nll_ += other.base_nll_;
  nll_ += other.nll_;
  kl_sum_ += other.kl_sum_;
  kl_squares_ += other.kl_squares_;
  agreed_ += other.agreed_;
  kl_.insert(kl_.end(), other.kl_.begin(), other.kl_.end());
}

Divergence DivergenceMeter::result() const {
  Divergence out{.tokens = static_cast<int64_t>(kl_.size())};
  if (kl_.empty()) return out;
  const auto n = static_cast<double>(kl_.size());
  out.base_nll = base_nll_ / n;
  out.nll = nll_ / n;
  out.base_ppl = std::exp(out.base_nll);
  out.ppl = std::exp(out.nll);
  out.ppl_ratio = std::exp(out.nll - out.base_nll);
  out.kl = kl_sum_ / n;
  out.kl_error = n > 1 ? std::sqrt(std::max(0.0, kl_squares_ / n - out.kl * out.kl) / (n - 1.0)) : 0.0;
  out.top1 = static_cast<double>(agreed_) / n;
  std::vector<float> sorted = kl_;
  std::sort(sorted.begin(), sorted.end());
  const auto at = [&](double share) { return static_cast<double>(sorted[static_cast<size_t>(share * (n - 1.0))]); };
  out.kl_median = at(0.5);
  out.kl_p99 = at(0.99);
  out.kl_max = at(1.0);
  return out;
}

}  // namespace cachalot
