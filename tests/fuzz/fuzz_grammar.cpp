// Fuzz target: a JSON schema, regular expression or GBNF grammar (the first byte says which), and a text that is offered to it.
// The two are split at the first NUL byte. What a mask allows must be accepted, and nothing else.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/error.h"
#include "grammar/constraint.h"

namespace {

std::vector<std::string> vocabulary() {
  std::vector<std::string> out;
  for (int b = 0; b < 256; ++b) out.emplace_back(1, static_cast<char>(b));
  out.emplace_back();
  for (const char* text : {"{\"", "\":", "\"}", "ab", "true", "12", "\", \"", "\xC3\xA9"}) out.emplace_back(text);
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cachalot;
  static GrammarCompiler compiler(vocabulary(), {256});
  if (size < 2) return 0;
  const std::string input(reinterpret_cast<const char*>(data) + 1, size - 1);
  const size_t split = input.find('\0');
  const auto kind = static_cast<GrammarSource::Kind>(data[0] % 4);
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
