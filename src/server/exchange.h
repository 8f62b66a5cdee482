// One HTTP request and the way to answer it, free of sockets: what the endpoints are written against.
#pragma once

#include <algorithm>
#include <atomic>
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

// How many bytes of request bodies a server holds at a time, over all its connections.
class BodyBudget {
 public:
  explicit BodyBudget(size_t max_bytes) : max_(max_bytes) {}
  bool take(size_t n) {
    if (used_.fetch_add(n, std::memory_order_relaxed) + n <= max_) return true;
    give_back(n);
    return false;
  }
  void give_back(size_t n) { used_.fetch_sub(n, std::memory_order_relaxed); }
  [[nodiscard]] size_t used() const { return used_.load(std::memory_order_relaxed); }
  [[nodiscard]] size_t free() const { return max_ - std::min(max_, used()); }

 private:
  const size_t max_;
  std::atomic<size_t> used_{0};
};

// Bytes of a body, counted against a budget for as long as they are held.
class CountedBody {
 public:
  CountedBody() = default;
  explicit CountedBody(BodyBudget& budget) : budget_(&budget) {}
  CountedBody(CountedBody&& other) noexcept { swap(other); }
  CountedBody& operator=(CountedBody&& other) noexcept {
    CountedBody old(std::move(*this));
    swap(other);
    return *this;
  }
  ~CountedBody() {
    if (budget_ != nullptr) budget_->give_back(bytes_.size());
  }
  // False when the budget has no room for it.
  bool append(std::string_view more) {
    if (budget_ != nullptr && !budget_->take(more.size())) return false;
    bytes_ += more;
    return true;
  }
  [[nodiscard]] const std::string& text() const { return bytes_; }

 private:
  void swap(CountedBody& other) noexcept {
    std::swap(bytes_, other.bytes_);
    std::swap(budget_, other.budget_);
  }
  std::string bytes_;
  BodyBudget* budget_ = nullptr;
};

struct HttpRequest {
  std::string method, path, query;
  CountedBody body;
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
  bool counted = false;            // whoever answers tells the metrics how it ended
  Clock::time_point began = Clock::now();
};

}  // namespace cachalot::server
