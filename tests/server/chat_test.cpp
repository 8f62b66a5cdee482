// Chat completions through real sockets: whole and streamed, reasoning, tools, stops, usage, logprobs.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include "server/server_fixture.h"

namespace cachalot::test {
namespace {

using nlohmann::json;
using server::ServerOptions;

FixtureOptions answering(const std::string& text) {
  FixtureOptions options;
  options.engine.script = answer_with(text);
  return options;
}

// A stream's deltas, joined.
struct Joined {
  std::string content, reasoning, finish;
  std::vector<std::pair<std::string, std::string>> calls;
  json usage;
  int chunks = 0;
  bool done = false;
};

Joined join(const HttpAnswer& answer) {
  Joined out;
  for (const std::string& data : sse_data(answer.body)) {
    EXPECT_FALSE(out.done) << "nothing comes behind [DONE]";
    if (data == "[DONE]") {
      out.done = true;
      continue;
    }
    const json chunk = json::parse(data);
    EXPECT_EQ(chunk["object"], "chat.completion.chunk");
    if (chunk.contains("usage") && !chunk["usage"].is_null()) {
      EXPECT_TRUE(chunk["choices"].empty());
      out.usage = chunk["usage"];
      continue;
    }
    ++out.chunks;
    const json& choice = chunk["choices"][0];
    const json& delta = choice["delta"];
    if (delta.contains("content") && !delta["content"].is_null()) out.content += delta["content"].get<std::string>();
    if (delta.contains("reasoning_content")) {
      out.reasoning += delta["reasoning_content"].get<std::string>();
      EXPECT_EQ(delta["reasoning_content"], delta["reasoning"]);
    }
    if (delta.contains("tool_calls")) {
      for (const json& call : delta["tool_calls"]) {
        const auto index = call["index"].get<size_t>();
        if (index == out.calls.size()) out.calls.emplace_back(call["function"]["name"], "");
        out.calls[index].second += call["function"]["arguments"].get<std::string>();
      }
    }
    if (!choice["finish_reason"].is_null()) {
      EXPECT_TRUE(out.finish.empty());
      out.finish = choice["finish_reason"];
    }
  }
  return out;
}

TEST(Chat, AnswersWhole) {
  const ServerFixture fixture(answering("Grüße, 世界"));
  const HttpAnswer answer = fixture.chat();
  ASSERT_EQ(answer.status, 200) << answer.body;
  const json body = json::parse(answer.body);
  EXPECT_EQ(body["object"], "chat.completion");
  EXPECT_EQ(body["model"], "stub");
  EXPECT_EQ(body["choices"][0]["message"]["role"], "assistant");
  EXPECT_EQ(body["choices"][0]["message"]["content"], "Grüße, 世界");
  EXPECT_EQ(body["choices"][0]["finish_reason"], "stop");
  const int n = static_cast<int>(byte_tokenizer().encode("Grüße, 世界").size()) + 1;
  EXPECT_EQ(body["usage"]["completion_tokens"], n) << "the end token was sampled too";
  EXPECT_EQ(body["usage"]["total_tokens"], body["usage"]["prompt_tokens"].get<int>() + n);
  EXPECT_TRUE(answer.headers.contains("x-request-id"));
}

TEST(Chat, StreamsTheSame) {
  const ServerFixture fixture(answering("Grüße, 世界"));
  const HttpAnswer answer = fixture.chat(R"("stream":true,"stream_options":{"include_usage":true})");
  ASSERT_EQ(answer.status, 200);
  EXPECT_TRUE(answer.complete);
  EXPECT_THAT(answer.headers.at("content-type"), testing::StartsWith("text/event-stream"));
  const Joined joined = join(answer);
  EXPECT_EQ(joined.content, "Grüße, 世界");
  EXPECT_EQ(joined.finish, "stop");
  EXPECT_TRUE(joined.done);
  EXPECT_EQ(joined.usage, json::parse(fixture.chat().body)["usage"]);
  const HttpAnswer plain = fixture.chat(R"("stream":true)");
  EXPECT_TRUE(join(plain).usage.is_null()) << "usage comes only when asked for";
}

TEST(Chat, SplitsReasoningByTheStateOfThePrompt) {
  const ServerFixture fixture(answering("I think\n</think>\n\n391"));
  const std::string thinking = R"("chat_template_kwargs":{"thinking":true})";
  const json message = json::parse(fixture.chat(thinking).body)["choices"][0]["message"];
  EXPECT_EQ(message["reasoning_content"], "I think");
  EXPECT_EQ(message["reasoning"], "I think");
  EXPECT_EQ(message["content"], "391");
  const Joined joined = join(fixture.chat(thinking + R"(,"stream":true)"));
  EXPECT_EQ(joined.reasoning, "I think");
  EXPECT_EQ(joined.content, "391");
  const json body = json::parse(fixture.chat(thinking).body);
  EXPECT_GT(body["usage"]["completion_tokens_details"]["reasoning_tokens"], 7);
}

TEST(Chat, AnswersWithoutThinkingAreContent) {
  const ServerFixture fixture(answering("{\"a\":1}"));
  const json message = json::parse(fixture.chat(R"("chat_template_kwargs":{"thinking":false})").body)["choices"][0]["message"];
  EXPECT_EQ(message["content"], "{\"a\":1}");
  EXPECT_FALSE(message.contains("reasoning_content"));
}

TEST(Chat, ThinkingThatIsCutShortIsReasoning) {
  const ServerFixture fixture(answering("thinking without end"));
  const json body = json::parse(fixture.chat(R"("chat_template_kwargs":{"thinking":true},"max_tokens":5)").body);
  EXPECT_EQ(body["choices"][0]["message"]["reasoning_content"], "think");
  EXPECT_EQ(body["choices"][0]["message"]["content"], "");
  EXPECT_EQ(body["choices"][0]["finish_reason"], "length");
}

TEST(Chat, CallsTools) {
  const ServerFixture fixture(
      answering("Look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"s\": \"日本\"}<｜tool▁call▁end｜>"
                "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"));
  const std::string tools =
      R"("tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}},{"type":"function","function":{"name":"g"}}])";
  const json choice = json::parse(fixture.chat(tools).body)["choices"][0];
  EXPECT_EQ(choice["finish_reason"], "tool_calls");
  EXPECT_EQ(choice["message"]["content"], "Look.");
  ASSERT_EQ(choice["message"]["tool_calls"].size(), 2u);
  EXPECT_EQ(choice["message"]["tool_calls"][0]["function"]["arguments"], "{\"s\": \"日本\"}");
  const Joined joined = join(fixture.chat(tools + R"(,"stream":true)"));
  EXPECT_THAT(joined.calls, testing::ElementsAre(testing::Pair("f", "{\"s\": \"日本\"}"), testing::Pair("g", "{}")));
  EXPECT_EQ(joined.finish, "tool_calls");
  const json one = json::parse(fixture.chat(tools + R"(,"parallel_tool_calls":false)").body)["choices"][0];
  EXPECT_EQ(one["message"]["tool_calls"].size(), 1u);
  const json none = json::parse(fixture.chat(tools + R"(,"tool_choice":"none")").body)["choices"][0];
  EXPECT_FALSE(none["message"].contains("tool_calls"));
  EXPECT_EQ(fixture.chat(tools + R"(,"tool_choice":"required")").status, 400);
}

TEST(Chat, ToolsReachTheModelEvenWhereTheTemplateDoesNotShowThem) {
  FixtureOptions options;
  options.chat_template = "deepseek-ai-DeepSeek-V3";
  ServerFixture fixture(std::move(options));
  fixture.engine().keep_seen = true;
  ASSERT_EQ(fixture.chat(R"("tools":[{"type":"function","function":{"name":"get_the_weather"}}])").status, 200);
  EXPECT_THAT(byte_tokenizer().decode(fixture.engine().seen().at(0).prompt), testing::HasSubstr("get_the_weather"));
}

TEST(Chat, ToolHistoryRendersWithEitherFormOfArguments) {
  for (const char* name : {"deepseek-ai-DeepSeek-V3", "deepseek-ai-DeepSeek-V3.1", "deepseek-ai-DeepSeek-V3.2", "Qwen-Qwen3-0.6B"}) {
    FixtureOptions options;
    options.chat_template = name;
    ServerFixture fixture(std::move(options));
    fixture.engine().keep_seen = true;
    for (const char* arguments : {R"({"a":1})", R"("{\"a\":1}")"}) {
      const std::string body =
          std::string(
              R"({"messages":[{"role":"user","content":[{"type":"text","text":"hi"}]},{"role":"assistant","tool_calls":[{"id":"x","type":"function","function":{"name":"f","arguments":)") +
          arguments + R"(}}]},{"role":"tool","tool_call_id":"x","content":"ok"}]})";
      const HttpAnswer answer = fixture.post("/v1/chat/completions", body);
      ASSERT_EQ(answer.status, 200) << name << answer.body;
    }
    const auto seen = fixture.engine().seen();
    EXPECT_EQ(seen[0].prompt, seen[1].prompt) << name;
    EXPECT_THAT(byte_tokenizer().decode(seen[0].prompt), testing::ContainsRegex("\"a\": ?1|name=\"a\"")) << name;
  }
}

TEST(Chat, CallsAreHistoryEvenWhereTheTemplateDoesNotShowThem) {
  const std::string body =
      R"({"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"Look.","tool_calls":[{"id":"x","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}}]},{"role":"tool","tool_call_id":"x","content":"ok"}]})";
  const auto smollm2 = [](std::optional<server::ToolFormat> format) {
    FixtureOptions options;
    options.chat_template = "HuggingFaceTB-SmolLM2-135M-Instruct";
    options.service.tool_format = format;
    return options;
  };
  {
    const ServerFixture fixture(smollm2({}));
    const HttpAnswer answer = fixture.post("/v1/chat/completions", body);
    EXPECT_EQ(answer.status, 400);
    EXPECT_THAT(answer.body, testing::HasSubstr("knows no tools"));
  }
  ServerFixture fixture(smollm2(server::ToolFormat::hermes));
  fixture.engine().keep_seen = true;
  ASSERT_EQ(fixture.post("/v1/chat/completions", body).status, 200);
  EXPECT_THAT(byte_tokenizer().decode(fixture.engine().seen().at(0).prompt),
              testing::HasSubstr("Look.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":1}}\n</tool_call>"));
}

TEST(Chat, StopStringsEndTheAnswer) {
  ServerFixture fixture(answering("one STOP two"));
  const json choice = json::parse(fixture.chat(R"("stop":["STOP","x"])").body)["choices"][0];
  EXPECT_EQ(choice["message"]["content"], "one ");
  EXPECT_EQ(choice["finish_reason"], "stop");
  EXPECT_EQ(choice["stop_reason"], "STOP");
  EXPECT_EQ(join(fixture.chat(R"("stop":"STOP","stream":true)")).content, "one ");
  EXPECT_EQ(json::parse(fixture.chat(R"("stop":"STOP","include_stop_str_in_output":true)").body)["choices"][0]["message"]["content"],
            "one STOP");
  eventually([&] { return fixture.engine().open_requests() == 0; }, "a stop string frees the request");
}

TEST(Chat, GivesSeveralAnswers) {
  const ServerFixture fixture(answering("yes"));
  const json body = json::parse(fixture.chat(R"("n":3)").body);
  ASSERT_EQ(body["choices"].size(), 3u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(body["choices"][static_cast<size_t>(i)]["index"], i);
    EXPECT_EQ(body["choices"][static_cast<size_t>(i)]["message"]["content"], "yes");
  }
  EXPECT_EQ(body["usage"]["completion_tokens"], 12);
}

TEST(Chat, LogprobsHaveBytesAndRivals) {
  const ServerFixture fixture(answering("é"));
  const json body = json::parse(fixture.chat(R"("logprobs":true,"top_logprobs":2)").body);
  const json& content = body["choices"][0]["logprobs"]["content"];
  ASSERT_EQ(content.size(), 2u) << "two tokens, each half a character";
  std::string bytes;
  for (const json& token : content) {
    for (const json& byte : token["bytes"]) bytes += static_cast<char>(byte.get<int>());
    EXPECT_EQ(token["top_logprobs"].size(), 2u);
    EXPECT_FLOAT_EQ(token["logprob"], -0.5f);
  }
  EXPECT_EQ(bytes, "é");
  size_t streamed = 0;
  for (const std::string& data : sse_data(fixture.chat(R"("logprobs":true,"stream":true)").body)) {
    if (data == "[DONE]") continue;
    const json chunk = json::parse(data);
    if (!chunk["choices"][0]["logprobs"].is_null()) streamed += chunk["choices"][0]["logprobs"]["content"].size();
  }
  EXPECT_EQ(streamed, 2u);
}

TEST(Chat, PassesSamplingOn) {
  ServerFixture fixture;
  fixture.engine().keep_seen = true;
  const HttpAnswer answer = fixture.chat(
      R"("temperature":0.25,"top_p":0.5,"top_k":7,"min_p":0.125,"repetition_penalty":1.5,"presence_penalty":0.5,"frequency_penalty":-0.5,"seed":11,)"
      R"("logit_bias":{"65":-100,"66":2.5},"max_tokens":5,"max_completion_tokens":6,"min_tokens":2,"ignore_eos":true,"stop_token_ids":[70],"priority":"P1",)"
      R"("cache_salt":"tenant","unknown_field":{"x":[1]})");
  ASSERT_EQ(answer.status, 200) << answer.body;
  const Request r = fixture.engine().seen().at(0);
  EXPECT_EQ(r.sampling.temperature, 0.25f);
  EXPECT_EQ(r.sampling.top_p, 0.5f);
  EXPECT_EQ(r.sampling.top_k, 7);
  EXPECT_EQ(r.sampling.min_p, 0.125f);
  EXPECT_EQ(r.sampling.repetition, 1.5f);
  EXPECT_EQ(r.sampling.presence, 0.5f);
  EXPECT_EQ(r.sampling.frequency, -0.5f);
  EXPECT_EQ(r.sampling.seed, 11u);
  ASSERT_EQ(r.sampling.bias.size(), 2u);
  EXPECT_EQ(r.sampling.bias[0].bias, -std::numeric_limits<float>::infinity());
  EXPECT_EQ(r.max_tokens, 6) << "the newer name wins";
  EXPECT_EQ(r.min_tokens, 2);
  EXPECT_TRUE(r.ignore_eos);
  EXPECT_EQ(r.stop_tokens, std::vector<int>{70});
  EXPECT_EQ(r.priority, Priority::batch);
  EXPECT_EQ(r.cache_salt, "tenant");
}

TEST(Chat, PromptsThatDoNotFitAreRefusedBeforeAnything) {
  FixtureOptions options;
  options.engine.info.max_context = 128;
  const ServerFixture fixture(std::move(options));
  const std::string body = R"({"messages":[{"role":"user","content":")" + std::string(10000, 'x') + R"("}],"stream":true})";
  const HttpAnswer answer = fixture.post("/v1/chat/completions", body);
  EXPECT_EQ(answer.status, 400);
  const json error = json::parse(answer.body)["error"];
  EXPECT_EQ(error["code"], "context_length_exceeded");
  EXPECT_EQ(error["param"], "messages");
  EXPECT_THAT(error["message"].get<std::string>(), testing::AllOf(testing::HasSubstr("128"), testing::ContainsRegex("100[0-9][0-9]")));
}

TEST(Chat, EndlessAnswersStopAtTheContext) {
  FixtureOptions options;
  options.engine.info.max_context = 256;
  options.engine.script = [](const Request&, int) { return 'x'; };
  const ServerFixture fixture(std::move(options));
  const json body = json::parse(fixture.chat().body);
  EXPECT_EQ(body["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(body["usage"]["total_tokens"], 256);
}

TEST(Completions, EchoWithLogprobsScoresThePrompt) {
  const ServerFixture fixture(answering("zz"));
  const json body = json::parse(fixture.post("/v1/completions", R"({"prompt":"abc","max_tokens":0,"echo":true,"logprobs":1})").body);
  const json& choice = body["choices"][0];
  EXPECT_EQ(choice["text"], "abc");
  EXPECT_EQ(choice["logprobs"]["tokens"].size(), 3u);
  EXPECT_TRUE(choice["logprobs"]["token_logprobs"][0].is_null());
  EXPECT_FLOAT_EQ(choice["logprobs"]["token_logprobs"][1], -1.0f);
  EXPECT_EQ(choice["logprobs"]["text_offset"], json({0, 1, 2}));
  EXPECT_EQ(body["usage"]["completion_tokens"], 0);
}

TEST(Completions, TextOffsetsAreThoseOfTheTextThatIsGiven) {
  // <｜User｜> has eight characters, and takes room only where it is part of the text.
  const ServerFixture fixture(answering("z<｜User｜>y"));
  const std::tuple<const char*, const char*, json> cases[] = {
      {R"("a<｜User｜>b")", "true", {0, 1, 9, 10, 11, 11}},
      {R"("a<｜User｜>b")", "false", {0, 1, 9, 10, 11, 19}},
      {"[256,97,258,98]", "true", {0, 0, 1, 1, 2, 3, 3}},
      {"[256,97,258,98]", "false", {0, 0, 1, 1, 2, 3, 11}},
  };
  for (const auto& [prompt, skips, offsets] : cases) {
    const std::string body =
        fmt::format(R"({{"prompt":{},"skip_special_tokens":{},"max_tokens":3,"echo":true,"logprobs":0}})", prompt, skips);
    const json choice = json::parse(fixture.post("/v1/completions", body).body)["choices"][0];
    EXPECT_EQ(choice["logprobs"]["text_offset"], offsets) << body << choice;
  }
}

TEST(Completions, TakesListsOfPromptsAndOfTokens) {
  ServerFixture fixture(answering("ok"));
  fixture.engine().keep_seen = true;
  for (const char* prompt : {R"("ab")", R"(["ab","ab"])", "[97,98]", "[[97,98],[97,98]]"}) {
    const HttpAnswer answer = fixture.post("/v1/completions", std::string(R"({"prompt":)") + prompt + R"(,"n":2})");
    ASSERT_EQ(answer.status, 200) << answer.body;
    const json body = json::parse(answer.body);
    EXPECT_EQ(body["choices"].size() % 2, 0u);
    EXPECT_EQ(body["choices"][0]["text"], "ok");
  }
  for (const Request& r : fixture.engine().seen()) EXPECT_EQ(r.prompt, (std::vector<int>{97, 98}));
}

TEST(Completions, Streams) {
  const ServerFixture fixture(answering("hello"));
  const HttpAnswer answer =
      fixture.post("/v1/completions", R"({"prompt":"ab","stream":true,"echo":true,"stream_options":{"include_usage":true}})");
  std::string text;
  json usage;
  for (const std::string& data : sse_data(answer.body)) {
    if (data == "[DONE]") continue;
    const json chunk = json::parse(data);
    if (!chunk["choices"].empty()) text += chunk["choices"][0]["text"].get<std::string>();
    if (!chunk["usage"].is_null()) usage = chunk["usage"];
  }
  EXPECT_EQ(text, "abhello");
  EXPECT_EQ(usage["completion_tokens"], 6);
}

TEST(Messages, AnswerInAnthropicsForm) {
  const ServerFixture fixture(
      answering("why\n</think>\n\nbecause<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": "
                "1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"));
  const std::string body =
      R"({"model":"stub","max_tokens":300,"thinking":{"type":"enabled","budget_tokens":100},"system":"be brief","messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}],)"
      R"("tools":[{"name":"f","input_schema":{"type":"object"}}])";
  const json whole = json::parse(fixture.post("/v1/messages", body + "}").body);
  ASSERT_EQ(whole["type"], "message") << whole;
  EXPECT_EQ(whole["stop_reason"], "tool_use");
  ASSERT_EQ(whole["content"].size(), 3u);
  EXPECT_EQ(whole["content"][0]["thinking"], "why");
  EXPECT_EQ(whole["content"][1]["text"], "because");
  EXPECT_EQ(whole["content"][2]["input"], json({{"a", 1}}));

  std::vector<std::string> types;
  std::string thinking, text, input;
  for (const std::string& data : sse_data(fixture.post("/v1/messages", body + R"(,"stream":true})").body)) {
    const json event = json::parse(data);
    if (types.empty() || types.back() != event["type"]) types.push_back(event["type"]);
    if (event["type"] != "content_block_delta") continue;
    const json& delta = event["delta"];
    if (delta["type"] == "thinking_delta") thinking += delta["thinking"].get<std::string>();
    if (delta["type"] == "text_delta") text += delta["text"].get<std::string>();
    if (delta["type"] == "input_json_delta") input += delta["partial_json"].get<std::string>();
  }
  EXPECT_EQ(thinking, "why");
  EXPECT_EQ(text, "because");
  EXPECT_EQ(input, "{\"a\": 1}");
  EXPECT_THAT(types, testing::ElementsAre("message_start", "content_block_start", "content_block_delta", "content_block_stop",
                                          "content_block_start", "content_block_delta", "content_block_stop", "content_block_start",
                                          "content_block_delta", "content_block_stop", "message_delta", "message_stop"));
  EXPECT_EQ(json::parse(fixture.post("/v1/messages/count_tokens", body + "}").body)["input_tokens"], whole["usage"]["input_tokens"]);
  const json error = json::parse(fixture.post("/v1/messages", R"({"model":"stub","messages":[]})").body);
  EXPECT_EQ(error["type"], "error");
  EXPECT_EQ(error["error"]["type"], "invalid_request_error");
}

TEST(Responses, AnswerWholeAndStreamed) {
  const ServerFixture fixture(answering("hi there"));
  const json whole = json::parse(fixture.post("/v1/responses", R"({"input":"hello","instructions":"be brief"})").body);
  ASSERT_EQ(whole["object"], "response") << whole;
  EXPECT_EQ(whole["status"], "completed");
  EXPECT_EQ(whole["output"][0]["content"][0]["text"], "hi there");
  std::string text;
  int64_t next = 0;
  json last;
  for (const std::string& data :
       sse_data(fixture.post("/v1/responses", R"({"input":[{"role":"user","content":"hello"}],"stream":true})").body)) {
    last = json::parse(data);
    EXPECT_EQ(last["sequence_number"], next++);
    if (last["type"] == "response.output_text.delta") text += last["delta"].get<std::string>();
  }
  EXPECT_EQ(text, "hi there");
  EXPECT_EQ(last["type"], "response.completed");
  EXPECT_EQ(last["response"]["output"][0]["content"][0]["text"], "hi there");
  EXPECT_EQ(fixture.post("/v1/responses", R"({"input":"x","previous_response_id":"resp_1"})").status, 400);
}

TEST(Tokenize, GoesThereAndBack) {
  const ServerFixture fixture;
  const json ids = json::parse(fixture.post("/tokenize", R"({"prompt":"héllo","add_special_tokens":false})").body);
  EXPECT_EQ(ids["count"], 6);
  const json text = json::parse(fixture.post("/detokenize", json({{"tokens", ids["tokens"]}}).dump()).body);
  EXPECT_EQ(text["prompt"], "héllo");
  const json chat = json::parse(fixture.post("/tokenize", R"({"messages":[{"role":"user","content":"hi"}]})").body);
  EXPECT_EQ(chat["tokens"][0], 256) << "one BOS";
}

}  // namespace
}  // namespace cachalot::test
