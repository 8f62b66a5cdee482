// Implementation of chat templates on top of the interpreter.
#include "text/chat_template.h"

#include "base/error.h"
#include "text/jinja_eval.h"
#include "text/jinja_parser.h"
#include "text/jinja_text.h"

namespace cachalot {

struct ChatTemplate::Parsed {
  std::string name, source;
  TemplateLimits limits;
  jinja::Body body;
};

namespace {

using nlohmann::ordered_json;

// Makes template values of a request's JSON. These are the caller's bytes, so they are not charged to the template's memory.
class Importer {
 public:
  Importer(const std::string& name, int max_depth) : name_(name), max_depth_(max_depth) {}

  jinja::Value value(const ordered_json& json, int depth = 0) const {
    if (depth >= max_depth_) fail("template {}: the conversation is nested deeper than {} levels", name_, max_depth_);
    switch (json.type()) {
      case ordered_json::value_t::boolean: return json.get<bool>();
      case ordered_json::value_t::number_integer: return static_cast<jinja::Int>(json.get<int64_t>());
      case ordered_json::value_t::number_unsigned: return static_cast<jinja::Int>(json.get<uint64_t>());
      case ordered_json::value_t::number_float: return json.get<double>();
      case ordered_json::value_t::string: return text(json.get_ref<const std::string&>());
      case ordered_json::value_t::array: {
        std::vector<jinja::Value> items;
        items.reserve(json.size());
        int deepest = 0;
        for (const ordered_json& item : json) {
          items.push_back(value(item, depth + 1));
          deepest = std::max(deepest, items.back().depth());
        }
        return std::shared_ptr<const jinja::SequenceObject>(
            new jinja::SequenceObject{jinja::SequenceKind::kList, std::move(items), deepest + 1, {}});
      }
      case ordered_json::value_t::object: {
        std::vector<std::pair<jinja::Value, jinja::Value>> entries;
        entries.reserve(json.size());
        int deepest = 0;
        for (const auto& [key, item] : json.items()) {
          entries.emplace_back(text(key), value(item, depth + 1));
          deepest = std::max(deepest, entries.back().second.depth());
        }
        return std::shared_ptr<const jinja::DictObject>(new jinja::DictObject{std::move(entries), deepest + 1, {}});
      }
      default: return jinja::None{};
    }
  }

  jinja::Value text(const std::string& text) const {
    if (!jinja::is_valid_utf8(text)) fail("template {}: the conversation holds '{}', expected valid UTF-8", name_, printable(text, 40));
    return std::shared_ptr<const jinja::StringObject>(new jinja::StringObject{text, false, {}});
  }

 private:
  const std::string& name_;
  const int max_depth_;
};

std::tm local_time() {
  const std::time_t now = std::time(nullptr);
  std::tm result{};
  ::localtime_r(&now, &result);
  return result;
}

}  // namespace

ChatTemplate ChatTemplate::parse(const std::string& source, std::string name, const TemplateLimits& limits) {
  if (source.size() > limits.max_source_bytes) {
    fail("template {}, line 1: found {} bytes, expected at most {} (max_source_bytes)", name, source.size(), limits.max_source_bytes);
  }
  if (!jinja::is_valid_utf8(source)) fail("template {}, line 1: found bytes that are not valid UTF-8", name);
  jinja::Body body = jinja::parse(source, name, limits);
  return ChatTemplate(std::make_shared<const Parsed>(Parsed{std::move(name), source, limits, std::move(body)}));
}

std::string ChatTemplate::render(const ChatInput& input) const {
  const Importer importer(parsed_->name, parsed_->limits.max_nesting / 2);
  std::vector<std::pair<std::string, jinja::Value>> variables;
  const auto set = [&](const std::string& name, jinja::Value value) {
    for (auto& [known, old] : variables) {
      if (known == name) {
        old = std::move(value);
        return;
      }
    }
    variables.emplace_back(name, std::move(value));
  };
  set("messages", importer.value(input.messages));
  set("tools", importer.value(input.tools));
  set("documents", jinja::None{});
  set("add_generation_prompt", input.add_generation_prompt);
  if (input.bos_token) set("bos_token", importer.text(*input.bos_token));
  if (input.eos_token) set("eos_token", importer.text(*input.eos_token));
  if (input.extra.is_object()) {
    for (const auto& [key, value] : input.extra.items()) set(key, importer.value(value));
  } else if (!input.extra.is_null()) {
    fail("template {}: found extra variables of type {}, expected an object", parsed_->name, input.extra.type_name());
  }
  jinja::Runtime runtime(parsed_->name, parsed_->limits, input.now ? *input.now : local_time());
  return jinja::evaluate(parsed_->body, runtime, std::move(variables));
}

const std::string& ChatTemplate::name() const { return parsed_->name; }
const std::string& ChatTemplate::source() const { return parsed_->source; }

bool prompt_opens_reasoning(std::string_view rendered) { return jinja::strip(rendered, nullptr, jinja::Side::kRight).ends_with("<think>"); }

}  // namespace cachalot
