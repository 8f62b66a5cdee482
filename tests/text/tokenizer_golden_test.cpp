// Every id and every decoded text of the six real tokenizers, as the reference library gave them; and the same through GGUF's fields.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>

#include "support/support.h"
#include "text/detokenizer.h"
#include "text/tokenizer.h"
#include "text/tokenizer_support.h"

namespace cachalot::test {
namespace {

class TokenGolden : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!has_tokenizer(GetParam()))
      GTEST_SKIP() << GetParam() << "'s tokenizer.json is not in the repository because of its licence: set CACHALOT_EXTRA_DATA";
  }
};

constexpr EncodeOptions kAsReference{.add_bos = false, .parse_special = true};

void expect_golden(const Tokenizer& tokenizer, const std::vector<GoldenCase>& cases) {
  int wrong = 0;
  for (const GoldenCase& golden : cases) {
    const std::vector<int> ids = tokenizer.encode(golden.text, kAsReference);
    EXPECT_EQ(ids, golden.ids) << "text: " << golden.text;
    EXPECT_EQ(tokenizer.decode(golden.ids), golden.decoded) << "text: " << golden.text;
    Detokenizer stream(tokenizer);
    std::string streamed;
    for (const int id : golden.ids) streamed += stream.push(id);
    streamed += stream.finish();
    EXPECT_EQ(streamed, golden.decoded) << "text: " << golden.text;
    if (ids != golden.ids && ++wrong == 5) break;
  }
}

TEST_P(TokenGolden, IdsAndTexts) {
  const auto cases = load_golden(GetParam());
  ASSERT_EQ(cases.size(), 596u);
  expect_golden(load_tokenizer(GetParam()), cases);
}

TEST_P(TokenGolden, ThroughVocab) {
  const Tokenizer original = load_tokenizer(GetParam());
  const VocabData data = original.vocab();
  ASSERT_EQ(data.tokens.size(), static_cast<size_t>(original.size()));
  const Tokenizer again = Tokenizer::from_vocab(data);
  expect_golden(again, load_golden(GetParam()));
  EXPECT_EQ(again.bos(), original.bos());
  EXPECT_EQ(again.eos(), original.eos());
  EXPECT_EQ(again.add_bos(), original.add_bos());
  EXPECT_EQ(again.chat_template(), original.chat_template());
  EXPECT_TRUE(std::ranges::equal(again.eos_ids(), original.eos_ids()));
  for (int id = 0; id < original.size(); ++id) {
    ASSERT_EQ(again.piece(id), original.piece(id)) << id;
    ASSERT_EQ(again.is_special(id), original.is_special(id)) << id;
  }
}

INSTANTIATE_TEST_SUITE_P(All, TokenGolden,
                         testing::Values("gpt2", "qwen3", "deepseek-llm", "deepseek-v3", "llama3", "deepseek-coder-6.7b-instruct"),
                         [](const auto& parameter) {
                           std::string name = parameter.param;
                           std::ranges::replace_if(
                               name, [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); }, '_');
                           return name;
                         });

TEST(TokenGoldenNames, PreTokenizerIsRecognised) {
  EXPECT_EQ(load_tokenizer("gpt2").vocab().pre, "gpt-2");
  EXPECT_EQ(load_tokenizer("qwen3").vocab().pre, "qwen2");
  EXPECT_EQ(load_tokenizer("deepseek-llm").vocab().pre, "deepseek-llm");
  EXPECT_EQ(load_tokenizer("deepseek-v3").vocab().pre, "deepseek-v3");
  EXPECT_EQ(load_tiny_v2().vocab().pre, "deepseek-v3");
  if (has_tokenizer("llama3")) {
    EXPECT_EQ(load_tokenizer("llama3").vocab().pre, "llama-bpe");
  }
  if (has_tokenizer("deepseek-coder-6.7b-instruct")) {
    EXPECT_EQ(load_tokenizer("deepseek-coder-6.7b-instruct").vocab().pre, "deepseek-coder");
  }
}

}  // namespace
}  // namespace cachalot::test
