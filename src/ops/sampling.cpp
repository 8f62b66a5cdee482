// The host implementation of sampling. Filters keep to the few most likely tokens where they can, since sorting a vocabulary of
// 129,280 logits costs more than everything else here.
#include "ops/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/sampling_math.h"

namespace cachalot {
namespace {
using namespace sampling;

constexpr float kForbidden = -std::numeric_limits<float>::infinity();

struct Candidate {
  double logit;  // times 1 / temperature
  int token;
};
bool more_likely(const Candidate& a, const Candidate& b) { return a.logit > b.logit || (a.logit == b.logit && a.token < b.token); }

// The generator with its last four words, as neighbouring tokens share them.
class Uniform {
 public:
  Uniform(uint64_t seed, uint64_t step) : seed_(seed), step_(step) {}
  float at(uint32_t token) {
    if (token / 4 != group_) {
      group_ = token / 4;
      words_ = philox(seed_, step_, static_cast<uint32_t>(group_));
    }
    return uniform_of(words_.word[token % 4]);
  }

 private:
  uint64_t seed_, step_, group_ = ~uint64_t{0};
  Words words_{};
};

// Penalties, biases and tokens that are not allowed; what is then not a number counts as forbidden.
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
  for (size_t i = 0; i < out.size() && !params.allowed.empty(); ++i)
    if (i / 32 >= params.allowed.size() || (params.allowed[i / 32] >> (i % 32) & 1u) == 0) out[i] = kForbidden;
  for (float& logit : out) {
    if (std::isnan(logit)) logit = kForbidden;
    logit = std::min(logit, std::numeric_limits<float>::max());
  }
  return out;
}

// The k most likely tokens (all that are not forbidden when k <= 0), in no particular order, with their logits unchanged.
std::vector<Candidate> most_likely(std::span<const float> logits, int k) {
  std::vector<Candidate> out;
  const size_t wanted = k <= 0 ? logits.size() : std::min(logits.size(), static_cast<size_t>(k));
  out.reserve(wanted);
  size_t i = 0;
  for (; i < logits.size() && out.size() < wanted; ++i)
    if (logits[i] != kForbidden) out.push_back({static_cast<double>(logits[i]), static_cast<int>(i)});
  if (i == logits.size() || out.empty()) return out;
  std::make_heap(out.begin(), out.end(), more_likely);  // the least likely in front
  float least = static_cast<float>(out.front().logit);
  for (; i < logits.size(); ++i) {
    if (!(logits[i] > least)) continue;  // of equals, the earlier one stays
    std::pop_heap(out.begin(), out.end(), more_likely);
    out.back() = {static_cast<double>(logits[i]), static_cast<int>(i)};
    std::push_heap(out.begin(), out.end(), more_likely);
    least = static_cast<float>(out.front().logit);
  }
  return out;
}

// Drops all but the smallest set of most likely tokens whose probability is at least p. Sorts only as many as it needs.
void keep_top_p(std::vector<Candidate>& candidates, float p) {
  if (!(p < 1.0f)) return;
  const double highest = std::min_element(candidates.begin(), candidates.end(), more_likely)->logit;
  uint64_t total = 0, mass = 0;
  for (const Candidate& c : candidates) total += mass_of(highest - c.logit);
  size_t sorted = 0, n = 0;
  do {
    if (n == sorted) {
      const size_t end = std::min(candidates.size(), sorted == 0 ? size_t{64} : 4 * sorted);
      const auto at = [&](size_t i) { return candidates.begin() + static_cast<std::ptrdiff_t>(i); };
      if (end < candidates.size()) std::nth_element(at(sorted), at(end), candidates.end(), more_likely);
      std::sort(at(sorted), at(end), more_likely);
      sorted = end;
    }
    mass += mass_of(highest - candidates[n++].logit);
  } while (n < candidates.size() && static_cast<double>(mass) < static_cast<double>(p) * static_cast<double>(total));
  candidates.resize(n);
}

// Drops tokens less likely than min_p times the most likely.
void keep_min_p(std::vector<Candidate>& candidates, float min_p) {
  if (!(min_p > 0.0f)) return;
  const double least =
      std::min_element(candidates.begin(), candidates.end(), more_likely)->logit + std::log(std::min(1.0, static_cast<double>(min_p)));
  std::erase_if(candidates, [&](const Candidate& c) { return c.logit < least; });
}

// The exponential race. Most tokens are passed over without a logarithm, by bounds that only hold back losers: the entry of a token is at
// most logit + kLargestGumbel; and it beats `best` only if -log u < e^x with x = logit - best, where -log u >= 1 - u and, for x < 1,
// e^x <= 1 / (1 - x).
class Race {
 public:
  explicit Race(const SampleParams& params) : uniform_(params.seed, params.step) {}
  void enter(const Candidate& c) {
    const double behind = best_.logit - c.logit;
    if (behind > kLargestGumbel) return;
    const float uniform = uniform_.at(static_cast<uint32_t>(c.token));
    const auto u = static_cast<double>(uniform);
    if ((1.0 - u) * (1.0 + behind) > 1.0 + 1e-9) return;
    const Candidate entry{race_entry(c.logit, uniform), c.token};
    if (more_likely(entry, best_)) best_ = entry;
  }
  [[nodiscard]] const Candidate& best() const { return best_; }

 private:
  Uniform uniform_;
  Candidate best_{-std::numeric_limits<double>::infinity(), -1};
};

// The first of the largest logits; -1 when all are forbidden.
int greedy(std::span<const float> logits) {
  constexpr size_t kLanes = 16;  // for the compiler to use vectors
  float lanes[kLanes];
  std::fill_n(lanes, kLanes, kForbidden);
  for (size_t i = 0; i + kLanes <= logits.size(); i += kLanes)
    for (size_t j = 0; j < kLanes; ++j) lanes[j] = logits[i + j] > lanes[j] ? logits[i + j] : lanes[j];
  for (size_t i = logits.size() / kLanes * kLanes; i < logits.size(); ++i) lanes[0] = std::max(lanes[0], logits[i]);
  const float largest = *std::max_element(lanes, lanes + kLanes);
  return largest == kForbidden ? -1 : static_cast<int>(std::find(logits.begin(), logits.end(), largest) - logits.begin());
}

int choose(std::span<const float> logits, const SampleParams& params) {
  const int likeliest = greedy(logits);
  if (likeliest < 0 || !(params.temperature > 0.0f)) return likeliest;
  const auto temperature = static_cast<double>(params.temperature);
  const double inverse = 1.0 / temperature;  // a product per token costs devices less than a quotient
  const auto entrant = [&](int token) { return Candidate{static_cast<double>(logits[static_cast<size_t>(token)]) * inverse, token}; };
  Race race(params);
  race.enter(entrant(likeliest));  // raises the bar for the others
  if (params.top_k <= 0 && !(params.top_p < 1.0f) && !(params.min_p > 0.0f)) {
    for (size_t i = 0; i < logits.size(); ++i)
      if (static_cast<double>(logits[i]) >= (race.best().logit - kLargestGumbel) * temperature) race.enter(entrant(static_cast<int>(i)));
    return race.best().token;
  }
  std::vector<Candidate> candidates = most_likely(logits, params.top_k);
  for (Candidate& c : candidates) c.logit *= inverse;
  keep_top_p(candidates, params.top_p);
  keep_min_p(candidates, params.min_p);
  for (const Candidate& c : candidates) race.enter(c);
  return race.best().token;
}

void add_logprobs(std::span<const float> logits, int n_top, Sampled& out) {
  uint64_t sum = 0;
  const float highest = *std::max_element(logits.begin(), logits.end());
  for (const float l : logits) sum += mass_of(static_cast<double>(highest) - static_cast<double>(l));
  const auto logprob = [&](float logit) { return logprob_of(logit, highest, sum); };
  out.logprob = logprob(logits[static_cast<size_t>(out.token)]);
  if (n_top <= 0) return;
  std::vector<Candidate> tokens = most_likely(logits, n_top);
  std::sort(tokens.begin(), tokens.end(), more_likely);
  for (const Candidate& c : tokens) out.top.push_back({c.token, logprob(logits[static_cast<size_t>(c.token)])});
}

}  // namespace

float logprob_of(float logit, float highest, uint64_t sum) {
  const double log_sum = std::log(static_cast<double>(sum)) - kMassBits * std::log(2.0);
  return static_cast<float>((static_cast<double>(logit) - static_cast<double>(highest)) - log_sum);
}

float sample_uniform(uint64_t seed, uint64_t step, uint32_t token) { return Uniform(seed, step).at(token); }

Sampled sample_token(std::span<const float> logits, const SampleParams& params) {
  Sampled out;
  bool sound = true, any = false;
  for (const float l : logits) {
    sound &= l <= std::numeric_limits<float>::max();
    any |= l != kForbidden;
  }
  if (!sound || !any) return {.finite = false};
  const bool plain = params.history.empty() && params.bias.empty() && params.allowed.empty();
  out.token = plain ? choose(logits, params) : choose(adjusted(logits, params), params);
  out.finite = out.token >= 0;
  if (out.finite && params.n_logprobs >= 0) add_logprobs(logits, params.n_logprobs, out);
  return out;
}

}  // namespace cachalot
