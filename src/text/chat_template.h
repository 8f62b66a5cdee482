// ChatTemplate: turns a conversation into the text a model was trained to continue. The template is a program in jinja's language that came
// with the model; it is run by an interpreter of our own that reaches nothing but the conversation and stops at the limits given.
//
// Supported: what the templates of published models use. set (with namespaces, blocks, tuples), if, for (loop variables, inline condition,
// else, break, continue), macro, call, filter, with, raw, generation; about fifty filters, all of jinja's tests; Python's methods of
// strings, lists and dicts that change nothing; range, dict, namespace, raise_exception, strftime_now. Output equals that of jinja2 set up
// the way transformers does (trim_blocks, lstrip_blocks, loop controls, its tojson). One addition: the filter from_json, which some
// templates expect. Not supported, and refused by name: extends, include, import, block, recursive loops, line statements.
#pragma once

#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "text/jinja_limits.h"

namespace cachalot {

// What a template sees. Messages and tools are those of the OpenAI chat interface, passed on as they are.
struct ChatInput {
  nlohmann::ordered_json messages = nlohmann::ordered_json::array();
  nlohmann::ordered_json tools;  // null: the template sees none
  bool add_generation_prompt = true;
  std::optional<std::string> bos_token, eos_token;  // undefined in the template when absent
  nlohmann::ordered_json extra;  // more variables: an object (enable_thinking, date_string, ...) or null. They win over the above
  std::optional<std::tm> now;    // what strftime_now shows; the local time of the render when absent
};

class ChatTemplate {
 public:
  // `name` (of the file or model) starts every error. Throws Error with name and line on text that is no template, or is past a limit.
  static ChatTemplate parse(const std::string& source, std::string name, const TemplateLimits& limits = {});

  // Throws Error with name and line when the template refuses the conversation (raise_exception), fails, or passes a limit.
  // Safe to call from several threads at once.
  [[nodiscard]] std::string render(const ChatInput& input) const;

  [[nodiscard]] const std::string& name() const;
  // The text, as it was given. Whether it mentions "tools" tells whether the model was trained for them.
  [[nodiscard]] const std::string& source() const;

 private:
  struct Parsed;
  explicit ChatTemplate(std::shared_ptr<const Parsed> parsed) : parsed_(std::move(parsed)) {}
  std::shared_ptr<const Parsed> parsed_;
};

// True when a prompt ends inside an opened reasoning part ("<think>" and white space), so that the answer begins with reasoning.
bool prompt_opens_reasoning(std::string_view rendered);

}  // namespace cachalot
