// Every golden checkpoint through CudaOps: greedy text in the f32 mode, logits in both.
#include "cpu/cpu_ops.h"
#include "cuda/gpu_support.h"
#include "support/golden.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

class CudaGolden : public testing::TestWithParam<std::string> {
 protected:
  [[nodiscard]] std::filesystem::path folder() const { return testdata("golden/" + GetParam()); }
};

TEST_P(CudaGolden, LogitsInF32) {
  SKIP_WITHOUT_GPU();
  const Golden golden = read_golden(folder());
  TestModel model = load_model(folder(), make_cuda_ops({.activation = DType::f32}));
  EXPECT_LE(max_abs_difference(run_logits(model, golden.input_ids), golden.logits), 2e-5f * max_abs(golden.logits));
}

// Squared errors over squares.
double nmse(const std::vector<float>& values, const std::vector<float>& expected) {
  double errors = 0.0, squares = 0.0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double e = static_cast<double>(values[i]) - static_cast<double>(expected[i]);
    errors += e * e;
    squares += static_cast<double>(expected[i]) * static_cast<double>(expected[i]);
  }
  return errors / squares;
}
constexpr double kMostInBf16 = 4e-4;  // a relative error of 2%

TEST_P(CudaGolden, LogitsInBf16) {
  SKIP_WITHOUT_GPU();
  const Golden golden = read_golden(folder());
  TestModel model = load_model(folder(), make_cuda_ops({.activation = DType::bf16}));
  const auto logits = run_logits(model, golden.input_ids, {.chunk = 40, .kv_format = KvFormat::bf16});
  const float largest = max_abs_difference(logits, golden.logits) / max_abs(golden.logits);
  const double error = nmse(logits, golden.logits);
  RecordProperty("largest", std::to_string(largest));
  std::printf("%s: largest difference %.2e of the largest logit, NMSE %.2e\n", GetParam().c_str(), static_cast<double>(largest), error);
  EXPECT_LE(error, kMostInBf16);
}

TEST_P(CudaGolden, GreedyIdsInF32) {
  SKIP_WITHOUT_GPU();
  const Golden golden = read_golden(folder());
  TestModel model = load_model(folder(), make_cuda_ops({.activation = DType::f32}));
  const std::vector<int> prompt(golden.greedy.begin(), golden.greedy.begin() + 16);
  EXPECT_EQ(greedy_texts(model, {prompt}, 24, {.max_context = 64, .max_step_tokens = 16})[0], golden.greedy);
}

TEST_P(CudaGolden, ExpertsOnTheCpu) {
  SKIP_WITHOUT_GPU();
  const Golden golden = read_golden(folder());
  const auto both = [](DType activation) {
    return make_hybrid_ops(make_cuda_ops({.activation = activation}), make_cpu_ops({.n_threads = 2, .bf16_prompts = false}));
  };
  TestModel exact = load_model(folder(), both(DType::f32), 1000);
  EXPECT_LE(max_abs_difference(run_logits(exact, golden.input_ids), golden.logits), 1e-4f * max_abs(golden.logits));
  const std::vector<int> prompt(golden.greedy.begin(), golden.greedy.begin() + 16);
  EXPECT_EQ(greedy_texts(exact, {prompt}, 24, {.max_context = 64, .max_step_tokens = 16})[0], golden.greedy);
  TestModel model = load_model(folder(), both(DType::bf16), 1000);
  EXPECT_LE(nmse(run_logits(model, golden.input_ids, {.chunk = 40, .kv_format = KvFormat::bf16}), golden.logits), kMostInBf16);
}

INSTANTIATE_TEST_SUITE_P(All, CudaGolden, testing::ValuesIn(golden_models()), [](const auto& param) {
  std::string name = param.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

}  // namespace
}  // namespace cachalot::test
