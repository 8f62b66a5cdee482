// The prompts of `cachalot generate`: a JSON object a line, as {"prompt"}, {"messages"}, or a line of OpenAI's batch files.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cachalot/engine.h"
#include "cli/run_flags.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace cachalot {

struct PromptLine {
  nlohmann::ordered_json id;  // "id" or "custom_id" of the line, or null
  Request request;
  std::vector<std::string> stops;
};

// How lines are read that do not say everything themselves.
struct PromptDefaults {
  const Tokenizer& tokenizer;
  const ChatTemplate* chat_template = nullptr;  // or none
  SamplingOptions sampling;
  int max_tokens = -1;
  bool ignore_eos = false;
  Priority priority = Priority::batch;
  std::vector<std::string> stops;
};

// Line `number` (from 0) of the file. The seed of a line without one is the default seed plus its number. Throws Error naming the line and
// the field.
PromptLine read_prompt_line(std::string_view line, size_t number, const PromptDefaults& defaults);

}  // namespace cachalot
