// Service: requests to token ids.
#include "server/service.h"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>

#include "base/error.h"

namespace cachalot::server {
namespace {

using nlohmann::ordered_json;

ordered_json one_tool() {
  return ordered_json::array(
      {{{"type", "function"},
        {"function",
         {{"name", "probe_tool"}, {"description", "d"}, {"parameters", {{"type", "object"}, {"properties", ordered_json::object()}}}}}}});
}

ordered_json conversation_with_call(ordered_json content, ordered_json arguments) {
  return ordered_json::array(
      {{{"role", "user"}, {"content", "hi"}},
       {{"role", "assistant"},
        {"content", std::move(content)},
        {"tool_calls",
         ordered_json::array(
             {{{"id", "1"}, {"type", "function"}, {"function", {{"name", "probe_tool"}, {"arguments", std::move(arguments)}}}}})}},
       {{"role", "tool"}, {"content", "ok"}, {"tool_call_id", "1"}}});
}

std::optional<std::string> try_render(const ChatTemplate& chat_template, ordered_json messages, ordered_json tools) {
  try {
    return chat_template.render({.messages = std::move(messages), .tools = std::move(tools), .bos_token = "", .eos_token = ""});
  } catch (const Error&) {
    return {};
  }
}

// For a template that does not name the tools itself.
std::string tools_text(const ordered_json& tools, ToolFormat format) {
  std::string text = "You can call these functions (described as JSON):\n";
  for (const auto& tool : tools) text += tool["function"].dump(-1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
  return text + "To call one, write exactly:\n" + tool_call_example(format) + "\nOtherwise answer in plain text.";
}

// A turn's calls as text behind its content, for a template that would leave them out.
void write_calls_as_text(ordered_json& message, ToolFormat format) {
  std::string content = message["content"].is_string() ? message["content"].get<std::string>() : "";
  for (const auto& call : message["tool_calls"]) {
    if (!content.empty()) content += '\n';
    content += tool_call_text(format, call["function"]["name"].get<std::string>(), call["function"]["arguments"]);
  }
  message["content"] = std::move(content);
  message.erase("tool_calls");
}

void add_system_text(ordered_json& messages, const std::string& text) {
  if (!messages.empty() && messages.front()["role"] == "system") {
    auto& content = messages.front()["content"];
    content = content.get<std::string>() + "\n\n" + text;
    return;
  }
  ordered_json first = ordered_json::array({{{"role", "system"}, {"content", text}}});
  for (auto& message : messages) first.push_back(std::move(message));
  messages = std::move(first);
}

}  // namespace

Service::Service(Engine& engine, const Tokenizer& tokenizer, std::optional<ChatTemplate> chat_template, ServiceOptions options)
    : engine_(engine), tokenizer_(tokenizer), options_(std::move(options)), created_(std::time(nullptr)) {
  if (options_.names.empty()) options_.names.push_back(engine.info().model);
  if (!chat_template) return;
  find_traits(*chat_template);
  prompter_.emplace(tokenizer, std::move(*chat_template));
}

void Service::find_traits(const ChatTemplate& chat_template) {
  const ToolFormat native = tool_format_of(chat_template.source());
  tool_format_ = options_.tool_format.value_or(native);
  if (native != ToolFormat::none && tool_format_ != ToolFormat::none && tool_format_ != native)
    fail("--tool-call-parser: found {}, but the template {} writes calls as {}", name_of(tool_format_), chat_template.name(),
         name_of(native));
  const ordered_json hello = ordered_json::array({{{"role", "user"}, {"content", "hi"}}});
  const auto with = try_render(chat_template, hello, one_tool());
  shows_tools_ = with && with->find("probe_tool") != std::string::npos;
  // Templates differ in how they want a turn that is all calls: the first form that shows the call is taken.
  for (const bool as_text : {false, true}) {
    for (const bool null_content : {true, false}) {
      const ordered_json arguments = as_text ? ordered_json("{\"probe_key\": 1}") : ordered_json{{"probe_key", 1}};
      const auto text =
          try_render(chat_template, conversation_with_call(null_content ? ordered_json() : ordered_json(""), arguments), one_tool());
      if (!text || text->find("probe_key") == std::string::npos) continue;
      shows_calls_ = true;
      arguments_as_text_ = as_text;
      null_content_ = null_content;
      return;
    }
  }
}

ParseContext Service::parse_context() const { return {options_.defaults, engine_.info().vocab, options_.limits}; }

void Service::check_model(const std::string& name) const {
  if (name.empty() || std::find(options_.names.begin(), options_.names.end(), name) != options_.names.end()) return;
  throw ApiError(404, fmt::format("The model '{}' does not exist here; there is '{}'", printable(name), this->name()), "model",
                 "model_not_found");
}

int Service::answer_limit(size_t n_prompt, const CommonParams& params) const {
  const auto context = static_cast<size_t>(engine_.info().max_context);
  if (n_prompt >= context)
    throw ApiError(
        400,
        fmt::format("This model's context holds {} tokens, of which the answer needs one; the prompt has {} tokens", context, n_prompt),
        std::string(params.prompt_field), "context_length_exceeded");
  const int room = static_cast<int>(context - n_prompt);
  int most = options_.max_output_tokens > 0 ? std::min(options_.max_output_tokens, room) : room;
  if (params.max_tokens >= 0) most = std::min(most, params.max_tokens);
  if (params.min_tokens > most)
    throw ApiError(400,
                   fmt::format("min_tokens: found {}, expected at most {}, the number that the answer may have", params.min_tokens, most),
                   "min_tokens");
  return most;
}

ChatPrompt Service::render(const ChatRequest& request) const {
  if (!prompter_) throw ApiError(400, "This model has no chat template; use /v1/completions", "messages");
  ChatInput input;
  input.messages = request.messages;
  input.add_generation_prompt = request.add_generation_prompt;
  input.extra = ordered_json::object();
  for (const ordered_json* variables : {&options_.template_kwargs, &request.template_kwargs})
    if (variables->is_object())
      for (const auto& [key, value] : variables->items()) input.extra[key] = value;
  for (auto& message : input.messages) {
    if (!message.contains("tool_calls")) continue;
    if (!shows_calls_) {
      if (tool_format_ == ToolFormat::none) throw ApiError(400, "This model's chat template knows no tools", "messages");
      write_calls_as_text(message, tool_format_);
      continue;
    }
    if (!null_content_ && message["content"].is_null()) message["content"] = "";
    for (auto& call : message["tool_calls"]) {
      auto& arguments = call["function"]["arguments"];
      if (arguments_as_text_ && arguments.is_object()) arguments = arguments.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
    }
  }
  if (!request.tools.is_null() && request.tool_choice.kind != ToolChoice::Kind::none) {
    if (tool_format_ == ToolFormat::none) throw ApiError(400, "This model's chat template knows no tools", "tools");
    if (shows_tools_)
      input.tools = request.tools;
    else
      add_system_text(input.messages, tools_text(request.tools, tool_format_));
  }
  try {
    return prompter_->render(std::move(input), request.continue_final_message);
  } catch (const Error& error) {
    throw ApiError(400, error.what(), std::string(request.common.prompt_field));
  }
}

ConstraintMaker Service::constraint_of(const CommonParams& params, bool after_reasoning) const {
  if (params.constraint.kind == ConstraintSpec::Kind::none) return {};
  const std::string& field = params.constraint.field;
  if (!options_.constraints) throw ApiError(400, fmt::format("{}: this server cannot enforce the shape of an answer", field), field);
  try {
    return options_.constraints(params.constraint, after_reasoning);
  } catch (const Error& error) {
    throw ApiError(400, error.what(), field);
  }
}

Prepared Service::prepare(ChatRequest request) const {
  check_model(request.model);
  using Kind = ToolChoice::Kind;
  if ((request.tool_choice.kind == Kind::required || request.tool_choice.kind == Kind::named) && !options_.constraints)
    throw ApiError(400, "tool_choice: this server cannot force a call; use \"auto\"", "tool_choice");
  ChatPrompt prompt = render(request);
  Prepared out;
  out.chat = true;
  const bool uses_tools = !request.tools.is_null() && request.tool_choice.kind != Kind::none;
  out.answer.tool_format = uses_tools ? tool_format_ : ToolFormat::none;
  out.answer.parse_reasoning = options_.split_reasoning;
  out.answer.inside_reasoning = options_.split_reasoning && prompt_opens_reasoning(prompt.text);
  out.answer.stops = request.common.stops;
  out.answer.include_stop = request.common.include_stop;
  out.answer.skip_special = request.common.skip_special_tokens;
  out.wants_reasoning = request.include_reasoning;
  if (!request.parallel_tool_calls) out.max_tool_calls = 1;
  if (request.tool_choice.kind == Kind::required || request.tool_choice.kind == Kind::named) {
    ConstraintSpec forced{.kind = ConstraintSpec::Kind::calls, .field = "tool_choice", .tool_format = tool_format_};
    forced.one_call = request.tool_choice.kind == Kind::named || !request.parallel_tool_calls;
    forced.tools = ordered_json::array();
    for (const auto& tool : request.tools)
      if (request.tool_choice.kind == Kind::required || tool["function"]["name"] == request.tool_choice.name) forced.tools.push_back(tool);
    request.common.constraint = std::move(forced);
  }
  static_cast<void>(answer_limit(prompt.ids.size(), request.common));
  out.prompts.push_back(std::move(prompt.ids));
  out.params = std::move(request.common);
  out.constraint = constraint_of(out.params, out.answer.inside_reasoning);
  return out;
}

Prepared Service::prepare(CompletionRequest request) const {
  check_model(request.model);
  Prepared out;
  out.echo = request.echo;
  for (CompletionRequest::Prompt& prompt : request.prompts) {
    if (!prompt.is_ids)
      prompt.ids = tokenizer_.encode(prompt.text, {.add_bos = request.add_special_tokens && tokenizer_.add_bos(), .parse_special = true});
    if (prompt.ids.empty()) {
      // Something must be there to continue.
      if (!tokenizer_.bos()) throw ApiError(400, "prompt: found no text, expected at least one token", "prompt");
      prompt.ids.push_back(*tokenizer_.bos());
    }
    static_cast<void>(answer_limit(prompt.ids.size(), request.common));
    if (request.echo) out.prompt_texts.push_back(prompt.is_ids ? tokenizer_.decode(prompt.ids, true) : std::move(prompt.text));
    out.prompts.push_back(std::move(prompt.ids));
  }
  out.answer.stops = request.common.stops;
  out.answer.include_stop = request.common.include_stop;
  out.answer.skip_special = request.common.skip_special_tokens;
  out.params = std::move(request.common);
  out.constraint = constraint_of(out.params, false);
  return out;
}

}  // namespace cachalot::server
