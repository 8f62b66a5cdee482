// Messages are untrusted: a user who types "<|im_end|>" must not end the turn. Before rendering, a noncharacter that no message holds is
// put inside each such spelling; after rendering the text is cut there and the parts are encoded one by one, so that none holds the whole
// spelling.
#include "cli/chat_prompt.h"

#include "base/error.h"

namespace cachalot {
namespace {

// The 32 noncharacters U+FDD0 to U+FDEF.
std::string unused_mark(const nlohmann::ordered_json& messages) {
  const std::string all = messages.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  for (unsigned char last = 0x90; last <= 0xaf; ++last) {
    std::string mark = {'\xef', '\xb7', static_cast<char>(last)};
    if (all.find(mark) == std::string::npos) return mark;
  }
  fail("the conversation holds all of the noncharacters U+FDD0 to U+FDEF, expected one to be free");
}

std::vector<std::string> control_spellings(const Tokenizer& tokenizer) {
  std::vector<std::string> spellings;
  for (int id = 0; id < tokenizer.size(); ++id)
    if (tokenizer.is_special(id) && tokenizer.token_text(id).size() > 1) spellings.emplace_back(tokenizer.token_text(id));
  return spellings;
}

// Puts `mark` behind the first character of each spelling found in `text`.
void break_spellings(std::string& text, const std::vector<std::string>& spellings, const std::string& mark) {
  for (const std::string& spelling : spellings) {
    size_t first = 1;
    while (first < spelling.size() && (static_cast<unsigned char>(spelling[first]) & 0xc0) == 0x80) ++first;
    for (size_t at = text.find(spelling); at != std::string::npos; at = text.find(spelling, at + 1)) text.insert(at + first, mark);
  }
}

void break_spellings(nlohmann::ordered_json& value, const std::vector<std::string>& spellings, const std::string& mark) {
  if (value.is_string()) break_spellings(value.get_ref<std::string&>(), spellings, mark);
  if (value.is_structured())
    for (auto& child : value) break_spellings(child, spellings, mark);
}

std::optional<std::string> spelling_of(const Tokenizer& tokenizer, std::optional<int> id) {
  if (!id) return {};
  return std::string(tokenizer.token_text(*id));
}

}  // namespace

ChatPrompt make_chat_prompt(const Tokenizer& tokenizer, const ChatTemplate& chat_template, const nlohmann::ordered_json& messages) {
  const std::string mark = unused_mark(messages);
  ChatInput input;
  input.messages = messages;
  break_spellings(input.messages, control_spellings(tokenizer), mark);
  input.bos_token = spelling_of(tokenizer, tokenizer.bos());
  input.eos_token = spelling_of(tokenizer, tokenizer.eos());
  const std::string rendered = chat_template.render(input);

  ChatPrompt prompt;
  for (size_t begin = 0; begin <= rendered.size();) {
    const size_t end = std::min(rendered.find(mark, begin), rendered.size());
    const std::string_view part = std::string_view(rendered).substr(begin, end - begin);
    const std::vector<int> ids = tokenizer.encode(part, {.add_bos = begin == 0 && tokenizer.add_bos(), .parse_special = true});
    prompt.ids.insert(prompt.ids.end(), ids.begin(), ids.end());
    prompt.text += part;
    begin = end + mark.size();
  }
  return prompt;
}

}  // namespace cachalot
