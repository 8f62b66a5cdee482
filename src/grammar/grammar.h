// Grammar: a context-free grammar over bytes, as the front ends (JSON schema, regular expression, GBNF) build it.
// Expressions are indices into one table, so that a grammar is cheap to build and has a size that can be limited.
#pragma once

#include <bitset>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cachalot {

using ByteSet = std::bitset<256>;

class Grammar {
 public:
  // Limits that keep hostile input small; passing one throws Error.
  static constexpr size_t kMaxExpressions = 200000;

  enum class Kind : uint8_t { empty, bytes, sequence, choice, repeat, rule, token };
  using Expr = int;

  struct Node {
    Kind kind = Kind::empty;
    int first = 0, count = 0;  // sequence, choice: children; bytes: index of the set; rule: index; token: id
    int min = 0, max = 0;      // repeat; max -1: no limit
  };
  // Rules that many grammars have in common: what was found out about one holds for all.
  // One number for each; 0: not such a rule.
  static constexpr int kJsonString = 1, kJsonCharacters = 2, kJsonFormat = 3;  // the last and those behind it: formats of strings
  struct Rule {
    std::string name;
    Expr body = -1;  // -1: named, not yet defined
    int well_known = 0;
    // counted: the rule matches its body min to max times, then the byte `end`. The body must call no rule, may not begin with that byte,
    // and no text that it matches may begin another.
    bool counted = false;
    int min = 0, max = 0;
    uint8_t end = 0;
  };

  Grammar();

  [[nodiscard]] Expr empty() const { return 0; }
  Expr bytes(const ByteSet& set);
  Expr byte_range(int low, int high);
  Expr literal(std::string_view text);  // these bytes in order
  Expr sequence(std::span<const Expr> parts);
  Expr sequence(std::initializer_list<Expr> parts) { return sequence(std::span<const Expr>(parts.begin(), parts.size())); }
  Expr choice(std::span<const Expr> parts);
  Expr choice(std::initializer_list<Expr> parts) { return choice(std::span<const Expr>(parts.begin(), parts.size())); }
  Expr repeat(Expr body, int min, int max);  // max -1: no limit
  Expr optional(Expr body) { return repeat(body, 0, 1); }
  Expr token(int id);  // one token of the vocabulary, whatever its bytes: for control tokens

  int add_rule(std::string name);  // defined later
  void define(int rule, Expr body);
  // Counting costs one state where a repetition would cost one for each round.
  void define_counted(int rule, Expr body, int min, int max, char end);
  void set_well_known(int rule, int id) { rules_[static_cast<size_t>(rule)].well_known = id; }
  Expr rule(int index);

  [[nodiscard]] const Node& node(Expr e) const { return nodes_[static_cast<size_t>(e)]; }
  [[nodiscard]] std::span<const Expr> children(const Node& n) const {
    return std::span<const Expr>(children_).subspan(static_cast<size_t>(n.first), static_cast<size_t>(n.count));
  }
  [[nodiscard]] const ByteSet& set(const Node& n) const { return sets_[static_cast<size_t>(n.first)]; }
  [[nodiscard]] std::span<const Rule> rules() const { return rules_; }

  int root = 0;  // rule that the whole text must match

 private:
  Expr add(const Node& node);

  std::vector<Node> nodes_;
  std::vector<Expr> children_;
  std::vector<ByteSet> sets_;
  std::vector<Rule> rules_;
};

}  // namespace cachalot
