// cachalot quantize on text that is no good: each refused with the reason, before any work.
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

TEST_F(QuantizeText, MistypedTextIsNamed) {
  EXPECT_THAT(refusal({}), HasSubstr("--measure: expected text"));
  EXPECT_THAT(refusal({"--domain", legal_}), HasSubstr("expected NAME=FILE"));
  EXPECT_THAT(refusal({"--eval", "legal=" + legal_}), HasSubstr("gptq needs calibration text"));
  EXPECT_THAT(refusal({"--calib", (folder_.path() / "absent.txt").string()}), HasSubstr("absent.txt: cannot open"));
  EXPECT_THAT(refusal({"--calib", file("a.jsonl", "{\"text\": 5}\n")}), HasSubstr("a.jsonl: line 1: \"text\": found number"));
  EXPECT_THAT(refusal({"--calib", legal_, "-o", "x.gguf"}), HasSubstr("--measure: writes no file"));
  EXPECT_THAT(refusal({"--calib", legal_, "--type", "q4_k", "--target-size", "100kB"}), HasSubstr("--target-size: 100000 bytes leave"));
}

}  // namespace
}  // namespace cachalot::test
