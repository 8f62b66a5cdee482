// Which request goes where, and who may ask: one list, closed by default. Answers that need no model run are made here.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/error.h"
#include "server/server_impl.h"

namespace cachalot::server {
namespace {

enum class Access : uint8_t { open, key };

struct Route {
  std::string_view method, path;
  Access access;
};

// Health is open to everybody: probes have no key. All else asks for one, when there are keys.
constexpr Route kRoutes[] = {
    {"GET", "/health", Access::open},
    {"GET", "/health/live", Access::open},
    {"GET", "/health/ready", Access::open},
    {"GET", "/health/startup", Access::open},
    {"GET", "/v1/health", Access::open},
    {"GET", "/ping", Access::open},
    {"GET", "/metrics", Access::key},
    {"GET", "/version", Access::key},
    {"GET", "/load", Access::key},
    {"GET", "/v1/models", Access::key},
    {"POST", "/v1/chat/completions", Access::key},
    {"POST", "/v1/completions", Access::key},
    {"POST", "/v1/embeddings", Access::key},
    {"POST", "/v1/responses", Access::key},
    {"POST", "/v1/messages", Access::key},
    {"POST", "/v1/messages/count_tokens", Access::key},
    {"POST", "/tokenize", Access::key},
    {"POST", "/detokenize", Access::key},
};

constexpr Route kAdminRoutes[] = {
    {"GET", "/health", Access::open},         {"GET", "/health/live", Access::open},  {"GET", "/health/ready", Access::open},
    {"GET", "/health/startup", Access::open}, {"GET", "/metrics", Access::open},      {"GET", "/admin/state", Access::key},
    {"POST", "/admin/drain", Access::key},    {"POST", "/admin/reload", Access::key},
};

constexpr std::string_view kModelPrefix = "/v1/models/";

bool is_json(std::string_view content_type) {
  std::string type(content_type.substr(0, content_type.find(';')));
  while (!type.empty() && type.back() == ' ') type.pop_back();
  std::transform(type.begin(), type.end(), type.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return type == "application/json";
}

std::string_view bearer_of(const HttpRequest& request) {
  const std::string_view authorization = request.header("authorization");
  if (authorization.size() > 7 && (authorization.starts_with("Bearer ") || authorization.starts_with("bearer ")))
    return authorization.substr(7);
  return request.header("x-api-key");  // Anthropic's clients
}

ApiError unavailable(bool loading) {
  ApiError error(503, loading ? "Loading model" : "The server is shutting down", "", loading ? "loading" : "shutting_down");
  error.retry_after_seconds = 5.0;
  return error;
}

const char* bool_text(bool flag) { return flag ? "true" : "false"; }

}  // namespace

ApiError engine_stuck() {
  ApiError error(503, "The engine does not move", "", "engine_stuck");
  error.retry_after_seconds = 30.0;
  return error;
}

void Server::Impl::authenticate(Exchange& exchange, const HttpRequest& request, bool admin) const {
  const KeyRing& keys = admin ? options_.admin_keys : options_.keys;
  if (keys.empty()) return;
  const std::string_view given = bearer_of(request);
  if (given.empty()) throw ApiError(401, "An API key is needed: Authorization: Bearer KEY", "", "missing_api_key");
  exchange.key = keys.find(given);
  if (exchange.key == nullptr) throw ApiError(401, "The API key is not known here", "", "invalid_api_key");
}

void Server::Impl::check_header(Exchange& exchange, const HttpRequest& request, bool admin) {
  if (request.path.starts_with("/v1/messages")) exchange.style = ApiStyle::anthropic;
  const std::string_view method = request.method == "HEAD" ? std::string_view("GET") : request.method;
  const std::span<const Route> routes = admin ? std::span<const Route>(kAdminRoutes) : std::span<const Route>(kRoutes);
  const Route* route = nullptr;
  bool known_path = false;
  for (const Route& r : routes) {
    if (r.path != request.path) continue;
    known_path = true;
    if (r.method == method) route = &r;
  }
  const bool is_file = !admin && options_.files.contains(request.path == "/" ? "/index.html" : request.path);
  const bool is_model = !admin && request.path.starts_with(kModelPrefix);
  if (is_file && method == "GET") return;  // the page itself holds no secrets
  if (route == nullptr || route->access == Access::key) authenticate(exchange, request, admin);
  if (route == nullptr && !(is_model && method == "GET")) {
    if (known_path || is_file || is_model)
      throw ApiError(405, fmt::format("{} is not done with {}", printable(request.path), printable(request.method)));
    throw ApiError(404, fmt::format("There is nothing at {}", printable(request.path)));
  }
  if (method == "POST" && !admin && !is_json(request.header("content-type")))
    throw ApiError(415, "The body must be JSON: Content-Type: application/json");
  if (const std::string_view encoding = request.header("content-encoding"); !encoding.empty() && encoding != "identity")
    throw ApiError(415, fmt::format("Content-Encoding: found {}, expected a body as it is", printable(encoding, 40)));
}

void Server::Impl::handle(const std::shared_ptr<Exchange>& exchange, HttpRequest request, bool admin) {
  if (request.method == "GET" || request.method == "HEAD") {
    handle_get(*exchange, request, admin);
    return;
  }
  const std::string& path = request.path;
  if (admin) {
    if (path == "/admin/drain") drain();
    if (path == "/admin/reload") reload_tls();
    exchange->respond_json(200, "{}");
    return;
  }
  if (path == "/v1/chat/completions")
    handle_generation(exchange, std::move(request), Endpoint::chat);
  else if (path == "/v1/completions")
    handle_generation(exchange, std::move(request), Endpoint::completions);
  else if (path == "/v1/responses")
    handle_generation(exchange, std::move(request), Endpoint::responses);
  else if (path == "/v1/messages")
    handle_generation(exchange, std::move(request), Endpoint::messages);
  else if (path == "/v1/messages/count_tokens")
    handle_count_tokens(exchange, std::move(request));
  else if (path == "/tokenize")
    handle_tokenize(exchange, std::move(request));
  else if (path == "/detokenize")
    handle_detokenize(exchange, std::move(request));
  else
    handle_embeddings();
}

bool Server::Impl::handle_get(Exchange& exchange, const HttpRequest& request, bool admin) {
  const std::string& path = request.path;
  if (const auto file = options_.files.find(path == "/" ? "/index.html" : path); !admin && file != options_.files.end()) {
    exchange.respond({.content_type = std::string(file->second.content_type),
                      .body = std::string(file->second.bytes),
                      .headers = {{"Content-Security-Policy",
                                   "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
                                   "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
                                  {"X-Content-Type-Options", "nosniff"},
                                  {"Referrer-Policy", "no-referrer"},
                                  {"Cache-Control", "no-cache"}}});
    return true;
  }
  if (handle_health(exchange, path)) return true;
  if (path == "/metrics") {
    exchange.respond({.content_type = "text/plain; version=0.0.4; charset=utf-8", .body = metrics_text()});
  } else if (path == "/version") {
    std::string body;
    JsonWriter(body).begin_object().field("version", options_.version).end_object();
    exchange.respond_json(200, body);
  } else if (path == "/load") {
    handle_load(exchange);
  } else if (path == "/admin/state") {
    handle_state(exchange);
  } else {
    handle_models(exchange, path);
  }
  return true;
}

// live: the process and its engine make progress. ready: it takes requests. startup: the model is loaded.
bool Server::Impl::handle_health(Exchange& exchange, const std::string& path) {
  const Phase phase = phase_;
  bool good = false;
  std::string why;
  if (path == "/health/live") {
    good = live_;
    why = "The engine does not move";
  } else if (path == "/health/startup") {
    good = ready_service_ != nullptr;
    why = "Loading model";
  } else if (path == "/health" || path == "/health/ready" || path == "/v1/health" || path == "/ping") {
    good = live_ && phase == Phase::ready;
    why = phase == Phase::loading ? "Loading model" : phase == Phase::ready ? "The engine does not move" : "Shutting down";
  } else {
    return false;
  }
  if (good)
    exchange.respond_json(200, "{\"status\":\"ok\"}");
  else
    exchange.respond_json(503, fmt::format("{{\"error\":{{\"code\":503,\"message\":\"{}\",\"type\":\"unavailable_error\"}}}}", why));
  return true;
}

void Server::Impl::handle_models(Exchange& exchange, const std::string& path) {
  const Service* service = ready_service_;
  if (service == nullptr) throw ApiError(503, "Loading model");
  const auto write_one = [&](JsonWriter& json, const std::string& name) {
    json.begin_object().field("id", name).field("object", "model").field("created", service->created()).field("owned_by", "cachalot");
    json.field("root", service->name()).key("parent").null();
    json.field("max_model_len", service->engine().info().max_context).field("max_output_tokens", service->options().max_output_tokens);
    json.key("permission").begin_array().end_array().end_object();
  };
  std::string body;
  JsonWriter json(body);
  if (path.starts_with(kModelPrefix)) {
    const std::string name = path.substr(kModelPrefix.size());
    service->check_model(name);
    write_one(json, name);
  } else {
    json.begin_object().field("object", "list").key("data").begin_array();
    for (const std::string& name : service->options().names) write_one(json, name);
    json.end_array().end_object();
  }
  exchange.respond_json(200, body);
}

void Server::Impl::handle_load(Exchange& exchange) {
  const Service* service = ready_service_;
  const EngineStats stats = service != nullptr ? service->engine().stats() : EngineStats{};
  int load = 0;
  for (const ClassStats& c : stats.classes) load += c.running + c.waiting;
  exchange.respond_json(200, fmt::format("{{\"server_load\":{}}}", load));
}

void Server::Impl::handle_state(Exchange& exchange) { exchange.respond_json(200, state_json()); }

void Server::Impl::handle_embeddings() const {
  throw ApiError(400, "This model generates text; it gives no embeddings", "model", "embeddings_not_supported");
}

const Service& Server::Impl::service() const {
  const Service* service = ready_service_;
  const Phase phase = phase_;
  if (service == nullptr || phase == Phase::closed || phase == Phase::ended) throw unavailable(service == nullptr);
  if (!live_) throw engine_stuck();
  return *service;
}

std::string Server::Impl::metrics_text() const {
  const Service* service = ready_service_;
  return metrics_.text(service != nullptr ? &service->engine() : nullptr, service != nullptr ? service->name() : "", options_.block_tokens,
                       http_->counts(), live_);
}

std::string Server::Impl::state_json() const {
  constexpr std::array<const char*, 5> kPhases = {"loading", "ready", "draining", "closed", "ended"};
  std::string body;
  JsonWriter json(body);
  json.begin_object().field("phase", kPhases[static_cast<size_t>(phase_.load())]).key("live").raw(bool_text(live_));
  json.field("started_at", started_at_).field("connections", http_->counts().connections);
  if (const Service* service = ready_service_) {
    const EngineStats stats = service->engine().stats();
    json.field("model", service->name()).field("steps", stats.steps).field("last_step_age_seconds", stats.last_step_age_seconds);
    json.field("blocks_total", stats.blocks_total).field("blocks_used", stats.blocks_used).field("blocks_cached", stats.blocks_cached);
    json.field("prompt_tokens", stats.prompt_tokens)
        .field("cached_prompt_tokens", stats.cached_prompt_tokens)
        .field("output_tokens", stats.output_tokens);
    json.key("classes").begin_array();
    for (const ClassStats& c : stats.classes) {
      json.begin_object().field("waiting", c.waiting).field("running", c.running).field("finished", c.finished).field("refused", c.refused);
      json.field("preempted", c.preempted).field("cancelled", c.cancelled).field("failed", c.failed).end_object();
    }
    json.end_array();
  }
  json.end_object();
  return body;
}

void Server::Impl::off_thread(const std::shared_ptr<Exchange>& exchange, bool slow, std::function<std::function<void()>()> make) {
  if (!slow) {
    make()();
    return;
  }
  http_->run_on_worker([exchange, make = std::move(make)] {
    std::function<void()> then;
    try {
      then = make();
    } catch (const ApiError& error) {
      then = [exchange, error] { exchange->respond_error(error); };
    } catch (const std::exception& error) {
      then = [exchange, failure = ApiError(500, error.what())] { exchange->respond_error(failure); };
    }
    exchange->post([exchange, then = std::move(then)] {
      try {
        then();
      } catch (const ApiError& error) {
        exchange->respond_error(error);
      } catch (const std::exception& error) {
        exchange->respond_error(ApiError(500, error.what()));
      }
    });
  });
}

}  // namespace cachalot::server
