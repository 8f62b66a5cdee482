// Anthropic's Messages, turned into a chat request.
#include <fmt/format.h>

#include "server/parse_common.h"

namespace cachalot::server {
namespace {

using nlohmann::ordered_json;

// Text, or a list of text blocks.
std::string text_of(const Field& content) {
  if (content.is_string()) return std::string(content.string());
  std::string text;
  size_t i = 0;
  for (const auto element : content.array(SIZE_MAX)) {
    const Field block = content.item(element, i);
    const Field type = block.at("type");
    if (type.string() != "text") type.refuse("text: this model reads nothing else");
    if (i++ > 0) text += '\n';
    text += block.at("text").string();
  }
  return text;
}

void append_line(std::string& text, std::string_view more) {
  if (!text.empty()) text += '\n';
  text += more;
}

ordered_json tool_use(const Field& block, const RequestLimits& limits) {
  const Field name = block.at("name");
  if (!valid_tool_name(name.string())) name.refuse("a name of letters, digits, '_', '-' and '.'");
  ordered_json arguments = ordered_json::object();
  if (const auto input = block.find("input")) arguments = arguments_document(*input, limits);
  return {
      {"id", block.at("id").string()}, {"type", "function"}, {"function", {{"name", name.string()}, {"arguments", std::move(arguments)}}}};
}

void add_assistant(ordered_json& out, const Field& content, const RequestLimits& limits) {
  ordered_json message{{"role", "assistant"}, {"content", ""}};
  std::string text, thinking;
  auto calls = ordered_json::array();
  size_t i = 0;
  for (const auto element : content.array(SIZE_MAX)) {
    const Field block = content.item(element, i++);
    const Field type = block.at("type");
    if (type.string() == "text")
      append_line(text, block.at("text").string());
    else if (type.string() == "thinking")
      append_line(thinking, block.at("thinking").string());
    else if (type.string() == "tool_use")
      calls.push_back(tool_use(block, limits));
    else if (type.string() != "redacted_thinking")
      type.refuse("text, thinking, redacted_thinking or tool_use");
  }
  message["content"] = text;
  if (!thinking.empty()) message["reasoning_content"] = thinking;
  if (!calls.empty()) {
    message["tool_calls"] = std::move(calls);
    if (text.empty()) message["content"] = nullptr;
  }
  out.push_back(std::move(message));
}

void add_user(ordered_json& out, const Field& content) {
  std::string text;
  bool has_text = false;
  size_t i = 0;
  for (const auto element : content.array(SIZE_MAX)) {
    const Field block = content.item(element, i++);
    const Field type = block.at("type");
    if (type.string() == "text") {
      append_line(text, block.at("text").string());
      has_text = true;
    } else if (type.string() == "tool_result") {
      const auto result = block.find("content");
      out.push_back({{"role", "tool"}, {"content", result ? text_of(*result) : ""}, {"tool_call_id", block.at("tool_use_id").string()}});
    } else {
      type.refuse("text or tool_result: this model reads nothing else");
    }
  }
  if (has_text || i == 0) out.push_back({{"role", "user"}, {"content", text}});
}

ordered_json parse_anthropic_tools(const Field& tools, const RequestLimits& limits) {
  auto out = ordered_json::array();
  size_t i = 0;
  for (const auto element : tools.array(static_cast<size_t>(limits.max_tools))) {
    const Field tool = tools.item(element, i++);
    if (const auto type = tool.find("type"); type && type->string() != "custom") type->refuse("custom: this server runs no tools itself");
    const Field name = tool.at("name");
    if (!valid_tool_name(name.string())) name.refuse("letters, digits, '_', '-' and '.'");
    const Field schema = tool.at("input_schema");
    if (!schema.is_object()) schema.refuse("a JSON schema (an object)");
    ordered_json function{{"name", name.string()}};
    if (const auto text = tool.find("description")) function["description"] = text->string();
    function["parameters"] = schema.document(limits.max_keys);
    out.push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  return out.empty() ? ordered_json() : out;
}

void parse_choice(const Field& field, ChatRequest& out) {
  using Kind = ToolChoice::Kind;
  const Field type = field.at("type");
  const std::string_view name = type.string();
  if (name == "auto")
    out.tool_choice = {Kind::automatic, {}};
  else if (name == "none")
    out.tool_choice = {Kind::none, {}};
  else if (name == "any")
    out.tool_choice = {Kind::required, {}};
  else if (name == "tool")
    out.tool_choice = {Kind::named, std::string(field.at("name").string())};
  else
    type.refuse("auto, any, tool or none");
  out.parallel_tool_calls = !field.boolean_or("disable_parallel_tool_use", false);
}

}  // namespace

ChatRequest parse_messages_request(std::string_view body, const ParseContext& context, bool count_only) {
  const RequestBody document(body, context.limits);
  const Field& root = document.root();
  const RequestLimits& limits = context.limits;
  ChatRequest out;
  out.common = parse_common(root, context);
  out.common.n = 1;
  if (!count_only) {
    static_cast<void>(root.at("max_tokens"));  // Anthropic's API has no default
    out.common.max_tokens = parse_max_tokens(root, {"max_tokens"}, 1);
  }
  out.model = std::string(root.at("model").string());
  if (const auto stops = root.find("stop_sequences")) out.common.stops = parse_stops(*stops, limits);
  if (const auto system = root.find("system")) out.messages.push_back({{"role", "system"}, {"content", text_of(*system)}});
  const Field messages = root.at("messages");
  size_t i = 0;
  for (const auto element : messages.array(static_cast<size_t>(limits.max_messages))) {
    const Field message = messages.item(element, i++);
    const Field role = message.at("role"), content = message.at("content");
    if (role.string() != "user" && role.string() != "assistant") role.refuse("user or assistant");
    if (content.is_string())
      out.messages.push_back({{"role", role.string()}, {"content", content.string()}});
    else if (role.string() == "user")
      add_user(out.messages, content);
    else
      add_assistant(out.messages, content, limits);
  }
  if (i == 0) messages.refuse("at least one message");
  // A last message of the assistant is the beginning of the answer.
  if (out.messages.back()["role"] == "assistant" && !out.messages.back().contains("tool_calls")) {
    out.continue_final_message = true;
    out.add_generation_prompt = false;
  }
  if (const auto tools = root.find("tools")) out.tools = parse_anthropic_tools(*tools, limits);
  if (const auto choice = root.find("tool_choice")) parse_choice(*choice, out);
  check_tool_choice(out);
  out.template_kwargs = ordered_json::object();
  if (const auto thinking = root.find("thinking")) {
    const bool thinks = thinking->at("type").string() != "disabled";
    out.template_kwargs["thinking"] = out.template_kwargs["enable_thinking"] = thinks;
  }
  return out;
}

}  // namespace cachalot::server
