// What the targets of JSON schema, regular expression and GBNF grammar share: a source, and a text that is offered to what it compiles to.
// The two are split at the first NUL byte. What a mask allows must be accepted, and nothing else: byte by byte, and tokens of several bytes
// where the text holds them.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "grammar/constraint.h"

namespace cachalot::fuzz {

inline std::vector<std::string> grammar_vocabulary() {
  std::vector<std::string> out;
  for (int b = 0; b < 256; ++b) out.emplace_back(1, static_cast<char>(b));
  out.emplace_back();
  for (const char* text : {"{\"", "\":", "\"}", "ab", "true", "12", "\", \"", "\xC3\xA9", "\"\"", "\"ab", "aa", "aaa\""})
    out.emplace_back(text);
  return out;
}

// The text's own tokens of several bytes, and whether the mask allowed each where it begins.
class LongTokens {
 public:
  explicit LongTokens(const std::vector<std::string>& vocabulary) : vocabulary_(vocabulary) {}

  void begin_at(const std::string& text, size_t at, std::span<const uint32_t> mask) {
    for (size_t t = 257; t < vocabulary_.size(); ++t)
      if (text.compare(at, vocabulary_[t].size(), vocabulary_[t]) == 0)
        open_.push_back({at + vocabulary_[t].size(), (mask[t / 32] >> (t % 32) & 1u) != 0});
  }
  // The bytes before `at` were accepted.
  void check_accepted(size_t at) const {
    for (const auto& [end, allowed] : open_)
      if (end == at && !allowed) std::abort();
  }
  // The byte at `at` was not.
  void check_refused(size_t at) const {
    for (const auto& [end, allowed] : open_)
      if (end > at && allowed) std::abort();
  }

 private:
  const std::vector<std::string>& vocabulary_;
  std::vector<std::pair<size_t, bool>> open_;
};

inline int run_grammar(GrammarSource::Kind kind, const uint8_t* data, size_t size) {
  static const std::vector<std::string> vocabulary = grammar_vocabulary();
  static GrammarCompiler compiler(vocabulary, {256});
  const std::string input(reinterpret_cast<const char*>(data), size);
  const size_t split = input.find('\0');
  try {
    auto constraint = GrammarCompiler::constraint(compiler.compile({kind, input.substr(0, split)}));
    const std::string text = split == std::string::npos ? "" : input.substr(split + 1, 200);
    LongTokens tokens(vocabulary);
    for (size_t i = 0; i < text.size(); ++i) {
      const auto byte = static_cast<unsigned char>(text[i]);
      const auto mask = constraint->allowed();
      tokens.begin_at(text, i, mask);
      const bool allowed = mask[byte / 32] >> (byte % 32) & 1u;
      if (constraint->accept(byte) != allowed) std::abort();
      if (!allowed) {
        tokens.check_refused(i);
        break;
      }
      tokens.check_accepted(i + 1);
    }
  } catch (const Error&) {
  }
  return 0;
}

}  // namespace cachalot::fuzz
