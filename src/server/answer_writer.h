// What an endpoint's answer looks like: the pieces of a stream, or the whole. One object serves one request.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cachalot/engine.h"
#include "server/answer_stream.h"
#include "server/api_error.h"
#include "server/service.h"

namespace cachalot::server {

struct TokenUse {
  int prompt = 0, cached = 0, completion = 0, reasoning = 0;
};

struct LoggedToken {
  int token;
  float logprob;
  std::vector<TokenLogprob> top;
};

struct ToolCall {
  std::string id, name, arguments;
};

// One of the answers of a request.
struct Choice {
  Choice(const Tokenizer& tokenizer, AnswerOptions options) : stream(tokenizer, std::move(options)) {}

  int index = 0;
  RequestId id = -1;
  AnswerStream stream;
  bool done = false;
  std::string finish_reason;  // stop, length, tool_calls, abort; once done
  TokenUse use;
  double queued_seconds = 0, first_token_seconds = 0, seconds = 0;  // from the engine, once done
  // Kept for an answer that is sent whole; in a stream only what is not sent yet.
  std::string reasoning, content;
  std::vector<ToolCall> calls;
  std::vector<LoggedToken> logged;
  std::vector<int> token_ids;
  const std::string* echo = nullptr;                       // the prompt's text, when it is to be repeated
  std::span<const int> prompt;                             // ids
  std::vector<std::vector<TokenLogprob>> prompt_logprobs;  // one per prompt token but the first
};

class AnswerWriter {
 public:
  virtual ~AnswerWriter() = default;

  // A stream: start, any deltas and finishes, then end or fail. Each appends whole server-sent events.
  virtual void start(std::string& out) = 0;
  virtual void delta(Choice& choice, const Delta& delta, std::string& out) = 0;
  virtual void finish(Choice& choice, std::string& out) = 0;
  virtual void end(const TokenUse& use, std::string& out) = 0;
  virtual void fail(const ApiError& error, std::string& out) = 0;
  [[nodiscard]] virtual std::string_view keep_alive() const { return ": keep-alive\n\n"; }
  // The answer as one JSON body.
  virtual std::string whole(std::span<Choice> choices, const TokenUse& use) = 0;
};

std::unique_ptr<AnswerWriter> make_chat_writer(const Service& service, const Prepared& prepared, const std::string& id);
std::unique_ptr<AnswerWriter> make_completion_writer(const Service& service, const Prepared& prepared, const std::string& id);
std::unique_ptr<AnswerWriter> make_messages_writer(const Service& service, const Prepared& prepared, const std::string& id);
std::unique_ptr<AnswerWriter> make_responses_writer(const Service& service, const Prepared& prepared, const std::string& id);

}  // namespace cachalot::server
