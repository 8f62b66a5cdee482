// From tokens to what a client sees: reasoning, content and tool calls, as they become certain.
//
// token -> bytes -> whole characters -> reasoning | rest; rest -> stop strings -> tool calls | content. The result does not depend on how
// the text falls into tokens. Stop strings count in the answer only, not while the model is thinking.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/tag_scanner.h"
#include "server/tool_parser.h"
#include "text/detokenizer.h"
#include "text/stop.h"

namespace cachalot::server {

// Splits text into reasoning and the rest at </think>. Line ends around the tags belong to neither.
class ReasoningSplitter {
 public:
  // `inside`: the prompt left a reasoning part open. Otherwise one begins where the answer's first word is <think>.
  explicit ReasoningSplitter(bool inside) : state_(inside ? State::inside_start : State::undecided) {}

  void push(std::string_view text, std::string& reasoning, std::string& rest);
  void finish(std::string& reasoning, std::string& rest);
  [[nodiscard]] bool inside() const { return state_ == State::inside || state_ == State::inside_start; }

 private:
  enum class State : uint8_t { undecided, inside_start, inside, after, rest };
  void add_reasoning(std::string_view text, std::string& reasoning);

  State state_;
  TagScanner scanner_;
  std::string held_;  // undecided: all so far; inside: line ends that may stand before the closing tag
};

struct AnswerOptions {
  bool parse_reasoning = false, inside_reasoning = false;
  ToolFormat tool_format = ToolFormat::none;
  std::vector<std::string> stops;
  bool include_stop = false;
  bool skip_special = true;  // control tokens are no text, but for the marks of the tool format
};

class AnswerStream {
 public:
  // The tokenizer must outlive this.
  AnswerStream(const Tokenizer& tokenizer, AnswerOptions options);

  // False when a stop string is complete: no more text follows, later tokens change nothing.
  bool push(int token, Delta& out);
  // The tokens ended: tells what was held back.
  void finish(Delta& out);

  [[nodiscard]] bool stopped() const { return stops_.stopped(); }
  [[nodiscard]] const std::string& stop_string() const { return stops_.matched(); }  // only once stopped()
  [[nodiscard]] int tool_calls() const { return tools_ ? tools_->calls() : 0; }
  [[nodiscard]] bool inside_call() const { return tools_ && tools_->inside_call(); }
  [[nodiscard]] int reasoning_tokens() const { return reasoning_tokens_; }

 private:
  void take(std::string_view text, Delta& out);
  void take_rest(std::string_view text, Delta& out);

  const Tokenizer& tokenizer_;
  const bool skip_special_;
  const ToolFormat tool_format_;
  Utf8Stream characters_;
  std::unique_ptr<ReasoningSplitter> reasoning_;
  StopMatcher stops_;
  std::unique_ptr<ToolParser> tools_;
  int reasoning_tokens_ = 0;
};

}  // namespace cachalot::server
