// printable: untrusted text made safe for a one-line message.
#include "base/error.h"

namespace cachalot {
namespace {

// Bytes of the well-formed, visible UTF-8 character at the start of `text`; 0 for anything else (a control character, half a character).
size_t visible_character(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const unsigned first = byte(0);
  if (first < 0x80) return first >= 0x20 && first != 0x7f ? 1 : 0;
  const size_t n = first >= 0xf0 && first <= 0xf4 ? 4 : first >= 0xe0 && first < 0xf0 ? 3 : first >= 0xc2 && first < 0xe0 ? 2 : 0;
  unsigned code = n == 4 ? first & 7u : n == 3 ? first & 15u : first & 31u;
  for (size_t i = 1; i < n; ++i) {
    if ((byte(i) & 0xc0u) != 0x80u) return 0;
    code = (code << 6) | (byte(i) & 0x3fu);
  }
  const bool overlong = (n == 3 && code < 0x800) || (n == 4 && code < 0x10000);
  if (n == 0 || overlong || code < 0xa0 || (code >= 0xd800 && code < 0xe000) || code > 0x10ffff) return 0;
  return n;
}

}  // namespace

std::string printable(std::string_view text, size_t limit) {
  std::string out;
  while (!text.empty()) {
    const size_t n = visible_character(text);
    const std::string piece = n > 0 ? std::string(text.substr(0, n)) : fmt::format("\\x{:02x}", static_cast<unsigned char>(text[0]));
    if (out.size() + piece.size() > limit) return out + "...";
    out += piece;
    text.remove_prefix(n > 0 ? n : 1);
  }
  return out;
}

}  // namespace cachalot
