// Vocabulary: token texts and bytes packed into blocks, found again through hash maps of views.
#include "text/vocabulary.h"

#include <algorithm>

#include "base/check.h"
#include "text/unicode.h"

namespace cachalot {

Vocabulary::Vocabulary(size_t n) : entries_(n) {
  CACHALOT_CHECK(n <= static_cast<size_t>(kMaxTokens));
  by_text_.reserve(n);
  by_bytes_.reserve(n);
}

std::string_view Vocabulary::store(std::string_view bytes) {
  constexpr size_t kBlock = 1u << 20;
  if (blocks_.empty() || blocks_.back().capacity() - blocks_.back().size() < bytes.size()) {
    blocks_.emplace_back();
    blocks_.back().reserve(std::max(kBlock, bytes.size()));
  }
  std::string& block = blocks_.back();
  const size_t at = block.size();
  block.append(bytes);
  return std::string_view(block).substr(at);
}

bool Vocabulary::set(int id, std::string_view text, TokenKind kind) {
  CACHALOT_CHECK(contains(id));
  Entry& entry = entries_[static_cast<size_t>(id)];
  if (entry.kind != TokenKind::kUnused || !entry.text.empty()) return false;
  const auto bytes = unicode::alphabet_to_bytes(text);
  entry.text = store(text);
  entry.piece = !bytes || *bytes == text ? entry.text : store(*bytes);
  entry.kind = kind;
  entry.spells_bytes = bytes.has_value();
  by_text_.emplace(entry.text, id);
  if (kind == TokenKind::kNormal && entry.spells_bytes) by_bytes_.emplace(entry.piece, id);
  return true;
}

bool Vocabulary::set_byte(int id, std::string_view text, uint8_t byte) {
  if (!set(id, text, TokenKind::kByte)) return false;
  const char value = static_cast<char>(byte);
  entries_[static_cast<size_t>(id)].piece = store({&value, 1});
  return true;
}

void Vocabulary::set_kind(int id, TokenKind kind) {
  CACHALOT_CHECK(contains(id));
  Entry& entry = entries_[static_cast<size_t>(id)];
  entry.kind = kind;
  if (kind == TokenKind::kNormal) return;
  if (const auto it = by_bytes_.find(entry.piece); it != by_bytes_.end() && it->second == id) by_bytes_.erase(it);
}

std::string_view Vocabulary::piece(int id) const { return contains(id) ? entries_[static_cast<size_t>(id)].piece : std::string_view(); }
std::string_view Vocabulary::text(int id) const { return contains(id) ? entries_[static_cast<size_t>(id)].text : std::string_view(); }

std::optional<int> Vocabulary::find_text(std::string_view text) const {
  const auto it = by_text_.find(text);
  return it == by_text_.end() ? std::nullopt : std::optional(it->second);
}
std::optional<int> Vocabulary::find_bytes(std::string_view bytes) const {
  const auto it = by_bytes_.find(bytes);
  return it == by_bytes_.end() ? std::nullopt : std::optional(it->second);
}

}  // namespace cachalot
