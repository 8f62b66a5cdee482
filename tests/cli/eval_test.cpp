// cachalot eval: kld, turns, needle and compare as a person calls them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "cli/compare_output.h"
#include "cli/program.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

using testing::HasSubstr;
using testing::Not;

const std::string kModel = testdata("tiny-v2"), kText = testdata("text/docs/eval.txt"), kLegal = testdata("text/legal/eval.txt");

// A quantized model, made once.
const std::string& quantized() {
  static const TempDir folder;
  static const std::string path = [] {
    const std::string file = folder.path() / "tiny-q4.gguf";
    const ProgramResult result = run_program({"quantize", "-m", kModel, "-o", file, "--type", "q4_0", "-q"});
    EXPECT_EQ(result.code, 0) << result.err;
    return file;
  }();
  return path;
}

TEST(EvalCommand, KldFromAFileAndDirectlyAgree) {
  const TempDir folder;
  const std::string base = folder.path() / "base.kld";
  const ProgramResult ppl = run_program({"eval", "ppl", "-m", kModel, "-f", kText, "--method", "llama", "--window", "64", "--windows", "3",
                                         "--kl-divergence-base", base, "--json"});
  ASSERT_EQ(ppl.code, 0) << ppl.err;
  const auto from_file = run_program({"eval", "kld", "-m", quantized(), "--kl-divergence-base", base, "--json"}).json()["domains"][0];
  const auto direct =
      run_program({"eval", "kld", "-m", quantized(), "--base-model", kModel, "-f", kText, "--window", "64", "--windows", "3", "--json"})
          .json()["domains"][0];
  EXPECT_EQ(from_file["tokens"], 3 * 31);
  EXPECT_EQ(direct["tokens"], 3 * 31);
  EXPECT_NEAR(direct["base_ppl"]["value"].get<double>(), ppl.json()["ppl"].get<double>(), 1e-3);
  EXPECT_NEAR(direct["kl"]["value"].get<double>(), from_file["kl"]["value"].get<double>(), 1e-3);
  EXPECT_EQ(direct["same_top"]["value"], from_file["same_top"]["value"]);
  EXPECT_GT(direct["kl"]["value"].get<double>(), 1e-3);
}

TEST(EvalCommand, KldByDomain) {
  const ProgramResult result = run_program({"eval", "kld", "-m", quantized(), "--base-model", kModel, "--domain", "docs=" + kText,
                                            "--domain", "legal=" + kLegal, "--window", "64", "--windows", "2", "--method", "windows"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("| legal | 128 |"));
  EXPECT_THAT(result.out, HasSubstr("| all | 256 |"));
  EXPECT_THAT(result.out, HasSubstr("ln(PPL(Q)/PPL(base))"));
  const ProgramResult ppl = run_program(
      {"eval", "ppl", "-m", kModel, "--domain", "docs=" + kText, "--domain", "legal=" + kLegal, "--window", "64", "--windows", "2"});
  EXPECT_THAT(ppl.out, HasSubstr("legal: perplexity"));
  EXPECT_THAT(ppl.out, HasSubstr("all: perplexity"));
}

// Qwen2 has a BOS token that its texts never begin with, and behind it no attention sink: perplexity almost doubles.
TEST(EvalCommand, BosStandsBeforeWindowsOnlyIfTheTokenizerAddsIt) {
  // Products as `quantize` has them: with AMX, `eval` rounds prompts to bf16, which moves so few tokens by 0.4%.
  struct Exact {
    Exact() { setenv("CACHALOT_ISA", "scalar", 1); }
    ~Exact() { unsetenv("CACHALOT_ISA"); }
  } exact;
  const TempDir folder;
  std::filesystem::copy(kModel + "/tokenizer.json", folder.path());
  std::ifstream stored(kModel + "/tokenizer_config.json");
  auto config = nlohmann::json::parse(stored);
  config["add_bos_token"] = false;
  const std::string plain = folder.write("tokenizer_config.json", config.dump()).parent_path();
  const auto with = [](std::vector<std::string> command, const std::vector<std::string>& more) {
    command.insert(command.end(), more.begin(), more.end());
    return run_program(command);
  };
  const std::vector<std::string> ppl{"eval", "ppl", "-m", kModel, "-f", kText, "--window", "64", "--windows", "2", "--json"};
  const auto adds = run_program(ppl).json(), adds_not = with(ppl, {"--tokenizer", plain}).json();
  EXPECT_THAT(adds["method"], HasSubstr("with BOS"));
  EXPECT_THAT(adds_not["method"], HasSubstr("without BOS"));
  EXPECT_EQ(adds_not["tokens"], 2 * 63);  // the first token of a window has nothing before it
  EXPECT_EQ(adds_not["ppl"], with(ppl, {"--no-bos"}).json()["ppl"]);

  const std::vector<std::string> quantize{"quantize", "-m",         kModel,     "--measure", "--type",         "q8_0", "--method", "rtn",
                                          "--eval",   "t=" + kText, "--window", "64",        "--eval-windows", "2",    "--json"};
  const double before = run_program(quantize).json()["loss"][0]["ppl_before"];
  EXPECT_NEAR(before, adds["ppl"].get<double>(), 2e-3 * before);
  EXPECT_GT(std::abs(with(quantize, {"--tokenizer", plain}).json()["loss"][0]["ppl_before"].get<double>() - before), 4e-3 * before);

  const std::vector<std::string> needle{"eval", "needle", "-m", kModel, "--lengths", "96", "--depths", "0.5", "--trials", "1", "--json"};
  EXPECT_EQ(with(needle, {"--tokenizer", plain}).json(), with(needle, {"--no-bos"}).json());
  EXPECT_NE(with(needle, {"--tokenizer", plain}).json(), run_program(needle).json());
}

TEST(EvalCommand, Turns) {
  const TempDir folder;
  const std::string questions = folder.write("q.txt", "Who are you?\n\nWhat is law?\nWhy?\n");
  const ProgramResult result = run_program({"eval", "turns", "-m", quantized(), "--base-model", kModel, "--questions", questions, "--turns",
                                            "3", "--answer-tokens", "8", "--json"});
  ASSERT_EQ(result.code, 0) << result.err;
  const auto json = result.json();
  ASSERT_EQ(json["turns"].size(), 3u);
  EXPECT_EQ(json["turns"][1]["question"], "What is law?");
  EXPECT_GT(json["turns"][2]["context"].get<int>(), json["turns"][1]["context"].get<int>());
  EXPECT_EQ(json["all"]["tokens"],
            json["turns"][0]["tokens"].get<int>() + json["turns"][1]["tokens"].get<int>() + json["turns"][2]["tokens"].get<int>());
  const ProgramResult too_many =
      run_program({"eval", "turns", "-m", quantized(), "--base-model", kModel, "--questions", questions, "--turns", "4"});
  EXPECT_EQ(too_many.code, 1);
  EXPECT_THAT(too_many.err, HasSubstr("--turns: found 4, but there are 3 questions"));
}

TEST(EvalCommand, Needle) {
  const ProgramResult result = run_program({"eval", "needle", "-m", quantized(), "--base-model", kModel, "--lengths", "96,128", "--depths",
                                            "0,1", "--trials", "2", "--distractors", "3"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("| depth | 96 | 128 |"));
  EXPECT_THAT(result.out, HasSubstr("| 100% |"));
  EXPECT_THAT(result.out, HasSubstr("margin"));
  EXPECT_THAT(run_program({"eval", "needle", "-m", kModel, "--depths", "2"}).err, HasSubstr("--depths: found 2, expected 0 to 1"));
}

TEST(EvalCommand, Compare) {
  const TempDir folder;
  const std::string svg = folder.path() / "c.svg", markdown = folder.path() / "c.md";
  const ProgramResult result = run_program(
      {"eval", "compare",    kModel, "four=" + quantized(), "-f", kText,   "--window", "64",         "--windows", "2",     "--prompt",
       "16",   "--generate", "4",    "--repetitions",       "1",  "--svg", svg,        "--markdown", markdown,    "--json"});
  ASSERT_EQ(result.code, 0) << result.err;
  const auto models = result.json()["models"];
  ASSERT_EQ(models.size(), 2u);
  EXPECT_EQ(models[0]["name"], "tiny-v2");
  EXPECT_EQ(models[1]["name"], "four");
  EXPECT_EQ(models[1]["type"], "Q4_0");
  EXPECT_LT(models[1]["bits_per_weight"].get<double>(), 7.0);
  EXPECT_GT(models[1]["kl"].get<double>(), 1e-3);
  EXPECT_GT(models[1]["decode_tokens_per_second"].get<double>(), 0.0);
  EXPECT_EQ(models[1]["tokens"], 62);
  std::stringstream text;
  text << std::ifstream(markdown).rdbuf() << std::ifstream(svg).rdbuf();
  EXPECT_THAT(text.str(), HasSubstr("| four | Q4_0 |"));
  EXPECT_THAT(text.str(), HasSubstr("prefers-color-scheme:dark"));
  EXPECT_THAT(text.str(), HasSubstr(">four</text>"));
  EXPECT_THAT(run_program({"eval", "compare", kModel, "-f", kText}).err, HasSubstr("expected two models at least"));
}

TEST(EvalCommand, RefusesWhatDoesNotFit) {
  const TempDir folder;
  EXPECT_THAT(run_program({"eval", "kld", "-m", kModel, "-f", kText}).err, HasSubstr("expected what to compare with"));
  EXPECT_THAT(run_program({"eval", "kld", "-m", kModel, "--kl-divergence-base", folder.write("x.kld", "abc")}).err,
              HasSubstr("x.kld: found no file of log-probabilities"));
  EXPECT_THAT(run_program({"eval", "kld", "-m", kModel, "--base-model", kModel}).err, HasSubstr("expected text"));
  EXPECT_THAT(run_program({"eval", "kld", "-m", kModel, "--base-model", kModel, "--domain", "docs"}).err,
              HasSubstr("--domain: found \"docs\", expected NAME=FILE"));
  EXPECT_THAT(run_program({"eval", "ppl", "-m", kModel, "-f", kText, "--kl-divergence-base", folder.path() / "b"}).err,
              HasSubstr("give --method llama"));
}

TEST(CompareOutput, EscapesNamesAndKeepsMarksInside) {
  Comparison c{.base = "a<b", .method = "m", .device = "d"};
  c.models.push_back({.name = "a<b", .type = "BF16", .file_bytes = 2e9, .is_base = true});
  for (const double kl : {0.0, 1e-3, 0.5}) {
    ComparedModel m{.name = "m&" + std::to_string(kl), .type = "Q4_K", .file_bytes = 1e9 + kl * 1e8};
    m.all.kl = kl;
    c.models.push_back(m);
  }
  const std::string svg = comparison_svg(c);
  EXPECT_THAT(svg, HasSubstr("a&lt;b"));
  EXPECT_THAT(svg, HasSubstr("m&amp;0.5"));
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  EXPECT_THAT(svg, Not(HasSubstr("inf")));
  int marks = 0;
  for (size_t at = svg.find("cx=\""); at != std::string::npos; at = svg.find("cx=\"", at + 1), ++marks) {
    const double x = std::stod(svg.substr(at + 4)), y = std::stod(svg.substr(svg.find("cy=\"", at) + 4));
    EXPECT_TRUE(x >= 70 && x <= 700 && y >= 40 && y <= 360) << x << ' ' << y;
  }
  EXPECT_EQ(marks, 3);
}

}  // namespace
}  // namespace cachalot::test
