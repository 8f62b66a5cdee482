// OpenAI's /v1/responses. Nothing is stored: an answer is complete in itself.
#include <ctime>

#include "server/writer_parts.h"

namespace cachalot::server {
namespace {

class ResponsesWriter : public AnswerWriter {
 public:
  ResponsesWriter(const Service& service, const Prepared& prepared, std::string id)
      : tokenizer_(service.tokenizer()),
        model_(service.name()),
        id_(std::move(id)),
        sampling_(prepared.params.sampling),
        max_tokens_(prepared.params.max_tokens),
        logprobs_(prepared.params.logprobs),
        created_(std::time(nullptr)) {}

  void start(std::string& out) override {
    for (const char* type : {"response.created", "response.in_progress"})
      event(type, out, [&](JsonWriter& json) { write_response(json.key("response"), "in_progress", nullptr, {}); });
  }

  void delta(Choice& choice, const Delta& delta, std::string& out) override {
    if (!delta.reasoning.empty()) {
      open(Item::Kind::reasoning, {}, out);
      item_event("response.reasoning_text.delta", out,
                 [&](JsonWriter& json) { json.field("content_index", 0).field("delta", delta.reasoning); });
      items_.back().text += delta.reasoning;
    }
    if (!delta.content.empty()) {
      open(Item::Kind::message, {}, out);
      item_event("response.output_text.delta", out, [&](JsonWriter& json) {
        json.field("content_index", 0).field("delta", delta.content).key("logprobs");
        write_logprob_list(json, tokenizer_, logprobs_ ? std::span<const LoggedToken>(choice.logged) : std::span<const LoggedToken>());
      });
      items_.back().text += delta.content;
      choice.logged.clear();
    }
    for (const ToolCallDelta& call : delta.calls) {
      if (!call.id.empty()) {
        close(out);
        open(Item::Kind::call, {call.id, call.name, {}}, out);
      }
      if (call.arguments.empty()) continue;
      item_event("response.function_call_arguments.delta", out, [&](JsonWriter& json) { json.field("delta", call.arguments); });
      items_.back().call.arguments += call.arguments;
    }
  }

  void finish(Choice& choice, std::string& out) override {
    close(out);
    reason_ = choice.finish_reason;
  }

  void end(const TokenUse& use, std::string& out) override {
    const bool complete = reason_ == "stop" || reason_ == "tool_calls";
    event(complete ? "response.completed" : "response.incomplete", out,
          [&](JsonWriter& json) { write_response(json.key("response"), complete ? "completed" : "incomplete", &use, {}); });
  }

  void fail(const ApiError& error, std::string& out) override {
    close(out);
    event("response.failed", out, [&](JsonWriter& json) { write_response(json.key("response"), "failed", nullptr, error.what()); });
  }

  std::string whole(std::span<Choice> choices, const TokenUse& use) override {
    Choice& choice = choices.front();
    reason_ = choice.finish_reason;
    const auto add = [&](Item::Kind kind, std::string text, ToolCall call) {
      items_.push_back({kind, new_id(kind), std::move(text), std::move(call), true});
    };
    if (!choice.reasoning.empty()) add(Item::Kind::reasoning, choice.reasoning, {});
    if (!choice.content.empty() || choice.calls.empty()) add(Item::Kind::message, choice.content, {});
    for (const ToolCall& call : choice.calls) add(Item::Kind::call, {}, call);
    if (logprobs_) logged_ = choice.logged;
    std::string out;
    JsonWriter json(out);
    write_response(json, reason_ == "stop" || reason_ == "tool_calls" ? "completed" : "incomplete", &use, {});
    return out;
  }

 private:
  struct Item {
    enum class Kind : uint8_t { reasoning, message, call } kind;
    std::string id, text;
    ToolCall call;
    bool done = false;
  };

  static std::string new_id(Item::Kind kind) {
    return random_id(kind == Item::Kind::reasoning ? "rs_" : kind == Item::Kind::message ? "msg_" : "fc_");
  }

  template <typename F>
  void event(std::string_view type, std::string& out, F&& fields) {
    out += "event: ";
    out += type;
    out += "\ndata: ";
    JsonWriter json(out);
    json.begin_object().field("type", type).field("sequence_number", sequence_++);
    fields(json);
    json.end_object();
    out += "\n\n";
  }

  template <typename F>
  void item_event(std::string_view type, std::string& out, F&& fields) {
    event(type, out, [&](JsonWriter& json) {
      json.field("item_id", items_.back().id).field("output_index", static_cast<int64_t>(items_.size() - 1));
      fields(json);
    });
  }

  void open(Item::Kind kind, ToolCall call, std::string& out) {
    if (!items_.empty() && !items_.back().done && items_.back().kind == kind) return;
    close(out);
    items_.push_back({kind, new_id(kind), {}, std::move(call), false});
    event("response.output_item.added", out, [&](JsonWriter& json) {
      json.field("output_index", static_cast<int64_t>(items_.size() - 1)).key("item");
      write_item(json, items_.back());
    });
    if (kind == Item::Kind::call) return;
    item_event("response.content_part.added", out, [&](JsonWriter& json) {
      json.field("content_index", 0).key("part");
      write_part(json, items_.back());
    });
  }

  void close(std::string& out) {
    if (items_.empty() || items_.back().done) return;
    Item& item = items_.back();
    if (item.kind == Item::Kind::call) {
      item_event("response.function_call_arguments.done", out,
                 [&](JsonWriter& json) { json.field("name", item.call.name).field("arguments", item.call.arguments); });
    } else {
      const bool message = item.kind == Item::Kind::message;
      item_event(message ? "response.output_text.done" : "response.reasoning_text.done", out, [&](JsonWriter& json) {
        json.field("content_index", 0).field("text", item.text);
        if (message) json.key("logprobs").begin_array().end_array();
      });
      item_event("response.content_part.done", out, [&](JsonWriter& json) {
        json.field("content_index", 0).key("part");
        write_part(json, item);
      });
    }
    item.done = true;
    event("response.output_item.done", out, [&](JsonWriter& json) {
      json.field("output_index", static_cast<int64_t>(items_.size() - 1)).key("item");
      write_item(json, item);
    });
  }

  void write_part(JsonWriter& json, const Item& item) const {
    if (item.kind == Item::Kind::reasoning) {
      json.begin_object().field("type", "reasoning_text").field("text", item.text).end_object();
      return;
    }
    json.begin_object().field("type", "output_text").field("text", item.text).key("annotations").begin_array().end_array().key("logprobs");
    write_logprob_list(json, tokenizer_, logged_);
    json.end_object();
  }

  void write_item(JsonWriter& json, const Item& item) const {
    json.begin_object().field("id", item.id).field("status", item.done ? "completed" : "in_progress");
    switch (item.kind) {
      case Item::Kind::reasoning: json.field("type", "reasoning").key("summary").begin_array().end_array(); break;
      case Item::Kind::message: json.field("type", "message").field("role", "assistant"); break;
      case Item::Kind::call:
        json.field("type", "function_call")
            .field("call_id", item.call.id)
            .field("name", item.call.name)
            .field("arguments", item.call.arguments);
        break;
    }
    if (item.kind != Item::Kind::call) {
      json.key("content").begin_array();
      if (item.done) write_part(json, item);
      json.end_array();
    }
    json.end_object();
  }

  void write_response(JsonWriter& json, std::string_view status, const TokenUse* use, std::string_view error) const {
    json.begin_object().field("id", id_).field("object", "response").field("created_at", created_).field("status", status).key("error");
    if (error.empty())
      json.null();
    else
      json.begin_object().field("code", "server_error").field("message", error).end_object();
    json.key("incomplete_details");
    if (status == "incomplete")
      json.begin_object().field("reason", reason_ == "length" ? "max_output_tokens" : "content_filter").end_object();
    else
      json.null();
    json.key("instructions").null().key("max_output_tokens");
    if (max_tokens_ >= 0)
      json.value(max_tokens_);
    else
      json.null();
    json.field("model", model_).key("output").begin_array();
    for (const Item& item : items_) write_item(json, item);
    json.end_array().field("parallel_tool_calls", true).key("previous_response_id").null().field("store", false);
    json.field("temperature", static_cast<double>(sampling_.temperature)).field("top_p", static_cast<double>(sampling_.top_p));
    json.key("text")
        .raw("{\"format\":{\"type\":\"text\"}}")
        .field("tool_choice", "auto")
        .key("tools")
        .raw("[]")
        .field("truncation", "disabled");
    json.key("usage");
    if (use == nullptr) {
      json.null();
    } else {
      json.begin_object()
          .field("input_tokens", use->prompt)
          .key("input_tokens_details")
          .begin_object()
          .field("cached_tokens", use->cached)
          .end_object();
      json.field("output_tokens", use->completion)
          .key("output_tokens_details")
          .begin_object()
          .field("reasoning_tokens", use->reasoning)
          .end_object();
      json.field("total_tokens", use->prompt + use->completion).end_object();
    }
    json.key("metadata").raw("{}").end_object();
  }

  const Tokenizer& tokenizer_;
  const std::string model_, id_;
  const SamplingOptions sampling_;
  const int max_tokens_;
  const bool logprobs_;
  const int64_t created_;
  std::vector<Item> items_;
  std::vector<LoggedToken> logged_;
  std::string reason_;
  int64_t sequence_ = 0;
};

}  // namespace

std::unique_ptr<AnswerWriter> make_responses_writer(const Service& service, const Prepared& prepared, const std::string& id) {
  return std::make_unique<ResponsesWriter>(service, prepared, id);
}

}  // namespace cachalot::server
