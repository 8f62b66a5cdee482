// Steps that are started before the tokens of the step before are known: the same tokens, endings and counts as one step at a time gives,
// pages and the prefix cache as if the surplus rows had never been, and one step at a time wherever a step is not certain.
#include <gtest/gtest.h>

#include <cmath>

#include "core_rig.h"

namespace cachalot::test {
namespace {

ModelFacts facts_of(bool follows) {
  ModelFacts facts = small_facts();
  facts.max_requests = 8;
  facts.n_blocks = 128;
  facts.runs_ahead = facts.follows = follows;
  return facts;
}

Request endless(std::vector<int> prompt, int max_tokens) {
  return {.prompt = std::move(prompt), .max_tokens = max_tokens, .ignore_eos = true};
}

// A request that token number n (from 1) of its answer ends.
Request stopping(std::vector<int> prompt, int n) {
  Request request = endless(std::move(prompt), 40);
  request.stop_tokens = {foretold(request.prompt, n).back()};
  return request;
}

void expect_same(const std::vector<TokenEvent>& one, const std::vector<TokenEvent>& other) {
  ASSERT_EQ(one.size(), other.size());
  for (size_t i = 0; i < one.size(); ++i) {
    const TokenEvent &a = one[i], &b = other[i];
    EXPECT_EQ(a.token, b.token) << i;
    EXPECT_EQ(a.logprob, b.logprob);
    EXPECT_EQ(a.top.size(), b.top.size());
    EXPECT_EQ(a.is_end_token, b.is_end_token);
    EXPECT_EQ(a.finish, b.finish);
    EXPECT_EQ(a.error, b.error);
    EXPECT_EQ(a.request_at_fault, b.request_at_fault);
    EXPECT_EQ(a.prompt_logprobs.size(), b.prompt_logprobs.size());
    const RequestUsage &u = a.usage, &v = b.usage;
    EXPECT_EQ(std::tie(u.n_prompt, u.n_cached, u.n_output, u.n_preempted), std::tie(v.n_prompt, v.n_cached, v.n_output, v.n_preempted));
  }
}

// Runs the same on both kinds of engine: play(rig) adds requests and runs them. Returns how many steps followed another.
template <typename Play>
int64_t compare(const Play& play, const ModelFacts& facts = facts_of(true), const CoreOptions& options = {}) {
  ModelFacts plain = facts;
  plain.follows = plain.runs_ahead = false;
  CoreRig one(plain, options), other(facts, options);
  for (CoreRig* rig : {&one, &other}) {
    play(*rig);
    rig->run();
    EXPECT_FALSE(rig->core->has_work());
    rig->core->scheduler().check_invariants();
    EXPECT_EQ(rig->core->pool().n_free(), rig->core->pool().n_blocks());
  }
  EXPECT_EQ(one.events.size(), other.events.size());
  for (const auto& [id, events] : one.events) {
    SCOPED_TRACE(id);
    expect_same(events, other.events[id]);
  }
  const EngineStats a = one.core->stats(), b = other.core->stats();
  EXPECT_EQ(a.output_tokens, b.output_tokens);
  EXPECT_EQ(a.prompt_tokens, b.prompt_tokens);
  EXPECT_EQ(a.cached_prompt_tokens, b.cached_prompt_tokens);
  for (int c = 0; c < kPriorities; ++c) {
    const ClassStats &p = a.classes[c], &q = b.classes[c];
    EXPECT_EQ(std::tie(p.finished, p.cancelled, p.failed, p.waiting, p.running),
              std::tie(q.finished, q.cancelled, q.failed, q.waiting, q.running));
  }
  EXPECT_EQ(one.model->n_followed, 0);
  return other.model->n_followed;
}

TEST(Follow, EveryEndingIsAsItWas) {
  const int64_t n = compare([](CoreRig& rig) {
    for (int i = 0; i < 7; ++i) {
      Request request = endless(some_prompt(5 + 7 * i, i), 30);
      if (i == 1) request = stopping(request.prompt, 9);
      if (i == 2) request.max_tokens = 1;
      if (i == 3) request.max_tokens = -1;  // to the end of the context
      if (i == 4) request.sampling.n_logprobs = 3;
      if (i == 5) request.ignore_eos = false, request.min_tokens = 20, request.stop_tokens = {foretold(request.prompt, 6).back()};
      if (i == 6) request.prompt_logprobs = 1;
      rig.add(std::move(request));
    }
  });
  EXPECT_GT(n, 150);  // of the longest answer's tokens
}

// The first token, the last but one, and at the edges of pages.
TEST(Follow, ATokenMayEndATextAnywhere) {
  for (int n_prompt = 6; n_prompt < 10; ++n_prompt)
    for (int n = 1; n < 12; ++n) {
      SCOPED_TRACE(n_prompt * 100 + n);
      EXPECT_GT(compare([&](CoreRig& rig) {
                  rig.add(stopping(some_prompt(n_prompt, n), n));
                  rig.add(endless(some_prompt(30, n), 13));
                }),
                5);
    }
}

// What the prefix cache gives to the next turn shows which rows were published.
TEST(Follow, SurplusRowsAreNeverPublished) {
  for (int n = 1; n < 20; ++n) {
    SCOPED_TRACE(n);
    const auto prompt = some_prompt(11, n);
    EXPECT_GT(compare([&](CoreRig& rig) {
                rig.add(stopping(prompt, n));
                rig.add(endless(some_prompt(11, n + 50), n));
                rig.run();
                for (const int seed : {n, n + 50}) {
                  auto turn = some_prompt(11, seed);
                  for (const int token : foretold(turn, n)) turn.push_back(token);
                  for (int i = 0; i < 9; ++i) turn.push_back(i + 1);
                  rig.add(endless(std::move(turn), 5));
                }
              }),
              0);
  }
}

TEST(Follow, WhoCancelsOrRunsOutOfTimeMeanwhileEndsAtOnce) {
  CoreRig rig(facts_of(true));
  Request late = endless(some_prompt(20, 3), 100);
  late.timeout_seconds = 0.03;
  const RequestId a = rig.add(endless(some_prompt(20, 1), 30)), b = rig.add(endless(some_prompt(20, 2), 100)), c = rig.add(std::move(late));
  rig.run(6);
  ASSERT_GT(rig.model->n_followed, 2);
  rig.core->cancel(b);  // a step with it is on its way
  EXPECT_EQ(rig.core->stats().classes[0].cancelled, 1);
  const int used = rig.core->stats().blocks_used;
  rig.core->step();
  EXPECT_EQ(rig.last(b).finish, FinishReason::cancelled);
  EXPECT_LT(rig.core->stats().blocks_used, used);
  const size_t n = rig.text(b).size();
  rig.run();
  EXPECT_EQ(rig.text(b).size(), n);
  EXPECT_EQ(rig.text(b), foretold(some_prompt(20, 2), static_cast<int>(n)));
  EXPECT_EQ(rig.last(c).finish, FinishReason::timeout);
  EXPECT_LT(rig.times[c].back(), 0.034);
  EXPECT_EQ(rig.text(a), foretold(some_prompt(20, 1), 30));
  EXPECT_EQ(rig.core->pool().n_free(), rig.core->pool().n_blocks());
}

TEST(Follow, NothingIsLeftWhenAllAreCancelledAtOnce) {
  CoreRig rig(facts_of(true));
  const RequestId a = rig.add(endless(some_prompt(20, 1), 30)), b = rig.add(endless(some_prompt(20, 2), 30));
  rig.run(6);
  rig.core->cancel_all();
  EXPECT_TRUE(rig.core->has_work());  // a step is on its way
  rig.core->step();
  EXPECT_FALSE(rig.core->has_work());
  EXPECT_EQ(rig.last(a).finish, FinishReason::cancelled);
  EXPECT_EQ(rig.last(b).finish, FinishReason::cancelled);
  EXPECT_EQ(rig.core->pool().n_free(), rig.core->pool().n_blocks());
  const RequestId again = rig.add(endless(some_prompt(20, 1), 30));
  rig.run();
  EXPECT_EQ(rig.text(again), foretold(some_prompt(20, 1), 30));
}

TEST(Follow, AReceiverThatThrowsIsCancelled) {
  CoreRig rig(facts_of(true));
  int n = 0;
  rig.core->add(
      100, endless(some_prompt(9, 1), 50),
      [&](const TokenEvent&) {
        if (++n == 5) throw std::runtime_error("gone");
      },
      rig.clock);
  const RequestId other = rig.add(endless(some_prompt(9, 2), 20));
  rig.run();
  EXPECT_EQ(n, 5);
  EXPECT_EQ(rig.core->stats().classes[0].cancelled, 1);
  EXPECT_EQ(rig.text(other), foretold(some_prompt(9, 2), 20));
}

TEST(Follow, AStepThatFailsTakesItsOwnTokensOnly) {
  for (const bool at_the_end : {false, true})
    for (int step = 0; step < 8; ++step) {
      SCOPED_TRACE(step);
      compare([&](CoreRig& rig) {
        (at_the_end ? rig.model->fail_finish_in : rig.model->fail_in) = step;
        rig.add(stopping(some_prompt(20, 1), 5));
        rig.add(endless(some_prompt(20, 2), 10));
        rig.run();
        rig.model->fail_in = rig.model->fail_finish_in = -1;
        rig.add(endless(some_prompt(20, 2), 10));
      });
    }
}

TEST(Follow, LogitsThatAreNotFiniteEndTheirRequest) {
  for (int row = 0; row < 9; ++row) {
    SCOPED_TRACE(row);
    compare([&](CoreRig& rig) {
      rig.model->not_finite_in = row;
      rig.add(endless(some_prompt(20, 1), 10));
    });
  }
}

// ---- where the next step is not certain ----

class AnyToken final : public TokenConstraint {
 public:
  std::span<const uint32_t> allowed() override { return {}; }
  bool accept(int) override { return true; }
};

TEST(Follow, WhoNeedsTheLastTokenStopsIt) {
  for (const int kind : {0, 1, 2, 3}) {
    SCOPED_TRACE(kind);
    EXPECT_EQ(compare([&](CoreRig& rig) {
                rig.add(endless(some_prompt(9, 1), 20));
                Request request = endless(some_prompt(9, 2), 20);
                if (kind == 0) request.constraint = std::make_shared<AnyToken>();
                if (kind == 1) request.sampling.repetition = 1.2f;
                if (kind == 2) request.sampling.presence = 0.5f;
                if (kind == 3) request.sampling.frequency = 0.5f;
                rig.add(std::move(request));
              }),
              0);
  }
  // And no longer than it is there.
  EXPECT_GT(compare([&](CoreRig& rig) {
              rig.add(endless(some_prompt(9, 1), 20));
              Request request = endless(some_prompt(9, 2), 5);
              request.constraint = std::make_shared<AnyToken>();
              rig.add(std::move(request));
            }),
            12);
}

TEST(Follow, GuessesStopIt) {
  CoreOptions options;
  options.speculation = CoreOptions::Speculation::ngram;
  EXPECT_EQ(compare([](CoreRig& rig) { rig.add(endless(some_prompt(9, 1), 20)); }, facts_of(true), options), 0);
}

TEST(Follow, WhoWaitsStopsIt) {
  ModelFacts facts = facts_of(true);
  facts.max_requests = 2;
  CoreRig rig(facts);
  for (int i = 0; i < 3; ++i) rig.add(endless(some_prompt(9, i), i == 2 ? 12 : 10));
  rig.run(8);
  EXPECT_EQ(rig.core->stats().classes[0].waiting, 1);
  EXPECT_EQ(rig.model->n_followed, 0);
  rig.run();
  EXPECT_GT(rig.model->n_followed, 8);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(rig.text(i + 1), foretold(some_prompt(9, i), i == 2 ? 12 : 10));
}

// Whoever comes meanwhile is let in after the step that is on its way.
TEST(Follow, WhoComesIsLetInAfterOneStepMore) {
  CoreRig rig(facts_of(true));
  const RequestId first = rig.add(endless(some_prompt(9, 1), 40));
  rig.run(6);
  const RequestId second = rig.add(endless(some_prompt(40, 2), 10));
  const int64_t n = rig.model->n_followed;
  rig.run(1);
  EXPECT_EQ(rig.model->n_followed, n);
  EXPECT_EQ(rig.core->stats().classes[0].waiting, 1);
  rig.run(1);
  EXPECT_EQ(rig.core->stats().classes[0].running, 2);
  rig.run();
  EXPECT_EQ(rig.text(first), foretold(some_prompt(9, 1), 40));
  EXPECT_EQ(rig.text(second), foretold(some_prompt(40, 2), 10));
}

TEST(Follow, APromptThatIsReadInPiecesStopsIt) {
  ModelFacts facts = facts_of(true);
  facts.max_step_tokens = 20;
  CoreRig rig(facts);
  rig.add(endless(some_prompt(9, 1), 40));
  rig.run(4);
  const int64_t n = rig.model->n_followed;
  EXPECT_GT(n, 0);
  rig.add(endless(some_prompt(150, 2), 10));
  rig.run(6);
  EXPECT_EQ(rig.model->n_followed, n);
  EXPECT_EQ(rig.core->stats().classes[0].running, 2);
  rig.run();
  EXPECT_GT(rig.model->n_followed, n + 5);
  EXPECT_EQ(rig.text(1), foretold(some_prompt(9, 1), 40));
  EXPECT_EQ(rig.text(2), foretold(some_prompt(150, 2), 10));
}

// Pages run out, requests lose their places and come back; texts stay.
TEST(Follow, AFullCacheStopsIt) {
  ModelFacts facts = facts_of(true);
  facts.n_blocks = 32;
  CoreRig rig(facts);
  for (int i = 0; i < 40; ++i) rig.add(endless(some_prompt(5, i), 1));  // so that short answers are expected
  rig.run();
  for (int i = 0; i < 5; ++i) rig.add(endless(some_prompt(20, i), 100));
  rig.run();
  int n_preempted = 0;
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(rig.text(i + 41), foretold(some_prompt(20, i), 100));
    n_preempted += rig.last(i + 41).usage.n_preempted;
  }
  EXPECT_GT(n_preempted, 0);
  EXPECT_GT(rig.model->n_followed, 20);
  EXPECT_EQ(rig.core->pool().n_free(), 32);
}

}  // namespace
}  // namespace cachalot::test
