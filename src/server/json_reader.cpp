// Field and RequestBody.
#include "server/json_reader.h"

#include <fmt/format.h>

#include <cmath>

#include "base/error.h"

namespace cachalot::server {
namespace {

using simdjson::dom::element_type;

constexpr size_t kMaxRootKeys = 512;

std::string describe(simdjson::dom::element element) {
  switch (element.type()) {
    case element_type::ARRAY: return element.get_array().value_unsafe().size() == 0 ? "an empty array" : "an array";
    case element_type::OBJECT: return element.get_object().value_unsafe().size() == 0 ? "an empty object" : "an object";
    case element_type::INT64: return fmt::format("{}", element.get_int64().value_unsafe());
    case element_type::UINT64: return fmt::format("{}", element.get_uint64().value_unsafe());
    case element_type::DOUBLE: return fmt::format("{}", element.get_double().value_unsafe());
    case element_type::STRING: return fmt::format("\"{}\"", printable(element.get_string().value_unsafe(), 40));
    case element_type::BOOL: return element.get_bool().value_unsafe() ? "true" : "false";
    case element_type::NULL_VALUE: return "null";
  }
  return "an unknown type";
}

}  // namespace

void Field::refuse(const std::string& expected) const { refuse_text(fmt::format("found {}, expected {}", describe(element_), expected)); }

void Field::refuse_text(const std::string& message) const {
  throw ApiError(400, path_.empty() ? message : fmt::format("{}: {}", path_, message), path_);
}

std::string_view Field::string() const {
  std::string_view text;
  if (element_.get(text) != simdjson::SUCCESS) refuse("a string");
  return text;
}

bool Field::boolean() const {
  bool flag = false;
  if (element_.get(flag) != simdjson::SUCCESS) refuse("true or false");
  return flag;
}

double Field::number(double low, double high) const {
  double number = 0;
  if (!element_.is_number() || element_.get(number) != simdjson::SUCCESS || !(number >= low && number <= high))
    refuse(fmt::format("a number from {} to {}", low, high));
  return number;
}

int64_t Field::integer(int64_t low, int64_t high) const {
  int64_t integer = 0;
  bool good = element_.get(integer) == simdjson::SUCCESS;
  if (double number = 0; !good && element_.is_number() && element_.get(number) == simdjson::SUCCESS && std::abs(number) < 9e15) {
    integer = static_cast<int64_t>(number);
    good = static_cast<double>(integer) == number;
  }
  if (!good || integer < low || integer > high) {
    if (high == std::numeric_limits<int64_t>::max()) refuse(fmt::format("an integer of at least {}", low));
    refuse(fmt::format("an integer from {} to {}", low, high));
  }
  return integer;
}

simdjson::dom::array Field::array(size_t max_size) const {
  simdjson::dom::array array;
  if (element_.get(array) != simdjson::SUCCESS) refuse("an array");
  size_t size = array.size();  // saturates at 2^24 - 1
  if (size > max_size) refuse_text(fmt::format("found {} entries, expected at most {}", size, max_size));
  return array;
}

Field Field::item(simdjson::dom::element element, size_t index) const { return {element, fmt::format("{}[{}]", path_, index)}; }

std::optional<Field> Field::find(std::string_view key) const {
  simdjson::dom::object object;
  if (element_.get(object) != simdjson::SUCCESS) refuse("an object");
  simdjson::dom::element child;
  if (object.at_key(key).get(child) != simdjson::SUCCESS || child.is_null()) return std::nullopt;
  return Field(child, path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key));
}

Field Field::at(std::string_view key) const {
  auto child = find(key);
  if (!child) {
    const std::string path = path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key);
    throw ApiError(400, fmt::format("{}: missing", path), path);
  }
  return *std::move(child);
}

std::optional<double> Field::number_at(std::string_view key, double low, double high) const {
  const auto child = find(key);
  return child ? std::optional(child->number(low, high)) : std::nullopt;
}
std::optional<int64_t> Field::integer_at(std::string_view key, int64_t low, int64_t high) const {
  const auto child = find(key);
  return child ? std::optional(child->integer(low, high)) : std::nullopt;
}
std::optional<bool> Field::boolean_at(std::string_view key) const {
  const auto child = find(key);
  return child ? std::optional(child->boolean()) : std::nullopt;
}
std::string Field::string_or(std::string_view key, std::string_view fallback, size_t max_bytes) const {
  const auto child = find(key);
  if (!child) return std::string(fallback);
  const std::string_view text = child->string();
  if (text.size() > max_bytes) child->refuse_text(fmt::format("found {} bytes, expected at most {}", text.size(), max_bytes));
  return std::string(text);
}

nlohmann::ordered_json Field::document(int max_keys) const {
  switch (element_.type()) {
    case element_type::ARRAY: {
      auto out = nlohmann::ordered_json::array();
      size_t i = 0;
      for (const auto child : simdjson::dom::array(element_)) out.push_back(item(child, i++).document(max_keys));
      return out;
    }
    case element_type::OBJECT: {
      const simdjson::dom::object object(element_);
      if (object.size() > static_cast<size_t>(max_keys))
        refuse_text(fmt::format("found {} keys, expected at most {}", object.size(), max_keys));
      auto out = nlohmann::ordered_json::object();
      for (const auto [key, child] : object) out[std::string(key)] = Field(child, path_).document(max_keys);
      return out;
    }
    case element_type::INT64: return element_.get_int64().value_unsafe();
    case element_type::UINT64: return element_.get_uint64().value_unsafe();
    case element_type::DOUBLE: return element_.get_double().value_unsafe();
    case element_type::STRING: return element_.get_string().value_unsafe();
    case element_type::BOOL: return element_.get_bool().value_unsafe();
    case element_type::NULL_VALUE: break;
  }
  return nullptr;
}

RequestBody::RequestBody(std::string_view text, const RequestLimits& limits) {
  try {
    document_ = JsonDocument::parse(
        text, "request body",
        {.max_bytes = limits.max_body_bytes, .max_depth = static_cast<size_t>(limits.max_json_depth), .unique_keys = true});
  } catch (const Error& error) {
    throw ApiError(400, error.what());
  }
  root_.emplace(document_->root().element(), "");
  simdjson::dom::object object;
  if (root_->element().get(object) != simdjson::SUCCESS) throw ApiError(400, "request body: expected a JSON object");
  if (object.size() > kMaxRootKeys)
    throw ApiError(400, fmt::format("request body: found {} keys, expected at most {}", object.size(), kMaxRootKeys));
}

}  // namespace cachalot::server
