// Implementation of the template lexer.
#include "text/jinja_lexer.h"

#include <algorithm>
#include <cstdlib>

#include "base/error.h"
#include "text/jinja_text.h"

namespace cachalot::jinja {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool starts_name(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || static_cast<unsigned char>(c) >= 0x80; }

// \r\n and \r become \n, and one newline at the very end goes.
std::string normalize_newlines(const std::string& source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      out += source[i];
    } else {
      out += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    }
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

class Lexer {
 public:
  Lexer(const std::string& source, const std::string& name) : source_(normalize_newlines(source)), name_(name) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) {
      const size_t open = find_opening();
      if (open == std::string::npos) {
        add_text(source_.substr(at_));
        at_ = source_.size();
        break;
      }
      const char kind = source_[open + 1];
      const char sign = open + 2 < source_.size() ? source_[open + 2] : '\0';
      add_text(text_before(open, kind, sign));
      count_lines(at_, open);
      at_ = open + 2 + (sign == '-' || sign == '+' ? 1 : 0);
      if (kind == '#') {
        comment();
      } else if (kind == '%' && starts_raw()) {
        raw();
      } else {
        tag(kind == '%');
      }
    }
    add(Token::Kind::kEnd);
    return std::move(tokens_);
  }

 private:
  template <typename... A>
  [[noreturn]] void fail_here(fmt::format_string<A...> format, A&&... args) const {
    fail("template {}, line {}: {}", name_, line_, fmt::format(format, std::forward<A>(args)...));
  }
  void add(Token::Kind kind, std::string text = {}) { tokens_.push_back({kind, line_, std::move(text)}); }
  void add_text(std::string text) {
    if (!text.empty()) add(Token::Kind::kText, std::move(text));
  }
  void count_lines(size_t from, size_t to) {
    line_ += static_cast<int>(
        std::count(source_.begin() + static_cast<std::ptrdiff_t>(from), source_.begin() + static_cast<std::ptrdiff_t>(to), '\n'));
  }
  [[nodiscard]] bool here(std::string_view text) const { return source_.compare(at_, text.size(), text) == 0; }

  [[nodiscard]] size_t find_opening() const {
    for (size_t i = source_.find('{', at_); i != std::string::npos && i + 1 < source_.size(); i = source_.find('{', i + 1)) {
      const char next = source_[i + 1];
      if (next == '{' || next == '%' || next == '#') return i;
    }
    return std::string::npos;
  }

  // The text up to a tag, without the white space that the tag's sign (or lstrip_blocks) takes away.
  [[nodiscard]] std::string text_before(size_t open, char kind, char sign) const {
    const std::string_view text = std::string_view(source_).substr(at_, open - at_);
    if (sign == '-') return std::string(strip(text, nullptr, Side::kRight));
    if (sign != '+' && kind != '{') {
      const size_t newline = text.rfind('\n');
      const size_t begin = newline == std::string_view::npos ? 0 : newline + 1;
      if ((newline != std::string_view::npos || line_starts_) && strip(text.substr(begin), nullptr, Side::kLeft).empty()) {
        return std::string(text.substr(0, begin));
      }
    }
    return std::string(text);
  }

  void skip_space() {
    const std::string_view rest = std::string_view(source_).substr(at_);
    const size_t skipped = rest.size() - strip(rest, nullptr, Side::kLeft).size();
    count_lines(at_, at_ + skipped);
    at_ += skipped;
  }

  // Moves past the end mark of a tag when it is here: "-%}" takes all white space after it, "%}" one newline, "+%}" nothing.
  bool take_end(std::string_view mark, bool trims_newline) {
    const size_t start = at_;
    if (source_[at_] == '-' && source_.compare(at_ + 1, mark.size(), mark) == 0) {
      at_ += 1 + mark.size();
      skip_space();
    } else if (trims_newline && source_[at_] == '+' && source_.compare(at_ + 1, mark.size(), mark) == 0) {
      at_ += 1 + mark.size();
    } else if (here(mark)) {
      at_ += mark.size();
      if (trims_newline && at_ < source_.size() && source_[at_] == '\n') {
        ++line_;
        ++at_;
      }
    } else {
      return false;
    }
    line_starts_ = at_ > start && source_[at_ - 1] == '\n';
    return true;
  }

  void comment() {
    for (; at_ < source_.size(); ++at_) {
      if (take_end("#}", true)) return;
      if (source_[at_] == '\n') ++line_;
    }
    fail_here("a comment has no end");
  }

  [[nodiscard]] bool starts_raw() const {
    std::string_view rest = strip(std::string_view(source_).substr(at_), nullptr, Side::kLeft);
    if (!rest.starts_with("raw")) return false;
    rest = strip(rest.substr(3), nullptr, Side::kLeft);
    return rest.starts_with("%}") || rest.starts_with("-%}");
  }

  void raw() {
    skip_space();
    at_ += 3;
    skip_space();
    if (source_[at_] == '-') {
      at_ += 3;
      skip_space();
    } else {
      at_ += 2;
    }
    line_starts_ = source_[at_ - 1] == '\n';
    const size_t begin = at_;
    for (size_t open = source_.find("{%", at_); open != std::string::npos; open = source_.find("{%", open + 1)) {
      const char sign = open + 2 < source_.size() ? source_[open + 2] : '\0';
      const size_t inner = open + 2 + (sign == '-' || sign == '+' ? 1 : 0);
      const std::string_view rest = strip(std::string_view(source_).substr(inner), nullptr, Side::kLeft);
      if (!rest.starts_with("endraw")) continue;
      const std::string_view end = strip(rest.substr(6), nullptr, Side::kLeft);
      if (!end.starts_with("%}") && !end.starts_with("-%}") && !end.starts_with("+%}")) continue;
      std::string text = text_before(open, '%', sign);
      const size_t stop = static_cast<size_t>(end.data() - source_.data());
      add_text(std::move(text));
      count_lines(begin, stop);
      at_ = stop;
      take_end("%}", true);
      return;
    }
    fail_here("a raw block has no end");
  }

  void tag(bool is_block) {
    line_starts_ = false;
    add(is_block ? Token::Kind::kTagBegin : Token::Kind::kOutputBegin);
    std::string open_brackets;
    const std::string_view end = is_block ? "%}" : "}}";
    while (true) {
      skip_space();
      if (at_ >= source_.size()) fail_here("a tag has no end: expected '{}'", end);
      const int line = line_;
      if (open_brackets.empty() && take_end(end, is_block)) {
        tokens_.push_back({is_block ? Token::Kind::kTagEnd : Token::Kind::kOutputEnd, line, {}});
        return;
      }
      token(open_brackets);
    }
  }

  void token(std::string& open_brackets) {
    const char c = source_[at_];
    if (is_digit(c)) return number();
    if (starts_name(c)) {
      const size_t begin = at_;
      while (at_ < source_.size() && (starts_name(source_[at_]) || is_digit(source_[at_]))) ++at_;
      return add(Token::Kind::kName, source_.substr(begin, at_ - begin));
    }
    if (c == '\'' || c == '"') return string(c);
    static constexpr std::string_view kOperators[] = {"**", "//", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[",
                                                      "]",  "(",  ")",  "{",  "}",  ">",  "<", "=", ".", ":", "|", ",", ";"};
    for (const std::string_view op : kOperators) {
      if (!here(op)) continue;
      if (c == '(' || c == '[' || c == '{') {
        open_brackets += c == '(' ? ')' : c == '[' ? ']' : '}';
      } else if (c == ')' || c == ']' || c == '}') {
        if (open_brackets.empty()) fail_here("found '{}', expected no closing bracket here", c);
        if (open_brackets.back() != c) fail_here("found '{}', expected '{}'", c, open_brackets.back());
        open_brackets.pop_back();
      }
      at_ += op.size();
      return add(Token::Kind::kOperator, std::string(op));
    }
    fail_here("found '{}', which starts nothing known", printable(std::string_view(source_).substr(at_, 1)));
  }

  // The digits of the given base at at_, underscores between them left out.
  std::string digits(int base) {
    std::string out;
    const auto is_in_base = [&](char c) {
      const int value = is_digit(c) ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : 99;
      return value < base;
    };
    while (at_ < source_.size()) {
      if (is_in_base(source_[at_]))
        out += source_[at_++];
      else if (source_[at_] == '_' && at_ + 1 < source_.size() && is_in_base(source_[at_ + 1]) && !out.empty())
        ++at_;
      else
        break;
    }
    return out;
  }

  void number() {
    int base = 10;
    if (source_[at_] == '0' && at_ + 2 < source_.size()) {
      const char letter = static_cast<char>(source_[at_ + 1] | 32);
      base = letter == 'x' ? 16 : letter == 'o' ? 8 : letter == 'b' ? 2 : 10;
    }
    if (base != 10) at_ += 2;
    std::string text = digits(base);
    const auto digit_at = [&](size_t i) { return i < source_.size() && is_digit(source_[i]); };
    bool is_float = false;
    const bool after_dot = !tokens_.empty() && tokens_.back().kind == Token::Kind::kOperator && tokens_.back().text == ".";
    if (base == 10 && !after_dot) {
      if (at_ < source_.size() && source_[at_] == '.' && digit_at(at_ + 1)) {
        is_float = true;
        ++at_;
        text += '.' + digits(10);
      }
      if (at_ < source_.size() && (source_[at_] | 32) == 'e') {
        const bool sign = at_ + 1 < source_.size() && (source_[at_ + 1] == '-' || source_[at_ + 1] == '+');
        if (digit_at(at_ + 1 + (sign ? 1 : 0))) {
          is_float = true;
          text += 'e';
          ++at_;
          if (sign) text += source_[at_++];
          text += digits(10);
        }
      }
    }
    Token token{is_float ? Token::Kind::kFloat : Token::Kind::kInt, line_, {}};
    if (is_float) {
      token.number = std::strtod(text.c_str(), nullptr);
    } else {
      if (text.empty() || text.size() > 30) fail_here("found a number of {} digits, expected 1 to 30", text.size());
      if (base == 10 && text.size() > 1 && text[0] == '0' && text.find_first_not_of('0') != std::string::npos) {
        fail_here("found '{}', expected an integer without leading zeros", text);
      }
      for (const char c : text) {
        token.integer = token.integer * base + (is_digit(c) ? c - '0' : (c | 32) - 'a' + 10);
        if (token.integer > (static_cast<Int>(1) << 100)) fail_here("found an integer larger than 2^100");
      }
    }
    tokens_.push_back(std::move(token));
  }

  void string(char mark) {
    Token token{Token::Kind::kString, line_, {}};
    for (++at_; at_ < source_.size() && source_[at_] != mark;) {
      if (source_[at_] != '\\') {
        if (source_[at_] == '\n') ++line_;
        token.text += source_[at_++];
      } else {
        ++at_;
        if (at_ >= source_.size()) break;
        escape(token.text);
      }
    }
    if (at_ >= source_.size()) fail_here("a string that starts at line {} has no end", token.line);
    ++at_;
    tokens_.push_back(std::move(token));
  }

  // at_ is behind the backslash.
  void escape(std::string& out) {
    const char c = source_[at_++];
    switch (c) {
      case '\n': ++line_; return;
      case 'n': out += '\n'; return;
      case 't': out += '\t'; return;
      case 'r': out += '\r'; return;
      case 'a': out += '\a'; return;
      case 'b': out += '\b'; return;
      case 'f': out += '\f'; return;
      case 'v': out += '\v'; return;
      case '\\':
      case '\'':
      case '"': out += c; return;
      case 'x': return append_char(out, code(2, 16));
      case 'u': return append_char(out, code(4, 16));
      case 'U': return append_char(out, code(8, 16));
      case 'N': fail_here("found a \\N escape, expected the character itself or \\u");
      default: break;
    }
    if (c >= '0' && c <= '7') {
      --at_;
      char32_t value = 0;
      for (int i = 0; i < 3 && at_ < source_.size() && source_[at_] >= '0' && source_[at_] <= '7'; ++i) {
        value = value * 8 + static_cast<char32_t>(source_[at_++] - '0');
      }
      return append_char(out, value);
    }
    out += '\\';
    out += c;
  }

  char32_t code(int n, int base) {
    char32_t value = 0;
    for (int i = 0; i < n; ++i, ++at_) {
      const char c = at_ < source_.size() ? source_[at_] : '\0';
      const int digit = is_digit(c) ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : base;
      if (digit >= base) fail_here("found an escape with fewer than {} hexadecimal digits", n);
      value = value * 16 + static_cast<char32_t>(digit);
    }
    if (value > 0x10ffff || (value >= 0xd800 && value < 0xe000))
      fail_here("found an escape for {:#x}, expected a character", static_cast<uint32_t>(value));
    return value;
  }

  const std::string source_;
  const std::string& name_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_starts_ = true;  // the text at at_ begins a line
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(const std::string& source, const std::string& name) { return Lexer(source, name).run(); }

}  // namespace cachalot::jinja
