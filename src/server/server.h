// The model server: endpoints, keys, limits, health, metrics and the way down, in front of one engine.
//
//   Server server(options);   // listens, answers 503 while the model loads
//   server.start();
//   server.serve(std::make_unique<Service>(...));
//   ... server.drain(); server.wait();
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "server/http_server.h"
#include "server/json_log.h"
#include "server/keys.h"
#include "server/service.h"

namespace cachalot::server {

// A file that is part of the program: the page at "/" and what it loads.
struct StaticFile {
  std::string_view bytes, content_type;
};

struct ServerOptions {
  HttpOptions http;
  bool has_admin = false;  // a second listener: state, drain, metrics without a key
  HttpOptions admin;
  KeyRing keys;  // empty: no key is asked for
  KeyRing admin_keys;
  RequestLimits limits;
  int block_tokens = 16;              // told in the metrics
  std::string version;                // of the program
  double watchdog_seconds = 60.0;     // without a step while something runs: not live; 0: never
  double stuck_grace_seconds = 30.0;  // after that, what waits or runs is ended with an error
  double drain_delay_seconds = 5.0;   // requests are still taken, while balancers learn of it
  double shutdown_seconds = 30.0;     // for what runs, after that
  double tls_check_seconds = 0.0;     // looks for a new certificate this often; 0: never
  bool log_requests = true;           // one line each; never a prompt's or an answer's text
  LogLevel log_level = LogLevel::info;
  std::string log_file;
  std::map<std::string, StaticFile> files;  // by path; "/" is "/index.html"
};

class Server {
 public:
  explicit Server(ServerOptions options);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  void start();
  // The model is loaded. The engine must outlive this server's stop.
  void serve(std::unique_ptr<Service> service);
  // The first call begins the way down: not ready, then closed to new requests, then the rest is ended. The second ends it at once. Any
  // thread.
  void drain();
  // Returns when the way down is complete.
  void wait();
  void reload_tls();  // any thread

  [[nodiscard]] int port() const;
  [[nodiscard]] int admin_port() const;  // 0: none
  [[nodiscard]] std::string address() const;
  [[nodiscard]] JsonLog& log();
  [[nodiscard]] HttpCounts counts() const;
  [[nodiscard]] int running_jobs() const;

  class Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace cachalot::server
