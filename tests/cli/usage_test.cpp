// Wrong flags, wrong files, help, environment variables, exit codes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/program.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// One line on stderr that begins with the program's name, nothing on stdout.
void expect_refusal(const ProgramResult& result, int code, const std::string& part) {
  EXPECT_EQ(result.code, code) << result.err;
  EXPECT_THAT(result.err, StartsWith("cachalot: "));
  EXPECT_THAT(result.err, HasSubstr(part));
  EXPECT_EQ(result.error_lines(), 1u) << result.err;
  EXPECT_EQ(result.out, "");
}

TEST(Usage, WithoutArgumentsShowsHelp) {
  const ProgramResult result = run_program({});
  EXPECT_EQ(result.code, 2);
  for (const char* command : {"run", "inspect", "tokenize", "convert", "eval", "bench", "version"})
    EXPECT_THAT(result.err, HasSubstr(command));
}

TEST(Usage, HelpOfEachCommandNamesItsFlags) {
  const ProgramResult help = run_program({"run", "--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_EQ(help.err, "");
  for (const char* flag : {"--model",
                           "--prompt",
                           "--file",
                           "--system",
                           "--raw",
                           "--temp",
                           "--temperature",
                           "--top-k",
                           "--top-p",
                           "--min-p",
                           "--repeat-penalty",
                           "--presence-penalty",
                           "--frequency-penalty",
                           "--seed",
                           "--logit-bias",
                           "--stop",
                           "--max-tokens",
                           "--ignore-eos",
                           "--logprobs",
                           "--max-model-len",
                           "--threads",
                           "--device",
                           "--block-size",
                           "--kv-cache-dtype",
                           "--prefill-chunk",
                           "--trace",
                           "--check-finite",
                           "--json"})
    EXPECT_THAT(help.out, HasSubstr(flag));
  for (const std::vector<std::string>& command : {std::vector<std::string>{"inspect"},
                                                  {"tokenize"},
                                                  {"version"},
                                                  {"convert"},
                                                  {"eval"},
                                                  {"eval", "ppl"},
                                                  {"eval", "logits"},
                                                  {"bench"},
                                                  {"bench", "ops"}}) {
    std::vector<std::string> arguments = command;
    arguments.push_back("--help");
    EXPECT_EQ(run_program(arguments).code, 0) << command.back();
  }
}

TEST(Usage, WrongFlagsAreRefusedInOneLine) {
  const std::string model = testdata("tiny-v3");
  expect_refusal(run_program({"dance"}), 2, "no command \"dance\" (see cachalot --help)");
  expect_refusal(run_program({"serv", model}), 2, "did you mean \"serve\"?");
  expect_refusal(run_program({"run"}), 2, "--model");
  expect_refusal(run_program({"run", "-m", model, "--no-such-flag"}), 2, "no flag \"--no-such-flag\" (see cachalot run --help)");
  expect_refusal(run_program({"run", "-m", model, "--promt", "a"}), 2, "no flag \"--promt\"; did you mean --prompt?");
  expect_refusal(run_program({"run", "-m", model, "--promt=a"}), 2, "no flag \"--promt\"; did you mean --prompt?");
  expect_refusal(run_program({"eval", "ppl", "-m", model, "--windws", "3"}), 2, "did you mean --windows? (see cachalot eval ppl --help)");
  expect_refusal(run_program({"run", "-m", model, "-p", "two", "words"}), 2, "found \"words\" beside --model");
  expect_refusal(run_program({"generate", "-m", model, "words"}), 2, "found \"words\", which belongs to no flag");
  expect_refusal(run_program({"generate", "-m", model, "--inptu", "a", "-o", "b"}), 2, "did you mean --input?");
  expect_refusal(run_program({"run", "-m", model, "-p", "a", "--top-k", "1.5"}), 2, "--top-k: found 1.5");
  expect_refusal(run_program({"run", "-m", model, "-p", "a", "--temp", "hot"}), 2, "hot");
  expect_refusal(run_program({"run", "-m", model, "-p", "a", "--temp", "nan"}), 2, "nan");
  expect_refusal(run_program({"run", "-m", model, "-p", "a", "--temp", "-1"}), 2, "-1");
  expect_refusal(run_program({"run", "-m", model, "-p", "a", "--top-p", "1.5"}), 2, "1.5");
  expect_refusal(run_program({"run", "-m", model, "-p", "a", "--block-size", "7"}), 2, "block-size");
  expect_refusal(run_program({"run", "-m", model, "-p", "a", "--kv-cache-dtype", "f64"}), 2, "kv-cache-dtype");
  expect_refusal(run_program({"run", "-m", model, "-p", "a", "-f", "b"}), 2, "--");
  expect_refusal(run_program({"run", "-m", model, "--json"}), 2, "--json");
  expect_refusal(run_program({"inspect"}), 2, "model");
}

TEST(Usage, WrongValuesThatNeedTheModel) {
  const std::string model = testdata("tiny-v3");
  expect_refusal(run_program({"run", "-m", model, "-p", "a", "--device", "tpu"}), 1, "tpu");
  expect_refusal(run_program({"run", "-m", model, "-p", "a", "-c", "4096"}), 1, "found 4096, expected at most 2048");
  for (const char* bias : {"8192=1", "-1=1", "7", "7=", "7=x", "7=nan", "7=inf", "x=1", "1.5=1"})
    expect_refusal(run_program({"run", "-m", model, "-p", "a", "--logit-bias", bias}), 1, "--logit-bias");
  expect_refusal(run_program({"run", "-m", model, "-p", "a", "--stop", ""}), 1, "stop");
  expect_refusal(run_program({"run", "-m", model, "--raw", "-p", "a b c d e f g h", "-c", "4"}), 1, "context");
}

TEST(Usage, MissingAndBadFiles) {
  const TempDir folder;
  const std::string model = testdata("tiny-v3");
  expect_refusal(run_program({"run", "-m", "/no/such/model", "-p", "a"}), 1, "/no/such/model");
  expect_refusal(run_program({"inspect", "/no/such/model"}), 1, "/no/such/model");
  expect_refusal(run_program({"inspect", folder.path()}), 1, folder.path());
  expect_refusal(run_program({"run", "-m", folder.write("bad.gguf", "GGUF and nothing behind"), "-p", "a"}), 1, "bad.gguf");
  expect_refusal(run_program({"run", "-m", folder.write("model.safetensors", "x"), "-p", "a"}), 1, "model.safetensors");
  expect_refusal(run_program({"run", "-m", model, "-f", "/no/such/prompt"}), 1, "/no/such/prompt");
  expect_refusal(run_program({"run", "-m", model, "-f", folder.path()}), 1, "directory");
  expect_refusal(run_program({"run", "-m", model, "-p", "a", "--tokenizer", "/no/such/tokenizer"}), 1, "/no/such/tokenizer");
  expect_refusal(run_program({"run", "-m", model, "-p", "a", "--chat-template-file", folder.write("t.jinja", "{% if %}")}), 1, "t.jinja");
  expect_refusal(run_program({"tokenize", "--tokenizer", folder.write("tokenizer.json", "{}"), "text"}), 1, "tokenizer.json");
}

TEST(Usage, RunTakesTheModelWithoutAFlag) {
  const ProgramResult result = run_program({"run", testdata("tiny-v3"), "-p", "a", "-n", "2", "--json"});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.json()["completion_tokens"], 2);
  const std::vector<std::string> environment{"CACHALOT_MODEL=/no/such/model"};
  EXPECT_EQ(run_program({"run", testdata("tiny-v3"), "-p", "a", "-n", "2"}, {.environment = environment}).code, 0);
}

TEST(Usage, VersionTellsDevices) {
  EXPECT_THAT(run_program({"--version"}).out, StartsWith("cachalot "));
  const ProgramResult text = run_program({"version"});
  EXPECT_EQ(text.code, 0);
  EXPECT_THAT(text.out, StartsWith("cachalot "));
  const auto figures = run_program({"version", "--json"}).json();
  EXPECT_THAT(figures["devices"].get<std::string>(), HasSubstr("cpu"));
  EXPECT_FALSE(figures["version"].get<std::string>().empty());
}

TEST(Usage, FlagsComeFromTheEnvironment) {
  const std::string model = testdata("tiny-v3");
  const std::vector<std::string> environment{"CACHALOT_MODEL=" + model, "CACHALOT_MAX_TOKENS=3",  "CACHALOT_RAW=1",
                                             "CACHALOT_JSON=true",      "CACHALOT_TEMPERATURE=0", "CACHALOT_PROMPT=The history of"};
  const auto answer = run_program({"run"}, {.environment = environment}).json();
  EXPECT_EQ(answer["completion_tokens"], 3);
  EXPECT_EQ(run_program({"run", "-n", "5"}, {.environment = environment}).json()["completion_tokens"], 5) << "the flag wins";
  // A variable for one command leaves the others alone.
  EXPECT_EQ(run_program({"version"}, {.environment = environment}).code, 0);
  expect_refusal(run_program({"run", "-m", model, "-p", "a"}, {.environment = {"CACHALOT_TOP_P=7"}}), 2, "7");
}

TEST(Usage, FullDiskIsAnError) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  const int status = std::system((std::string(CACHALOT_PROGRAM) + " version > /dev/full 2> /dev/null").c_str());
  EXPECT_EQ(WEXITSTATUS(status), 1);
}

TEST(Usage, AFileThatCannotGrowIsAnErrorThatLeavesNothing) {
  const std::string model = testdata("tiny-v2"), text = testdata("text/docs/calib.txt");
  const std::vector<std::vector<std::string>> commands{
      {"convert", "-q", "-m", model, "-o"},
      {"pack", "-q", model, "-o"},
      {"quantize", "-q", "--format", "awq", "-m", model, "-o"},
      {"quantize", "-q", "-m", model, "-o"},
      {"imatrix", "-m", model, "-f", text, "--window", "64", "--windows", "2", "-o"},
      {"eval", "ppl", "-m", model, "-f", text, "--window", "64", "--windows", "4", "--method", "llama", "--save-all-logits"},
  };
  for (std::vector<std::string> arguments : commands) {
    const TempDir folder;
    arguments.push_back(folder.path() / "out");
    const ProgramResult result = run_program(arguments, {.file_limit = 2000});
    EXPECT_EQ(result.code, 1) << arguments[0] << ' ' << arguments[1] << ": " << result.err;
    EXPECT_THAT(result.err, HasSubstr("File too large")) << arguments[0] << ' ' << arguments[1];
    EXPECT_FALSE(std::filesystem::is_regular_file(folder.path() / "out"));
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path()))
      EXPECT_EQ(entry.path().string().find(".tmp"), std::string::npos) << entry.path();
  }
}

}  // namespace
}  // namespace cachalot::test
