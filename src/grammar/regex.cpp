// A recursive-descent parser with a depth limit. What cannot be said by a finite automaton is refused by name.
#include "grammar/regex.h"

#include "base/error.h"

namespace cachalot {
namespace {

constexpr int kMaxDepth = 100, kMaxRepeat = 10000;

CodePoints digits() {
  CodePoints s;
  s.add('0', '9');
  return s;
}
CodePoints word() {
  CodePoints s = digits();
  s.add('a', 'z');
  s.add('A', 'Z');
  s.add('_', '_');
  return s;
}
CodePoints space() {
  CodePoints s;
  s.add('\t', '\r');
  for (const uint32_t c : {0x20u, 0xA0u, 0x1680u, 0x2028u, 0x2029u, 0x202Fu, 0x205Fu, 0x3000u, 0xFEFFu}) s.add(c, c);
  s.add(0x2000, 0x200A);
  return s;
}
CodePoints dot() {
  CodePoints s;
  s.add('\n', '\n');
  s.add('\r', '\r');
  s.add(0x2028, 0x2029);
  return s.complement();
}

class Parser {
 public:
  Parser(Grammar& g, std::string_view text, const RegexOptions& options) : g_(g), text_(text), options_(options) {}

  Grammar::Expr parse() {
    const Grammar::Expr e = alternatives(0);
    if (at_ < text_.size()) bad("an unmatched )");
    return e;
  }

 private:
  [[noreturn]] void bad(std::string_view what) const { fail("regular expression, offset {}: {}", at_, what); }
  [[nodiscard]] bool more() const { return at_ < text_.size(); }
  [[nodiscard]] char peek() const { return text_[at_]; }
  bool eat(char c) {
    if (!more() || peek() != c) return false;
    ++at_;
    return true;
  }
  Grammar::Expr any() { return any_of(g_, CodePoints::all(), options_.spelling); }

  Grammar::Expr alternatives(int depth) {
    if (depth > kMaxDepth) bad(fmt::format("groups nested deeper than {}", kMaxDepth));
    std::vector<Grammar::Expr> out;
    do out.push_back(sequence(depth));
    while (eat('|'));
    return g_.choice(out);
  }

  Grammar::Expr sequence(int depth) {
    std::vector<Grammar::Expr> parts;
    const bool from_start = eat('^');
    if (from_start && depth > 0) bad("^ inside a group is not supported");
    bool to_end = false;
    while (more() && peek() != '|' && peek() != ')') {
      if (eat('$')) {
        if (depth > 0) bad("$ inside a group is not supported");
        if (more() && peek() != '|') bad("$ before the end");
        to_end = true;
        break;
      }
      parts.push_back(quantified(depth));
    }
    if (depth == 0 && !options_.whole) {
      if (!from_start) parts.insert(parts.begin(), g_.repeat(any(), 0, -1));
      if (!to_end) parts.push_back(g_.repeat(any(), 0, -1));
    }
    return g_.sequence(parts);
  }

  Grammar::Expr quantified(int depth) {
    Grammar::Expr e = atom(depth);
    int n_quantifiers = 0;
    while (more()) {
      int min = 0, max = -1;
      if (eat('*')) {
      } else if (eat('+')) {
        min = 1;
      } else if (eat('?')) {
        max = 1;
      } else if (peek() == '{' && bounds(min, max)) {
      } else {
        break;
      }
      if (++n_quantifiers > 1) bad("two quantifiers in a row");
      eat('?');  // lazy: the same texts match
      e = g_.repeat(e, min, max);
    }
    return e;
  }

  // {m}, {m,} or {m,n}; anything else is a literal brace.
  bool bounds(int& min, int& max) {
    size_t i = at_ + 1;
    const auto number = [&](int& out) {
      const size_t start = i;
      int64_t value = 0;
      for (; i < text_.size() && text_[i] >= '0' && text_[i] <= '9'; ++i)
        value = std::min<int64_t>(value * 10 + (text_[i] - '0'), 1'000'000);
      out = static_cast<int>(value);
      return i > start;
    };
    if (!number(min)) return false;
    max = min;
    if (i < text_.size() && text_[i] == ',') {
      ++i;
      if (!number(max)) max = -1;
    }
    if (i >= text_.size() || text_[i] != '}') return false;
    if (min > kMaxRepeat || max > kMaxRepeat) bad(fmt::format("a repetition of more than {}", kMaxRepeat));
    if (max >= 0 && max < min) bad("a repetition whose bounds are the wrong way round");
    at_ = i + 1;
    return true;
  }

  Grammar::Expr atom(int depth) {
    switch (peek()) {
      case '(': return group(depth);
      case '[': return any_of(g_, char_class(), options_.spelling);
      case '.': ++at_; return any_of(g_, dot(), options_.spelling);
      case '\\': return any_of(g_, escape(false), options_.spelling);
      case '*':
      case '+':
      case '?': bad("a quantifier with nothing before it");
      case '^': bad("^ behind the start");
      default: return any_of(g_, CodePoints::of(next_code_point(text_, at_)), options_.spelling);
    }
  }

  Grammar::Expr group(int depth) {
    ++at_;
    if (eat('?')) {
      if (eat(':')) {
      } else if (eat('<') && more() && peek() != '=' && peek() != '!') {
        while (more() && peek() != '>') ++at_;  // a name
        if (!eat('>')) bad("a group name without >");
      } else {
        bad("look-around and flags are not supported");
      }
    }
    const Grammar::Expr e = alternatives(depth + 1);
    if (!eat(')')) bad("a ( without )");
    return e;
  }

  uint32_t hex(int n) {
    uint32_t value = 0;
    for (int i = 0; i < n; ++i, ++at_) {
      if (!more()) bad("an escape that ends early");
      const char c = peek();
      const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
      if (digit < 0) bad("expected a hexadecimal digit");
      value = value * 16 + static_cast<uint32_t>(digit);
    }
    return value;
  }

  CodePoints escape(bool in_class) {
    ++at_;
    if (!more()) bad("a \\ at the end");
    const char c = text_[at_++];
    switch (c) {
      case 'd': return digits();
      case 'D': return digits().complement();
      case 'w': return word();
      case 'W': return word().complement();
      case 's': return space();
      case 'S': return space().complement();
      case 't': return CodePoints::of('\t');
      case 'n': return CodePoints::of('\n');
      case 'r': return CodePoints::of('\r');
      case 'v': return CodePoints::of('\v');
      case 'f': return CodePoints::of('\f');
      case '0': return CodePoints::of(0);
      case 'x': return CodePoints::of(hex(2));
      case 'u': {
        if (!eat('{')) return CodePoints::of(hex(4));
        uint32_t value = 0;
        while (more() && peek() != '}' && value <= CodePoints::kLast) value = value * 16 + hex(1);
        if (!eat('}') || value > CodePoints::kLast) bad("expected \\u{...} up to 10FFFF");
        return CodePoints::of(value);
      }
      case 'b':
        if (in_class) return CodePoints::of('\b');
        bad("word boundaries are not supported");
      default: break;
    }
    if ((c >= '1' && c <= '9') || c == 'k') bad("back references are not regular");
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) bad(fmt::format("the escape \\{} is not supported", c));
    --at_;
    return CodePoints::of(next_code_point(text_, at_));
  }

  CodePoints char_class() {
    ++at_;
    const bool negated = eat('^');
    CodePoints set;
    while (true) {
      if (!more()) bad("a [ without ]");
      if (eat(']')) break;
      const bool escaped = peek() == '\\';
      const CodePoints low = escaped ? escape(true) : CodePoints::of(next_code_point(text_, at_));
      const auto one = [](const CodePoints& s) { return s.ranges().size() == 1 && s.ranges()[0].low == s.ranges()[0].high; };
      if (one(low) && at_ + 1 < text_.size() && peek() == '-' && text_[at_ + 1] != ']') {
        ++at_;
        const CodePoints high = peek() == '\\' ? escape(true) : CodePoints::of(next_code_point(text_, at_));
        if (!one(high) || high.ranges()[0].low < low.ranges()[0].low) bad("a range whose bounds are the wrong way round");
        set.add(low.ranges()[0].low, high.ranges()[0].low);
      } else {
        set.add(low);
      }
    }
    return negated ? set.complement() : set;
  }

  Grammar& g_;
  std::string_view text_;
  RegexOptions options_;
  size_t at_ = 0;
};

}  // namespace

Grammar::Expr parse_regex(Grammar& grammar, std::string_view pattern, const RegexOptions& options) {
  return Parser(grammar, pattern, options).parse();
}

}  // namespace cachalot
