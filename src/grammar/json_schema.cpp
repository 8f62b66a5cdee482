// Each schema object becomes an expression; a $ref becomes a rule, so that schemas may be recursive.
#include "grammar/json_schema.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>

#include "base/error.h"
#include "base/json.h"
#include "grammar/json_rules.h"
#include "grammar/regex.h"

namespace cachalot {
namespace {

constexpr int kMaxDepth = 64, kMaxCount = 10000;

// Keywords that only describe.
constexpr std::array kAnnotations = {"title",    "description",     "default",          "examples", "$comment", "deprecated",
                                     "readOnly", "writeOnly",       "$schema",          "$id",      "$defs",    "definitions",
                                     "strict",   "contentEncoding", "contentMediaType", "$anchor"};

struct Format {
  const char* name;
  const char* pattern;
};
constexpr Format kFormats[] = {
    {"date", R"(\d{4}-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8]))"},
    {"time", R"(([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d))"},
    {"date-time",
     R"(\d{4}-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])T([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d))"},
    {"uuid", R"([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})"},
    {"ipv4", R"(((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d))"},
    {"hostname", R"([a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?){0,5})"},
    {"email", R"([A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?){1,5})"},
    {"uri", R"([a-z][a-z0-9+.-]*:[A-Za-z0-9._~:/?#@!$&'()*+,;=%-]+)"},
};

class Schema {
 public:
  Schema(Grammar& g, const JsonValue& root) : g_(g), json_(g), root_(root) {}

  int build() {
    const int rule = g_.add_rule("schema");
    refs_["#"] = rule;
    g_.define(rule, expression(root_, 0));
    return rule;
  }

 private:
  using Expr = Grammar::Expr;

  static bool member(const JsonValue& v, std::string_view key) { return v.is_object() && v.element()[key].error() == simdjson::SUCCESS; }
  static JsonValue child(const JsonValue& v, std::string_view key) {
    return {v.element()[key].value(), v.where() + "." + std::string(key)};
  }

  static int count(const JsonValue& v, std::string_view key, int fallback) {
    if (!member(v, key)) return fallback;
    const int64_t n = child(v, key).integer();
    if (n < 0 || n > kMaxCount) fail("{}.{}: expected 0 to {}, found {}", v.where(), key, kMaxCount, n);
    return static_cast<int>(n);
  }

  // Every keyword of v must be an annotation or one of `known`.
  static void only(const JsonValue& v, std::initializer_list<std::string_view> known) {
    for (const auto& [key, value] : v.object()) {
      (void)value;
      const auto is = [&key = key](std::string_view name) { return name == key; };
      if (!std::any_of(kAnnotations.begin(), kAnnotations.end(), is) && !std::any_of(known.begin(), known.end(), is))
        fail("{}.{}: this keyword is not supported here", v.where(), printable(key));
    }
  }

  Expr expression(const JsonValue& v, int depth) {
    if (depth > kMaxDepth) fail("{}: schemas nested deeper than {}", v.where(), kMaxDepth);
    if (v.is_bool()) {
      if (!v.boolean()) fail("{}: the schema false matches nothing", v.where());
      return json_.value();
    }
    if (!v.is_object()) fail("{}: expected an object or a boolean", v.where());
    if (member(v, "$ref")) {
      only(v, {"$ref"});
      return g_.rule(reference(child(v, "$ref")));
    }
    if (member(v, "const")) {
      only(v, {"const", "type"});
      return literal(child(v, "const"));
    }
    if (member(v, "enum")) {
      only(v, {"enum", "type"});
      std::vector<Expr> out;
      for (const auto element : child(v, "enum").array()) out.push_back(literal({element, v.where() + ".enum"}));
      if (out.empty()) fail("{}.enum: expected at least one value", v.where());
      return g_.choice(out);
    }
    for (const std::string_view key : {std::string_view("anyOf"), std::string_view("oneOf")})
      if (member(v, key)) {
        only(v, {key, "type"});
        return alternatives(child(v, key), key == "oneOf", depth);
      }
    if (member(v, "allOf")) return all_of(v, depth);
    if (member(v, "type")) {
      const JsonValue type = child(v, "type");
      if (type.is_string()) return typed(v, type.string(), depth);
      std::vector<Expr> out;
      for (const auto element : type.array()) out.push_back(typed(v, JsonValue(element, type.where()).string(), depth));
      if (out.empty()) fail("{}: expected at least one type", type.where());
      return g_.choice(out);
    }
    if (member(v, "properties") || member(v, "required") || member(v, "additionalProperties")) return object(v, depth);
    if (member(v, "items") || member(v, "prefixItems")) return array(v, depth);
    if (member(v, "pattern") || member(v, "minLength") || member(v, "maxLength") || member(v, "format")) return string(v);
    only(v, {});
    return json_.value();
  }

  int reference(const JsonValue& ref) {
    const std::string path(ref.string());
    const auto [entry, added] = refs_.try_emplace(path, -1);
    if (!added) return entry->second;
    if (path.rfind("#/", 0) != 0)
      fail("{}: only references within the schema (#/...) are supported, found \"{}\"", ref.where(), printable(path));
    auto target = root_.element().at_pointer(std::string_view(path).substr(1));
    if (target.error() != simdjson::SUCCESS) fail("{}: \"{}\" leads nowhere", ref.where(), printable(path));
    const int rule = g_.add_rule(path);
    refs_[path] = rule;
    g_.define(rule, expression({target.value(), path}, 0));
    return rule;
  }

  // A value as it is, with white space where it is free.
  Expr literal(const JsonValue& v) {
    if (v.is_object()) {
      std::vector<Expr> parts{g_.literal("{"), json_.space()};
      bool first = true;
      for (const auto& [key, value] : v.object()) {
        if (!first) parts.insert(parts.end(), {g_.literal(","), json_.space()});
        first = false;
        parts.insert(parts.end(),
                     {json_.quoted(key), json_.space(), g_.literal(":"), json_.space(), literal({value, v.where()}), json_.space()});
      }
      parts.push_back(g_.literal("}"));
      return g_.sequence(parts);
    }
    if (v.is_array()) {
      std::vector<Expr> parts{g_.literal("["), json_.space()};
      bool first = true;
      for (const auto element : v.array()) {
        if (!first) parts.insert(parts.end(), {g_.literal(","), json_.space()});
        first = false;
        parts.insert(parts.end(), {literal({element, v.where()}), json_.space()});
      }
      parts.push_back(g_.literal("]"));
      return g_.sequence(parts);
    }
    if (v.is_string()) return json_.quoted(v.string());
    return g_.literal(simdjson::minify(v.element()));
  }

  Expr alternatives(const JsonValue& list, bool exclusive, int depth) {
    std::vector<JsonValue> options;
    std::vector<Expr> out;
    for (const auto element : list.array()) {
      options.emplace_back(element, fmt::format("{}[{}]", list.where(), options.size()));
      out.push_back(expression(options.back(), depth + 1));
    }
    if (out.empty()) fail("{}: expected at least one schema", list.where());
    for (size_t i = 0; exclusive && i < options.size(); ++i)
      for (size_t j = 0; j < i; ++j)
        if (!disjoint(options[j], options[i]))
          fail(
              "{}: it is not plain that {} and {} exclude each other; use anyOf, different types, or a required property with different "
              "constants",
              list.where(), j, i);
    return g_.choice(out);
  }

  // The values that a schema allows when they are few, as JSON text.
  static std::set<std::string> constants(const JsonValue& v) {
    std::set<std::string> out;
    if (member(v, "const")) out.insert(simdjson::minify(child(v, "const").element()));
    if (member(v, "enum"))
      for (const auto element : child(v, "enum").array()) out.insert(simdjson::minify(element));
    return out;
  }
  static std::set<std::string> types(const JsonValue& v) {
    std::set<std::string> out;
    const auto add = [&](std::string_view type) { out.emplace(type == "integer" ? "number" : type); };
    if (member(v, "type")) {
      const JsonValue type = child(v, "type");
      if (type.is_string())
        add(type.string());
      else
        for (const auto element : type.array()) add(JsonValue(element, type.where()).string());
    }
    for (const std::string& text : constants(v))
      add(text[0] == '"'                     ? "string"
          : text[0] == '{'                   ? "object"
          : text[0] == '['                   ? "array"
          : text[0] == 't' || text[0] == 'f' ? "boolean"
          : text[0] == 'n'                   ? "null"
                                             : "number");
    return out;
  }
  static bool common(const std::set<std::string>& a, const std::set<std::string>& b) {
    return std::any_of(a.begin(), a.end(), [&](const std::string& x) { return b.count(x) > 0; });
  }
  static bool requires_key(const JsonValue& v, std::string_view key) {
    if (!member(v, "required")) return false;
    for (const auto element : child(v, "required").array())
      if (element.is_string() && element.get_string().value() == key) return true;
    return false;
  }
  bool disjoint(JsonValue a, JsonValue b) {
    for (JsonValue* v : {&a, &b})
      if (member(*v, "$ref")) {
        const std::string path(child(*v, "$ref").string());
        auto target = root_.element().at_pointer(std::string_view(path).substr(1));
        if (target.error() == simdjson::SUCCESS) *v = {target.value(), path};
      }
    if (!a.is_object() || !b.is_object()) return false;
    const auto ca = constants(a), cb = constants(b), ta = types(a), tb = types(b);
    if (!ta.empty() && !tb.empty() && !common(ta, tb)) return true;
    if (!ca.empty() && !cb.empty()) return !common(ca, cb);
    if (!member(a, "properties") || !member(b, "properties")) return false;
    const JsonValue pb = child(b, "properties");
    for (const auto& [key, value] : child(a, "properties").object()) {
      if (!requires_key(a, key) || !requires_key(b, key) || !member(pb, key)) continue;
      const auto x = constants({value, ""}), y = constants(child(pb, key));
      if (!x.empty() && !y.empty() && !common(x, y)) return true;
    }
    return false;
  }

  Expr all_of(const JsonValue& v, int depth) {
    only(v, {"allOf", "type"});
    std::vector<JsonValue> parts;
    for (const auto element : child(v, "allOf").array()) parts.emplace_back(element, fmt::format("{}.allOf[{}]", v.where(), parts.size()));
    if (parts.empty()) fail("{}.allOf: expected at least one schema", v.where());
    if (parts.size() == 1) return expression(parts[0], depth + 1);
    Members all;
    for (JsonValue part : parts) {
      if (member(part, "$ref")) {
        const std::string path(child(part, "$ref").string());
        auto target = path.rfind("#/", 0) == 0 ? root_.element().at_pointer(std::string_view(path).substr(1))
                                               : simdjson::simdjson_result<simdjson::dom::element>(simdjson::NO_SUCH_FIELD);
        if (target.error() != simdjson::SUCCESS) fail("{}.$ref: \"{}\" leads nowhere", part.where(), printable(path));
        part = {target.value(), path};
      }
      if (!member(part, "properties")) fail("{}: allOf of several schemas needs objects with properties", part.where());
      add_members(part, all, depth);
    }
    return members(v, all, depth);
  }

  Expr typed(const JsonValue& v, std::string_view type, int depth) {
    // With several types, each takes the keywords that concern it.
    if (type == "object") return object(v, depth);
    if (type == "array") return array(v, depth);
    if (type == "string") return string(v);
    if (type == "integer" || type == "number") return number(v, type == "integer");
    if (member(v, "type") && child(v, "type").is_string()) only(v, {"type"});
    if (type == "boolean") return json_.boolean();
    if (type == "null") return json_.null();
    fail("{}.type: unknown type \"{}\"", v.where(), printable(type));
  }

  static bool single(const JsonValue& v) { return !member(v, "type") || child(v, "type").is_string(); }

  Expr number(const JsonValue& v, bool whole) {
    if (single(v)) only(v, {"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "format"});
    NumberBounds b;
    const auto read = [&](std::string_view key, std::optional<double>& bound, bool& open, bool is_open, bool low) {
      if (!member(v, key)) return;
      const double value = child(v, key).number();
      if (bound && (low ? value < *bound : value > *bound)) return;
      bound = value;
      open = is_open;
    };
    read("minimum", b.low, b.low_open, false, true);
    read("exclusiveMinimum", b.low, b.low_open, true, true);
    read("maximum", b.high, b.high_open, false, false);
    read("exclusiveMaximum", b.high, b.high_open, true, false);
    if (!b.low && !b.high) return whole ? json_.integer() : json_.number();
    try {
      return whole ? bounded_integer(g_, b) : bounded_number(g_, b);
    } catch (const Error& error) {
      fail("{}: {}", v.where(), error.what());
    }
  }

  Expr string(const JsonValue& v) {
    if (single(v)) only(v, {"type", "pattern", "minLength", "maxLength", "format"});
    const int min = count(v, "minLength", 0), max = count(v, "maxLength", -1);
    const bool bounded = min > 0 || max >= 0;
    if (max >= 0 && max < min) fail("{}: maxLength {} is below minLength {}", v.where(), max, min);
    const Expr quote = g_.literal("\"");
    if (member(v, "pattern")) {
      if (bounded) fail("{}: pattern together with minLength or maxLength is not supported", v.where());
      const std::string_view pattern = child(v, "pattern").string();
      try {
        return g_.sequence({quote, parse_regex(g_, pattern, {.spelling = Spelling::json_string, .whole = false}), quote});
      } catch (const Error& error) {
        fail("{}.pattern: {}", v.where(), error.what());
      }
    }
    if (member(v, "format")) {
      const std::string_view name = child(v, "format").string();
      for (const Format& format : kFormats)
        if (name == format.name) {
          if (bounded) fail("{}: format together with minLength or maxLength is not supported", v.where());
          const int rule = g_.add_rule(format.name);
          g_.define(rule, g_.sequence({quote, parse_regex(g_, format.pattern, {.spelling = Spelling::json_string}), quote}));
          g_.set_well_known(rule, Grammar::kJsonFormat + static_cast<int>(&format - kFormats));
          return g_.rule(rule);
        }
    }
    return json_.string(min, max);
  }

  Expr array(const JsonValue& v, int depth) {
    if (single(v)) only(v, {"type", "items", "prefixItems", "minItems", "maxItems"});
    const int min = count(v, "minItems", 0), max = count(v, "maxItems", -1);
    if (max >= 0 && max < min) fail("{}: maxItems {} is below minItems {}", v.where(), max, min);
    const bool closed = member(v, "items") && child(v, "items").is_bool() && !child(v, "items").boolean();
    const auto item = [&] { return member(v, "items") && !closed ? expression(child(v, "items"), depth + 1) : json_.value(); };
    if (!member(v, "prefixItems")) return json_.list('[', item(), ']', min, closed ? 0 : max);

    std::vector<Expr> first;
    for (const auto element : child(v, "prefixItems").array())
      first.push_back(expression({element, fmt::format("{}.prefixItems[{}]", v.where(), first.size())}, depth + 1));
    const int n = static_cast<int>(first.size());
    if (closed && min > n) fail("{}: minItems {} exceeds the {} items that there may be", v.where(), min, n);
    const Expr comma = g_.sequence({json_.space(), g_.literal(","), json_.space()});
    // From the back: behind item i there may be the end or item i + 1.
    Expr tail = g_.empty();
    if (!closed && (max < 0 || max > n)) tail = g_.repeat(g_.sequence({comma, item()}), std::max(0, min - n), max < 0 ? -1 : max - n);
    for (int i = n - 1; i >= 0; --i) {
      if (max >= 0 && i >= max) continue;
      const Expr here = g_.sequence({i > 0 ? comma : g_.empty(), first[static_cast<size_t>(i)], tail});
      tail = i >= min ? g_.optional(here) : here;
    }
    return g_.sequence({g_.literal("["), json_.space(), tail, json_.space(), g_.literal("]")});
  }

  struct Member {
    std::string key;
    Expr value;
    bool required;
  };
  struct Members {
    std::vector<Member> named;
    std::optional<Expr> other;  // value of members that are not named
  };

  void add_members(const JsonValue& v, Members& out, int depth) {
    only(v, {"type", "properties", "required", "additionalProperties", "minProperties", "maxProperties"});
    std::set<std::string> required;
    if (member(v, "required"))
      for (const auto element : child(v, "required").array()) required.emplace(JsonValue(element, v.where() + ".required").string());
    if (member(v, "properties"))
      for (const auto& [key, value] : child(v, "properties").object()) {
        const std::string name(key);
        if (std::any_of(out.named.begin(), out.named.end(), [&](const Member& m) { return m.key == name; }))
          fail("{}.properties: \"{}\" is named twice", v.where(), printable(name));
        const bool must = required.erase(name) > 0;
        // A rule, since members() uses it twice.
        const int rule = g_.add_rule(name);
        g_.define(rule, expression({value, v.where() + ".properties." + printable(name)}, depth + 1));
        out.named.push_back({name, g_.rule(rule), must});
      }
    if (member(v, "additionalProperties")) {
      const JsonValue other = child(v, "additionalProperties");
      if (!other.is_bool() || other.boolean()) out.other = expression(other, depth + 1);
    }
    for (const std::string& name : required)
      if (!out.other && member(v, "properties"))
        fail("{}.required: \"{}\" is not among the properties", v.where(), printable(name));
      else
        out.named.push_back({name, out.other.value_or(json_.value()), true});
  }

  Expr object(const JsonValue& v, int depth) {
    if (!single(v)) return several_types_object(v, depth);
    Members all;
    add_members(v, all, depth);
    if (!member(v, "properties") && !member(v, "additionalProperties")) all.other = json_.value();
    return members(v, all, depth);
  }

  // With "type": ["object", ...] the keywords of the other types stand beside the object's.
  Expr several_types_object(const JsonValue& v, int depth) {
    if (!member(v, "properties") && !member(v, "additionalProperties")) return json_.object();
    (void)depth;
    fail("{}: an object with properties beside other types; use anyOf", v.where());
  }

  // A key that is none of the named ones: strings without escapes, branching off each name somewhere.
  Expr other_key(const std::vector<Member>& named) {
    std::vector<std::string> names;
    for (const Member& m : named) names.push_back(m.key);
    std::sort(names.begin(), names.end());
    return g_.sequence({g_.literal("\""), differs(names, 0), g_.literal("\"")});
  }

  Expr plain_characters() {
    CodePoints excluded;
    excluded.add(0, 0x1F);
    excluded.add('"', '"');
    excluded.add('\\', '\\');
    excluded.add(0x7F, CodePoints::kLast);  // one byte per character, so that names can be compared byte by byte
    return any_of(g_, excluded.complement(), Spelling::utf8);
  }

  // Strings (without their first `at` bytes) that equal none of `names`, which all share those bytes.
  Expr differs(const std::vector<std::string>& names, size_t at) {
    std::map<char, std::vector<std::string>> by_byte;
    bool ends_here = false;
    for (const std::string& name : names) {
      if (name.size() == at)
        ends_here = true;
      else
        by_byte[name[at]].push_back(name);
    }
    ByteSet others;
    for (int c = 0x20; c < 0x7F; ++c)
      if (c != '"' && c != '\\' && by_byte.count(static_cast<char>(c)) == 0) others.set(static_cast<size_t>(c));
    std::vector<Expr> out;
    if (!ends_here) out.push_back(g_.empty());
    if (others.any()) out.push_back(g_.sequence({g_.bytes(others), g_.repeat(plain_characters(), 0, -1)}));
    for (const auto& [byte, below] : by_byte)
      if (static_cast<unsigned char>(byte) < 0x7F && static_cast<unsigned char>(byte) >= 0x20 && byte != '"' && byte != '\\')
        out.push_back(g_.sequence({g_.literal(std::string(1, byte)), differs(below, at + 1)}));
    return g_.choice(out);
  }

  Expr members(const JsonValue& v, const Members& all, int depth) {
    (void)depth;
    const int min = count(v, "minProperties", 0), max = count(v, "maxProperties", -1);
    const Expr colon = g_.sequence({json_.space(), g_.literal(":"), json_.space()});
    const Expr comma = g_.sequence({json_.space(), g_.literal(","), json_.space()});
    std::optional<Expr> other;
    if (all.other) other = g_.sequence({all.named.empty() ? json_.string() : other_key(all.named), colon, *all.other});
    if (all.named.empty()) {
      if (!other) return g_.sequence({g_.literal("{"), json_.space(), g_.literal("}")});
      return json_.list('{', *other, '}', min, max);
    }
    if (min > 0 || max >= 0) fail("{}: minProperties and maxProperties beside properties are not supported", v.where());

    // follow: what may come behind member i when one came before it (with its comma); start: the same when none did.
    const Expr others = other ? g_.repeat(g_.sequence({comma, *other}), 0, -1) : g_.empty();
    Expr follow = others;
    Expr start = other ? g_.optional(g_.sequence({*other, others})) : g_.empty();
    for (auto m = all.named.rbegin(); m != all.named.rend(); ++m) {
      const Expr pair = g_.sequence({json_.quoted(m->key), colon, m->value});
      // The rest is used twice: as a rule it is stored once.
      const int rest = g_.add_rule("members");
      g_.define(rest, follow);
      const Expr behind = g_.rule(rest);
      start = m->required ? g_.sequence({pair, behind}) : g_.choice({g_.sequence({pair, behind}), start});
      follow = m->required ? g_.sequence({comma, pair, behind}) : g_.choice({g_.sequence({comma, pair, behind}), behind});
    }
    return g_.sequence({g_.literal("{"), json_.space(), start, json_.space(), g_.literal("}")});
  }

  Grammar& g_;
  JsonRules json_;
  JsonValue root_;
  std::map<std::string, int> refs_;
};

}  // namespace

int add_json_schema(Grammar& grammar, std::string_view text) {
  const JsonDocument document = JsonDocument::parse(text, "schema", {.max_bytes = size_t{1} << 20, .max_depth = 64, .unique_keys = true});
  return Schema(grammar, document.root()).build();
}

Grammar parse_json_schema(std::string_view text) {
  Grammar grammar;
  grammar.root = add_json_schema(grammar, text);
  return grammar;
}

Grammar json_object_grammar() {
  Grammar grammar;
  JsonRules json(grammar);
  const int root = grammar.add_rule("root");
  grammar.define(root, json.object());
  grammar.root = root;
  return grammar;
}

}  // namespace cachalot
