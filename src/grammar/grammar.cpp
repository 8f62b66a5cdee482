// Grammar: the table of expressions.
#include "grammar/grammar.h"

#include "base/check.h"
#include "base/error.h"

namespace cachalot {

Grammar::Grammar() { nodes_.push_back({}); }

Grammar::Expr Grammar::add(const Node& node) {
  if (nodes_.size() >= kMaxExpressions) fail("the grammar is too large: more than {} parts", kMaxExpressions);
  nodes_.push_back(node);
  return static_cast<Expr>(nodes_.size() - 1);
}

Grammar::Expr Grammar::bytes(const ByteSet& set) {
  sets_.push_back(set);
  return add({.kind = Kind::bytes, .first = static_cast<int>(sets_.size() - 1)});
}

Grammar::Expr Grammar::byte_range(int low, int high) {
  ByteSet set;
  for (int b = low; b <= high; ++b) set.set(static_cast<size_t>(b));
  return bytes(set);
}

Grammar::Expr Grammar::literal(std::string_view text) {
  std::vector<Expr> parts;
  for (const char c : text) parts.push_back(byte_range(static_cast<unsigned char>(c), static_cast<unsigned char>(c)));
  return sequence(parts);
}

Grammar::Expr Grammar::sequence(std::span<const Expr> parts) {
  if (parts.empty()) return empty();
  if (parts.size() == 1) return parts[0];
  const int first = static_cast<int>(children_.size());
  children_.insert(children_.end(), parts.begin(), parts.end());
  return add({.kind = Kind::sequence, .first = first, .count = static_cast<int>(parts.size())});
}

Grammar::Expr Grammar::choice(std::span<const Expr> parts) {
  CACHALOT_CHECK(!parts.empty());
  if (parts.size() == 1) return parts[0];
  const int first = static_cast<int>(children_.size());
  children_.insert(children_.end(), parts.begin(), parts.end());
  return add({.kind = Kind::choice, .first = first, .count = static_cast<int>(parts.size())});
}

Grammar::Expr Grammar::repeat(Expr body, int min, int max) {
  CACHALOT_CHECK(min >= 0 && (max < 0 || max >= min));
  const int first = static_cast<int>(children_.size());
  children_.push_back(body);
  return add({.kind = Kind::repeat, .first = first, .count = 1, .min = min, .max = max});
}

Grammar::Expr Grammar::token(int id) { return add({.kind = Kind::token, .first = id}); }

int Grammar::add_rule(std::string name) {
  rules_.push_back({std::move(name), -1});
  return static_cast<int>(rules_.size() - 1);
}

void Grammar::define(int rule, Expr body) { rules_[static_cast<size_t>(rule)].body = body; }

void Grammar::define_counted(int rule, Expr body, int min, int max, char end) {
  CACHALOT_CHECK(min >= 0 && max >= min);
  Rule& r = rules_[static_cast<size_t>(rule)];
  r.body = body;
  r.counted = true;
  r.min = min;
  r.max = max;
  r.end = static_cast<uint8_t>(end);
}

Grammar::Expr Grammar::rule(int index) { return add({.kind = Kind::rule, .first = index}); }

}  // namespace cachalot
