// Heads and ends, usage and log probabilities.
#include "server/writer_parts.h"

#include <fmt/format.h>

#include <cmath>
#include <ctime>

namespace cachalot::server {
namespace {

void write_token(JsonWriter& json, const Tokenizer& tokenizer, int token, float logprob) {
  const std::string_view piece = tokenizer.is_special(token) ? tokenizer.token_text(token) : tokenizer.piece(token);
  json.field("token", piece).field("logprob", json_logprob(logprob)).key("bytes").begin_array();
  for (const char c : piece) json.value(static_cast<int>(static_cast<unsigned char>(c)));
  json.end_array();
}

}  // namespace

std::string object_head(const Service& service, std::string_view id, std::string_view object) {
  std::string out = "{\"id\":";
  append_json_string(out, id);
  out += fmt::format(",\"object\":\"{}\",\"created\":{},\"model\":", object, static_cast<int64_t>(std::time(nullptr)));
  append_json_string(out, service.name());
  return out + ",\"system_fingerprint\":null";
}

void end_chunk(const TokenUse* so_far, bool later, std::string& out) {
  if (so_far != nullptr) {
    out += ",\"usage\":";
    JsonWriter json(out);
    write_usage(json, *so_far);
  } else if (later) {
    out += ",\"usage\":null";
  }
  out += "}\n\n";
}

void end_stream(std::string_view head, const TokenUse* use, std::string& out) {
  if (use != nullptr) {
    out += "data: ";
    out += head;
    out += ",\"choices\":[]";
    end_chunk(use, false, out);
  }
  out += "data: [DONE]\n\n";
}

void fail_stream(const ApiError& error, std::string& out) {
  out += "data: " + error_body(error, ApiStyle::openai, {}) + "\n\ndata: [DONE]\n\n";
}

void write_stop_reason(JsonWriter& json, const Choice& choice) {
  json.key("stop_reason");
  if (choice.stream.stopped())
    json.value(choice.stream.stop_string());
  else
    json.null();
}

void write_token_ids(JsonWriter& json, const Choice& choice) {
  json.key("token_ids").begin_array();
  for (const int id : choice.token_ids) json.value(id);
  json.end_array();
}

double json_logprob(float logprob) { return std::isfinite(logprob) ? static_cast<double>(logprob) : -9999.0; }

void write_usage(JsonWriter& json, const TokenUse& use) {
  json.begin_object();
  json.field("prompt_tokens", use.prompt).field("completion_tokens", use.completion).field("total_tokens", use.prompt + use.completion);
  json.key("prompt_tokens_details").begin_object().field("cached_tokens", use.cached).end_object();
  json.key("completion_tokens_details").begin_object().field("reasoning_tokens", use.reasoning).end_object();
  json.field("prompt_cache_hit_tokens", use.cached).field("prompt_cache_miss_tokens", use.prompt - use.cached);
  json.end_object();
}

void write_logprob_list(JsonWriter& json, const Tokenizer& tokenizer, std::span<const LoggedToken> tokens) {
  json.begin_array();
  for (const LoggedToken& token : tokens) {
    json.begin_object();
    write_token(json, tokenizer, token.token, token.logprob);
    json.key("top_logprobs").begin_array();
    for (const TokenLogprob& rival : token.top) {
      json.begin_object();
      write_token(json, tokenizer, rival.token, rival.logprob);
      json.end_object();
    }
    json.end_array().end_object();
  }
  json.end_array();
}

void write_chat_logprobs(JsonWriter& json, const Tokenizer& tokenizer, std::span<const LoggedToken> tokens) {
  json.begin_object().key("content");
  write_logprob_list(json, tokenizer, tokens);
  json.key("refusal").null().end_object();
}

}  // namespace cachalot::server
