// HTTP/1.1 over TCP, TLS or a Unix socket: connections, limits and timeouts. What a request means is the handler's affair.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/exchange.h"

namespace cachalot::server {

struct HttpOptions {
  std::string host = "127.0.0.1";
  int port = 8000;          // 0: any free one
  std::string unix_socket;  // path; takes the place of host and port
  int io_threads = 2;
  std::string tls_certificate, tls_key;  // PEM files; both or none
  size_t max_header_bytes = 16384, max_body_bytes = 32u << 20;
  size_t max_bodies_bytes = 256u << 20;  // of all requests that are being received or read; at least max_body_bytes
  int max_headers = 100;
  size_t max_output_bytes = 256u << 10;  // of a stream that its client does not read; then the client is given up
  int max_connections = 20000;
  double header_seconds = 15.0;            // for the whole header
  double body_seconds = 60.0;              // between two pieces of the body
  double idle_seconds = 75.0;              // between requests
  double write_seconds = 60.0;             // without any byte taken by the client
  double keep_alive_seconds = 10.0;        // of silence before a comment is sent in a stream
  std::vector<std::string> cors_origins;   // "*" for any; empty: none
  std::vector<std::string> allowed_hosts;  // for the Host header; empty: any, but names of this machine alone when bound to loopback
};

struct HttpCounts {
  int64_t connections = 0, accepted = 0, lost = 0, slow_readers = 0;  // open now; since the start
  int64_t body_bytes = 0;                                             // of requests, held now
  std::array<int64_t, 6> answers{};                                   // by hundreds of the status, but for those of requests for the model
};

class HttpServer {
 public:
  // Called when a request's header is there, before any of its body is read; refuses by throwing ApiError.
  using HeaderCheck = std::function<void(Exchange& exchange, const HttpRequest& request)>;
  // Both run on the exchange's I/O thread and must not block.
  using Handler = std::function<void(std::shared_ptr<Exchange> exchange, HttpRequest request)>;

  // Binds at once. Throws Error naming the address or file at fault.
  HttpServer(HttpOptions options, HeaderCheck check, Handler handler);
  ~HttpServer();  // stop()
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  void start();
  // From now on answers end their connection, so that clients come back elsewhere.
  void start_draining();
  void stop_accepting();
  // Closes every connection and ends the threads.
  void stop();

  [[nodiscard]] int port() const;
  [[nodiscard]] std::string address() const;  // "http://127.0.0.1:8000"
  [[nodiscard]] int io_threads() const;
  void post(int io_thread, std::function<void()> f);
  // Sends what streams of this I/O thread have collected. On that thread only.
  void flush(int io_thread);
  // For work that takes long, such as reading a large prompt.
  void run_on_worker(std::function<void()> f);
  // Calls `f` about every `seconds` on the first I/O thread, until stop(). Before start().
  void every(double seconds, std::function<void()> f);
  // New connections use the certificate as it is on disk now. Throws Error and keeps the old one when that cannot be read.
  void reload_tls();
  [[nodiscard]] HttpCounts counts() const;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace cachalot::server
