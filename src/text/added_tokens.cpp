// AddedTokens: a byte trie walked at each position where a token may begin.
#include "text/added_tokens.h"

#include <algorithm>

#include "base/check.h"
#include "text/unicode.h"

namespace cachalot {
namespace {

using unicode::Flag;

bool is_word(unicode::Char c) { return (c.flags & (Flag::kLetter | Flag::kMark | Flag::kNumber)) != 0 || c.code == '_'; }

// The character that ends at `at`, given that some character or invalid byte does. at > 0.
unicode::Char char_before(std::string_view text, size_t at) {
  const char* const end = text.data() + at;
  const uint8_t* const table = unicode::flag_table();
  for (size_t back = 4; back > 1; --back) {
    if (back > at) continue;
    const unicode::Char c = unicode::char_at(end - back, end, table);
    if (c.size == back) return c;
  }
  return unicode::char_at(end - 1, end, table);
}

unicode::Char char_after(std::string_view text, size_t at) {
  return unicode::char_at(text.data() + at, text.data() + text.size(), unicode::flag_table());
}

}  // namespace

void AddedTokens::add(std::string_view content, AddedToken token) {
  CACHALOT_CHECK(!content.empty() && content.size() <= kMaxAddedToken);
  uint32_t node = 0;
  for (const char c : content) {
    const auto byte = static_cast<uint8_t>(c);
    auto& children = nodes_[node].children;
    const auto it = std::lower_bound(children.begin(), children.end(), std::pair<uint8_t, uint32_t>{byte, 0});
    if (it != children.end() && it->first == byte) {
      node = it->second;
      continue;
    }
    const auto child = static_cast<uint32_t>(nodes_.size());
    children.insert(it, {byte, child});
    if (node == 0) roots_[byte] = child;
    nodes_.emplace_back();
    node = child;
  }
  if (nodes_[node].token >= 0) return;
  nodes_[node].token = static_cast<int>(tokens_.size());
  tokens_.push_back(token);
}

const AddedToken* AddedTokens::longest_at(std::string_view text, size_t at, bool control, size_t& length) const {
  const AddedToken* found = nullptr;
  uint32_t node = roots_[static_cast<uint8_t>(text[at])];
  for (size_t i = at + 1; node != 0; ++i) {
    if (nodes_[node].token >= 0) {
      const AddedToken& token = tokens_[static_cast<size_t>(nodes_[node].token)];
      if (control || !token.control) found = &token, length = i - at;
    }
    if (i == text.size()) break;
    const auto byte = static_cast<uint8_t>(text[i]);
    const auto& children = nodes_[node].children;
    const auto it = std::lower_bound(children.begin(), children.end(), std::pair<uint8_t, uint32_t>{byte, 0});
    node = it != children.end() && it->first == byte ? it->second : 0;
  }
  return found;
}

std::optional<AddedTokens::Match> AddedTokens::find(std::string_view text, size_t from, bool control) const {
  for (size_t at = from; at < text.size(); ++at) {
    if (roots_[static_cast<uint8_t>(text[at])] == 0) continue;
    size_t length = 0;
    const AddedToken* const token = longest_at(text, at, control, length);
    if (token == nullptr) continue;
    Match match{at, at + length, token->id};
    if (token->single_word && ((match.begin > 0 && is_word(char_before(text, match.begin))) ||
                               (match.end < text.size() && is_word(char_after(text, match.end))))) {
      at = match.end - 1;
      continue;
    }
    if (token->strip_left) {
      while (match.begin > from) {
        const unicode::Char c = char_before(text, match.begin);
        if (!(c.flags & Flag::kSpace) || match.begin - from < c.size) break;
        match.begin -= c.size;
      }
    }
    if (token->strip_right) {
      while (match.end < text.size()) {
        const unicode::Char c = char_after(text, match.end);
        if (!(c.flags & Flag::kSpace)) break;
        match.end += c.size;
      }
    }
    return match;
  }
  return std::nullopt;
}

}  // namespace cachalot
