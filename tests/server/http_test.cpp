// The HTTP side through real sockets: framing, hostile bytes, limits, slow and vanishing clients, keep-alive comments.
#include <gmock/gmock.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <future>

#include "server/http_server.h"
#include "server/server_fixture.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

using nlohmann::json;

const std::string kChat = R"({"messages":[{"role":"user","content":"hi"}])";

std::string post_bytes(const std::string& body, const std::string& headers = "") {
  return "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + headers +
         "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

FixtureOptions endless() {
  FixtureOptions options;
  options.engine.script = [](const Request&, int) { return 'x'; };
  options.engine.step_period = std::chrono::milliseconds(1);
  options.engine.info.max_context = 1 << 20;
  return options;
}

TEST(Http, KeepsConnectionsAndAnswersPipelinedRequestsInOrder) {
  const ServerFixture fixture;
  HttpClient client(fixture.port());
  std::string many;
  for (int i = 0; i < 200; ++i)
    many += i % 2 == 0 ? "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" : "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n";
  client.send(many);
  for (int i = 0; i < 200; ++i) {
    const HttpAnswer answer = client.answer();
    ASSERT_EQ(answer.status, 200);
    EXPECT_EQ(answer.body.find("stub") != std::string::npos, i % 2 == 1);
  }
  client.send(post_bytes(kChat + "}") + post_bytes(kChat + ",\"stream\":true}") + post_bytes(kChat + "}"));
  EXPECT_EQ(client.answer().headers["content-type"], "application/json");
  EXPECT_THAT(client.answer().headers["content-type"], testing::StartsWith("text/event-stream"));
  EXPECT_EQ(client.answer().headers["content-type"], "application/json");
}

TEST(Http, ReadsBodiesInAnyPieces) {
  const ServerFixture fixture;
  const std::string whole = post_bytes(kChat + "}");
  for (const size_t at : {size_t{1}, size_t{17}, whole.find("\r\n\r\n") + 2, whole.size() - 3}) {
    HttpClient client(fixture.port());
    client.send(whole.substr(0, at));
    client.send(whole.substr(at));
    EXPECT_EQ(client.answer().status, 200);
  }
  HttpClient chunked(fixture.port());
  chunked.send(
      "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n");
  const std::string body = kChat + "}";
  std::string chunks;
  for (const char c : body) chunks += std::string("1\r\n") + c + "\r\n";
  chunked.send(chunks + "0\r\n\r\n");
  EXPECT_EQ(chunked.answer().status, 200);
}

TEST(Http, RefusesHostileBytes) {
  const ServerFixture fixture;
  const std::string start = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
  const std::pair<std::string, int> table[] = {
      {"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400},
      {"GET /health\r\n\r\n", 400},
      {"GET /health HTTP/3.0\r\n\r\n", 400},
      {"GET http://localhost/health HTTP/1.1\r\nHost: localhost\r\n\r\n", 400},
      {"GET health HTTP/1.1\r\nHost: localhost\r\n\r\n", 400},
      {"GET //health HTTP/1.1\r\nHost: localhost\r\n\r\n", 404},
      {"GET /v1/../health HTTP/1.1\r\nHost: localhost\r\n\r\n", 404},
      {"GET /%68ealth HTTP/1.1\r\nHost: localhost\r\n\r\n", 404},
      {"GET /health HTTP/1.1\r\n\r\n", 400},
      {"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: other\r\n\r\n", 400},
      {"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403},
      {"DELETE /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 405},
      {start + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400},
      {start + "Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", 400},
      {start + "Content-Length: -2\r\n\r\n", 400},
      {start + "Content-Length: 99999999999999999999\r\n\r\n", 400},
      {start + "Content-Length: 999999999999\r\n\r\n", 413},
      {start + "Transfer-Encoding: gzip\r\n\r\n", 400},
      {start + "Transfer-Encoding: chunked\r\n\r\n-2\r\n", 400},
      {start + "Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n", 400},
      {start + "Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n", 400},
      {start + "Expect: a-miracle\r\nContent-Length: 2\r\n\r\n{}", 417},
      {"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}", 415},
      {"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}", 415},
      {"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n"
       "Content-Length: 2\r\n\r\n{}",
       415},
      {"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + std::string(1 << 20, 'a'), 431},
      {"GET /" + std::string(100000, 'a') + " HTTP/1.1\r\nHost: localhost\r\n\r\n", 431},
      {"GET /health HTTP/1.1\r\nHost: localhost\r\n" +
           [] {
             std::string fields;
             for (int i = 0; i < 500; ++i) fields += "A: b\r\n";
             return fields;
           }() +
           "\r\n",
       431},
  };
  for (const auto& [bytes, status] : table) {
    HttpClient client(fixture.port());
    client.send(bytes);
    const HttpAnswer answer = client.answer();
    EXPECT_EQ(answer.status, status) << bytes.substr(0, 120) << answer.body;
    if (status == 400 || status == 413 || status == 431) {
      EXPECT_TRUE(client.closed_by_server()) << bytes.substr(0, 120);
    }
  }
  EXPECT_EQ(http_get(fixture.port(), "/health").status, 200) << "the server lives on";
}

TEST(Http, UnderstandsOldClientsAndExpectations) {
  const ServerFixture fixture;
  HttpClient old(fixture.port());
  const std::string body = kChat + ",\"stream\":true}";
  old.send("POST /v1/chat/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) +
           "\r\n\r\n" + body);
  const HttpAnswer answer = old.answer();
  EXPECT_FALSE(answer.headers.contains("transfer-encoding"));
  EXPECT_THAT(answer.body, testing::HasSubstr("[DONE]"));
  HttpClient careful(fixture.port());
  careful.send(
      "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nExpect: "
      "100-continue\r\nContent-Length: " +
      std::to_string(kChat.size() + 1) + "\r\n\r\n");
  ASSERT_TRUE(careful.wait_for("100 Continue"));
  careful.send(kChat + "}");
  EXPECT_EQ(careful.answer().status, 200);
  HttpClient head(fixture.port());
  head.request("HEAD", "/health");
  ASSERT_TRUE(head.wait_for("\r\n\r\n"));
  EXPECT_THAT(head.received(), testing::EndsWith("\r\n\r\n"));
}

TEST(Http, BodiesHaveALimit) {
  FixtureOptions options;
  options.server.limits.max_body_bytes = 10000;
  const ServerFixture fixture(std::move(options));
  EXPECT_EQ(fixture.post("/v1/chat/completions", std::string(20000, ' ')).status, 413);
  HttpClient client(fixture.port());
  client.send(
      "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: "
      "chunked\r\n\r\n4e20\r\n" +
      std::string(20000, ' ') + "\r\n0\r\n\r\n");
  EXPECT_EQ(client.answer().status, 413);
}

TEST(Http, BodiesOfAllRequestsTogetherHaveALimit) {
  FixtureOptions options;
  options.server.limits.max_body_bytes = 40000;
  options.server.http.max_bodies_bytes = 60000;
  ServerFixture fixture(std::move(options));
  const std::string padded = kChat + "}" + std::string(39000, ' ');
  const auto held = [&] { return fixture.server().counts().body_bytes; };
  HttpClient first(fixture.port());
  first.send(post_bytes(padded).substr(0, 39000));
  eventually([&] { return held() > 38000; }, "the first body's bytes are counted");
  HttpClient second(fixture.port());  // is told before it sends its body
  second.send(post_bytes(padded).substr(0, 200));
  const HttpAnswer refused = second.answer();
  EXPECT_EQ(refused.status, 503);
  EXPECT_EQ(refused.headers.at("retry-after"), "1");
  EXPECT_EQ(json::parse(refused.body)["error"]["code"], "bodies_full");
  HttpClient chunked(fixture.port());  // says nothing of its length
  chunked.send(
      "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: "
      "chunked\r\n\r\n7530\r\n" +
      padded.substr(0, 30000) + "\r\n");
  EXPECT_EQ(chunked.answer().status, 503);
  EXPECT_EQ(fixture.chat().status, 200) << "small requests still fit";
  EXPECT_THAT(http_get(fixture.port(), "/metrics").body,
              testing::ContainsRegex("cachalot:http_responses_total\\{[^}]*status=\"5xx\"\\} 2"));
  first.close();
  eventually([&] { return held() == 0; }, "what a client that is gone had sent is free");
  EXPECT_EQ(fixture.post("/v1/chat/completions", padded).status, 200);
  eventually([&] { return held() == 0; }, "and so is a body that was read");
}

TEST(Http, ListensOnAUnixSocket) {
  const TempDir folder;
  const std::string path = (folder.path() / "socket").string();
  {
    FixtureOptions options;
    options.server.http.unix_socket = path;
    options.server.keys.add("right-key", "test");
    ServerFixture fixture(std::move(options));
    EXPECT_EQ(fixture.server().address(), "unix:" + path);
    HttpClient client(path);
    client.request("POST", "/v1/chat/completions", kChat + ",\"stream\":true}", {"Authorization: Bearer right-key"});
    EXPECT_THAT(client.answer().body, testing::EndsWith("data: [DONE]\n\n"));
    HttpClient stranger(path);
    stranger.request("GET", "/v1/models");
    EXPECT_EQ(stranger.answer().status, 401);
  }
  EXPECT_FALSE(std::filesystem::exists(path)) << "the socket goes with the server";
}

TEST(Http, ASocketLeftBehindIsReplacedAndAFileIsNot) {
  const TempDir folder;
  const std::string path = (folder.path() / "socket").string();
  const int left = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  ASSERT_EQ(::bind(left, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ::close(left);
  server::HttpOptions options;
  options.unix_socket = path;
  const auto open = [&] { const server::HttpServer server(options, {}, {}); };
  open();
  std::ofstream(path) << "precious";
  EXPECT_THAT(error_of(open), testing::HasSubstr(path));
  EXPECT_TRUE(std::filesystem::exists(path));
  options.unix_socket = std::string(200, 'x');
  EXPECT_THAT(error_of(open), testing::HasSubstr("--uds: found a path of 200 bytes"));
}

TEST(Http, SlowHeadersRunOutOfTime) {
  FixtureOptions options;
  options.server.http.header_seconds = 0.1;
  options.server.http.body_seconds = 0.1;
  options.server.http.idle_seconds = 0.1;
  const ServerFixture fixture(std::move(options));
  HttpClient header(fixture.port()), body(fixture.port()), idle(fixture.port());
  header.send("GET /health HTTP/1.1\r\nHo");
  body.send(post_bytes(kChat + "}").substr(0, 150));
  EXPECT_EQ(header.answer().status, 408);
  EXPECT_EQ(body.answer().status, 408);
  EXPECT_TRUE(idle.closed_by_server());
  EXPECT_EQ(idle.received(), "");
}

TEST(Http, HeadersComeAtOnceAndCommentsWhileWaiting) {
  FixtureOptions options;
  options.engine.held = true;
  options.server.http.keep_alive_seconds = 0.05;
  ServerFixture fixture(std::move(options));
  HttpClient client(fixture.port());
  client.send(post_bytes(kChat + ",\"stream\":true}"));
  EXPECT_TRUE(client.wait_for("200 OK"));
  EXPECT_TRUE(client.wait_for("\"role\":\"assistant\""));
  EXPECT_TRUE(client.wait_for(": keep-alive\n\n"));
  fixture.engine().release();
  EXPECT_TRUE(client.wait_for("[DONE]"));
}

TEST(Http, ClientsThatGoAwayAreCancelled) {
  ServerFixture fixture(endless());
  constexpr int kClients = 100;
  for (int i = 0; i < kClients; ++i) {
    HttpClient client(fixture.port());
    client.send(post_bytes(kChat + (i % 3 == 0 ? "}" : ",\"stream\":true}")));
    if (i % 3 == 1) {
      EXPECT_TRUE(client.wait_for("content\":\"x"));
    }
    if (i % 3 == 2) {
      EXPECT_TRUE(client.wait_for("200 OK"));
    }
    // Requests of clients before may still be open.
    if (i % 3 == 0) eventually([&] { return fixture.engine().open_requests() + fixture.engine().cancelled() > i; }, "the request runs");
  }
  eventually([&] { return fixture.engine().open_requests() == 0; }, "all are cancelled");
  EXPECT_EQ(fixture.engine().cancelled(), kClients);
  eventually([&] { return fixture.server().counts().connections == 0; }, "all connections are closed");
  eventually([&] { return fixture.server().running_jobs() == 0; }, "no job is left");
  const std::string metrics = http_get(fixture.port(), "/metrics").body;
  EXPECT_THAT(metrics, testing::HasSubstr("finished_reason=\"abort\"} " + std::to_string(kClients)));
}

// A timer that has run out when the server stops must not start itself again.
TEST(Http, StopsWhateverItsTimersAreDoing) {
  for (int i = 0; i < 30; ++i) {
    server::HttpServer http(
        {.port = 0, .io_threads = 1}, [](auto&, const auto&) {}, [](auto, auto) {});
    std::atomic<int> n_ticks = 0;
    for (int t = 0; t < 4; ++t) http.every(0.0, [&] { ++n_ticks; });
    http.start();
    eventually([&] { return n_ticks > 20; }, "timers run");
    auto stopped = std::async(std::launch::async, [&] { http.stop(); });
    ASSERT_EQ(stopped.wait_for(std::chrono::seconds(30)), std::future_status::ready) << "in round " << i;
  }
}

TEST(Http, SlowReadersAreGivenUp) {
  FixtureOptions options = endless();
  options.engine.step_period = std::chrono::microseconds(0);
  options.server.http.max_output_bytes = 65536;
  ServerFixture fixture(std::move(options));
  HttpClient client(fixture.port());
  client.send(post_bytes(kChat + ",\"stream\":true}"));
  eventually([&] { return fixture.server().counts().slow_readers == 1; }, "the client that reads nothing is given up");
  eventually([&] { return fixture.engine().open_requests() == 0; }, "and its request is cancelled");
}

TEST(Http, FullQueuesAnswerAtOnce) {
  FixtureOptions options;
  options.engine.held = true;
  options.engine.info.max_requests = 1;
  options.engine.max_waiting = 4;
  ServerFixture fixture(std::move(options));
  std::vector<std::unique_ptr<HttpClient>> clients;
  int refused = 0;
  for (int i = 0; i < 20; ++i) {
    clients.push_back(std::make_unique<HttpClient>(fixture.port()));
    clients.back()->send(post_bytes(kChat + ",\"stream\":true}"));
    ASSERT_TRUE(clients.back()->wait_for("\r\n\r\n"));
    if (!clients.back()->received().starts_with("HTTP/1.1 200")) {
      const HttpAnswer answer = clients.back()->answer();
      EXPECT_EQ(answer.status, 429);
      EXPECT_EQ(answer.headers.at("retry-after"), "2");
      EXPECT_EQ(json::parse(answer.body)["error"]["type"], "rate_limit_error");
      ++refused;
    }
  }
  EXPECT_EQ(refused, 15) << "one runs, four wait";
  HttpClient other(fixture.port());
  other.send(post_bytes(kChat + ",\"stream\":true,\"priority\":\"P1\"}"));
  EXPECT_TRUE(other.wait_for("200 OK")) << "another class has a queue of its own";
  fixture.engine().release();
}

TEST(Http, LargeRequestsDoNotHoldUpSmallOnes) {
  const ServerFixture fixture;
  const std::string body = R"({"prompt":")" + std::string(3000, 'x') + R"(","max_tokens":1})";
  EXPECT_EQ(fixture.post("/v1/completions", body).status, 200);
  const std::string large = R"({"prompt":")" + std::string(100000, 'x') + R"(","max_tokens":1})";
  EXPECT_EQ(fixture.post("/v1/completions", large).status, 400) << "read on a worker, and too long for the context";
}

TEST(Http, OtherOriginsAreLetInByTheListAlone) {
  FixtureOptions options;
  options.server.http.cors_origins = {"https://good.example"};
  const ServerFixture fixture(std::move(options));
  HttpClient preflight(fixture.port());
  preflight.request("OPTIONS", "/v1/chat/completions", {}, {"Origin: https://good.example", "Access-Control-Request-Method: POST"});
  const HttpAnswer answer = preflight.answer();
  EXPECT_EQ(answer.status, 204);
  EXPECT_EQ(answer.headers.at("access-control-allow-origin"), "https://good.example");
  HttpClient bad(fixture.port());
  bad.request("OPTIONS", "/v1/chat/completions", {}, {"Origin: https://bad.example", "Access-Control-Request-Method: POST"});
  EXPECT_FALSE(bad.answer().headers.contains("access-control-allow-origin"));
  EXPECT_EQ(http_get(fixture.port(), "/health", {"Origin: https://good.example"}).headers.at("access-control-allow-origin"),
            "https://good.example");
}

TEST(Http, RequestIdsAreEchoedWhenHarmless) {
  const ServerFixture fixture;
  EXPECT_EQ(http_get(fixture.port(), "/health", {"X-Request-Id: abc-1.2_3"}).headers.at("x-request-id"), "abc-1.2_3");
  for (const char* bad : {"a b", "<x>", "\"", "http://169.254.169.254/"})
    EXPECT_THAT(http_get(fixture.port(), "/health", {std::string("X-Request-Id: ") + bad}).headers.at("x-request-id"),
                testing::StartsWith("req_"));
}

TEST(Http, ServesFilesFromTheTable) {
  FixtureOptions options;
  options.server.files["/index.html"] = {"<!doctype html>", "text/html; charset=utf-8"};
  options.server.keys.add("secret", "test");
  const ServerFixture fixture(std::move(options));
  const HttpAnswer page = http_get(fixture.port(), "/");
  EXPECT_EQ(page.status, 200);
  EXPECT_EQ(page.body, "<!doctype html>");
  EXPECT_THAT(page.headers.at("content-security-policy"), testing::HasSubstr("default-src 'none'"));
}

}  // namespace
}  // namespace cachalot::test
