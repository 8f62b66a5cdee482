// Tool calls in a model's text: each family writes them in its own way; all become name, id and JSON arguments, streamed as they grow.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cachalot::server {

// What became certain about tool call `index`. The first delta of a call has its id and name; later ones only more of the arguments.
struct ToolCallDelta {
  int index = 0;
  std::string id, name, arguments;
};

struct Delta {
  std::string reasoning, content;
  std::vector<ToolCallDelta> calls;

  [[nodiscard]] bool empty() const { return reasoning.empty() && content.empty() && calls.empty(); }
  void clear() {
    reasoning.clear();
    content.clear();
    calls.clear();
  }
};

enum class ToolFormat : uint8_t { none, deepseek_v3, deepseek_v31, deepseek_v32, hermes, llama3 };

const char* name_of(ToolFormat format);
std::optional<ToolFormat> tool_format_named(std::string_view name);
// From the source of the model's chat template: the format that it shows calls of earlier turns in.
ToolFormat tool_format_of(std::string_view chat_template);
// Spellings of control tokens that must reach the parser.
const std::vector<std::string_view>& tool_marks(ToolFormat format);
// How a model is asked to write calls whose template says nothing about tools.
std::string tool_call_example(ToolFormat format);
// A call of an earlier turn, for the same models. `arguments`: an object, or the faulty text that a model wrote in its place.
std::string tool_call_text(ToolFormat format, const std::string& name, const nlohmann::ordered_json& arguments);

// Text outside of calls is content, as it stands. Never throws: text that is no proper call passes as content or arguments as it came.
class ToolParser {
 public:
  virtual ~ToolParser() = default;
  virtual void push(std::string_view text, Delta& out) = 0;
  // The text ended.
  virtual void finish(Delta& out) = 0;
  [[nodiscard]] int calls() const { return calls_; }  // begun so far
  [[nodiscard]] bool inside_call() const { return open_; }

 protected:
  // Announces a call, streams its arguments, ends it. A call without arguments gets "{}".
  void begin_call(std::string name, Delta& out);
  void add_arguments(std::string_view json, Delta& out);
  void end_call(Delta& out);

 private:
  int calls_ = 0;
  bool open_ = false, has_arguments_ = false;
  std::string held_space_;  // white space that ends the arguments is not part of them
};

// Null for ToolFormat::none.
std::unique_ptr<ToolParser> make_tool_parser(ToolFormat format);

std::string random_id(std::string_view prefix);  // prefix and 24 random characters

}  // namespace cachalot::server
