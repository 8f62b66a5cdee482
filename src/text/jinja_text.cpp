// Implementation of Python's str operations on UTF-8.
#include "text/jinja_text.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace cachalot::jinja {
namespace {

struct Range {
  char32_t first, last;
};
struct CaseRun {
  char32_t first, last;
  int step, delta;
};
struct CaseSpecial {
  char32_t from;
  const char32_t* to;
};
#include "text/jinja_unicode.inc"

template <size_t N>
bool in_ranges(const Range (&ranges)[N], char32_t c) {
  const auto* at = std::upper_bound(std::begin(ranges), std::end(ranges), c, [](char32_t x, const Range& r) { return x < r.first; });
  return at != std::begin(ranges) && c <= std::prev(at)->last;
}

template <size_t R, size_t S>
void append_mapped(std::string& out, char32_t c, const CaseRun (&runs)[R], const CaseSpecial (&specials)[S]) {
  const auto* special =
      std::lower_bound(std::begin(specials), std::end(specials), c, [](const CaseSpecial& s, char32_t x) { return s.from < x; });
  if (special != std::end(specials) && special->from == c) {
    for (const char32_t* to = special->to; *to != 0; ++to) append_char(out, *to);
    return;
  }
  // Runs of step 2 interleave with others, so the one that holds c may start a little before the nearest start.
  const auto* at = std::upper_bound(std::begin(runs), std::end(runs), c, [](char32_t x, const CaseRun& r) { return x < r.first; });
  for (int back = 0; back < 4 && at != std::begin(runs); ++back) {
    --at;
    if (c <= at->last && (c - at->first) % static_cast<char32_t>(at->step) == 0) {
      append_char(out, static_cast<char32_t>(static_cast<int>(c) + at->delta));
      return;
    }
  }
  append_char(out, c);
}

void append_upper(std::string& out, char32_t c) {
  if (c < 0x80)
    out += static_cast<char>(c >= 'a' && c <= 'z' ? c - 32 : c);
  else
    append_mapped(out, c, kToUpper, kToUpperSpecial);
}
void append_lower(std::string& out, char32_t c) {
  if (c < 0x80)
    out += static_cast<char>(c >= 'A' && c <= 'Z' ? c + 32 : c);
  else
    append_mapped(out, c, kToLower, kToLowerSpecial);
}
void append_title(std::string& out, char32_t c) {
  if (c < 0x80)
    append_upper(out, c);
  else
    append_mapped(out, c, kToTitle, kToTitleSpecial);
}

size_t char_before(std::string_view text, size_t at) {
  do --at;
  while ((static_cast<unsigned char>(text[at]) & 0xc0) == 0x80);
  return at;
}

bool ends_line(char32_t c) { return (c >= 10 && c <= 13) || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 || c == 0x2029; }

// Byte offsets where the separator was found from the right, nearest the end first.
std::vector<size_t> find_from_right(std::string_view text, std::string_view separator, int64_t limit) {
  // Matches must not overlap counted from the right, so both are mirrored and searched forwards, which stays linear.
  const std::string mirrored(text.rbegin(), text.rend()), needle(separator.rbegin(), separator.rend());
  std::vector<size_t> found;
  size_t from = 0;
  while (limit < 0 || static_cast<int64_t>(found.size()) < limit) {
    const size_t at = jinja::find(mirrored, needle, from);
    if (at == std::string::npos) break;
    found.push_back(text.size() - at - needle.size());
    from = at + needle.size();
  }
  return found;
}

}  // namespace

bool is_valid_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const size_t length = lead < 0x80                   ? 1
                          : lead >= 0xc2 && lead < 0xe0 ? 2
                          : lead >= 0xe0 && lead < 0xf0 ? 3
                          : lead >= 0xf0 && lead < 0xf5 ? 4
                                                        : 0;
    if (length == 0 || i + length > text.size()) return false;
    char32_t c = length == 1 ? lead : lead & (0x7fu >> length);
    for (size_t k = 1; k < length; ++k) {
      const auto byte = static_cast<unsigned char>(text[i + k]);
      if ((byte & 0xc0) != 0x80) return false;
      c = (c << 6) | (byte & 0x3fu);
    }
    if ((length == 3 && (c < 0x800 || (c >= 0xd800 && c < 0xe000))) || (length == 4 && (c < 0x10000 || c > 0x10ffff))) return false;
    i += length;
  }
  return true;
}

size_t count_chars(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

size_t char_offset(std::string_view text, size_t n) {
  size_t at = 0;
  for (; at < text.size(); ++at) {
    if ((static_cast<unsigned char>(text[at]) & 0xc0) != 0x80 && n-- == 0) break;
  }
  return at;
}

char32_t next_char(std::string_view text, size_t& at) {
  const auto lead = static_cast<unsigned char>(text[at++]);
  if (lead < 0x80) return lead;
  const int more = lead < 0xe0 ? 1 : lead < 0xf0 ? 2 : 3;
  char32_t c = lead & (0x3fu >> more);
  for (int i = 0; i < more && at < text.size(); ++i) c = (c << 6) | (static_cast<unsigned char>(text[at++]) & 0x3fu);
  return c;
}

void append_char(std::string& out, char32_t c) {
  if (c < 0x80) {
    out += static_cast<char>(c);
    return;
  }
  if (c < 0x800) {
    out += static_cast<char>(0xc0 | (c >> 6));
  } else if (c < 0x10000) {
    out += static_cast<char>(0xe0 | (c >> 12));
    out += static_cast<char>(0x80 | ((c >> 6) & 0x3f));
  } else {
    out += static_cast<char>(0xf0 | (c >> 18));
    out += static_cast<char>(0x80 | ((c >> 12) & 0x3f));
    out += static_cast<char>(0x80 | ((c >> 6) & 0x3f));
  }
  out += static_cast<char>(0x80 | (c & 0x3f));
}

std::u32string to_chars32(std::string_view text) {
  std::u32string out;
  for (size_t at = 0; at < text.size();) out += next_char(text, at);
  return out;
}

bool is_space(char32_t c) {
  return (c >= 9 && c <= 13) || (c >= 28 && c <= 32) || c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) ||
         c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}
bool is_printable(char32_t c) { return !in_ranges(kNotPrintable, c); }
bool is_letter(char32_t c) { return in_ranges(kLetter, c); }
bool is_decimal(char32_t c) { return in_ranges(kDecimal, c); }
bool is_upper(char32_t c) { return in_ranges(kUpper, c); }
bool is_lower(char32_t c) { return in_ranges(kLower, c); }

std::string upper(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) append_upper(out, next_char(text, at));
  return out;
}

std::string lower(std::string_view text) {
  std::string out;
  bool after_letter = false;
  for (size_t at = 0; at < text.size();) {
    const char32_t c = next_char(text, at);
    size_t peek = at;
    // A capital sigma that ends a word becomes the final form.
    if (c == 0x3a3 && after_letter && (peek >= text.size() || !is_letter(next_char(text, peek))))
      append_char(out, 0x3c2);
    else
      append_lower(out, c);
    after_letter = is_letter(c);
  }
  return out;
}

std::string capitalize(std::string_view text) {
  if (text.empty()) return {};
  std::string out;
  size_t at = 0;
  append_title(out, next_char(text, at));
  return out + lower(text.substr(at));
}

std::string title(std::string_view text) {
  std::string out;
  bool inside = false;
  for (size_t at = 0; at < text.size();) {
    const char32_t c = next_char(text, at);
    if (inside)
      append_lower(out, c);
    else
      append_title(out, c);
    inside = is_upper(c) || is_lower(c) || (c >= 0x1c5 && c <= 0x1f2 && is_letter(c));
  }
  return out;
}

std::string title_filter(std::string_view text) {
  std::string out;
  size_t word = 0;
  const auto flush = [&](size_t end) {
    if (end > word) {
      size_t at = word;
      append_upper(out, next_char(text, at));
      out += lower(text.substr(at, end - at));
    }
  };
  for (size_t at = 0; at < text.size();) {
    const size_t start = at;
    const char32_t c = next_char(text, at);
    if (is_space(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<') {
      flush(start);
      append_char(out, c);
      word = at;
    }
  }
  flush(text.size());
  return out;
}

std::string swapcase(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const char32_t c = next_char(text, at);
    if (is_upper(c))
      append_lower(out, c);
    else
      append_upper(out, c);
  }
  return out;
}

std::string_view strip(std::string_view text, const std::string* chars, Side side) {
  std::u32string set = chars != nullptr ? to_chars32(*chars) : std::u32string();
  std::sort(set.begin(), set.end());
  const auto drops = [&](char32_t c) { return chars != nullptr ? std::binary_search(set.begin(), set.end(), c) : is_space(c); };
  size_t begin = 0, end = text.size();
  while (side != Side::kRight && begin < end) {
    size_t at = begin;
    if (!drops(next_char(text, at))) break;
    begin = at;
  }
  while (side != Side::kLeft && end > begin) {
    const size_t start = char_before(text, end);
    size_t at = start;
    if (!drops(next_char(text, at))) break;
    end = start;
  }
  return text.substr(begin, end - begin);
}

size_t find(std::string_view text, std::string_view needle, size_t from) {
  if (from > text.size()) return std::string_view::npos;
  if (needle.empty()) return from;
  const void* at = ::memmem(text.data() + from, text.size() - from, needle.data(), needle.size());
  return at == nullptr ? std::string_view::npos : static_cast<size_t>(static_cast<const char*>(at) - text.data());
}

size_t rfind(std::string_view text, std::string_view needle) {
  if (needle.empty()) return text.size();
  const std::vector<size_t> found = find_from_right(text, needle, 1);
  return found.empty() ? std::string_view::npos : found[0];
}

size_t count(std::string_view text, std::string_view needle) {
  if (needle.empty()) return count_chars(text) + 1;
  size_t n = 0;
  for (size_t at = jinja::find(text, needle); at != std::string_view::npos; at = jinja::find(text, needle, at + needle.size())) ++n;
  return n;
}

std::vector<std::string_view> split(std::string_view text, const std::string* separator, int64_t max_splits) {
  std::vector<std::string_view> parts;
  if (separator != nullptr) {
    size_t from = 0;
    while (max_splits < 0 || static_cast<int64_t>(parts.size()) < max_splits) {
      const size_t at = jinja::find(text, *separator, from);
      if (at == std::string_view::npos) break;
      parts.push_back(text.substr(from, at - from));
      from = at + separator->size();
    }
    parts.push_back(text.substr(from));
    return parts;
  }
  text = strip(text, nullptr, Side::kLeft);
  while (!text.empty()) {
    if (max_splits >= 0 && static_cast<int64_t>(parts.size()) >= max_splits) {
      parts.push_back(text);
      break;
    }
    size_t at = 0, end = 0;
    while (at < text.size() && !is_space(next_char(text, at))) end = at;
    parts.push_back(text.substr(0, end));
    text = strip(text.substr(end), nullptr, Side::kLeft);
  }
  return parts;
}

std::vector<std::string_view> rsplit(std::string_view text, const std::string* separator, int64_t max_splits) {
  std::vector<std::string_view> parts;
  if (separator != nullptr) {
    size_t end = text.size();
    for (const size_t at : find_from_right(text, *separator, max_splits)) {
      parts.push_back(text.substr(at + separator->size(), end - at - separator->size()));
      end = at;
    }
    parts.push_back(text.substr(0, end));
  } else {
    text = strip(text, nullptr, Side::kRight);
    while (!text.empty()) {
      if (max_splits >= 0 && static_cast<int64_t>(parts.size()) >= max_splits) {
        parts.push_back(text);
        break;
      }
      size_t begin = text.size();
      while (begin > 0) {
        const size_t start = char_before(text, begin);
        size_t at = start;
        if (is_space(next_char(text, at))) break;
        begin = start;
      }
      parts.push_back(text.substr(begin));
      text = strip(text.substr(0, begin), nullptr, Side::kRight);
    }
  }
  std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<std::string_view> split_lines(std::string_view text, bool keep_ends) {
  std::vector<std::string_view> lines;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = at;
    const char32_t c = next_char(text, at);
    if (!ends_line(c)) continue;
    if (c == '\r' && at < text.size() && text[at] == '\n') ++at;
    lines.push_back(text.substr(begin, (keep_ends ? at : end) - begin));
    begin = at;
  }
  if (begin < text.size()) lines.push_back(text.substr(begin));
  return lines;
}

std::string escape_html(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '\'': out += "&#39;"; break;
      case '"': out += "&#34;"; break;
      default: out += c;
    }
  }
  return out;
}

std::string quote(std::string_view text) {
  const char mark = text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos ? '"' : '\'';
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out(1, mark);
  for (size_t at = 0; at < text.size();) {
    const char32_t c = next_char(text, at);
    if (c == static_cast<unsigned char>(mark) || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c == '\n' || c == '\r' || c == '\t') {
      out += c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t";
    } else if (is_printable(c)) {
      append_char(out, c);
    } else {
      const int digits = c < 0x100 ? 2 : c < 0x10000 ? 4 : 8;
      out += c < 0x100 ? "\\x" : c < 0x10000 ? "\\u" : "\\U";
      for (int shift = 4 * (digits - 1); shift >= 0; shift -= 4) out += kHex[(c >> shift) & 15];
    }
  }
  return out + mark;
}

}  // namespace cachalot::jinja
