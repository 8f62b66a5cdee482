// What clients ask for, as plain structs: parsed from JSON, every number checked, free of HTTP and of tokens.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cachalot/engine.h"
#include "server/api_error.h"
#include "server/tool_parser.h"

namespace cachalot::server {

// Bounds on everything that a request can make large. Passing one is a 400 that names the field, the number found and the bound.
struct RequestLimits {
  size_t max_body_bytes = 32u << 20;
  int max_n = 128;
  int max_prompts = 1024;  // of one completions request
  int max_choices = 1024;  // prompts times n
  int max_stops = 16;
  size_t max_stop_bytes = 1024;  // of each
  int max_logit_bias = 4096;
  int max_token_ids = 4096;  // entries of stop_token_ids and the like
  int max_logprobs = 20;
  int max_messages = 16384;
  int max_tools = 256;
  int max_keys = 512;  // of any object that is passed on to the template
  int max_json_depth = 64;
  size_t max_salt_bytes = 256;
};

// Wanted shape of the answer. The text of a schema is JSON.
struct ConstraintSpec {
  enum class Kind : uint8_t { none, json_object, json_schema, regex, choice, grammar, calls };
  Kind kind = Kind::none;
  std::string field;                 // of the request that asked for it
  std::string text;                  // schema, pattern or grammar
  std::vector<std::string> choices;  // of Kind::choice
  // Of Kind::calls: nothing but calls of these tools (as in ChatRequest), written in this format.
  nlohmann::ordered_json tools;
  ToolFormat tool_format = ToolFormat::none;
  bool one_call = false;
};

// Parameters that all endpoints share. Those that are absent leave the model's defaults (`SamplingOptions` given to the parser).
struct CommonParams {
  SamplingOptions sampling;  // seed set only when has_seed
  bool has_seed = false;
  int n = 1;
  int max_tokens = -1;  // -1: until the context is full
  int min_tokens = 0;
  bool ignore_eos = false, include_stop = false, skip_special_tokens = true;
  std::vector<int> stop_tokens;
  std::vector<std::string> stops;
  std::optional<Priority> priority;
  std::string cache_salt;
  bool use_prefix_cache = true;
  bool stream = false, include_usage = false, continuous_usage = false;
  bool logprobs = false;
  int top_logprobs = 0;
  int prompt_logprobs = -1;
  bool return_token_ids = false;
  ConstraintSpec constraint;
  std::string_view prompt_field = "messages";  // what the endpoint calls it, for errors
};

struct ToolChoice {
  enum class Kind : uint8_t { none, automatic, required, named } kind = Kind::automatic;
  std::string name;
};

// A conversation, from whichever endpoint: messages and tools are in OpenAI's chat form.
struct ChatRequest {
  std::string model;
  nlohmann::ordered_json messages = nlohmann::ordered_json::array();
  nlohmann::ordered_json tools;  // null: none
  ToolChoice tool_choice;
  bool parallel_tool_calls = true;
  nlohmann::ordered_json template_kwargs;  // object or null
  bool add_generation_prompt = true, continue_final_message = false;
  bool include_reasoning = true;
  CommonParams common;
};

struct CompletionRequest {
  struct Prompt {
    std::string text;
    std::vector<int> ids;  // when given as ids
    bool is_ids = false;
  };
  std::string model;
  std::vector<Prompt> prompts;
  bool echo = false;
  bool add_special_tokens = true;
  CommonParams common;
};

struct TokenizeRequest {
  std::string model, text;
  std::optional<ChatRequest> chat;  // with messages instead of text
  bool add_special_tokens = true, parse_special = false, with_pieces = false;
};

struct DetokenizeRequest {
  std::vector<int> tokens;
};

// What parsing needs to know about the model and the server.
struct ParseContext {
  SamplingOptions defaults;
  int vocab = 0;
  RequestLimits limits;
};

// Each throws ApiError: 400 naming the field, what was found and what was expected. Unknown fields are ignored, as clients send many.
ChatRequest parse_chat_request(std::string_view body, const ParseContext& context);
CompletionRequest parse_completion_request(std::string_view body, const ParseContext& context);
ChatRequest parse_messages_request(std::string_view body, const ParseContext& context, bool count_only);  // Anthropic's
ChatRequest parse_responses_request(std::string_view body, const ParseContext& context);                  // OpenAI's Responses
TokenizeRequest parse_tokenize_request(std::string_view body, const ParseContext& context);
DetokenizeRequest parse_detokenize_request(std::string_view body, const ParseContext& context);

}  // namespace cachalot::server
