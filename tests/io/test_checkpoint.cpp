// Checkpoint on the real things: the golden and tiny models, mapped names, values, stacks, companions; and GGUF stacks.
#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/float_formats.h"
#include "base/mapped_file.h"
#include "io/checkpoint.h"
#include "io/gguf.h"
#include "io/gguf_writer.h"
#include "io/name_map.h"
#include "io/safetensors.h"
#include "support/support.h"

namespace cachalot {
namespace {

using test::error_of;
using test::testdata;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

int dim(const std::unique_ptr<Checkpoint>& checkpoint, const std::string& key) {
  return nlohmann::json::parse(checkpoint->config_json()).at(key).get<int>();
}

struct Golden {
  const char* name;
  int n_tensors;
};
class GoldenCheckpoint : public ::testing::TestWithParam<Golden> {};

TEST_P(GoldenCheckpoint, EveryTensorIsMappedAndReadable) {
  const auto checkpoint = Checkpoint::open(testdata(GetParam().name));
  EXPECT_EQ(checkpoint->container(), Checkpoint::Container::safetensors);
  EXPECT_EQ(checkpoint->tensors().size(), static_cast<size_t>(GetParam().n_tensors));
  EXPECT_THAT(checkpoint->unmapped(), IsEmpty());
  const int vocab = dim(checkpoint, "vocab_size"), hidden = dim(checkpoint, "hidden_size"), layers = dim(checkpoint, "num_hidden_layers");
  const LinearSource embedding = checkpoint->linear("token_embd.weight", 1, vocab, hidden);
  EXPECT_EQ(embedding.matrices[0].data.size(), static_cast<size_t>(vocab) * static_cast<size_t>(hidden) * 2);
  EXPECT_EQ(checkpoint->vector("output_norm.weight", hidden).size(), static_cast<size_t>(hidden));
  for (int layer = 0; layer < layers; ++layer) {
    EXPECT_EQ(checkpoint->vector(fmt::format("blk.{}.attn_norm.weight", layer), hidden).size(), static_cast<size_t>(hidden));
    EXPECT_TRUE(checkpoint->has(fmt::format("blk.{}.attn_output.weight", layer)));
    EXPECT_TRUE(checkpoint->has(fmt::format("blk.{}.ffn_norm.weight", layer)));
  }
  EXPECT_FALSE(checkpoint->has(fmt::format("blk.{}.attn_norm.weight", layers + 1)));
  // The first row of the embedding, against the file read by hand: bf16 is the upper half of f32.
  const auto info = std::find_if(checkpoint->tensors().begin(), checkpoint->tensors().end(),
                                 [](const TensorInfo& tensor) { return tensor.name == "model.embed_tokens.weight"; });
  ASSERT_NE(info, checkpoint->tensors().end());
  std::vector<float> row(static_cast<size_t>(hidden));
  dequant_row(embedding, 0, 0, row.data());
  for (int k = 0; k < hidden; ++k) {
    const auto low = static_cast<uint16_t>(info->data[static_cast<size_t>(2 * k)]),
               high = static_cast<uint16_t>(info->data[static_cast<size_t>(2 * k + 1)]);
    EXPECT_EQ(row[static_cast<size_t>(k)], bf16_to_f32(static_cast<uint16_t>(low | (high << 8))));
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, GoldenCheckpoint,
                         ::testing::Values(Golden{"golden/llama-gqa", 29}, Golden{"golden/llama-mha", 30}, Golden{"golden/llama3-rope", 30},
                                           Golden{"golden/qwen2", 39}, Golden{"golden/qwen3", 36}, Golden{"golden/deepseek-v2", 89},
                                           Golden{"golden/deepseek-v2-lite", 83}, Golden{"golden/deepseek-v2-norope-scaling", 83},
                                           Golden{"golden/deepseek-v3", 91}, Golden{"tiny-v2", 248}, Golden{"tiny-v3", 616}),
                         [](const auto& param) {
                           std::string name = param.param.name;
                           std::replace_if(
                               name.begin(), name.end(), [](char c) { return std::isalnum(c) == 0; }, '_');
                           return name;
                         });

// The model with FP8 weights: codes times scales, experts in the order of their ids, the prediction layer after the last one.
TEST(TinyV3, HasScaledWeightsStacksAndThePredictionLayer) {
  const auto checkpoint = Checkpoint::open(testdata("tiny-v3"));
  const LinearSource kv_a = checkpoint->linear("blk.0.attn_kv_a_mqa.weight", 1, 160, 256);
  EXPECT_EQ(kv_a.format, Format::fp8_block);
  EXPECT_EQ(kv_a.matrices[0].data.size(), 160U * 256U);
  EXPECT_EQ(kv_a.matrices[0].scales.size(), 2U * 2U * sizeof(float));
  std::vector<float> row(256);
  dequant_row(kv_a, 0, 159, row.data());  // in the lower, partial block
  for (const size_t k : {0, 127, 128, 255}) {
    float scale = 0;
    std::memcpy(&scale, kv_a.matrices[0].scales.data() + (2 + k / 128) * sizeof(float), sizeof scale);
    EXPECT_EQ(row[k], e4m3_to_f32(static_cast<uint8_t>(kv_a.matrices[0].data[159 * 256 + k])) * scale);
  }
  // Experts 6 and 7 of layer 2 lie in the second file, some scales of theirs apart from the codes.
  const LinearSource experts = checkpoint->linear("blk.2.ffn_gate_exps.weight", 16, 128, 256);
  EXPECT_EQ(experts.n_matrices(), 16);
  EXPECT_EQ(experts.keep_alive.size(), 2U);
  for (int e = 0; e < 16; ++e) {
    const auto name = fmt::format("model.layers.2.mlp.experts.{}.gate_proj.weight", e);
    const auto stored = std::find_if(checkpoint->tensors().begin(), checkpoint->tensors().end(),
                                     [&](const TensorInfo& tensor) { return tensor.name == name; });
    ASSERT_NE(stored, checkpoint->tensors().end());
    EXPECT_EQ(stored->data.data(), experts.matrices[static_cast<size_t>(e)].data.data()) << name;
  }
  EXPECT_EQ(checkpoint->vector("blk.4.exp_probs_b.bias", 16).size(), 16U);
  EXPECT_TRUE(checkpoint->has("blk.5.nextn.eh_proj.weight"));
  EXPECT_EQ(checkpoint->linear("blk.5.nextn.eh_proj.weight", 1, 256, 512).format, Format::bf16);
  EXPECT_EQ(checkpoint->vector("blk.5.nextn.enorm.weight", 256).size(), 256U);
  EXPECT_FALSE(checkpoint->has("blk.6.attn_norm.weight"));
  EXPECT_FALSE(checkpoint->has("output.weight"));  // tied
  EXPECT_NE(checkpoint->tokenizer_json(), "");
  EXPECT_NE(checkpoint->tokenizer_config_json(), "");
  EXPECT_EQ(checkpoint->gguf(), nullptr);
}

TEST(GoldenV32, LeavesTheIndexerUnmapped) {
  const auto checkpoint = Checkpoint::open(testdata("golden/deepseek-v32"));
  EXPECT_EQ(checkpoint->unmapped().size(), 15U);
  for (const std::string& name : checkpoint->unmapped()) EXPECT_THAT(name, HasSubstr(".self_attn.indexer."));
}

// Safetensors checkpoints made for one question each.
class MadeCheckpoint : public ::testing::Test {
 protected:
  void add(const std::string& name, const std::string& dtype, std::vector<int64_t> shape, char fill = 0) {
    int64_t n = find_safetensors_dtype(dtype)->bits / 8;
    for (const int64_t d : shape) n *= d;
    buffers_.emplace_back(static_cast<size_t>(n), static_cast<std::byte>(fill));
    tensors_.push_back({name, dtype, std::move(shape), {}});
  }
  std::unique_ptr<Checkpoint> open() {
    for (size_t i = 0; i < tensors_.size(); ++i) tensors_[i].data = buffers_[i];
    write_safetensors(dir_.path() / "model.safetensors", tensors_);
    return Checkpoint::open(dir_.path());
  }
  void add_expert(int id, const std::string& dtype = "F32", std::vector<int64_t> shape = {4, 8}) {
    add(fmt::format("model.layers.1.mlp.experts.{}.up_proj.weight", id), dtype, std::move(shape), static_cast<char>(id));
  }
  static std::string refusal(const std::unique_ptr<Checkpoint>& checkpoint, std::string_view name, int n, int out, int in) {
    return error_of([&] { static_cast<void>(checkpoint->linear(name, n, out, in)); });
  }
  test::TempDir dir_;
  std::vector<SafetensorsOutput> tensors_;
  std::vector<std::vector<std::byte>> buffers_;
};

TEST_F(MadeCheckpoint, StacksExpertsByNumber) {
  for (const int id : {11, 2, 0, 1, 10, 3, 9, 4, 8, 5, 7, 6}) add_expert(id);
  const auto checkpoint = open();
  EXPECT_TRUE(checkpoint->has("blk.1.ffn_up_exps.weight"));
  const LinearSource stack = checkpoint->linear("blk.1.ffn_up_exps.weight", 12, 4, 8);
  for (int e = 0; e < 12; ++e) EXPECT_EQ(static_cast<int>(stack.matrices[static_cast<size_t>(e)].data[0]), e);
  EXPECT_THAT(refusal(checkpoint, "blk.1.ffn_up_exps.weight", 13, 4, 8),
              AllOf(HasSubstr("experts.12.up_proj.weight\" is missing"), HasSubstr("13 experts")));
  EXPECT_THAT(refusal(checkpoint, "blk.1.ffn_up_exps.weight", 11, 4, 8),
              AllOf(HasSubstr("experts.11.up_proj.weight"), HasSubstr("but 11 experts are expected")));
}

TEST_F(MadeCheckpoint, NamesTheExpertThatIsMissing) {
  for (const int id : {0, 1, 3}) add_expert(id);
  const auto checkpoint = open();
  EXPECT_FALSE(checkpoint->has("blk.1.ffn_up_exps.weight"));
  EXPECT_THAT(refusal(checkpoint, "blk.1.ffn_up_exps.weight", 4, 4, 8),
              HasSubstr("\"model.layers.1.mlp.experts.2.up_proj.weight\" is missing"));
}

TEST_F(MadeCheckpoint, NamesTheExpertThatDiffers) {
  add_expert(0);
  add_expert(1, "BF16");
  add("model.layers.2.mlp.experts.0.up_proj.weight", "F32", {4, 8});
  add("model.layers.2.mlp.experts.1.up_proj.weight", "F32", {8, 4});
  const auto checkpoint = open();
  EXPECT_THAT(refusal(checkpoint, "blk.1.ffn_up_exps.weight", 2, 4, 8),
              AllOf(HasSubstr("experts.1."), HasSubstr("type: found BF16, expected F32")));
  EXPECT_THAT(refusal(checkpoint, "blk.2.ffn_up_exps.weight", 2, 4, 8),
              AllOf(HasSubstr("experts.1."), HasSubstr("shape: found [8, 4], expected [4, 8]")));
}

TEST_F(MadeCheckpoint, NamesWhatIsMissingOrOfAnotherShapeOrType) {
  add("model.layers.0.self_attn.q_proj.weight", "F32", {4, 8});
  add("model.layers.0.mlp.up_proj.weight", "I32", {4, 8});
  add("model.norm.weight", "I64", {8});
  add("model.layers.0.input_layernorm.weight", "F16", {8});
  const auto checkpoint = open();
  EXPECT_THAT(refusal(checkpoint, "blk.0.attn_q.weight", 1, 8, 4),
              AllOf(HasSubstr("model.safetensors"), HasSubstr("q_proj"), HasSubstr("found [4, 8], expected [8, 4]")));
  EXPECT_THAT(refusal(checkpoint, "blk.0.attn_q.weight", 2, 4, 8), AllOf(HasSubstr("q_proj"), HasSubstr("found one matrix, expected 2")));
  EXPECT_THAT(refusal(checkpoint, "blk.0.attn_k.weight", 1, 4, 8), HasSubstr("\"model.layers.0.self_attn.k_proj.weight\" is missing"));
  EXPECT_THAT(refusal(checkpoint, "blk.0.attn_k_b.weight", 1, 4, 8), HasSubstr("\"blk.0.attn_k_b.weight\" is missing"));
  EXPECT_THAT(refusal(checkpoint, "blk.0.ffn_up.weight", 1, 4, 8), AllOf(HasSubstr("up_proj"), HasSubstr("type: found I32")));
  EXPECT_THAT(error_of([&] { static_cast<void>(checkpoint->vector("output_norm.weight", 8)); }), HasSubstr("type: found I64"));
  EXPECT_THAT(error_of([&] { static_cast<void>(checkpoint->vector("blk.0.attn_norm.weight", 9)); }),
              HasSubstr("shape: found [8], expected [9]"));
}

TEST_F(MadeCheckpoint, ChecksScalesOfFp8) {
  const auto weight = [this](int layer, std::vector<int64_t> shape) {
    add(fmt::format("model.layers.{}.self_attn.o_proj.weight", layer), "F8_E4M3", std::move(shape));
  };
  const auto scale = [this](int layer, const char* dtype, std::vector<int64_t> shape) {
    add(fmt::format("model.layers.{}.self_attn.o_proj.weight_scale_inv", layer), dtype, std::move(shape));
  };
  weight(0, {192, 300});
  scale(0, "F32", {2, 3});
  weight(1, {192, 300});
  scale(1, "F32", {3, 2});
  weight(2, {192, 300});
  scale(2, "I32", {2, 3});
  weight(3, {192, 300});
  scale(9, "F32", {2, 3});
  const auto checkpoint = open();
  EXPECT_EQ(checkpoint->linear("blk.0.attn_output.weight", 1, 192, 300).matrices[0].scales.size(), 24U);
  EXPECT_THAT(refusal(checkpoint, "blk.1.attn_output.weight", 1, 192, 300),
              AllOf(HasSubstr("layers.1.self_attn.o_proj.weight_scale_inv"), HasSubstr("found [3, 2], expected [2, 3]")));
  EXPECT_THAT(refusal(checkpoint, "blk.2.attn_output.weight", 1, 192, 300),
              AllOf(HasSubstr("o_proj.weight_scale_inv"), HasSubstr("found I32, expected F32, BF16 or F16")));
  EXPECT_THAT(refusal(checkpoint, "blk.3.attn_output.weight", 1, 192, 300),
              HasSubstr("\"model.layers.3.self_attn.o_proj.weight_scale_inv\" is missing"));
  EXPECT_EQ(checkpoint->unmapped(), std::vector<std::string>{"model.layers.9.self_attn.o_proj.weight_scale_inv"});
}

TEST_F(MadeCheckpoint, RefusesTwoNamesOfOneTensor) {
  add("model.norm.weight", "F32", {8});
  add("norm.weight", "F32", {8});
  EXPECT_THAT(error_of([&] { static_cast<void>(open()); }),
              AllOf(HasSubstr("\"model.norm.weight\""), HasSubstr("\"norm.weight\""), HasSubstr("output_norm.weight")));
}

TEST(GgufCheckpoint, HasMatricesStacksAndVectors) {
  const test::TempDir dir;
  const auto path = dir.path() / "m.gguf";
  const auto values = test::random_floats(3 * 2 * 64, 5);
  {
    GgufWriter writer(path);
    writer.declare("blk.0.ffn_up_exps.weight", Format::f32, {3, 2, 64});
    writer.declare("blk.0.attn_k_b.weight", Format::q8_0, {2, 4, 32});
    writer.declare("blk.0.attn_q.weight", Format::f32, {1, 6, 64});
    writer.declare("output_norm.weight", Format::f32, {64});
    writer.declare("mystery.weight", Format::f16, {2});
    writer.write(std::as_bytes(std::span(values)));
    writer.write(std::vector<std::byte>(2 * 4 * 34));
    writer.write(std::as_bytes(std::span(values)));
    writer.write(std::as_bytes(std::span(values)).first(256));
    writer.write(std::vector<std::byte>(4));
    writer.commit();
  }
  const auto checkpoint = Checkpoint::open(path);
  EXPECT_NE(checkpoint->gguf(), nullptr);
  const LinearSource experts = checkpoint->linear("blk.0.ffn_up_exps.weight", 3, 2, 64);
  ASSERT_EQ(experts.n_matrices(), 3);
  std::vector<float> row(64);
  dequant_row(experts, 2, 1, row.data());
  EXPECT_EQ(row, std::vector<float>(values.end() - 64, values.end()));
  EXPECT_EQ(checkpoint->linear("blk.0.attn_k_b.weight", 2, 4, 32).matrices[1].data.size(), 4U * 34U);
  EXPECT_EQ(checkpoint->linear("blk.0.attn_q.weight", 1, 6, 64).n_matrices(), 1);  // an outer dimension of one
  EXPECT_EQ(checkpoint->vector("output_norm.weight", 64), std::vector<float>(values.begin(), values.begin() + 64));
  EXPECT_EQ(checkpoint->unmapped(), std::vector<std::string>{"mystery.weight"});
  const auto refusal = [&](std::string_view name, int n, int out, int in) {
    return error_of([&] { static_cast<void>(checkpoint->linear(name, n, out, in)); });
  };
  EXPECT_THAT(refusal("blk.0.ffn_up_exps.weight", 2, 3, 64),
              AllOf(HasSubstr("m.gguf"), HasSubstr("ffn_up_exps"), HasSubstr("found [3, 2, 64], expected [2, 3, 64]")));
  EXPECT_THAT(refusal("blk.0.attn_q.weight", 1, 64, 6), HasSubstr("found [1, 6, 64], expected [64, 6]"));
  EXPECT_THAT(refusal("blk.0.ffn_up_exps.weight", 1, 6, 64), HasSubstr("found [3, 2, 64], expected [6, 64]"));
  EXPECT_THAT(refusal("blk.1.attn_q.weight", 1, 6, 64), HasSubstr("the tensor \"blk.1.attn_q.weight\" is missing"));
  EXPECT_THAT(error_of([&] { static_cast<void>(checkpoint->vector("output_norm.weight", 32)); }), HasSubstr("found [64], expected [32]"));
}

TEST(Checkpoint, AdaptersAndHubNamesAreToldFromModels) {
  const test::TempDir dir;
  for (const char* file : {"adapter_config.json", "adapter_model.safetensors"}) static_cast<void>(dir.write(file, "{}"));
  EXPECT_THAT(error_of([&] { Checkpoint::open(dir.path()); }), HasSubstr("found an adapter (adapter_config.json)"));
  for (const char* name : {"deepseek-ai/DeepSeek-V2-Lite", "https://example.org/a/b"})
    EXPECT_THAT(error_of([&] { Checkpoint::open(name); }), HasSubstr("not fetched from a hub"));
  for (const char* path : {"/no/such/model", "./models/a", "model.gguf", "a/b/c"})
    EXPECT_THAT(error_of([&] { Checkpoint::open(path); }), ::testing::EndsWith("no such file or directory"));
}

}  // namespace
}  // namespace cachalot
