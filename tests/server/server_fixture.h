// A server in front of a stub engine, with a tokenizer of single bytes so that a script can be cut anywhere.
#pragma once

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "server/http_client.h"
#include "server/server.h"
#include "server/stub_engine.h"

namespace cachalot::test {

// Ids 0 to 255 are the bytes; then come <｜begin▁of▁sentence｜>, <｜end▁of▁sentence｜>, the roles, <think>, </think> and V3's tool marks.
const Tokenizer& byte_tokenizer();
std::string template_text(const std::string& name);  // of testdata/templates

// Answers with these bytes, a control token for each of its spellings.
std::function<int(const Request&, int)> answer_with(const std::string& text);

struct FixtureOptions {
  StubOptions engine;
  server::ServerOptions server;
  server::ServiceOptions service;
  std::string chat_template = "deepseek-ai-DeepSeek-V3.1";
  bool serve = true;
};

class ServerFixture {
 public:
  explicit ServerFixture(FixtureOptions options = {});
  [[nodiscard]] int port() const { return server_->port(); }
  HttpAnswer chat(const std::string& fields = "", const std::vector<std::string>& headers = {}) const;
  HttpAnswer post(std::string_view path, std::string_view body) const { return http_post(port(), path, body); }
  void load();  // the model is ready: as with options.serve
  StubEngine& engine() { return *engine_; }
  server::Server& server() { return *server_; }

 private:
  FixtureOptions options_;
  std::unique_ptr<StubEngine> engine_;
  std::unique_ptr<server::Server> server_;
};

// Waits for something that another thread brings about; a failure when it takes 20 s.
template <typename F>
void eventually(F&& condition, const char* what) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    ASSERT_LT(std::chrono::steady_clock::now(), end) << what;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace cachalot::test
