// cachalot tokenize: lines of JSON against the reference ids, plain text, and the way back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "cli/program.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

using ::testing::HasSubstr;

std::vector<nlohmann::json> lines_of(const std::string& text) {
  std::vector<nlohmann::json> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);)
    if (!line.empty()) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

// Every string of token-golden, through the program as a script would use it.
class TokenizeGolden : public ::testing::TestWithParam<const char*> {};
TEST_P(TokenizeGolden, LinesGiveTheReferenceIdsAndComeBack) {
  const std::string name = GetParam();
  const auto tokenizer = testdata("tokenizers/" + name + "/tokenizer.json"), golden = testdata("token-golden/" + name + ".jsonl");
  if (!std::filesystem::exists(tokenizer)) GTEST_SKIP() << "tokenizer not in this tree";
  std::ifstream file(golden);
  ASSERT_TRUE(file.is_open()) << golden;
  const std::string input((std::istreambuf_iterator<char>(file)), {});
  const auto expected = lines_of(input);
  ASSERT_GT(expected.size(), 500u);

  const ProgramResult encoded = run_program({"tokenize", "--tokenizer", tokenizer, "--jsonl"}, {.input = input});
  ASSERT_EQ(encoded.code, 0) << encoded.err;
  const auto ids = lines_of(encoded.out);
  ASSERT_EQ(ids.size(), expected.size());
  for (size_t i = 0; i < ids.size(); ++i) ASSERT_EQ(ids[i]["ids"], expected[i]["ids"]) << expected[i]["text"];

  const ProgramResult decoded = run_program({"tokenize", "--tokenizer", tokenizer, "--jsonl", "--decode"}, {.input = encoded.out});
  ASSERT_EQ(decoded.code, 0) << decoded.err;
  const auto texts = lines_of(decoded.out);
  ASSERT_EQ(texts.size(), expected.size());
  for (size_t i = 0; i < texts.size(); ++i) ASSERT_EQ(texts[i]["text"], expected[i]["decoded"]) << i;
}
INSTANTIATE_TEST_SUITE_P(Tokenizers, TokenizeGolden, ::testing::Values("deepseek-v3", "gpt2"), [](const auto& test) {
  std::string name = test.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

TEST(Tokenize, WordsAndStandardInput) {
  const std::string model = testdata("tiny-v3");
  const ProgramResult words = run_program({"tokenize", "--tokenizer", model, "The history", "of the city"});
  EXPECT_EQ(words.code, 0) << words.err;
  EXPECT_EQ(run_program({"tokenize", "--tokenizer", model}, {.input = "The history of the city"}).out, words.out);
  EXPECT_EQ(run_program({"tokenize", "--tokenizer", model, "--bos", "The history of the city"}).out, "0 " + words.out);
  const ProgramResult back = run_program({"tokenize", "--tokenizer", model, "--decode"}, {.input = words.out});
  EXPECT_EQ(back.out, "The history of the city\n");
  const auto report = run_program({"tokenize", "--tokenizer", model, "--json", "The history of the city"}).json();
  EXPECT_EQ(report["count"], report["ids"].size());
  EXPECT_EQ(report["pieces"][0], "The");
  EXPECT_EQ(run_program({"tokenize", "--tokenizer", model, "--count", "The history of the city"}).out,
            std::to_string(report["ids"].size()) + "\n");
}

TEST(Tokenize, ControlTokensCountUnlessRefused) {
  const std::string model = testdata("tiny-v3"), text = "<｜begin▁of▁sentence｜>";
  EXPECT_EQ(run_program({"tokenize", "--tokenizer", model, text}).out, "0\n");
  EXPECT_EQ(run_program({"tokenize", "--tokenizer", model, "--special", text}).out, "0\n");
  EXPECT_NE(run_program({"tokenize", "--tokenizer", model, "--no-special", text}).out, "0\n");
  EXPECT_EQ(run_program({"tokenize", "--tokenizer", model, "--decode", "0"}).out, text + "\n");
  EXPECT_EQ(run_program({"tokenize", "--tokenizer", model, "--decode", "--no-special", "0"}).out, "\n");
}

TEST(Tokenize, BadInputIsRefused) {
  const std::string model = testdata("tiny-v3");
  for (const char* ids : {"1 2 x", "-1", "99999999", "1.5"}) {
    const ProgramResult result = run_program({"tokenize", "--tokenizer", model, "--decode"}, {.input = ids});
    EXPECT_EQ(result.code, 1) << ids;
    EXPECT_THAT(result.err, HasSubstr("expected token ids"));
  }
  for (const char* line : {"{\"text\"", "{\"txt\": \"a\"}", "{\"text\": 5}", "[]"}) {
    const ProgramResult result =
        run_program({"tokenize", "--tokenizer", model, "--jsonl"}, {.input = std::string("{\"text\": \"a\"}\n") + line});
    EXPECT_EQ(result.code, 1) << line;
    EXPECT_THAT(result.err, HasSubstr("line 2"));
  }
}

}  // namespace
}  // namespace cachalot::test
