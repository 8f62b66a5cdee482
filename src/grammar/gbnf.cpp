// A recursive-descent parser with a depth limit.
#include "grammar/gbnf.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "grammar/code_points.h"

namespace cachalot {
namespace {

constexpr int kMaxDepth = 100, kMaxRepeat = 10000;

bool name_char(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_'; }

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Grammar parse() {
    skip(true);
    while (more()) {
      const int rule = index_of(name());
      if (g_.rules()[static_cast<size_t>(rule)].body >= 0)
        bad(fmt::format("rule {} is defined twice", g_.rules()[static_cast<size_t>(rule)].name));
      skip(false);
      if (text_.substr(at_, 3) != "::=") bad("expected ::=");
      at_ += 3;
      skip(true);
      g_.define(rule, alternatives(0));
      skip(true);
    }
    for (const auto& rule : g_.rules())
      if (rule.body < 0) fail("grammar: rule \"{}\" is used and never defined", printable(rule.name));
    const auto root = index_.find("root");
    if (root == index_.end()) fail("grammar: there is no rule named root");
    g_.root = root->second;
    return std::move(g_);
  }

 private:
  [[noreturn]] void bad(std::string_view what) const {
    fail("grammar, line {}: {}",
         1 + std::count(text_.begin(), text_.begin() + static_cast<std::ptrdiff_t>(std::min(at_, text_.size())), '\n'), what);
  }
  [[nodiscard]] bool more() const { return at_ < text_.size(); }
  [[nodiscard]] char peek() const { return text_[at_]; }
  bool eat(char c) {
    if (!more() || peek() != c) return false;
    ++at_;
    return true;
  }
  void skip(bool newlines) {
    while (more()) {
      if (peek() == '#')
        while (more() && peek() != '\n') ++at_;
      else if (peek() == ' ' || peek() == '\t' || (newlines && (peek() == '\n' || peek() == '\r')))
        ++at_;
      else
        return;
    }
  }

  std::string name() {
    const size_t start = at_;
    while (more() && name_char(peek())) ++at_;
    if (at_ == start) bad("expected the name of a rule");
    return std::string(text_.substr(start, at_ - start));
  }

  int index_of(const std::string& rule) {
    const auto [entry, added] = index_.try_emplace(rule, 0);
    if (added) entry->second = g_.add_rule(rule);
    return entry->second;
  }

  // Inside parentheses a line may end anywhere; outside, only where a rule goes on with | or the line before ended with one.
  Grammar::Expr alternatives(int depth) {
    if (depth > kMaxDepth) bad(fmt::format("groups nested deeper than {}", kMaxDepth));
    std::vector<Grammar::Expr> out{sequence(depth)};
    while (next_is_alternative(depth)) {
      ++at_;
      skip(true);
      out.push_back(sequence(depth));
    }
    return g_.choice(out);
  }

  bool next_is_alternative(int depth) {
    const size_t before = at_;
    skip(true);
    if (more() && peek() == '|') return true;
    if (depth == 0) at_ = before;
    return false;
  }

  Grammar::Expr sequence(int depth) {
    std::vector<Grammar::Expr> parts;
    while (true) {
      skip(depth > 0);
      if (!more() || peek() == '|' || peek() == ')' || peek() == '\n' || peek() == '\r') break;
      parts.push_back(quantified(depth));
    }
    return g_.sequence(parts);
  }

  Grammar::Expr quantified(int depth) {
    Grammar::Expr e = atom(depth);
    while (more()) {
      if (eat('*'))
        e = g_.repeat(e, 0, -1);
      else if (eat('+'))
        e = g_.repeat(e, 1, -1);
      else if (eat('?'))
        e = g_.repeat(e, 0, 1);
      else if (eat('{'))
        e = bounded(e);
      else
        break;
    }
    return e;
  }

  int number() {
    int64_t value = 0;
    const size_t start = at_;
    for (; more() && peek() >= '0' && peek() <= '9'; ++at_) value = std::min<int64_t>(value * 10 + (peek() - '0'), 1'000'000);
    if (at_ == start) return -1;
    if (value > kMaxRepeat) bad(fmt::format("a repetition of more than {}", kMaxRepeat));
    return static_cast<int>(value);
  }

  Grammar::Expr bounded(Grammar::Expr e) {
    skip(false);
    int min = number();
    skip(false);
    int max = min;
    if (eat(',')) {
      skip(false);
      max = number();
      min = std::max(min, 0);
      skip(false);
    } else if (min < 0) {
      bad("expected a number in {}");
    }
    if (!eat('}')) bad("expected } behind a repetition");
    if (max >= 0 && max < min) bad("a repetition whose bounds are the wrong way round");
    return g_.repeat(e, min, max);
  }

  Grammar::Expr atom(int depth) {
    if (eat('"')) return literal();
    if (eat('[')) return char_class();
    if (eat('.')) return any_of(g_, CodePoints::all(), Spelling::utf8);
    if (eat('(')) {
      skip(true);
      const Grammar::Expr e = alternatives(depth + 1);
      skip(true);
      if (!eat(')')) bad("a ( without )");
      return e;
    }
    if (!name_char(peek())) bad(fmt::format("unexpected {}", printable(text_.substr(at_, 8))));
    return g_.rule(index_of(name()));
  }

  uint32_t escaped() {
    if (!more()) bad("an escape that ends early");
    const char c = text_[at_++];
    int digits = 0;
    switch (c) {
      case 'n': return '\n';
      case 'r': return '\r';
      case 't': return '\t';
      case '"':
      case '\\':
      case '[':
      case ']':
      case '-':
      case '^':
      case '/': return static_cast<uint32_t>(c);
      case 'x': digits = 2; break;
      case 'u': digits = 4; break;
      case 'U': digits = 8; break;
      default: bad(fmt::format("unknown escape \\{}", printable(std::string(1, c))));
    }
    uint64_t value = 0;
    for (int i = 0; i < digits; ++i, ++at_) {
      const char h = more() ? peek() : ' ';
      const int digit = h >= '0' && h <= '9' ? h - '0' : h >= 'a' && h <= 'f' ? h - 'a' + 10 : h >= 'A' && h <= 'F' ? h - 'A' + 10 : -1;
      if (digit < 0) bad("expected a hexadecimal digit");
      value = value * 16 + static_cast<uint64_t>(digit);
    }
    if (value > CodePoints::kLast || (value >= 0xD800 && value <= 0xDFFF)) bad("an escape that is no character");
    return static_cast<uint32_t>(value);
  }

  uint32_t character() { return eat('\\') ? escaped() : next_code_point(text_, at_); }

  Grammar::Expr literal() {
    std::vector<Grammar::Expr> parts;
    while (true) {
      if (!more() || peek() == '\n') bad("a \" without its end");
      if (eat('"')) break;
      parts.push_back(any_of(g_, CodePoints::of(character()), Spelling::utf8));
    }
    return g_.sequence(parts);
  }

  Grammar::Expr char_class() {
    const bool negated = eat('^');
    CodePoints set;
    while (true) {
      if (!more() || peek() == '\n') bad("a [ without ]");
      if (eat(']')) break;
      const uint32_t low = character();
      uint32_t high = low;
      if (at_ + 1 < text_.size() && peek() == '-' && text_[at_ + 1] != ']') {
        ++at_;
        high = character();
      }
      if (high < low) bad("a range whose bounds are the wrong way round");
      set.add(low, high);
    }
    return any_of(g_, negated ? set.complement() : set, Spelling::utf8);
  }

  std::string_view text_;
  size_t at_ = 0;
  Grammar g_;
  std::map<std::string, int> index_;
};

}  // namespace

Grammar parse_gbnf(std::string_view text) { return Parser(text).parse(); }

}  // namespace cachalot
