// Chat requests: messages, tools, tool choice.
#include <fmt/format.h>

#include <algorithm>

#include "server/parse_common.h"

namespace cachalot::server {
namespace {

using nlohmann::ordered_json;

constexpr size_t kMaxToolName = 128;

// Text, null, or a list of text parts, which become lines of one text.
ordered_json parse_content(const Field& message) {
  const auto content = message.find("content");
  if (!content) return nullptr;
  if (content->is_string()) return content->string();
  std::string text;
  size_t i = 0;
  for (const auto element : content->array(SIZE_MAX)) {
    const Field part = content->item(element, i);
    const std::string_view type = part.is_string() ? "text" : part.at("type").string();
    if (type != "text" && type != "input_text" && type != "output_text" && type != "refusal")
      part.at("type").refuse("text: this model reads nothing else");
    if (i++ > 0) text += '\n';
    text += part.is_string() ? part.string() : part.at(type == "refusal" ? "refusal" : "text").string();
  }
  return text;
}

ordered_json parse_tool_calls(const Field& calls, const RequestLimits& limits, size_t message_index) {
  auto out = ordered_json::array();
  size_t i = 0;
  for (const auto element : calls.array(static_cast<size_t>(limits.max_tools))) {
    const Field call = calls.item(element, i);
    const Field function = call.at("function");
    const Field name = function.at("name");
    if (!valid_tool_name(name.string())) name.refuse("a name of letters, digits, '_', '-' and '.'");
    ordered_json arguments = ordered_json::object();
    if (const auto field = function.find("arguments")) arguments = arguments_document(*field, limits);
    std::string id = call.string_or("id", "", 512);
    if (id.empty()) id = fmt::format("call_{}_{}", message_index, i);
    out.push_back({{"id", id}, {"type", "function"}, {"function", {{"name", name.string()}, {"arguments", std::move(arguments)}}}});
    ++i;
  }
  return out;
}

ordered_json parse_message(const Field& message, const RequestLimits& limits, size_t index) {
  const Field role_field = message.at("role");
  std::string role(role_field.string());
  if (role == "developer") role = "system";
  if (role == "function") role = "tool";
  if (role != "system" && role != "user" && role != "assistant" && role != "tool")
    role_field.refuse("system, developer, user, assistant or tool");
  ordered_json out{{"role", role}, {"content", parse_content(message)}};
  if (const std::string name = message.string_or("name", "", 512); !name.empty()) out["name"] = name;
  if (role == "tool") out["tool_call_id"] = message.string_or("tool_call_id", "", 512);
  if (role == "assistant") {
    std::string reasoning = message.string_or("reasoning_content", "");
    if (reasoning.empty())
      if (const auto field = message.find("reasoning"); field && field->is_string()) reasoning = field->string();
    if (!reasoning.empty()) out["reasoning_content"] = reasoning;
    if (message.boolean_or("prefix", false)) out["prefix"] = true;
    if (const auto calls = message.find("tool_calls"); calls && calls->array(SIZE_MAX).size() > 0) {
      out["tool_calls"] = parse_tool_calls(*calls, limits, index);
      // Templates tell a call from an answer by the content that is none.
      if (out["content"].is_string() && out["content"].get_ref<const std::string&>().empty()) out["content"] = nullptr;
      return out;
    }
  }
  if (out["content"].is_null()) out["content"] = "";
  return out;
}

ToolChoice parse_tool_choice(const Field& field) {
  using Kind = ToolChoice::Kind;
  if (field.is_string()) {
    const std::string_view text = field.string();
    if (text == "none") return {Kind::none, {}};
    if (text == "auto") return {Kind::automatic, {}};
    if (text == "required" || text == "any") return {Kind::required, {}};
    field.refuse("none, auto, required or an object naming a function");
  }
  if (!field.is_object()) field.refuse("none, auto, required or an object naming a function");
  const auto function = field.find("function");  // chat; Responses has the name one level higher
  return {Kind::named, std::string((function ? *function : field).at("name").string())};
}

}  // namespace

bool valid_tool_name(std::string_view name) {
  const auto good = [](unsigned char c) { return std::isalnum(c) != 0 || c == '_' || c == '-' || c == '.'; };
  return !name.empty() && name.size() <= kMaxToolName && std::all_of(name.begin(), name.end(), good);
}

ordered_json arguments_document(const Field& arguments, const RequestLimits& limits) {
  if (arguments.is_object()) return arguments.document(limits.max_keys);
  if (!arguments.is_string()) arguments.refuse("an object, or text that holds one");
  const std::string_view text = arguments.string();
  if (text.find_first_not_of(" \t\r\n") == std::string_view::npos) return ordered_json::object();
  try {
    const RequestBody inner(text, limits);
    return inner.root().document(limits.max_keys);
  } catch (const ApiError&) {
    // A model's own faulty call, sent back as history: the template shows it as it was.
    return text;
  }
}

ordered_json parse_messages(const Field& messages, const RequestLimits& limits) {
  auto out = ordered_json::array();
  size_t i = 0;
  for (const auto element : messages.array(static_cast<size_t>(limits.max_messages))) {
    const Field message = messages.item(element, i);
    if (!message.is_object()) message.refuse("an object with role and content");
    out.push_back(parse_message(message, limits, i++));
  }
  if (out.empty()) messages.refuse("at least one message");
  return out;
}

ordered_json parse_tools(const Field& tools, const RequestLimits& limits) {
  auto out = ordered_json::array();
  std::vector<std::string> names;
  size_t i = 0;
  for (const auto element : tools.array(static_cast<size_t>(limits.max_tools))) {
    const Field tool = tools.item(element, i++);
    const Field type = tool.at("type");
    if (type.string() != "function") type.refuse("function");
    const auto nested = tool.find("function");
    const Field& function = nested ? *nested : tool;  // Responses: name and parameters stand in the tool itself
    const Field name = function.at("name");
    if (!valid_tool_name(name.string())) name.refuse(fmt::format("1 to {} letters, digits, '_', '-' and '.'", kMaxToolName));
    if (std::find(names.begin(), names.end(), name.string()) != names.end()) name.refuse("a name that no other tool has");
    names.emplace_back(name.string());
    ordered_json described{{"name", name.string()}};
    if (const auto text = function.find("description")) described["description"] = text->string();
    if (const auto parameters = function.find("parameters")) {
      if (!parameters->is_object()) parameters->refuse("a JSON schema (an object)");
      described["parameters"] = parameters->document(limits.max_keys);
    } else {
      described["parameters"] = {{"type", "object"}, {"properties", ordered_json::object()}};
    }
    if (const auto strict = function.boolean_at("strict")) described["strict"] = *strict;
    out.push_back({{"type", "function"}, {"function", std::move(described)}});
  }
  return out.empty() ? ordered_json() : out;
}

void check_tool_choice(const ChatRequest& request) {
  using Kind = ToolChoice::Kind;
  const ToolChoice& choice = request.tool_choice;
  if (choice.kind != Kind::required && choice.kind != Kind::named) return;
  if (request.tools.is_null())
    throw ApiError(400, "tool_choice: found a choice of tools, but \"tools\" is missing or empty", "tool_choice");
  if (choice.kind != Kind::named) return;
  for (const auto& tool : request.tools)
    if (tool["function"]["name"] == choice.name) return;
  throw ApiError(400, fmt::format("tool_choice: no tool is named \"{}\"", printable(choice.name)), "tool_choice");
}

ChatRequest parse_chat_fields(const Field& root, const ParseContext& context) {
  const RequestLimits& limits = context.limits;
  ChatRequest out;
  out.common = parse_common(root, context);
  out.common.max_tokens = parse_max_tokens(root, {"max_completion_tokens", "max_tokens", "n_predict"}, 1);
  out.model = root.string_or("model", "", 1024);
  out.messages = parse_messages(root.at("messages"), limits);
  if (const auto field = root.find("tools")) out.tools = parse_tools(*field, limits);
  if (const auto field = root.find("functions")) field->refuse_text("replaced by \"tools\" in the API; not supported");
  if (const auto field = root.find("tool_choice")) out.tool_choice = parse_tool_choice(*field);
  check_tool_choice(out);
  out.parallel_tool_calls = root.boolean_or("parallel_tool_calls", true);
  out.include_reasoning = root.boolean_or("include_reasoning", true);

  out.template_kwargs = ordered_json::object();
  if (const auto effort = root.find("reasoning_effort")) {
    const bool thinks = effort->string() != "none";
    out.template_kwargs["reasoning_effort"] = effort->string();
    out.template_kwargs["thinking"] = out.template_kwargs["enable_thinking"] = thinks;
  }
  if (const auto field = root.find("thinking"); field && field->is_object()) {  // DeepSeek's own API: {"type": "enabled"}
    const bool thinks = field->at("type").string() == "enabled";
    out.template_kwargs["thinking"] = out.template_kwargs["enable_thinking"] = thinks;
  }
  if (const auto field = root.find("chat_template_kwargs")) {
    if (!field->is_object()) field->refuse("an object");
    const ordered_json extra = field->document(limits.max_keys);
    for (const auto& [key, value] : extra.items()) {
      // These have their own place in a request, where they are checked.
      if (key == "messages" || key == "tools" || key == "bos_token" || key == "eos_token" || key == "add_generation_prompt")
        field->refuse_text(fmt::format("must not set \"{}\"", key));
      out.template_kwargs[key] = value;
    }
  }
  out.add_generation_prompt = root.boolean_or("add_generation_prompt", true);
  out.continue_final_message = root.boolean_or("continue_final_message", false);
  const bool has_prefix = out.messages.back().contains("prefix");
  if (has_prefix) out.continue_final_message = true;
  if (out.continue_final_message) {
    if (out.messages.back()["role"] != "assistant")
      throw ApiError(400, "continue_final_message: the last message is not the assistant's", "continue_final_message");
    out.add_generation_prompt = false;
  }

  CommonParams& common = out.common;
  common.logprobs = root.boolean_or("logprobs", false);
  if (const auto top = root.find("top_logprobs")) {
    common.top_logprobs = static_cast<int>(top->integer(0, limits.max_logprobs));
    if (!common.logprobs && common.top_logprobs > 0) top->refuse_text("only allowed together with \"logprobs\": true");
  }
  if (common.logprobs) common.sampling.n_logprobs = common.top_logprobs;
  return out;
}

ChatRequest parse_chat_request(std::string_view body, const ParseContext& context) {
  const RequestBody document(body, context.limits);
  return parse_chat_fields(document.root(), context);
}

// Responses: the same fields under other names, and items in place of messages.
namespace {

void add_call(ordered_json& messages, ordered_json call) {
  if (messages.empty() || messages.back()["role"] != "assistant") messages.push_back({{"role", "assistant"}, {"content", nullptr}});
  ordered_json& last = messages.back();
  if (last["content"].is_string() && last["content"].get_ref<const std::string&>().empty()) last["content"] = nullptr;
  if (!last.contains("tool_calls")) last["tool_calls"] = ordered_json::array();
  last["tool_calls"].push_back(std::move(call));
}

std::string joined_text(const Field& parts) {
  if (parts.is_string()) return std::string(parts.string());
  std::string text;
  size_t i = 0;
  for (const auto element : parts.array(SIZE_MAX)) {
    const Field part = parts.item(element, i);
    const Field body = part.is_string() ? part : part.at("text");
    if (i++ > 0) text += '\n';
    text += body.string();
  }
  return text;
}

void add_item(ordered_json& messages, const Field& item, const RequestLimits& limits, size_t index) {
  const std::string type = item.string_or("type", "message");
  if (type == "message") {
    messages.push_back(parse_message(item, limits, index));
  } else if (type == "function_call") {
    const Field name = item.at("name");
    if (!valid_tool_name(name.string())) name.refuse("a name of letters, digits, '_', '-' and '.'");
    ordered_json arguments = ordered_json::object();
    if (const auto field = item.find("arguments")) arguments = arguments_document(*field, limits);
    add_call(messages, {{"id", item.at("call_id").string()},
                        {"type", "function"},
                        {"function", {{"name", name.string()}, {"arguments", std::move(arguments)}}}});
  } else if (type == "function_call_output") {
    messages.push_back({{"role", "tool"}, {"content", joined_text(item.at("output"))}, {"tool_call_id", item.at("call_id").string()}});
  } else if (type == "reasoning") {
    const auto content = item.find("content");
    const auto summary = item.find("summary");
    const std::string text = content ? joined_text(*content) : summary ? joined_text(*summary) : "";
    messages.push_back({{"role", "assistant"}, {"content", ""}, {"reasoning_content", text}});
  } else {
    item.at("type").refuse("message, function_call, function_call_output or reasoning");
  }
}

// A reasoning item belongs to the assistant's message behind it.
void merge_reasoning(ordered_json& messages) {
  auto merged = ordered_json::array();
  for (auto& message : messages) {
    const bool joins = !merged.empty() && merged.back()["role"] == "assistant" && message["role"] == "assistant" &&
                       merged.back().contains("reasoning_content") && !merged.back().contains("tool_calls") &&
                       merged.back()["content"].is_string() && merged.back()["content"].get_ref<const std::string&>().empty();
    if (joins) {
      message["reasoning_content"] = merged.back()["reasoning_content"];
      merged.back() = std::move(message);
    } else {
      merged.push_back(std::move(message));
    }
  }
  messages = std::move(merged);
}

}  // namespace

ChatRequest parse_responses_request(std::string_view body, const ParseContext& context) {
  const RequestBody document(body, context.limits);
  const Field& root = document.root();
  const RequestLimits& limits = context.limits;
  for (const char* key : {"previous_response_id", "conversation", "prompt"})
    if (const auto field = root.find(key)) field->refuse_text("responses are not stored here; send the whole conversation as \"input\"");
  if (root.boolean_or("background", false)) root.at("background").refuse_text("not supported");

  ChatRequest out;
  out.common = parse_common(root, context);
  out.common.prompt_field = "input";
  out.common.max_tokens = parse_max_tokens(root, {"max_output_tokens"}, 1);
  out.common.n = 1;
  out.model = root.string_or("model", "", 1024);
  if (const std::string text = root.string_or("instructions", ""); !text.empty())
    out.messages.push_back({{"role", "system"}, {"content", text}});
  const Field input = root.at("input");
  if (input.is_string()) {
    out.messages.push_back({{"role", "user"}, {"content", input.string()}});
  } else {
    size_t i = 0;
    for (const auto element : input.array(static_cast<size_t>(limits.max_messages))) {
      const Field item = input.item(element, i);
      if (!item.is_object()) item.refuse("an object");
      add_item(out.messages, item, limits, i++);
    }
    if (i == 0) input.refuse("at least one item");
    merge_reasoning(out.messages);
  }
  if (const auto field = root.find("tools")) out.tools = parse_tools(*field, limits);
  if (const auto field = root.find("tool_choice")) out.tool_choice = parse_tool_choice(*field);
  check_tool_choice(out);
  out.parallel_tool_calls = root.boolean_or("parallel_tool_calls", true);
  out.template_kwargs = ordered_json::object();
  if (const auto reasoning = root.find("reasoning")) {
    if (const auto effort = reasoning->find("effort")) {
      out.template_kwargs["reasoning_effort"] = effort->string();
      out.template_kwargs["thinking"] = out.template_kwargs["enable_thinking"] = effort->string() != "none";
    }
  }
  if (const auto text = root.find("text"))
    if (const auto format = text->find("format")) {
      out.common.constraint = parse_response_format(*format);
      out.common.constraint.field = format->path();
    }
  if (const auto top = root.integer_at("top_logprobs", 0, limits.max_logprobs); top && *top > 0) {
    out.common.logprobs = true;
    out.common.sampling.n_logprobs = out.common.top_logprobs = static_cast<int>(*top);
  }
  return out;
}

}  // namespace cachalot::server
