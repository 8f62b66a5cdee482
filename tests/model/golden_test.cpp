// Every golden checkpoint through RefOps and CpuOps: logits, hidden states and greedy text against the reference; and each pair of paths
// that must agree: chunk sizes, block sizes, absorbed and expanded attention.
#include "support/golden.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "cpu/cpu_ops.h"
#include "ops/ref_ops.h"
#include "ops/trace_ops.h"
#include "runtime/runner.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

struct Backend {
  const char* name;
  std::function<std::unique_ptr<Ops>()> make;
  float tolerance;   // against the reference, as a share of the largest |value|
  float path_error;  // between two ways to the same result
};
const Backend& ref_backend() {
  static const Backend backend{"ref", make_ref_ops, 2e-5f, 2e-6f};
  return backend;
}
const Backend& cpu_backend() {
  static const Backend backend{"cpu", [] { return make_cpu_ops({.bf16_prompts = false}); }, 1e-4f, 2e-5f};
  return backend;
}

class GoldenModel : public testing::TestWithParam<std::tuple<std::string, const Backend*>> {
 protected:
  [[nodiscard]] std::filesystem::path folder() const { return testdata("golden/" + std::get<0>(GetParam())); }
  [[nodiscard]] const Backend& backend() const { return *std::get<1>(GetParam()); }
};

TEST_P(GoldenModel, Logits) {
  const Golden golden = read_golden(folder());
  TestModel model = load_model(folder(), backend().make());
  ASSERT_EQ(model.config.vocab, golden.vocab);
  EXPECT_LE(max_abs_difference(run_logits(model, golden.input_ids), golden.logits), backend().tolerance * max_abs(golden.logits));
}

TEST_P(GoldenModel, HiddenStates) {
  const Golden golden = read_golden(folder());
  TestModel model = load_model(folder(), backend().make());
  std::vector<std::vector<float>> hidden;
  int n_norms = 0;
  const auto keep = [&](View x) {
    std::vector<float> rows;
    for (int r = 0; r < x.n_rows(); ++r) rows.insert(rows.end(), x.row<float>(r), x.row<float>(r) + x.n_cols());
    hidden.push_back(std::move(rows));
  };
  TestModel traced{make_trace_ops(*model.ops,
                                  [&](const TraceRecord& record) {
                                    const std::string op = record.op;
                                    if (op == "embed" || (op == "add_rmsnorm" && ++n_norms % 2 == 0)) keep(record.out);
                                  }),
                   model.config, model.decoder};
  run_logits(traced, golden.input_ids);
  ASSERT_EQ(static_cast<int>(hidden.size()), golden.n_hidden);
  const size_t layer_size = golden.hidden.size() / static_cast<size_t>(golden.n_hidden);
  for (int l = 0; l < golden.n_hidden; ++l) {
    // transformers gives its last hidden state after the final norm; only the MLA references are before it.
    if (l + 1 == golden.n_hidden && !model.config.mla) break;
    const std::vector<float> want(golden.hidden.begin() + static_cast<ptrdiff_t>(layer_size) * l,
                                  golden.hidden.begin() + static_cast<ptrdiff_t>(layer_size) * (l + 1));
    EXPECT_LE(max_abs_difference(hidden[static_cast<size_t>(l)], want), backend().tolerance * max_abs(want)) << "layer " << l;
  }
}

TEST_P(GoldenModel, GreedyIds) {
  const Golden golden = read_golden(folder());
  TestModel model = load_model(folder(), backend().make());
  const std::vector<int> prompt(golden.greedy.begin(), golden.greedy.begin() + 16);
  EXPECT_EQ(greedy_texts(model, {prompt}, 24, {.max_context = 64, .max_step_tokens = 16})[0], golden.greedy);
}

TEST_P(GoldenModel, ChunkSizesBlockSizesAndFormsAgree) {
  const Golden golden = read_golden(folder());
  TestModel model = load_model(folder(), backend().make());
  const std::vector<float> whole = run_logits(model, golden.input_ids);
  const float tolerance = backend().path_error * max_abs(whole);
  for (const int chunk : {1, 7, 16, 64})
    EXPECT_LE(max_abs_difference(run_logits(model, golden.input_ids, {.chunk = chunk}), whole), tolerance) << "chunk " << chunk;
  for (const int block : {8, 32, 64})
    EXPECT_LE(max_abs_difference(run_logits(model, golden.input_ids, {.chunk = 19, .block_tokens = block}), whole), tolerance)
        << "block " << block;
  for (const MlaForm form : {MlaForm::absorbed, MlaForm::expanded})
    for (const int chunk : {1, 16, 96})
      EXPECT_LE(max_abs_difference(run_logits(model, golden.input_ids, {.chunk = chunk, .form = static_cast<int>(form)}), whole),
                2 * tolerance)
          << "form " << static_cast<int>(form) << " chunk " << chunk;
}

TEST_P(GoldenModel, AloneEqualsInABatchOfSeven) {
  const Golden golden = read_golden(folder());
  TestModel model = load_model(folder(), backend().make());
  std::vector<std::vector<int>> prompts;
  for (int i = 0; i < 7; ++i) prompts.emplace_back(golden.input_ids.begin() + i, golden.input_ids.begin() + i + 5 + 13 * i);
  const auto run = [&](int max_requests, const std::vector<std::vector<int>>& some) {
    return greedy_texts(model, some, 12, {.max_context = 128, .max_requests = max_requests, .max_step_tokens = 40});
  };
  const auto together = run(7, prompts);
  for (size_t i = 0; i < prompts.size(); ++i) EXPECT_EQ(run(1, {prompts[i]})[0], together[i]) << "request " << i;
}

INSTANTIATE_TEST_SUITE_P(All, GoldenModel,
                         testing::Combine(testing::ValuesIn(golden_models()), testing::Values(&ref_backend(), &cpu_backend())),
                         [](const auto& param) {
                           std::string name = std::get<0>(param.param) + "_" + std::get<1>(param.param)->name;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(Golden, V32IsRefusedInOneLine) {
  const auto checkpoint = Checkpoint::open(testdata("golden/deepseek-v32"));
  const std::string message = error_of([&] { (void)read_config(*checkpoint); });
  EXPECT_NE(message.find("deepseek_v32"), std::string::npos) << message;
  EXPECT_NE(message.find("not supported"), std::string::npos) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

}  // namespace
}  // namespace cachalot::test
