// Sockets, TLS, threads: everything around the connections.
#include "server/http_server.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/write.hpp>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "server/http_connection.h"

namespace cachalot::server {
namespace {

namespace ssl = asio::ssl;
using asio::ip::tcp;
using Local = asio::local::stream_protocol;

constexpr auto kSweepInterval = std::chrono::milliseconds(500);
constexpr int kWorkers = 2;
constexpr int kBacklog = 4096;

class PlainConnection final : public Connection {
 public:
  PlainConnection(ConnectionShared& shared, IoThread& io, std::string client, Socket socket)
      : Connection(shared, io, std::move(client)), socket_(std::move(socket)) {}

  void begin() override { read(); }

 protected:
  void read_some(char* data, size_t size) override {
    socket_.async_read_some(asio::buffer(data, size),
                            [self = shared_from_this(), this](beast::error_code error, size_t n) { on_read(error, n); });
  }
  size_t write_now(const char* data, size_t size, beast::error_code& error) override {
    return socket_.write_some(asio::buffer(data, size), error);
  }
  void write_later() override {
    socket_.async_wait(Socket::wait_write, [self = shared_from_this(), this](beast::error_code error) { on_written(error, 0); });
  }
  void end_output() override {
    beast::error_code ignored;
    socket_.shutdown(Socket::shutdown_send, ignored);
  }
  void close_socket() override {
    beast::error_code ignored;
    socket_.shutdown(Socket::shutdown_both, ignored);
    socket_.close(ignored);
  }

 private:
  Socket socket_;
};

class TlsConnection final : public Connection {
 public:
  TlsConnection(ConnectionShared& shared, IoThread& io, std::string client, Socket socket, std::shared_ptr<ssl::context> tls)
      : Connection(shared, io, std::move(client)), tls_(std::move(tls)), stream_(std::move(socket), *tls_) {
    SSL_set_mode(stream_.native_handle(), SSL_MODE_RELEASE_BUFFERS);
  }

  void begin() override {
    stream_.async_handshake(ssl::stream_base::server, [self = shared_from_this(), this](beast::error_code error) {
      if (error)
        close();
      else
        read();
    });
  }

 protected:
  void read_some(char* data, size_t size) override {
    stream_.async_read_some(asio::buffer(data, size),
                            [self = shared_from_this(), this](beast::error_code error, size_t n) { on_read(error, n); });
  }
  size_t write_now(const char*, size_t, beast::error_code& error) override {
    error = asio::error::would_block;
    return 0;
  }
  void write_later() override {
    take_output();
    asio::async_write(stream_, asio::buffer(in_flight_),
                      [self = shared_from_this(), this](beast::error_code error, size_t n) { on_written(error, n); });
  }
  void end_output() override {
    beast::error_code ignored;
    stream_.next_layer().shutdown(Socket::shutdown_send, ignored);
  }
  void close_socket() override {
    beast::error_code ignored;
    stream_.next_layer().shutdown(Socket::shutdown_both, ignored);
    stream_.next_layer().close(ignored);
  }

 private:
  std::shared_ptr<ssl::context> tls_;
  ssl::stream<Socket> stream_;
};

std::shared_ptr<ssl::context> load_tls(const HttpOptions& options) {
  auto context = std::make_shared<ssl::context>(ssl::context::tls_server);
  beast::error_code error;
  context->set_options(ssl::context::default_workarounds | ssl::context::no_sslv2 | ssl::context::no_sslv3 | ssl::context::no_tlsv1 |
                       ssl::context::no_tlsv1_1 | ssl::context::single_dh_use);
  for (const std::string& path : {options.tls_certificate, options.tls_key})
    if (::access(path.c_str(), R_OK) != 0) fail("{}: cannot open: {}", path, std::strerror(errno));
  context->use_certificate_chain_file(options.tls_certificate, error);
  if (error) fail("{}: cannot be used as a certificate chain (PEM): {}", options.tls_certificate, error.message());
  context->use_private_key_file(options.tls_key, ssl::context::pem, error);
  if (error) fail("{}: cannot be used as the private key (PEM) of {}: {}", options.tls_key, options.tls_certificate, error.message());
  return context;
}

std::string client_name(const Socket& socket) {
  beast::error_code error;
  const auto endpoint = socket.remote_endpoint(error);
  if (error) return "?";
  if (endpoint.data()->sa_family != AF_INET && endpoint.data()->sa_family != AF_INET6) return "unix";
  tcp::endpoint address;
  address.resize(endpoint.size());
  std::memcpy(address.data(), endpoint.data(), endpoint.size());
  return address.address().to_string();
}

}  // namespace

struct HttpServer::State {
  State(HttpOptions options, HeaderCheck check, Handler handler) : shared(std::move(options)) {
    shared.check = std::move(check);
    shared.handler = std::move(handler);
  }

  void listen();
  template <typename Acceptor>
  void accept(Acceptor& acceptor);
  void take(Socket socket, IoThread& io);
  void sweep(IoThread& io, asio::steady_timer& timer);
  void tick(size_t index);

  ConnectionShared shared;
  std::vector<std::unique_ptr<IoThread>> io;
  std::vector<std::thread> threads;
  std::vector<asio::executor_work_guard<asio::io_context::executor_type>> guards;
  std::vector<std::unique_ptr<asio::steady_timer>> sweepers;
  struct Periodic {
    std::chrono::milliseconds interval;
    std::function<void()> f;
    std::unique_ptr<asio::steady_timer> timer;
  };
  std::vector<Periodic> periodic;
  std::optional<tcp::acceptor> acceptor;
  std::optional<Local::acceptor> local_acceptor;
  std::optional<asio::steady_timer> accept_pause;
  std::unique_ptr<asio::thread_pool> workers;
  std::mutex tls_mutex;
  std::shared_ptr<ssl::context> tls;
  size_t next_thread = 0;
  int port = 0;
  std::atomic<bool> stopped{false};  // read by all threads
};

void HttpServer::State::listen() {
  const HttpOptions& options = shared.options;
  asio::io_context& context = io.front()->context;
  accept_pause.emplace(context);
  beast::error_code error;
  if (!options.unix_socket.empty()) {
    sockaddr_un limits{};
    if (options.unix_socket.size() >= sizeof limits.sun_path)
      fail("--uds: found a path of {} bytes, expected fewer than {}", options.unix_socket.size(), sizeof limits.sun_path);
    struct stat status {};
    // A socket that a server before this one left behind is in the way; anything else there is not ours.
    if (::lstat(options.unix_socket.c_str(), &status) == 0 && S_ISSOCK(status.st_mode)) ::unlink(options.unix_socket.c_str());
    local_acceptor.emplace(context);
    local_acceptor->open(Local(), error);
    if (!error) local_acceptor->bind(Local::endpoint(options.unix_socket), error);
    if (!error) local_acceptor->listen(kBacklog, error);
    if (error) fail("--uds {}: {}", options.unix_socket, error.message());
    return;
  }
  tcp::resolver resolver(context);
  const auto found =
      resolver.resolve(options.host, std::to_string(options.port), tcp::resolver::passive | tcp::resolver::numeric_service, error);
  if (error) fail("--host {}: {}", options.host, error.message());
  const tcp::endpoint endpoint = found.begin()->endpoint();
  shared.loopback = endpoint.address().is_loopback();
  acceptor.emplace(context);
  acceptor->open(endpoint.protocol(), error);
  if (!error) acceptor->set_option(tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor->bind(endpoint, error);
  if (!error) acceptor->listen(kBacklog, error);
  if (error) fail("cannot listen on {} port {}: {}", options.host, options.port, error.message());
  port = acceptor->local_endpoint().port();
}

template <typename Acceptor>
void HttpServer::State::accept(Acceptor& from) {
  IoThread& target = *io[next_thread++ % io.size()];
  auto socket = std::make_shared<Socket>(target.context);
  from.async_accept(*socket, [this, &from, &target, socket](beast::error_code error) {
    if (stopped || error == asio::error::operation_aborted || !from.is_open()) return;
    if (error) {
      // Out of descriptors, most likely: wait until some are free.
      accept_pause->expires_after(std::chrono::milliseconds(50));
      accept_pause->async_wait([this, &from](beast::error_code cancelled) {
        if (!cancelled && !stopped) accept(from);
      });
      return;
    }
    shared.accepted.fetch_add(1, std::memory_order_relaxed);
    if (shared.connections.load(std::memory_order_relaxed) < shared.options.max_connections)
      asio::post(target.context, [this, socket, &target] { take(std::move(*socket), target); });
    accept(from);
  });
}

void HttpServer::State::take(Socket socket, IoThread& target) {
  if (stopped) return;  // accepted too late for stop() to see and close it
  beast::error_code ignored;
  socket.non_blocking(true, ignored);
  const int on = 1;
  ::setsockopt(socket.native_handle(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // of no effect on a Unix socket
  std::string client = client_name(socket);
  std::shared_ptr<ssl::context> context;
  {
    const std::lock_guard lock(tls_mutex);
    context = tls;
  }
  std::shared_ptr<Connection> connection;
  if (context)
    connection = std::make_shared<TlsConnection>(shared, target, std::move(client), std::move(socket), std::move(context));
  else
    connection = std::make_shared<PlainConnection>(shared, target, std::move(client), std::move(socket));
  connection->begin();
}

void HttpServer::State::sweep(IoThread& thread, asio::steady_timer& timer) {
  timer.expires_after(kSweepInterval);
  timer.async_wait([this, &thread, &timer](beast::error_code cancelled) {
    if (cancelled || stopped) return;  // a timer that has run out already cannot be cancelled
    const auto now = Clock::now();
    // A sweep may close connections, which then leave the set.
    std::vector<std::shared_ptr<Connection>> all;
    all.reserve(thread.connections.size());
    for (Connection* connection : thread.connections)
      if (auto held = connection->weak_from_this().lock()) all.push_back(std::move(held));
    for (const auto& connection : all) connection->sweep(now);
    sweep(thread, timer);
  });
}

void HttpServer::State::tick(size_t index) {
  Periodic& p = periodic[index];
  p.timer->expires_after(p.interval);
  p.timer->async_wait([this, index](beast::error_code cancelled) {
    if (cancelled || stopped) return;  // a timer that has run out already cannot be cancelled
    periodic[index].f();
    tick(index);
  });
}

HttpServer::HttpServer(HttpOptions options, HeaderCheck check, Handler handler)
    : state_(std::make_unique<State>(std::move(options), std::move(check), std::move(handler))) {
  const HttpOptions& o = state_->shared.options;
  if (o.tls_certificate.empty() != o.tls_key.empty()) fail("--ssl-certfile and --ssl-keyfile belong together");
  if (!o.tls_certificate.empty()) state_->tls = load_tls(o);
  for (int i = 0; i < std::max(o.io_threads, 1); ++i) state_->io.push_back(std::make_unique<IoThread>(i));
  state_->listen();
}

HttpServer::~HttpServer() { stop(); }

void HttpServer::start() {
  State& s = *state_;
  s.workers = std::make_unique<asio::thread_pool>(kWorkers);
  for (const auto& thread : s.io) {
    s.guards.push_back(asio::make_work_guard(thread->context));
    s.sweepers.push_back(std::make_unique<asio::steady_timer>(thread->context));
    s.sweep(*thread, *s.sweepers.back());
  }
  for (size_t i = 0; i < s.periodic.size(); ++i) {
    s.periodic[i].timer = std::make_unique<asio::steady_timer>(s.io.front()->context);
    s.tick(i);
  }
  if (s.acceptor)
    s.accept(*s.acceptor);
  else
    s.accept(*s.local_acceptor);
  for (const auto& thread : s.io) s.threads.emplace_back([&context = thread->context] { context.run(); });
}

void HttpServer::start_draining() { state_->shared.draining = true; }

void HttpServer::stop_accepting() {
  asio::post(state_->io.front()->context, [&s = *state_] {
    beast::error_code ignored;
    if (s.acceptor) s.acceptor->close(ignored);
    if (s.local_acceptor) s.local_acceptor->close(ignored);
  });
}

void HttpServer::stop() {
  State& s = *state_;
  if (s.stopped.exchange(true)) return;
  if (s.workers) {
    s.workers->stop();
    s.workers->join();
  }
  stop_accepting();
  for (size_t i = 0; i < s.io.size(); ++i) {
    IoThread& thread = *s.io[i];
    asio::post(thread.context, [&thread, &s, i] {
      std::vector<std::shared_ptr<Connection>> all;
      for (Connection* connection : thread.connections)
        if (auto held = connection->weak_from_this().lock()) all.push_back(std::move(held));
      for (const auto& connection : all) connection->close();
      if (i < s.sweepers.size()) s.sweepers[i]->cancel();
      if (i == 0)
        for (auto& p : s.periodic)
          if (p.timer) p.timer->cancel();
    });
  }
  s.guards.clear();
  for (std::thread& thread : s.threads) thread.join();
  for (const auto& thread : s.io) {
    thread->context.restart();
    thread->context.poll();  // handlers that were cancelled let go of their connections
    thread->dirty.clear();
  }
  if (!s.shared.options.unix_socket.empty()) ::unlink(s.shared.options.unix_socket.c_str());
}

int HttpServer::port() const { return state_->port; }
int HttpServer::io_threads() const { return static_cast<int>(state_->io.size()); }

std::string HttpServer::address() const {
  const HttpOptions& o = state_->shared.options;
  if (!o.unix_socket.empty()) return "unix:" + o.unix_socket;
  const bool v6 = o.host.find(':') != std::string::npos;
  return fmt::format("{}://{}{}{}:{}", state_->tls ? "https" : "http", v6 ? "[" : "", o.host, v6 ? "]" : "", state_->port);
}

void HttpServer::post(int io_thread, std::function<void()> f) {
  asio::post(state_->io[static_cast<size_t>(io_thread)]->context, std::move(f));
}
void HttpServer::flush(int io_thread) { state_->io[static_cast<size_t>(io_thread)]->flush(); }
void HttpServer::run_on_worker(std::function<void()> f) { asio::post(*state_->workers, std::move(f)); }

void HttpServer::every(double seconds, std::function<void()> f) {
  state_->periodic.push_back({std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3)), std::move(f), nullptr});
}

void HttpServer::reload_tls() {
  if (state_->shared.options.tls_certificate.empty()) return;
  auto fresh = load_tls(state_->shared.options);
  const std::lock_guard lock(state_->tls_mutex);
  state_->tls = std::move(fresh);
}

HttpCounts HttpServer::counts() const {
  const ConnectionShared& s = state_->shared;
  HttpCounts out{.connections = s.connections, .accepted = s.accepted, .lost = s.lost, .slow_readers = s.slow_readers};
  out.body_bytes = static_cast<int64_t>(s.bodies.used());
  for (size_t i = 0; i < out.answers.size(); ++i) out.answers[i] = s.answers[i];
  return out;
}

}  // namespace cachalot::server
