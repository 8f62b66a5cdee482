// Sets of Unicode code points, and how a character of such a set is spelled in bytes: as plain UTF-8, or inside a JSON string.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "grammar/grammar.h"

namespace cachalot {

class CodePoints {
 public:
  static constexpr uint32_t kLast = 0x10FFFF;

  void add(uint32_t low, uint32_t high);
  void add(const CodePoints& other);
  [[nodiscard]] CodePoints complement() const;  // without surrogates, which no text holds
  [[nodiscard]] CodePoints without(const CodePoints& other) const;
  // Ranges in order, not touching each other.
  struct Range {
    uint32_t low, high;
  };
  [[nodiscard]] std::vector<Range> ranges() const;

  static CodePoints all();
  static CodePoints of(uint32_t c);

 private:
  std::vector<Range> ranges_;  // any order
};

enum class Spelling : uint8_t { utf8, json_string };

// One character of the set. An empty set matches nothing: Error.
Grammar::Expr any_of(Grammar& grammar, const CodePoints& set, Spelling spelling);

// Reads one code point of well-formed UTF-8 and moves on. Throws Error naming the offset otherwise.
uint32_t next_code_point(std::string_view text, size_t& at);

}  // namespace cachalot
