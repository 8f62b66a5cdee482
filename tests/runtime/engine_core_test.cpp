// EngineCore: endings, constraints, scores, failures, and what the prefix cache gives back.
#include "runtime/engine_core.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core_rig.h"

namespace cachalot::test {
namespace {

Request endless(std::vector<int> prompt, int max_tokens) {
  return {.prompt = std::move(prompt), .max_tokens = max_tokens, .ignore_eos = true};
}

TEST(EngineCore, EndsAtMaxTokens) {
  CoreRig rig;
  const auto prompt = some_prompt(20, 1);
  const RequestId id = rig.add(endless(prompt, 7));
  rig.run();
  EXPECT_EQ(rig.text(id), foretold(prompt, 7));
  EXPECT_EQ(rig.last(id).finish, FinishReason::length);
  EXPECT_EQ(rig.last(id).usage.n_output, 7);
  EXPECT_GT(rig.last(id).usage.first_token_seconds, 0.0);
}

TEST(EngineCore, FullContextEndsThatRequestOnly) {
  ModelFacts facts = small_facts();
  facts.max_context = 64;
  CoreRig rig(facts);
  const RequestId full = rig.add(endless(some_prompt(50, 1), 100)), a = rig.add(endless(some_prompt(10, 2), 30)),
                  b = rig.add(endless(some_prompt(20, 3), 30));
  rig.run();
  EXPECT_EQ(rig.last(full).finish, FinishReason::length);
  EXPECT_EQ(rig.text(full).size(), 14u);
  EXPECT_EQ(rig.text(a).size(), 30u);
  EXPECT_EQ(rig.text(b).size(), 30u);
}

TEST(EngineCore, EndAndStopTokensAreNotPartOfTheTextAndCount) {
  CoreRig rig;
  const auto prompt = some_prompt(9, 4);
  Request request{.prompt = prompt, .stop_tokens = {foretold(prompt, 5)[4]}};
  const RequestId id = rig.add(std::move(request));
  rig.run();
  EXPECT_EQ(rig.text(id), foretold(prompt, 4));
  EXPECT_TRUE(rig.last(id).is_end_token);
  EXPECT_EQ(rig.last(id).finish, FinishReason::stop);
  EXPECT_EQ(rig.last(id).usage.n_output, 5);
}

TEST(EngineCore, NoEndBeforeMinTokens) {
  CoreRig rig;
  const auto prompt = some_prompt(9, 4);
  const int third = foretold(prompt, 3)[2];
  Request request{.prompt = prompt, .max_tokens = 8, .min_tokens = 3, .stop_tokens = {third}};
  const RequestId id = rig.add(request);
  request.min_tokens = 2;
  const RequestId early = rig.add(request);
  rig.run();
  EXPECT_EQ(rig.text(early).size(), 2u);
  EXPECT_GT(rig.text(id).size(), 2u);
  EXPECT_EQ(rig.text(id)[2], third + 1);  // the shadow's second choice
}

TEST(EngineCore, NoTokensWantedEndsAtOnce) {
  CoreRig rig;
  const RequestId id = rig.add(endless(some_prompt(9, 4), 0));
  rig.run();
  ASSERT_EQ(rig.events[id].size(), 1u);
  EXPECT_EQ(rig.last(id).token, -1);
  EXPECT_EQ(rig.last(id).finish, FinishReason::length);
  EXPECT_EQ(rig.model->n_rows, 0);
}

TEST(EngineCore, ScoresThePromptInPieces) {
  ModelFacts facts = small_facts();
  facts.max_scored_rows = 5;
  CoreRig rig(facts);
  for (const int max_tokens : {0, 3}) {
    Request request = endless(some_prompt(21, 5), max_tokens);
    request.prompt_logprobs = 2;
    const auto prompt = request.prompt;
    rig.add(request);  // twice: the second finds the prefix of the first, and must not use it
    rig.run();
    const RequestId id = rig.add(request);
    rig.run();
    const auto& scores = rig.events[id].front().prompt_logprobs;
    ASSERT_EQ(scores.size(), 20u);
    for (size_t i = 0; i < scores.size(); ++i) {
      ASSERT_EQ(scores[i].size(), 3u);
      EXPECT_EQ(scores[i][0].token, prompt[i + 1]);
      EXPECT_FLOAT_EQ(scores[i][0].logprob, -2.0f);
    }
    EXPECT_EQ(rig.last(id).usage.n_output, max_tokens);
  }
}

class EvenOnly final : public TokenConstraint {
 public:
  explicit EvenOnly(int n_accepted) : n_left_(n_accepted) {}
  std::span<const uint32_t> allowed() override { return mask_; }
  bool accept(int token) override { return token % 2 == 0 && n_left_-- > 0; }

 private:
  std::vector<uint32_t> mask_ = std::vector<uint32_t>(32, 0x55555500u);
  int n_left_;
};

TEST(EngineCore, AConstraintChoosesAndARefusalEndsItsRequestOnly) {
  CoreRig rig;
  Request request = endless(some_prompt(9, 6), 20);
  request.constraint = std::make_shared<EvenOnly>(4);
  const RequestId id = rig.add(std::move(request)), other = rig.add(endless(some_prompt(9, 7), 10));
  rig.run();
  EXPECT_EQ(rig.text(id), (std::vector<int>{8, 8, 8, 8}));
  EXPECT_EQ(rig.last(id).finish, FinishReason::error);
  EXPECT_NE(rig.last(id).error.find("constraint"), std::string::npos);
  EXPECT_EQ(rig.text(other).size(), 10u);
}

// Token 8 as often as told, then nothing but token 0, which ends texts.
class EightsThenEnd final : public TokenConstraint {
 public:
  explicit EightsThenEnd(int n_eights) : n_left_(n_eights) {}
  std::span<const uint32_t> allowed() override {
    mask_[0] = n_left_ > 0 ? 1u << 8 : 1u;
    return mask_;
  }
  bool accept(int token) override { return token == (n_left_-- > 0 ? 8 : 0); }

 private:
  std::vector<uint32_t> mask_ = std::vector<uint32_t>(32);
  int n_left_;
};

TEST(EngineCore, ATextThatCanOnlyEndDoesSoBeforeMinTokens) {
  CoreRig rig;
  Request request{.prompt = some_prompt(9, 6), .max_tokens = 20, .min_tokens = 10};
  request.constraint = std::make_shared<EightsThenEnd>(3);
  const RequestId id = rig.add(std::move(request));
  rig.run();
  EXPECT_EQ(rig.text(id), (std::vector<int>{8, 8, 8}));
  EXPECT_EQ(rig.last(id).finish, FinishReason::stop) << rig.last(id).error;
}

TEST(EngineCore, ABiasThatForbidsWhatTheConstraintAllowsIsNamed) {
  CoreRig rig;
  Request request = endless(some_prompt(9, 6), 20);
  request.sampling.bias = {{8, -std::numeric_limits<float>::infinity()}};
  request.constraint = std::make_shared<EightsThenEnd>(3);
  const RequestId id = rig.add(std::move(request));
  rig.run();
  EXPECT_EQ(rig.last(id).finish, FinishReason::error);
  EXPECT_NE(rig.last(id).error.find("logit_bias"), std::string::npos) << rig.last(id).error;
  EXPECT_TRUE(rig.last(id).request_at_fault);
}

TEST(EngineCore, LogitsThatAreNotFiniteEndOneRequest) {
  CoreRig rig;
  const RequestId a = rig.add(endless(some_prompt(5, 1), 10)), b = rig.add(endless(some_prompt(5, 2), 10));
  rig.model->not_finite_in = 4;
  rig.run();
  EXPECT_EQ(rig.last(a).finish, FinishReason::error);
  EXPECT_FALSE(rig.last(a).error.empty());
  EXPECT_EQ(rig.last(b).finish, FinishReason::length);
  EXPECT_EQ(rig.text(b), foretold(some_prompt(5, 2), 10));
}

TEST(EngineCore, AFailedStepEndsItsRequestsAndTheEngineGoesOn) {
  CoreRig rig;
  const RequestId a = rig.add(endless(some_prompt(20, 1), 10));
  rig.model->fail_in = 3;
  rig.run();
  EXPECT_EQ(rig.last(a).finish, FinishReason::error);
  EXPECT_EQ(rig.last(a).error, "the device is gone");
  const RequestId b = rig.add(endless(some_prompt(20, 1), 10));
  rig.run();
  EXPECT_EQ(rig.text(b), foretold(some_prompt(20, 1), 10));
  EXPECT_EQ(rig.core->pool().n_free(), rig.core->pool().n_blocks());
}

TEST(EngineCore, DeadlinesEndRunningAndWaitingRequests) {
  ModelFacts facts = small_facts();
  facts.max_requests = 1;
  CoreRig rig(facts);
  Request request = endless(some_prompt(5, 1), -1);
  request.timeout_seconds = 0.02;
  const RequestId running = rig.add(request), waiting = rig.add(request), unlimited = rig.add(endless(some_prompt(5, 1), 3));
  rig.run();
  EXPECT_EQ(rig.last(running).finish, FinishReason::timeout);
  EXPECT_EQ(rig.last(waiting).finish, FinishReason::timeout);
  EXPECT_GT(rig.text(running).size(), 3u);
  EXPECT_TRUE(rig.text(waiting).empty());
  EXPECT_LT(rig.times[running].back(), 0.025);
  EXPECT_EQ(rig.last(unlimited).finish, FinishReason::length);
}

TEST(EngineCore, TheNextTurnGoesOnFromTheAnswerToTheExactToken) {
  CoreRig rig;
  auto prompt = some_prompt(30, 1);
  const RequestId first = rig.add(endless(prompt, 15));
  rig.run();
  auto turn = prompt;
  for (const int token : rig.text(first)) turn.push_back(token);
  const int n_known = static_cast<int>(turn.size()) - 1;  // the last token of the answer was never run
  auto same = turn;
  for (const int token : some_prompt(20, 2)) same.push_back(token);
  const RequestId second = rig.add(endless(same, 5));
  rig.run();
  EXPECT_EQ(rig.last(second).usage.n_cached, n_known);
  EXPECT_EQ(rig.text(second), foretold(same, 5));
  // A token of the answer that is encoded differently costs what comes after it, not the answer.
  auto other = same;
  other[37] = other[37] % 999 + 1;
  const RequestId third = rig.add(endless(other, 5));
  rig.run();
  EXPECT_EQ(rig.last(third).usage.n_cached, 37);
  EXPECT_EQ(rig.text(third), foretold(other, 5));
}

TEST(EngineCore, AtLeastOnePromptTokenIsRun) {
  CoreRig rig;
  for (const int n : {16, 17, 23}) {
    const auto prompt = some_prompt(n, n);
    rig.add(endless(prompt, 3));
    rig.run();
    const int64_t before = rig.model->n_rows;
    const RequestId again = rig.add(endless(prompt, 1));
    rig.run();
    EXPECT_EQ(rig.last(again).usage.n_cached, n - 1);
    EXPECT_EQ(rig.model->n_rows - before, 1);
    EXPECT_EQ(rig.text(again), foretold(prompt, 1));
  }
}

TEST(EngineCore, PrefixesAreSharedWithinASaltOnly) {
  CoreRig rig;
  const auto cached = [&](const std::string& salt, bool use) {
    Request request = endless(some_prompt(40, 1), 1);
    request.cache_salt = salt;
    request.use_prefix_cache = use;
    const RequestId id = rig.add(std::move(request));
    rig.run();
    return rig.last(id).usage.n_cached;
  };
  EXPECT_EQ(cached("private", false), 0);
  EXPECT_EQ(cached("private", true), 0);  // the one before fed nothing
  EXPECT_EQ(cached("private", true), 39);
  EXPECT_EQ(cached("", true), 0);
  EXPECT_EQ(cached("private", false), 0);
}

TEST(EngineCore, EqualPrefixesThatRunTogetherAreKeptOnce) {
  CoreRig rig;
  for (int i = 0; i < 4; ++i) rig.add(endless(some_prompt(40, 1), 30));
  rig.run(12);
  EXPECT_LT(rig.core->stats().blocks_used, 5 + 4 * 4);
  EXPECT_GE(rig.core->stats().blocks_used, 5);
  rig.run();
  for (RequestId id = 1; id <= 4; ++id) EXPECT_EQ(rig.text(id), foretold(some_prompt(40, 1), 30));
}

TEST(EngineCore, StatisticsAddUp) {
  CoreRig rig;
  rig.add(endless(some_prompt(20, 1), 5));
  Request failing = endless(some_prompt(20, 2), 50);
  failing.priority = Priority::batch;
  failing.timeout_seconds = 0.01;
  rig.add(std::move(failing));
  const RequestId cancelled = rig.add(endless(some_prompt(20, 3), 50));
  rig.core->step();
  EXPECT_EQ(rig.core->stats().classes[0].running, 2);
  rig.core->cancel(cancelled);
  rig.run();
  const EngineStats stats = rig.core->stats();
  EXPECT_EQ(stats.classes[0].finished, 1);
  EXPECT_EQ(stats.classes[0].cancelled, 1);
  EXPECT_EQ(stats.classes[1].failed, 1);
  EXPECT_EQ(stats.prompt_tokens, 60);
  EXPECT_EQ(stats.blocks_used, 0);
  EXPECT_EQ(stats.blocks_total, 64);
}

}  // namespace
}  // namespace cachalot::test
