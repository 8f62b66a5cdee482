// cachalot generate, and the benchmarks of the engine, on the trained tiny model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>

#include "base/mapped_file.h"
#include "cli/program.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

using ::testing::HasSubstr;

std::string prompts() {
  std::string out;
  for (int i = 0; i < 12; ++i)
    out += "{\"id\":\"q" + std::to_string(i) + "\",\"prompt\":\"The history of the city number " + std::to_string(i) +
           "\",\"max_tokens\":" + std::to_string(8 + i % 3) + "}\n";
  return out;
}

// Lines of an output by index.
std::map<int, nlohmann::json> lines(const std::filesystem::path& path) {
  std::map<int, nlohmann::json> out;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    const auto value = nlohmann::json::parse(line);
    EXPECT_TRUE(out.emplace(value["index"], value).second) << "written twice: " << line;
  }
  return out;
}

std::vector<std::string> command(const std::string& in, const std::string& out, std::vector<std::string> more = {}) {
  std::vector<std::string> arguments{"generate", "-m", testdata("tiny-v3"), "-i", in, "-o", out, "--temp", "0", "-q"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

TEST(Generate, AnswersEveryLineAndGoesOnFromWhatIsThere) {
  const TempDir dir;
  const auto in = dir.write("in.jsonl", prompts());
  const auto whole = dir.path() / "whole.jsonl", rest = dir.path() / "rest.jsonl";
  ASSERT_EQ(run_program(command(in, whole)).code, 0);
  const auto answers = lines(whole);
  ASSERT_EQ(answers.size(), 12u);
  EXPECT_EQ(answers.at(4)["id"], "q4");
  EXPECT_EQ(answers.at(4)["usage"]["completion_tokens"], 9);
  EXPECT_EQ(answers.at(4)["finish_reason"], "length");

  // Half of it, cut within a line.
  const std::string text = read_text_file(whole);
  (void)dir.write("rest.jsonl", text.substr(0, text.size() / 2));
  ASSERT_EQ(run_program(command(in, rest)).code, 0);
  const auto again = lines(rest);
  ASSERT_EQ(again.size(), 12u);
  for (const auto& [index, line] : again) EXPECT_EQ(line["text"], answers.at(index)["text"]) << index;
  const auto before = read_text_file(rest);
  ASSERT_EQ(run_program(command(in, rest)).code, 0);  // nothing left to do
  EXPECT_EQ(read_text_file(rest), before);
}

TEST(Generate, AWrongLineSpoilsOnlyItself) {
  const TempDir dir;
  const auto in = dir.write("in.jsonl",
                            "{\"prompt\":\"a\",\"max_tokens\":2}\n{\"prompt\":\"a\",\"max_tokns\":2}\nnonsense\n{\"prompt\":7}\n{"
                            "\"prompt\":\"a\",\"temperature\":-1}\n\n"
                            "{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}],\"max_tokens\":2}\n{\"custom_id\":\"c\",\"body\":{"
                            "\"prompt\":[5,6],\"max_tokens\":1}}\n");
  const auto out = dir.path() / "out.jsonl";
  EXPECT_EQ(run_program(command(in, out)).code, 1);
  const auto got = lines(out);
  ASSERT_EQ(got.size(), 7u);
  EXPECT_THAT(got.at(1)["error"].get<std::string>(), HasSubstr("line 2: unknown field \"max_tokns\""));
  EXPECT_THAT(got.at(2)["error"].get<std::string>(), HasSubstr("line 3"));
  EXPECT_THAT(got.at(3)["error"].get<std::string>(), HasSubstr("prompt"));
  EXPECT_THAT(got.at(4)["error"].get<std::string>(), HasSubstr("temperature"));
  for (const int good : {0, 6, 7}) EXPECT_TRUE(got.at(good).contains("text")) << good;
  EXPECT_EQ(got.at(7)["id"], "c");

  (void)dir.write("in.jsonl", "{\"prompt\":\"a\",\"max_tokens\":2}\n{\"prompt\":\"a\",\"max_tokens\":2}\n");
  EXPECT_EQ(run_program(command(in, out, {"--retry-errors"})).code, 0);
  EXPECT_TRUE(lines(out).at(1).contains("text"));
}

TEST(Generate, RefusesAnOutputThatIsNotItsOwn) {
  const TempDir dir;
  const auto in = dir.write("in.jsonl", prompts());
  const auto out = dir.write("out.jsonl", "{\"text\":\"precious\"}\n");
  const ProgramResult result = run_program(command(in, out));
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, HasSubstr("index"));
  EXPECT_EQ(read_text_file(out), "{\"text\":\"precious\"}\n");
}

TEST(Generate, DoesNotTakeAnswersToOtherPromptsForItsOwn) {
  const TempDir dir;
  const auto first = dir.write("first.jsonl", "{\"prompt\":\"a\",\"max_tokens\":1}\n{\"prompt\":\"b\",\"max_tokens\":1}\n");
  const auto second = dir.write("second.jsonl", "{\"prompt\":\"a\",\"max_tokens\":1}\n{\"prompt\":\"c\",\"max_tokens\":1}\n");
  const auto out = dir.path() / "out.jsonl";
  ASSERT_EQ(run_program(command(first, out)).code, 0);
  const std::string before = read_text_file(out);
  const ProgramResult other = run_program(command(second, out));
  EXPECT_EQ(other.code, 1);
  EXPECT_THAT(other.err, HasSubstr("another prompt than line 2"));
  EXPECT_EQ(read_text_file(out), before);
  EXPECT_EQ(run_program(command(second, out, {"--overwrite"})).code, 0);

  const ProgramResult same = run_program(command(first, first, {"--overwrite"}));
  EXPECT_EQ(same.code, 1);
  EXPECT_THAT(same.err, HasSubstr("is the input too"));
  EXPECT_EQ(read_text_file(first).size(), 60u);
}

TEST(Generate, ErrorsOfEarlierRunsStayErrors) {
  const TempDir dir;
  const auto in = dir.write("in.jsonl", "nonsense\n{\"prompt\":7}\n");
  const auto out = dir.path() / "out.jsonl";
  EXPECT_EQ(run_program(command(in, out)).code, 1);
  EXPECT_THAT(lines(out).at(1)["error"].get<std::string>(), HasSubstr("expected text, or a list of token ids"));
  std::vector<std::string> again = command(in, out);
  again.erase(std::find(again.begin(), again.end(), "-q"));
  const ProgramResult result = run_program(again);
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, HasSubstr("2 of 2 prompts, 2 errors (--retry-errors asks again)"));
}

TEST(BenchEngine, CountsWhatItRan) {
  const auto one =
      run_program({"bench", "throughput", "-m", testdata("tiny-v3"), "--num-prompts", "6", "-p", "20", "-n", "5", "-o", "json"}).json();
  ASSERT_EQ(one.size(), 1u);
  EXPECT_EQ(one[0]["output_tokens"], 30);
  EXPECT_EQ(one[0]["prompt_tokens"], 120);
  EXPECT_EQ(one[0]["classes"]["P0"]["finished"], 6);

  const TempDir dir;
  const auto picture = dir.path() / "sweep.svg";
  const auto sweep = run_program({"bench", "sweep",        "-m",   testdata("tiny-v3"), "--num-prompts", "4",     "-p",    "10", "-n",
                                  "4",     "--block-size", "8,32", "--max-num-seqs",    "1,4",           "--mix", "1,1,1", "-o", "json",
                                  "--svg", picture})
                         .json();
  ASSERT_EQ(sweep.size(), 4u);
  EXPECT_EQ(sweep[3]["name"], "block-size 32 max-num-seqs 4");
  for (const auto& row : sweep) EXPECT_EQ(row["output_tokens"], 16);
  EXPECT_THAT(read_text_file(picture), HasSubstr("block-size 8 max-num-seqs 1"));

  const auto latency = run_program(
      {"bench", "latency", "-m", testdata("tiny-v3"), "--num-prompts", "5", "-p", "10", "-n", "3", "--rates", "200,400", "-o", "jsonl"});
  EXPECT_EQ(latency.code, 0) << latency.err;
  EXPECT_EQ(std::count(latency.out.begin(), latency.out.end(), '\n'), 2);
  EXPECT_EQ(run_program({"bench", "latency", "-m", testdata("tiny-v3"), "--mix", "1,2"}).code, 1);
}

}  // namespace
}  // namespace cachalot::test
