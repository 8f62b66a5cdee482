// cachalot quantize: text and names that are no good, each refused with the reason before any work; directories that other commands read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <random>

#include "base/mapped_file.h"
#include "cli/program.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class QuantizeText : public testing::Test {
 protected:
  TempDir folder_;
  std::string legal_ = testdata("text/legal/calib.txt").string();

  std::string file(const std::string& name, const std::string& content) {
    const auto path = folder_.path() / name;
    std::ofstream(path, std::ios::binary) << content;
    return path.string();
  }
  // The message of a run that writes nothing and must fail.
  std::string refusal(const std::vector<std::string>& more, int code = 1) {
    std::vector<std::string> arguments{"quantize", "-m",  testdata("tiny-v2").string(), "--measure", "--type", "int4-g128",
                                       "--method", "gptq"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.code, code) << result.err;
    EXPECT_EQ(result.out, "");
    return result.err;
  }
};

TEST_F(QuantizeText, TooLittleOrNoiseIsRefused) {
  const auto mapped = MappedFile::open(legal_);
  const std::string text{reinterpret_cast<const char*>(mapped->bytes().data()), 3000};
  EXPECT_THAT(refusal({"--domain", "few=" + file("few.txt", text)}),
              HasSubstr("few.txt: 512 tokens to calibrate on in whole windows of 512"));
  EXPECT_THAT(refusal({"--domain", "none=" + file("none.txt", "")}), HasSubstr("none.txt: 0 tokens"));
  std::string again;
  for (int i = 0; i < 60; ++i) again += text + "\n\n";
  EXPECT_THAT(refusal({"--domain", "again=" + file("again.txt", again)}), HasSubstr("repeated paragraphs were dropped"));
  std::mt19937 random(1);
  std::string noise(100000, ' ');
  for (char& c : noise) c = static_cast<char>(33 + random() % 90);
  EXPECT_THAT(refusal({"--domain", "noise=" + file("noise.txt", noise)}), HasSubstr("noise.txt: looks random"));
  EXPECT_THAT(refusal({"--domain", "legal=" + legal_, "--domain", "none=" + file("none.txt", "")}),
              HasSubstr("\"none\" would not be calibrated on"));
}

TEST_F(QuantizeText, CalibrationTextBringsGptq) {
  const std::vector<std::string> common{"quantize",
                                        "-m",
                                        testdata("tiny-v2").string(),
                                        "--measure",
                                        "--type",
                                        "fp8",
                                        "--window",
                                        "64",
                                        "--tokens",
                                        "512",
                                        "--eval-windows",
                                        "1",
                                        "--eval",
                                        "e=" + legal_};
  const ProgramResult without = run_program(common);
  EXPECT_EQ(without.code, 0) << without.err;
  EXPECT_THAT(without.out, HasSubstr("Method rtn;"));
  EXPECT_THAT(without.out, HasSubstr("no calibration text"));
  std::vector<std::string> more = common;
  more.insert(more.end(), {"--domain", "legal=" + legal_});
  const ProgramResult with = run_program(more);
  EXPECT_EQ(with.code, 0) << with.err;
  EXPECT_THAT(with.out, HasSubstr("Method gptq;"));
  EXPECT_THAT(with.out, Not(HasSubstr("no calibration text")));
  more.insert(more.end(), {"--method", "rtn"});
  EXPECT_THAT(run_program(more).out, HasSubstr("Method rtn;"));
}

TEST_F(QuantizeText, MistypedTextIsNamed) {
  EXPECT_THAT(refusal({}), HasSubstr("--measure: expected text"));
  EXPECT_THAT(refusal({"--domain", legal_}), HasSubstr("expected NAME=FILE"));
  EXPECT_THAT(refusal({"--eval", "legal=" + legal_}), HasSubstr("gptq needs calibration text"));
  EXPECT_THAT(refusal({"--calib", (folder_.path() / "absent.txt").string()}), HasSubstr("absent.txt: cannot open"));
  EXPECT_THAT(refusal({"--calib", file("a.jsonl", "{\"text\": 5}\n")}), HasSubstr("a.jsonl: line 1: \"text\": found number"));
  EXPECT_THAT(refusal({"--calib", legal_, "-o", "x.gguf"}), HasSubstr("--measure: writes no file"));
  EXPECT_THAT(refusal({"--calib", legal_, "--type", "q4_k", "--target-size", "100kB"}), HasSubstr("--target-size: 100000 bytes leave"));
  EXPECT_THAT(refusal({"--calib", legal_, "--type", "q4_k", "--target-size", "0.1 MB"}), HasSubstr("--target-size: 100000 bytes leave"));
  EXPECT_THAT(refusal({"--calib", legal_, "--type", "q4_k", "--target-size", "7 apples"}), HasSubstr("expected a size such as 700MB"));
}

TEST(QuantizeFormats, DirectoriesAreReadByTheOtherCommands) {
  const TempDir folder;
  const std::string model = testdata("tiny-v2").string();
  for (const std::string format : {"awq", "gptq", "gptq_v2", "compressed-tensors", "fp8"}) {
    const std::string out = (folder.path() / format).string();
    const ProgramResult written = run_program({"quantize", "-m", model, "-o", out, "--format", format});
    ASSERT_EQ(written.code, 0) << format << ": " << written.err;
    const ProgramResult answer = run_program({"run", "-m", out, "-p", "The history of", "-n", "4", "--temp", "0", "--json"});
    EXPECT_EQ(answer.code, 0) << format << ": " << answer.err;
    EXPECT_THAT(answer.out, HasSubstr("\"completion_tokens\":4")) << format;
    // What is there already is not written over.
    EXPECT_NE(run_program({"quantize", "-m", model, "-o", out, "--format", format}).code, 0) << format;
  }
}

// A run that a full disk ended goes on with the text of its importance matrix, not with whatever has its name by then.
TEST(QuantizeResume, KnowsAnImportanceMatrixByItsContent) {
  const TempDir folder;
  const std::string model = testdata("tiny-v2").string(), matrix = folder.path() / "m.gguf", out = folder.path() / "q.gguf";
  const auto gather = [&](const std::string& text) {
    const ProgramResult made =
        run_program({"imatrix", "-m", model, "-f", testdata(text).string(), "-o", matrix, "--window", "64", "--windows", "2", "--force"});
    ASSERT_EQ(made.code, 0) << made.err;
  };
  const std::vector<std::string> command{"quantize", "-q", "-m", model, "-o", out, "--imatrix", matrix};
  std::vector<std::string> resume = command;
  resume.emplace_back("--resume");
  gather("text/docs/calib.txt");
  EXPECT_EQ(run_program(command, {.file_limit = 100'000}).code, 1);
  gather("text/code/calib.txt");
  const ProgramResult other = run_program(resume);
  EXPECT_EQ(other.code, 1);
  EXPECT_THAT(other.err, HasSubstr("--imatrix: found"));
  gather("text/docs/calib.txt");
  const ProgramResult same = run_program(resume);
  EXPECT_EQ(same.code, 0) << same.err;
  EXPECT_TRUE(std::filesystem::exists(out));
}

TEST_F(QuantizeText, WhatIsHardlyMeantIsSaid) {
  const std::string model = testdata("tiny-v2").string(), once = (folder_.path() / "once.gguf").string();
  ASSERT_EQ(run_program({"quantize", "-q", "-m", model, "-o", once}).code, 0);
  const std::vector<std::string> common{"quantize",       "-q", "--measure", "--type", "q8_0",           "--method", "rtn",
                                        "--window",       "64", "--tokens",  "512",    "--eval-windows", "1",        "--domain",
                                        "legal=" + legal_};
  const auto warnings = [&](const std::vector<std::string>& more) {
    std::vector<std::string> command = common;
    command.insert(command.end(), more.begin(), more.end());
    const ProgramResult result = run_program(command);
    EXPECT_EQ(result.code, 0) << result.err;
    return result.err;
  };
  EXPECT_EQ(warnings({"-m", model, "--keep", "blk.0.attn_q*", "--eval", "code=" + testdata("text/code/eval.txt").string()}), "");
  EXPECT_THAT(warnings({"-m", once}), HasSubstr("have fewer than 8 bits already"));
  EXPECT_THAT(warnings({"-m", model, "--keep", "blk.9*"}), HasSubstr("--keep: no matrix has a name like \"blk.9*\""));
  EXPECT_THAT(warnings({"-m", model, "--rule", "attn_q=q4_k"}), HasSubstr("--rule: no matrix has a name like \"attn_q\""));
  EXPECT_THAT(warnings({"-m", model, "--eval", "same=" + legal_}), HasSubstr("is calibrated on as well"));
}

TEST(QuantizeFormats, ForceReplacesModelsOnly) {
  const TempDir folder, other;
  const std::string model = testdata("tiny-v2").string(), mine = other.path(), file = other.write("thesis.txt", "x");
  const auto refusal = [&](const std::vector<std::string>& more) {
    std::vector<std::string> command{"quantize", "-q", "-m", model, "--force"};
    command.insert(command.end(), more.begin(), more.end());
    const ProgramResult result = run_program(command);
    EXPECT_EQ(result.code, 1);
    return result.err;
  };
  EXPECT_THAT(refusal({"-o", mine, "--format", "awq"}), HasSubstr("holds no model"));
  EXPECT_THAT(refusal({"-o", mine}), HasSubstr("is a directory, expected the name of a GGUF file"));
  EXPECT_THAT(refusal({"-o", file, "--format", "awq"}), HasSubstr("is a file, but --format awq makes a directory"));
  EXPECT_TRUE(std::filesystem::exists(file));
  const std::string out = folder.path() / "out";
  std::filesystem::create_directory(out);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(run_program({"quantize", "-q", "-m", model, "-o", out, "--format", "awq", "--force"}).code, 0);
}

TEST(QuantizeFormats, ADirectoryIsNotNamedLikeAFile) {
  const ProgramResult result = run_program({"quantize", "-m", testdata("tiny-v2").string(), "-o", "x.gguf", "--format", "awq"});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, HasSubstr("should not end in .gguf"));
}

}  // namespace
}  // namespace cachalot::test
