// The flavours in which latent attention is found in GGUF files, and metadata that older files lack.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "convert/gguf_convert.h"
#include "io/gguf.h"
#include "io/gguf_writer.h"
#include "support/golden.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

struct Rewrite {
  bool kv_b = false, parts = true;  // which matrices of latent attention to write
  bool old_lengths = false;         // key_length and value_length per head, without the _mla keys
  std::set<std::string> drop;       // metadata keys to leave out
  std::vector<std::pair<std::string, GgufValue>> set;
};

// Converts a golden checkpoint to F32 and writes it again in another flavour.
std::filesystem::path rewrite(const TempDir& dir, const std::string& model, const Rewrite& change) {
  const auto from = dir.path() / "from.gguf", to = dir.path() / "to.gguf";
  const auto folder = testdata("golden/" + model);
  const auto original = Checkpoint::open(folder);
  const Config config = read_config(*original);
  convert_to_gguf(*original, from, {.format = Format::f32});
  const auto file = GgufFile::open(from);
  GgufWriter out(to);
  for (const auto& [key, value] : file->metadata())
    if (!change.drop.contains(key)) out.set(key, value);
  if (change.old_lengths) {
    out.set_u32("deepseek2.attention.key_length", static_cast<uint32_t>(config.nope + config.rope.dim));
    out.set_u32("deepseek2.attention.value_length", static_cast<uint32_t>(config.v_dim));
    out.set_u32("deepseek2.attention.head_count_kv", static_cast<uint32_t>(config.n_heads));
  }
  for (const auto& [key, value] : change.set) out.set(key, value);
  const int kv_rows = config.n_heads * (config.nope + config.v_dim);
  for (const bool declaring : {true, false}) {
    for (const TensorInfo& tensor : file->tensors()) {
      const bool part = tensor.name.find("attn_k_b") != std::string::npos || tensor.name.find("attn_v_b") != std::string::npos;
      if (part && !change.parts) continue;
      declaring ? out.declare(tensor.name, tensor.format, tensor.shape) : out.write(tensor.data);
    }
    for (int l = 0; change.kv_b && l < config.n_layers; ++l) {
      const std::string name = "blk." + std::to_string(l) + ".attn_kv_b.weight";
      if (declaring) {
        out.declare(name, Format::f32, {kv_rows, config.kv_rank});
        continue;
      }
      const LinearSource source = original->linear(name, 1, kv_rows, config.kv_rank);
      std::vector<float> row(static_cast<size_t>(config.kv_rank));
      for (int r = 0; r < kv_rows; ++r) {
        dequant_row(source, 0, r, row.data());
        out.write(std::as_bytes(std::span<const float>(row)));
      }
    }
  }
  out.commit();
  return to;
}

void expect_reference_logits(const std::filesystem::path& file, const std::string& model) {
  const Golden golden = read_golden(testdata("golden/" + model));
  TestModel loaded = load_model(file, make_ref_ops());
  for (const int form : {1, 2})
    EXPECT_LE(max_abs_difference(run_logits(loaded, golden.input_ids, {.chunk = 24, .form = form}), golden.logits),
              2e-5f * max_abs(golden.logits))
        << "form " << form;
}

TEST(GgufFlavours, OnlyKvB) {
  const TempDir dir;
  expect_reference_logits(rewrite(dir, "deepseek-v2",
                                  {.kv_b = true,
                                   .parts = false,
                                   .old_lengths = true,
                                   .drop = {"deepseek2.attention.key_length_mla", "deepseek2.attention.value_length_mla"}}),
                          "deepseek-v2");
}

TEST(GgufFlavours, OnlyParts) {
  const TempDir dir;
  expect_reference_logits(rewrite(dir, "deepseek-v3", {}), "deepseek-v3");
}

TEST(GgufFlavours, AllThree) {
  const TempDir dir;
  expect_reference_logits(rewrite(dir, "deepseek-v2-lite", {.kv_b = true}), "deepseek-v2-lite");
}

TEST(GgufFlavours, NeitherIsRefusedByName) {
  const TempDir dir;
  const auto file = rewrite(dir, "deepseek-v2-lite", {.parts = false});
  const std::string message = error_of([&] { (void)load_model(file, make_ref_ops()); });
  EXPECT_NE(message.find("blk.0.attn_kv_b.weight"), std::string::npos) << message;
}

TEST(GgufDefaults, GatingFromTheShapeOfTheModel) {
  const TempDir dir;
  const auto v3 = rewrite(dir, "deepseek-v3", {.drop = {"deepseek2.expert_gating_func", "deepseek2.expert_weights_norm"}});
  const Config config = read_config(*Checkpoint::open(v3));
  EXPECT_EQ(config.router.scoring, Scoring::sigmoid);
  EXPECT_TRUE(config.router.normalise);
  EXPECT_EQ(config.notes.size(), 2u);
  expect_reference_logits(v3, "deepseek-v3");
}

TEST(GgufDefaults, SoftmaxWithoutBiasAndScaleOfOne) {
  const TempDir dir;
  const auto lite = rewrite(dir, "deepseek-v2-lite",
                            {.drop = {"deepseek2.expert_gating_func", "deepseek2.expert_weights_norm", "deepseek2.expert_weights_scale"}});
  const Config config = read_config(*Checkpoint::open(lite));
  EXPECT_EQ(config.router.scoring, Scoring::softmax);
  EXPECT_FALSE(config.router.normalise);
  EXPECT_FLOAT_EQ(config.router.scale, 1.0f);
  expect_reference_logits(lite, "deepseek-v2-lite");
}

TEST(GgufDefaults, ScaleOfZeroIsTakenAsOne) {
  const TempDir dir;
  const auto lite = rewrite(dir, "deepseek-v2-lite", {.set = {{"deepseek2.expert_weights_scale", GgufValue{GgufType::f32, 0.0}}}});
  EXPECT_FLOAT_EQ(read_config(*Checkpoint::open(lite)).router.scale, 1.0f);
}

TEST(GgufDefaults, UnknownGatingAndArchitectureAreRefused) {
  const TempDir dir;
  const auto gating = rewrite(dir, "deepseek-v3", {.set = {{"deepseek2.expert_gating_func", GgufValue{GgufType::u32, int64_t{4}}}}});
  const std::string message = error_of([&] { (void)read_config(*Checkpoint::open(gating)); });
  EXPECT_NE(message.find("expert_gating_func is 4"), std::string::npos) << message;
  const TempDir other;
  const auto arch = rewrite(other, "llama-gqa", {.set = {{"general.architecture", GgufValue{GgufType::string, std::string("deepseek4")}}}});
  EXPECT_NE(error_of([&] { (void)read_config(*Checkpoint::open(arch)); }).find("deepseek4"), std::string::npos);
}

}  // namespace
}  // namespace cachalot::test
