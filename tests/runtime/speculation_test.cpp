// Speculation: whatever is guessed, and however often it is wrong, texts stay as they are without it.
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "runtime/engine_core.h"
#include "runtime/ngram.h"
#include "shadow_model.h"

namespace cachalot::test {
namespace {

TEST(Ngram, GuessesWhatFollowedTheSameTokens) {
  NgramGuesser guesser;
  std::vector<int> text{1, 2, 3, 4, 5, 9, 2, 3};
  EXPECT_EQ(guesser.guess(text, 3), (std::vector<int>{4, 5, 9}));
  EXPECT_EQ(guesser.guess(text, 1), (std::vector<int>{4}));
  text.push_back(4);  // 2 3 4: three tokens that stood there before
  EXPECT_EQ(guesser.guess(text, 9), (std::vector<int>{5, 9, 2, 3, 4}));
  text.insert(text.end(), {7, 2, 3});  // the latest place counts
  EXPECT_EQ(guesser.guess(text, 2), (std::vector<int>{4, 7}));
  text.insert(text.end(), {100, 101});
  EXPECT_TRUE(guesser.guess(text, 2).empty());
  NgramGuesser fresh;
  EXPECT_TRUE(fresh.guess(std::vector<int>{5}, 4).empty());
}

// Guesses the token that will come, or in some cases another.
class GuessingModel final : public ShadowModel {
 public:
  GuessingModel(const ModelFacts& facts, double* clock, double right) : ShadowModel(facts, clock, {}), right_(right) {}
  [[nodiscard]] bool guesses() const override { return true; }
  void begin(std::span<const StepItem> items) override {
    items_.assign(items.begin(), items.end());
    ShadowModel::begin(items);
  }
  void guess(std::span<const GuessItem> items, std::span<std::vector<int>> out) override {
    ASSERT_EQ(items.size(), items_.size());
    for (size_t i = 0; i < items.size(); ++i) {
      EXPECT_LE(items[i].n_valid, items_[i].n_new);
      out[i].clear();
      uint64_t hash = 0;
      for (const int token : items_[i].sequence->tokens) hash = extended(hash, token);
      for (int n = 0; n < items[i].n_wanted; ++n) {
        const int next = next_token(hash, facts().vocab);
        out[i].push_back(std::uniform_real_distribution<double>()(rng_) < right_ ? next : (next + 1) % facts().vocab);
        hash = extended(hash, out[i].back());
      }
    }
  }

 private:
  double right_;
  std::mt19937_64 rng_{3};
  std::vector<StepItem> items_;
};

struct Outcome {
  std::map<RequestId, std::vector<int>> texts;
  std::map<RequestId, FinishReason> ends;
  EngineStats stats;
};

Outcome run(CoreOptions::Speculation speculation, double right, uint64_t seed) {
  ModelFacts facts{.name = "shadow", .vocab = 300, .eos_ids = {0}};
  facts.max_context = 128;
  facts.n_blocks = 40;
  facts.block_tokens = 8;
  facts.max_requests = 5;
  facts.max_step_tokens = 32;
  double clock = 0.0;
  CoreOptions options;
  options.check_invariants = true;
  options.speculation = speculation;
  EngineCore core(std::make_unique<GuessingModel>(facts, &clock, right), options, [&] { return clock; });
  std::mt19937_64 rng(seed);
  Outcome out;
  RequestId next = 1;
  std::mt19937_64 content(seed + 1000);  // apart from the arrivals, which depend on the number of steps
  const auto draw = [&](int n) { return static_cast<int>(content() % static_cast<uint64_t>(n)); };
  while (next <= 60 || core.has_work()) {
    if (next <= 60 && (rng() % 4 == 0 || !core.has_work())) {
      Request request;
      for (int i = 1 + draw(40); i > 0; --i) request.prompt.push_back(1 + draw(5));
      request.max_tokens = 1 + draw(60);
      request.priority = static_cast<Priority>(draw(3));
      if (draw(5) == 0) request.min_tokens = draw(20);
      if (draw(5) == 0) request.sampling.presence = 0.5f;
      if (draw(6) == 0) request.prompt_logprobs = 0;
      const RequestId id = next++;
      core.add(
          id, std::move(request),
          [&out](const TokenEvent& e) {
            if (e.token >= 0 && !e.is_end_token) out.texts[e.request].push_back(e.token);
            const bool first = e.finish == FinishReason::none || out.ends.emplace(e.request, e.finish).second;
            EXPECT_TRUE(first);
          },
          clock);
    }
    core.step();
  }
  out.stats = core.stats();
  return out;
}

class Speculation : public testing::TestWithParam<double> {};
TEST_P(Speculation, ChangesNoText) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const Outcome plain = run(CoreOptions::Speculation::off, 0.0, seed);
    const Outcome guessed = run(CoreOptions::Speculation::mtp, GetParam(), seed);
    EXPECT_TRUE(plain.texts == guessed.texts) << seed;
    EXPECT_TRUE(plain.ends == guessed.ends) << seed;
    EXPECT_EQ(plain.stats.drafted_tokens, 0);
    EXPECT_GT(guessed.stats.drafted_tokens, 0);
    EXPECT_LE(guessed.stats.accepted_tokens, guessed.stats.drafted_tokens);
    EXPECT_TRUE(GetParam() < 0.8 || guessed.stats.steps < plain.stats.steps);
    const Outcome by_ngrams = run(CoreOptions::Speculation::ngram, 0.0, seed);
    EXPECT_TRUE(plain.texts == by_ngrams.texts) << seed;
  }
}
INSTANTIATE_TEST_SUITE_P(Right, Speculation, testing::Values(0.0, 0.5, 0.95),
                         [](const auto& instance) { return "Percent" + std::to_string(static_cast<int>(100 * instance.param)); });

}  // namespace
}  // namespace cachalot::test
