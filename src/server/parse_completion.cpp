// Completions, tokenize and detokenize requests.
#include <fmt/format.h>

#include "server/parse_common.h"

namespace cachalot::server {
namespace {

CompletionRequest::Prompt parse_prompt(const Field& field, const ParseContext& context) {
  CompletionRequest::Prompt prompt;
  if (field.is_string()) {
    prompt.text = field.string();
  } else {
    prompt.ids = parse_token_ids(field, context.vocab, SIZE_MAX);
    prompt.is_ids = true;
    if (prompt.ids.empty()) field.refuse("at least one token");
  }
  return prompt;
}

// Text, ids, or a list of either.
std::vector<CompletionRequest::Prompt> parse_prompts(const Field& field, const ParseContext& context) {
  std::vector<CompletionRequest::Prompt> out;
  if (field.is_array()) {
    const auto array = field.array(SIZE_MAX);
    if (array.size() == 0) field.refuse("a prompt");
    if (!array.at(0).value().is_number()) {
      size_t i = 0;
      for (const auto element : field.array(static_cast<size_t>(context.limits.max_prompts)))
        out.push_back(parse_prompt(field.item(element, i++), context));
      return out;
    }
  }
  out.push_back(parse_prompt(field, context));
  return out;
}

}  // namespace

CompletionRequest parse_completion_request(std::string_view body, const ParseContext& context) {
  const RequestBody document(body, context.limits);
  const Field& root = document.root();
  CompletionRequest out;
  out.common = parse_common(root, context);
  out.common.prompt_field = "prompt";
  out.model = root.string_or("model", "", 1024);
  out.echo = root.boolean_or("echo", false);
  out.add_special_tokens = root.boolean_or("add_special_tokens", true);
  out.prompts = parse_prompts(root.at("prompt"), context);
  // Scoring tools ask for the prompt's own log probabilities and no text.
  out.common.max_tokens = parse_max_tokens(root, {"max_completion_tokens", "max_tokens", "n_predict"}, out.echo ? 0 : 1);
  if (!root.find("max_tokens") && !root.find("max_completion_tokens") && !root.find("n_predict"))
    out.common.max_tokens = 16;  // OpenAI's default
  if (const auto suffix = root.find("suffix"); suffix && !suffix->string().empty()) suffix->refuse_text("not supported by this model");
  if (const auto best = root.integer_at("best_of", 1, context.limits.max_n); best && *best != out.common.n)
    root.at("best_of").refuse_text(
        fmt::format("found {}, expected the same as n ({}): choosing among more is not supported", *best, out.common.n));
  if (const auto field = root.find("logprobs")) {
    const int most = context.limits.max_logprobs;
    const int n = field->is_bool() ? (field->boolean() ? 0 : -1) : static_cast<int>(field->integer(0, most));
    out.common.logprobs = n >= 0;
    out.common.top_logprobs = std::max(n, 0);
    out.common.sampling.n_logprobs = n;
    if (n >= 0 && out.echo) out.common.prompt_logprobs = n;
  }
  const auto choices = static_cast<int64_t>(out.prompts.size()) * out.common.n;
  if (choices > context.limits.max_choices)
    throw ApiError(400, fmt::format("prompt: found {} prompts times n, expected at most {}", choices, context.limits.max_choices),
                   "prompt");
  return out;
}

TokenizeRequest parse_tokenize_request(std::string_view body, const ParseContext& context) {
  const RequestBody document(body, context.limits);
  const Field& root = document.root();
  TokenizeRequest out;
  out.model = root.string_or("model", "", 1024);
  out.add_special_tokens = root.boolean_or("add_special_tokens", root.boolean_or("add_special", true));
  out.parse_special = root.boolean_or("parse_special", true);
  out.with_pieces = root.boolean_or("with_pieces", root.boolean_or("return_token_strs", false));
  if (root.find("messages")) {
    out.chat = parse_chat_fields(root, context);
    return out;
  }
  const auto prompt = root.find("prompt");  // vLLM's name; llama.cpp's is "content"
  out.text = prompt ? prompt->string() : root.at("content").string();
  return out;
}

DetokenizeRequest parse_detokenize_request(std::string_view body, const ParseContext& context) {
  const RequestBody document(body, context.limits);
  return {parse_token_ids(document.root().at("tokens"), context.vocab, SIZE_MAX)};
}

}  // namespace cachalot::server
