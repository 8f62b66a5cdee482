// Perplexity: the definition on a model small enough to score by hand, the reference values of the trained tiny models, and refusals.
#include "eval/perplexity.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "base/json.h"
#include "base/mapped_file.h"
#include "cpu/cpu_ops.h"
#include "support/golden.h"
#include "support/support.h"
#include "text/tokenizer.h"

namespace cachalot::test {
namespace {

double nll_of(const std::vector<float>& logits, size_t row, size_t vocab, int token) {
  double sum = 0;
  for (size_t i = 0; i < vocab; ++i) sum += std::exp(static_cast<double>(logits[row * vocab + i]));
  return std::log(sum) - logits[row * vocab + static_cast<size_t>(token)];
}

TEST(Perplexity, WindowsMethodScoresEveryTokenBehindBos) {
  TestModel model = load_model(testdata("golden/llama-gqa"), make_ref_ops());
  const Golden golden = read_golden(testdata("golden/llama-gqa"));
  const auto vocab = static_cast<size_t>(golden.vocab);
  double want = 0;
  for (int w = 0; w < 2; ++w) {
    std::vector<int> input{0};
    input.insert(input.end(), golden.input_ids.begin() + w * 40, golden.input_ids.begin() + w * 40 + 39);
    const std::vector<float> logits = run_logits(model, input);
    for (size_t i = 0; i < 40; ++i) want += nll_of(logits, i, vocab, golden.input_ids[static_cast<size_t>(w) * 40 + i]);
  }
  int calls = 0;
  const PerplexityResult result =
      perplexity(*model.ops, model.decoder, golden.input_ids, {.window = 40, .bos_id = 0, .progress = [&](int, int, double) { ++calls; }});
  EXPECT_EQ(result.windows, 2);
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(result.tokens, 80);
  EXPECT_NEAR(result.mean_nll, want / 80, 1e-6);
  EXPECT_NEAR(result.ppl, std::exp(want / 80), 1e-3);
}

TEST(Perplexity, LlamaMethodScoresTheSecondHalf) {
  TestModel model = load_model(testdata("golden/llama-gqa"), make_ref_ops());
  const Golden golden = read_golden(testdata("golden/llama-gqa"));
  std::vector<int> input(golden.input_ids.begin(), golden.input_ids.begin() + 48);
  input[0] = 0;
  const std::vector<float> logits = run_logits(model, input);
  double want = 0;
  for (size_t p = 24; p < 47; ++p) want += nll_of(logits, p, static_cast<size_t>(golden.vocab), input[p + 1]);
  const PerplexityResult result = perplexity(*model.ops, model.decoder, golden.input_ids,
                                             {.method = PerplexityMethod::llama, .window = 48, .max_windows = 1, .bos_id = 0});
  EXPECT_EQ(result.tokens, 48 - 1 - 24);
  EXPECT_NEAR(result.mean_nll, want / 23, 1e-6);
}

TEST(Perplexity, RefusesWhatItCannotScore) {
  TestModel model = load_model(testdata("golden/llama-gqa"), make_ref_ops());
  const std::vector<int> few(10, 3), wrong(64, 5000);
  EXPECT_NE(error_of([&] { perplexity(*model.ops, model.decoder, few, {.window = 32}); }).find("10 tokens"), std::string::npos);
  EXPECT_NE(error_of([&] { perplexity(*model.ops, model.decoder, wrong, {.window = 32}); }).find("5000"), std::string::npos);
  EXPECT_NE(error_of([&] { perplexity(*model.ops, model.decoder, few, {.window = 1}); }).find("at least 2"), std::string::npos);
}

TEST(SequenceLogits, EqualsOneStep) {
  TestModel model = load_model(testdata("golden/deepseek-v3"), make_ref_ops());
  const Golden golden = read_golden(testdata("golden/deepseek-v3"));
  EXPECT_LE(max_abs_difference(sequence_logits(*model.ops, model.decoder, golden.input_ids), golden.logits),
            2e-5f * max_abs(golden.logits));
}

// The trained models on whole domains: mean negative log-likelihood within 0.1% of the value measured when they were made. All eighteen
// take minutes, so an ordinary run scores four; CACHALOT_FULL_TESTS=1 scores all.
class TrainedModel : public testing::TestWithParam<std::tuple<std::string, std::string>> {};

TEST_P(TrainedModel, ReproducesItsReference) {
  const auto& [name, domain] = GetParam();
  const bool ordinary = name == "tiny-v2" ? domain == "wiki" || domain == "legal_zh" : domain == "code" || domain == "legal_de";
  if (!ordinary && std::getenv("CACHALOT_FULL_TESTS") == nullptr) GTEST_SKIP() << "scored with CACHALOT_FULL_TESTS=1";
  const auto folder = testdata(name);
  const JsonDocument reference = JsonDocument::parse(read_text_file(folder / "reference.json"), "reference.json");
  const JsonValue entry = reference.root().at("eval").at(domain == "wikitext2" ? "wikitext2-test.txt" : domain + ".txt");
  const Tokenizer tokenizer = Tokenizer::from_json(read_text_file(folder / "tokenizer.json"), "tokenizer.json");
  const std::string text = read_text_file(testdata("text/" + domain + (domain == "wikitext2" ? "/wiki.test.raw" : "/eval.txt")));
  TestModel model = load_model(folder, make_cpu_ops({.bf16_prompts = false}));
  const PerplexityResult result = perplexity(*model.ops, model.decoder, tokenizer.encode(text), {.max_windows = 200, .bos_id = 0});
  EXPECT_EQ(result.windows, entry.at("windows").integer());
  EXPECT_NEAR(result.mean_nll / entry.at("mean_nll").number(), 1.0, 1e-3);
}

INSTANTIATE_TEST_SUITE_P(Domains, TrainedModel,
                         testing::Combine(testing::Values("tiny-v2", "tiny-v3"),
                                          testing::Values("books", "code", "docs", "legal", "legal_de", "legal_zh", "wiki", "wikitext2",
                                                          "zh")),
                         [](const auto& param) {
                           std::string name = std::get<0>(param.param) + "_" + std::get<1>(param.param);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace cachalot::test
