// A model whose routed experts lie with the host: the logits and the text of the whole model on one device, however many layers have them
// there.
#include <gtest/gtest.h>

#include <algorithm>
#include <typeinfo>

#include "cpu/cpu_ops.h"
#include "support/golden.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

std::unique_ptr<HybridOps> ref_and_cpu() { return make_hybrid_ops(make_ref_ops(), make_cpu_ops({.n_threads = 2, .bf16_prompts = false})); }

class Hybrid : public testing::TestWithParam<std::string> {
 protected:
  [[nodiscard]] std::filesystem::path folder() const { return testdata("golden/" + GetParam()); }
};

TEST_P(Hybrid, LogitsWithSomeLayersAndWithAll) {
  const Golden golden = read_golden(folder());
  for (const int n_host : {0, 2, 1000}) {
    TestModel model = load_model(folder(), ref_and_cpu(), n_host);
    const auto difference = max_abs_difference(run_logits(model, golden.input_ids, {.chunk = 7}), golden.logits);
    EXPECT_LE(difference, 1e-4f * max_abs(golden.logits)) << n_host;
  }
}

TEST_P(Hybrid, GreedyText) {
  const Golden golden = read_golden(folder());
  const TestModel model = load_model(folder(), ref_and_cpu(), 1000);
  const std::vector<int> prompt(golden.greedy.begin(), golden.greedy.begin() + 16);
  EXPECT_EQ(greedy_texts(model, {prompt}, 24, {.max_context = 64, .max_step_tokens = 16})[0], golden.greedy);
}

TEST_P(Hybrid, OnlyTheRoutedExpertsOfThoseLayersLieWithTheHost) {
  const Config config = load_model(folder(), make_ref_ops()).config;
  const TestModel model = load_model(folder(), ref_and_cpu(), 2);
  const Ops& ops = *model.ops;
  EXPECT_EQ(std::string(ops.name()).substr(0, 8), "ref+cpu-");
  // A weight of the host's means nothing to the device's own backend.
  for (int l = 0; l < config.n_layers; ++l) {
    const auto* const moe = std::get_if<MoeFfn>(&model.decoder.layers()[static_cast<size_t>(l)].ffn);
    if (moe == nullptr) continue;
    const Linear &gate_up = moe->experts.gate_up, &shared = moe->experts.shared_gate_up;
    EXPECT_EQ(typeid(*gate_up.packed) == typeid(*shared.packed), l >= 2) << l;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Hybrid, testing::Values("deepseek-v2-lite", "deepseek-v2", "deepseek-v3"), [](const auto& param) {
  std::string name = param.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

}  // namespace
}  // namespace cachalot::test
