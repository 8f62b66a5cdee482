// JsonScanner: RFC 8259 by hand, without recursion other than the bounded one of skip_value.
#include "io/json_scanner.h"

#include <simdjson.h>

#include "base/error.h"

namespace cachalot {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
int hex_value(char c) {
  if (is_digit(c)) return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}
// The code unit of "\uXXXX" whose digits start at `at`; -1 when they are not four hex digits.
int code_unit(std::string_view text, size_t at) {
  if (at + 4 > text.size()) return -1;
  int value = 0;
  for (size_t i = at; i < at + 4; ++i) {
    const int digit = hex_value(text[i]);
    if (digit < 0) return -1;
    value = value * 16 + digit;
  }
  return value;
}
void append_utf8(std::string& out, uint32_t code) {
  const auto add = [&out](uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (code < 0x80) return add(code);
  if (code < 0x800) {
    add(0xc0 | (code >> 6));
  } else if (code < 0x10000) {
    add(0xe0 | (code >> 12));
    add(0x80 | ((code >> 6) & 63));
  } else {
    add(0xf0 | (code >> 18));
    add(0x80 | ((code >> 12) & 63));
    add(0x80 | ((code >> 6) & 63));
  }
  add(0x80 | (code & 63));
}

}  // namespace

JsonScanner::JsonScanner(std::string_view text, std::string where) : text_(text), where_(std::move(where)) {
  if (!simdjson::validate_utf8(text.data(), text.size())) fail("{}: the JSON text is not valid UTF-8", where_);
}

char JsonScanner::peek() {
  while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\r' || text_[at_] == '\t')) ++at_;
  return at_ < text_.size() ? text_[at_] : '\0';
}

bool JsonScanner::accept(char c) {
  if (peek() != c || at_ >= text_.size()) return false;
  ++at_;
  return true;
}

void JsonScanner::expect(char c) {
  if (!accept(c)) wrong(fmt::format("'{}'", c));
}

JsonScanner::Text JsonScanner::string(std::string_view what) {
  if (!accept('"')) wrong(fmt::format("{} (a string)", what));
  const size_t begin = at_;
  bool escaped = false;
  for (;; ++at_) {
    if (at_ >= text_.size()) wrong("the end of a string");
    const char c = text_[at_];
    if (c == '"') break;
    if (static_cast<unsigned char>(c) < 0x20) wrong("no control character in a string");
    if (c != '\\') continue;
    escaped = true;
    ++at_;
    const char kind = at_ < text_.size() ? text_[at_] : '\0';
    if (kind == 'u') {
      if (code_unit(text_, at_ + 1) < 0) wrong("four hex digits after \\u");
      at_ += 4;
    } else if (kind == '\0' || std::string_view("\"\\/bfnrt").find(kind) == std::string_view::npos) {
      wrong("a known escape after \\");
    }
  }
  return {text_.substr(begin, at_++ - begin), escaped};
}

std::string JsonScanner::unescape(const Text& text) {
  if (!text.escaped) return std::string(text.raw);
  constexpr std::string_view kNames = "bfnrt", kValues = "\b\f\n\r\t";
  std::string out;
  for (size_t i = 0; i < text.raw.size(); ++i) {
    if (text.raw[i] != '\\') {
      out.push_back(text.raw[i]);
      continue;
    }
    const char kind = text.raw[++i];
    if (kind == 'u') {
      auto code = static_cast<uint32_t>(code_unit(text.raw, i + 1));
      i += 4;
      const bool high = code >= 0xd800 && code < 0xdc00;
      const int low = high && text.raw.substr(i + 1, 2) == "\\u" ? code_unit(text.raw, i + 3) : -1;
      if (high && low >= 0xdc00 && low < 0xe000) {
        code = 0x10000 + ((code - 0xd800) << 10) + (static_cast<uint32_t>(low) - 0xdc00);
        i += 6;
      } else if (code >= 0xd800 && code < 0xe000) {
        code = 0xfffd;  // a lone surrogate stands for no character
      }
      append_utf8(out, code);
    } else {
      const size_t named = kNames.find(kind);
      out.push_back(named == std::string_view::npos ? kind : kValues[named]);
    }
  }
  return out;
}

uint64_t JsonScanner::whole_number(std::string_view what) {
  const char first = peek();
  if (!is_digit(first) && first != '-') wrong(what);
  const size_t begin = at_;
  skip_number();
  const std::string_view token = text_.substr(begin, at_ - begin);
  uint64_t value = 0;
  bool good = true;
  for (const char c : token) {
    good = good && is_digit(c) && value <= (static_cast<uint64_t>(INT64_MAX) - static_cast<uint64_t>(c - '0')) / 10;
    if (!good) break;
    value = value * 10 + static_cast<uint64_t>(c - '0');
  }
  if (!good) fail("{}: {}: found {}, expected a whole number from 0 to 2^63-1", where_, what, printable(token, 40));
  return value;
}

void JsonScanner::skip_number() {
  const auto digits = [this] {
    if (at_ >= text_.size() || !is_digit(text_[at_])) wrong("a digit");
    while (at_ < text_.size() && is_digit(text_[at_])) ++at_;
  };
  if (text_[at_] == '-') ++at_;
  if (at_ < text_.size() && text_[at_] == '0')
    ++at_;
  else
    digits();
  if (at_ < text_.size() && is_digit(text_[at_])) wrong("no digit after a leading zero");
  if (at_ < text_.size() && text_[at_] == '.') {
    ++at_;
    digits();
  }
  if (at_ < text_.size() && (text_[at_] == 'e' || text_[at_] == 'E')) {
    ++at_;
    if (at_ < text_.size() && (text_[at_] == '+' || text_[at_] == '-')) ++at_;
    digits();
  }
}

void JsonScanner::skip_word(std::string_view word) {
  if (text_.substr(at_, word.size()) != word) wrong("a value");
  at_ += word.size();
}

void JsonScanner::skip_null() {
  if (peek() != 'n') wrong("null");
  skip_word("null");
}

void JsonScanner::skip_value(int max_depth) {
  const char c = peek();
  if ((c == '{' || c == '[') && max_depth <= 0) wrong("no deeper nesting");
  switch (c) {
    case '{': return object([&](const Text&) { skip_value(max_depth - 1); });
    case '[': return array([&] { skip_value(max_depth - 1); });
    case '"': string("a string"); return;
    case 't': return skip_word("true");
    case 'f': return skip_word("false");
    case 'n': return skip_word("null");
    default:
      if (!is_digit(c) && c != '-') wrong("a value");
      skip_number();
  }
}

void JsonScanner::expect_end() {
  peek();
  if (at_ < text_.size()) wrong("the end of the text");
}

void JsonScanner::wrong(std::string_view expected) {
  if (at_ >= text_.size()) fail("{}: byte {}: the JSON text ends, expected {}", where_, at_, expected);
  fail("{}: byte {}: found \"{}\", expected {}", where_, at_, printable(text_.substr(at_, 16), 40), expected);
}

}  // namespace cachalot
