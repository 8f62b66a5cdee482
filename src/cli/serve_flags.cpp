// Declares the flags of `serve` and turns them into options.
#include "cli/serve_flags.h"

#include "base/error.h"
#include "base/json.h"
#include "cli/read_file.h"

namespace cachalot {
namespace {

constexpr size_t kMaxKeyFile = 16u << 20;

void add_queue_flags(CLI::App& command, ServeFlags& f) {
  const char* group = "Engine";
  command.add_option("--max-queue", f.max_queue, "Requests that may wait, of each class; more are answered 429")
      ->type_name("N")
      ->check(number_between(0, 1 << 20))
      ->default_str("1024")
      ->group(group);
  command.add_option("--target-ttft-ms", f.target_first_token_ms, "First token of class P0 within; 0: no target")
      ->type_name("MS")
      ->check(number_between(0, 1e7))
      ->group(group);
  command.add_option("--target-itl-ms", f.target_token_gap_ms, "Next token of class P0 within; 0: no target")
      ->type_name("MS")
      ->check(number_between(0, 1e7))
      ->group(group);
}

void add_chat_flags(CLI::App& command, ServeFlags& f) {
  const char* group = "Answers";
  command.add_option("-a,--alias,--served-model-name", f.names, "Name that requests give the model; repeatable")
      ->type_name("NAME")
      ->take_all()
      ->allow_extra_args(false)
      ->group(group);
  command.add_option("--chat-template-file,--chat-template", f.chat_template_file, "Take the place of the model's chat template")
      ->type_name("PATH")
      ->group(group);
  command.add_option("--default-chat-template-kwargs", f.template_kwargs, "Variables for every chat: '{\"thinking\": true}'")
      ->type_name("JSON")
      ->group(group);
  command
      .add_option("--tool-call-parser", f.tool_call_parser,
                  "auto (as the template shows), none, deepseek_v3, deepseek_v31, deepseek_v32, hermes, llama3_json")
      ->type_name("NAME")
      ->default_str("auto")
      ->group(group);
  command
      .add_option("--reasoning-parser,--reasoning-format", f.reasoning_parser,
                  "auto: reasoning apart from content; none: as the model writes it")
      ->type_name("NAME")
      ->check(CLI::IsMember({"auto", "none", "deepseek", "deepseek_r1", "deepseek_v3"}).description(""))
      ->default_str("auto")
      ->group(group);
  command.add_option("--default-class", f.default_class, "Class of requests that name none: P0, P1, P2")
      ->type_name("CLASS")
      ->check(CLI::IsMember({"P0", "P1", "P2"}).description(""))
      ->default_str("P0")
      ->group(group);
  command.add_option("--max-output-tokens", f.max_output_tokens, "Longest answer that a request may have; -1: the context [-1]")
      ->type_name("N")
      ->check(number_between(-1, 1 << 26))
      ->group(group);
  command.add_option("--timeout,--request-timeout", f.request_timeout, "Seconds that a request may take, waiting included; 0: any [0]")
      ->type_name("S")
      ->check(number_between(0, 1e7))
      ->group(group);
  command.add_option("--max-n", f.max_n, "Answers of one request")
      ->type_name("N")
      ->check(number_between(1, 1024))
      ->default_str("128")
      ->group(group);
  command.add_option("--max-logprobs", f.max_logprobs, "Rivals of a token that a request may ask for")
      ->type_name("N")
      ->check(number_between(0, 100))
      ->default_str("20")
      ->group(group);
}

void add_net_flags(CLI::App& command, ServeFlags& f) {
  const char* group = "Network";
  const auto seconds = [&](const char* names, double& value, const char* help) {
    command.add_option(names, value, help)
        ->type_name("S")
        ->check(number_between(0, 1e7))
        ->default_str(fmt::format("{}", value))
        ->group(group);
  };
  const auto list = [&](const char* names, std::vector<std::string>& value, const char* type, const char* help) {
    command.add_option(names, value, help)->type_name(type)->take_all()->allow_extra_args(false)->delimiter(',')->group(group);
  };
  command.add_option("--host", f.host, "Address to listen on; 0.0.0.0 for all")->type_name("ADDR")->default_str(f.host)->group(group);
  command.add_option("--port", f.port, "Port; 0: any free one")
      ->type_name("N")
      ->check(number_between(0, 65535))
      ->default_str("8000")
      ->group(group);
  command.add_option("--uds", f.uds, "Listen on a Unix socket instead")->type_name("PATH")->group(group);
  list("--api-key", f.api_keys, "KEY", "Ask requests for this key; repeatable");
  command.add_option("--api-key-file", f.api_key_file, "Keys and their limits, one a line: KEY [name=] [rpm=] [tpm=] [running=] [class=]")
      ->type_name("PATH")
      ->group(group);
  command.add_option("--ssl-certfile,--ssl-cert-file", f.tls_cert, "Certificate chain (PEM): speak TLS")->type_name("PATH")->group(group);
  command.add_option("--ssl-keyfile,--ssl-key-file", f.tls_key, "Its private key (PEM)")->type_name("PATH")->group(group);
  seconds("--ssl-refresh", f.ssl_refresh, "Look for a new certificate this often; 0: on SIGHUP alone");
  list("--allowed-origins,--cors-origins", f.origins, "URL", "Sites whose pages may use this server, comma-separated; *: any");
  list("--allowed-hosts", f.allowed_hosts, "NAME", "Host headers to accept [any; on loopback: those of this machine]");
  command.add_option("--admin-port", f.admin_port, "Second port: state, drain, metrics without a key [none]")
      ->type_name("N")
      ->check(number_between(0, 65535))
      ->group(group);
  command.add_option("--admin-host", f.admin_host, "Its address")->type_name("ADDR")->default_str(f.admin_host)->group(group);
  command.add_option("--admin-key", f.admin_key, "Key of the admin port")->type_name("KEY")->group(group);
  command.add_option("--threads-http,--http-threads", f.http_threads, "Threads for connections")
      ->type_name("N")
      ->check(number_between(1, 256))
      ->default_str("2")
      ->group(group);
  command.add_option("--max-connections", f.max_connections, "Open connections")
      ->type_name("N")
      ->check(number_between(1, 1 << 20))
      ->default_str("20000")
      ->group(group);
  command.add_option("--max-body-mb", f.max_body_mb, "Largest request, in MiB")
      ->type_name("N")
      ->check(number_between(1, 4096))
      ->default_str("32")
      ->group(group);
  command.add_option("--max-bodies-mb", f.max_bodies_mb, "Bodies of all requests that are being read, in MiB; more are answered 503")
      ->type_name("N")
      ->check(number_between(1, 1 << 20))
      ->default_str("256")
      ->group(group);
  command.add_flag("--no-page,--no-ui", f.no_page, "No page at /")->group(group);
  seconds("--sse-ping-interval,--keep-alive-interval", f.keep_alive, "A comment in streams that are silent this long");
  seconds("--header-timeout", f.header_timeout, "For a request's header");
  seconds("--idle-timeout", f.idle_timeout, "For the next request of a connection");
  seconds("--write-timeout", f.write_timeout, "For a client that reads nothing");
}

void add_life_flags(CLI::App& command, ServeFlags& f) {
  const char* group = "Life and logs";
  const auto seconds = [&](const char* names, double& value, const char* help) {
    command.add_option(names, value, help)
        ->type_name("S")
        ->check(number_between(0, 1e7))
        ->default_str(fmt::format("{}", value))
        ->group(group);
  };
  seconds("--drain-delay", f.drain_delay, "After SIGTERM requests are still taken so long");
  seconds("--shutdown-timeout", f.shutdown_timeout, "Then running answers have so long to end");
  seconds("--watchdog-timeout", f.watchdog_timeout, "Not live when work stands still so long; 0: never");
  seconds("--watchdog-grace", f.watchdog_grace, "Then waiting and running requests are answered 503 after so long");
  command.add_option("--log-file", f.log_file, "JSON lines go here instead of the standard error")->type_name("PATH")->group(group);
  command.add_option("--log-level", f.log_level, "debug, info, warning, error, off")
      ->type_name("NAME")
      ->check(CLI::IsMember({"debug", "info", "warning", "error", "off"}).description(""))
      ->default_str("info")
      ->group(group);
  command.add_flag("--no-log-requests,--disable-log-requests", f.no_log_requests, "No line for each request")->group(group);
  command.add_flag("-q,--quiet", f.quiet, "No progress")->group(group);
}

}  // namespace

void add_serve_flags(CLI::App& command, ServeFlags& flags) {
  add_model_flags_or_argument(command, flags.model);
  add_cache_flags(command, flags.model);
  add_engine_flags(command, flags.engine, {.seqs = 1 << 16, .batched_tokens = 1 << 20});
  add_queue_flags(command, flags);
  add_chat_flags(command, flags);
  add_sampling_flags(command, flags.sampling);
  for (const char* name : {"--prefill-chunk", "--max-tokens", "--stop", "--ignore-eos", "--logprobs", "--logit-bias", "--seed"})
    command.remove_option(command.get_option(name));
  add_net_flags(command, flags);
  add_life_flags(command, flags);
}

EngineOptions engine_options(const ServeFlags& f) {
  EngineOptions out = many_requests(f.model, f.engine);
  for (ClassTargets& targets : out.targets) targets.max_waiting = f.max_queue;
  out.targets[0].first_token_seconds = f.target_first_token_ms / 1e3;
  out.targets[0].token_gap_seconds = f.target_token_gap_ms / 1e3;
  return out;
}

server::ServiceOptions service_options(const ServeFlags& f) {
  server::ServiceOptions out;
  out.names = f.names;
  out.limits = server_options(f).limits;
  out.max_output_tokens = f.max_output_tokens;
  out.timeout_seconds = f.request_timeout;
  out.default_priority = static_cast<Priority>(f.default_class[1] - '0');
  if (!f.template_kwargs.empty()) {
    out.template_kwargs = nlohmann::ordered_json::parse(f.template_kwargs, nullptr, false);
    if (!out.template_kwargs.is_object())
      fail("--default-chat-template-kwargs: found \"{}\", expected a JSON object", printable(f.template_kwargs));
  }
  if (f.tool_call_parser != "auto") {
    out.tool_format = server::tool_format_named(f.tool_call_parser);
    if (!out.tool_format)
      fail("--tool-call-parser: found \"{}\", expected auto, none, deepseek_v3, deepseek_v31, deepseek_v32, hermes or llama3_json",
           printable(f.tool_call_parser));
  }
  out.split_reasoning = f.reasoning_parser != "none";
  return out;
}

server::ServerOptions server_options(const ServeFlags& f) {
  server::ServerOptions out;
  out.http.host = f.host;
  out.http.port = f.port;
  out.http.unix_socket = f.uds;
  out.http.io_threads = f.http_threads;
  out.http.tls_certificate = f.tls_cert;
  out.http.tls_key = f.tls_key;
  out.http.max_connections = f.max_connections;
  out.http.max_body_bytes = out.limits.max_body_bytes = static_cast<size_t>(f.max_body_mb) << 20;
  out.http.max_bodies_bytes = static_cast<size_t>(f.max_bodies_mb) << 20;
  out.http.header_seconds = f.header_timeout;
  out.http.idle_seconds = f.idle_timeout;
  out.http.write_seconds = f.write_timeout;
  out.http.keep_alive_seconds = f.keep_alive;
  for (const std::string& origin : f.origins)
    if (origin != "*" && origin.find("://") == std::string::npos)
      fail("--allowed-origins: found \"{}\", expected * or an origin such as https://example.org", printable(origin));
  out.http.cors_origins = f.origins;
  out.http.allowed_hosts = f.allowed_hosts;
  out.limits.max_n = f.max_n;
  out.limits.max_logprobs = f.max_logprobs;
  if (f.admin_port >= 0) {
    out.has_admin = true;
    out.admin.host = f.admin_host;
    out.admin.port = f.admin_port;
    out.admin.io_threads = 1;
  }
  for (const std::string& key : f.api_keys) out.keys.add(key, "--api-key");
  if (!f.api_key_file.empty()) out.keys.add(read_input_file(f.api_key_file, kMaxKeyFile), f.api_key_file);
  if (!f.admin_key.empty()) out.admin_keys.add(f.admin_key, "--admin-key");
  out.block_tokens = f.model.block_size;
  out.watchdog_seconds = f.watchdog_timeout;
  out.stuck_grace_seconds = f.watchdog_grace;
  out.drain_delay_seconds = f.drain_delay;
  out.shutdown_seconds = f.shutdown_timeout;
  out.tls_check_seconds = f.ssl_refresh;
  out.log_requests = !f.no_log_requests;
  out.log_file = f.log_file;
  const char* const levels[] = {"debug", "info", "warning", "error", "off"};
  for (int i = 0; i < 5; ++i)
    if (f.log_level == levels[i]) out.log_level = static_cast<server::LogLevel>(i);
  return out;
}

}  // namespace cachalot
