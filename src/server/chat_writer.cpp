// /v1/chat/completions.
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
        n_(prepared.params.n),
        head_(object_head(service, id, prepared.params.stream ? "chat.completion.chunk" : "chat.completion")) {}

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

  void end(const TokenUse& use, std::string& out) override { end_stream(head_, usage_ ? &use : nullptr, out); }
  void fail(const ApiError& error, std::string& out) override { fail_stream(error, out); }

  std::string whole(std::span<Choice> choices, const TokenUse& use) override {
    std::string out = head_;
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
      if (token_ids_) write_token_ids(json, choice);
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
    out += "data: ";
    out += head_;
    out += ",\"choices\":[{\"index\":";
    out += std::to_string(index);
    out += ",\"delta\":";
  }

  // What is logged since the last chunk goes with this one.
  void close(Choice* choice, const char* reason, std::string& out) const {
    out += ',';
    JsonWriter json(out);
    json.key("logprobs");
    if (logprobs_ && choice != nullptr && !choice->logged.empty()) {
      write_chat_logprobs(json, tokenizer_, choice->logged);
      choice->logged.clear();
    } else {
      json.null();
    }
    json.key("finish_reason");
    if (reason != nullptr) {
      json.value(reason);
      write_stop_reason(json, *choice);
    } else {
      json.null();
    }
    if (token_ids_ && choice != nullptr) {
      write_token_ids(json, *choice);
      choice->token_ids.clear();
    }
    out += "}]";
    end_chunk(every_usage_ && choice != nullptr ? &choice->use : nullptr, usage_, out);
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

  const Tokenizer& tokenizer_;
  const bool logprobs_, token_ids_, usage_, every_usage_;
  const int n_;
  const std::string head_;
};

}  // namespace

std::unique_ptr<AnswerWriter> make_chat_writer(const Service& service, const Prepared& prepared, const std::string& id) {
  return std::make_unique<ChatWriter>(service, prepared, id);
}

}  // namespace cachalot::server
