// KL divergence and its companions.
#include "eval/divergence.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "eval/sequence_runner.h"

namespace cachalot {
namespace {

// Mean and standard error of f(i) over n positions.
template <typename F>
Estimate mean_of(size_t n, F&& f) {
  double sum = 0.0, squares = 0.0;
  for (size_t i = 0; i < n; ++i) {
    const double v = f(i);
    sum += v;
    squares += v * v;
  }
  const auto count = static_cast<double>(n);
  const double mean = sum / count;
  return {mean, n > 1 ? std::sqrt(std::max(0.0, squares / count - mean * mean) / (count - 1.0)) : 0.0};
}

Quantiles quantiles_of(std::vector<float> values) {
  std::sort(values.begin(), values.end());
  Quantiles out{.least = static_cast<double>(values.front()), .most = static_cast<double>(values.back())};
  for (size_t q = 0; q < kQuantiles.size(); ++q) {
    const double place = kQuantiles[q] * static_cast<double>(values.size() - 1);
    const auto i = static_cast<size_t>(place);
    const double rest = place - static_cast<double>(i);
    out.at[q] = (1.0 - rest) * static_cast<double>(values[i]) + rest * static_cast<double>(values[std::min(i + 1, values.size() - 1)]);
  }
  return out;
}

}  // namespace

void DivergenceMeter::add(double base_nll, double nll, double kl, bool agreed) {
  base_nll_.push_back(static_cast<float>(base_nll));
  nll_.push_back(static_cast<float>(nll));
  kl_.push_back(static_cast<float>(kl));
  kl_sum_ += kl;
  agreed_ += agreed ? 1 : 0;
}

void DivergenceMeter::add(std::span<const float> base, std::span<const float> model, int token) {
  CACHALOT_CHECK(base.size() == model.size() && token >= 0 && static_cast<size_t>(token) < base.size(), "{} and {} logits, token {}",
                 base.size(), model.size(), token);
  const double base_sum = log_sum_exp(base), model_sum = log_sum_exp(model);
  const auto shift = static_cast<float>(base_sum);
  double sum = 0.0;  // of p (base - model)
  for (size_t i = 0; i < base.size(); ++i) {
    const float log_p = base[i] - shift;
    if (log_p > -30.0f) sum += static_cast<double>(std::exp(log_p)) * static_cast<double>(base[i] - model[i]);
  }
  const auto at = static_cast<size_t>(token);
  add(base_sum - static_cast<double>(base[at]), model_sum - static_cast<double>(model[at]), std::max(0.0, sum + model_sum - base_sum),
      argmax(base) == argmax(model));
}

void DivergenceMeter::add(const StoredLogits& base, std::span<const float> model, int token) {
  CACHALOT_CHECK(base.codes.size() >= model.size() && token >= 0 && static_cast<size_t>(token) < model.size(), "{} and {} logits, token {}",
                 base.codes.size(), model.size(), token);
  constexpr float kLeast = -16.0f;  // what lies lower was cut off when the file was written
  const double model_sum = log_sum_exp(model);
  const auto shift = static_cast<float>(model_sum);
  double kl = 0.0;
  size_t best = 0;
  for (size_t i = 0; i < model.size(); ++i) {
    if (base.codes[i] > base.codes[best]) best = i;
    const float log_p = base.log_p(i);
    if (log_p > kLeast) kl += static_cast<double>(std::exp(log_p)) * static_cast<double>(log_p - model[i] + shift);
  }
  const auto at = static_cast<size_t>(token);
  add(-static_cast<double>(base.log_p(at)), model_sum - static_cast<double>(model[at]), kl, static_cast<int>(best) == argmax(model));
}

void DivergenceMeter::merge(const DivergenceMeter& other) {
  base_nll_.insert(base_nll_.end(), other.base_nll_.begin(), other.base_nll_.end());
  nll_.insert(nll_.end(), other.nll_.begin(), other.nll_.end());
  kl_.insert(kl_.end(), other.kl_.begin(), other.kl_.end());
  kl_sum_ += other.kl_sum_;
  agreed_ += other.agreed_;
}

Divergence DivergenceMeter::result() const {
  Divergence out{.tokens = static_cast<int64_t>(kl_.size())};
  const size_t count = kl_.size();
  if (count == 0) return out;
  const auto n = static_cast<double>(count);
  const auto base = [this](size_t i) { return static_cast<double>(base_nll_[i]); };
  const auto model = [this](size_t i) { return static_cast<double>(nll_[i]); };
  const auto difference = [&](size_t i) { return std::exp(-model(i)) - std::exp(-base(i)); };

  const Estimate base_nll = mean_of(count, base), nll = mean_of(count, model);
  // The mean of pairs' differences has the error of the ratio: what both models find hard cancels out.
  out.log_ratio = mean_of(count, [&](size_t i) { return model(i) - base(i); });
  const double products = mean_of(count, [&](size_t i) { return model(i) * base(i); }).value;
  const double covariance = n > 1 ? (products - nll.value * base_nll.value) / (n - 1.0) : 0.0;
  if (nll.error > 0.0 && base_nll.error > 0.0) out.correlation = covariance / (nll.error * base_nll.error);
  out.base_nll = base_nll.value;
  out.nll = nll.value;
  out.base_ppl = std::exp(base_nll.value);
  out.ppl = std::exp(nll.value);
  out.base_ppl_error = out.base_ppl * base_nll.error;
  out.ppl_error = out.ppl * nll.error;
  out.ppl_ratio = std::exp(out.log_ratio.value);
  out.ppl_ratio_error = out.ppl_ratio * out.log_ratio.error;
  const double variance =
      out.ppl_error * out.ppl_error + out.base_ppl_error * out.base_ppl_error - 2.0 * out.ppl * out.base_ppl * covariance;
  out.ppl_difference = {out.ppl - out.base_ppl, std::sqrt(std::max(0.0, variance))};

  const Estimate kl = mean_of(count, [this](size_t i) { return static_cast<double>(kl_[i]); });
  out.kl = kl.value;
  out.kl_error = kl.error;
  out.kl_quantiles = quantiles_of(kl_);
  out.kl_median = out.kl_quantiles.at[5];
  out.kl_p99 = out.kl_quantiles.at[9];
  out.kl_max = out.kl_quantiles.most;

  out.delta_p = mean_of(count, difference);
  const Estimate squares = mean_of(count, [&](size_t i) { return difference(i) * difference(i); });
  out.delta_p_rms.value = std::sqrt(squares.value);
  if (squares.value > 0.0) out.delta_p_rms.error = 0.5 * squares.error / out.delta_p_rms.value;
  std::vector<float> differences(count);
  for (size_t i = 0; i < count; ++i) differences[i] = static_cast<float>(difference(i));
  out.delta_p_quantiles = quantiles_of(std::move(differences));

  out.top1 = static_cast<double>(agreed_) / n;
  if (n > 1) out.top1_error = std::sqrt(out.top1 * (1.0 - out.top1) / (n - 1.0));
  return out;
}

}  // namespace cachalot
