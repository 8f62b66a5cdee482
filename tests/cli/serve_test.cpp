// cachalot serve on a trained tiny model: from the start to the end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "cli/program.h"
#include "server/http_client.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

using nlohmann::json;

TEST(Serve, AnswersLikeRunAndEndsOnCtrlC) {
  Terminal terminal(
      {"serve", testdata("tiny-v3"), "--port", "0", "--alias", "tiny", "--drain-delay", "0", "--log-file", "/dev/null", "--api-key", "k"});
  terminal.wait_for("is ready at http://127.0.0.1:");
  const int port = std::stoi(terminal.wait_for("\n"));
  std::ifstream file(testdata("tiny-v3/reference.json"));
  const json expected = json::parse(file);
  const json request{
      {"model", "tiny"}, {"prompt", expected["greedy_prompt"]}, {"temperature", 0}, {"max_tokens", 32}, {"return_token_ids", true}};
  const HttpAnswer answer = http_post(port, "/v1/completions", request.dump(), {"Authorization: Bearer k"});
  ASSERT_EQ(answer.status, 200) << answer.body;
  const json run =
      run_program({"run", "-m", testdata("tiny-v3"), "--raw", "--temp", "0", "-n", "32", "--json", "-p", expected["greedy_prompt"]}).json();
  const json choice = json::parse(answer.body)["choices"][0];
  EXPECT_EQ(choice["token_ids"], run["token_ids"]);
  EXPECT_EQ(choice["text"], run["text"]);

  const json chat{
      {"messages", json::array({{{"role", "user"}, {"content", "Hello"}}})},
      {"max_tokens", 200},
      {"response_format", {{"type", "json_schema"}, {"json_schema", {{"name", "x"}, {"schema", {{"enum", {"red", "green"}}}}}}}}};
  const HttpAnswer shaped = http_post(port, "/v1/chat/completions", chat.dump(), {"Authorization: Bearer k"});
  ASSERT_EQ(shaped.status, 200) << shaped.body;
  EXPECT_THAT(json::parse(shaped.body)["choices"][0]["message"]["content"].get<std::string>(), ::testing::AnyOf("\"red\"", "\"green\""));
  EXPECT_THAT(http_get(port, "/").body, ::testing::HasSubstr("<!doctype html>"));
  terminal.type("\x03");
  EXPECT_EQ(terminal.exit_code(), 0);
}

TEST(Serve, RefusesBadFlagsAndModels) {
  EXPECT_EQ(run_program({"serve"}).code, 2);
  EXPECT_EQ(run_program({"serve", "/nowhere", "--port", "0", "--log-file", "/dev/null"}).code, 1);
  const ProgramResult parser =
      run_program({"serve", testdata("tiny-v3"), "--port", "0", "--tool-call-parser", "hermes", "--log-file", "/dev/null"});
  EXPECT_EQ(parser.code, 1);
  EXPECT_THAT(parser.err, ::testing::HasSubstr("--tool-call-parser"));

  const TempDir folder;
  const auto refusal = [&](const std::vector<std::string>& flags) {
    std::vector<std::string> arguments{"serve", testdata("tiny-v3"), "--port", "0", "--log-file", "/dev/null"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.code, 1) << flags[0];
    return result.err;
  };
  EXPECT_THAT(refusal({"--api-key-file", folder.write("keys", "# none\n")}), ::testing::HasSubstr("keys: found no key"));
  EXPECT_THAT(refusal({"--api-key", ""}), ::testing::HasSubstr("--api-key: found no key"));
  EXPECT_THAT(refusal({"--ssl-certfile", "/no/cert", "--ssl-keyfile", "/no/key"}), ::testing::HasSubstr("/no/cert: cannot open"));
  EXPECT_THAT(refusal({"--allowed-origins", "example.org"}), ::testing::HasSubstr("found \"example.org\""));
}

}  // namespace
}  // namespace cachalot::test
