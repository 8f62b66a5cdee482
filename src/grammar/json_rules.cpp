// JSON's own rules.
#include "grammar/json_rules.h"

#include <nlohmann/json.hpp>
#include <string>

#include "grammar/code_points.h"

namespace cachalot {

Grammar::Expr JsonRules::shared(int& rule, const char* name, Build build) {
  if (rule < 0) {
    rule = g_.add_rule(name);
    const Grammar::Expr body = (this->*build)();
    g_.define(rule, body);
  }
  return g_.rule(rule);
}

Grammar::Expr JsonRules::space() { return shared(space_, "space", &JsonRules::make_space); }
Grammar::Expr JsonRules::string() { return shared(string_, "string", &JsonRules::make_string); }
Grammar::Expr JsonRules::number() { return shared(number_, "number", &JsonRules::make_number); }
Grammar::Expr JsonRules::integer() { return shared(integer_, "integer", &JsonRules::make_integer); }
Grammar::Expr JsonRules::value() { return shared(value_, "value", &JsonRules::make_value); }
Grammar::Expr JsonRules::object() { return shared(object_, "object", &JsonRules::make_object); }
Grammar::Expr JsonRules::array() { return shared(array_, "array", &JsonRules::make_array); }
Grammar::Expr JsonRules::boolean() { return g_.choice({g_.literal("true"), g_.literal("false")}); }
Grammar::Expr JsonRules::null() { return g_.literal("null"); }

Grammar::Expr JsonRules::quoted(std::string_view text) {
  return g_.literal(nlohmann::json(std::string(text)).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

Grammar::Expr JsonRules::list(char open, Grammar::Expr item, char close, int min, int max) {
  const Grammar::Expr opening = g_.literal(std::string(1, open)), closing = g_.literal(std::string(1, close));
  if (max == 0) return g_.sequence({opening, space(), closing});
  const Grammar::Expr next = g_.sequence({space(), g_.literal(","), space(), item});
  const Grammar::Expr some = g_.sequence({item, g_.repeat(next, std::max(min - 1, 0), max < 0 ? -1 : max - 1), space()});
  return g_.sequence({opening, space(), min > 0 ? some : g_.optional(some), closing});
}

Grammar::Expr JsonRules::make_space() {
  const Grammar::Expr indent = g_.repeat(g_.choice({g_.literal(" "), g_.literal("\t")}), 0, 40);
  return g_.optional(g_.choice({g_.literal(" "), g_.sequence({g_.literal("\n"), indent})}));
}

Grammar::Expr JsonRules::character() {
  CodePoints plain;
  for (const uint32_t c : {uint32_t{'"'}, uint32_t{'\\'}}) plain.add(c, c);
  plain.add(0, 0x1F);
  ByteSet simple, hex;
  for (const char c : std::string_view("\"\\/bfnrt")) simple.set(static_cast<size_t>(c));
  for (const char c : std::string_view("0123456789abcdefABCDEF")) hex.set(static_cast<size_t>(c));
  ByteSet not_d = hex;
  not_d.reset('d');
  not_d.reset('D');
  const Grammar::Expr h = g_.bytes(hex), backslash = g_.literal("\\"), d = g_.choice({g_.literal("d"), g_.literal("D")});
  // Surrogates only in pairs.
  const Grammar::Expr low_half = g_.sequence({g_.literal("\\u"), d, g_.choice({g_.byte_range('c', 'f'), g_.byte_range('C', 'F')}), h, h});
  const Grammar::Expr unicode =
      g_.choice({g_.sequence({g_.bytes(not_d), h, h, h}), g_.sequence({d, g_.byte_range('0', '7'), h, h}),
                 g_.sequence({d, g_.choice({g_.byte_range('8', '9'), g_.byte_range('a', 'b'), g_.byte_range('A', 'B')}), h, h, low_half})});
  return g_.choice({any_of(g_, plain.complement(), Spelling::utf8), g_.sequence({backslash, g_.bytes(simple)}),
                    g_.sequence({backslash, g_.literal("u"), unicode})});
}

Grammar::Expr JsonRules::make_string() {
  g_.set_well_known(string_, Grammar::kJsonString);
  return g_.sequence({g_.literal("\""), g_.repeat(character(), 0, -1), g_.literal("\"")});
}

Grammar::Expr JsonRules::string(int min, int max) {
  if (min == 0 && max < 0) return string();
  constexpr int kUnlimited = 1 << 30;
  const int rule = g_.add_rule("characters");
  g_.define_counted(rule, character(), min, max < 0 ? kUnlimited : max, '"');
  g_.set_well_known(rule, Grammar::kJsonCharacters);
  return g_.sequence({g_.literal("\""), g_.rule(rule)});
}

Grammar::Expr JsonRules::make_integer() {
  const Grammar::Expr digit = g_.byte_range('0', '9');
  return g_.sequence(
      {g_.optional(g_.literal("-")), g_.choice({g_.literal("0"), g_.sequence({g_.byte_range('1', '9'), g_.repeat(digit, 0, 17)})})});
}

Grammar::Expr JsonRules::make_number() {
  const Grammar::Expr digit = g_.byte_range('0', '9');
  const Grammar::Expr sign = g_.optional(g_.choice({g_.literal("+"), g_.literal("-")}));
  return g_.sequence({make_integer(), g_.optional(g_.sequence({g_.literal("."), g_.repeat(digit, 1, 17)})),
                      g_.optional(g_.sequence({g_.choice({g_.literal("e"), g_.literal("E")}), sign, g_.repeat(digit, 1, 2)}))});
}

Grammar::Expr JsonRules::make_value() { return g_.choice({object(), array(), string(), number(), boolean(), null()}); }

Grammar::Expr JsonRules::make_object() {
  const Grammar::Expr member = g_.sequence({string(), space(), g_.literal(":"), space(), value()});
  return list('{', member, '}', 0, -1);
}

Grammar::Expr JsonRules::make_array() { return list('[', value(), ']', 0, -1); }

}  // namespace cachalot
