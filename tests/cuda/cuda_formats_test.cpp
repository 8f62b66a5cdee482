// Directories in the formats of other quantizers, on a GPU: AWQ, GPTQ, compressed-tensors and FP8 blocks against RefOps.
#include "cuda/gpu_support.h"
#include "quant/quantized_model.h"

namespace cachalot::test {
namespace {

struct Case {
  const char* name;
  FileFormat format;
  const char* type;
};

class CudaFormats : public testing::TestWithParam<std::tuple<Case, const char*>> {};

TEST_P(CudaFormats, LogitsAgreeWithReference) {
  SKIP_WITHOUT_GPU();
  const auto& [c, model] = GetParam();
  const TempDir folder;
  const auto path = folder.path() / "model";
  Writing(model, c.format, c.type).go(path);
  const std::vector<int> ids = read_golden(testdata(std::string("golden/") + model)).input_ids;
  TestModel reference = load_model(path, make_ref_ops()), exact = load_model(path, make_cuda_ops({.activation = DType::f32})),
            fast = load_model(path, make_cuda_ops({.activation = DType::bf16}));
  const auto expected = run_logits(reference, ids);
  EXPECT_LE(max_abs_difference(run_logits(exact, ids), expected), 2e-5f * max_abs(expected));
  const auto logits = run_logits(fast, ids, {.chunk = 40, .kv_format = KvFormat::bf16});
  double errors = 0.0, squares = 0.0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double want = static_cast<double>(expected[i]), e = static_cast<double>(logits[i]) - want;
    errors += e * e, squares += want * want;
  }
  EXPECT_LE(errors, 2e-3 * squares);  // a relative error of 4.5%: near ties of the routing may fall the other way
}

INSTANTIATE_TEST_SUITE_P(All, CudaFormats,
                         testing::Combine(testing::Values(Case{"awq", FileFormat::awq, "int4-g32-zp"},
                                                          Case{"gptq", FileFormat::gptq, "int4-g32-sym"},
                                                          Case{"gptq_int8", FileFormat::gptq_v2, "int8-g32-zp"},
                                                          Case{"compressed_tensors", FileFormat::compressed_tensors, "int4-g32-zp"},
                                                          Case{"compressed_tensors_int8", FileFormat::compressed_tensors, "int8-row-sym"},
                                                          Case{"fp8", FileFormat::fp8, "fp8"}),
                                          testing::Values("deepseek-v2-lite", "deepseek-v3", "qwen3")),
                         [](const auto& param) {
                           std::string name = std::string(std::get<0>(param.param).name) + "_" + std::get<1>(param.param);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace cachalot::test
