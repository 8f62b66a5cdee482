// Generator: endings, limits, neighbours that must not matter, reuse of cached prefixes, and nothing left behind.
#include "runtime/generator.h"

#include <gtest/gtest.h>

#include <map>

#include "cpu/cpu_ops.h"
#include "support/golden.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

class GeneratorTest : public testing::Test {
 protected:
  GeneratorTest()
      : model_(load_model(testdata("golden/deepseek-v3"), make_cpu_ops({}))), golden_(read_golden(testdata("golden/deepseek-v3"))) {}

  [[nodiscard]] std::vector<int> prompt(int begin, int n) const {
    return {golden_.input_ids.begin() + begin, golden_.input_ids.begin() + begin + n};
  }
  [[nodiscard]] static GenerationRequest greedy(std::vector<int> prompt, int max_tokens) {
    GenerationRequest request{.prompt = std::move(prompt), .max_tokens = max_tokens, .ignore_eos = true};
    request.sampling.temperature = 0;
    return request;
  }
  // Runs to the end; the last event of each request.
  static std::map<int, GenerationEvent> finish(Generator& generator) {
    std::map<int, GenerationEvent> last;
    while (generator.step([&](const GenerationEvent& event) { last[event.request] = event; })) {
    }
    return last;
  }

  TestModel model_;
  Golden golden_;
};

TEST_F(GeneratorTest, StopsAtMaxTokens) {
  Generator generator(*model_.ops, model_.decoder, {.max_context = 64});
  const int id = generator.add(greedy(prompt(0, 16), 5));
  const auto last = finish(generator);
  EXPECT_EQ(last.at(id).finish, FinishReason::length);
  EXPECT_EQ(generator.sequence(id).tokens, std::vector<int>(golden_.greedy.begin(), golden_.greedy.begin() + 21));
}

TEST_F(GeneratorTest, EndTokenStopsAndIsNotPartOfTheText) {
  Generator generator(*model_.ops, model_.decoder, {.max_context = 64});
  GenerationRequest request = greedy(prompt(0, 16), 20);
  request.stop_tokens = {golden_.greedy[19]};
  const int id = generator.add(request);
  const auto last = finish(generator);
  EXPECT_EQ(last.at(id).finish, FinishReason::stop);
  EXPECT_TRUE(last.at(id).is_end_token);
  EXPECT_EQ(generator.sequence(id).n_tokens(), 19);
}

TEST_F(GeneratorTest, ConfiguredEndTokenIsHonouredUnlessIgnored) {
  TestModel model{make_cpu_ops({}), model_.config, {}};
  const auto checkpoint = Checkpoint::open(testdata("golden/deepseek-v3"));
  model.config.eos_ids = {7000 % golden_.vocab, golden_.greedy[18]};
  model.decoder = Decoder::load(*checkpoint, model.config, *model.ops);
  for (const bool ignore : {false, true}) {
    Generator generator(*model.ops, model.decoder, {.max_context = 64});
    GenerationRequest request = greedy(prompt(0, 16), 8);
    request.ignore_eos = ignore;
    const int id = generator.add(request);
    EXPECT_EQ(finish(generator).at(id).finish, ignore ? FinishReason::length : FinishReason::stop);
    EXPECT_EQ(generator.sequence(id).n_tokens(), ignore ? 24 : 18);
  }
}

TEST_F(GeneratorTest, FullContextEndsThatRequestOnly) {
  Generator generator(*model_.ops, model_.decoder, {.max_context = 64, .max_requests = 3, .chunk = 32});
  const int full = generator.add(greedy(prompt(0, 50), 100)), a = generator.add(greedy(prompt(3, 10), 30)),
            b = generator.add(greedy(prompt(7, 20), 30));
  const auto last = finish(generator);
  EXPECT_EQ(last.at(full).finish, FinishReason::length);
  EXPECT_EQ(generator.sequence(full).n_tokens(), 64);
  EXPECT_EQ(generator.sequence(a).n_tokens(), 40);
  EXPECT_EQ(generator.sequence(b).n_tokens(), 50);
}

TEST_F(GeneratorTest, RefusesPromptsThatCannotRun) {
  Generator generator(*model_.ops, model_.decoder, {.max_context = 32});
  EXPECT_NE(error_of([&] { generator.add(greedy({}, 1)); }).find("no tokens"), std::string::npos);
  const std::string too_long = error_of([&] { generator.add(greedy(prompt(0, 32), 1)); });
  EXPECT_NE(too_long.find("32 tokens"), std::string::npos) << too_long;
  EXPECT_NE(error_of([&] { generator.add(greedy({1, 100000}, 1)); }).find("100000"), std::string::npos);
  generator.add(greedy({1, 2}, 1));
  EXPECT_NE(error_of([&] { generator.add(greedy({1, 2}, 1)); }).find("limit"), std::string::npos);
}

TEST_F(GeneratorTest, SeedsRepeatAndNeighboursDoNotMatter) {
  const auto run = [&](int n_neighbours, uint64_t seed) {
    Generator generator(*model_.ops, model_.decoder, {.max_context = 96, .max_requests = 6, .chunk = 24});
    for (int i = 0; i < n_neighbours; ++i) {
      GenerationRequest other{.prompt = prompt(i, 9 + 11 * i), .max_tokens = 13 + i, .ignore_eos = true};
      other.sampling.seed = 99;
      generator.add(other);
    }
    GenerationRequest request{.prompt = prompt(2, 30), .max_tokens = 20, .ignore_eos = true};
    request.sampling = {.temperature = 0.9f, .top_p = 0.95f, .repetition = 1.1f, .top_k = 40, .seed = seed};
    const int id = generator.add(request);
    finish(generator);
    return generator.sequence(id).tokens;
  };
  const auto alone = run(0, 5);
  EXPECT_EQ(run(0, 5), alone);
  EXPECT_EQ(run(3, 5), alone);
  EXPECT_EQ(run(5, 5), alone);
  EXPECT_NE(run(0, 6), alone);
}

TEST_F(GeneratorTest, ReusedPrefixGivesTheSameTextAsAFreshRun) {
  Generator generator(*model_.ops, model_.decoder, {.max_context = 128, .chunk = 16});
  const int first = generator.add(greedy(prompt(0, 30), 12));
  finish(generator);
  std::vector<int> next = generator.sequence(first).tokens;
  next[38] = (next[38] + 1) % golden_.vocab;  // differs in the middle of the first answer
  next.insert(next.end(), golden_.input_ids.begin() + 50, golden_.input_ids.begin() + 70);
  GenerationRequest request = greedy(next, 10);
  request.reuse = first;
  const int second = generator.add(request);
  EXPECT_EQ(generator.prompt_reused(second), 38);
  finish(generator);
  Generator fresh(*model_.ops, model_.decoder, {.max_context = 128, .chunk = 16});
  const int id = fresh.add(greedy(next, 10));
  finish(fresh);
  EXPECT_EQ(generator.sequence(second).tokens, fresh.sequence(id).tokens);
}

TEST_F(GeneratorTest, CancelledAndForgottenRequestsLeaveNoBlocks) {
  Generator generator(*model_.ops, model_.decoder, {.max_context = 96, .max_requests = 4, .chunk = 16, .block_tokens = 8});
  const int n_free = generator.cache().pool().n_free();
  for (int round = 0; round < 50; ++round) {
    std::vector<int> ids;
    for (int i = 0; i < 4; ++i) ids.push_back(generator.add(greedy(prompt(i, 5 + 17 * i), 10)));
    for (int s = 0; s < round % 7; ++s) generator.step([](const GenerationEvent&) {});
    std::map<int, GenerationEvent> last;
    for (const int id : ids) generator.cancel(id);
    while (generator.step([&](const GenerationEvent& event) { last[event.request] = event; })) {
    }
    for (const int id : ids) {
      if (last.contains(id)) {
        EXPECT_EQ(last[id].finish, FinishReason::cancelled);
      }
      generator.forget(id);
    }
    ASSERT_EQ(generator.cache().pool().n_free(), n_free);
  }
}

TEST_F(GeneratorTest, LogprobsBiasAndPenalties) {
  Generator generator(*model_.ops, model_.decoder, {.max_context = 64});
  GenerationRequest request = greedy(prompt(0, 16), 1);
  request.sampling.n_logprobs = 3;
  request.sampling.bias = {{golden_.greedy[16], -INFINITY}};
  const int id = generator.add(request);
  const auto last = finish(generator);
  const Sampled& s = last.at(id).sampled;
  ASSERT_EQ(s.top.size(), 3u);
  EXPECT_EQ(s.top[0].token, golden_.greedy[16]);  // of the raw logits
  EXPECT_EQ(s.token, s.top[1].token);
  EXPECT_FLOAT_EQ(s.logprob, s.top[1].logprob);
}

TEST(MlaFormChoice, FollowsTheCountOfOperations) {
  const MlaDims v3{128, 128, 64, 128, 512};
  EXPECT_FALSE(prefers_expanded(v3, 1, 4096));
  EXPECT_FALSE(prefers_expanded(v3, 170, 1 << 20));
  EXPECT_TRUE(prefers_expanded(v3, 172, 1 << 20));
  EXPECT_TRUE(prefers_expanded(v3, 8, 0));
}

}  // namespace
}  // namespace cachalot::test
