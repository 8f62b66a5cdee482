// The hand-written matchers behind PreTokenizer: one type per regular expression, each with
//   const char* match(const char* p) const: the end of the match that starts at p, or p when there is none; amortised O(1) a byte.
// isolate() applies one to a piece, cascade() several in turn, each to the pieces that the one before it left.
#pragma once

#include <string_view>

#include "text/unicode.h"

namespace cachalot::split {

using unicode::Char;
using unicode::Flag;

// The piece under the knife; rules look no further than its end, as each step of the reference sees each piece alone.
struct Piece {
  const char* begin;
  const char* end;
  const uint8_t* table;  // unicode::flag_table()

  explicit Piece(std::string_view text, const uint8_t* flag_table) : begin(text.data()), end(begin + text.size()), table(flag_table) {}
  [[nodiscard]] Char at(const char* p) const { return unicode::char_at(p, end, table); }
  // End of the run of characters from p for which `wanted` holds.
  template <typename Predicate>
  [[nodiscard]] const char* run(const char* p, Predicate wanted) const {
    while (p < end) {
      const Char c = at(p);
      if (!wanted(c)) break;
      p += c.size;
    }
    return p;
  }
  [[nodiscard]] const char* run_of(const char* p, int flags) const {
    return run(p, [flags](Char c) { return (c.flags & flags) != 0; });
  }
};

inline bool is_newline(uint32_t code) { return code == '\r' || code == '\n'; }
inline bool is_ascii_letter(uint32_t code) { return (code | 0x20) >= 'a' && (code | 0x20) <= 'z' && code < 0x80; }
inline bool is_ascii_punctuation(Char c) { return c.code < 0x80 && (c.flags & (Flag::kPunctuation | Flag::kSymbol)) != 0; }

template <typename Rule, typename Sink>
void isolate(std::string_view text, const uint8_t* table, Sink&& sink) {
  const Piece piece(text, table);
  const Rule rule(piece);
  const auto emit = [&](const char* from, const char* to) { sink(std::string_view(from, static_cast<size_t>(to - from))); };
  const char* gap = piece.begin;
  for (const char* p = piece.begin; p < piece.end;) {
    const char* const match = rule.match(p);
    if (match == p) {
      p += piece.at(p).size;
      continue;
    }
    if (gap < p) emit(gap, p);
    emit(p, match);
    p = gap = match;
  }
  if (gap < piece.end) emit(gap, piece.end);
}

template <typename First, typename... Rest, typename Sink>
void cascade(std::string_view text, const uint8_t* table, Sink&& sink) {
  isolate<First>(text, table, [&](std::string_view piece) {
    if constexpr (sizeof...(Rest) == 0) {
      sink(piece);
    } else {
      cascade<Rest...>(piece, table, sink);
    }
  });
}

struct RuleBase {
  explicit RuleBase(const Piece& text) : piece(text) {}
  Piece piece;

  // \s+(?!\S)|\s+ : a run of spaces leaves its last one to the word behind it.
  [[nodiscard]] const char* match_spaces(const char* p) const {
    const char* last = p;
    const char* q = p;
    while (q < piece.end) {
      const Char c = piece.at(q);
      if (!(c.flags & Flag::kSpace)) return last == p ? q : last;
      last = q;
      q += c.size;
    }
    return q;
  }
  // \s*[\r\n]+ : up to the last line break of the run of spaces.
  [[nodiscard]] const char* match_line_breaks(const char* p) const {
    const char* found = p;
    for (const char* q = p; q < piece.end;) {
      const Char c = piece.at(q);
      if (!(c.flags & Flag::kSpace)) break;
      q += c.size;
      if (is_newline(c.code)) found = q;
    }
    return found;
  }
  [[nodiscard]] const char* skip_newlines(const char* p) const {
    while (p < piece.end && is_newline(static_cast<uint8_t>(*p))) ++p;
    return p;
  }
  // An apostrophe's suffix: 's 't 're 've 'm 'll 'd. Folding case takes in U+017F, which folds to s.
  template <bool kFoldCase>
  [[nodiscard]] const char* match_contraction(const char* p) const {
    const auto left = piece.end - p;
    if (left < 2 || *p != '\'') return p;
    const auto lower = [](char c) { return kFoldCase ? static_cast<char>(c | 0x20) : c; };
    const char a = lower(p[1]);
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return p + 2;
    if (left < 3) return p;
    if (kFoldCase && p[1] == '\xC5' && p[2] == '\xBF') return p + 3;
    const char b = lower(p[2]);
    return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? p + 3 : p;
  }
};

// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
struct Gpt2Words : RuleBase {
  using RuleBase::RuleBase;
  [[nodiscard]] const char* match(const char* p) const {
    if (const char* const end = match_contraction<false>(p); end != p) return end;
    const char* const q = *p == ' ' && p + 1 < piece.end ? p + 1 : p;
    const Char c = piece.at(q);
    if (c.flags & Flag::kLetter) return piece.run_of(q, Flag::kLetter);
    if (c.flags & Flag::kNumber) return piece.run_of(q, Flag::kNumber);
    if (!(c.flags & Flag::kSpace))
      return piece.run(q, [](Char x) { return (x.flags & (Flag::kSpace | Flag::kLetter | Flag::kNumber)) == 0; });
    return match_spaces(p);
  }
};

// (?i:'s|...)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,n}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
template <int kDigits>
struct Llama3Words : RuleBase {
  using RuleBase::RuleBase;
  [[nodiscard]] const char* match(const char* p) const {
    if (const char* const end = match_contraction<true>(p); end != p) return end;
    const Char c = piece.at(p);
    if (c.flags & Flag::kLetter) return piece.run_of(p, Flag::kLetter);
    const char* const q = p + c.size;
    if (c.flags & Flag::kNumber) return match_digits(p);
    const bool more = q < piece.end;
    if (more && !is_newline(c.code) && (piece.at(q).flags & Flag::kLetter)) return piece.run_of(q, Flag::kLetter);
    const char* const word = c.code == ' ' ? q : p;
    const char* const end = piece.run(word, [](Char x) { return (x.flags & (Flag::kSpace | Flag::kLetter | Flag::kNumber)) == 0; });
    if (end != word) return skip_newlines(end);
    if (const char* const lines = match_line_breaks(p); lines != p) return lines;
    return match_spaces(p);
  }

 private:
  [[nodiscard]] const char* match_digits(const char* p) const {
    for (int i = 0; i < kDigits && p < piece.end; ++i) {
      const Char c = piece.at(p);
      if (!(c.flags & Flag::kNumber)) break;
      p += c.size;
    }
    return p;
  }
};

// \p{N}{1,n}
template <int kDigits>
struct DigitGroups : RuleBase {
  using RuleBase::RuleBase;
  [[nodiscard]] const char* match(const char* p) const {
    for (int i = 0; i < kDigits && p < piece.end; ++i) {
      const Char c = piece.at(p);
      if (!(c.flags & Flag::kNumber)) break;
      p += c.size;
    }
    return p;
  }
};

// \p{N}+
struct NumberRuns : RuleBase {
  using RuleBase::RuleBase;
  [[nodiscard]] const char* match(const char* p) const { return piece.run_of(p, Flag::kNumber); }
};

// [U+4E00-U+9FA5 U+3040-U+30FF]+ : Han and kana.
struct HanKanaRuns : RuleBase {
  using RuleBase::RuleBase;
  [[nodiscard]] const char* match(const char* p) const {
    return piece.run(p, [](Char c) { return (c.code >= 0x4E00 && c.code <= 0x9FA5) || (c.code >= 0x3040 && c.code <= 0x30FF); });
  }
};

// [U+0800-U+9FA5 U+AC00-U+D7FF]+ : what the V2 family takes for Chinese, Japanese and Korean.
struct EastAsianRuns : RuleBase {
  using RuleBase::RuleBase;
  [[nodiscard]] const char* match(const char* p) const {
    return piece.run(p, [](Char c) { return (c.code >= 0x0800 && c.code <= 0x9FA5) || (c.code >= 0xAC00 && c.code <= 0xD7FF); });
  }
};

// [\r\n]
struct SingleNewline : RuleBase {
  using RuleBase::RuleBase;
  [[nodiscard]] const char* match(const char* p) const { return is_newline(static_cast<uint8_t>(*p)) ? p + 1 : p; }
};

// \s?[class]+
template <typename Class>
struct SpacedRuns : RuleBase {
  using RuleBase::RuleBase;
  [[nodiscard]] const char* match(const char* p) const {
    const Char c = piece.at(p);
    if (Class::has(c)) return piece.run(p, Class::has);
    if (!(c.flags & Flag::kSpace)) return p;
    const char* const end = piece.run(p + c.size, Class::has);
    return end == p + c.size ? p : end;
  }
};
struct CasedLetters {
  static bool has(Char c) { return (c.flags & Flag::kCased) != 0; }
};
struct Letters {
  static bool has(Char c) { return (c.flags & Flag::kLetter) != 0; }
};
struct Punctuation {
  static bool has(Char c) { return (c.flags & Flag::kPunctuation) != 0; }
};
// [!-/:-~ fullwidth quotes ideographic] as DeepSeek-LLM lists them. Its range :-~ holds the ASCII letters, which the step before took.
struct ListedPunctuation {
  static bool has(Char c) {
    const uint32_t x = c.code;
    return (x >= '!' && x <= '/') || (x >= ':' && x <= '~') || (x >= 0xFF01 && x <= 0xFF0F) || (x >= 0xFF1A && x <= 0xFF5E) ||
           (x >= 0x2018 && x <= 0x201F) || (x >= 0x3000 && x <= 0x3002);
  }
};

// \s+$ : found once per piece from its end, as trying it at each space would be quadratic.
struct TrailingSpaces : RuleBase {
  explicit TrailingSpaces(const Piece& text) : RuleBase(text), from(text.end) {
    const char* run_begin = nullptr;
    for (const char* p = text.begin; p < text.end;) {
      const Char c = text.at(p);
      if (!(c.flags & Flag::kSpace)) {
        run_begin = nullptr;
      } else if (run_begin == nullptr) {
        run_begin = p;
      }
      p += c.size;
    }
    if (run_begin != nullptr) from = run_begin;
  }
  [[nodiscard]] const char* match(const char* p) const { return p >= from ? piece.end : p; }
  const char* from;
};

// [ASCII punctuation][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
struct DeepseekV3Words : RuleBase {
  using RuleBase::RuleBase;
  [[nodiscard]] const char* match(const char* p) const {
    constexpr int kWord = Flag::kLetter | Flag::kMark, kSign = Flag::kPunctuation | Flag::kSymbol;
    const Char c = piece.at(p);
    const char* const q = p + c.size;
    if (c.flags & kWord) return piece.run_of(p, kWord);
    if (is_ascii_punctuation(c)) {
      const char* const end = piece.run(q, [](Char x) { return is_ascii_letter(x.code); });
      if (end != q) return end;
    }
    if (q < piece.end && !is_newline(c.code) && !(c.flags & kSign) && (piece.at(q).flags & kWord)) return piece.run_of(q, kWord);
    const char* const word = c.code == ' ' ? q : p;
    if (const char* const end = piece.run_of(word, kSign); end != word) return skip_newlines(end);
    if (!(c.flags & Flag::kSpace)) return p;
    if (const char* const lines = match_line_breaks(p); lines != p) return lines;
    return match_spaces(p);
  }
};

}  // namespace cachalot::split
