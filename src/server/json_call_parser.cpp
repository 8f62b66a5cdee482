// A scanner that reads one JSON object character by character and knows at each whether it is part of the arguments.
#include "server/json_call_parser.h"

#include <simdjson.h>

#include <algorithm>
#include <utility>

#include "server/tag_scanner.h"

namespace cachalot::server {
namespace {

constexpr size_t kMaxKey = 64, kMaxName = 256;

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

std::string unescaped(const std::string& json_string) {
  simdjson::dom::parser parser;
  std::string_view text;
  if (parser.parse(json_string).get(text) != simdjson::SUCCESS) return {};
  return std::string(text);
}

class CallScanner {
 public:
  enum class Event : uint8_t { none, name, argument, arguments_end, done, bad };

  // What `c` means: `name` when name() is complete; `argument` when c is part of the arguments' value; arguments_end when that value ended
  // before c (which is then part of what follows) or with it; done with the object's last brace; bad when this is no call.
  Event push(char c) {
    raw_ += c;
    switch (state_) {
      case State::before_object:
        if (is_space(c)) return Event::none;
        return to(c == '{' ? State::before_key : State::broken);
      case State::before_key:
        if (is_space(c) || (c == ',' && any_member_)) return Event::none;
        if (c == '}') return finish_object();
        text_ = "\"";
        return to(c == '"' ? State::key : State::broken);
      case State::key:
        if (text_.size() > kMaxKey) return to(State::broken);
        text_ += c;
        if (!string_ends(c)) return Event::none;
        key_ = unescaped(text_);
        return to(State::colon);
      case State::colon:
        if (is_space(c)) return Event::none;
        return to(c == ':' ? State::before_value : State::broken);
      case State::before_value:
        if (is_space(c)) return Event::none;
        any_member_ = true;
        return begin_value(c);
      case State::name:
        if (text_.size() > kMaxName) return to(State::broken);
        text_ += c;
        if (!string_ends(c)) return Event::none;
        name_ = unescaped(text_);
        if (name_.empty()) return to(State::broken);
        state_ = State::before_key;
        return Event::name;
      case State::value: return continue_value(c);
      case State::done:
      case State::broken: return Event::bad;
    }
    return Event::bad;
  }

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const std::string& raw() const { return raw_; }

 private:
  enum class State : uint8_t { before_object, before_key, key, colon, before_value, name, value, done, broken };

  Event to(State next) {
    state_ = next;
    return next == State::broken ? Event::bad : Event::none;
  }

  Event finish_object() {
    state_ = name_.empty() ? State::broken : State::done;
    return name_.empty() ? Event::bad : Event::done;
  }

  // True when c ends the string that is being read.
  bool string_ends(char c) {
    if (escaped_) {
      escaped_ = false;
      return false;
    }
    escaped_ = c == '\\';
    return c == '"';
  }

  Event begin_value(char c) {
    if (key_ == "name") {
      text_ = "\"";
      return to(c == '"' && name_.empty() ? State::name : State::broken);
    }
    is_arguments_ = key_ == "arguments" || key_ == "parameters";
    if (!is_arguments_ && key_ != "type" && key_ != "id" && key_ != "function") return to(State::broken);
    if (is_arguments_ && c != '{') return to(State::broken);
    state_ = State::value;
    depth_ = 0;
    in_string_ = false;
    return continue_value(c);
  }

  Event continue_value(char c) {
    const Event part = is_arguments_ ? Event::argument : Event::none;
    if (in_string_) {
      in_string_ = !string_ends(c);
      return part;
    }
    if (c == '"') {
      in_string_ = true;
    } else if (c == '{' || c == '[') {
      ++depth_;
    } else if (c == '}' || c == ']') {
      if (depth_ == 0) return finish_object();  // behind a number or a word
      if (--depth_ == 0) state_ = State::before_key;
    } else if (c == ',' && depth_ == 0) {
      state_ = State::before_key;
      return Event::none;
    }
    if (depth_ == 0 && state_ == State::before_key && is_arguments_) return Event::arguments_end;
    return part;
  }

  State state_ = State::before_object;
  std::string raw_, text_, key_, name_;
  bool escaped_ = false, in_string_ = false, is_arguments_ = false, any_member_ = false;
  int depth_ = 0;
};

class JsonCallParser : public ToolParser {
 public:
  explicit JsonCallParser(bool tagged) : tagged_(tagged), outside_(tagged) {}

  void push(std::string_view text, Delta& out) override {
    scanner_.push(text);
    while (step(out)) {
    }
  }

  void finish(Delta& out) override {
    feed(scanner_.rest(), out);
    if (!outside_ && !announced_) fall_back(out);
    out.content += blank_;
    blank_.clear();
    end_call(out);
  }

 private:
  bool step(Delta& out) {
    static const std::vector<std::string_view> begin = {"<tool_call>"}, end = {"</tool_call>"}, python = {"<|python_tag|>"};
    if (!tagged_) {
      const auto [text, tag] = scanner_.next(python);
      feed(text, out);
      return tag >= 0;  // the tag says nothing that the object does not
    }
    if (outside_) {
      const auto [text, tag] = scanner_.next(begin);
      add_content(text, out);
      if (tag >= 0) start();
      return tag >= 0;
    }
    auto [text, tag] = scanner_.next(end);
    if (tag >= 0) text += end.front();
    const size_t call_size = text.size() - (tag >= 0 ? end.front().size() : 0);
    for (size_t i = 0; i < call_size; ++i) {
      take(text[i], out);
      if (!outside_) continue;
      scanner_.put_back(std::string_view(text).substr(i + 1));  // no call after all: other tags count in what follows
      return true;
    }
    if (tag < 0) return false;
    if (announced_) {
      end_call(out);
      outside_ = after_call_ = true;
    } else {
      fall_back(out);
      scanner_.put_back(end.front());
    }
    return true;
  }

  void start() {
    outside_ = announced_ = ended_ = false;
    buffered_.clear();
    call_ = CallScanner();
  }

  void feed(std::string_view text, Delta& out) {
    for (size_t i = 0; i < text.size(); ++i) {
      if (outside_) {
        add_content(text.substr(i), out);
        return;
      }
      take(text[i], out);
    }
  }

  // White space between and behind calls belongs to the format; elsewhere it is content, held until it is known whether a call follows.
  void add_content(std::string_view text, Delta& out) {
    if (after_call_) text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
    if (text.empty()) return;
    after_call_ = false;
    blank_ += text;
    const size_t last = blank_.find_last_not_of(" \t\r\n");
    if (last == std::string::npos) return;
    out.content.append(blank_, 0, last + 1);
    blank_.erase(0, last + 1);
  }

  void take(char c, Delta& out) {
    using Event = CallScanner::Event;
    if (ended_) {
      // Behind a whole object: Llama separates several by ';', anything else is dropped with the call's tag.
      if (!tagged_ && c == '{') {
        start();
        take(c, out);
      }
      return;
    }
    switch (call_.push(c)) {
      case Event::none: break;
      case Event::name:
        if (!buffered_.empty()) announce(out);
        break;
      case Event::argument:
      case Event::arguments_end:
        if (!announced_ && !call_.name().empty()) announce(out);
        if (announced_)
          add_arguments({&c, 1}, out);
        else
          buffered_ += c;
        break;
      case Event::done:
        if (!announced_) {
          // Any JSON may have a name: without arguments and without a tag around it this is an answer.
          if (!tagged_) {
            fall_back(out);
            return;
          }
          announce(out);
        }
        end_call(out);
        ended_ = true;
        break;
      case Event::bad:
        if (announced_) {
          add_arguments({&c, 1}, out);  // a call that went wrong midway: all of it is shown as it came
        } else {
          fall_back(out);
        }
    }
  }

  void announce(Delta& out) {
    blank_.clear();
    begin_call(call_.name(), out);
    announced_ = true;
    add_arguments(buffered_, out);
  }

  // No call after all: its text is content.
  void fall_back(Delta& out) {
    out.content += std::exchange(blank_, {});
    out.content += tagged_ ? "<tool_call>" : "";
    out.content += call_.raw();
    outside_ = true;
  }

  const bool tagged_;
  bool outside_, announced_ = false, ended_ = false, after_call_ = false;
  TagScanner scanner_;
  CallScanner call_;
  std::string blank_, buffered_;
};

}  // namespace

std::unique_ptr<ToolParser> make_json_call_parser(bool tagged) { return std::make_unique<JsonCallParser>(tagged); }

}  // namespace cachalot::server
