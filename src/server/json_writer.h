// JSON out, straight into a string: the hot path of a stream. Documents that are built once a request may use it as well.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace cachalot::server {

// With quotes and escapes. Bytes that are no UTF-8 become U+FFFD.
void append_json_string(std::string& out, std::string_view text);
// Without the quotes: for a string that grows piece by piece. `text` is well-formed UTF-8.
void append_json_escaped(std::string& out, std::string_view text);
void append_json_number(std::string& out, double value);  // shortest form that reads back equal; null when not finite

// Commas and colons in their places. The caller opens and closes in order; at most 64 levels.
class JsonWriter {
 public:
  explicit JsonWriter(std::string& out) : out_(out) {}

  JsonWriter& begin_object() { return open('{'); }
  JsonWriter& end_object() { return close('}'); }
  JsonWriter& begin_array() { return open('['); }
  JsonWriter& end_array() { return close(']'); }
  JsonWriter& key(std::string_view name);

  JsonWriter& value(std::string_view text);
  JsonWriter& value(const std::string& text) { return value(std::string_view(text)); }
  JsonWriter& value(const char* text) { return value(std::string_view(text)); }
  JsonWriter& value(bool flag) { return raw(flag ? "true" : "false"); }
  JsonWriter& value(int number) { return value(static_cast<int64_t>(number)); }
  JsonWriter& value(int64_t number);
  JsonWriter& value(uint64_t number);
  JsonWriter& value(double number);
  JsonWriter& null() { return raw("null"); }
  JsonWriter& raw(std::string_view json);  // a value that is JSON already

  template <typename T>
  JsonWriter& field(std::string_view name, const T& v) {
    return key(name).value(v);
  }

 private:
  JsonWriter& open(char c);
  JsonWriter& close(char c);
  void separate();

  std::string& out_;
  uint64_t not_first_ = 0;  // bit d: level d holds a value already
  unsigned depth_ = 0;
  bool after_key_ = false;
};

}  // namespace cachalot::server
