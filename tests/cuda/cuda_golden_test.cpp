// Every golden checkpoint through CudaOps: greedy text in the f32 mode, logits in both.
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

TEST_P(CudaGolden, LogitsInBf16) {
  SKIP_WITHOUT_GPU();
  const Golden golden = read_golden(folder());
  TestModel model = load_model(folder(), make_cuda_ops({.activation = DType::bf16}));
  const auto logits = run_logits(model, golden.input_ids, {.chunk = 40, .kv_format = KvFormat::bf16});
  double errors = 0.0, squares = 0.0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double e = static_cast<double>(logits[i]) - static_cast<double>(golden.logits[i]);
    errors += e * e;
    squares += static_cast<double>(golden.logits[i]) * static_cast<double>(golden.logits[i]);
  }
  const float largest = max_abs_difference(logits, golden.logits) / max_abs(golden.logits);
  RecordProperty("largest", std::to_string(largest));
  std::printf("%s: largest difference %.2e of the largest logit, NMSE %.2e\n", GetParam().c_str(), static_cast<double>(largest),
              errors / squares);
  EXPECT_LE(errors / squares, 4e-4);  // a relative error of 2%
}

TEST_P(CudaGolden, GreedyIdsInF32) {
  SKIP_WITHOUT_GPU();
  const Golden golden = read_golden(folder());
  TestModel model = load_model(folder(), make_cuda_ops({.activation = DType::f32}));
  const std::vector<int> prompt(golden.greedy.begin(), golden.greedy.begin() + 16);
  EXPECT_EQ(greedy_texts(model, {prompt}, 24, {.max_context = 64, .max_step_tokens = 16})[0], golden.greedy);
}

INSTANTIATE_TEST_SUITE_P(All, CudaGolden, testing::ValuesIn(golden_models()), [](const auto& param) {
  std::string name = param.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

}  // namespace
}  // namespace cachalot::test
