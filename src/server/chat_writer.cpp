// /v1/chat/completions.
#include <fmt/format.h>

#include <ctime>

#include "server/writer_parts.h"

namespace cachalot::server {
namespace {

class ChatWriter : public AnswerWriter {
 public:
  ChatWriter(const Service& service, const Prepared& prepared, const std::string& id)
      : tokenizer_(service.tokenizer()),
        logprobs_(prepared.params.logprobs),
        token_ids_(prepared.params.return_token_ids),
        usage_(prepared.params.include_usage),
        every_usage_(prepared.params.continuous_usage),
        n_(prepared.params.n) {
    head_ = "{\"id\":";
    append_json_string(head_, id);
    head_ += ",\"object\":";
    std::string rest;
    rest += fmt::format(",\"created\":{},\"model\":", static_cast<int64_t>(std::time(nullptr)));
    append_json_string(rest, service.name());
    rest += ",\"system_fingerprint\":null";
    whole_ = head_ + "\"chat.completion\"" + rest;
    head_ = "data: " + head_ + "\"chat.completion.chunk\"" + rest;
  }

  void start(std::string& out) override {
    for (int i = 0; i < n_; ++i) {
      open(i, out);
      out += "{\"role\":\"assistant\",\"content\":\"\"}";
      close(nullptr, nullptr, out);
    }
  }

  void delta(Choice& choice, const Delta& delta, std::string& out) override {
    open(choice.index, out);
    JsonWriter json(out);
    json.begin_object();
    if (!delta.reasoning.empty()) json.field("reasoning_content", delta.reasoning).field("reasoning", delta.reasoning);
    if (!delta.content.empty()) json.field("content", delta.content);
    if (!delta.calls.empty()) {
      json.key("tool_calls").begin_array();
      for (const ToolCallDelta& call : delta.calls) {
        json.begin_object().field("index", call.index);
        if (!call.id.empty()) json.field("id", call.id).field("type", "function");
        json.key("function").begin_object();
        if (!call.id.empty()) json.field("name", call.name);
        json.field("arguments", call.arguments).end_object().end_object();
      }
      json.end_array();
    }
    json.end_object();
    close(&choice, nullptr, out);
  }

  void finish(Choice& choice, std::string& out) override {
    open(choice.index, out);
    out += "{}";
    close(&choice, choice.finish_reason.c_str(), out);
  }

  void end(const TokenUse& use, std::string& out) override {
    if (usage_) {
      out += head_;
      out += ",\"choices\":[],\"usage\":";
      JsonWriter json(out);
      write_usage(json, use);
      out += "}\n\n";
    }
    out += "data: [DONE]\n\n";
  }

  void fail(const ApiError& error, std::string& out) override {
    out += "data: " + error_body(error, ApiStyle::openai, {}) + "\n\ndata: [DONE]\n\n";
  }

  std::string whole(std::span<Choice> choices, const TokenUse& use) override {
    std::string out = whole_;
    out += ",\"choices\":";
    JsonWriter json(out);
    json.begin_array();
    for (const Choice& choice : choices) {
      json.begin_object().field("index", choice.index).key("message");
      write_message(json, choice);
      json.key("logprobs");
      if (logprobs_)
        write_chat_logprobs(json, tokenizer_, choice.logged);
      else
        json.null();
      json.field("finish_reason", choice.finish_reason);
      write_stop_reason(json, choice);
      if (token_ids_) {
        json.key("token_ids");
        write_ids(json, choice);
      }
      json.end_object();
    }
    json.end_array();
    out += ",\"usage\":";
    JsonWriter usage(out);
    write_usage(usage, use);
    out += "}";
    return out;
  }

 private:
  void open(int index, std::string& out) const {
    out += head_;
    out += ",\"choices\":[{\"index\":";
    out += std::to_string(index);
    out += ",\"delta\":";
  }

  // What is logged since the last chunk goes with this one.
  void close(Choice* choice, const char* reason, std::string& out) const {
    if (logprobs_ && choice != nullptr && !choice->logged.empty()) {
      out += ",\"logprobs\":";
      JsonWriter json(out);
      write_chat_logprobs(json, tokenizer_, choice->logged);
      choice->logged.clear();
    } else {
      out += ",\"logprobs\":null";
    }
    out += ",\"finish_reason\":";
    if (reason != nullptr) {
      append_json_string(out, reason);
      out += ",\"stop_reason\":";
      if (choice->stream.stopped())
        append_json_string(out, choice->stream.stop_string());
      else
        out += "null";
    } else {
      out += "null";
    }
    if (token_ids_ && choice != nullptr) {
      out += ",\"token_ids\":";
      JsonWriter json(out);
      write_ids(json, *choice);
      choice->token_ids.clear();
    }
    out += "}]";
    if (every_usage_ && choice != nullptr) {
      out += ",\"usage\":";
      JsonWriter json(out);
      write_usage(json, choice->use);
    } else if (usage_) {
      out += ",\"usage\":null";
    }
    out += "}\n\n";
  }

  static void write_message(JsonWriter& json, const Choice& choice) {
    json.begin_object().field("role", "assistant").key("content");
    if (choice.content.empty() && !choice.calls.empty())
      json.null();
    else
      json.value(choice.content);
    json.key("refusal").null();
    if (!choice.reasoning.empty()) json.field("reasoning_content", choice.reasoning).field("reasoning", choice.reasoning);
    if (!choice.calls.empty()) {
      json.key("tool_calls").begin_array();
      for (const ToolCall& call : choice.calls) {
        json.begin_object().field("id", call.id).field("type", "function").key("function").begin_object();
        json.field("name", call.name).field("arguments", call.arguments).end_object().end_object();
      }
      json.end_array();
    }
    json.end_object();
  }

  // vLLM's: the stop string that ended the text.
  static void write_stop_reason(JsonWriter& json, const Choice& choice) {
    json.key("stop_reason");
    if (choice.stream.stopped())
      json.value(choice.stream.stop_string());
    else
      json.null();
  }

  static void write_ids(JsonWriter& json, const Choice& choice) {
    json.begin_array();
    for (const int id : choice.token_ids) json.value(id);
    json.end_array();
  }

  const Tokenizer& tokenizer_;
  const bool logprobs_, token_ids_, usage_, every_usage_;
  const int n_;
  std::string head_, whole_;
};

}  // namespace

std::unique_ptr<AnswerWriter> make_chat_writer(const Service& service, const Prepared& prepared, const std::string& id) {
  return std::make_unique<ChatWriter>(service, prepared, id);
}

}  // namespace cachalot::server
