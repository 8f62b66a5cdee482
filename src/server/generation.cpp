// Requests for the model: from a body to a Job, and what is told of it at its end.
#include <fmt/format.h>

#include "base/error.h"
#include "server/server_impl.h"

namespace cachalot::server {
namespace {

std::unique_ptr<AnswerWriter> make_writer(Endpoint endpoint, const Service& service, const Prepared& prepared) {
  switch (endpoint) {
    case Endpoint::chat: return make_chat_writer(service, prepared, random_id("chatcmpl-"));
    case Endpoint::completions: return make_completion_writer(service, prepared, random_id("cmpl-"));
    case Endpoint::messages: return make_messages_writer(service, prepared, random_id("msg_"));
    case Endpoint::responses: return make_responses_writer(service, prepared, random_id("resp_"));
  }
  return nullptr;
}

Prepared prepare(Endpoint endpoint, const Service& service, const std::string& body) {
  const ParseContext context = service.parse_context();
  switch (endpoint) {
    case Endpoint::chat: return service.prepare(parse_chat_request(body, context));
    case Endpoint::completions: return service.prepare(parse_completion_request(body, context));
    case Endpoint::messages: return service.prepare(parse_messages_request(body, context, false));
    case Endpoint::responses: return service.prepare(parse_responses_request(body, context));
  }
  return {};
}

constexpr size_t kInlineBody = 8192;  // bytes

// Whether reading a request may take longer than other connections of the thread should wait: a long prompt, or a grammar to compile.
bool is_slow(std::string_view body) {
  if (body.size() > kInlineBody) return true;
  for (const std::string_view word :
       {"\"response_format\"", "\"structured_outputs\"", "\"guided_", "\"grammar\"", "\"json_schema\"", "\"format\"", "\"tool_choice\""})
    if (body.find(word) != std::string_view::npos) return true;
  return false;
}

int answers_of(const Prepared& prepared) { return static_cast<int>(prepared.prompts.size()) * prepared.params.n; }

}  // namespace

void Server::Impl::handle_generation(const std::shared_ptr<Exchange>& exchange, HttpRequest request, Endpoint endpoint) {
  const Service& model = service();
  const auto body = std::make_shared<CountedBody>(std::move(request.body));
  off_thread(exchange, is_slow(body->text()), [this, exchange, &model, endpoint, body]() -> std::function<void()> {
    auto prepared = std::make_shared<Prepared>(prepare(endpoint, model, body->text()));
    *body = CountedBody();
    return [this, exchange, endpoint, prepared] { run(exchange, std::move(*prepared), endpoint); };
  });
}

void Server::Impl::run(const std::shared_ptr<Exchange>& exchange, Prepared prepared, Endpoint endpoint) {
  const Service& model = service();
  if (!exchange->alive()) return;  // gone while the prompt was read
  const int n = answers_of(prepared);
  if (exchange->key != nullptr) {
    admit(*exchange->key, n);
    const Priority wish = prepared.params.priority.value_or(model.options().default_priority);
    prepared.params.priority = std::max(wish, exchange->key->most_urgent);
  }
  auto writer = make_writer(endpoint, model, prepared);
  const auto job = std::make_shared<Job>(model, *hub_, *this, exchange, std::move(prepared), std::move(writer));
  {
    const std::lock_guard lock(mutex_);
    jobs_[job.get()] = job;
  }
  job->start();
}

void Server::Impl::on_end(const JobReport& report) {
  n_ended_.fetch_add(1, std::memory_order_relaxed);
  metrics_.on_end(report);
  metrics_.on_http(report.status);
  {
    const std::lock_guard lock(mutex_);
    jobs_.erase(report.job);
  }
  if (report.exchange == nullptr) return;
  const Exchange& exchange = *report.exchange;
  if (exchange.key != nullptr) release(*exchange.key, report.requested, report.use.prompt - report.use.cached + report.use.completion);
  if (!options_.log_requests) return;
  log_.write(report.status >= 500 ? LogLevel::error : LogLevel::info, "request", [&](JsonWriter& json) {
    json.field("id", exchange.request_id).field("client", exchange.client).field("status", report.status).field("finish", report.reason);
    if (exchange.key != nullptr) json.field("key", exchange.key->name);
    json.field("class", fmt::format("P{}", static_cast<int>(report.priority))).field("stream", report.streamed).field("n", report.n);
    json.field("prompt_tokens", report.use.prompt)
        .field("cached_tokens", report.use.cached)
        .field("completion_tokens", report.use.completion);
    json.field("queued_ms", report.queued_seconds * 1e3)
        .field("first_token_ms", report.first_token_seconds * 1e3)
        .field("total_ms", report.seconds * 1e3);
  });
}

void Server::Impl::handle_count_tokens(const std::shared_ptr<Exchange>& exchange, HttpRequest request) {
  const Service& model = service();
  const auto body = std::make_shared<CountedBody>(std::move(request.body));
  off_thread(exchange, is_slow(body->text()), [exchange, &model, body]() -> std::function<void()> {
    const ChatRequest chat = parse_messages_request(body->text(), model.parse_context(), true);
    model.check_model(chat.model);
    const size_t n = model.render(chat).ids.size();
    return [exchange, n] { exchange->respond_json(200, fmt::format("{{\"input_tokens\":{}}}", n)); };
  });
}

void Server::Impl::handle_tokenize(const std::shared_ptr<Exchange>& exchange, HttpRequest request) {
  const Service& model = service();
  const auto body = std::make_shared<CountedBody>(std::move(request.body));
  off_thread(exchange, is_slow(body->text()), [exchange, &model, body]() -> std::function<void()> {
    const TokenizeRequest wish = parse_tokenize_request(body->text(), model.parse_context());
    model.check_model(wish.chat ? wish.chat->model : wish.model);
    const Tokenizer& tokenizer = model.tokenizer();
    const std::vector<int> ids =
        wish.chat
            ? model.render(*wish.chat).ids
            : tokenizer.encode(wish.text, {.add_bos = wish.add_special_tokens && tokenizer.add_bos(), .parse_special = wish.parse_special});
    std::string answer;
    JsonWriter json(answer);
    json.begin_object().field("count", static_cast<int64_t>(ids.size())).field("max_model_len", model.engine().info().max_context);
    json.key("tokens").begin_array();
    for (const int id : ids) json.value(id);
    json.end_array();
    if (wish.with_pieces) {
      json.key("token_strs").begin_array();
      for (const int id : ids) json.value(tokenizer.is_special(id) ? tokenizer.token_text(id) : tokenizer.piece(id));
      json.end_array();
    }
    json.end_object();
    return [exchange, text = std::move(answer)] { exchange->respond_json(200, text); };
  });
}

void Server::Impl::handle_detokenize(const std::shared_ptr<Exchange>& exchange, HttpRequest request) {
  const Service& model = service();
  const auto body = std::make_shared<CountedBody>(std::move(request.body));
  off_thread(exchange, is_slow(body->text()), [exchange, &model, body]() -> std::function<void()> {
    const DetokenizeRequest wish = parse_detokenize_request(body->text(), model.parse_context());
    const std::string text = model.tokenizer().decode(wish.tokens);
    std::string answer;
    JsonWriter(answer).begin_object().field("prompt", text).field("content", text).end_object();
    return [exchange, json = std::move(answer)] { exchange->respond_json(200, json); };
  });
}

}  // namespace cachalot::server
