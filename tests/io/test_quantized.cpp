// AWQ, GPTQ, compressed-tensors and FP8 directories: what they hold is read, and what does not fit is refused by name.
#include <gmock/gmock.h>

#include <cstring>
#include <fstream>

#include "base/float_formats.h"
#include "io/checkpoint.h"
#include "io/quant_config.h"
#include "io/safetensors.h"
#include "support/support.h"
#include "tensor/pack_words.h"

namespace cachalot {
namespace {

using test::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr const char* kAwq = R"({"quant_method":"awq","bits":4,"group_size":32,"version":"gemm","modules_to_not_convert":["lm_head"]})";
constexpr const char* kGptq = R"({"quant_method":"gptq","bits":4,"group_size":32,"desc_act":true,"sym":true})";
constexpr const char* kGptq2 = R"({"quant_method":"gptq","bits":8,"group_size":-1,"checkpoint_format":"gptq_v2"})";
constexpr const char* kPacked =
    R"({"quant_method":"compressed-tensors","format":"pack-quantized","ignore":["lm_head","re:.*gate"],"config_groups":{"group_0":{
        "targets":["Linear"],"weights":{"num_bits":4,"type":"int","symmetric":false,"strategy":"group","group_size":32}}}})";

// A planar matrix of random codes.
struct Planar {
  PlanarWeights weights;
  LinearSource source;

  Planar(int out, int in, int bits, int group, bool symmetric, uint64_t seed) {
    std::mt19937_64 engine(seed);
    const auto n_groups = static_cast<size_t>(out) * static_cast<size_t>(in / group);
    weights = {.out = out, .in = in, .bits = bits, .group = group};
    for (size_t i = 0; i < static_cast<size_t>(out) * static_cast<size_t>(in) * static_cast<size_t>(bits) / 8; ++i)
      weights.codes.push_back(static_cast<std::byte>(engine() & 255));
    for (size_t i = 0; i < n_groups; ++i) {
      weights.zeros.push_back(static_cast<std::byte>(symmetric ? 1 << (bits - 1) : 1 + static_cast<int>(engine() % 14)));
      const uint16_t scale = f32_to_f16(0.001f + 0.0001f * static_cast<float>(engine() % 1000));
      weights.scales.push_back(static_cast<std::byte>(scale & 255));
      weights.scales.push_back(static_cast<std::byte>(scale >> 8));
    }
    std::vector<PlanarWeights> one{weights};
    source = planar_source("made", std::move(one));
  }
};

void expect_equal(const LinearSource& a, int matrix_a, const LinearSource& b, int matrix_b) {
  ASSERT_EQ(a.in, b.in);
  std::vector<float> x(static_cast<size_t>(a.in)), y(x.size());
  for (int r = 0; r < a.out; ++r) {
    dequant_row_by_input(a, matrix_a, r, x.data());
    dequant_row_by_input(b, matrix_b, r, y.data());
    ASSERT_EQ(x, y) << r;
  }
}

class QuantizedDirectory : public ::testing::Test {
 protected:
  void add(const std::string& name, const std::string& dtype, std::vector<int64_t> shape, std::vector<std::byte> bytes) {
    buffers_.push_back(std::move(bytes));
    tensors_.push_back({name, dtype, std::move(shape), {}});
  }
  void add(const std::string& name, const std::string& dtype, std::vector<int64_t> shape) {
    int64_t n = find_safetensors_dtype(dtype)->bits / 8;
    for (const int64_t d : shape) n *= d;
    add(name, dtype, std::move(shape), std::vector<std::byte>(static_cast<size_t>(n)));
  }
  void add_awq(const std::string& module, const Planar& p) {
    const AwqWords words = pack_awq(p.source, 0);
    const int64_t out = p.source.out, in = p.source.in, groups = in / p.source.group;
    add(module + ".qweight", "I32", {in, out / 8}, words.qweight);
    add(module + ".qzeros", "I32", {groups, out / 8}, words.qzeros);
    add(module + ".scales", "F16", {groups, out}, words.scales);
  }
  void add_gptq(const std::string& module, const Planar& p, GptqVersion version, const std::vector<int32_t>& g_idx = {}) {
    GptqWords words = pack_gptq(p.source, 0, version);
    const int64_t out = p.source.out, in = p.source.in, groups = in / p.source.group, n = p.weights.bits == 4 ? 8 : 4;
    if (!g_idx.empty()) std::memcpy(words.g_idx.data(), g_idx.data(), words.g_idx.size());
    add(module + ".qweight", "I32", {in / n, out}, words.qweight);
    add(module + ".qzeros", "I32", {groups, out / n}, words.qzeros);
    add(module + ".scales", "F16", {groups, out}, words.scales);
    add(module + ".g_idx", "I32", {in}, words.g_idx);
  }
  // Scales of an odd multiple of 2^-8 are the same number in bf16.
  void add_packed(const std::string& module, const Planar& p, bool symmetric, const char* scale_type = "F16") {
    const PackQuantizedWords words = pack_quantized(p.source, 0, symmetric);
    const int64_t out = p.source.out, in = p.source.in, groups = in / p.source.group, n = p.weights.bits == 4 ? 8 : 4;
    add(module + ".weight_packed", "I32", {out, in / n}, words.weight_packed);
    std::vector<std::byte> scales = words.weight_scale;
    if (std::string(scale_type) == "F32") {
      scales.clear();
      for (size_t i = 0; i < words.weight_scale.size(); i += 2) {
        uint16_t half = 0;
        std::memcpy(&half, &words.weight_scale[i], 2);
        const float wide = f16_to_f32(half);
        for (const std::byte b : std::as_bytes(std::span(&wide, 1))) scales.push_back(b);
      }
    }
    add(module + ".weight_scale", scale_type, {out, groups}, scales);
    const int64_t shape[2] = {out, in};
    const auto bytes = std::as_bytes(std::span(shape));
    add(module + ".weight_shape", "I64", {2}, {bytes.begin(), bytes.end()});
    if (!symmetric) add(module + ".weight_zero_point", "I32", {out / n, groups}, words.weight_zero_point);
  }
  void drop(const std::string& name) {
    for (size_t i = 0; i < tensors_.size(); ++i)
      if (tensors_[i].name == name) {
        tensors_.erase(tensors_.begin() + static_cast<int64_t>(i));
        buffers_.erase(buffers_.begin() + static_cast<int64_t>(i));
        return;
      }
    FAIL() << name;
  }
  std::unique_ptr<Checkpoint> open(const std::string& quantization, const char* file = "config.json") {
    for (size_t i = 0; i < tensors_.size(); ++i) tensors_[i].data = buffers_[i];
    write_safetensors(dir_.path() / "model.safetensors", tensors_);
    const bool config = std::string(file) == "config.json";
    std::ofstream(dir_.path() / file) << (config ? R"({"model_type":"llama","quantization_config":)" + quantization + "}" : quantization);
    return Checkpoint::open(dir_.path());
  }
  static std::string refusal(const std::unique_ptr<Checkpoint>& checkpoint, std::string_view name, int n, int out, int in) {
    return error_of([&] { static_cast<void>(checkpoint->linear(name, n, out, in)); });
  }
  static constexpr const char* kModule = "model.layers.0.mlp.up_proj";
  static constexpr const char* kName = "blk.0.ffn_up.weight";

  test::TempDir dir_;
  std::vector<SafetensorsOutput> tensors_;
  std::vector<std::vector<std::byte>> buffers_;
};

TEST_F(QuantizedDirectory, ReadsAwq) {
  const Planar p(24, 64, 4, 32, false, 1);
  add_awq(kModule, p);
  add("lm_head.weight", "F16", {16, 8});
  const auto checkpoint = open(kAwq);
  EXPECT_THAT(checkpoint->unmapped(), IsEmpty());
  EXPECT_TRUE(checkpoint->has(kName));
  expect_equal(checkpoint->linear(kName, 1, 24, 64), 0, p.source, 0);
  EXPECT_EQ(checkpoint->linear("output.weight", 1, 16, 8).format, Format::f16);
}

TEST_F(QuantizedDirectory, ReadsAwqByItsOlderFile) {
  const Planar p(24, 64, 4, 32, false, 1);
  add_awq(kModule, p);
  const auto checkpoint = open(R"({"zero_point":true,"q_group_size":32,"w_bit":4,"version":"GEMM"})", "quant_config.json");
  expect_equal(checkpoint->linear(kName, 1, 24, 64), 0, p.source, 0);
}

TEST_F(QuantizedDirectory, ReadsGptqWithItsOrders) {
  const Planar plain(16, 64, 4, 32, true, 2), ordered(16, 64, 4, 32, true, 3);
  std::vector<int32_t> g_idx(64);
  for (int k = 0; k < 64; ++k) g_idx[static_cast<size_t>(k)] = k % 2;
  add_gptq("model.layers.0.self_attn.q_proj", plain, GptqVersion::v1);
  add_gptq(kModule, ordered, GptqVersion::v1, g_idx);
  const auto checkpoint = open(kGptq);
  EXPECT_THAT(checkpoint->unmapped(), IsEmpty());
  expect_equal(checkpoint->linear("blk.0.attn_q.weight", 1, 16, 64), 0, plain.source, 0);
  const LinearSource found = checkpoint->linear(kName, 1, 16, 64);
  EXPECT_EQ(found.perm.size(), 64U);
  std::vector<float> row(64), stored(64);
  dequant_row_by_input(found, 0, 5, row.data());
  for (int k = 0; k < 64; ++k) {
    const size_t g = 5 * 2 + static_cast<size_t>(k % 2);
    uint16_t scale = 0;
    std::memcpy(&scale, &ordered.weights.scales[2 * g], 2);
    const int code = std::to_integer<int>(ordered.weights.codes[static_cast<size_t>(5 * 32 + k / 2)] >> (4 * (k % 2))) & 15;
    EXPECT_EQ(row[static_cast<size_t>(k)], static_cast<float>(code - 8) * f16_to_f32(scale)) << k;
  }
}

TEST_F(QuantizedDirectory, ReadsGptqV2OfEightBitsByItsOlderFile) {
  const Planar p(16, 64, 8, 64, false, 4);
  add_gptq(kModule, p, GptqVersion::v2);
  const auto checkpoint = open(kGptq2, "quantize_config.json");
  const LinearSource found = checkpoint->linear(kName, 1, 16, 64);
  EXPECT_EQ(found.format, Format::int8_planar);
  expect_equal(found, 0, p.source, 0);
}

TEST_F(QuantizedDirectory, StacksExpertsOfDifferentOrdersAsHalves) {
  std::vector<int32_t> a(64), b(64);
  for (int k = 0; k < 64; ++k) {
    a[static_cast<size_t>(k)] = k % 2;
    b[static_cast<size_t>(k)] = k / 16 % 2;
  }
  for (const auto& [id, order] : {std::pair{0, a}, {1, b}})
    add_gptq(fmt::format("model.layers.0.mlp.experts.{}.up_proj", id), Planar(16, 64, 4, 32, true, 7), GptqVersion::v1, order);
  const auto checkpoint = open(kGptq);
  const LinearSource stack = checkpoint->linear("blk.0.ffn_up_exps.weight", 2, 16, 64);
  EXPECT_EQ(stack.format, Format::f16);
  EXPECT_THAT(stack.perm, IsEmpty());
  // Column 16 is of group 0 by the first order and of group 1 by the second.
  const Planar p(16, 64, 4, 32, true, 7);
  std::vector<float> first(64), second(64);
  dequant_row(stack, 0, 3, first.data());
  dequant_row(stack, 1, 3, second.data());
  uint16_t scales[2] = {};
  std::memcpy(scales, &p.weights.scales[2 * 3 * 2], 4);
  const int code = (std::to_integer<int>(p.weights.codes[3 * 32 + 8]) & 15) - 8;
  const auto half = [](float x) { return f16_to_f32(f32_to_f16(x)); };
  EXPECT_EQ(first[16], half(static_cast<float>(code) * f16_to_f32(scales[0])));
  EXPECT_EQ(second[16], half(static_cast<float>(code) * f16_to_f32(scales[1])));
}

TEST_F(QuantizedDirectory, ReadsPackQuantized) {
  const Planar skew(24, 64, 4, 32, false, 5), even(24, 64, 4, 32, true, 6);
  add_packed(kModule, skew, false);
  add_packed("model.layers.0.mlp.gate_proj", even, true, "F32");
  const auto checkpoint = open(kPacked);
  EXPECT_THAT(checkpoint->unmapped(), IsEmpty());
  expect_equal(checkpoint->linear(kName, 1, 24, 64), 0, skew.source, 0);
  expect_equal(checkpoint->linear("blk.0.ffn_gate.weight", 1, 24, 64), 0, even.source, 0);
}

TEST_F(QuantizedDirectory, ReadsFp8WithOneScaleOrBlocks) {
  const float one = 0.5f;
  const auto bytes = std::as_bytes(std::span(&one, 1));
  add(std::string(kModule) + ".weight", "F8_E4M3", {160, 64}, std::vector<std::byte>(160 * 64, std::byte{0x38}));  // 1.0
  add(std::string(kModule) + ".weight_scale", "F32", {1}, {bytes.begin(), bytes.end()});
  add(std::string(kModule) + ".input_scale", "F32", {1});
  add("model.layers.0.mlp.gate_proj.weight", "F8_E4M3", {160, 64}, std::vector<std::byte>(160 * 64, std::byte{0x38}));
  add("model.layers.0.mlp.gate_proj.weight_scale", "BF16", {2, 1}, {std::byte{0x00}, std::byte{0x40}, std::byte{0x80}, std::byte{0x40}});
  add("model.layers.1.mlp.up_proj.weight", "F8_E4M3", {160, 64});
  add("model.layers.1.mlp.up_proj.weight_scale", "F32", {160, 1});
  const auto checkpoint =
      open(R"({"quant_method":"compressed-tensors","format":"float-quantized","config_groups":{"g":{"targets":["Linear"],
      "weights":{"num_bits":8,"type":"float","strategy":"block","block_structure":[128,128]}}}})");
  EXPECT_THAT(checkpoint->unmapped(), IsEmpty());
  std::vector<float> row(64);
  dequant_row(checkpoint->linear(kName, 1, 160, 64), 0, 150, row.data());
  EXPECT_EQ(row[7], 0.5f);
  const LinearSource blocks = checkpoint->linear("blk.0.ffn_gate.weight", 1, 160, 64);
  dequant_row(blocks, 0, 0, row.data());
  EXPECT_EQ(row[7], 2.0f);
  dequant_row(blocks, 0, 159, row.data());
  EXPECT_EQ(row[7], 4.0f);
  EXPECT_THAT(refusal(checkpoint, "blk.1.ffn_up.weight", 1, 160, 64),
              AllOf(HasSubstr("a scale for each output"), HasSubstr("expected one scale or blocks of 128 x 128: [2, 1]")));
}

TEST_F(QuantizedDirectory, NamesWhatIsMissing) {
  const Planar p(24, 64, 4, 32, false, 1);
  add_awq(kModule, p);
  drop(std::string(kModule) + ".qzeros");
  EXPECT_THAT(refusal(open(kAwq), kName, 1, 24, 64), AllOf(HasSubstr("model.safetensors: tensor \"model.layers.0.mlp.up_proj.qweight\""),
                                                           HasSubstr("up_proj.qzeros\", which is missing")));
  add_awq("model.layers.1.mlp.up_proj", p);
  drop("model.layers.1.mlp.up_proj.scales");
  EXPECT_THAT(refusal(open(kAwq), "blk.1.ffn_up.weight", 1, 24, 64), HasSubstr("up_proj.scales\", which is missing"));
  EXPECT_THAT(refusal(open("null"), kName, 1, 24, 64), HasSubstr("has no quantization_config that says how to read them"));
  EXPECT_THAT(refusal(open(kPacked), kName, 1, 24, 64), HasSubstr("says something else"));
}

TEST_F(QuantizedDirectory, NamesShapesAndTypesThatDoNotFit) {
  const auto one = [this](const char* config, const std::string& ending, const char* dtype, std::vector<int64_t> shape) {
    tensors_.clear();
    buffers_.clear();
    const Planar p(24, 64, 4, 32, true, 1);
    if (config == kAwq)
      add_awq(kModule, p);
    else if (config == kGptq)
      add_gptq(kModule, p, GptqVersion::v1);
    else
      add_packed(kModule, p, false);
    drop(kModule + ending);
    add(kModule + ending, dtype, std::move(shape));
    return refusal(open(config), kName, 1, 24, 64);
  };
  EXPECT_THAT(one(kAwq, ".qweight", "I32", {64, 4}), HasSubstr("qweight\": shape: found [64, 4], expected [64, 3]"));
  EXPECT_THAT(one(kAwq, ".qweight", "F32", {64, 3}), HasSubstr("qweight\": type: found F32, expected I32"));
  EXPECT_THAT(one(kAwq, ".qzeros", "I32", {1, 3}), HasSubstr("qzeros\": shape: found [1, 3], expected [2, 3]"));
  EXPECT_THAT(one(kAwq, ".scales", "F16", {4, 24}), HasSubstr("scales\": shape: found [4, 24], expected [2, 24]"));
  EXPECT_THAT(one(kAwq, ".scales", "I32", {2, 24}), HasSubstr("scales\": type: found I32, expected F16, BF16 or F32"));
  EXPECT_THAT(one(kGptq, ".g_idx", "I32", {63}), HasSubstr("g_idx\": shape: found [63], expected [64]"));
  EXPECT_THAT(one(kGptq, ".g_idx", "I32", {64}), HasSubstr("g_idx: found 64 columns in group 0, expected 32"));
  EXPECT_THAT(one(kGptq, ".qweight", "I32", {16, 24}), HasSubstr("qweight\": shape: found [16, 24], expected [8, 24]"));
  EXPECT_THAT(one(kPacked, ".weight_packed", "I32", {24, 16}), HasSubstr("weight_packed\": shape: found [24, 16], expected [24, 8]"));
  EXPECT_THAT(one(kPacked, ".weight_scale", "F16", {24, 1}), HasSubstr("weight_scale\": shape: found [24, 1], expected [24, 2]"));
  EXPECT_THAT(one(kPacked, ".weight_zero_point", "I32", {24, 2}), HasSubstr("weight_zero_point\": shape: found [24, 2], expected [3, 2]"));
  EXPECT_THAT(one(kPacked, ".weight_shape", "I64", {2}), HasSubstr("found the shape [0, 0], expected [24, 64]"));
  EXPECT_THAT(one(kPacked, ".weight_shape", "F32", {2}), HasSubstr("type: found F32, expected I64 or I32"));
  // Sizes that the words cannot hold.
  tensors_.clear();
  buffers_.clear();
  add_awq(kModule, Planar(24, 64, 4, 32, true, 1));
  EXPECT_THAT(refusal(open(kAwq), kName, 1, 20, 64), HasSubstr("found 20 outputs, expected a multiple of 8"));
  EXPECT_THAT(refusal(open(kAwq), kName, 1, 24, 1 << 30), HasSubstr("found [2, 24]"));
}

TEST_F(QuantizedDirectory, HoldsToTheModulesThatAreKept) {
  add_awq("lm_head", Planar(24, 64, 4, 32, true, 1));
  EXPECT_THAT(refusal(open(kAwq), "output.weight", 1, 24, 64),
              AllOf(HasSubstr("\"lm_head.qweight\": is quantized"), HasSubstr("config.json: quantization_config: modules_to_not_convert")));
}

TEST_F(QuantizedDirectory, RefusesMixedExperts) {
  add_awq("model.layers.0.mlp.experts.0.up_proj", Planar(24, 64, 4, 32, true, 1));
  add("model.layers.0.mlp.experts.1.up_proj.weight", "F16", {24, 64});
  EXPECT_THAT(refusal(open(kAwq), "blk.0.ffn_up_exps.weight", 2, 24, 64), HasSubstr("type: found F16, expected I32"));
}

std::string refusal_of(const std::string& quantization) {
  const std::string config = R"({"quantization_config":)" + quantization + "}";
  return error_of([&] { read_quant_config({"dir", config, {}, {}}); });
}

TEST(QuantConfig, NamesFileFieldFoundAndExpected) {
  EXPECT_EQ(refusal_of(R"({"quant_method":"awq","bits":3,"group_size":128})"),
            "dir/config.json: quantization_config: bits: found 3, expected 4");
  EXPECT_EQ(refusal_of(R"({"quant_method":"awq","bits":4,"group_size":0})"),
            "dir/config.json: quantization_config: group_size: found 0, expected -1 or a positive number");
  EXPECT_EQ(refusal_of(R"({"quant_method":"awq","bits":4,"group_size":128,"version":"gemv"})"),
            "dir/config.json: quantization_config: version: found \"gemv\", expected \"gemm\"");
  EXPECT_THAT(refusal_of(R"({"quant_method":"awq","bits":4,"group_size":128,"backend":"llm-awq"})"),
              HasSubstr("backend: found \"llm-awq\""));
  EXPECT_EQ(refusal_of(R"({"quant_method":"gptq","bits":2,"group_size":128})"),
            "dir/config.json: quantization_config: bits: found 2, expected 4 or 8");
  EXPECT_THAT(refusal_of(R"({"quant_method":"gptq","bits":4,"group_size":128,"checkpoint_format":"marlin"})"),
              HasSubstr("checkpoint_format: found \"marlin\", expected \"gptq\" or \"gptq_v2\""));
  EXPECT_THAT(refusal_of(R"({"quant_method":"gptq","group_size":128})"), HasSubstr("the key \"bits\" is missing"));
  EXPECT_THAT(refusal_of(R"({"quant_method":"gptq","bits":"4","group_size":128})"), HasSubstr("bits: found a string"));
  EXPECT_THAT(refusal_of(R"({"quant_method":"bitsandbytes"})"), HasSubstr("quant_method: found \"bitsandbytes\", expected \"awq\""));
  EXPECT_THAT(refusal_of(R"({"bits":4})"), HasSubstr("the key \"quant_method\" is missing"));
  const auto packed = [](const std::string& weights, const std::string& more = "") {
    return refusal_of(R"({"quant_method":"compressed-tensors",)" + more + R"("config_groups":{"g0":{"weights":{)" + weights + "}}}}");
  };
  EXPECT_THAT(packed(R"("num_bits":3,"type":"int","strategy":"channel")"), HasSubstr("config_groups: g0: weights: num_bits: found 3"));
  EXPECT_THAT(packed(R"("num_bits":4,"type":"int","strategy":"token")"), HasSubstr("strategy: found \"token\""));
  EXPECT_THAT(packed(R"("num_bits":4,"type":"float","strategy":"group")"), HasSubstr("num_bits: found 4, expected 8 for type \"float\""));
  EXPECT_THAT(packed(R"("num_bits":8,"type":"float","strategy":"channel")"), HasSubstr("strategy: found \"channel\", expected \"block\""));
  EXPECT_THAT(packed(R"("num_bits":8,"type":"float","strategy":"block","block_structure":[64,64])"),
              HasSubstr("found [64, 64], expected [128, 128]"));
  EXPECT_THAT(packed(R"("num_bits":4,"type":"int","strategy":"group","group_size":32)", R"("format":"nvfp4-pack-quantized",)"),
              HasSubstr("format: found \"nvfp4-pack-quantized\""));
  EXPECT_THAT(
      packed(R"("num_bits":4,"type":"int","strategy":"group","group_size":32)", R"("sparsity_config":{"format":"sparse-24-bitmask"},)"),
      HasSubstr("sparsity_config: format: found \"sparse-24-bitmask\""));
  EXPECT_THAT(packed(R"("num_bits":4,"type":"int","strategy":"group","group_size":32)", R"("transform_config":{"config_groups":{}},)"),
              HasSubstr("transform_config: found transforms"));
  EXPECT_THAT(refusal_of(R"({"quant_method":"fp8","weight_block_size":[64,128]})"), HasSubstr("found [64, 128], expected [128, 128]"));
  EXPECT_THAT(refusal_of(R"({"quant_method":"fp8","fmt":"e5m2"})"), HasSubstr("fmt: found \"e5m2\", expected \"e4m3\""));
}

}  // namespace
}  // namespace cachalot
