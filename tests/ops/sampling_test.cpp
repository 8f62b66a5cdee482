// Sampling: the generator's published values, the order and effect of each setting, and the distribution of the draws.
#include "ops/sampling.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>

#include "ops/ref_ops.h"
#include "ops/sampling_math.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::map<int, int> draws(const std::vector<float>& logits, SampleParams params, int n) {
  std::map<int, int> counts;
  for (int i = 0; i < n; ++i) {
    params.step = static_cast<uint64_t>(i);
    ++counts[sample_token(logits, params).token];
  }
  return counts;
}
std::set<int> tokens_drawn(const std::vector<float>& logits, const SampleParams& params, int n = 3000) {
  std::set<int> tokens;
  for (const auto& [token, count] : draws(logits, params, n)) tokens.insert(token);
  return tokens;
}
std::vector<float> logs(std::vector<float> probabilities) {
  for (float& p : probabilities) p = std::log(p);
  return probabilities;
}
int greedy(const std::vector<float>& logits, SampleParams params = {}) {
  params.temperature = 0.0f;
  return sample_token(logits, params).token;
}

// Chi-square of `counts` against the expected probabilities, and a bound that a right sampler passes 9999 times of 10000 or so
// (Wilson and Hilferty's approximation at 3.7 standard deviations).
void expect_distribution(const std::map<int, int>& counts, const std::vector<double>& expected, int n) {
  double chi_square = 0.0;
  int cells = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto found = counts.find(static_cast<int>(i));
    const double count = found == counts.end() ? 0.0 : found->second, mean = expected[i] * n;
    if (expected[i] == 0.0) {
      EXPECT_EQ(count, 0.0) << i;
      continue;
    }
    chi_square += (count - mean) * (count - mean) / mean;
    ++cells;
  }
  const double k = cells - 1, bound = k * std::pow(1.0 - 2.0 / (9.0 * k) + 3.7 * std::sqrt(2.0 / (9.0 * k)), 3);
  EXPECT_LT(chi_square, bound);
}

TEST(SampleUniform, IsPhilox4x32With10Rounds) {
  const uint32_t zero_key[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};  // Random123's known answers for counter and key 0
  for (uint32_t i = 0; i < 4; ++i) EXPECT_EQ(sample_uniform(0, 0, i), (static_cast<float>(zero_key[i] >> 9) + 0.5f) * 0x1p-23f);
  EXPECT_EQ(sample_uniform(0x299f31d0a4093822u, 0x0370734413198a2eu, 129279), 0.8958427309989929f);
}

TEST(SampleUniform, StaysInsideTheInterval) {
  double sum = 0.0;
  for (uint32_t i = 0; i < 100000; ++i) {
    const float u = sample_uniform(7, i / 1000, i);
    ASSERT_TRUE(u > 0.0f && u < 1.0f);
    sum += static_cast<double>(u);
  }
  EXPECT_NEAR(sum / 100000, 0.5, 0.004);
}

TEST(Greedy, TakesTheLargestAndOfEqualsTheLowest) {
  EXPECT_EQ(greedy({0.0f, 2.0f, 1.0f, 2.0f}), 1);
  EXPECT_EQ(greedy(std::vector<float>(9, -3.0f)), 0);
  EXPECT_EQ(greedy({-kInf, -kInf, -5.0f}), 2);
}

TEST(Sampled, NotFiniteLogitsAreReported) {
  for (const float temperature : {0.0f, 1.0f})
    for (const std::vector<float>& logits : {std::vector<float>{1.0f, kNan}, {kNan, 1.0f}, {1.0f, kInf}, {-kInf, -kInf}, {}}) {
      const Sampled s = sample_token(logits, {.temperature = temperature});
      EXPECT_FALSE(s.finite);
      EXPECT_EQ(s.token, -1);
    }
  const TokenBias forbid_all[] = {{0, -kInf}, {1, -kInf}};
  EXPECT_FALSE(sample_token(std::vector<float>{1.0f, 2.0f}, {.bias = forbid_all}).finite);
}

TEST(Sampled, FollowsTheSoftmax) {
  const std::vector<float> logits{1.0f, 0.0f, -1.0f, 2.0f, 0.5f, -kInf, -2.0f};
  for (const float temperature : {0.7f, 1.0f, 2.0f}) {
    std::vector<double> p;
    double sum = 0.0;
    for (const float l : logits) sum += p.emplace_back(std::exp(static_cast<double>(l) / static_cast<double>(temperature)));
    for (double& v : p) v /= sum;
    expect_distribution(draws(logits, {.temperature = temperature, .seed = 42}, 20000), p, 20000);
  }
}

TEST(Sampled, UniformOverManyTokens) {
  std::vector<double> p(500, 1.0 / 500);
  expect_distribution(draws(std::vector<float>(500, 3.0f), {.seed = 5}, 50000), p, 50000);
}

TEST(Sampled, TheSeedAndStepAloneDecide) {
  const auto logits = random_floats(2000, 3);
  std::vector<int> first, again, other;
  for (uint64_t step = 0; step < 50; ++step) {
    first.push_back(sample_token(logits, {.seed = 9, .step = step}).token);
    again.push_back(sample_token(logits, {.seed = 9, .step = step}).token);
    other.push_back(sample_token(logits, {.seed = 10, .step = step}).token);
  }
  EXPECT_EQ(first, again);
  EXPECT_NE(first, other);
  EXPECT_GT(std::set<int>(first.begin(), first.end()).size(), 20u);
}

TEST(Sampled, IsTheWinnerOfTheWholeRace) {  // the bounds that spare most tokens a logarithm must not change the winner
  for (const float size : {0.0f, 0.5f, 3.0f, 20.0f})
    for (uint64_t step = 0; step < 200; ++step) {
      const auto logits = random_floats(257, step, size);
      int winner = -1;
      double best = -HUGE_VAL;
      for (uint32_t i = 0; i < logits.size(); ++i) {
        const double entry = static_cast<double>(logits[i]) - std::log(-std::log(static_cast<double>(sample_uniform(17, step, i))));
        if (entry > best) best = entry, winner = static_cast<int>(i);
      }
      ASSERT_EQ(sample_token(logits, {.seed = 17, .step = step}).token, winner) << size << " " << step;
    }
}

TEST(Sampled, AShiftOfAllLogitsChangesNothing) {
  auto logits = random_floats(300, 4);
  std::vector<float> shifted;
  for (float& l : logits) {
    l = std::round(l * 64.0f) / 64.0f;  // so that the shift is exact
    shifted.push_back(l + 128.0f);
  }
  for (uint64_t step = 0; step < 100; ++step)
    EXPECT_EQ(sample_token(logits, {.seed = 1, .step = step}).token, sample_token(shifted, {.seed = 1, .step = step}).token);
}

TEST(Sampled, ATinyTemperatureIsGreedy) {
  auto logits = random_floats(1000, 8);
  for (const float temperature : {1e-6f, 1e-38f, 1e-45f})
    for (uint64_t step = 0; step < 20; ++step)
      EXPECT_EQ(sample_token(logits, {.temperature = temperature, .step = step}).token, greedy(logits));
}

TEST(TopK, KeepsTheMostLikelyAndOfEqualsTheLowest) {
  const std::vector<float> logits{0.0f, 1.0f, 0.5f, 1.0f, 1.0f, -1.0f};
  EXPECT_EQ(tokens_drawn(logits, {.top_k = 1}), (std::set<int>{1}));
  EXPECT_EQ(tokens_drawn(logits, {.top_k = 2}), (std::set<int>{1, 3}));
  EXPECT_EQ(tokens_drawn(logits, {.top_k = 4}), (std::set<int>{1, 2, 3, 4}));
  EXPECT_EQ(tokens_drawn(logits, {.top_k = 0}).size(), 6u);
  EXPECT_EQ(tokens_drawn(logits, {.top_k = 100}).size(), 6u);
}

TEST(TopP, IsTheSmallestSetWithThatProbability) {
  const auto logits = logs({0.1f, 0.4f, 0.05f, 0.25f, 0.2f});
  EXPECT_EQ(tokens_drawn(logits, {.top_p = 0.0f}), (std::set<int>{1}));
  EXPECT_EQ(tokens_drawn(logits, {.top_p = 0.39f}), (std::set<int>{1}));
  EXPECT_EQ(tokens_drawn(logits, {.top_p = 0.41f}), (std::set<int>{1, 3}));
  EXPECT_EQ(tokens_drawn(logits, {.top_p = 0.8f}), (std::set<int>{1, 3, 4}));
  EXPECT_EQ(tokens_drawn(logits, {.top_p = 0.96f}).size(), 5u);
  EXPECT_EQ(tokens_drawn(logits, {.top_p = 1.0f}).size(), 5u);
  // After top-k the remaining probabilities are 0.4 / 0.65 and 0.25 / 0.65.
  EXPECT_EQ(tokens_drawn(logits, {.top_k = 2, .top_p = 0.61f}), (std::set<int>{1}));
  EXPECT_EQ(tokens_drawn(logits, {.top_k = 2, .top_p = 0.62f}), (std::set<int>{1, 3}));
}

TEST(TopP, OverManyEqualTokensTakesTheLowestIds) {  // more than are sorted at a time
  const auto tokens = tokens_drawn(std::vector<float>(1000, 0.0f), {.top_p = 0.25f}, 20000);
  EXPECT_EQ(tokens.size(), 250u);
  EXPECT_EQ(*tokens.rbegin(), 249);
}

TEST(MinP, DropsWhatIsUnlikelyBesideTheMostLikely) {
  const auto logits = logs({0.1f, 0.4f, 0.05f, 0.25f, 0.2f});
  EXPECT_EQ(tokens_drawn(logits, {.min_p = 0.3f}), (std::set<int>{1, 3, 4}));
  EXPECT_EQ(tokens_drawn(logits, {.min_p = 0.2f}), (std::set<int>{0, 1, 3, 4}));
  EXPECT_EQ(tokens_drawn(logits, {.min_p = 1.0f}), (std::set<int>{1}));
}

TEST(Filters, LeaveTheRelativeProbabilities) {
  const auto logits = logs({0.1f, 0.4f, 0.05f, 0.25f, 0.2f});
  expect_distribution(draws(logits, {.top_p = 0.8f, .seed = 3}, 20000), {0.0, 0.4 / 0.85, 0.0, 0.25 / 0.85, 0.2 / 0.85}, 20000);
}

TEST(Penalties, RepetitionDividesPositiveAndMultipliesNegative) {
  const TokenCount history[] = {{0, 1, 0}, {2, 0, 2}};
  const SampleParams params{.repetition = 2.0f, .history = history};
  EXPECT_EQ(greedy({3.0f, 1.6f, 0.0f}, params), 1);  // 3 / 2 < 1.6
  EXPECT_EQ(greedy({3.0f, 1.4f, 0.0f}, params), 0);
  EXPECT_EQ(greedy({-5.0f, -1.9f, -1.0f}, params), 1);  // -1 * 2 < -1.9
  EXPECT_EQ(greedy({-5.0f, -2.1f, -1.0f}, params), 2);
}

TEST(Penalties, PresenceOnceAndFrequencyPerOccurrenceInTheOutputOnly) {
  const TokenCount history[] = {{0, 5, 0}, {1, 1, 3}};
  EXPECT_EQ(greedy({1.0f, 1.4f, 0.0f}, {.presence = 0.5f, .history = history}), 0);    // 0.9
  EXPECT_EQ(greedy({1.0f, 1.6f, 0.0f}, {.presence = 0.5f, .history = history}), 1);    // 1.1
  EXPECT_EQ(greedy({1.0f, 2.4f, 0.0f}, {.frequency = 0.5f, .history = history}), 0);   // 0.9
  EXPECT_EQ(greedy({1.0f, 2.6f, 0.0f}, {.frequency = 0.5f, .history = history}), 1);   // 1.1
  EXPECT_EQ(greedy({1.0f, 0.5f, 0.0f}, {.frequency = -0.5f, .history = history}), 1);  // a negative penalty encourages
}

TEST(Penalties, UnknownTokensAreIgnored) {
  const TokenCount history[] = {{-1, 1, 1}, {99, 1, 1}};
  const TokenBias bias[] = {{-1, 5.0f}, {2, 5.0f}};
  EXPECT_EQ(greedy({0.0f, 1.0f}, {.repetition = 2.0f, .history = history, .bias = bias}), 1);
}

TEST(Bias, AddsAndForbids) {
  const TokenBias bias[] = {{0, 100.0f}, {1, -kInf}};
  EXPECT_EQ(greedy({0.0f, 50.0f, 90.0f}, {.bias = bias}), 0);
  const TokenBias forbid[] = {{1, -kInf}};
  EXPECT_EQ(tokens_drawn({0.0f, 50.0f, 0.1f}, {.bias = forbid}), (std::set<int>{0, 2}));
  const TokenBias force[] = {{2, kInf}};
  EXPECT_EQ(tokens_drawn({0.0f, 50.0f, 0.1f}, {.bias = force}), (std::set<int>{2}));
}

TEST(Allowed, OnlyTokensOfTheMaskAreDrawn) {
  std::vector<float> logits(70, 0.0f);
  logits[3] = 9.0f;
  const std::vector<uint32_t> mask{1u << 5 | 1u << 31, 1u << 1};  // tokens 5, 31, 33; from 64 on: nothing is said, so none
  std::set<int> drawn;
  for (uint64_t step = 0; step < 200; ++step) drawn.insert(sample_token(logits, {.step = step, .allowed = mask}).token);
  EXPECT_EQ(drawn, (std::set<int>{5, 31, 33}));
  EXPECT_EQ(sample_token(logits, {.temperature = 0.0f, .allowed = mask}).token, 5);
  const std::vector<uint32_t> none(3, 0u);
  EXPECT_FALSE(sample_token(logits, {.allowed = none}).finite);
}

TEST(Logprobs, AreOfTheRawLogits) {
  const auto logits = logs({0.1f, 0.4f, 0.05f, 0.25f, 0.2f});
  const TokenBias bias[] = {{2, 50.0f}};
  const Sampled s = sample_token(logits, {.temperature = 0.3f, .top_k = 1, .bias = bias, .n_logprobs = 3});
  EXPECT_EQ(s.token, 2);
  EXPECT_NEAR(s.logprob, std::log(0.05), 1e-6);
  ASSERT_EQ(s.top.size(), 3u);
  for (const auto& [i, token, p] : {std::tuple{0u, 1, 0.4}, {1u, 3, 0.25}, {2u, 4, 0.2}}) {
    EXPECT_EQ(s.top[i].token, token);
    EXPECT_NEAR(s.top[i].logprob, std::log(p), 1e-6);
  }
  EXPECT_TRUE(sample_token(logits, {.n_logprobs = 0}).top.empty());
  EXPECT_EQ(sample_token(std::vector<float>{1.0f, -kInf}, {.n_logprobs = 5}).top.size(), 1u);
}

TEST(Logprobs, OfHugeLogitsAreFinite) {
  const Sampled s = sample_token(std::vector<float>{3e38f, 3e38f, -3e38f}, {.temperature = 0.0f, .n_logprobs = 1});
  EXPECT_NEAR(s.logprob, std::log(0.5), 1e-6);
}

TEST(SampleOp, RowsDoNotInfluenceEachOther) {
  RefOps ops;
  auto logits = random_floats(3 * 400, 11, 2.0f);
  logits[400] = kNan;
  const SampleParams params[3] = {{.seed = 1, .step = 4}, {.seed = 2}, {.temperature = 0.5f, .top_p = 0.9f, .seed = 3, .n_logprobs = 1}};
  Sampled out[3];
  ops.sample(View::matrix(logits.data(), DType::f32, 3, 400), params, out);
  EXPECT_FALSE(out[1].finite);
  for (const size_t r : {0u, 2u}) {
    const Sampled alone = sample_token(std::span<const float>(logits).subspan(400 * r, 400), params[r]);
    EXPECT_EQ(out[r].token, alone.token);
    EXPECT_EQ(out[r].logprob, alone.logprob);
  }
}

// The arithmetic that all devices share is as good as the library's.
TEST(SamplingMath, LogarithmsAndMasses) {
  std::mt19937_64 random(5);
  std::uniform_real_distribution<double> exponent(-60.0, 10.0), behind(0.0, 40.0);
  for (int i = 0; i < 200000; ++i) {
    const double x = std::exp(exponent(random)), near_one = 1.0 - std::exp2(-1.0 - std::abs(exponent(random)) / 2.0);
    ASSERT_NEAR(sampling::log_of(x), std::log(x), 4e-16 * std::max(1.0, std::abs(std::log(x)))) << x;
    ASSERT_NEAR(sampling::log_of(near_one) / std::log(near_one), 1.0, 5e-16) << near_one;
    const double b = behind(random);
    ASSERT_NEAR(static_cast<double>(sampling::mass_of(b)), std::exp(-b) * 0x1p46, 0.6) << b;
  }
  EXPECT_EQ(sampling::mass_of(0.0), uint64_t{1} << 46);
  EXPECT_EQ(sampling::mass_of(kInf), 0u);
  EXPECT_EQ(sampling::mass_of(kNan), 0u);
}

TEST(SamplingMath, NeighboursInRankDoNotGrowLighter) {
  std::mt19937_64 random(6);
  std::uniform_real_distribution<double> behind(0.0, 35.0);
  for (int i = 0; i < 100000; ++i) {
    const double b = behind(random), further = b + 1e-9 * behind(random);
    ASSERT_GE(sampling::mass_of(b) + 1, sampling::mass_of(further)) << b;
  }
}

}  // namespace
}  // namespace cachalot::test
