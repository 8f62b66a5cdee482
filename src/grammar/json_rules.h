// Rules for JSON itself (RFC 8259), shared by json_object and the JSON-schema front end. Every text that they match is valid JSON; of equal
// values they match only some spellings: little white space, no escapes that are not needed, numbers of bounded length.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "grammar/grammar.h"

namespace cachalot {

class JsonRules {
 public:
  explicit JsonRules(Grammar& grammar) : g_(grammar) {}

  Grammar::Expr space();  // at most one blank, or line breaks with indentation
  Grammar::Expr string();
  Grammar::Expr string(int min, int max);  // of so many characters; max -1: no limit
  Grammar::Expr number();
  Grammar::Expr integer();
  Grammar::Expr boolean();
  Grammar::Expr null();
  Grammar::Expr value();  // anything
  Grammar::Expr object();
  Grammar::Expr array();

  // "text" as a JSON string, all of it.
  Grammar::Expr quoted(std::string_view text);
  // open, then items with commas between them, then close.
  Grammar::Expr list(char open, Grammar::Expr item, char close, int min, int max);

 private:
  using Build = Grammar::Expr (JsonRules::*)();
  Grammar::Expr shared(int& rule, const char* name, Build build);
  Grammar::Expr make_space();
  Grammar::Expr character();
  Grammar::Expr make_string();
  Grammar::Expr make_number();
  Grammar::Expr make_integer();
  Grammar::Expr make_value();
  Grammar::Expr make_object();
  Grammar::Expr make_array();

  Grammar& g_;
  int space_ = -1, string_ = -1, number_ = -1, integer_ = -1, value_ = -1, object_ = -1, array_ = -1;
};

struct NumberBounds {
  std::optional<double> low, high;
  bool low_open = false, high_open = false;  // the bound itself is excluded
};

// Whole numbers within the bounds.
Grammar::Expr bounded_integer(Grammar& grammar, const NumberBounds& bounds);
// Decimal numbers within the bounds, which must be whole: Error otherwise.
Grammar::Expr bounded_number(Grammar& grammar, const NumberBounds& bounds);

}  // namespace cachalot
