// Parts that the parsers of all endpoints share.
#pragma once

#include "server/json_reader.h"
#include "server/requests.h"

namespace cachalot::server {

// Sampling, limits, stops, streaming, logprobs, priority, wanted shape: the fields that chat, completions and responses have in common.
CommonParams parse_common(const Field& root, const ParseContext& context);

// "max_completion_tokens" before "max_tokens"; at least `least`.
int parse_max_tokens(const Field& root, std::initializer_list<std::string_view> names, int least);
ChatRequest parse_chat_fields(const Field& root, const ParseContext& context);
std::vector<std::string> parse_stops(const Field& field, const RequestLimits& limits);
std::vector<int> parse_token_ids(const Field& field, int vocab, size_t max_size);
// response_format and vLLM's structured_outputs / guided_*.
ConstraintSpec parse_constraint(const Field& root);
ConstraintSpec parse_response_format(const Field& format);

// Tools in chat form, checked: type, function with a name of letters, digits, '_', '-', '.', a schema that is an object.
nlohmann::ordered_json parse_tools(const Field& tools, const RequestLimits& limits);
void check_tool_choice(const ChatRequest& request);
bool valid_tool_name(std::string_view name);

// Messages in chat form, made regular for templates: content is text or null, arguments of tool calls are objects, calls have ids.
nlohmann::ordered_json parse_messages(const Field& messages, const RequestLimits& limits);
// A call's arguments: text that holds an object becomes the object.
nlohmann::ordered_json arguments_document(const Field& arguments, const RequestLimits& limits);

}  // namespace cachalot::server
