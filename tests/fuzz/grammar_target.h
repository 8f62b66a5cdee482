// What the targets of JSON schema, regular expression and GBNF grammar share: a source, and a text that is offered to what it compiles to.
// The two are split at the first NUL byte. What a mask allows must be accepted, and nothing else.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/error.h"
#include "grammar/constraint.h"

namespace cachalot::fuzz {

inline std::vector<std::string> grammar_vocabulary() {
  std::vector<std::string> out;
  for (int b = 0; b < 256; ++b) out.emplace_back(1, static_cast<char>(b));
  out.emplace_back();
  for (const char* text : {"{\"", "\":", "\"}", "ab", "true", "12", "\", \"", "\xC3\xA9"}) out.emplace_back(text);
  return out;
}

inline int run_grammar(GrammarSource::Kind kind, const uint8_t* data, size_t size) {
  static GrammarCompiler compiler(grammar_vocabulary(), {256});
  const std::string input(reinterpret_cast<const char*>(data), size);
  const size_t split = input.find('\0');
  try {
    auto constraint = GrammarCompiler::constraint(compiler.compile({kind, input.substr(0, split)}));
    const std::string text = split == std::string::npos ? "" : input.substr(split + 1, 200);
    for (const char c : text) {
      const auto byte = static_cast<unsigned char>(c);
      const auto mask = constraint->allowed();
      const bool allowed = mask[byte / 32] >> (byte % 32) & 1u;
      if (constraint->accept(byte) != allowed) std::abort();
      if (!allowed) break;
    }
  } catch (const Error&) {
  }
  return 0;
}

}  // namespace cachalot::fuzz
