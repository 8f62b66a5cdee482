// JsonWriter.
#include "server/json_writer.h"

#include <simdjson.h>

#include <charconv>
#include <cmath>

#include "text/unicode.h"

namespace cachalot::server {

void append_json_escaped(std::string& out, std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  size_t done = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    if (c >= 0x20 && c != '"' && c != '\\' && c != 0x7f) continue;
    out.append(text, done, i - done);
    done = i + 1;
    switch (c) {
      case '"': out += "\\\""; break;
      case '\\': out += "\\\\"; break;
      case '\n': out += "\\n"; break;
      case '\r': out += "\\r"; break;
      case '\t': out += "\\t"; break;
      default:
        out += "\\u00";
        out += kHex[c >> 4];
        out += kHex[c & 15];
    }
  }
  out.append(text, done, text.size() - done);
}

void append_json_string(std::string& out, std::string_view text) {
  out += '"';
  append_json_escaped(out, simdjson::validate_utf8(text.data(), text.size()) ? text : std::string_view(unicode::replace_invalid(text)));
  out += '"';
}

void append_json_number(std::string& out, double value) {
  if (!std::isfinite(value)) {
    out += "null";
    return;
  }
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value).ptr;
  out.append(buffer, end);
}

void JsonWriter::separate() {
  if (after_key_) {
    after_key_ = false;
    return;
  }
  const uint64_t bit = uint64_t{1} << depth_;
  if ((not_first_ & bit) != 0) out_ += ',';
  not_first_ |= bit;
}

JsonWriter& JsonWriter::open(char c) {
  separate();
  out_ += c;
  ++depth_;
  not_first_ &= ~(uint64_t{1} << depth_);
  return *this;
}

JsonWriter& JsonWriter::close(char c) {
  out_ += c;
  --depth_;
  return *this;
}

JsonWriter& JsonWriter::key(std::string_view name) {
  separate();
  append_json_string(out_, name);
  out_ += ':';
  after_key_ = true;
  return *this;
}

JsonWriter& JsonWriter::value(std::string_view text) {
  separate();
  append_json_string(out_, text);
  return *this;
}

JsonWriter& JsonWriter::value(int64_t number) { return raw(std::to_string(number)); }
JsonWriter& JsonWriter::value(uint64_t number) { return raw(std::to_string(number)); }

JsonWriter& JsonWriter::value(double number) {
  separate();
  append_json_number(out_, number);
  return *this;
}

JsonWriter& JsonWriter::raw(std::string_view json) {
  separate();
  out_ += json;
  return *this;
}

}  // namespace cachalot::server
