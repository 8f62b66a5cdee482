// The table of bad requests: each is a 400 that names its field, before anything runs.
#include "server/requests.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/answer_stream.h"
#include "server/server_fixture.h"

namespace cachalot::server {
namespace {

ParseContext context() { return {.defaults = {}, .vocab = 1000, .limits = {}}; }

std::string chat(const std::string& fields) { return R"({"messages":[{"role":"user","content":"hi"}],)" + fields + "}"; }

// The field at fault, or what went wrong instead.
std::string fault_of(const std::string& body) {
  try {
    parse_chat_request(body, context());
  } catch (const ApiError& error) {
    EXPECT_EQ(error.status, 400);
    EXPECT_STRNE(error.what(), "");
    return error.param;
  }
  return "(no error)";
}

TEST(Requests, BadNumbersAreNamed) {
  const std::pair<const char*, const char*> table[] = {
      {R"("temperature":-1)", "temperature"},
      {R"("temperature":"1")", "temperature"},
      {R"("temperature":1e308)", "temperature"},
      {R"("top_p":1.5)", "top_p"},
      {R"("top_k":-2)", "top_k"},
      {R"("top_k":0.5)", "top_k"},
      {R"("min_p":2)", "min_p"},
      {R"("repetition_penalty":0)", "repetition_penalty"},
      {R"("presence_penalty":3)", "presence_penalty"},
      {R"("n":0)", "n"},
      {R"("n":2147483648)", "n"},
      {R"("max_tokens":0)", "max_tokens"},
      {R"("max_tokens":-1)", "max_tokens"},
      {R"("max_completion_tokens":-5)", "max_completion_tokens"},
      {R"("min_tokens":-1)", "min_tokens"},
      {R"("seed":"7")", "seed"},
      {R"("seed":1.5)", "seed"},
      {R"("stop":"")", "stop"},
      {R"("stop":[""])", "stop[0]"},
      {R"("stop":[1])", "stop[0]"},
      {R"("stop":["a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a"])", "stop"},
      {R"("logit_bias":{"1000":1})", "logit_bias.1000"},
      {R"("logit_bias":{"-1":1})", "logit_bias.-1"},
      {R"("logit_bias":{"x":1})", "logit_bias.x"},
      {R"("logit_bias":{"1":101})", "logit_bias.1"},
      {R"("logit_bias":[[1]])", "logit_bias[0]"},
      {R"("stop_token_ids":[1000])", "stop_token_ids[0]"},
      {R"("top_logprobs":2)", "top_logprobs"},
      {R"("logprobs":true,"top_logprobs":21)", "top_logprobs"},
      {R"("logprobs":1)", "logprobs"},
      {R"("stream":"yes")", "stream"},
      {R"("stream_options":{"include_usage":true})", "stream_options"},
      {R"("priority":"P9")", "priority"},
      {R"("response_format":{"type":"xml"})", "response_format.type"},
      {R"("response_format":{"type":"json_schema","json_schema":{"name":"x"}})", "response_format.json_schema.schema"},
      {R"("response_format":{"type":"json_object"},"guided_regex":"a")", "guided_regex"},
      {R"("chat_template":"{{x}}")", "chat_template"},
      {R"("chat_template_kwargs":{"messages":[]})", "chat_template_kwargs"},
      {R"("chat_template_kwargs":7)", "chat_template_kwargs"},
      {R"("tools":{})", "tools"},
      {R"("tools":[{"type":"browser"}])", "tools[0].type"},
      {R"("tools":[{"type":"function","function":{"name":"a b"}}])", "tools[0].function.name"},
      {R"("tools":[{"type":"function","function":{"name":"a"}},{"type":"function","function":{"name":"a"}}])", "tools[1].function.name"},
      {R"("tools":[{"type":"function","function":{"name":"a","parameters":[]}}])", "tools[0].function.parameters"},
      {R"("tool_choice":"required")", "tool_choice"},
      {R"("tools":[{"type":"function","function":{"name":"a"}}],"tool_choice":{"type":"function","function":{"name":"b"}})", "tool_choice"},
      {R"("continue_final_message":true)", "continue_final_message"},
  };
  for (const auto& [fields, field] : table) EXPECT_EQ(fault_of(chat(fields)), field) << fields;
}

TEST(Requests, BadMessagesAreNamed) {
  const std::pair<const char*, const char*> table[] = {
      {R"({})", "messages"},
      {R"({"messages":[]})", "messages"},
      {R"({"messages":"hi"})", "messages"},
      {R"({"messages":["hi"]})", "messages[0]"},
      {R"({"messages":[{"content":"hi"}]})", "messages[0].role"},
      {R"({"messages":[{"role":"robot","content":"hi"}]})", "messages[0].role"},
      {R"({"messages":[{"role":"user","content":7}]})", "messages[0].content"},
      {R"({"messages":[{"role":"user","content":[{"type":"image_url"}]}]})", "messages[0].content[0].type"},
      {R"({"messages":[{"role":"user","content":[{"type":"text"}]}]})", "messages[0].content[0].text"},
      {R"({"messages":[{"role":"assistant","tool_calls":[{}]}]})", "messages[0].tool_calls[0].function"},
      {R"({"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"x y"}}]}]})", "messages[0].tool_calls[0].function.name"},
  };
  for (const auto& [body, field] : table) EXPECT_EQ(fault_of(body), field) << body;
}

TEST(Requests, BodiesThatAreNoObjectOrTooDeepAreRefused) {
  for (const std::string& body :
       {std::string(), std::string("null"), std::string("[]"), std::string("{\"a\":"), std::string("{\"messages\":[],\"messages\":[]}"),
        std::string("{\"a\":NaN}"), std::string("{\"a\":\"\xff\"}"), std::string("{\"a\":\"\\ud800\"}"),
        "{\"a\":" + std::string(100000, '[') + std::string(100000, ']') + "}"})
    EXPECT_EQ(fault_of(body), "") << body.substr(0, 40);
  std::string many = "{";
  for (int i = 0; i < 1000; ++i) many += "\"k" + std::to_string(i) + "\":1,";
  EXPECT_EQ(fault_of(many + "\"z\":1}"), "");
  // A quadratic document is refused where it would be built.
  std::string kwargs = "{";
  for (int i = 0; i < 100000; ++i) kwargs += "\"k" + std::to_string(i) + "\":1,";
  EXPECT_EQ(fault_of(chat("\"chat_template_kwargs\":" + kwargs + "\"z\":1}")), "chat_template_kwargs");
}

TEST(Requests, GoodOnesPass) {
  for (const char* fields :
       {R"("max_tokens":null)", R"("max_tokens":1000000000)", R"("max_tokens":1e308)", R"("max_tokens":9223372036854775807)",
        R"("top_k":-1)", R"("top_k":1099511627776)", R"("seed":-9223372036854775808)", R"("seed":18446744073709551615)", R"("n":5.0)",
        R"("stop":null)", R"("logit_bias":{})", R"("logit_bias":[[1,false],[2,1.5]])", R"("tools":[])",
        R"("tools":null,"tool_choice":"auto")", R"("priority":-7)", R"("response_format":{"type":"text"})",
        R"("anything":{"deep":[[[[1]]]]})"})
    EXPECT_EQ(fault_of(chat(fields)), "(no error)") << fields;
}

TEST(Requests, MessagesBecomeRegular) {
  const ChatRequest request = parse_chat_request(
      R"({"messages":[{"role":"developer","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},{"role":"assistant","reasoning":"r","tool_calls":[{"function":{"name":"f","arguments":"{\"x\":1}"}}]},)"
      R"({"role":"tool","content":"ok"},{"role":"assistant"}]})",
      context());
  const auto& m = request.messages;
  EXPECT_EQ(m[0]["role"], "system");
  EXPECT_EQ(m[0]["content"], "a\nb");
  EXPECT_TRUE(m[1]["content"].is_null());
  EXPECT_EQ(m[1]["reasoning_content"], "r");
  EXPECT_FALSE(m[1]["tool_calls"][0]["id"].get<std::string>().empty());
  EXPECT_EQ(m[1]["tool_calls"][0]["function"]["arguments"]["x"], 1);
  EXPECT_EQ(m[3]["content"], "");
}

TEST(Requests, AnthropicAndResponsesNameTheirFields) {
  const auto messages_fault = [](const char* body) -> std::string {
    try {
      parse_messages_request(body, context(), false);
    } catch (const ApiError& error) {
      return error.param;
    }
    return "(no error)";
  };
  EXPECT_EQ(messages_fault(R"({"model":"m","messages":[{"role":"user","content":"x"}]})"), "max_tokens");
  EXPECT_EQ(messages_fault(R"({"max_tokens":1,"messages":[{"role":"user","content":"x"}]})"), "model");
  EXPECT_EQ(messages_fault(R"({"model":"m","max_tokens":1,"messages":[{"role":"system","content":"x"}]})"), "messages[0].role");
  EXPECT_EQ(messages_fault(R"({"model":"m","max_tokens":1,"messages":[{"role":"user","content":[{"type":"image"}]}]})"),
            "messages[0].content[0].type");
  EXPECT_EQ(
      messages_fault(
          R"({"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}],"tools":[{"type":"bash_20250124","name":"bash"}]})"),
      "tools[0].type");
  const auto responses_fault = [](const char* body) -> std::string {
    try {
      parse_responses_request(body, context());
    } catch (const ApiError& error) {
      return error.param;
    }
    return "(no error)";
  };
  EXPECT_EQ(responses_fault(R"({})"), "input");
  EXPECT_EQ(responses_fault(R"({"input":[]})"), "input");
  EXPECT_EQ(responses_fault(R"({"input":[{"type":"web_search_call"}]})"), "input[0].type");
  EXPECT_EQ(responses_fault(R"({"input":"x","background":true})"), "background");
}

// Every cut of the text into two tokens' bytes gives one result.
TEST(AnswerStream, DoesNotDependOnTheCut) {
  const std::string text = "\nplan\n\n</think>\n\nsay 世界 STOP never";
  for (size_t at = 0; at <= text.size(); ++at) {
    ReasoningSplitter splitter(true);
    StopMatcher stops({"STOP"});
    std::string reasoning, content;
    for (const std::string& piece : {text.substr(0, at), text.substr(at)}) {
      std::string rest;
      splitter.push(piece, reasoning, rest);
      content += stops.push(rest).text;
    }
    EXPECT_EQ(reasoning, "plan") << at;
    EXPECT_EQ(content, "say 世界 ") << at;
  }
}

TEST(AnswerStream, ReasoningBeginsOnlyWithTheFirstWord) {
  const auto split = [](const std::string& text) {
    std::pair<std::string, std::string> out;
    ReasoningSplitter splitter(false);
    for (const char c : text) splitter.push({&c, 1}, out.first, out.second);
    splitter.finish(out.first, out.second);
    return out;
  };
  EXPECT_EQ(split("<think>a</think>b"), std::pair(std::string("a"), std::string("b")));
  EXPECT_EQ(split("\n<think>\na\n</think>\nb"), std::pair(std::string("a"), std::string("b")));
  EXPECT_EQ(split("no <think>a</think>"), std::pair(std::string(), std::string("no <think>a</think>")));
  EXPECT_EQ(split("<thi"), std::pair(std::string(), std::string("<thi")));
  EXPECT_EQ(split("  "), std::pair(std::string(), std::string("  ")));
}

TEST(AnswerStream, ControlTokensAreNoText) {
  AnswerStream stream(test::byte_tokenizer(), {});
  Delta delta;
  for (const int id : {97, 258, 98, 257, 99}) EXPECT_TRUE(stream.push(id, delta));
  stream.finish(delta);
  EXPECT_EQ(delta.content, "abc");
}

}  // namespace
}  // namespace cachalot::server
