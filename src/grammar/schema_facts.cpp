// Keywords, types and values of schemas.
#include "grammar/schema_facts.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "base/error.h"

namespace cachalot {
namespace {

constexpr int kMaxCount = 10000;

// Keywords that only describe.
constexpr std::array<std::string_view, 16> kAnnotations = {
    "title", "description", "default", "examples",    "$comment", "deprecated",      "readOnly",         "writeOnly",
    "$id",   "$schema",     "$defs",   "definitions", "strict",   "contentEncoding", "contentMediaType", "$anchor"};

struct Keywords {
  std::string_view type;
  std::vector<std::string_view> names;
};
const std::vector<Keywords>& keywords_by_type() {
  static const std::vector<Keywords> kKeywords{
      {"object", {"properties", "required", "additionalProperties", "minProperties", "maxProperties"}},
      {"array", {"items", "prefixItems", "minItems", "maxItems"}},
      {"string", {"pattern", "minLength", "maxLength", "format"}},
      {"number", {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "format"}},
      {"integer", {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "format"}},
  };
  return kKeywords;
}

std::set<std::string> value_texts(const JsonValue& v) {
  std::set<std::string> out;
  for (const auto value : values_of(v)) out.insert(simdjson::minify(value));
  return out;
}

std::string_view type_of(simdjson::dom::element value) {
  using Type = simdjson::dom::element_type;
  switch (value.type()) {
    case Type::OBJECT: return "object";
    case Type::ARRAY: return "array";
    case Type::STRING: return "string";
    case Type::BOOL: return "boolean";
    case Type::NULL_VALUE: return "null";
    default: return "number";
  }
}

// By "type" or by the values that there may be; empty: unknown. Integers are numbers.
std::set<std::string> types_of(const JsonValue& v) {
  std::set<std::string> out;
  for (const std::string& name : type_names(v)) out.insert(name == "integer" ? "number" : name);
  for (const auto value : values_of(v)) out.emplace(type_of(value));
  return out;
}

bool common(const std::set<std::string>& a, const std::set<std::string>& b) {
  if (a.size() > b.size()) return common(b, a);
  return std::any_of(a.begin(), a.end(), [&](const std::string& x) { return b.count(x) > 0; });
}

}  // namespace

bool member(const JsonValue& v, std::string_view key) { return v.is_object() && v.element()[key].error() == simdjson::SUCCESS; }

JsonValue child(const JsonValue& v, std::string_view key) { return {v.element()[key].value(), v.where() + "." + std::string(key)}; }

int count_of(const JsonValue& v, std::string_view key, int fallback) {
  if (!member(v, key)) return fallback;
  const int64_t n = child(v, key).integer();
  if (n < 0 || n > kMaxCount) fail("{}.{}: expected 0 to {}, found {}", v.where(), key, kMaxCount, n);
  return static_cast<int>(n);
}

std::vector<std::string> type_names(const JsonValue& v) {
  std::vector<std::string> out;
  if (!member(v, "type")) return out;
  const JsonValue type = child(v, "type");
  if (type.is_string()) return {std::string(type.string())};
  for (const auto element : type.array()) out.emplace_back(JsonValue(element, type.where()).string());
  if (out.empty()) fail("{}: expected at least one type", type.where());
  return out;
}

bool has_name(const std::vector<std::string>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool has_type(simdjson::dom::element value, const std::vector<std::string>& names) {
  if (names.empty() || has_name(names, type_of(value))) return true;
  return value.is_number() && has_name(names, "integer") &&
         value.get_double().value_unsafe() == std::floor(value.get_double().value_unsafe());
}

void allow_only(const JsonValue& v, const std::vector<std::string_view>& known) {
  for (const auto field : v.object()) {
    const auto is = [&](std::string_view name) { return name == field.key; };
    if (!std::any_of(kAnnotations.begin(), kAnnotations.end(), is) && !std::any_of(known.begin(), known.end(), is))
      fail("{}.{}: this keyword is not supported here", v.where(), printable(field.key));
  }
}

void allow_only_of(const JsonValue& v, const std::vector<std::string>& types) {
  std::vector<std::string_view> known{"type"};
  for (const Keywords& k : keywords_by_type())
    if (has_name(types, k.type)) known.insert(known.end(), k.names.begin(), k.names.end());
  allow_only(v, known);
}

std::vector<simdjson::dom::element> values_of(const JsonValue& v) {
  std::vector<simdjson::dom::element> out;
  if (member(v, "const")) out.push_back(child(v, "const").element());
  if (member(v, "enum"))
    for (const auto element : child(v, "enum").array()) out.push_back(element);
  return out;
}

Marks marks_of(const JsonValue& v) {
  Marks out;
  if (!v.is_object()) return out;
  out.types = types_of(v);
  out.values = value_texts(v);
  if (!member(v, "properties") || !member(v, "required")) return out;
  std::set<std::string_view> required;
  for (const auto element : child(v, "required").array())
    if (element.is_string()) required.insert(element.get_string().value_unsafe());
  for (const auto field : child(v, "properties").object()) {
    if (required.count(field.key) == 0) continue;
    auto values = value_texts({field.value, ""});
    if (!values.empty()) out.members.emplace(field.key, std::move(values));
  }
  return out;
}

bool plainly_disjoint(const Marks& a, const Marks& b) {
  if (!a.types.empty() && !b.types.empty() && !common(a.types, b.types)) return true;
  if (!a.values.empty() && !b.values.empty()) return !common(a.values, b.values);
  return std::any_of(a.members.begin(), a.members.end(), [&](const auto& entry) {
    const auto other = b.members.find(entry.first);
    return other != b.members.end() && !common(entry.second, other->second);
  });
}

}  // namespace cachalot
