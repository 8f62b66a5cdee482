// cachalot run with a prompt, on the trained tiny models.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "cli/program.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

nlohmann::json reference(const std::string& model) {
  std::ifstream file(testdata(model + "/reference.json"));
  return nlohmann::json::parse(file);
}

std::vector<std::string> greedy(const std::string& model, std::vector<std::string> more = {}) {
  std::vector<std::string> arguments{"run", "-m", testdata(model), "--raw", "--temp", "0", "-p", reference(model)["greedy_prompt"]};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

class RunGreedy : public ::testing::TestWithParam<std::tuple<const char*, const char*>> {};
TEST_P(RunGreedy, EqualsTheReference) {
  const auto [model, device] = GetParam();
  const auto expected = reference(model);
  std::vector<int> ids = expected["greedy_ids"];
  const std::vector<std::string> flags{"-n", "60", "--device", device};

  auto as_json = flags;
  as_json.push_back("--json");
  const auto answer = run_program(greedy(model, as_json)).json();
  std::vector<int> got = answer["prompt_token_ids"];
  for (const int id : answer["token_ids"]) got.push_back(id);
  ids.resize(std::min(ids.size(), got.size()));
  EXPECT_EQ(got, ids);
  EXPECT_EQ(answer["finish_reason"], "length");
  EXPECT_EQ(answer["completion_tokens"], 60);

  auto as_text = flags;
  as_text.push_back("--echo");
  const ProgramResult text = run_program(greedy(model, as_text));
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_EQ(text.out, expected["greedy_text"].get<std::string>() + "\n");
  EXPECT_THAT(text.err, HasSubstr("tokens/s"));
  EXPECT_THAT(text.err, HasSubstr("peak memory"));
}
INSTANTIATE_TEST_SUITE_P(Models, RunGreedy, ::testing::Combine(::testing::Values("tiny-v2", "tiny-v3"), ::testing::Values("cpu")));

TEST(Run, CacheAndChunksDoNotChangeTheText) {
  const auto plain = run_program(greedy("tiny-v3", {"-n", "24", "--json"})).json()["token_ids"];
  for (const std::vector<std::string>& flags : {std::vector<std::string>{"--block-size", "8"},
                                                {"--block-size", "64"},
                                                {"--prefill-chunk", "1"},
                                                {"--kv-cache-dtype", "f32"},
                                                {"-t", "1"},
                                                {"-c", "64"}}) {
    auto all = flags;
    all.insert(all.end(), {"-n", "24", "--json"});
    EXPECT_EQ(run_program(greedy("tiny-v3", all)).json()["token_ids"], plain) << flags[0] << " " << flags[1];
  }
}

TEST(Run, LengthLimits) {
  EXPECT_EQ(run_program(greedy("tiny-v3", {"-n", "1", "--json"})).json()["token_ids"].size(), 1u);
  const auto none = run_program(greedy("tiny-v3", {"-n", "0", "--json"})).json();
  EXPECT_EQ(none["token_ids"].size(), 0u);
  EXPECT_EQ(none["finish_reason"], "length");
  const auto full = run_program(greedy("tiny-v3", {"-c", "32", "--ignore-eos", "--json"})).json();
  EXPECT_EQ(full["finish_reason"], "length");
  EXPECT_EQ(full["prompt_tokens"].get<int>() + full["completion_tokens"].get<int>(), 32);
}

TEST(Run, StopStringsEndTheTextBeforeThem) {
  const std::string text =
      reference("tiny-v3")["greedy_text"].get<std::string>().substr(reference("tiny-v3")["greedy_prompt"].get<std::string>().size());
  const std::string stop = " of the";
  const auto answer = run_program(greedy("tiny-v3", {"-n", "60", "--stop", "never to be seen", "--stop", stop, "--json"})).json();
  EXPECT_EQ(answer["text"], text.substr(0, text.find(stop)));
  EXPECT_EQ(answer["finish_reason"], "stop");
  EXPECT_EQ(answer["stop_string"], stop);
  EXPECT_LT(answer["completion_tokens"], 60);
}

TEST(Run, EqualSeedsGiveEqualText) {
  const auto draw = [](const std::string& seed) {
    return run_program({"run", "-m", testdata("tiny-v3"), "--raw", "-p", "The city", "-n", "24", "--temp", "1", "--seed", seed, "--json"})
        .json();
  };
  const auto first = draw("7"), again = draw("7"), other = draw("8");
  EXPECT_EQ(first["token_ids"], again["token_ids"]);
  EXPECT_NE(first["token_ids"], other["token_ids"]);
  EXPECT_EQ(first["seed"], 7);
  // Without a seed each run takes a new one and tells it.
  EXPECT_NE(draw("-1")["seed"], draw("-1")["seed"]);
}

TEST(Run, SamplingFlagsReachTheSampler) {
  const auto plain = run_program(greedy("tiny-v3", {"-n", "8", "--json"})).json();
  const int first = plain["token_ids"][0];
  const auto forbidden = run_program(greedy("tiny-v3", {"-n", "8", "--json", "--logit-bias", std::to_string(first) + "=-inf"})).json();
  for (const int id : forbidden["token_ids"]) EXPECT_NE(id, first);
  const auto forced = run_program(greedy("tiny-v3", {"-n", "3", "--json", "--logit-bias", "42=1000"})).json();
  EXPECT_EQ(forced["token_ids"], (std::vector<int>{42, 42, 42}));
  // One candidate left: any temperature is greedy.
  const auto top = run_program({"run", "-m", testdata("tiny-v3"), "--raw", "-p", reference("tiny-v3")["greedy_prompt"], "-n", "8", "--temp",
                                "5", "--top-k", "1", "--json"})
                       .json();
  EXPECT_EQ(top["token_ids"], plain["token_ids"]);
  const auto penal = run_program(greedy("tiny-v3", {"-n", "40", "--json", "--repeat-penalty", "1.5"})).json();
  EXPECT_NE(penal["token_ids"], run_program(greedy("tiny-v3", {"-n", "40", "--json"})).json()["token_ids"]);
}

TEST(Run, Logprobs) {
  const auto answer = run_program(greedy("tiny-v3", {"-n", "5", "--logprobs", "3", "--json"})).json();
  ASSERT_EQ(answer["logprobs"].size(), 5u);
  for (const auto& draw : answer["logprobs"]) {
    ASSERT_EQ(draw["top"].size(), 3u);
    EXPECT_EQ(draw["top"][0]["id"], draw["id"]) << "greedy takes the likeliest";
    double sum = 0.0;
    for (const auto& rival : draw["top"]) sum += std::exp(rival["logprob"].get<double>());
    EXPECT_LE(sum, 1.0001);
    EXPECT_GE(draw["top"][0]["logprob"], draw["top"][1]["logprob"]);
  }
}

TEST(Run, TemplateIsUsedUnlessRaw) {
  const std::string model = testdata("tiny-v3");
  const auto chat = run_program({"run", "-m", model, "-p", "Hello", "--system", "Be brief.", "-n", "1", "--json"}).json();
  const auto raw = run_program({"run", "-m", model, "--raw", "-p", "Hello", "-n", "1", "--json"}).json();
  const std::vector<int> chat_ids = chat["prompt_token_ids"], raw_ids = raw["prompt_token_ids"];
  EXPECT_GT(chat_ids.size(), raw_ids.size());
  EXPECT_EQ(std::count(chat_ids.begin(), chat_ids.end(), 0), 1) << "one BOS, though both template and tokenizer want one";
  EXPECT_EQ(std::count(raw_ids.begin(), raw_ids.end(), 0), 1);
  // BOS written in the prompt is not doubled.
  const auto written = run_program({"run", "-m", model, "--raw", "-p", "<｜begin▁of▁sentence｜>Hello", "-n", "1", "--json"}).json();
  EXPECT_EQ(written["prompt_token_ids"], raw["prompt_token_ids"]);
  const ProgramResult refused = run_program({"run", "-m", model, "--raw", "--system", "x", "-p", "Hello"});
  EXPECT_EQ(refused.code, 1);
  EXPECT_THAT(refused.err, HasSubstr("chat template"));
}

TEST(Run, PromptFromFileAndInput) {
  const TempDir folder;
  const std::string prompt = reference("tiny-v3")["greedy_prompt"];
  const std::vector<std::string> base{"run", "-m", testdata("tiny-v3"), "--raw", "--temp", "0", "-n", "4", "-q"};
  auto with = [&](const std::vector<std::string>& more, const std::string& input = "") {
    auto arguments = base;
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_program(arguments, {.input = input});
  };
  const ProgramResult direct = with({"-p", prompt});
  EXPECT_EQ(direct.err, "") << "quiet";
  EXPECT_EQ(with({"-f", folder.write("prompt.txt", prompt)}).out, direct.out);
  EXPECT_EQ(with({"-f", "-"}, prompt).out, direct.out);
}

TEST(Run, GgufGivesTheSameText) {
  const TempDir folder;
  const std::string gguf = folder.path() / "tiny.gguf";
  ASSERT_EQ(run_program({"convert", "-m", testdata("tiny-v3"), "-o", gguf, "--type", "f32", "-q"}).code, 0);
  const auto expected = run_program(greedy("tiny-v3", {"-n", "32", "--json"})).json();
  const auto answer =
      run_program({"run", "-m", gguf, "--raw", "--temp", "0", "-n", "32", "-p", reference("tiny-v3")["greedy_prompt"], "--json"}).json();
  EXPECT_EQ(answer["prompt_token_ids"], expected["prompt_token_ids"]);
  EXPECT_EQ(answer["token_ids"], expected["token_ids"]);
  // The template travels with the file.
  const auto chat = run_program({"run", "-m", gguf, "--chat", "-p", "Hello", "-n", "1", "--json"}).json();
  EXPECT_EQ(chat["prompt_token_ids"],
            run_program({"run", "-m", testdata("tiny-v3"), "-p", "Hello", "-n", "1", "--json"}).json()["prompt_token_ids"]);
}

TEST(Run, TraceAndFiniteCheck) {
  const ProgramResult trace = run_program(greedy("tiny-v3", {"-n", "1", "--trace", "-q"}));
  EXPECT_EQ(trace.code, 0);
  EXPECT_THAT(trace.err, HasSubstr("embed"));
  EXPECT_THAT(trace.err, HasSubstr("layer   4  moe"));
  const ProgramResult check = run_program(greedy("tiny-v3", {"-n", "4", "--check-finite", "-q"}));
  EXPECT_EQ(check.code, 0) << check.err;
  EXPECT_EQ(check.out, run_program(greedy("tiny-v3", {"-n", "4", "-q"})).out);
}

// A copy of tiny-v2 whose weights of one tensor (bf16) are all infinite.
void copy_with_infinities(const std::string& tensor, const std::filesystem::path& folder) {
  for (const auto& entry : std::filesystem::directory_iterator(testdata("tiny-v2"))) {
    const auto target = folder / entry.path().filename();
    std::filesystem::copy_file(entry.path(), target);
    if (target.extension() != ".safetensors") continue;
    std::fstream file(target, std::ios::in | std::ios::out | std::ios::binary);
    uint64_t header_bytes = 0;
    file.read(reinterpret_cast<char*>(&header_bytes), 8);
    std::string header(header_bytes, ' ');
    file.read(header.data(), static_cast<std::streamsize>(header_bytes));
    const auto json = nlohmann::json::parse(header);
    if (!json.contains(tensor)) continue;
    ASSERT_EQ(json[tensor]["dtype"], "BF16");
    const std::vector<uint64_t> offsets = json[tensor]["data_offsets"];
    const std::vector<uint16_t> infinities((offsets[1] - offsets[0]) / 2, 0x7f80);
    file.seekp(static_cast<std::streamoff>(8 + header_bytes + offsets[0]));
    file.write(reinterpret_cast<const char*>(infinities.data()), static_cast<std::streamsize>(infinities.size() * 2));
  }
}

TEST(Run, FiniteCheckNamesTheFirstLayer) {
  const TempDir folder;
  copy_with_infinities("model.layers.2.self_attn.o_proj.weight", folder.path());
  const std::vector<std::string> arguments{"run", "-m", folder.path(), "--raw", "-p", "The city", "-n", "4", "-q"};
  const ProgramResult plain = run_program(arguments);
  EXPECT_EQ(plain.code, 1);
  EXPECT_THAT(plain.err, HasSubstr("--check-finite"));
  auto checked = arguments;
  checked.push_back("--check-finite");
  const ProgramResult result = run_program(checked);
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, StartsWith("cachalot: layer 2: linear"));
}

TEST(Run, EndTokensOfAllFilesCount) {
  // config.json names 5, generation_config.json 6 and 7, tokenizer_config.json 1.
  const TempDir folder;
  for (const auto& entry : std::filesystem::directory_iterator(testdata("tiny-v3")))
    if (entry.path().filename() != "config.json") std::filesystem::create_symlink(entry.path(), folder.path() / entry.path().filename());
  std::ifstream original(testdata("tiny-v3/config.json"));
  auto config = nlohmann::json::parse(original);
  config["eos_token_id"] = 5;
  const auto config_path = folder.write("config.json", config.dump());
  const auto generation_path = folder.write("generation_config.json", R"({"eos_token_id": [6, 7], "temperature": 0.0})");
  ASSERT_TRUE(std::filesystem::exists(config_path) && std::filesystem::exists(generation_path));
  for (const char* id : {"1", "5", "6", "7", "8"}) {
    const std::vector<std::string> arguments{
        "run", "-m", folder.path(), "--raw", "-p", "The city", "-n", "3", "--json", "--logit-bias", std::string(id) + "=1000"};
    const auto answer = run_program(arguments).json();
    const bool ends = std::string(id) != "8";
    EXPECT_EQ(answer["finish_reason"], ends ? "stop" : "length") << id;
    EXPECT_EQ(answer["token_ids"].size(), ends ? 0u : 3u) << id;
    auto ignoring = arguments;
    ignoring.push_back("--ignore-eos");
    EXPECT_EQ(run_program(ignoring).json()["token_ids"].size(), 3u) << id;
  }
}

TEST(Run, InterruptEndsTheAnswer) {  // on the slow device, whose answer takes seconds
  Terminal terminal(greedy("tiny-v3", {"--ignore-eos", "--device", "ref"}));
  terminal.wait_for("history of the history");  // the answer has begun
  terminal.type("\x03");
  terminal.wait_for("ended by Ctrl-C");
  EXPECT_EQ(terminal.exit_code(), 130);
}

}  // namespace
}  // namespace cachalot::test
