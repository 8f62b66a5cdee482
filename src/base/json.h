// Reading JSON from files that may be hostile: simdjson with limits on size and depth, and typed getters whose errors name
// the file and the key. For writing JSON use nlohmann::ordered_json where the text is made.
#pragma once

#include <simdjson.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cachalot {

struct JsonLimits {
  size_t max_bytes = 64u << 20;
  size_t max_depth = 64;
  bool unique_keys = false;  // refuse an object that names a key twice (two parsers would read such a file differently)
};

// A value inside a JsonDocument, with the path that led to it for error messages. Cheap to copy; valid while the document lives.
class JsonValue {
 public:
  JsonValue(simdjson::dom::element element, std::string where) : element_(element), where_(std::move(where)) {}
  [[nodiscard]] const std::string& where() const { return where_; }
  [[nodiscard]] simdjson::dom::element element() const { return element_; }

  [[nodiscard]] bool is_null() const { return element_.is_null(); }
  [[nodiscard]] bool is_object() const { return element_.is_object(); }
  [[nodiscard]] bool is_array() const { return element_.is_array(); }
  [[nodiscard]] bool is_string() const { return element_.is_string(); }
  [[nodiscard]] bool is_bool() const { return element_.is_bool(); }
  [[nodiscard]] bool is_integer() const { return element_.is_int64(); }
  [[nodiscard]] bool is_number() const { return element_.is_number(); }

  // Each throws Error "<where>: found <type>, expected <type>" on another type.
  [[nodiscard]] std::string_view string() const;
  [[nodiscard]] int64_t integer() const;
  [[nodiscard]] double number() const;
  [[nodiscard]] bool boolean() const;
  [[nodiscard]] simdjson::dom::object object() const;
  [[nodiscard]] simdjson::dom::array array() const;

  // Member of an object; find() gives nothing for an absent key or a null value, at() throws Error naming the key.
  [[nodiscard]] std::optional<JsonValue> find(std::string_view key) const;
  [[nodiscard]] JsonValue at(std::string_view key) const;
  // Member with a default for an absent or null key; a present one of the wrong type throws.
  [[nodiscard]] int64_t integer_or(std::string_view key, int64_t fallback) const;
  [[nodiscard]] double number_or(std::string_view key, double fallback) const;
  [[nodiscard]] bool boolean_or(std::string_view key, bool fallback) const;
  [[nodiscard]] std::string string_or(std::string_view key, std::string_view fallback) const;

 private:
  simdjson::dom::element element_;
  std::string where_;
};

class JsonDocument {
 public:
  // `name` (a file name) starts every error message. Throws Error on malformed text or a limit passed.
  static JsonDocument parse(std::string_view text, std::string name, JsonLimits limits = {});
  [[nodiscard]] const JsonValue& root() const { return *root_; }

 private:
  JsonDocument() = default;
  std::unique_ptr<simdjson::dom::parser> parser_;
  std::optional<JsonValue> root_;
};

}  // namespace cachalot
