// Wanted shapes through the server: an engine that draws at random among the allowed tokens gives what was asked for, and nothing else.
#include <gmock/gmock.h>

#include <random>

#include "server/constraints.h"
#include "server/server_fixture.h"

namespace cachalot::test {
namespace {

using nlohmann::json;

// Draws any allowed token, the end where it is allowed with a fair chance; free text is "ok</think>".
FixtureOptions drawing(const std::string& chat_template) {
  FixtureOptions options;
  options.chat_template = chat_template;
  options.service.constraints = server::make_constraints(byte_tokenizer(), {257});
  auto random = std::make_shared<std::mt19937>(3);
  options.engine.script = [random](const Request& request, int i) {
    if (!request.constraint) return i < 2 ? 'o' : -1;
    const auto mask = request.constraint->allowed();
    int token = -1;
    if (mask.empty()) {
      token = i < 2 ? 'o' : 261;  // </think>
    } else {
      std::vector<int> allowed;
      for (int id = 0; id < byte_tokenizer().size(); ++id)
        if ((mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0) allowed.push_back(id);
      token = allowed.at((*random)() % allowed.size());
      if (std::find(allowed.begin(), allowed.end(), 257) != allowed.end() && (*random)() % 2 == 0) token = 257;
      // Strings should end some day.
      if (std::find(allowed.begin(), allowed.end(), '"') != allowed.end() && (*random)() % 2 == 0) token = '"';
    }
    EXPECT_TRUE(request.constraint->accept(token)) << token;
    return token == 257 ? -1 : token;
  };
  return options;
}

const std::string kTools =
    R"("tools":[{"type":"function","function":{"name":"get_weather","parameters":{"type":"object","properties":{"place":{"type":"string","maxLength":5},"days":{"type":"integer","minimum":1,"maximum":9}},"required":["place","days"],"additionalProperties":false}}},)"
    R"({"type":"function","function":{"name":"now"}}])";

TEST(Structured, SchemasHold) {
  const ServerFixture fixture(drawing("deepseek-ai-DeepSeek-V3.1"));
  const std::string format =
      R"("response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"type":"object","properties":{"a":{"enum":["x","y"]},"b":{"type":"boolean"}},"required":["a","b"],"additionalProperties":false}}})";
  for (int i = 0; i < 5; ++i) {
    const HttpAnswer answer = fixture.chat(format);
    ASSERT_EQ(answer.status, 200) << answer.body;
    const json content = json::parse(json::parse(answer.body)["choices"][0]["message"]["content"].get<std::string>());
    EXPECT_TRUE(content["b"].is_boolean());
    EXPECT_THAT(content["a"].get<std::string>(), testing::AnyOf("x", "y"));
  }
}

TEST(Structured, ThinkingIsFreeAndThenItIsStrict) {
  const ServerFixture fixture(drawing("deepseek-ai-DeepSeek-V3.1"));
  const std::string fields = R"X("structured_outputs":{"choice":["yes (1)","no"]},"chat_template_kwargs":{"thinking":true})X";
  const json message = json::parse(fixture.chat(fields).body)["choices"][0]["message"];
  EXPECT_EQ(message["reasoning_content"], "oo");
  EXPECT_THAT(message["content"].get<std::string>(), testing::AnyOf("yes (1)", "no"));
}

TEST(Structured, CallsCanBeForced) {
  for (const char* name : {"deepseek-ai-DeepSeek-V3", "deepseek-ai-DeepSeek-V3.1", "Qwen-Qwen3-0.6B", "meta-llama-Llama-3.1-8B-Instruct"}) {
    const ServerFixture fixture(drawing(name));
    const HttpAnswer named = fixture.chat(
        kTools + R"(,"tool_choice":{"type":"function","function":{"name":"get_weather"}},"chat_template_kwargs":{"thinking":false})");
    ASSERT_EQ(named.status, 200) << name << named.body;
    const json choice = json::parse(named.body)["choices"][0];
    ASSERT_EQ(choice["message"]["tool_calls"].size(), 1u) << name << choice;
    const json& function = choice["message"]["tool_calls"][0]["function"];
    EXPECT_EQ(function["name"], "get_weather");
    const json arguments = json::parse(function["arguments"].get<std::string>());
    EXPECT_TRUE(arguments["place"].is_string());
    EXPECT_TRUE(arguments["days"].is_number_integer());
    EXPECT_EQ(choice["finish_reason"], "tool_calls");
    EXPECT_TRUE(choice["message"]["content"].is_null()) << name << choice;
  }
}

TEST(Structured, WishesThatCannotBeHonouredAreRefused) {
  const ServerFixture fixture(drawing("deepseek-ai-DeepSeek-V3.1"));
  const std::pair<const char*, const char*> wishes[] = {
      {R"("response_format":{"type":"json_schema","json_schema":{"schema":{"$ref":"#/nowhere"}}})", "response_format"},
      {R"("guided_regex":"(")", "guided_regex"},
      {R"("structured_outputs":{"regex":"(?=a)b"})", "structured_outputs.regex"},
      {R"("grammar":"root ::= (")", "grammar"},
      {R"("grammar":"root ::= root \"a\"")", "grammar"}};
  for (const auto& [fields, field] : wishes) {
    const HttpAnswer answer = fixture.chat(std::string(fields) + ",\"stream\":true");
    EXPECT_EQ(answer.status, 400) << fields << answer.body;
    EXPECT_EQ(json::parse(answer.body)["error"]["param"], field) << fields;
  }
}

TEST(Structured, ARequestThatTurnsOutImpossibleIsTheRequestsFault) {
  FixtureOptions options;
  options.engine.script = [](const Request&, int i) { return i < 3 ? 'a' + i : kImpossible; };
  const ServerFixture fixture(std::move(options));
  const HttpAnswer answer = fixture.chat(R"("max_tokens":20)");
  EXPECT_EQ(answer.status, 400) << answer.body;
  EXPECT_EQ(json::parse(answer.body)["error"]["type"], "invalid_request_error");
}

}  // namespace
}  // namespace cachalot::test
