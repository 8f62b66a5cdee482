// Pieces that several answer writers share.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "server/answer_writer.h"
#include "server/json_writer.h"

namespace cachalot::server {

// OpenAI's usage object, with the fields that others added to it.
void write_usage(JsonWriter& json, const TokenUse& use);
// Chat's {"content": [{token, logprob, bytes, top_logprobs}]}.
void write_chat_logprobs(JsonWriter& json, const Tokenizer& tokenizer, std::span<const LoggedToken> tokens);
// The items alone: Responses uses them too.
void write_logprob_list(JsonWriter& json, const Tokenizer& tokenizer, std::span<const LoggedToken> tokens);
// Chat and completions: the fields that begin each of their objects, whole or in a stream. The object is left open.
std::string object_head(const Service& service, std::string_view id, std::string_view object);
// A chunk's usage, so far or (when `so_far` is null and `later`) told later, and the end of its event.
void end_chunk(const TokenUse* so_far, bool later, std::string& out);
// The end of their streams: the chunk with the usage, when there is one, or the error, and [DONE].
void end_stream(std::string_view head, const TokenUse* use, std::string& out);
void fail_stream(const ApiError& error, std::string& out);
// vLLM's: the stop string that ended the text, or null.
void write_stop_reason(JsonWriter& json, const Choice& choice);
void write_token_ids(JsonWriter& json, const Choice& choice);
// A finite number that stands for probability zero.
double json_logprob(float logprob);

}  // namespace cachalot::server
