// Insides of Server, shared by the files that hold its endpoints.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "server/job.h"
#include "server/metrics.h"
#include "server/server.h"

namespace cachalot::server {

ApiError engine_stuck();

enum class Endpoint : uint8_t { chat, completions, messages, responses };

class Server::Impl : public JobObserver {
 public:
  explicit Impl(ServerOptions options);
  ~Impl() override;

  void start();
  void serve(std::unique_ptr<Service> service);
  void drain();
  void wait();
  void reload_tls();

  void on_first_token(Priority priority, double seconds) override { metrics_.on_first_token(priority, seconds); }
  void on_token_gap(Priority priority, double seconds) override { metrics_.on_token_gap(priority, seconds); }
  void on_end(const JobReport& report) override;

 private:
  friend class Server;
  enum class Phase : uint8_t { loading, ready, draining, closed, ended };

  // Before the body of a request is read.
  void check_header(Exchange& exchange, const HttpRequest& request, bool admin);
  void authenticate(Exchange& exchange, const HttpRequest& request, bool admin) const;
  void handle(const std::shared_ptr<Exchange>& exchange, HttpRequest request, bool admin);
  bool handle_get(Exchange& exchange, const HttpRequest& request, bool admin);
  bool handle_health(Exchange& exchange, const std::string& path);
  void handle_models(Exchange& exchange, const std::string& path);
  void handle_load(Exchange& exchange);
  void handle_state(Exchange& exchange);
  void handle_embeddings() const;

  // Requests for the model: read on a worker when they are large, then run.
  void handle_generation(const std::shared_ptr<Exchange>& exchange, HttpRequest request, Endpoint endpoint);
  void handle_tokenize(const std::shared_ptr<Exchange>& exchange, HttpRequest request);
  void handle_detokenize(const std::shared_ptr<Exchange>& exchange, HttpRequest request);
  void handle_count_tokens(const std::shared_ptr<Exchange>& exchange, HttpRequest request);
  void run(const std::shared_ptr<Exchange>& exchange, Prepared prepared, Endpoint endpoint);
  // Runs `make` on a worker or here, and what it returned on the I/O thread; a thrown ApiError is the answer.
  void off_thread(const std::shared_ptr<Exchange>& exchange, bool slow, std::function<std::function<void()>()> make);

  [[nodiscard]] const Service& service() const;  // throws ApiError 503 while there is none, or it takes no more
  [[nodiscard]] std::string metrics_text() const;
  [[nodiscard]] std::string state_json() const;
  void watch();
  void advance_drain();
  void abort_jobs();
  void fail_jobs(double stuck_seconds);
  void trim_when_idle();
  [[nodiscard]] std::vector<std::shared_ptr<Job>> open_jobs() const;

  ServerOptions options_;
  JsonLog log_;
  Metrics metrics_;
  std::unique_ptr<HttpServer> http_, admin_;
  std::unique_ptr<EventHub> hub_;
  std::unique_ptr<Service> service_;
  std::atomic<const Service*> ready_service_{nullptr};

  mutable std::mutex mutex_;
  std::condition_variable ended_;
  std::atomic<Phase> phase_{Phase::loading};
  Clock::time_point drain_began_, abort_began_;
  bool aborting_ = false;
  std::atomic<bool> live_{true};
  std::unordered_map<const Job*, std::weak_ptr<Job>> jobs_;  // by address; under mutex_
  int64_t started_at_ = 0;
  std::atomic<int64_t> n_ended_{0};  // requests for the model
  int64_t n_trimmed_ = 0;            // of them, when memory was last given back; the first I/O thread's, as are the next
  Clock::time_point busy_at_;
  bool trim_again_ = false;
};

}  // namespace cachalot::server
