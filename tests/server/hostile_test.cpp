// Requests as they were used against other servers: each class of known weaknesses that applies here has a test (docs/server.md lists
// them).
#include <gmock/gmock.h>

#include "server/constraints.h"
#include "server/server_fixture.h"

namespace cachalot::test {
namespace {

using nlohmann::json;

std::string repeated(std::string_view piece, int n) {
  std::string out;
  for (int i = 0; i < n; ++i) out += piece;
  return out;
}

std::string schema_of(const std::string& schema) {
  return R"("response_format":{"type":"json_schema","json_schema":{"name":"x","schema":)" + schema + "}}";
}

FixtureOptions with_grammars() {
  FixtureOptions options;
  options.service.constraints = server::make_constraints(byte_tokenizer(), {257});
  return options;
}

TEST(Hostile, ShapesThatCannotBeBuiltFailTheirRequestAlone) {
  ServerFixture fixture(with_grammars());
  fixture.engine().hold();
  HttpClient neighbour(fixture.port());
  neighbour.request("POST", "/v1/chat/completions", R"({"messages":[{"role":"user","content":"hi"}],"stream":true})");
  ASSERT_TRUE(neighbour.wait_for("assistant"));
  const std::pair<const char*, std::string> table[] = {
      {"30,000 parentheses", "\"guided_regex\":\"" + std::string(30000, '(') + "\""},
      {"a grammar of as many", "\"grammar\":\"root ::= " + std::string(30000, '(') + "\""},
      {"a grammar that calls itself", R"("grammar":"root ::= root")"},
      {"a schema 100,000 deep", schema_of(repeated(R"({"items":)", 100000) + "{}" + std::string(100000, '}'))},
      {"a schema 60 deep in text that is a string",
       "\"guided_json\":\"" + repeated(R"({\"items\":)", 5000) + "{}" + std::string(5000, '}') + "\""},
      {"a reference to itself", schema_of(R"({"$ref":"#"})")},
      {"references in a ring", schema_of(R"({"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}})")},
      {"a billion items", schema_of(R"({"type":"array","items":{"type":"integer"},"minItems":1000000000})")},
      {"a billion characters", schema_of(R"({"type":"string","minLength":1000000000})")},
      {"counts of counts", R"("guided_regex":"((((a{1000}){1000}){1000}){1000})b")"},
      {"an empty choice", schema_of(R"({"enum":[]})")},
      {"no choice", R"("guided_choice":[])"},
      {"a pattern that looks back", schema_of(R"({"type":"string","pattern":"(a)\\1"})")},
      {"half a character", R"("guided_regex":"\ud800")"},
      {"an escape without digits", R"("guided_regex":"\\u00")"},
  };
  for (const auto& [name, fields] : table) {
    const HttpAnswer answer = fixture.chat(fields);
    EXPECT_EQ(answer.status, 400) << name << answer.body.substr(0, 300);
    EXPECT_EQ(json::parse(answer.body)["error"]["type"], "invalid_request_error") << name;
  }
  fixture.engine().release();
  const HttpAnswer answer = neighbour.answer();
  EXPECT_THAT(answer.body, testing::HasSubstr("\"finish_reason\":\"stop\"")) << "who runs beside them notices nothing";
}

TEST(Hostile, PatternsThatBacktrackElsewhereAreRead) {
  const ServerFixture fixture(with_grammars());
  for (const char* pattern : {"(a+)+b", "(a|a)*c", "(.*)*x", "([a-z]+)*[0-9]"}) {
    const HttpAnswer answer = fixture.chat(std::string("\"guided_regex\":\"") + pattern + "\"");
    EXPECT_EQ(answer.status, 200) << pattern << answer.body;
  }
}

TEST(Hostile, ManyShapesDoNotPileUp) {
  const ServerFixture fixture(with_grammars());
  for (int i = 0; i < 100; ++i)
    ASSERT_EQ(fixture.chat("\"max_tokens\":1,\"guided_regex\":\"[a-f]{" + std::to_string(i + 1) + "}\"").status, 200) << i;
}

TEST(Hostile, NumbersPastEveryBound) {
  const ServerFixture fixture;
  std::string biases, stops, ids;
  for (int i = 0; i < 100000; ++i) {
    biases += (i > 0 ? ",\"" : "\"") + std::to_string(i) + "\":1";
    stops += i > 0 ? ",\"a\"" : "\"a\"";
    ids += i > 0 ? ",1" : "1";
  }
  for (const std::string& fields :
       {std::string("\"n\":2147483648"), std::string("\"n\":1e308"), std::string("\"n\":-1"),
        std::string("\"top_logprobs\":129,\"logprobs\":true"), std::string("\"max_tokens\":-9223372036854775808"),
        std::string("\"seed\":1e400"), std::string("\"priority\":\"P-1\""), std::string("\"min_tokens\":9223372036854775807"),
        std::string("\"temperature\":NaN"), "\"logit_bias\":{" + biases + "}", "\"stop\":[" + stops + "]",
        "\"stop_token_ids\":[" + ids + "]"}) {
    const HttpAnswer answer = fixture.chat(fields);
    EXPECT_EQ(answer.status, 400) << fields.substr(0, 80) << answer.body.substr(0, 200);
  }
  EXPECT_EQ(fixture.chat("\"priority\":-2147483648").status, 200) << "vLLM's numbers below zero are the most urgent class";
  EXPECT_EQ(fixture.post("/v1/completions", "{\"prompt\":[" + ids + "]}").status, 400);
  EXPECT_EQ(fixture.post("/v1/completions", "{\"prompt\":[-1]}").status, 400);
  EXPECT_EQ(fixture.post("/detokenize", "{\"tokens\":[2147483648]}").status, 400);
}

TEST(Hostile, PromptsOfEverySize) {
  FixtureOptions options;
  options.engine.info.max_context = 4096;
  const ServerFixture fixture(std::move(options));
  const auto status = [&](const std::string& content) {
    return fixture.post("/v1/chat/completions", R"({"messages":[{"role":"user","content":")" + content + "\"}]}").status;
  };
  EXPECT_EQ(status(std::string(16u << 20, 'a')), 400) << "a word of 16 MB without a space";
  EXPECT_EQ(status(repeated("\\u0301", 100000)), 400) << "marks upon marks";
  EXPECT_EQ(status("\\ud800"), 400) << "half a character";
  EXPECT_EQ(status("\xC0\x80"), 400) << "a character written too long";
  EXPECT_EQ(status("\xF4\x90\x80\x80"), 400) << "past the last character";
  EXPECT_EQ(status("a\\u0000b"), 200) << "NUL is a character like others";
  std::string many = R"({"messages":[{"role":"user","content":"a"})";
  for (int i = 0; i < 300000; ++i) many += R"(,{"role":"user","content":"a"})";
  EXPECT_EQ(fixture.post("/v1/chat/completions", many + "]}").status, 400) << "300,001 messages";
  EXPECT_EQ(fixture.chat("\"chat_template_kwargs\":{\"x\":" + repeated("[", 60) + repeated("]", 60) + "}").status, 200);
  EXPECT_EQ(fixture.chat("\"chat_template_kwargs\":{\"x\":" + repeated("[", 5000) + repeated("]", 5000) + "}").status, 400);
}

TEST(Hostile, TemplatesAreNeverTakenFromRequests) {
  ServerFixture fixture;
  fixture.engine().keep_seen = true;
  EXPECT_EQ(fixture.chat(R"("chat_template":"{{ messages }}")").status, 400);
  EXPECT_EQ(fixture.chat().status, 200);
  // There it is a variable as any other, of which the model's own template knows nothing.
  EXPECT_EQ(fixture.chat(R"("chat_template_kwargs":{"chat_template":"{{ messages }}"})").status, 200);
  EXPECT_EQ(fixture.engine().seen().at(0).prompt, fixture.engine().seen().at(1).prompt);
}

TEST(Hostile, NothingIsFetchedAndNoFileIsRead) {
  const ServerFixture fixture;
  for (const char* url : {"http://169.254.169.254/latest/meta-data", "file:///etc/passwd", "data:image/png;base64,AAAA"}) {
    const std::string part = std::string(R"({"type":"image_url","image_url":{"url":")") + url + "\"}}";
    EXPECT_EQ(fixture.post("/v1/chat/completions", R"({"messages":[{"role":"user","content":[)" + part + "]}]}").status, 400) << url;
    const std::string input = std::string(R"({"input":[{"role":"user","content":[{"type":"input_image","image_url":")") + url + "\"}]}]}";
    EXPECT_EQ(fixture.post("/v1/responses", input).status, 400) << url;
    const std::string source =
        std::string(
            R"({"model":"stub","max_tokens":1,"messages":[{"role":"user","content":[{"type":"image","source":{"type":"url","url":")") +
        url + "\"}}]}]}";
    EXPECT_EQ(fixture.post("/v1/messages", source).status, 400) << url;
  }
}

TEST(Hostile, NamesAreNoPaths) {
  FixtureOptions options;
  options.server.files["/index.html"] = {"<!doctype html>", "text/html; charset=utf-8"};
  const ServerFixture fixture(std::move(options));
  for (const std::string& name :
       {std::string("../../etc/passwd"), std::string("/etc/passwd"), std::string("a\\u0000b"), std::string(4096, 'a')}) {
    const HttpAnswer answer = fixture.chat("\"model\":\"" + name + "\"");
    EXPECT_EQ(answer.status, name.size() > 1000 ? 400 : 404) << name;
    EXPECT_LT(answer.body.size(), 600u) << "long names are not sent back";
  }
  for (const char* path : {"/../etc/passwd", "/%2e%2e/etc/passwd", "/..%2fetc/passwd", "/index.html/../../etc/passwd",
                           "/v1/models/../../metrics", "/v1/models/..%2f..%2fetc%2fpasswd", "//etc/passwd", "/index.html%00.css"}) {
    const HttpAnswer answer = http_get(fixture.port(), path);
    EXPECT_EQ(answer.status, 404) << path;
    EXPECT_THAT(answer.body, testing::Not(testing::HasSubstr("root:"))) << path;
  }
}

TEST(Hostile, OtherSpellingsOfATargetDoNotOpenIt) {
  FixtureOptions options;
  options.server.keys.add("right-key", "test");
  const ServerFixture fixture(std::move(options));
  for (const char* target :
       {"/v1/models", "//v1/models", "/health/../v1/models", "/%76%31/models", "/v1/models/", "/v1/models?key=right-key",
        "/health/live/../../metrics", "/metrics#/health", "http://localhost/metrics", "/health;/metrics", "/METRICS"}) {
    HttpClient client(fixture.port());
    client.request("GET", target);
    const int status = client.answer().status;
    EXPECT_TRUE(status == 401 || status == 400 || status == 404) << target << " " << status;
  }
  HttpClient smuggled(fixture.port());  // a second request inside the first one's body is body
  const std::string inner = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer right-key\r\n\r\n";
  smuggled.send("GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + std::to_string(inner.size()) + "\r\n\r\n" + inner);
  EXPECT_THAT(smuggled.answer().body, testing::Not(testing::HasSubstr("vllm:")));
}

TEST(Hostile, ManyTinyChunksAreOneBody) {
  const ServerFixture fixture;
  const std::string body = R"({"messages":[{"role":"user","content":"hi"}]})" + std::string(65537, ' ');
  std::string chunks;
  for (const char c : body) chunks += std::string("1\r\n") + c + "\r\n";
  HttpClient client(fixture.port());
  client.send(
      "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n");
  client.send(chunks + "0\r\n\r\n");
  EXPECT_EQ(client.answer().status, 200);
}

TEST(Hostile, EqualRequestIdsAreStillTwoRequests) {
  FixtureOptions options;
  options.engine.script = [](const Request& request, int i) {
    const auto b = std::find(request.prompt.begin(), request.prompt.end(), 'b');
    return i < 3 ? (b != request.prompt.end() ? 'B' : 'A') : -1;
  };
  ServerFixture fixture(std::move(options));
  fixture.engine().hold();
  std::vector<std::unique_ptr<HttpClient>> clients;
  for (const char* text : {"aaaa", "bbbb"}) {
    clients.push_back(std::make_unique<HttpClient>(fixture.port()));
    clients.back()->request("POST", "/v1/completions", std::string(R"({"prompt":")") + text + "\"}", {"X-Request-Id: same"});
  }
  eventually([&] { return fixture.engine().open_requests() == 2; }, "both wait");
  fixture.engine().release();
  EXPECT_EQ(json::parse(clients[0]->answer().body)["choices"][0]["text"], "AAA");
  EXPECT_EQ(json::parse(clients[1]->answer().body)["choices"][0]["text"], "BBB");
}

TEST(Hostile, SaltsReachTheCacheAsTheyAre) {
  ServerFixture fixture;
  fixture.engine().keep_seen = true;
  fixture.chat(R"("cache_salt":"tenant-1")");
  fixture.chat(R"("cache_salt":"tenant-2")");
  fixture.chat();
  const auto seen = fixture.engine().seen();
  EXPECT_EQ(seen.at(0).cache_salt, "tenant-1");
  EXPECT_EQ(seen.at(1).cache_salt, "tenant-2");
  EXPECT_EQ(seen.at(2).cache_salt, "");
  EXPECT_EQ(fixture.chat("\"cache_salt\":\"" + std::string(100000, 'a') + "\"").status, 400);
  EXPECT_EQ(fixture.chat(R"("cache_salt":7)").status, 400);
}

TEST(Hostile, ToolMarksInAnyOrderStayInTheirAnswer) {
  for (const char* text :
       {"<｜tool▁call▁end｜><｜tool▁calls▁begin｜><｜tool▁sep｜>", "<｜tool▁calls▁begin｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f",
        "<｜tool▁calls▁end｜>x<｜tool▁call▁begin｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\":<｜tool▁call▁begin｜>"}) {
    FixtureOptions options;
    options.engine.script = answer_with(text);
    const ServerFixture fixture(std::move(options));
    const std::string tools = R"("tools":[{"type":"function","function":{"name":"f"}}])";
    EXPECT_EQ(fixture.chat(tools).status, 200) << text;
    EXPECT_THAT(fixture.chat(tools + ",\"stream\":true").body, testing::EndsWith("data: [DONE]\n\n")) << text;
  }
}

}  // namespace
}  // namespace cachalot::test
