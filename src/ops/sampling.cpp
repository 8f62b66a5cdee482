// The host implementation of sampling. Filters keep to the few most likely tokens where they can, since sorting a vocabulary of
// 129,280 logits costs more than everything else here.
#include "ops/sampling.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace cachalot {
namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();
// Bounds of -log(-log u) over the values that sample_uniform gives: u is at most 1 - 2^-24.
constexpr double kLargestGumbel = 16.64;

struct Candidate {
  double logit;  // divided by the temperature
  int token;
};
bool more_likely(const Candidate& a, const Candidate& b) { return a.logit > b.logit || (a.logit == b.logit && a.token < b.token); }

std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter[0], b = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

// The generator with its last four words, as neighbouring tokens share them.
class Uniform {
 public:
  Uniform(uint64_t seed, uint64_t step) : seed_(seed), step_(step) {}
  float at(uint32_t token) {
    if (token / 4 != group_) {
      group_ = token / 4;
      words_ = philox({static_cast<uint32_t>(group_), 0, static_cast<uint32_t>(step_), static_cast<uint32_t>(step_ >> 32)},
                      {static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32)});
    }
    return (static_cast<float>(words_[token % 4] >> 9) + 0.5f) * 0x1p-23f;
  }

 private:
  uint64_t seed_, step_, group_ = ~uint64_t{0};
  std::array<uint32_t, 4> words_{};
};

// Penalties and biases; what is then not a number counts as forbidden.
std::vector<float> adjusted(std::span<const float> logits, const SampleParams& params) {
  std::vector<float> out(logits.begin(), logits.end());
  const auto known = [&](int token) { return token >= 0 && static_cast<size_t>(token) < out.size(); };
  for (const TokenCount& seen : params.history) {
    if (!known(seen.token)) continue;
    float& logit = out[static_cast<size_t>(seen.token)];
    if (seen.in_prompt + seen.in_output > 0) logit = logit > 0.0f ? logit / params.repetition : logit * params.repetition;
    if (seen.in_output > 0) logit -= params.presence + params.frequency * static_cast<float>(seen.in_output);
  }
  for (const TokenBias& bias : params.bias)
    if (known(bias.token)) out[static_cast<size_t>(bias.token)] += bias.bias;
  for (float& logit : out) {
    if (std::isnan(logit)) logit = kForbidden;
    logit = std::min(logit, std::numeric_limits<float>::max());
  }
  return out;
}

// Drops all but the k most likely, in no particular order.
void keep_top_k(std::vector<Candidate>& candidates, int k) {
  if (k <= 0 || static_cast<size_t>(k) >= candidates.size()) return;
  std::nth_element(candidates.begin(), candidates.begin() + (k - 1), candidates.end(), more_likely);
  candidates.resize(static_cast<size_t>(k));
}

// Drops all but the smallest set of most likely tokens whose probability is at least p. Sorts only as many as it needs.
void keep_top_p(std::vector<Candidate>& candidates, float p) {
  if (!(p < 1.0f)) return;
  const double highest = std::min_element(candidates.begin(), candidates.end(), more_likely)->logit;
  double total = 0.0, mass = 0.0;
  for (const Candidate& c : candidates) total += std::exp(c.logit - highest);
  size_t sorted = 0, n = 0;
  do {
    if (n == sorted) {
      const size_t end = std::min(candidates.size(), sorted == 0 ? size_t{64} : 4 * sorted);
      const auto at = [&](size_t i) { return candidates.begin() + static_cast<std::ptrdiff_t>(i); };
      if (end < candidates.size()) std::nth_element(at(sorted), at(end), candidates.end(), more_likely);
      std::sort(at(sorted), at(end), more_likely);
      sorted = end;
    }
    mass += std::exp(candidates[n++].logit - highest);
  } while (n < candidates.size() && mass < static_cast<double>(p) * total);
  candidates.resize(n);
}

// Drops tokens less likely than min_p times the most likely.
void keep_min_p(std::vector<Candidate>& candidates, float min_p) {
  if (!(min_p > 0.0f)) return;
  const double least =
      std::min_element(candidates.begin(), candidates.end(), more_likely)->logit + std::log(std::min(1.0, static_cast<double>(min_p)));
  std::erase_if(candidates, [&](const Candidate& c) { return c.logit < least; });
}

// The exponential race. A token whose logit cannot win even with the best draw is passed over without one.
int draw(const std::vector<Candidate>& candidates, const SampleParams& params) {
  Uniform uniform(params.seed, params.step);
  Candidate best{-std::numeric_limits<double>::infinity(), -1};
  const auto race = [&](const Candidate& c) {
    if (c.logit + kLargestGumbel < best.logit) return;
    const Candidate entry{c.logit - std::log(-std::log(static_cast<double>(uniform.at(static_cast<uint32_t>(c.token))))), c.token};
    if (more_likely(entry, best)) best = entry;
  };
  race(*std::min_element(candidates.begin(), candidates.end(), more_likely));  // raises the bar for the others
  for (const Candidate& c : candidates) race(c);
  return best.token;
}

int greedy(std::span<const float> logits) {
  const auto best = std::max_element(logits.begin(), logits.end());  // the first of equals
  return best == logits.end() || *best == kForbidden ? -1 : static_cast<int>(best - logits.begin());
}

int choose(std::span<const float> logits, const SampleParams& params) {
  if (!(params.temperature > 0.0f)) return greedy(logits);
  std::vector<Candidate> candidates;
  candidates.reserve(logits.size());
  for (size_t i = 0; i < logits.size(); ++i)
    if (logits[i] != kForbidden)
      candidates.push_back({static_cast<double>(logits[i]) / static_cast<double>(params.temperature), static_cast<int>(i)});
  if (candidates.empty()) return -1;
  keep_top_k(candidates, params.top_k);
  keep_top_p(candidates, params.top_p);
  keep_min_p(candidates, params.min_p);
  return draw(candidates, params);
}

void add_logprobs(std::span<const float> logits, int n_top, Sampled& out) {
  double sum = 0.0;
  const auto highest = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
  for (const float l : logits) sum += std::exp(static_cast<double>(l) - highest);
  const double norm = highest + std::log(sum);
  const auto logprob = [&](float logit) { return static_cast<float>(static_cast<double>(logit) - norm); };
  out.logprob = logprob(logits[static_cast<size_t>(out.token)]);
  if (n_top <= 0) return;
  std::vector<Candidate> tokens;
  tokens.reserve(logits.size());
  for (size_t i = 0; i < logits.size(); ++i)
    if (logits[i] != kForbidden) tokens.push_back({static_cast<double>(logits[i]), static_cast<int>(i)});
  keep_top_k(tokens, n_top);
  std::sort(tokens.begin(), tokens.end(), more_likely);
  for (const Candidate& c : tokens) out.top.push_back({c.token, logprob(logits[static_cast<size_t>(c.token)])});
}

}  // namespace

float sample_uniform(uint64_t seed, uint64_t step, uint32_t token) { return Uniform(seed, step).at(token); }

Sampled sample_token(std::span<const float> logits, const SampleParams& params) {
  Sampled out;
  bool sound = false;
  for (const float l : logits) {
    if (!(l <= std::numeric_limits<float>::max())) return {.finite = false};
    sound = sound || l != kForbidden;
  }
  const bool plain = params.history.empty() && params.bias.empty();
  if (sound) out.token = plain ? choose(logits, params) : choose(adjusted(logits, params), params);
  out.finite = out.token >= 0;
  if (out.finite && params.n_logprobs >= 0) add_logprobs(logits, params.n_logprobs, out);
  return out;
}

}  // namespace cachalot
