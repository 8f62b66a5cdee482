// Who runs when: classes, pre-emption, ageing, pools that are too small, and promises under overload. Time is simulated.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "core_rig.h"

namespace cachalot::test {
namespace {

Request of_class(Priority priority, std::vector<int> prompt, int max_tokens) {
  return {.prompt = std::move(prompt), .max_tokens = max_tokens, .ignore_eos = true, .priority = priority};
}

TEST(Scheduling, AnUrgentRequestTakesThePlaceOfTheNewestOfTheLowestClass) {
  ModelFacts facts = small_facts();
  facts.max_requests = 3;
  CoreRig rig(facts);
  const RequestId batch = rig.add(of_class(Priority::batch, some_prompt(10, 1), 40)),
                  old = rig.add(of_class(Priority::best_effort, some_prompt(10, 2), 40)),
                  recent = rig.add(of_class(Priority::best_effort, some_prompt(10, 3), 40));
  rig.run(10);
  const RequestId urgent = rig.add(of_class(Priority::interactive, some_prompt(10, 4), 5));
  rig.core->step();
  EXPECT_EQ(rig.events[urgent].size(), 1u);  // its first token, one step after it came
  rig.run();
  EXPECT_EQ(rig.last(recent).usage.n_preempted, 1);
  EXPECT_EQ(rig.last(old).usage.n_preempted, 0);
  EXPECT_EQ(rig.last(batch).usage.n_preempted, 0);
  for (int i = 1; i <= 3; ++i) EXPECT_EQ(rig.text(i), foretold(some_prompt(10, i), 40));
  EXPECT_EQ(rig.core->stats().classes[2].preempted, 1);
}

TEST(Scheduling, EqualsNeverTakeEachOthersPlace) {
  ModelFacts facts = small_facts();
  facts.max_requests = 2;
  CoreRig rig(facts);
  for (int i = 0; i < 6; ++i) rig.add(of_class(Priority::interactive, some_prompt(10, i), 20));
  rig.run();
  for (RequestId id = 1; id <= 6; ++id) EXPECT_EQ(rig.last(id).usage.n_preempted, 0);
  for (RequestId id = 1; id < 6; ++id) EXPECT_LE(rig.times[id].back(), rig.times[id + 1].back());
}

TEST(Scheduling, WhoeverLostItsPlaceIsTheNextOfItsClass) {
  ModelFacts facts = small_facts();
  facts.max_requests = 1;
  CoreRig rig(facts);
  const RequestId first = rig.add(of_class(Priority::best_effort, some_prompt(10, 1), 20)),
                  second = rig.add(of_class(Priority::best_effort, some_prompt(10, 2), 20));
  rig.run(3);
  const RequestId urgent = rig.add(of_class(Priority::interactive, some_prompt(10, 3), 5));
  rig.run();
  EXPECT_LT(rig.times[urgent].back(), rig.times[first].back());
  EXPECT_LT(rig.times[first].back(), rig.times[second].front());
  EXPECT_EQ(rig.last(first).usage.n_preempted, 1);
}

TEST(Scheduling, TheLowestClassMovesUnderUrgentLoad) {
  ModelFacts facts = small_facts();
  facts.max_requests = 2;
  CoreOptions options;
  options.ageing_seconds = 0.5;
  options.ageing_quantum = 0.05;
  CoreRig rig(facts, options);
  const RequestId low = rig.add(of_class(Priority::best_effort, some_prompt(10, 1), 60));
  int n_urgent = 0;
  for (int step = 0; step < 20000 && !rig.ended(low); ++step) {
    while (n_urgent - rig.core->stats().classes[0].finished < 4)
      rig.add(of_class(Priority::interactive, some_prompt(10, 10 + n_urgent++), 10));
    rig.core->step();
  }
  ASSERT_TRUE(rig.ended(low));
  EXPECT_EQ(rig.text(low), foretold(some_prompt(10, 1), 60));
  EXPECT_GT(rig.last(low).usage.n_preempted, 0);
  EXPECT_GT(n_urgent, 100);
}

// Room for one and a half requests: the newest yields, the oldest always moves, and all come to their end.
TEST(Scheduling, ATightPoolLetsEveryRequestFinish) {
  ModelFacts facts = small_facts();
  facts.max_context = 128;
  facts.n_blocks = 24;
  facts.max_requests = 8;
  CoreRig rig(facts);
  for (int i = 0; i < 8; ++i) rig.add(of_class(Priority::batch, some_prompt(40, i), 88));
  rig.run();
  for (int i = 0; i < 8; ++i) EXPECT_EQ(rig.text(i + 1), foretold(some_prompt(40, i), 88));
  EXPECT_EQ(rig.last(1).usage.n_preempted, 0);
  EXPECT_LT(rig.model->n_rows, 3 * 8 * 128);  // not everything was thrown away again and again
}

TEST(Scheduling, PagesMoveToTheHostWhenThatIsCheaper) {
  for (const double move_seconds : {1e-5, 1.0}) {  // a page of 8 rows takes 8e-4 to compute
    ModelFacts facts = small_facts();
    facts.max_context = 128;
    facts.n_blocks = 24;
    facts.n_host_blocks = 40;
    facts.move_seconds = move_seconds;
    CoreRig rig(facts);
    const RequestId victim = rig.add(of_class(Priority::batch, some_prompt(40, 1), 88));
    rig.run(60);
    const RequestId urgent = rig.add(of_class(Priority::interactive, some_prompt(100, 2), 20));
    rig.run();
    EXPECT_EQ(rig.text(victim), foretold(some_prompt(40, 1), 88));
    EXPECT_EQ(rig.text(urgent), foretold(some_prompt(100, 2), 20));
    EXPECT_EQ(rig.last(victim).usage.n_preempted, 1);
    const EngineStats stats = rig.core->stats();
    EXPECT_EQ(stats.swapped_tokens > 0, move_seconds < 1e-4);
    EXPECT_EQ(rig.model->n_from_host > 0, move_seconds < 1e-4);
    EXPECT_EQ(stats.recomputed_tokens == 0, move_seconds < 1e-4);
  }
}

TEST(Scheduling, PromptsBesideAStreamKeepItsGap) {
  ModelFacts facts = small_facts();
  facts.max_context = 20000;
  facts.n_blocks = 6000;
  facts.max_step_tokens = 512;
  for (const bool with_target : {false, true}) {
    CoreOptions options;
    if (with_target) options.targets[0].token_gap_seconds = 0.003;
    CoreRig rig(facts, options, {.step = 1e-3, .decode_row = 0.0, .prompt_row = 1e-4});  // 512 rows: 52 times a decoding step
    const RequestId stream = rig.add(of_class(Priority::interactive, some_prompt(8, 1), 900));
    rig.run(30);
    const RequestId a = rig.add(of_class(Priority::interactive, some_prompt(14000, 2), 4)),
                    b = rig.add(of_class(Priority::batch, some_prompt(14000, 3), 4));
    rig.run();
    double worst = 0.0;
    const auto& times = rig.times[stream];
    for (size_t i = 1; i < times.size(); ++i)
      if (times[i] < rig.times[b].front()) worst = std::max(worst, times[i] - times[i - 1]);
    EXPECT_LT(worst, with_target ? 0.003 : 0.0075);  // the first chunk is a guess: 64 rows
    EXPECT_LT(rig.times[a].front(), rig.times[b].front());
    EXPECT_EQ(rig.text(a), foretold(some_prompt(14000, 2), 4));
    if (with_target) {
      EXPECT_EQ(rig.core->stats().classes[0].promises_broken, 0);
      EXPECT_GT(rig.core->stats().classes[0].promises_kept, 800);
    }
  }
}

// Steps that take longer than expected at random: prompts get less of each until promises are kept.
TEST(Scheduling, PromptsBesideAStreamKeepItsGapOnAnUnsteadyMachine) {
  ModelFacts facts = small_facts();
  facts.max_context = 20000;
  facts.n_blocks = 6000;
  facts.max_step_tokens = 512;
  CoreOptions options;
  options.targets[0].token_gap_seconds = 0.003;
  CoreRig rig(facts, options, {.step = 1e-3, .decode_row = 0.0, .prompt_row = 2e-5, .spread = 0.6});
  rig.add(of_class(Priority::interactive, some_prompt(8, 1), 2000));
  rig.run(30);
  const RequestId other = rig.add(of_class(Priority::batch, some_prompt(14000, 2), 4));
  rig.run();
  const ClassStats& kept = rig.core->stats().classes[0];
  EXPECT_LE(kept.promises_broken, 3);
  EXPECT_EQ(kept.promises_kept + kept.promises_broken, 1999);
  EXPECT_LT(rig.times[other].front(), 1.5);  // steps of 2 to 3 ms, with 40 to 60 rows each
}

// Many prompts that come at once, on a device whose steps have a large fixed part: the first ones generate while the others are read.
TEST(Scheduling, PromptsMoveWhileTheFirstOnesGenerate) {
  ModelFacts facts = small_facts();
  facts.max_context = 2048;
  facts.max_requests = 24;
  facts.n_blocks = 8192;
  facts.max_step_tokens = 8192;
  CoreRig rig(facts, {}, {.step = 3e-3, .decode_row = 0.0, .prompt_row = 1.5e-5});
  for (int i = 0; i < 24; ++i) rig.add(of_class(Priority::interactive, some_prompt(1024, i), 256));
  rig.run();
  double last_start = 0.0, first_end = 1e30;
  for (RequestId id = 1; id <= 24; ++id) {
    last_start = std::max(last_start, rig.times[id].front());
    first_end = std::min(first_end, rig.times[id].back());
  }
  EXPECT_LT(last_start, 0.7 * first_end);
}

struct Load {
  double urgent_per_second = 0.0, others_per_second = 0.0, seconds = 100.0;
  bool classes = true;
};
struct Outcome {
  std::vector<double> first_token;  // of the urgent ones
  int64_t kept = 0, broken = 0;
  int n_others_done = 0, n_lowest_done = 0;
  [[nodiscard]] double p99() {
    std::sort(first_token.begin(), first_token.end());
    return first_token.at(first_token.size() * 99 / 100);
  }
};

Outcome run_load(const Load& load) {
  ModelFacts facts = small_facts();
  facts.max_requests = 8;
  facts.n_blocks = 512;
  facts.max_step_tokens = 256;
  CoreOptions options;
  options.targets[0] = {0.05, 0.02};
  options.ageing_seconds = 5.0;
  options.ageing_quantum = 0.1;
  CoreRig rig(facts, options, {.step = 2e-3, .decode_row = 2e-4, .prompt_row = 1e-4});
  std::mt19937 random(17);
  std::exponential_distribution<double> wait;
  const auto next = [&](double rate) { return rate > 0.0 ? wait(random) / rate : 1e30; };
  double urgent_at = next(load.urgent_per_second), other_at = next(load.others_per_second);
  std::map<RequestId, double> urgent;
  std::map<RequestId, Priority> others;
  for (int n = 0; rig.clock < load.seconds; ++n) {
    for (; urgent_at <= rig.clock; urgent_at += next(load.urgent_per_second)) {
      const double came = urgent_at;
      const RequestId id = rig.next_id++;
      rig.core->add(
          id, of_class(Priority::interactive, some_prompt(60, n), 24), [&, id](const TokenEvent&) { rig.times[id].push_back(rig.clock); },
          came);
      urgent[id] = came;
    }
    for (; other_at <= rig.clock; other_at += next(load.others_per_second)) {
      const Priority priority = !load.classes ? Priority::interactive : n % 2 == 0 ? Priority::batch : Priority::best_effort;
      others[rig.add(of_class(priority, some_prompt(120, 100000 + n), 60))] = n % 2 == 0 ? Priority::batch : Priority::best_effort;
    }
    if (rig.core->has_work())
      rig.core->step();
    else
      rig.clock = std::min(urgent_at, other_at);
  }
  Outcome outcome;
  for (const auto& [id, came] : urgent) outcome.first_token.push_back((rig.times[id].empty() ? rig.clock : rig.times[id].front()) - came);
  for (const auto& [id, priority] : others)
    if (rig.ended(id)) ++(priority == Priority::best_effort ? outcome.n_lowest_done : outcome.n_others_done);
  const EngineStats stats = rig.core->stats();
  outcome.kept = stats.classes[0].promises_kept;
  outcome.broken = stats.classes[0].promises_broken;
  return outcome;
}

TEST(Scheduling, PromisesAreKeptAtTwiceTheCapacity) {
  // What the machine can do is measured with more work than it can do.
  Outcome saturated = run_load({.urgent_per_second = 0.0, .others_per_second = 500.0, .seconds = 10.0});
  const double capacity = (saturated.n_others_done + saturated.n_lowest_done) / 10.0;  // of such requests a second
  const double urgent_rate = 0.4 * capacity, others_rate = 1.8 * capacity;             // an urgent one is half the work of another
  Outcome alone = run_load({.urgent_per_second = urgent_rate});
  Outcome classes = run_load({.urgent_per_second = urgent_rate, .others_per_second = others_rate});
  Outcome equal = run_load({.urgent_per_second = urgent_rate, .others_per_second = others_rate, .classes = false});
  RecordProperty("p99_alone_ms", std::to_string(alone.p99() * 1e3));
  RecordProperty("p99_classes_ms", std::to_string(classes.p99() * 1e3));
  RecordProperty("p99_first_come_ms", std::to_string(equal.p99() * 1e3));
  EXPECT_GT(classes.first_token.size(), 300u);
  EXPECT_LE(classes.p99(), 1.5 * alone.p99());
  EXPECT_GE(equal.p99(), 4.0 * classes.p99());
  EXPECT_GE(static_cast<double>(classes.kept), 0.999 * static_cast<double>(classes.kept + classes.broken));
  EXPECT_GT(classes.n_others_done, 50);
  EXPECT_GT(classes.n_lowest_done, 5);
}

}  // namespace
}  // namespace cachalot::test
