// Each schema object becomes an expression; a $ref becomes a rule, so that schemas may be recursive.
#include "grammar/json_schema.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "base/error.h"
#include "base/json.h"
#include "grammar/json_rules.h"
#include "grammar/regex.h"
#include "grammar/schema_facts.h"

namespace cachalot {
namespace {

constexpr int kMaxDepth = 64;
constexpr int kMaxReferences = 250;    // among alternatives: while they look alike, each is up to three places (CompiledGrammar::kMaxItems)
constexpr size_t kMaxExclusive = 500;  // alternatives of oneOf: each is compared with each

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

  Expr expression(const JsonValue& v, int depth) {
    if (depth > kMaxDepth) fail("{}: schemas nested deeper than {}", v.where(), kMaxDepth);
    if (v.is_bool()) {
      if (!v.boolean()) fail("{}: the schema false matches nothing", v.where());
      return json_.value();
    }
    if (!v.is_object()) fail("{}: expected an object or a boolean", v.where());
    if (member(v, "$ref")) {
      allow_only(v, {"$ref"});
      return g_.rule(reference(child(v, "$ref")));
    }
    if (member(v, "const")) {
      allow_only(v, {"const", "type"});
      const JsonValue value = child(v, "const");
      if (!has_type(value.element(), type_names(v))) fail("{}: the value is not of the type beside it", value.where());
      return literal(value);
    }
    if (member(v, "enum")) {
      allow_only(v, {"enum", "type"});
      const auto allowed = type_names(v);
      std::vector<Expr> out;
      for (const auto element : child(v, "enum").array())
        if (has_type(element, allowed)) out.push_back(literal({element, v.where() + ".enum"}));
      if (out.empty()) fail("{}.enum: expected at least one value{}", v.where(), allowed.empty() ? "" : " of the type beside it");
      return g_.choice(out);
    }
    for (const std::string_view key : {std::string_view("anyOf"), std::string_view("oneOf")})
      if (member(v, key)) {
        allow_only(v, {key, "type"});
        return alternatives(child(v, key), key == "oneOf", type_names(v), depth);
      }
    if (member(v, "allOf")) return all_of(v, depth);
    if (member(v, "type")) {
      const auto names = type_names(v);
      allow_only_of(v, names);
      std::vector<Expr> out;
      for (const std::string& name : names) out.push_back(typed(v, name, depth));
      return g_.choice(out);
    }
    return untyped(v, depth);
  }

  // Keywords of one type tell which is meant.
  Expr untyped(const JsonValue& v, int depth) {
    const auto any_of_these = [&](std::initializer_list<std::string_view> keys) {
      return std::any_of(keys.begin(), keys.end(), [&](std::string_view key) { return member(v, key); });
    };
    if (any_of_these({"properties", "required", "additionalProperties"})) return object(v, depth);
    if (any_of_these({"items", "prefixItems"})) {
      allow_only_of(v, {"array"});
      return array(v, depth);
    }
    if (any_of_these({"pattern", "minLength", "maxLength", "format"})) {
      allow_only_of(v, {"string"});
      return string(v);
    }
    allow_only(v, {});
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

  // `allowed`: the types that stand beside the list.
  Expr alternatives(const JsonValue& list, bool exclusive, const std::vector<std::string>& allowed, int depth) {
    std::vector<JsonValue> options;
    std::vector<Expr> out;
    int n_references = 0;
    for (const auto element : list.array()) {
      options.emplace_back(element, fmt::format("{}[{}]", list.where(), options.size()));
      n_references += member(options.back(), "$ref") ? 1 : 0;
      if (n_references > kMaxReferences) fail("{}: found more than {} references, expected fewer", list.where(), kMaxReferences);
      if (allowed.empty() || within(options.back(), allowed)) out.push_back(expression(options.back(), depth + 1));
    }
    if (out.empty()) fail("{}: expected at least one schema{}", list.where(), allowed.empty() ? "" : " of the type beside it");
    if (exclusive) refuse_common_values(list, options);
    return g_.choice(out);
  }

  // oneOf: a choice would also take what fits several.
  void refuse_common_values(const JsonValue& list, const std::vector<JsonValue>& options) const {
    if (options.size() > kMaxExclusive)
      fail("{}: found {} schemas, expected at most {}; use anyOf", list.where(), options.size(), kMaxExclusive);
    std::vector<Marks> marks;
    for (const JsonValue& option : options) marks.push_back(marks_of(resolved(option)));
    for (size_t i = 0; i < marks.size(); ++i)
      for (size_t j = 0; j < i; ++j)
        if (!plainly_disjoint(marks[j], marks[i]))
          fail(
              "{}: it is not plain that {} and {} exclude each other; use anyOf, different types, or a required property with different "
              "constants",
              list.where(), j, i);
  }

  // Whether all values of an alternative are of these types (true) or none (false); another one is refused.
  bool within(const JsonValue& option, const std::vector<std::string>& allowed) const {
    const JsonValue target = resolved(option);
    const auto names = type_names(target);
    const auto values = values_of(target);
    std::ptrdiff_t n = std::ssize(names), n_within = 0;
    if (!values.empty()) {
      n = std::ssize(values);
      n_within = std::count_if(values.begin(), values.end(), [&](const auto value) { return has_type(value, allowed); });
    } else {
      n_within = std::count_if(names.begin(), names.end(), [&](const std::string& name) {
        return has_name(allowed, name) || (name == "integer" && has_name(allowed, "number"));
      });
      if (has_name(names, "number") && has_name(allowed, "integer")) n = 0;
    }
    if (n == 0 || (n_within > 0 && n_within < n))
      fail("{}: expected a \"type\" that is one of those beside the list, or none of them", option.where());
    return n_within == n;
  }

  // What a $ref within the schema leads to; everything else is itself.
  JsonValue resolved(const JsonValue& v) const {
    if (!member(v, "$ref")) return v;
    const std::string path(child(v, "$ref").string());
    if (path.rfind("#/", 0) != 0) return v;
    auto target = root_.element().at_pointer(std::string_view(path).substr(1));
    return target.error() == simdjson::SUCCESS ? JsonValue(target.value(), path) : v;
  }

  Expr all_of(const JsonValue& v, int depth) {
    allow_only(v, {"allOf", "type"});
    if (const auto names = type_names(v); !names.empty() && !has_name(names, "object"))
      fail("{}.allOf: expected the type object beside it, as of several schemas only objects are put together", v.where());
    std::vector<JsonValue> parts;
    for (const auto element : child(v, "allOf").array()) parts.emplace_back(element, fmt::format("{}.allOf[{}]", v.where(), parts.size()));
    if (parts.empty()) fail("{}.allOf: expected at least one schema", v.where());
    if (parts.size() == 1) return expression(parts[0], depth + 1);
    Members all;
    for (JsonValue part : parts) {
      part = resolved(part);
      if (member(part, "$ref")) fail("{}.$ref: \"{}\" leads nowhere", part.where(), printable(child(part, "$ref").string()));
      if (!member(part, "properties")) fail("{}: allOf of several schemas needs objects with properties", part.where());
      add_members(part, all, depth);
    }
    return members(v, all);
  }

  Expr typed(const JsonValue& v, std::string_view type, int depth) {
    if (type == "object") return object(v, depth);
    if (type == "array") return array(v, depth);
    if (type == "string") return string(v);
    if (type == "integer" || type == "number") return number(v, type == "integer");
    if (type == "boolean") return json_.boolean();
    if (type == "null") return json_.null();
    fail("{}.type: unknown type \"{}\"", v.where(), printable(type));
  }

  static bool single(const JsonValue& v) { return type_names(v).size() < 2; }

  Expr number(const JsonValue& v, bool whole) {
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
    const int min = count_of(v, "minLength", 0), max = count_of(v, "maxLength", -1);
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
    const int min = count_of(v, "minItems", 0), max = count_of(v, "maxItems", -1);
    if (max >= 0 && max < min) fail("{}: maxItems {} is below minItems {}", v.where(), max, min);
    const bool closed = member(v, "items") && child(v, "items").is_bool() && !child(v, "items").boolean();
    const auto item = [&] { return member(v, "items") && !closed ? item_of(child(v, "items"), depth + 1) : json_.value(); };
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

  // A list uses its item twice: as a rule, a list within lists is stored once.
  Expr item_of(const JsonValue& v, int depth) {
    const Expr item = expression(v, depth);
    if (!has_name(type_names(v), "array")) return item;
    const int rule = g_.add_rule("item");
    g_.define(rule, item);
    return g_.rule(rule);
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
    allow_only_of(v, {"object"});
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
    if (!single(v)) return several_types_object(v);
    Members all;
    add_members(v, all, depth);
    if (!member(v, "properties") && !member(v, "additionalProperties")) all.other = json_.value();
    return members(v, all);
  }

  // With "type": ["object", ...] the keywords of the other types stand beside the object's.
  Expr several_types_object(const JsonValue& v) {
    for (const std::string_view key : {"properties", "required", "additionalProperties", "minProperties", "maxProperties"})
      if (member(v, key)) fail("{}: an object with {} beside other types; use anyOf", v.where(), key);
    return json_.object();
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

  Expr members(const JsonValue& v, const Members& all) {
    const int min = count_of(v, "minProperties", 0), max = count_of(v, "maxProperties", -1);
    const Expr colon = g_.sequence({json_.space(), g_.literal(":"), json_.space()});
    const Expr comma = g_.sequence({json_.space(), g_.literal(","), json_.space()});
    // Free names may repeat, and members of one name count once.
    if (min > 1) fail("{}.minProperties: expected 0 or 1, found {}", v.where(), min);
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
