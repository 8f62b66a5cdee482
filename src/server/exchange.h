// One HTTP request and the way to answer it, free of sockets: what the endpoints are written against.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/api_error.h"

namespace cachalot::server {

using Clock = std::chrono::steady_clock;

struct HttpRequest {
  std::string method, path, query, body;
  std::vector<std::pair<std::string, std::string>> headers;  // names in lower case

  [[nodiscard]] std::string_view header(std::string_view lower_case_name) const {
    for (const auto& [name, value] : headers)
      if (name == lower_case_name) return value;
    return {};
  }
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json", body;
  std::vector<std::pair<std::string, std::string>> headers;
};

struct ClientKey;

// Everything but post() is called on the exchange's I/O thread. After respond() or end_stream() nothing more is sent.
class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  virtual ~Exchange() = default;

  virtual void respond(HttpResponse response) = 0;
  // Headers go out at once; then come write()s, which are sent together at the end of the running batch of events.
  virtual void begin_stream(std::string_view content_type) = 0;
  virtual void write(std::string_view bytes) = 0;
  virtual void end_stream() = 0;
  // Written when the stream was silent for the keep-alive interval; empty: never.
  virtual void keep_alive(std::string_view bytes) = 0;
  // `f` is called once when the client goes away, or reads too slowly, before the answer's end. Replaces an earlier one.
  virtual void on_closed(std::function<void()> f) = 0;
  // Whether an answer can still reach the client.
  [[nodiscard]] virtual bool alive() const = 0;
  // Runs `f` on the I/O thread, from any thread.
  virtual void post(std::function<void()> f) = 0;
  [[nodiscard]] virtual int io_thread() const = 0;

  void respond_json(int status, std::string body) { respond({.status = status, .body = std::move(body)}); }
  void respond_error(const ApiError& error);

  std::string request_id;
  ApiStyle style = ApiStyle::openai;
  const ClientKey* key = nullptr;  // who asks; null when no keys are set
  std::string client;              // address, for the log
  Clock::time_point began = Clock::now();
};

}  // namespace cachalot::server
