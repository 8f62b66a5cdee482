// The tokens of a tokenizer: the bytes each stands for, its kind, and the way back from bytes and from text to ids.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace cachalot {

// Numbered as GGUF's tokenizer.ggml.token_type.
enum class TokenKind : uint8_t { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };

constexpr int kMaxTokens = 1 << 21;  // eight times the largest vocabulary in use

class Vocabulary {
 public:
  // Ids 0 to n-1, all unused. n <= kMaxTokens.
  explicit Vocabulary(size_t n);

  // Gives an unused id its meaning. `text` is in the spelling of the file: the byte alphabet where `text` lies inside of it, else
  // the characters themselves, which BPE can then never reach. False when the id has one already.
  bool set(int id, std::string_view text, TokenKind kind);
  // Like set for a GGUF byte token: `text` spells `byte`.
  bool set_byte(int id, std::string_view text, uint8_t byte);
  // A token that is no longer normal is out of BPE's reach.
  void set_kind(int id, TokenKind kind);

  [[nodiscard]] int size() const { return static_cast<int>(entries_.size()); }
  [[nodiscard]] bool contains(int id) const { return id >= 0 && id < size(); }
  // Empty for ids out of range and unused ones.
  [[nodiscard]] std::string_view piece(int id) const;
  [[nodiscard]] TokenKind kind(int id) const { return contains(id) ? entries_[static_cast<size_t>(id)].kind : TokenKind::kUnused; }
  // The token's spelling in the file.
  [[nodiscard]] std::string_view text(int id) const;
  // Whether the spelling is in the byte alphabet.
  [[nodiscard]] bool spells_bytes(int id) const { return contains(id) && entries_[static_cast<size_t>(id)].spells_bytes; }

  // By spelling; of two tokens with one spelling, the first set.
  [[nodiscard]] std::optional<int> find_text(std::string_view text) const;
  // The normal token that stands for these bytes.
  [[nodiscard]] std::optional<int> find_bytes(std::string_view bytes) const;

 private:
  struct Entry {
    std::string_view text, piece;
    TokenKind kind = TokenKind::kUnused;
    bool spells_bytes = false;
  };
  std::string_view store(std::string_view bytes);

  std::vector<Entry> entries_;
  std::vector<std::string> blocks_;  // each filled once within its reserved capacity, so that views into it stay
  std::unordered_map<std::string_view, int> by_text_;
  std::unordered_map<std::string_view, int> by_bytes_;
};

}  // namespace cachalot
