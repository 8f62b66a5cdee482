// Anthropic's /v1/messages.
#include <simdjson.h>

#include "server/writer_parts.h"

namespace cachalot::server {
namespace {

const char* stop_reason_of(const Choice& choice) {
  if (choice.finish_reason == "length") return "max_tokens";
  if (choice.finish_reason == "tool_calls") return "tool_use";
  return choice.stream.stopped() ? "stop_sequence" : "end_turn";
}

// Chat's ids begin with call_, Anthropic's with toolu_.
std::string tool_id(const std::string& id) { return "toolu_" + id.substr(id.find('_') + 1); }

class MessagesWriter : public AnswerWriter {
 public:
  MessagesWriter(const Service& service, const Prepared& prepared, std::string id)
      : model_(service.name()), id_(std::move(id)), n_prompt_(static_cast<int>(prepared.prompts.front().size())) {}

  void start(std::string& out) override {
    event("message_start", out, [&](JsonWriter& json) {
      json.key("message").begin_object();
      write_head(json);
      json.key("content").begin_array().end_array().key("stop_reason").null().key("stop_sequence").null();
      json.key("usage").begin_object().field("input_tokens", n_prompt_).field("output_tokens", 0).end_object().end_object();
    });
  }

  void delta(Choice&, const Delta& delta, std::string& out) override {
    if (!delta.reasoning.empty()) {
      open(Block::thinking, out, [](JsonWriter& json) { json.field("type", "thinking").field("thinking", "").field("signature", ""); });
      block_delta(out, [&](JsonWriter& json) { json.field("type", "thinking_delta").field("thinking", delta.reasoning); });
    }
    if (!delta.content.empty()) {
      open(Block::text, out, [](JsonWriter& json) { json.field("type", "text").field("text", ""); });
      block_delta(out, [&](JsonWriter& json) { json.field("type", "text_delta").field("text", delta.content); });
    }
    for (const ToolCallDelta& call : delta.calls) {
      if (!call.id.empty()) {
        close(out);
        open(Block::tool, out, [&](JsonWriter& json) {
          json.field("type", "tool_use").field("id", tool_id(call.id)).field("name", call.name).key("input").begin_object().end_object();
        });
      }
      if (!call.arguments.empty())
        block_delta(out, [&](JsonWriter& json) { json.field("type", "input_json_delta").field("partial_json", call.arguments); });
    }
  }

  void finish(Choice& choice, std::string& out) override {
    close(out);
    event("message_delta", out, [&](JsonWriter& json) {
      json.key("delta").begin_object();
      write_stop(json, choice);
      json.end_object().key("usage");
      write_messages_usage(json, choice.use);
    });
  }

  void end(const TokenUse&, std::string& out) override {
    event("message_stop", out, [](JsonWriter&) {});
  }

  void fail(const ApiError& error, std::string& out) override {
    close(out);
    out += "event: error\ndata: " + error_body(error, ApiStyle::anthropic, id_) + "\n\n";
  }

  [[nodiscard]] std::string_view keep_alive() const override { return "event: ping\ndata: {\"type\":\"ping\"}\n\n"; }

  std::string whole(std::span<Choice> choices, const TokenUse& use) override {
    const Choice& choice = choices.front();
    std::string out;
    JsonWriter json(out);
    json.begin_object();
    write_head(json);
    json.key("content").begin_array();
    if (!choice.reasoning.empty())
      json.begin_object().field("type", "thinking").field("thinking", choice.reasoning).field("signature", "").end_object();
    if (!choice.content.empty()) json.begin_object().field("type", "text").field("text", choice.content).end_object();
    for (const ToolCall& call : choice.calls) {
      json.begin_object().field("type", "tool_use").field("id", tool_id(call.id)).field("name", call.name).key("input");
      // A call that was cut short is no JSON.
      simdjson::dom::parser parser;
      json.raw(parser.parse(call.arguments).error() == simdjson::SUCCESS ? std::string_view(call.arguments) : "{}");
      json.end_object();
    }
    json.end_array();
    write_stop(json, choice);
    json.key("usage");
    write_messages_usage(json, use);
    json.end_object();
    return out;
  }

 private:
  enum class Block : uint8_t { none, thinking, text, tool };

  template <typename F>
  void event(std::string_view type, std::string& out, F&& fields) const {
    out += "event: ";
    out += type;
    out += "\ndata: ";
    JsonWriter json(out);
    json.begin_object().field("type", type);
    fields(json);
    json.end_object();
    out += "\n\n";
  }

  template <typename F>
  void open(Block block, std::string& out, F&& fields) {
    if (block_ == block) return;
    close(out);
    block_ = block;
    event("content_block_start", out, [&](JsonWriter& json) {
      json.field("index", index_).key("content_block").begin_object();
      fields(json);
      json.end_object();
    });
  }

  template <typename F>
  void block_delta(std::string& out, F&& fields) const {
    event("content_block_delta", out, [&](JsonWriter& json) {
      json.field("index", index_).key("delta").begin_object();
      fields(json);
      json.end_object();
    });
  }

  void close(std::string& out) {
    if (block_ == Block::none) return;
    block_ = Block::none;
    event("content_block_stop", out, [&](JsonWriter& json) { json.field("index", index_); });
    ++index_;
  }

  void write_head(JsonWriter& json) const {
    json.field("id", id_).field("type", "message").field("role", "assistant").field("model", model_);
  }

  static void write_stop(JsonWriter& json, const Choice& choice) {
    json.field("stop_reason", stop_reason_of(choice)).key("stop_sequence");
    if (choice.stream.stopped())
      json.value(choice.stream.stop_string());
    else
      json.null();
  }

  // Anthropic counts what came from the cache apart.
  static void write_messages_usage(JsonWriter& json, const TokenUse& use) {
    json.begin_object().field("input_tokens", use.prompt - use.cached).field("cache_creation_input_tokens", 0);
    json.field("cache_read_input_tokens", use.cached).field("output_tokens", use.completion).end_object();
  }

  const std::string model_, id_;
  const int n_prompt_;
  Block block_ = Block::none;
  int index_ = 0;
};

}  // namespace

std::unique_ptr<AnswerWriter> make_messages_writer(const Service& service, const Prepared& prepared, const std::string& id) {
  return std::make_unique<MessagesWriter>(service, prepared, id);
}

}  // namespace cachalot::server
