// From a conversation to token ids, through the model's chat template.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace cachalot {

// Renders `messages` (objects with role and content) with a generation prompt. A control token spelled out inside a message stays text:
// only the template's own count. The result begins with one BOS where the model wants it, whether or not the template writes it.
struct ChatPrompt {
  std::string text;
  std::vector<int> ids;
};
ChatPrompt make_chat_prompt(const Tokenizer& tokenizer, const ChatTemplate& chat_template, const nlohmann::ordered_json& messages);

}  // namespace cachalot
