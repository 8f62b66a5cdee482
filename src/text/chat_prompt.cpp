// Messages are untrusted: a user who types "<|im_end|>" must not end the turn. Before rendering, a noncharacter that no message holds is
// put inside each such spelling; after rendering the text is cut there and the parts are encoded one by one, so that none holds the whole
// spelling.
#include "text/chat_prompt.h"

#include "base/error.h"

namespace cachalot {
namespace {

// The 32 noncharacters U+FDD0 to U+FDEF are the marks to choose from; bit i of `used`: the text holds the i-th.
constexpr unsigned char kFirstMark = 0x90, kLastMark = 0xaf;

void find_marks(std::string_view text, uint32_t& used) {
  for (size_t at = text.find("\xef\xb7"); at != std::string_view::npos; at = text.find("\xef\xb7", at + 1)) {
    const auto last = at + 2 < text.size() ? static_cast<unsigned char>(text[at + 2]) : 0;
    if (last >= kFirstMark && last <= kLastMark) used |= 1u << (last - kFirstMark);
  }
}

void find_used(const nlohmann::ordered_json& value, uint32_t& used) {
  if (value.is_string()) find_marks(value.get_ref<const std::string&>(), used);
  if (value.is_array())
    for (const auto& child : value) find_used(child, used);
  if (value.is_object()) {
    for (const auto& [key, child] : value.items()) {
      find_marks(key, used);
      find_used(child, used);
    }
  }
}

std::string unused_mark(const ChatInput& input) {
  uint32_t used = 0;
  find_used(input.messages, used);
  find_used(input.tools, used);
  find_used(input.extra, used);
  for (unsigned char last = kFirstMark; last <= kLastMark; ++last)
    if ((used >> (last - kFirstMark) & 1) == 0) return {'\xef', '\xb7', static_cast<char>(last)};
  fail("the conversation holds all of the noncharacters U+FDD0 to U+FDEF, expected one to be free");
}

// Roles, turns and tool calls are marked by tokens spelled like this, which some files do not call special.
bool is_mark_spelling(std::string_view text) {
  return (text.starts_with("<｜") && text.ends_with("｜>")) || (text.starts_with("<|") && text.ends_with("|>"));
}

std::optional<std::string> spelling_of(const Tokenizer& tokenizer, std::optional<int> id) {
  if (!id) return {};
  return std::string(tokenizer.token_text(*id));
}

// Where the last message's content ends in the rendered text.
size_t end_of_last(const std::string& rendered, const nlohmann::ordered_json& messages) {
  const auto* content =
      messages.empty() || !messages.back().is_object() || !messages.back().contains("content") ? nullptr : &messages.back()["content"];
  if (content == nullptr || !content->is_string() || content->get_ref<const std::string&>().empty())
    fail("the last message has no text that could be continued");
  const auto& text = content->get_ref<const std::string&>();
  const size_t at = rendered.rfind(text);
  if (at == std::string::npos) fail("the chat template does not show the last message as it is, so it cannot be continued");
  return at + text.size();
}

}  // namespace

ChatPrompter::ChatPrompter(const Tokenizer& tokenizer, ChatTemplate chat_template)
    : tokenizer_(tokenizer), template_(std::move(chat_template)) {
  for (int id = 0; id < tokenizer.size(); ++id) {
    const std::string_view text = tokenizer.token_text(id);
    if (text.size() < 2 || text.size() > kMaxAddedToken) continue;
    if (tokenizer.is_special(id) || (tokenizer.kind(id) == TokenKind::kUserDefined && is_mark_spelling(text)))
      spellings_.add(text, {.id = id, .control = true});
  }
}

// Puts `mark` behind the first character of each spelling found in `text`, also of those that overlap.
void ChatPrompter::protect(std::string& text, const std::string& mark) const {
  if (spellings_.empty()) return;
  std::string out;
  size_t copied = 0;
  for (size_t from = 0; from < text.size();) {
    const auto match = spellings_.find(text, from, true);
    if (!match) break;
    size_t cut = match->begin + 1;
    while (cut < match->end && (static_cast<unsigned char>(text[cut]) & 0xc0) == 0x80) ++cut;
    out.append(text, copied, cut - copied);
    out += mark;
    copied = from = cut;
  }
  if (copied == 0) return;
  out.append(text, copied);
  text = std::move(out);
}

void ChatPrompter::protect(nlohmann::ordered_json& value, const std::string& mark) const {
  if (value.is_string()) protect(value.get_ref<std::string&>(), mark);
  if (!value.is_structured()) return;
  for (auto& child : value) protect(child, mark);
  if (value.is_object()) {
    bool breaks = false;
    for (const auto& item : value.items()) breaks |= spellings_.find(item.key(), 0, true).has_value();
    if (!breaks) return;
    auto renamed = nlohmann::ordered_json::object();
    for (const auto& item : value.items()) {
      std::string name = item.key();
      protect(name, mark);
      renamed[name] = item.value();
    }
    value = std::move(renamed);
  }
}

ChatPrompt ChatPrompter::render(ChatInput input, bool continue_last) const {
  const std::string mark = unused_mark(input);
  protect(input.messages, mark);
  protect(input.tools, mark);
  protect(input.extra, mark);
  input.bos_token = spelling_of(tokenizer_, tokenizer_.bos());
  input.eos_token = spelling_of(tokenizer_, tokenizer_.eos());
  if (continue_last) input.add_generation_prompt = false;
  std::string rendered = template_.render(input);
  if (continue_last) rendered.resize(end_of_last(rendered, input.messages));

  ChatPrompt prompt;
  for (size_t begin = 0; begin <= rendered.size();) {
    const size_t end = std::min(rendered.find(mark, begin), rendered.size());
    const std::string_view part = std::string_view(rendered).substr(begin, end - begin);
    const std::vector<int> ids = tokenizer_.encode(part, {.add_bos = begin == 0 && tokenizer_.add_bos(), .parse_special = true});
    prompt.ids.insert(prompt.ids.end(), ids.begin(), ids.end());
    prompt.text += part;
    begin = end + mark.size();
  }
  return prompt;
}

ChatPrompt make_chat_prompt(const Tokenizer& tokenizer, const ChatTemplate& chat_template, const nlohmann::ordered_json& messages) {
  return ChatPrompter(tokenizer, chat_template).render({.messages = messages});
}

}  // namespace cachalot
