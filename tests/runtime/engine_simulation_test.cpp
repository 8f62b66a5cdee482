// Random arrivals, cancellations, deadlines and three classes on pools that are too small, with every invariant checked in every step and
// every token foretold. CACHALOT_FULL_TESTS=1 runs 1,000 seeds of 10,000 steps.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <random>

#include "runtime/engine_core.h"
#include "shadow_model.h"

namespace cachalot::test {
namespace {

class Simulation {
 public:
  explicit Simulation(uint64_t seed) : random_(seed) {
    ModelFacts facts{.name = "shadow", .vocab = 50, .eos_ids = {0}};
    facts.block_tokens = 1 << one_of(2, 4);  // 4, 8, 16
    facts.max_context = one_of(24, 120);
    const int needed = blocks_for(facts.max_context, facts.block_tokens);
    facts.n_blocks = needed + (one_of(0, 3) == 0 ? 0 : one_of(0, 2 * needed));  // often hardly more than one request's
    facts.n_host_blocks = one_of(0, 2) * needed;
    facts.move_seconds = 1e-6 * facts.block_tokens * one_of(1, 200);
    facts.max_requests = one_of(1, 6);
    facts.max_step_tokens = facts.max_requests + one_of(0, 40);
    facts.max_scored_rows = one_of(1, 8);
    facts.runs_ahead = one_of(0, 1) == 1;
    facts.follows = one_of(0, 1) == 1;
    CoreOptions options{.prefix_cache = one_of(0, 4) > 0, .ageing_seconds = 0.5, .ageing_quantum = 0.05, .check_invariants = true};
    options.targets[0] = {0.05, 0.01};
    options.targets[1] = {0.5, one_of(0, 1) * 0.05};
    auto model = std::make_unique<ShadowModel>(facts, &clock_, ShadowCosts{});
    model_ = model.get();
    core_ = std::make_unique<EngineCore>(std::move(model), options, [this] { return clock_; });
    vocab_ = facts.vocab;
    arrival_ = one_of(1, 8);
    for (int i = 0; i < 4; ++i) {
      prefixes_.emplace_back();
      for (int n = one_of(1, facts.max_context - 2); n > 0; --n) prefixes_.back().push_back(one_of(0, vocab_ - 1));
    }
  }

  void run(int n_steps) {
    for (int step = 0; step < n_steps; ++step) {
      if (live_.size() < 24 && one_of(0, 7) < arrival_) submit();
      if (one_of(0, 40) == 0 && !live_.empty()) {
        auto victim = live_.begin();
        std::advance(victim, one_of(0, static_cast<int>(live_.size()) - 1));
        victim->second.cancelled = true;
        core_->cancel(victim->first);
      }
      if (one_of(0, 500) == 0) model_->fail_in = 0;
      if (one_of(0, 500) == 0) model_->fail_finish_in = 0;
      if (one_of(0, 200) == 0) model_->not_finite_in = 0;
      core_->step();
    }
    for (int left = 200000; core_->has_work(); --left) {
      ASSERT_GT(left, 0) << "requests that never end";
      core_->step();
    }
    EXPECT_TRUE(live_.empty());
    core_->scheduler().check_invariants();
    EXPECT_EQ(core_->pool().n_free(), core_->pool().n_blocks());
    const EngineStats stats = core_->stats();
    int64_t n = 0;
    for (const ClassStats& c : stats.classes) {
      EXPECT_EQ(c.waiting + c.running, 0);
      n += c.finished + c.cancelled + c.failed;
    }
    EXPECT_EQ(n, n_submitted_);
  }
  int64_t n_preempted = 0, n_cached = 0, n_finished = 0, n_copied = 0, n_from_host = 0, n_followed = 0;

 private:
  struct Expected {
    uint64_t hash = 0;
    int n_prompt = 0, n_tokens = 0, max_total = 0;
    bool scored = false, cancelled = false;
  };

  int one_of(int low, int high) { return low + static_cast<int>(random_() % static_cast<uint64_t>(high - low + 1)); }

  void submit() {
    Request request;
    const int max_context = core_->info().max_context;
    const auto& prefix = prefixes_[static_cast<size_t>(one_of(0, 3))];
    const int n_same = one_of(0, static_cast<int>(prefix.size()));
    request.prompt.assign(prefix.begin(), prefix.begin() + n_same);
    for (int n = one_of(1, std::max(1, (max_context - 1 - n_same) / 2)); n > 0 && std::ssize(request.prompt) < max_context - 1; --n)
      request.prompt.push_back(one_of(0, vocab_ - 1));
    request.priority = static_cast<Priority>(one_of(0, 2));
    request.max_tokens = one_of(0, 9) == 0 ? -1 : one_of(0, 40);
    request.ignore_eos = one_of(0, 1) == 1;
    request.use_prefix_cache = one_of(0, 5) > 0;
    if (one_of(0, 3) == 0) request.cache_salt = "other";
    if (one_of(0, 9) == 0) request.prompt_logprobs = one_of(0, 2);
    if (one_of(0, 9) == 0) request.timeout_seconds = 0.02 * one_of(1, 20);
    check_request(request, core_->info());
    const RequestId id = ++n_submitted_;
    Expected& e = live_[id];
    e.n_prompt = e.n_tokens = static_cast<int>(request.prompt.size());
    e.max_total = request.max_tokens < 0 ? max_context : std::min(max_context, e.n_prompt + request.max_tokens);
    e.scored = request.prompt_logprobs >= 0;
    for (const int token : request.prompt) e.hash = extended(e.hash, token);
    core_->add(
        id, std::move(request), [this](const TokenEvent& event) { take(event); }, clock_);
  }

  void take(const TokenEvent& event) {
    ASSERT_TRUE(live_.contains(event.request)) << "an event after the last";
    Expected& e = live_[event.request];
    if (event.token >= 0) {
      ASSERT_EQ(event.token, next_token(e.hash, vocab_)) << "request " << event.request << " at " << e.n_tokens;
      if (e.scored) {
        ASSERT_EQ(std::ssize(event.prompt_logprobs), e.n_prompt - 1);
        for (const auto& entry : event.prompt_logprobs) ASSERT_EQ(entry.at(0).logprob, -2.0f);
        e.scored = false;
      }
      if (!event.is_end_token) {
        e.hash = extended(e.hash, event.token);
        ++e.n_tokens;
      }
    }
    if (event.finish == FinishReason::none) return;
    ASSERT_TRUE(event.finish != FinishReason::length || e.n_tokens == e.max_total) << e.n_tokens;
    ASSERT_TRUE(event.finish != FinishReason::cancelled || e.cancelled);
    ASSERT_EQ(event.usage.n_output, e.n_tokens - e.n_prompt + (event.is_end_token ? 1 : 0));
    n_preempted += event.usage.n_preempted;
    n_cached += event.usage.n_cached;
    n_finished += event.finish == FinishReason::length || event.finish == FinishReason::stop;
    n_copied = model_->n_copied;
    n_from_host = model_->n_from_host;
    n_followed = model_->n_followed;
    live_.erase(event.request);
  }

  std::mt19937_64 random_;
  double clock_ = 0.0;
  std::vector<std::vector<int>> prefixes_;
  std::map<RequestId, Expected> live_;
  RequestId n_submitted_ = 0;
  int vocab_ = 0, arrival_ = 0;
  ShadowModel* model_ = nullptr;
  std::unique_ptr<EngineCore> core_;
};

TEST(EngineSimulation, NoPageIsLostAndNoTextDisturbed) {
  const bool full = std::getenv("CACHALOT_FULL_TESTS") != nullptr;
  const int n_seeds = full ? 1000 : 100, n_steps = full ? 10000 : 2000;
  int64_t n_preempted = 0, n_cached = 0, n_finished = 0, n_copied = 0, n_from_host = 0, n_followed = 0;
  for (int seed = 0; seed < n_seeds; ++seed) {
    SCOPED_TRACE(seed);
    Simulation simulation(static_cast<uint64_t>(seed));
    simulation.run(n_steps);
    n_preempted += simulation.n_preempted;
    n_cached += simulation.n_cached;
    n_finished += simulation.n_finished;
    n_copied += simulation.n_copied;
    n_from_host += simulation.n_from_host;
    n_followed += simulation.n_followed;
    if (HasFailure()) break;
  }
  RecordProperty("finished", std::to_string(n_finished));
  RecordProperty("preempted", std::to_string(n_preempted));
  // The runs did meet what they are about.
  EXPECT_GT(n_finished, 10 * n_seeds);
  EXPECT_GT(n_preempted, 10 * n_seeds);
  EXPECT_GT(n_cached, 100 * n_seeds);
  EXPECT_GT(n_copied, n_seeds);
  EXPECT_GT(n_from_host, n_seeds);
  EXPECT_GT(n_followed, 10 * n_seeds);
}

}  // namespace
}  // namespace cachalot::test
