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
// A finite number that stands for probability zero.
double json_logprob(float logprob);

}  // namespace cachalot::server
