// Golden checkpoints written as GGUF and read back: the same logits; and the tokenizer that travels along.
#include "convert/gguf_convert.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "cpu/cpu_ops.h"
#include "io/gguf.h"
#include "support/golden.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

class ConvertedModel : public testing::TestWithParam<std::string> {};

TEST_P(ConvertedModel, F32FileGivesTheReferenceLogits) {
  const auto folder = testdata("golden/" + GetParam());
  const Golden golden = read_golden(folder);
  const TempDir dir;
  const auto file = dir.path() / "model.gguf";
  convert_to_gguf(*Checkpoint::open(folder), file, {.format = Format::f32});
  TestModel ref = load_model(file, make_ref_ops()), cpu = load_model(file, make_cpu_ops({.bf16_prompts = false}));
  EXPECT_LE(max_abs_difference(run_logits(ref, golden.input_ids), golden.logits), 2e-5f * max_abs(golden.logits));
  EXPECT_LE(max_abs_difference(run_logits(cpu, golden.input_ids), golden.logits), 1e-4f * max_abs(golden.logits));
}

TEST_P(ConvertedModel, Bf16FileIsExact) {
  const auto folder = testdata("golden/" + GetParam());
  const Golden golden = read_golden(folder);
  const TempDir dir;
  const auto file = dir.path() / "model.gguf";
  convert_to_gguf(*Checkpoint::open(folder), file, {.format = Format::bf16});
  TestModel from_gguf = load_model(file, make_ref_ops()), from_safetensors = load_model(folder, make_ref_ops());
  const std::vector<float> a = run_logits(from_gguf, golden.input_ids), b = run_logits(from_safetensors, golden.input_ids);
  EXPECT_LE(max_abs_difference(a, b), 2e-5f * max_abs(b));
}

TEST_P(ConvertedModel, Q8FileIsClose) {
  const auto folder = testdata("golden/" + GetParam());
  const Golden golden = read_golden(folder);
  const TempDir dir;
  const auto file = dir.path() / "model.gguf";
  const ConvertResult result = convert_to_gguf(*Checkpoint::open(folder), file, {.format = Format::q8_0});
  const auto gguf = GgufFile::open(file);
  EXPECT_EQ(static_cast<int>(gguf->tensors().size()), result.n_tensors);
  const auto stored = [&](const std::string& name) {
    for (const TensorInfo& t : gguf->tensors())
      if (t.name == name) return t.format;
    return Format::f32;
  };
  EXPECT_EQ(stored("token_embd.weight"), Format::q8_0);
  TestModel model = load_model(file, make_ref_ops());
  const std::vector<float> logits = run_logits(model, golden.input_ids);
  double error = 0, power = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    error += std::pow(logits[i] - golden.logits[i], 2);
    power += std::pow(golden.logits[i], 2);
  }
  EXPECT_GT(error, 0);
  EXPECT_LE(error / power, 0.02);
}

INSTANTIATE_TEST_SUITE_P(All, ConvertedModel, testing::ValuesIn(golden_models()), [](const auto& param) {
  std::string name = param.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

TEST(Convert, TinyV3CarriesTokenizerAndSaysWhatItLeftOut) {
  const TempDir dir;
  const auto file = dir.path() / "tiny-v3.gguf";
  const ConvertResult result = convert_to_gguf(*Checkpoint::open(testdata("tiny-v3")), file, {.format = Format::bf16});
  ASSERT_EQ(result.notes.size(), 1u);
  EXPECT_NE(result.notes[0].find("multi-token-prediction"), std::string::npos);
  const auto gguf = GgufFile::open(file);
  EXPECT_EQ(gguf->string("general.architecture"), "deepseek2");
  EXPECT_EQ(gguf->string("tokenizer.ggml.model"), "gpt2");
  ASSERT_NE(gguf->strings("tokenizer.ggml.tokens"), nullptr);
  EXPECT_EQ(gguf->strings("tokenizer.ggml.tokens")->size(), 8192u);
  EXPECT_EQ(gguf->integer("tokenizer.ggml.bos_token_id"), 0);
}

TEST(Convert, RefusesGgufInputAndLeavesNoFile) {
  const TempDir dir;
  const auto file = dir.path() / "a.gguf", other = dir.path() / "b.gguf";
  convert_to_gguf(*Checkpoint::open(testdata("golden/llama-gqa")), file, {.format = Format::f32});
  const auto checkpoint = Checkpoint::open(file);
  EXPECT_NE(error_of([&] { convert_to_gguf(*checkpoint, other, {}); }).find("already a GGUF file"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(other));
}

}  // namespace
}  // namespace cachalot::test
