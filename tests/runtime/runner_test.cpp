// Runner: padded steps against exact ones, when graphs are recorded and replayed, and that made-up steps leave nothing behind.
#include "runtime/runner.h"

#include <gtest/gtest.h>

#include "cpu/cpu_ops.h"
#include "ops/ref_ops.h"
#include "runtime/memory_plan.h"
#include "support/golden.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

// Prompts of different lengths, then `steps` steps that give every sequence the same number of new tokens; all logits of these.
std::vector<float> decode(TestModel& model, const std::vector<int>& ids, GraphUse graphs, int n_seqs, int n_new, int steps) {
  KvCache cache(*model.ops, model.config, KvFormat::f32, 8, n_seqs * 8);
  Runner runner(*model.ops, model.decoder, cache, {.max_tokens = 64, .max_seqs = 16, .max_logits = 64, .max_sequence = 64},
                MlaForm::automatic, graphs);
  std::vector<Sequence> sequences(static_cast<size_t>(n_seqs));
  std::vector<float> out;
  for (size_t i = 0; i < sequences.size(); ++i) {
    Sequence& s = sequences[i];
    s.tokens.assign(ids.begin() + static_cast<ptrdiff_t>(i), ids.begin() + static_cast<ptrdiff_t>(i + 40));
    CACHALOT_CHECK(cache.reserve(s, 40));
    const StepItem prompt{&s, 3 + static_cast<int>(i) * 2, WantLogits::none};
    (void)runner.step({&prompt, 1});
  }
  for (int step = 0; step < steps; ++step) {
    std::vector<StepItem> items;
    for (Sequence& s : sequences) items.push_back({&s, n_new, WantLogits::all});
    const StepResult result = runner.step(items);
    EXPECT_EQ(result.logits.n_rows(), n_seqs * n_new);
    const size_t at = out.size(), n = static_cast<size_t>(result.logits.n_rows()) * static_cast<size_t>(model.config.vocab);
    out.resize(at + n);
    model.ops->download(out.data() + at, result.logits.data, n * sizeof(float));
  }
  return out;
}

// The last rows of two sequences, one in few rows and one in many, beside one of which no logits are wanted.
std::vector<float> last_logits(TestModel& model, const std::vector<int>& ids, WantLogits wanted) {
  KvCache cache(*model.ops, model.config, KvFormat::f32, 8, 64);
  Runner runner(*model.ops, model.decoder, cache, {.max_tokens = 64, .max_seqs = 4, .max_logits = 64, .max_sequence = 64});
  Sequence few, many, other;
  for (Sequence* s : {&few, &many, &other}) {
    s->tokens.assign(ids.begin(), ids.begin() + 40);
    CACHALOT_CHECK(cache.reserve(*s, 40));
  }
  const StepItem items[] = {{&few, 3, wanted}, {&many, 33, wanted}, {&other, 5, WantLogits::none}};
  const StepResult result = runner.step(items);
  const auto vocab = static_cast<size_t>(model.config.vocab);
  std::vector<float> all(static_cast<size_t>(result.logits.n_rows()) * vocab), out;
  model.ops->download(all.data(), result.logits.data, all.size() * sizeof(float));
  for (int i = 0; i < 2; ++i) {
    const int row = result.first_row[static_cast<size_t>(i)] + items[i].n_logits() - 1;
    const auto from = all.begin() + static_cast<ptrdiff_t>(row * static_cast<ptrdiff_t>(vocab));
    out.insert(out.end(), from, from + static_cast<ptrdiff_t>(vocab));
  }
  return out;
}

// The last layer runs on those rows alone.
TEST(Runner, RowsWhoseLogitsAreNotWantedChangeNothing) {
  for (const char* name : {"deepseek-v3", "deepseek-v2-lite", "llama-gqa", "qwen2"}) {
    const auto folder = testdata(std::string("golden/") + name);
    TestModel ref = load_model(folder, make_ref_ops());
    const std::vector<int> ids = read_golden(folder).input_ids;
    EXPECT_EQ(last_logits(ref, ids, WantLogits::last), last_logits(ref, ids, WantLogits::all)) << name;
  }
}

class PaddedSteps : public testing::TestWithParam<std::string> {};

TEST_P(PaddedSteps, EqualExactOnes) {
  const auto folder = testdata("golden/" + GetParam());
  const Golden golden = read_golden(folder);
  TestModel cpu = load_model(folder, make_cpu_ops({.bf16_prompts = false})), ref = load_model(folder, make_ref_ops());
  for (const int n_new : {1, 2})
    for (const int n_seqs : {9, 11, 13}) {  // padded to 10, 12, 14
      EXPECT_EQ(decode(cpu, golden.input_ids, GraphUse::padded, n_seqs, n_new, 3),
                decode(cpu, golden.input_ids, GraphUse::off, n_seqs, n_new, 3));
      if (n_seqs != 11) continue;
      EXPECT_EQ(decode(ref, golden.input_ids, GraphUse::padded, n_seqs, n_new, 2),
                decode(ref, golden.input_ids, GraphUse::off, n_seqs, n_new, 2));
    }
}

INSTANTIATE_TEST_SUITE_P(Runner, PaddedSteps, testing::Values("deepseek-v3", "deepseek-v2-lite", "llama-gqa", "qwen2"),
                         [](const auto& param) {
                           std::string name = param.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// Records by keeping the calls, which are then made again; says that its memory is not the host's, so that the runner asks for it.
class RecordingOps : public RefOps {
 public:
  bool host_memory() const override { return hosted; }
  MemorySize memory() override { return {size_t{1} << 30, free_memory}; }
  void embed(const Linear& table, View ids, View x) override {
    most_rows = std::max(most_rows, x.n_rows());
    RefOps::embed(table, ids, x);
  }
  std::unique_ptr<Graph> capture(const std::function<void()>& step) override {
    if (captures_left-- <= 0) fail("no room");
    class Calls : public Graph {
     public:
      explicit Calls(std::function<void()> calls) : calls_(std::move(calls)) {}
      void launch() override { calls_(); }

     private:
      std::function<void()> calls_;
    };
    return std::make_unique<Calls>(step);
  }
  bool hosted = true;
  int captures_left = 1 << 30, most_rows = 0;
  size_t free_memory = size_t{1} << 29;
};

// The device's gather and moe have default bodies that ask for host memory, but RefOps overrides them all.
struct Recording {
  Recording() {
    auto made = std::make_unique<RecordingOps>();
    ops = made.get();
    model = load_model(testdata("golden/deepseek-v2-lite"), std::move(made));
    ops->hosted = false;
    golden = read_golden(testdata("golden/deepseek-v2-lite"));
  }
  RecordingOps* ops;
  TestModel model;
  Golden golden;
};

TEST(RunnerGraphs, AShapeIsRecordedWhenItComesAgainAndThenReplayed) {
  Recording r;
  const auto exact = decode(r.model, r.golden.input_ids, GraphUse::off, 5, 1, 6);
  EXPECT_EQ(decode(r.model, r.golden.input_ids, GraphUse::automatic, 5, 1, 6), exact);

  KvCache cache(*r.ops, r.model.config, KvFormat::f32, 8, 16);
  Runner runner(*r.ops, r.model.decoder, cache, {.max_tokens = 32, .max_seqs = 8, .max_logits = 8, .max_sequence = 64});
  Sequence s{r.golden.input_ids};
  ASSERT_TRUE(cache.reserve(s, 32));
  const auto step = [&](int n_new, WantLogits want) {
    const StepItem item{&s, n_new, want};
    (void)runner.step({&item, 1});
  };
  step(9, WantLogits::none);  // a prompt is not
  EXPECT_EQ(runner.n_graphs(), 0);
  step(1, WantLogits::last);
  EXPECT_EQ(runner.n_graphs(), 0);
  step(1, WantLogits::last);
  EXPECT_EQ(runner.n_graphs(), 1);
  step(1, WantLogits::last);
  EXPECT_EQ(runner.n_graphs(), 1);
  EXPECT_EQ(runner.n_replayed(), 2);
  EXPECT_EQ(runner.record_graphs(), 8);
  EXPECT_EQ(runner.record_graphs(), 8);
}

TEST(RunnerGraphs, WithoutRoomForThemStepsRunAsBefore) {
  Recording r;
  const auto exact = decode(r.model, r.golden.input_ids, GraphUse::off, 5, 1, 6);
  r.ops->captures_left = 0;
  EXPECT_EQ(decode(r.model, r.golden.input_ids, GraphUse::automatic, 5, 1, 6), exact);
  KvCache cache(*r.ops, r.model.config, KvFormat::f32, 8, 16);
  Runner runner(*r.ops, r.model.decoder, cache, {.max_tokens = 32, .max_seqs = 8, .max_logits = 8, .max_sequence = 64});
  r.ops->captures_left = 3;
  EXPECT_EQ(runner.record_graphs(), 3);
  EXPECT_NE(runner.graph_problem().find("no room"), std::string::npos);
}

TEST(RunnerGraphs, MadeUpStepsLeaveTheCacheAlone) {
  Recording r;
  KvCache cache(*r.ops, r.model.config, KvFormat::f32, 8, 8);
  Runner runner(*r.ops, r.model.decoder, cache, {.max_tokens = 32, .max_seqs = 8, .max_logits = 8, .max_sequence = 64});
  runner.rehearse();
  runner.record_graphs();
  for (const KvLayer& layer : cache.layers()) {
    const auto* bytes = static_cast<const unsigned char*>(layer.k);
    EXPECT_TRUE(std::all_of(bytes, bytes + size_t{8} * 8 * layer.layout.k_row_bytes(), [](unsigned char b) { return b == 0; }));
  }
  EXPECT_EQ(cache.pool().n_free(), 8);
}

TEST(RunnerGraphs, RehearsalsHaveAllTheRowsThatAStepMayHave) {
  Recording r;
  KvCache cache(*r.ops, r.model.config, KvFormat::f32, 8, 8);
  for (const auto& [max_seqs, rows] : {std::pair{8, 100}, {2, 64}, {1, 32}}) {  // sequences are of 32 tokens at most
    r.ops->most_rows = 0;
    Runner runner(*r.ops, r.model.decoder, cache, {.max_tokens = 100, .max_seqs = max_seqs, .max_logits = 8, .max_sequence = 32});
    runner.rehearse();
    EXPECT_EQ(r.ops->most_rows, rows) << max_seqs;
  }
}

TEST(PaddedSizes, GrowAndHoldWhatTheyMust) {
  for (int n = 1; n < 600; ++n) {
    EXPECT_GE(padded_seqs(n), n);
    EXPECT_GE(padded_seqs(n + 1), padded_seqs(n));
    EXPECT_EQ(padded_seqs(padded_seqs(n)), padded_seqs(n));
    EXPECT_LE(padded_seqs(n) - n, n / 4);
  }
  EXPECT_EQ(padded_context(1), 1024);
  EXPECT_EQ(padded_context(1024), 1024);
  EXPECT_EQ(padded_context(1025), 4096);
  EXPECT_GT(padded_context(1 << 30), (1 << 30) - 1);
}

TEST(MemoryPlanTest, WhatIsLeftGoesToPages) {
  Recording r;
  r.ops->hosted = true;  // estimated, not run
  const RunnerLimits limits{.max_tokens = 16, .max_seqs = 4, .max_logits = 4, .max_sequence = 64};
  const MemoryPlan plan = plan_memory(*r.ops, r.model.decoder, limits, KvFormat::bf16, 16, 0.9);
  EXPECT_EQ(plan.block_bytes,
            r.model.config.kv_layout(KvFormat::bf16, 16).token_bytes() * 16 * static_cast<size_t>(r.model.config.n_layers));
  EXPECT_EQ(plan.weights, r.model.decoder.weight_bytes());
  EXPECT_LE(plan.other + plan.weights + plan.step + plan.graphs + static_cast<size_t>(plan.n_blocks) * plan.block_bytes,
            static_cast<size_t>(0.9 * static_cast<double>(size_t{1} << 30)));
  EXPECT_GT(plan.n_blocks, 4);
  EXPECT_LT(kv_blocks_that_fit(*r.ops, r.model.decoder, limits, KvFormat::bf16, 16, 0.8), plan.n_blocks);
  EXPECT_LT(kv_blocks_that_fit(*r.ops, r.model.decoder, limits, KvFormat::f32, 16, 0.9), plan.n_blocks);
}

TEST(MemoryPlanTest, SaysWithNumbersWhatDoesNotFit) {
  Recording r;
  r.ops->free_memory = size_t{100} << 20;
  const RunnerLimits limits{.max_tokens = 16, .max_seqs = 4, .max_logits = 4, .max_sequence = 64};
  const std::string message = error_of([&] { (void)plan_memory(*r.ops, r.model.decoder, limits, KvFormat::bf16, 16, 0.9); });
  EXPECT_NE(message.find("0 KV pages fit, expected at least 4 for one sequence of 64 tokens"), std::string::npos) << message;
  EXPECT_NE(message.find("90%"), std::string::npos) << message;
  for (const double wrong : {0.0, -1.0, 1.5, std::nan("")})
    EXPECT_NE(error_of([&] { (void)plan_memory(*r.ops, r.model.decoder, limits, KvFormat::bf16, 16, wrong); }).find("utilization"),
              std::string::npos);
}

}  // namespace
}  // namespace cachalot::test
