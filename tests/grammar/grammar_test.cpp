// Structured output: what each front end matches and refuses, and that masks say the same as trying every token.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <random>

#include "base/error.h"
#include "grammar/code_points.h"
#include "grammar/constraint.h"
#include "grammar/gbnf.h"
#include "grammar/json_schema.h"
#include "grammar/regex.h"

namespace cachalot::test {
namespace {

using testing::HasSubstr;
using Kind = GrammarSource::Kind;

constexpr int kEos = 256;

// One token per byte, an end token, a control token, and some longer tokens.
std::vector<std::string> vocabulary() {
  std::vector<std::string> out;
  for (int b = 0; b < 256; ++b) out.emplace_back(1, static_cast<char>(b));
  out.emplace_back();  // end
  out.emplace_back();  // control
  for (const char* text :
       {"{\"", "\":",    "\": ",    "\",",  "\"}", "},",  "}}",     "name", "na",    "true",     "false",    "null",     "12",
        "0.",  "\", \"", "\"age\"", "ab",   "abc", "aab", "\n  \"", "[[",   "]]",    "\xC3\xA9", "\xE4\xBD", "\xA0\xE5", "e\"",
        "\\n", "\\u00",  "bb",      "a\"}", "]}",  "1,",  " 2",     "\"\"", "\"abc", "\"abc\"",  "\"ab\""})
    out.emplace_back(text);
  return out;
}

GrammarCompiler& compiler() {
  static GrammarCompiler c(vocabulary(), {kEos});
  return c;
}

bool matches(const std::shared_ptr<const CompiledGrammar>& g, std::string_view text) {
  CallStacks stacks;
  Position at = g->start(stacks);
  for (const char c : text) at = g->step(at, static_cast<uint8_t>(c), stacks);
  return at.ended;
}
bool matches(Kind kind, const std::string& source, std::string_view text) { return matches(compiler().compile({kind, source}), text); }

std::string error_of(Kind kind, const std::string& source) {
  try {
    compiler().compile({kind, source});
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

// Follows random allowed tokens; at each step the mask must name exactly the tokens that accept() takes.
std::string random_text(const GrammarSource& source, uint64_t seed, int n_steps, int free_after) {
  const auto grammar = compiler().compile(source);
  auto constraint = GrammarCompiler::constraint(grammar);
  std::mt19937_64 rng(seed);
  std::vector<int> history;
  std::string text;
  for (int step = 0; step < n_steps; ++step) {
    const auto mask = constraint->allowed();
    std::vector<int> tokens;
    for (int t = 0; t < grammar->trie().n_vocab(); ++t)
      if (mask[static_cast<size_t>(t) / 32] >> (t % 32) & 1u) tokens.push_back(t);
    if (seed % 4 == 0)
      for (int t = 0; t < grammar->trie().n_vocab(); ++t) {
        auto fresh = GrammarCompiler::constraint(grammar);
        for (const int h : history) EXPECT_TRUE(fresh->accept(h));
        EXPECT_EQ(fresh->accept(t), std::find(tokens.begin(), tokens.end(), t) != tokens.end()) << "token " << t << " after " << text;
      }
    if (tokens.empty()) {
      ADD_FAILURE() << "nothing may follow " << text;
      break;
    }
    int token = tokens[rng() % tokens.size()];
    // Towards the end: whatever closes, the end first.
    if (step > free_after)
      for (const int closing : {int{']'}, int{'}'}, int{'"'}, kEos})
        if (std::find(tokens.begin(), tokens.end(), closing) != tokens.end()) token = closing;
    if (token == kEos) return text;
    EXPECT_TRUE(constraint->accept(token));
    history.push_back(token);
    text += grammar->trie().bytes(token);
  }
  return "(unfinished) " + text;
}

TEST(Regex, MatchesWhatItSays) {
  struct Case {
    const char *pattern, *yes, *no;
  };
  for (const Case& c : {Case{"abc", "abc", "ab"},
                        {"a|bc", "bc", "b"},
                        {"a*", "", "b"},
                        {"a+b?", "aab", "b"},
                        {"(ab){2,3}", "abab", "ab"},
                        {"[a-c-]+", "a-c", "d"},
                        {"[^a]", "\xC3\xA9", "a"},
                        {"\\d{3}", "042", "42"},
                        {"\\w+\\s\\S", "a_1 .", "a b c"},
                        {"^a.c$",
                         "a\xE4\xBD\xA0"
                         "c",
                         "a\nc"},
                        {"(?:x|(y))z", "yz", "y"},
                        {"a{2}", "aa", "aaa"},
                        {"a{1,}", "aaaa", ""},
                        {"\\u00e9", "\xC3\xA9", "e"},
                        {"\\x41\\.", "A.", "AA"},
                        {"[\\d\\-x]", "-", "y"},
                        {"x{,2}", "x{,2}", "xx"},
                        {"[\\u{1F600}-\\u{1F64F}]", "\xF0\x9F\x98\x80", "\xF0\x9F\x90\x80"},
                        {"(?<year>\\d{4})", "2026", "26"},
                        {"a*?b", "aab", "aa"},
                        {"", "", "a"},
                        {"(a+)+b", "aaab", "aaa"}}) {
    EXPECT_TRUE(matches(Kind::regex, c.pattern, c.yes)) << c.pattern;
    EXPECT_FALSE(matches(Kind::regex, c.pattern, c.no)) << c.pattern;
  }
}

TEST(Regex, RefusesWhatIsNotRegularOrMalformed) {
  const std::string deep(30000, '(');
  for (const char* pattern : {"(a)\\1", "(?=a)", "(?!a)", "(?<=a)b", "\\bword", "a**", "*a", "(a", "a)", "[a", "a{3,2}", "a{99999}", "\\",
                              "[z-a]", "\\q", "(^a)", "a^"})
    EXPECT_THAT(error_of(Kind::regex, pattern), HasSubstr("offset")) << pattern;
  EXPECT_THAT(error_of(Kind::regex, deep), HasSubstr("nested"));
  EXPECT_THAT(error_of(Kind::regex, "((((a{1000}){1000}){1000}){1000})"), HasSubstr("too large"));
  EXPECT_THAT(error_of(Kind::regex, "[ab]*a[ab]{30}"), HasSubstr("too"));  // 2^30 states
  EXPECT_THAT(error_of(Kind::regex, "\xFF"), HasSubstr("UTF-8"));
}

TEST(Utf8, EveryCodePointInItsShortestFormOnly) {
  Grammar g;
  g.root = g.add_rule("root");
  CodePoints set;
  set.add(0x70, 0x900);
  set.add(0xD000, 0x10FFFF);
  g.define(g.root, any_of(g, set, Spelling::utf8));
  const auto compiled = compiler().compile(g);
  for (uint32_t c = 0x80; c <= 0x10FFFF; c += c < 0x1000 || (c > 0xCF00 && c < 0xE100) ? 1 : 97) {
    std::string text;
    if (c < 0x800)
      text = {static_cast<char>(0xC0 | c >> 6), static_cast<char>(0x80 | (c & 63))};
    else if (c < 0x10000)
      text = {static_cast<char>(0xE0 | c >> 12), static_cast<char>(0x80 | (c >> 6 & 63)), static_cast<char>(0x80 | (c & 63))};
    else
      text = {static_cast<char>(0xF0 | c >> 18), static_cast<char>(0x80 | (c >> 12 & 63)), static_cast<char>(0x80 | (c >> 6 & 63)),
              static_cast<char>(0x80 | (c & 63))};
    const bool inside = c <= 0x900 || (c >= 0xD000 && !(c >= 0xD800 && c <= 0xDFFF));
    ASSERT_EQ(matches(compiled, text), inside) << std::hex << c;
  }
  EXPECT_FALSE(matches(compiled, "\xC1\xB0"));          // 0x70 in two bytes
  EXPECT_FALSE(matches(compiled, "\xF4\x90\x80\x80"));  // beyond the last
}

TEST(Gbnf, MatchesWhatItSays) {
  const std::string arithmetic = R"g(# sums
root ::= expr "\n"?
expr ::= term ( [-+*/] term )*   # left to right
term ::= num | "(" expr ")"
num  ::= [0-9]{1,3}
)g";
  for (const char* yes : {"1", "1+2*3\n", "(1+(2))*33"}) EXPECT_TRUE(matches(Kind::gbnf, arithmetic, yes)) << yes;
  for (const char* no : {"", "1+", "(1", "1234", "1\n\n"}) EXPECT_FALSE(matches(Kind::gbnf, arithmetic, no)) << no;
  EXPECT_TRUE(matches(Kind::gbnf, "root ::= \"a\" |\n  b\nb ::= [^\\x00-\\x7F] .", "\xC3\xA9z"));
  EXPECT_TRUE(matches(Kind::gbnf, "root ::= (\"a\"\n | \"b\")+", "abba"));
}

TEST(Gbnf, RefusesWhatIsMalformed) {
  for (const char* text :
       {"", "x ::= \"a\"", "root ::= y", "root ::= \"a", "root ::= [a", "root ::= (\"a\"", "root = \"a\"", "root ::= \"a\"\nroot ::= \"b\"",
        "root ::= \"a\"{5,2}", "root ::= \"\\q\"", "root ::= ]", "root ::= \"a\"{100000}"})
    EXPECT_THAT(error_of(Kind::gbnf, text), HasSubstr("grammar")) << text;
  EXPECT_THAT(error_of(Kind::gbnf, "root ::= root \"a\" | \"b\""), HasSubstr("left recursive"));
  EXPECT_THAT(error_of(Kind::gbnf, "root ::= n root \"a\" | \"b\"\nn ::= \"x\"?"), HasSubstr("left recursive"));
  EXPECT_THAT(error_of(Kind::gbnf, "root ::= \"a\" root"), HasSubstr("no finite text"));
  EXPECT_THAT(error_of(Kind::gbnf, "root ::= " + std::string(30000, '(')), HasSubstr("nested"));
}

TEST(Gbnf, DeepRecursionEndsInsteadOfGrowing) {
  const auto g = compiler().compile({Kind::gbnf, "root ::= \"[\" root \"]\" | \"x\""});
  EXPECT_TRUE(matches(g, std::string(500, '[') + "x" + std::string(500, ']')));
  EXPECT_FALSE(matches(g, std::string(5000, '[') + "x" + std::string(5000, ']')));  // deeper than stacks may be
}

TEST(JsonSchema, MatchesValidTextsOnly) {
  struct Case {
    const char *schema, *yes, *no;
  };
  for (
      const Case& c : {
          Case{
              R"({"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer"}},"required":["name","age"],"additionalProperties":false})",
              R"({"name": "J\u00e9", "age": 3})", R"({"age": 3, "name": "J"})"},
          {R"({"type":"object","properties":{"a":{"type":"null"},"b":{"type":"null"},"c":{"type":"null"}},"required":["b"]})",
           R"({"b":null,"c":null})", R"({"a":null})"},
          {R"({"type":"object","properties":{"a":{},"b":{}}})", R"({})", R"({"c":1})"},
          {R"({"type":"object","properties":{"ab":{"type":"integer"}},"additionalProperties":{"type":"boolean"}})",
           R"({"a": true, "abc": false})", R"({"ab": true})"},
          {R"({"type":"object","properties":{"ab":{"type":"integer"}},"additionalProperties":{"type":"boolean"}})",
           R"({"ab": 1, "b": false})", R"({"c": 1})"},
          {R"({"type":"object","additionalProperties":{"type":"integer"},"minProperties":1,"maxProperties":2})", R"({"x":1,"y":2})",
           R"({})"},
          {R"({"enum":["red","green",3,null,{"a":[1]}]})", R"({"a": [1]})", R"("blue")"},
          {R"({"const":"x\ny"})", R"("x\ny")", R"("xy")"},
          {R"({"type":"string","enum":["red",3]})", R"("red")", "3"},
          {R"({"type":"integer","enum":["red",3.0]})", "3.0", R"("red")"},
          {R"({"type":"integer","anyOf":[{"type":"string"},{"type":"integer"}]})", "3", R"("red")"},
          {R"({"type":["number","null"],"oneOf":[{"$ref":"#/$defs/n"},{"type":"null"}],"$defs":{"n":{"type":"integer"}}})", "null", "true"},
          {R"({"type":["string","null"]})", "null", "1"},
          {R"({"type":"array","items":{"type":"integer"},"minItems":2,"maxItems":3})", "[1, 2]", "[1]"},
          {R"({"type":"array","items":{"type":"integer"},"maxItems":0})", "[]", "[1]"},
          {R"({"type":"array","prefixItems":[{"type":"string"},{"type":"integer"}],"items":false,"minItems":1})", R"(["a",1])",
           R"(["a",1,2])"},
          {R"({"type":"array","prefixItems":[{"type":"string"}],"items":{"type":"null"}})", R"(["a",null,null])", R"([null])"},
          {R"({"type":"string","minLength":2,"maxLength":3})", "\"\xC3\xA9\xC3\xA9\"", "\"a\""},
          {R"({"type":"string","pattern":"^[a-z]+\"$"})", R"("ab\"")", R"("ab")"},
          {R"({"type":"string","pattern":"b"})", R"("abc\n")", R"("ac")"},
          {R"({"type":"string","format":"date"})", R"("2026-02-28")", R"("2026-13-01")"},
          {R"({"type":"string","format":"ipv4"})", R"("192.168.0.1")", R"("256.1.1.1")"},
          {R"({"type":"string","format":"whatever"})", R"("x")", "1"},
          {R"({"anyOf":[{"type":"integer"},{"type":"boolean"}]})", "true", "null"},
          {R"({"oneOf":[{"type":"object","properties":{"k":{"const":"a"}},"required":["k"]},{"type":"object","properties":{"k":{"const":"b"},"v":{}},"required":["k","v"]}]})",
           R"({"k":"b","v":[]})", R"({"k":"b"})"},
          {R"({"allOf":[{"properties":{"a":{"type":"null"}},"required":["a"]},{"properties":{"b":{"type":"null"}}}]})",
           R"({"a":null,"b":null})", R"({"b":null})"},
          {R"({"$ref":"#/$defs/node","$defs":{"node":{"type":"object","properties":{"next":{"anyOf":[{"type":"null"},{"$ref":"#/$defs/node"}]}},"required":["next"]}}})",
           R"({"next":{"next":{"next":null}}})", R"({"next":{}})"},
          {R"({"type":"number"})", "-1.5e+3", "01"},
          {R"({"type":"integer","minimum":-12,"maximum":345})", "-12", "346"},
          {R"({"type":"integer","exclusiveMinimum":0})", "999", "0"},
          {R"({"type":"number","minimum":0,"maximum":1})", "0.25", "1.5"},
          {R"({"type":"number","minimum":-1})", "-0.5", "-1.5"},
          {"true", R"([{"a":1}])", "["},
      }) {
    EXPECT_TRUE(matches(Kind::json_schema, c.schema, c.yes)) << c.schema << " " << c.yes;
    EXPECT_FALSE(matches(Kind::json_schema, c.schema, c.no)) << c.schema << " " << c.no;
  }
}

TEST(JsonSchema, IntegerBoundsAreExact) {
  std::mt19937_64 rng(7);
  for (int i = 0; i < 60; ++i) {
    const auto draw = [&] { return static_cast<int>(rng() % (i % 2 ? 3000 : 40)) - (i % 2 ? 1500 : 20); };
    int low = draw(), high = draw();
    if (low > high) std::swap(low, high);
    const auto g = compiler().compile(
        {Kind::json_schema, R"({"type":"integer","minimum":)" + std::to_string(low) + R"(,"maximum":)" + std::to_string(high) + "}"});
    for (int v = -1700; v <= 1700; ++v)
      ASSERT_EQ(matches(g, std::to_string(v)), low <= v && v <= high) << v << " in " << low << ".." << high;
    EXPECT_FALSE(matches(g, "-0"));
    EXPECT_FALSE(matches(g, "007"));
  }
}

TEST(JsonSchema, RefusesWhatItCannotHonourByName) {
  struct Case {
    const char *schema, *message;
  };
  for (const Case& c : {Case{R"({"type":"integer","multipleOf":3})", "schema.multipleOf"},
                        {R"({"type":"array","uniqueItems":true})", "uniqueItems"},
                        {R"({"type":"object","patternProperties":{}})", "patternProperties"},
                        {R"({"not":{}})", "schema.not"},
                        {R"({"$ref":"#/$defs/x"})", "leads nowhere"},
                        {R"({"$ref":"http://other"})", "within the schema"},
                        {R"({"type":"strin"})", "strin"},
                        {R"g({"type":"string","pattern":"(?=a)"})g", "pattern"},
                        {R"({"type":"object","properties":{"a":{"type":"string","minLength":-1}}})", "schema.properties.a.minLength"},
                        {R"({"enum":[]})", "enum"},
                        {R"({"type":"integer","enum":["a",1.5]})", "enum"},
                        {R"({"type":"object","const":true})", "const"},
                        {R"({"type":"object","anyOf":[{"type":"string"}]})", "anyOf"},
                        {R"({"type":"string","anyOf":[{"type":"string"},{}]})", "schema.anyOf[1]"},
                        {R"({"type":"string","allOf":[{"properties":{}}]})", "allOf"},
                        {R"({"type":["string","null"],"multipleOf":3})", "multipleOf"},
                        {R"({"type":["object","null"],"required":["a"]})", "anyOf"},
                        {R"({"type":"object","additionalProperties":true,"minProperties":2})", "schema.minProperties: expected 0 or 1"},
                        {"false", "matches nothing"},
                        {R"({"oneOf":[{"type":"string"},{"type":"string","maxLength":3}]})", "exclude each other"},
                        {R"({"type":"array","minItems":3,"maxItems":2})", "maxItems"},
                        {R"({"type":"object","properties":{},"required":["x"]})", "not among"},
                        {R"({"type":"integer","minimum":2,"maximum":1})", "between"},
                        {R"({"type":"number","minimum":0.5})", "whole"},
                        {R"({"a":1,"a":2})", "a"},
                        {"[", "schema"},
                        {"7", "schema"},
                        {R"({"$defs":{"a":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"})", "no finite text"}})
    EXPECT_THAT(error_of(Kind::json_schema, c.schema), HasSubstr(c.message)) << c.schema;
}

TEST(JsonSchema, NestedOptionalMembersStaySmall) {
  std::string schema = R"({"type":"null"})";
  for (int i = 0; i < 20; ++i) {
    std::string next = R"({"type":"object","properties":{)";
    for (const char* key : {"a", "b", "c"})
      next += std::string(key == std::string("a") ? "" : ",") + "\"" + key +
              "\":" + (key == std::string("a") ? schema : R"({"type":"string"})");
    schema = next + "}}";
  }
  EXPECT_LT(Automaton(parse_json_schema(schema)).n_states(), 2000);
}

TEST(JsonSchema, ManyExclusiveAlternativesTakeNoTime) {
  const auto schema = [](int n) {
    std::string options, definitions;
    for (int i = 0; i < n; ++i) {
      options += fmt::format("{}{{\"$ref\":\"#/$defs/a{}\"}}", i > 0 ? "," : "", i);
      definitions +=
          fmt::format(R"({}"a{}":{{"type":"object","properties":{{"k":{{"const":{}}}}},"required":["k"]}})", i > 0 ? "," : "", i, i);
    }
    return R"({"oneOf":[)" + options + R"(],"$defs":{)" + definitions + "}}";
  };
  const auto before = std::chrono::steady_clock::now();
  EXPECT_TRUE(matches(Kind::json_schema, schema(250), R"({ "k": 249 })"));
  EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(5));
  EXPECT_THAT(error_of(Kind::json_schema, schema(251)), HasSubstr("schema.oneOf: found more than 250 references"));
  std::string values = R"({"const":0})";
  for (int i = 1; i <= 500; ++i) values += fmt::format(R"(,{{"const":{}}})", i);
  EXPECT_TRUE(matches(Kind::json_schema, R"({"anyOf":[)" + values + "]}", "500"));
  EXPECT_THAT(error_of(Kind::json_schema, R"({"oneOf":[)" + values + "]}"), HasSubstr("found 501 schemas, expected at most 500"));
}

TEST(JsonSchema, ListsOfListsStaySmall) {
  std::string schema = R"({"type":"string"})", text = "\"a\"";
  for (int i = 0; i < 50; ++i) {
    schema = R"({"type":"array","items":)" + schema + "}";
    text = "[" + text + "]";
  }
  EXPECT_LT(Automaton(parse_json_schema(schema)).n_states(), 6000);
  EXPECT_TRUE(matches(Kind::json_schema, schema, text));
}

TEST(Gbnf, LongChainsOfRulesTakeNoTime) {
  // Forwards and backwards, with and without empty texts: none may cost the square of the number of rules.
  for (const bool nullable : {false, true})
    for (const bool backwards : {false, true}) {
      constexpr int kRules = 12'000;
      std::vector<std::string> rules;
      for (int i = 0; i < kRules; ++i) rules.push_back(fmt::format("r{} ::= r{}{}\n", i, i + 1, nullable ? " \"y\"?" : ""));
      rules.push_back(fmt::format("r{} ::= \"x\"{}\n", kRules, nullable ? "?" : ""));
      if (backwards) std::reverse(rules.begin(), rules.end());
      std::string text = "root ::= \"z\" | r0\n";
      for (const std::string& rule : rules) text += rule;
      const auto before = std::chrono::steady_clock::now();
      EXPECT_TRUE(matches(Kind::gbnf, text, "z"));
      EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(5)) << nullable << backwards;
    }
}

TEST(Gbnf, ATextInTooManyPlacesIsNeverRefusedByTheWay) {
  std::string text = "root ::= ", rules;
  for (int i = 0; i < 700; ++i) {
    text += fmt::format("{}r{}", i > 0 ? " | " : "", i);
    rules += fmt::format("r{} ::= \"a\" o o \"{}\"\n", i, i);
  }
  const auto grammar = compiler().compile({Kind::gbnf, text + "\n" + rules + "o ::= \"b\"?\n"});
  for (const std::string_view way : {"a699", "ab3", "abb699", "a0"}) {
    auto c = GrammarCompiler::constraint(grammar);
    for (const char byte : way) {
      const auto token = static_cast<unsigned char>(byte);
      const bool allowed = (c->allowed()[token / 32] >> (token % 32) & 1u) != 0;
      try {
        EXPECT_EQ(c->accept(token), allowed) << way << " at " << byte;
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("too ambiguous"));
        break;
      }
      if (!allowed) break;
    }
  }
}

TEST(Gbnf, AGrammarThatNothingCanBeginIsRefused) {
  std::string text = "root ::= r0\n";
  for (int i = 0; i < 1000; ++i) text += fmt::format("r{} ::= r{}\n", i, i + 1);
  EXPECT_THAT(error_of(Kind::gbnf, text + "r1000 ::= \"x\"\n"), HasSubstr("no token of this model can begin"));
}

TEST(Regex, LongRepetitionsAreRead) {
  for (const char* pattern : {"a{5000}b", "(ab|ac){3000}", "[a-z]{4000}x"})
    EXPECT_EQ(error_of(Kind::regex, pattern), "no error") << pattern;
  EXPECT_TRUE(matches(Kind::regex, "a{5000}b", std::string(5000, 'a') + "b"));
  EXPECT_FALSE(matches(Kind::regex, "a{5000}b", std::string(4999, 'a') + "b"));
}

TEST(Mask, SaysTheSameAsTryingEveryToken) {
  const GrammarSource sources[] = {
      {Kind::json_object, ""},
      {Kind::json_schema,
       R"({"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer"},"tags":{"type":"array","items":{"enum":["a","ab","abc"]}}},"required":["name"]})"},
      {Kind::json_schema, R"({"type":"array","items":{"type":"string","minLength":3,"maxLength":9},"minItems":1})"},
      {Kind::json_schema, R"({"type":"string","minLength":2})"},
      {Kind::json_schema, R"({"type":"string","minLength":2,"maxLength":2})"},
      {Kind::json_schema, R"({"$ref":"#/$defs/s","$defs":{"s":{"anyOf":[{"type":"string","maxLength":1},{"type":"null"}]}}})"},
      {Kind::regex, "(ab|aab)*c?\\n?"},
      {Kind::gbnf, "root ::= \"[\" root? \"]\" | [ab]+ \"\\\"\""},
      {Kind::json_schema, R"({"type":"array","items":{"type":["number","boolean","null"]}})"},
  };
  for (const GrammarSource& source : sources)
    for (uint64_t seed = 0; seed < 24; ++seed) {
      const std::string text = random_text(source, seed, 400, seed % 4 == 0 ? 6 : 25);
      EXPECT_TRUE(matches(compiler().compile(source), text)) << text;
      const bool json = source.kind == Kind::json_object || source.kind == Kind::json_schema;
      EXPECT_TRUE(!json || nlohmann::json::accept(text)) << text;
    }
}

TEST(Constraint, EndsOnlyWhereTheTextMayEnd) {
  auto c = GrammarCompiler::constraint(compiler().compile({Kind::regex, "ab"}));
  EXPECT_FALSE(c->accept(kEos));
  EXPECT_TRUE(c->accept('a'));
  EXPECT_FALSE(c->accept('a'));
  EXPECT_TRUE(c->accept('b'));
  const auto mask = c->allowed();
  for (int t = 0; t < 280; ++t) EXPECT_EQ(mask[static_cast<size_t>(t) / 32] >> (t % 32) & 1u, t == kEos ? 1u : 0u) << t;
  EXPECT_TRUE(c->accept(kEos));
  EXPECT_FALSE(c->accept(-1));
  EXPECT_FALSE(c->accept(100000));
}

TEST(Constraint, IsFreeUntilTheMark) {
  auto c = GrammarCompiler::constraint(compiler().compile({Kind::regex, "x"}), {.free_until = "</t>"});
  for (const char t : std::string("{ free </t")) {
    EXPECT_TRUE(c->allowed().empty());
    EXPECT_TRUE(c->accept(t));
  }
  EXPECT_TRUE(c->accept(257));  // a control token in the free part
  EXPECT_TRUE(c->allowed().empty());
  EXPECT_TRUE(c->accept('>'));
  EXPECT_FALSE(c->allowed().empty());
  EXPECT_FALSE(c->accept('y'));
  EXPECT_TRUE(c->accept('x'));

  auto by_token = GrammarCompiler::constraint(compiler().compile({Kind::regex, "x"}), {.free_until_token = 257});
  EXPECT_TRUE(by_token->accept('q'));
  EXPECT_TRUE(by_token->accept(257));
  EXPECT_FALSE(by_token->accept('q'));
}

TEST(Constraint, NamedControlTokensPassWhereTheGrammarSaysSo) {
  Grammar g;
  g.root = g.add_rule("root");
  g.define(g.root, g.sequence({g.token(257), g.literal("a")}));
  auto c = GrammarCompiler::constraint(compiler().compile(g));
  const auto mask = c->allowed();
  for (int t = 0; t < 280; ++t) EXPECT_EQ(mask[static_cast<size_t>(t) / 32] >> (t % 32) & 1u, t == 257 ? 1u : 0u) << t;
  EXPECT_FALSE(c->accept('a'));
  EXPECT_TRUE(c->accept(257));
  EXPECT_TRUE(c->accept('a'));
}

TEST(Compiler, KeepsMasksUnderItsBudget) {  // 100 grammars with a tiny budget: results stay right while masks come and go
  GrammarCompiler small(vocabulary(), {kEos}, 16 * 600);
  for (int i = 0; i < 100; ++i) {
    const auto g = small.compile({Kind::regex, "[a-f]{" + std::to_string(i % 20) + "}\"x*"});
    auto c = GrammarCompiler::constraint(g);
    for (int k = 0; k < i % 20; ++k) {
      EXPECT_EQ(c->allowed()['a' / 32] >> ('a' % 32) & 1u, 1u);
      EXPECT_EQ(c->allowed()['x' / 32] >> ('x' % 32) & 1u, 0u);
      ASSERT_TRUE(c->accept('a' + k % 6));
    }
    EXPECT_TRUE(c->accept('"'));
  }
}

}  // namespace
}  // namespace cachalot::test
