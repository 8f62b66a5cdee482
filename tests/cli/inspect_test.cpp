// cachalot inspect, on a directory and on a GGUF file of the same model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/program.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

using ::testing::HasSubstr;

TEST(Inspect, TellsTheFactsOfADirectory) {
  const auto report = run_program({"inspect", "-m", testdata("tiny-v3"), "--json"}).json();
  EXPECT_EQ(report["container"], "safetensors");
  EXPECT_EQ(report["problems"].size(), 0u) << report["problems"];
  EXPECT_EQ(report["config"]["family"], "deepseek_v3");
  EXPECT_EQ(report["config"]["layers"], 5);
  EXPECT_EQ(report["config"]["mtp_layers"], 1);
  EXPECT_EQ(report["config"]["attention"]["kind"], "mla");
  EXPECT_EQ(report["config"]["attention"]["kv_rank"], 128);
  EXPECT_EQ(report["config"]["experts"]["routed"], 16);
  // One row of 128 + 32 numbers in each of five layers.
  EXPECT_EQ(report["kv_bytes_per_token"]["bf16"], 5 * 160 * 2);
  EXPECT_EQ(report["kv_bytes_per_token"]["f32"], 5 * 160 * 4);
  EXPECT_EQ(report["kv_bytes_per_token"]["fp8"], 5 * (128 + 4 + 32 * 2));
  // reference.json counts 12,527,104 parameters, without the 16 routing biases of each of five layers, which training does not touch.
  EXPECT_EQ(report["parameters"], 12527104 + 5 * 16);
  EXPECT_EQ(report["tokenizer"]["chat_template"], true);
  int64_t bytes = 0, elements = 0;
  for (const auto& tensor : report["tensors"]) bytes += tensor["bytes"].get<int64_t>();
  EXPECT_EQ(bytes, report["bytes"].get<int64_t>());
  bytes = 0;
  for (const auto& type : report["types"]) {
    bytes += type["bytes"].get<int64_t>();
    elements += type["elements"].get<int64_t>();
  }
  EXPECT_EQ(bytes, report["bytes"].get<int64_t>());
  EXPECT_GE(elements, report["parameters"].get<int64_t>());
}

TEST(Inspect, TextHasATableOfTensors) {
  const ProgramResult full = run_program({"inspect", testdata("tiny-v3")});
  EXPECT_EQ(full.code, 0);
  EXPECT_THAT(full.out, HasSubstr("model.layers.0.self_attn.kv_b_proj.weight"));
  EXPECT_THAT(full.out, HasSubstr("F8_E4M3"));
  EXPECT_THAT(full.out, HasSubstr("KV cache"));
  const ProgramResult brief = run_program({"inspect", testdata("tiny-v3"), "--no-tensors"});
  EXPECT_LT(brief.out.size(), full.out.size() / 3);
}

TEST(Inspect, GgufOfTheSameModelAgrees) {
  const TempDir folder;
  const std::string gguf = folder.path() / "tiny.gguf";
  ASSERT_EQ(run_program({"convert", "-m", testdata("tiny-v2"), "-o", gguf, "--type", "q8_0", "-q"}).code, 0);
  const auto from_gguf = run_program({"inspect", gguf, "--json"}).json();
  const auto from_directory = run_program({"inspect", testdata("tiny-v2"), "--json"}).json();
  EXPECT_EQ(from_gguf["container"], "gguf");
  EXPECT_EQ(from_gguf["problems"].size(), 0u) << from_gguf["problems"];
  EXPECT_EQ(from_gguf["kv_bytes_per_token"], from_directory["kv_bytes_per_token"]);
  EXPECT_EQ(from_gguf["parameters"], from_directory["parameters"]);
  for (const char* key : {"layers", "hidden", "vocab", "attention", "experts"})
    EXPECT_EQ(from_gguf["config"][key], from_directory["config"][key]) << key;
  EXPECT_EQ(from_gguf["tokenizer"]["bos"], from_directory["tokenizer"]["bos"]);
}

TEST(Inspect, UnsupportedArchitectureIsAProblemNotAFailure) {
  const ProgramResult result = run_program({"inspect", testdata("golden/deepseek-v32"), "--json"});
  if (!std::filesystem::exists(testdata("golden/deepseek-v32"))) GTEST_SKIP() << "no such golden model";
  EXPECT_EQ(result.code, 0) << result.err;
  const auto report = result.json();
  EXPECT_TRUE(report["config"].is_null());
  EXPECT_GT(report["tensors"].size(), 0u);
  EXPECT_GT(report["problems"].size(), 0u);
}

}  // namespace
}  // namespace cachalot::test
