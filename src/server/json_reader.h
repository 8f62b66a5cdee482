// Reading the JSON of a request: typed, bounded getters that answer a fault with an ApiError naming the field.
#pragma once

#include <simdjson.h>

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/json.h"
#include "server/requests.h"

namespace cachalot::server {

// A value and the path to it ("messages[2].content"). Valid while its JsonDocument lives.
class Field {
 public:
  Field(simdjson::dom::element element, std::string path) : element_(element), path_(std::move(path)) {}

  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] simdjson::dom::element element() const { return element_; }
  [[nodiscard]] bool is_object() const { return element_.is_object(); }
  [[nodiscard]] bool is_array() const { return element_.is_array(); }
  [[nodiscard]] bool is_string() const { return element_.is_string(); }
  [[nodiscard]] bool is_bool() const { return element_.is_bool(); }
  [[nodiscard]] bool is_number() const { return element_.is_number(); }

  [[nodiscard]] std::string_view string() const;
  [[nodiscard]] bool boolean() const;
  [[nodiscard]] double number(double low, double high) const;
  [[nodiscard]] int64_t integer(int64_t low, int64_t high) const;  // 5.0 counts as 5
  [[nodiscard]] simdjson::dom::array array(size_t max_size) const;
  [[nodiscard]] Field item(simdjson::dom::element element, size_t index) const;

  // Members of an object; nothing for an absent key or a null value.
  [[nodiscard]] std::optional<Field> find(std::string_view key) const;
  [[nodiscard]] Field at(std::string_view key) const;
  [[nodiscard]] std::optional<double> number_at(std::string_view key, double low, double high) const;
  [[nodiscard]] std::optional<int64_t> integer_at(std::string_view key, int64_t low, int64_t high) const;
  [[nodiscard]] std::optional<bool> boolean_at(std::string_view key) const;
  [[nodiscard]] bool boolean_or(std::string_view key, bool fallback) const { return boolean_at(key).value_or(fallback); }
  [[nodiscard]] std::string string_or(std::string_view key, std::string_view fallback, size_t max_bytes = SIZE_MAX) const;

  // As a document for the template. Throws for an object of more than `max_keys` keys: its insertion is quadratic.
  [[nodiscard]] nlohmann::ordered_json document(int max_keys) const;

  // 400: "<path>: found ..., expected ...".
  [[noreturn]] void refuse(const std::string& expected) const;
  [[noreturn]] void refuse_text(const std::string& message) const;

 private:
  simdjson::dom::element element_;
  std::string path_;
};

// A request body: an object. Throws ApiError 400 for anything else, for a key named twice in one object, and past the limits.
class RequestBody {
 public:
  RequestBody(std::string_view text, const RequestLimits& limits);
  [[nodiscard]] const Field& root() const { return *root_; }

 private:
  std::optional<JsonDocument> document_;
  std::optional<Field> root_;
};

}  // namespace cachalot::server
