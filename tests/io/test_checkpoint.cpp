// Checkpoint on the real things: the golden and tiny models, mapped names, values, stacks, companions; and GGUF stacks.
#include <gmock/gmock.h>

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

}  // namespace
}  // namespace cachalot
