// Flags of `cachalot serve`, by the names that users of vLLM and llama.cpp know, and the options they make.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "cachalot/engine.h"
#include "cli/engine_flags.h"
#include "cli/run_flags.h"
#include "server/server.h"

namespace cachalot {

struct ServeFlags {
  ModelFlags model;
  SamplingFlags sampling;
  EngineFlags engine;
  int max_queue = 1024;
  double target_first_token_ms = 0.0, target_token_gap_ms = 0.0;
  // model and chat
  std::vector<std::string> names;
  std::string chat_template_file, template_kwargs, tool_call_parser = "auto", reasoning_parser = "auto", default_class = "P0";
  int max_output_tokens = -1;
  double request_timeout = 0.0;
  // net
  std::string host = "127.0.0.1", uds, tls_cert, tls_key, admin_host = "127.0.0.1";
  int port = 8000, http_threads = 2, admin_port = -1, max_connections = 20000, max_body_mb = 32, max_bodies_mb = 256, max_n = 128,
      max_logprobs = 20;
  bool no_page = false;
  std::vector<std::string> api_keys, origins, allowed_hosts;
  std::string api_key_file, admin_key;
  double keep_alive = 10.0, header_timeout = 15.0, idle_timeout = 75.0, write_timeout = 60.0, ssl_refresh = 0.0;
  // life
  double drain_delay = 5.0, shutdown_timeout = 30.0, watchdog_timeout = 60.0, watchdog_grace = 30.0;
  std::string log_file, log_level = "info";
  bool no_log_requests = false, quiet = false;
};

void add_serve_flags(CLI::App& command, ServeFlags& flags);
EngineOptions engine_options(const ServeFlags& flags);
// Without sampling defaults, which need the model. Both throw Error for a file or text that cannot be used.
server::ServiceOptions service_options(const ServeFlags& flags);
server::ServerOptions server_options(const ServeFlags& flags);

}  // namespace cachalot
