// JsonDocument on simdjson's DOM.
#include "base/json.h"

#include <algorithm>

#include "base/error.h"

namespace cachalot {
namespace {

const char* type_name(simdjson::dom::element_type type) {
  switch (type) {
    case simdjson::dom::element_type::ARRAY: return "an array";
    case simdjson::dom::element_type::OBJECT: return "an object";
    case simdjson::dom::element_type::INT64:
    case simdjson::dom::element_type::UINT64: return "an integer";
    case simdjson::dom::element_type::DOUBLE: return "a number with a fraction";
    case simdjson::dom::element_type::STRING: return "a string";
    case simdjson::dom::element_type::BOOL: return "a boolean";
    case simdjson::dom::element_type::NULL_VALUE: return "null";
  }
  return "an unknown type";
}

template <typename T>
T get_as(const JsonValue& value, const char* expected) {
  T out;
  if (value.element().get(out) != simdjson::SUCCESS)
    fail("{}: found {}, expected {}", value.where(), type_name(value.element().type()), expected);
  return out;
}

// Depth is limited by the parser, so this recursion is too.
void check_unique_keys(simdjson::dom::element element, const std::string& name) {
  if (simdjson::dom::array array; element.get(array) == simdjson::SUCCESS) {
    for (const auto child : array) check_unique_keys(child, name);
  } else if (simdjson::dom::object object; element.get(object) == simdjson::SUCCESS) {
    std::vector<std::string_view> keys;
    for (const auto [key, child] : object) {
      keys.push_back(key);
      check_unique_keys(child, name);
    }
    std::sort(keys.begin(), keys.end());
    const auto twice = std::adjacent_find(keys.begin(), keys.end());
    if (twice != keys.end()) fail("{}: the key \"{}\" appears twice in one object", name, printable(*twice));
  }
}

// Hugging Face configs hold integers past 64 bits (model_max_length is often 10^30), which simdjson refuses. Written with an
// exponent they are doubles.
std::string widen_big_integers(std::string_view text) {
  constexpr size_t kSafeDigits = 19;
  std::string out;
  out.reserve(text.size() + 64);
  bool in_string = false;
  for (size_t i = 0; i < text.size();) {
    const char c = text[i];
    if (in_string || c < '0' || c > '9') {
      if (c == '"') in_string = !in_string;
      if (in_string && c == '\\' && i + 1 < text.size()) out += text[i++];
      out += text[i++];
      continue;
    }
    const size_t end = std::min(text.find_first_not_of("0123456789.eE+-", i), text.size());
    const std::string_view number = text.substr(i, end - i);
    out += number;
    if (number.size() > kSafeDigits && number.find_first_of(".eE+-") == std::string_view::npos) out += "e0";
    i = end;
  }
  return out;
}

}  // namespace

JsonDocument JsonDocument::parse(std::string_view text, std::string name, JsonLimits limits) {
  if (text.size() > limits.max_bytes) fail("{}: {} bytes of JSON, expected at most {}", name, text.size(), limits.max_bytes);
  JsonDocument document;
  document.parser_ = std::make_unique<simdjson::dom::parser>();
  simdjson::dom::element root;
  auto error = document.parser_->allocate(std::max<size_t>(text.size(), 64), limits.max_depth);
  if (error == simdjson::SUCCESS) error = document.parser_->parse(text.data(), text.size()).get(root);
  if (error == simdjson::NUMBER_ERROR) {
    const std::string widened = widen_big_integers(text);
    error = document.parser_->allocate(widened.size(), limits.max_depth);
    if (error == simdjson::SUCCESS) error = document.parser_->parse(widened.data(), widened.size()).get(root);
  }
  if (error == simdjson::DEPTH_ERROR) fail("{}: JSON nested deeper than {} levels", name, limits.max_depth);
  if (error != simdjson::SUCCESS) fail("{}: not valid JSON: {}", name, simdjson::error_message(error));
  if (limits.unique_keys) check_unique_keys(root, name);
  document.root_.emplace(root, std::move(name));
  return document;
}

std::string_view JsonValue::string() const { return get_as<std::string_view>(*this, "a string"); }
int64_t JsonValue::integer() const { return get_as<int64_t>(*this, "an integer"); }
double JsonValue::number() const { return get_as<double>(*this, "a number"); }
bool JsonValue::boolean() const { return get_as<bool>(*this, "a boolean"); }
simdjson::dom::object JsonValue::object() const { return get_as<simdjson::dom::object>(*this, "an object"); }
simdjson::dom::array JsonValue::array() const { return get_as<simdjson::dom::array>(*this, "an array"); }

std::optional<JsonValue> JsonValue::find(std::string_view key) const {
  simdjson::dom::element child;
  if (object().at_key(key).get(child) != simdjson::SUCCESS || child.is_null()) return std::nullopt;
  return JsonValue(child, where_ + ": " + std::string(key));
}

JsonValue JsonValue::at(std::string_view key) const {
  auto child = find(key);
  if (!child) fail("{}: the key \"{}\" is missing", where_, key);
  return *std::move(child);
}

int64_t JsonValue::integer_or(std::string_view key, int64_t fallback) const {
  const auto child = find(key);
  return child ? child->integer() : fallback;
}
double JsonValue::number_or(std::string_view key, double fallback) const {
  const auto child = find(key);
  return child ? child->number() : fallback;
}
bool JsonValue::boolean_or(std::string_view key, bool fallback) const {
  const auto child = find(key);
  return child ? child->boolean() : fallback;
}
std::string JsonValue::string_or(std::string_view key, std::string_view fallback) const {
  const auto child = find(key);
  return std::string(child ? child->string() : fallback);
}

}  // namespace cachalot
