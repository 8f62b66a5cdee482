// Life of a server: start, watchdog, drain, end.
#include "server/server.h"

#include <fmt/format.h>
#include <malloc.h>
#include <sys/stat.h>

#include <algorithm>
#include <ctime>
#include <thread>

#include "base/error.h"
#include "server/server_impl.h"

namespace cachalot::server {
namespace {

constexpr int64_t kTrimAfter = 256;  // requests
constexpr double kIdleSeconds = 1.0, kLongIdleSeconds = 10.0;

double seconds_since(Clock::time_point then) { return std::chrono::duration<double>(Clock::now() - then).count(); }

int64_t changed_at(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 ? status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec : 0;
}

}  // namespace

Server::Impl::Impl(ServerOptions options)
    : options_(std::move(options)), log_(options_.log_level, options_.log_file), started_at_(std::time(nullptr)) {
  const auto make = [this](HttpOptions http, bool admin) {
    http.max_body_bytes = std::min(http.max_body_bytes, options_.limits.max_body_bytes);
    http.max_bodies_bytes = std::max(http.max_bodies_bytes, http.max_body_bytes);
    return std::make_unique<HttpServer>(
        std::move(http), [this, admin](Exchange& exchange, const HttpRequest& request) { check_header(exchange, request, admin); },
        [this, admin](std::shared_ptr<Exchange> exchange, HttpRequest request) { handle(exchange, std::move(request), admin); });
  };
  http_ = make(options_.http, false);
  if (options_.has_admin) admin_ = make(options_.admin, true);
  http_->every(0.2, [this] {
    advance_drain();
    watch();
    trim_when_idle();
  });
  if (options_.tls_check_seconds > 0.0 && !options_.http.tls_certificate.empty()) {
    auto seen = std::make_shared<int64_t>(changed_at(options_.http.tls_certificate));
    http_->every(options_.tls_check_seconds, [this, seen] {
      const int64_t now = changed_at(options_.http.tls_certificate);
      if (now == *seen) return;
      *seen = now;
      reload_tls();
    });
  }
}

Server::Impl::~Impl() {
  // No job may reach an engine or a log that is gone.
  http_->stop();
  if (admin_) admin_->stop();
}

void Server::Impl::start() {
  http_->start();
  if (admin_) admin_->start();
  log_.write(LogLevel::info, "listening", [&](JsonWriter& json) {
    json.field("address", http_->address());
    if (admin_) json.field("admin_address", admin_->address());
  });
}

void Server::Impl::serve(std::unique_ptr<Service> service) {
  std::vector<EventHub::Post> posts;
  for (int i = 0; i < http_->io_threads(); ++i)
    posts.push_back([http = http_.get(), i](std::function<void()> f) { http->post(i, std::move(f)); });
  hub_ = std::make_unique<EventHub>(service->engine(), std::move(posts), [http = http_.get()](int i) { http->flush(i); });
  service_ = std::move(service);
  ready_service_ = service_.get();
  Phase loading = Phase::loading;
  phase_.compare_exchange_strong(loading, Phase::ready);
  log_.write(LogLevel::info, "ready", [&](JsonWriter& json) {
    const EngineInfo& info = service_->engine().info();
    json.field("model", service_->name()).field("max_context", info.max_context).field("max_requests", info.max_requests);
    json.field("tool_format", name_of(service_->tool_format())).field("max_output_tokens", service_->options().max_output_tokens);
  });
}

void Server::Impl::reload_tls() {
  try {
    http_->reload_tls();
    log_.write(LogLevel::info, "certificate_reloaded");
  } catch (const Error& error) {
    log_.write(LogLevel::error, "certificate_kept", [&](JsonWriter& json) { json.field("message", error.what()); });
  }
}

void Server::Impl::drain() {
  const std::lock_guard lock(mutex_);
  if (phase_ == Phase::ended) return;
  if (phase_ == Phase::draining || phase_ == Phase::closed) {
    // Asked twice: at once.
    options_.drain_delay_seconds = options_.shutdown_seconds = 0.0;
    return;
  }
  phase_ = Phase::draining;
  drain_began_ = Clock::now();
  http_->start_draining();
  log_.write(LogLevel::info, "draining", [&](JsonWriter& json) { json.field("running", static_cast<int64_t>(jobs_.size())); });
}

// Every 0.2 s: what the way down asks for next.
void Server::Impl::advance_drain() {
  bool abort = false;
  {
    const std::lock_guard lock(mutex_);
    if (phase_ == Phase::draining && seconds_since(drain_began_) >= options_.drain_delay_seconds) {
      phase_ = Phase::closed;
      if (const Service* service = ready_service_) service->engine().close();
    }
    if (phase_ != Phase::closed) return;
    std::erase_if(jobs_, [](const auto& entry) { return entry.second.expired(); });
    const double closed_for = seconds_since(drain_began_) - options_.drain_delay_seconds;
    const bool given_up = aborting_ && seconds_since(abort_began_) > 2.0;
    if (jobs_.empty() || given_up) {
      phase_ = Phase::ended;
      ended_.notify_all();
      return;
    }
    if (!aborting_ && closed_for >= options_.shutdown_seconds) {
      aborting_ = abort = true;
      abort_began_ = Clock::now();
    }
  }
  if (abort) abort_jobs();
}

std::vector<std::shared_ptr<Job>> Server::Impl::open_jobs() const {
  std::vector<std::shared_ptr<Job>> all;
  const std::lock_guard lock(mutex_);
  for (const auto& [address, weak] : jobs_)
    if (auto job = weak.lock()) all.push_back(std::move(job));
  return all;
}

void Server::Impl::abort_jobs() {
  const auto all = open_jobs();
  log_.write(LogLevel::warning, "aborting", [&](JsonWriter& json) { json.field("requests", static_cast<int64_t>(all.size())); });
  for (const auto& job : all) job->post_abort();
}

// Nobody knows whether the engine will move again: who waits can ask another server instead.
void Server::Impl::fail_jobs(double stuck_seconds) {
  const auto all = open_jobs();
  if (all.empty()) return;
  log_.write(LogLevel::error, "engine_given_up", [&](JsonWriter& json) {
    json.field("requests", static_cast<int64_t>(all.size())).field("last_step_age_seconds", stuck_seconds);
  });
  for (const auto& job : all) job->post_failure(engine_stuck);
}

void Server::Impl::wait() {
  {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return phase_ == Phase::ended; });
  }
  // Last bytes of the last answers.
  for (int i = 0; i < 50 && http_->counts().connections > 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  http_->stop();
  if (admin_) admin_->stop();
  log_.write(LogLevel::info, "ended");
}

// An engine that stands still while it has work is no use to those who wait.
void Server::Impl::watch() {
  const Service* service = ready_service_;
  if (service == nullptr || options_.watchdog_seconds <= 0.0) return;
  const EngineStats stats = service->engine().stats();
  const bool stuck = stats.last_step_age_seconds > options_.watchdog_seconds;
  if (stuck && stats.last_step_age_seconds > options_.watchdog_seconds + options_.stuck_grace_seconds)
    fail_jobs(stats.last_step_age_seconds);
  if (stuck == !live_) return;
  live_ = !stuck;
  if (!stuck) {
    log_.write(LogLevel::warning, "engine_moves_again");
    return;
  }
  log_.write(LogLevel::error, "engine_stuck",
             [&](JsonWriter& json) { json.field("last_step_age_seconds", stats.last_step_age_seconds).key("state").raw(state_json()); });
}

// The allocator keeps what a burst of requests took: 61 MB were resident after 50,000 requests on a busy machine, of which 1.3 MB were
// allocated. Once nobody waits for an answer that goes back to the system, and once more when events of cancelled requests are gone too.
void Server::Impl::trim_when_idle() {
  {
    const std::lock_guard lock(mutex_);
    if (!jobs_.empty()) busy_at_ = Clock::now();
  }
  const int64_t ended = n_ended_.load(std::memory_order_relaxed);
  const double idle = seconds_since(busy_at_);
  const bool burst = ended - n_trimmed_ >= kTrimAfter && idle >= kIdleSeconds, again = trim_again_ && idle >= kLongIdleSeconds;
  if (!burst && !again) return;
  n_trimmed_ = ended;
  trim_again_ = burst;
  http_->run_on_worker([] { ::malloc_trim(0); });
}

Server::Server(ServerOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Server::~Server() = default;
void Server::start() { impl_->start(); }
void Server::serve(std::unique_ptr<Service> service) { impl_->serve(std::move(service)); }
void Server::drain() { impl_->drain(); }
void Server::wait() { impl_->wait(); }
void Server::reload_tls() { impl_->reload_tls(); }
int Server::port() const { return impl_->http_->port(); }
int Server::admin_port() const { return impl_->admin_ ? impl_->admin_->port() : 0; }
std::string Server::address() const { return impl_->http_->address(); }
JsonLog& Server::log() { return impl_->log_; }
HttpCounts Server::counts() const { return impl_->http_->counts(); }
int Server::running_jobs() const {
  const std::lock_guard lock(impl_->mutex_);
  return static_cast<int>(
      std::count_if(impl_->jobs_.begin(), impl_->jobs_.end(), [](const auto& entry) { return !entry.second.expired(); }));
}

}  // namespace cachalot::server
