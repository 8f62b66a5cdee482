// The tag formats: DeepSeek V3, V3.1, V3.2.
#include "server/tool_parser.h"

#include <simdjson.h>

#include <random>

#include "server/json_call_parser.h"
#include "server/json_writer.h"
#include "server/tag_scanner.h"

namespace cachalot::server {
namespace {

constexpr std::string_view kSpace = " \t\r\n";

std::string_view trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

// <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>HEAD<｜tool▁sep｜>BODY<｜tool▁call▁end｜>...<｜tool▁calls▁end｜>
// V3, R1: HEAD is the type, BODY the name, a line end, and the arguments in a ```json fence. V3.1: HEAD is the name, BODY the arguments.
class DeepSeekParser : public ToolParser {
 public:
  explicit DeepSeekParser(bool fenced) : fenced_(fenced) {}

  void push(std::string_view text, Delta& out) override {
    scanner_.push(text);
    while (step(out)) {
    }
  }

  void finish(Delta& out) override {
    const std::string rest = scanner_.rest();
    if (state_ == State::content) out.content += rest;
    if (state_ == State::arguments) add_arguments(rest, out);
    if (state_ == State::fence) add_arguments(trimmed(fence_ + rest), out);
    if (state_ != State::content) end_call(out);
  }

 private:
  enum class State : uint8_t { content, between, head, name, fence, arguments, tail };

  // Handles one tag; false when more text is needed.
  bool step(Delta& out) {
    static const std::vector<std::string_view> begin = {"<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"};
    static const std::vector<std::string_view> next = {"<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"};
    static const std::vector<std::string_view> head = {"<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"};
    static const std::vector<std::string_view> name = {"\n", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"};
    static const std::vector<std::string_view> fence = {"```json\n", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"};
    static const std::vector<std::string_view> fenced = {"\n```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"};
    static const std::vector<std::string_view> end = {"<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"};
    switch (state_) {
      case State::content: {
        auto [text, tag] = scanner_.next(begin);
        out.content += text;
        if (tag == 0) state_ = State::between;
        if (tag == 1) state_ = State::head;
        return tag >= 0;
      }
      case State::between: {
        const auto [text, tag] = scanner_.next(next);
        if (tag == 0) state_ = State::head;
        if (tag == 1) state_ = State::content;
        return tag >= 0;
      }
      case State::head: {
        const auto [text, tag] = scanner_.next(head);
        head_ += text;
        if (tag < 0) return false;
        if (tag == 0 && fenced_) {
          state_ = State::name;
        } else {
          if (!fenced_) begin_call(std::string(trimmed(head_)), out);
          leave(tag == 0 ? State::arguments : state_after(tag - 1), out);
        }
        head_.clear();
        return true;
      }
      case State::name: {
        const auto [text, tag] = scanner_.next(name);
        name_ += text;
        if (tag < 0) return false;
        begin_call(std::string(trimmed(name_)), out);
        name_.clear();
        leave(tag == 0 ? State::fence : state_after(tag - 1), out);
        return true;
      }
      case State::fence: {
        // Some calls come without a fence: then all up to the end tag are arguments.
        if (trimmed(fence_).empty() && trimmed(scanner_.waiting()).starts_with('{')) {
          fence_.clear();
          fence_open_ = false;
          state_ = State::arguments;
          return true;
        }
        const auto [text, tag] = scanner_.next(fence);
        fence_ += text;
        if (tag < 0) return false;
        fence_open_ = tag == 0;
        if (!fence_open_) add_arguments(trimmed(fence_), out);
        fence_.clear();
        leave(fence_open_ ? State::arguments : state_after(tag - 1), out);
        return true;
      }
      case State::arguments: {
        const auto [text, tag] = scanner_.next(fence_open_ ? fenced : end);
        add_arguments(text, out);
        if (tag < 0) return false;
        leave(fence_open_ && tag == 0 ? State::tail : state_after(fence_open_ ? tag - 1 : tag), out);
        return true;
      }
      case State::tail: {
        const auto [text, tag] = scanner_.next(end);
        if (tag >= 0) leave(state_after(tag), out);
        return tag >= 0;
      }
    }
    return false;
  }

  // After the end of one call (0) or of all (1).
  static State state_after(int end_tag) { return end_tag == 0 ? State::between : State::content; }

  void leave(State next, Delta& out) {
    state_ = next;
    if (next == State::between || next == State::content) end_call(out);
  }

  const bool fenced_;
  bool fence_open_ = false;
  State state_ = State::content;
  TagScanner scanner_;
  std::string head_, name_, fence_;
};

// <｜DSML｜function_calls><｜DSML｜invoke name="F"><｜DSML｜parameter name="P"
// string="true">VALUE</｜DSML｜parameter>...</｜DSML｜invoke>...
class DsmlParser : public ToolParser {
 public:
  void push(std::string_view text, Delta& out) override {
    scanner_.push(text);
    while (step(out)) {
    }
  }

  void finish(Delta& out) override {
    const std::string rest = scanner_.rest();
    if (state_ == State::content) out.content += held_ + rest;
    if (state_ == State::value && is_text_) add_escaped(rest, out);
    if (state_ == State::value) end_value(out);
    if (inside_call()) end_invoke(out);
  }

 private:
  enum class State : uint8_t { content, calls, invoke_head, invoke, parameter_head, value };

  bool step(Delta& out) {
    static const std::vector<std::string_view> begin = {"<｜DSML｜function_calls>"};
    static const std::vector<std::string_view> calls = {"<｜DSML｜invoke", "</｜DSML｜function_calls>"};
    static const std::vector<std::string_view> invoke = {"<｜DSML｜parameter", "</｜DSML｜invoke>", "</｜DSML｜function_calls>"};
    static const std::vector<std::string_view> head_end = {">"};
    static const std::vector<std::string_view> value_end = {"</｜DSML｜parameter>"};
    switch (state_) {
      case State::content: {
        const auto [text, tag] = scanner_.next(begin);
        add_content(text, out);
        if (tag < 0) return false;
        held_.clear();  // the blank line that the format puts before the calls
        state_ = State::calls;
        return true;
      }
      case State::calls: {
        const auto [text, tag] = scanner_.next(calls);
        if (tag == 0) state_ = State::invoke_head;
        if (tag == 1) state_ = State::content;
        return tag >= 0;
      }
      case State::invoke_head: {
        const auto [text, tag] = scanner_.next(head_end);
        head_ += text;
        if (tag < 0) return false;
        begin_call(attribute(head_, "name"), out);
        head_.clear();
        first_ = true;
        state_ = State::invoke;
        return true;
      }
      case State::invoke: {
        const auto [text, tag] = scanner_.next(invoke);
        if (tag < 0) return false;
        if (tag == 0) {
          state_ = State::parameter_head;
        } else {
          end_invoke(out);
          state_ = tag == 1 ? State::calls : State::content;
        }
        return true;
      }
      case State::parameter_head: {
        const auto [text, tag] = scanner_.next(head_end);
        head_ += text;
        if (tag < 0) return false;
        is_text_ = attribute(head_, "string") != "false";
        std::string json = first_ ? "{" : ", ";
        append_json_string(json, attribute(head_, "name"));
        json += is_text_ ? ": \"" : ": ";
        add_arguments(json, out);
        head_.clear();
        first_ = false;
        state_ = State::value;
        return true;
      }
      case State::value: {
        const auto [text, tag] = scanner_.next(value_end);
        if (is_text_)
          add_escaped(text, out);
        else
          value_ += text;
        if (tag < 0) return false;
        end_value(out);
        state_ = State::invoke;
        return true;
      }
    }
    return false;
  }

  // Blank lines before the calls belong to the format.
  void add_content(std::string_view text, Delta& out) {
    held_ += text;
    const size_t last = held_.find_last_not_of(kSpace);
    if (last == std::string::npos) return;
    out.content.append(held_, 0, last + 1);
    held_.erase(0, last + 1);
  }

  void add_escaped(std::string_view text, Delta& out) {
    std::string json;
    append_json_escaped(json, text);
    add_arguments(json, out);
  }

  // A value that is no JSON after all is passed on as text.
  void end_value(Delta& out) {
    if (is_text_) {
      add_arguments("\"", out);
      return;
    }
    simdjson::dom::parser parser;
    const std::string padded = value_;
    if (parser.parse(padded).error() == simdjson::SUCCESS) {
      add_arguments(trimmed(value_), out);
    } else {
      std::string json;
      append_json_string(json, value_);
      add_arguments(json, out);
    }
    value_.clear();
  }

  void end_invoke(Delta& out) {
    if (!first_) add_arguments("}", out);
    end_call(out);
  }

  static std::string attribute(std::string_view head, std::string_view name) {
    const std::string start = std::string(name) + "=\"";
    const size_t at = head.find(start);
    if (at == std::string_view::npos) return {};
    const size_t begin = at + start.size();
    return std::string(head.substr(begin, head.find('"', begin) - begin));
  }

  State state_ = State::content;
  TagScanner scanner_;
  std::string head_, value_, held_;
  bool is_text_ = false, first_ = true;
};

}  // namespace

std::string random_id(std::string_view prefix) {
  static thread_local std::mt19937_64 random{std::random_device{}()};
  constexpr std::string_view kLetters = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
  std::string id(prefix);
  for (int i = 0; i < 24; ++i) id += kLetters[random() % kLetters.size()];
  return id;
}

void ToolParser::begin_call(std::string name, Delta& out) {
  out.calls.push_back({calls_++, random_id("call_"), std::move(name), {}});
  open_ = true;
  has_arguments_ = false;
  held_space_.clear();
}

void ToolParser::add_arguments(std::string_view json, Delta& out) {
  if (!has_arguments_) json.remove_prefix(std::min(json.find_first_not_of(kSpace), json.size()));
  if (json.empty()) return;
  const size_t last = json.find_last_not_of(kSpace);
  std::string text;
  if (last != std::string_view::npos) {
    text = held_space_;
    text += json.substr(0, last + 1);
    held_space_ = json.substr(last + 1);
    has_arguments_ = true;
  } else {
    held_space_ += json;
    return;
  }
  if (!out.calls.empty() && out.calls.back().index == calls_ - 1)
    out.calls.back().arguments += text;
  else
    out.calls.push_back({calls_ - 1, {}, {}, std::move(text)});
}

void ToolParser::end_call(Delta& out) {
  if (open_ && !has_arguments_) add_arguments("{}", out);
  open_ = false;
}

const char* name_of(ToolFormat format) {
  switch (format) {
    case ToolFormat::none: return "none";
    case ToolFormat::deepseek_v3: return "deepseek_v3";
    case ToolFormat::deepseek_v31: return "deepseek_v31";
    case ToolFormat::deepseek_v32: return "deepseek_v32";
    case ToolFormat::hermes: return "hermes";
    case ToolFormat::llama3: return "llama3_json";
  }
  return "none";
}

std::optional<ToolFormat> tool_format_named(std::string_view name) {
  for (const ToolFormat format : {ToolFormat::none, ToolFormat::deepseek_v3, ToolFormat::deepseek_v31, ToolFormat::deepseek_v32,
                                  ToolFormat::hermes, ToolFormat::llama3})
    if (name == name_of(format)) return format;
  return {};
}

ToolFormat tool_format_of(std::string_view chat_template) {
  const auto has = [&](std::string_view text) { return chat_template.find(text) != std::string_view::npos; };
  if (has("｜DSML｜")) return ToolFormat::deepseek_v32;
  if (has("<｜tool▁call▁begin｜>")) return has("```json") ? ToolFormat::deepseek_v3 : ToolFormat::deepseek_v31;
  if (has("<tool_call>")) return ToolFormat::hermes;
  if (has("<|python_tag|>") || (has("<|start_header_id|>") && has("\"parameters\""))) return ToolFormat::llama3;
  return ToolFormat::none;
}

const std::vector<std::string_view>& tool_marks(ToolFormat format) {
  static const std::vector<std::string_view> deepseek = {"<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
                                                         "<｜tool▁call▁end｜>",    "<｜tool▁calls▁end｜>",  "｜DSML｜"};
  static const std::vector<std::string_view> hermes = {"<tool_call>", "</tool_call>"};
  static const std::vector<std::string_view> llama = {"<|python_tag|>"};
  static const std::vector<std::string_view> none;
  switch (format) {
    case ToolFormat::none: return none;
    case ToolFormat::hermes: return hermes;
    case ToolFormat::llama3: return llama;
    default: return deepseek;
  }
}

std::string tool_call_example(ToolFormat format) {
  switch (format) {
    case ToolFormat::none: return {};
    case ToolFormat::deepseek_v3:
      return "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{\"PARAMETER\": "
             "VALUE}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    case ToolFormat::deepseek_v31:
      return "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{\"PARAMETER\": VALUE}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    case ToolFormat::deepseek_v32:
      return "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"NAME\">\n<｜DSML｜parameter name=\"PARAMETER\" "
             "string=\"true\">VALUE</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>";
    case ToolFormat::hermes: return "<tool_call>\n{\"name\": \"NAME\", \"arguments\": {\"PARAMETER\": VALUE}}\n</tool_call>";
    case ToolFormat::llama3: return "{\"name\": \"NAME\", \"parameters\": {\"PARAMETER\": VALUE}}";
  }
  return {};
}

std::string tool_call_text(ToolFormat format, const std::string& name, const nlohmann::ordered_json& arguments) {
  const auto text = [](const nlohmann::ordered_json& value) {
    return value.is_string() ? value.get<std::string>() : value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  };
  switch (format) {
    case ToolFormat::none: return {};
    case ToolFormat::deepseek_v3:
      return "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>" + name + "\n```json\n" + text(arguments) +
             "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    case ToolFormat::deepseek_v31:
      return "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>" + name + "<｜tool▁sep｜>" + text(arguments) +
             "<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    case ToolFormat::deepseek_v32: {
      std::string out = "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"" + name + "\">\n";
      if (arguments.is_object())
        for (const auto& [key, value] : arguments.items())
          out += "<｜DSML｜parameter name=\"" + key + "\" string=\"" + (value.is_string() ? "true" : "false") + "\">" + text(value) +
                 "</｜DSML｜parameter>\n";
      return out + "</｜DSML｜invoke>\n</｜DSML｜function_calls>";
    }
    case ToolFormat::hermes: return "<tool_call>\n{\"name\": \"" + name + "\", \"arguments\": " + text(arguments) + "}\n</tool_call>";
    case ToolFormat::llama3: return "{\"name\": \"" + name + "\", \"parameters\": " + text(arguments) + "}";
  }
  return {};
}

std::unique_ptr<ToolParser> make_tool_parser(ToolFormat format) {
  switch (format) {
    case ToolFormat::none: return nullptr;
    case ToolFormat::deepseek_v3: return std::make_unique<DeepSeekParser>(true);
    case ToolFormat::deepseek_v31: return std::make_unique<DeepSeekParser>(false);
    case ToolFormat::deepseek_v32: return std::make_unique<DsmlParser>();
    case ToolFormat::hermes: return make_json_call_parser(true);
    case ToolFormat::llama3: return make_json_call_parser(false);
  }
  return nullptr;
}

}  // namespace cachalot::server
