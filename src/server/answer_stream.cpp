// ReasoningSplitter and AnswerStream.
#include "server/answer_stream.h"

#include <algorithm>

namespace cachalot::server {
namespace {

constexpr std::string_view kOpen = "<think>";
const std::vector<std::string_view> kClose = {"</think>"};
constexpr std::string_view kLineEnds = "\r\n";

}  // namespace

void ReasoningSplitter::add_reasoning(std::string_view text, std::string& reasoning) {
  if (state_ == State::inside_start) {
    text.remove_prefix(std::min(text.find_first_not_of(kLineEnds), text.size()));
    if (text.empty()) return;
    state_ = State::inside;
  }
  held_ += text;
  const size_t last = held_.find_last_not_of(kLineEnds);
  if (last == std::string::npos) return;
  reasoning.append(held_, 0, last + 1);
  held_.erase(0, last + 1);
}

void ReasoningSplitter::push(std::string_view text, std::string& reasoning, std::string& rest) {
  std::string decided;
  if (state_ == State::undecided) {
    held_ += text;
    const size_t begin = std::min(held_.find_first_not_of(" \t\r\n"), held_.size());
    const std::string_view word = std::string_view(held_).substr(begin);
    if (word.size() < kOpen.size() && kOpen.starts_with(word)) return;
    const bool opens = word.starts_with(kOpen);
    decided = opens ? std::string(word.substr(kOpen.size())) : held_;
    held_.clear();
    state_ = opens ? State::inside_start : State::rest;
    text = decided;
  }
  if (inside()) {
    scanner_.push(text);
    const TagScanner::Found found = scanner_.next(kClose);
    add_reasoning(found.text, reasoning);
    if (found.tag < 0) return;
    held_.clear();
    state_ = State::after;
    decided = scanner_.rest();
    text = decided;
  }
  if (state_ == State::after) {
    text.remove_prefix(std::min(text.find_first_not_of(kLineEnds), text.size()));
    if (text.empty()) return;
    state_ = State::rest;
  }
  rest += text;
}

void ReasoningSplitter::finish(std::string& reasoning, std::string& rest) {
  if (state_ == State::undecided) rest += held_;
  if (inside()) {
    add_reasoning(scanner_.rest(), reasoning);
  }
  held_.clear();
}

AnswerStream::AnswerStream(const Tokenizer& tokenizer, AnswerOptions options)
    : tokenizer_(tokenizer),
      skip_special_(options.skip_special),
      tool_format_(options.tool_format),
      stops_(std::move(options.stops), options.include_stop),
      tools_(make_tool_parser(options.tool_format)) {
  if (options.parse_reasoning || options.inside_reasoning) reasoning_ = std::make_unique<ReasoningSplitter>(options.inside_reasoning);
}

bool AnswerStream::push(int token, Delta& out) {
  if (stopped()) return false;
  if (reasoning_ && reasoning_->inside()) ++reasoning_tokens_;
  if (skip_special_ && tokenizer_.is_special(token)) {
    const auto& marks = tool_marks(tool_format_);
    const std::string_view spelling = tokenizer_.token_text(token);
    const bool thinks = reasoning_ && (spelling == kOpen || spelling == kClose.front());
    if (!thinks && std::find(marks.begin(), marks.end(), spelling) == marks.end()) return true;
    // A control token's piece may be empty of bytes; its spelling is what the parser looks for.
    take(characters_.push(spelling), out);
  } else {
    take(characters_.push(tokenizer_.piece(token)), out);
  }
  return !stopped();
}

void AnswerStream::take(std::string_view text, Delta& out) {
  if (text.empty()) return;
  if (!reasoning_) {
    take_rest(text, out);
    return;
  }
  std::string rest;
  reasoning_->push(text, out.reasoning, rest);
  take_rest(rest, out);
}

void AnswerStream::take_rest(std::string_view text, Delta& out) {
  if (text.empty()) return;
  const StopMatcher::Result result = stops_.push(text);
  if (tools_)
    tools_->push(result.text, out);
  else
    out.content += result.text;
}

void AnswerStream::finish(Delta& out) {
  take(characters_.finish(), out);
  if (reasoning_) {
    std::string rest;
    reasoning_->finish(out.reasoning, rest);
    take_rest(rest, out);
  }
  const std::string held = stops_.flush();
  if (tools_) {
    tools_->push(held, out);
    tools_->finish(out);
  } else {
    out.content += held;
  }
}

}  // namespace cachalot::server
