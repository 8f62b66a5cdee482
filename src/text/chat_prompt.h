// From a conversation to token ids, through the model's chat template.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "text/added_tokens.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace cachalot {

struct ChatPrompt {
  std::string text;
  std::vector<int> ids;
};

// Renders conversations for one model. A control token spelled out anywhere in a message, a tool or another variable stays text: only the
// template's own count. Safe to call from several threads at once.
class ChatPrompter {
 public:
  // The tokenizer must outlive this.
  ChatPrompter(const Tokenizer& tokenizer, ChatTemplate chat_template);

  // `input` as ChatTemplate::render takes it; its bos_token and eos_token are filled in. With `continue_last`, the text ends where the last
  // message's content does, so that the answer goes on with it. The result begins with one BOS where the model wants it, whether or not the
  // template writes it. Throws Error as render() does.
  [[nodiscard]] ChatPrompt render(ChatInput input, bool continue_last = false) const;

  [[nodiscard]] const ChatTemplate& chat_template() const { return template_; }

 private:
  void protect(std::string& text, const std::string& mark) const;
  void protect(nlohmann::ordered_json& value, const std::string& mark) const;

  const Tokenizer& tokenizer_;
  ChatTemplate template_;
  AddedTokens spellings_;  // of all tokens that a user must not be able to write
};

// One conversation without tools, with a generation prompt.
ChatPrompt make_chat_prompt(const Tokenizer& tokenizer, const ChatTemplate& chat_template, const nlohmann::ordered_json& messages);

}  // namespace cachalot
