// Text inside the pictures (SVG) that commands draw.
#pragma once

#include <string>
#include <string_view>

namespace cachalot {

// With the characters that XML reads as markup written as entities.
inline std::string xml_escaped(std::string_view text) {
  std::string out;
  for (const char c : text) switch (c) {
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '&': out += "&amp;"; break;
      case '"': out += "&quot;"; break;
      default: out += c;
    }
  return out;
}

}  // namespace cachalot
