// Python's two ways of formatting text ("%s" % x and "{}".format(x)), the date format, and number conversion.
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "text/jinja_builtins.h"
#include "text/jinja_text.h"

namespace cachalot::jinja {
namespace {

struct Spec {
  std::string fill = " ";
  char align = '\0', sign = '\0', type = '\0';
  bool alternate = false, zero = false, grouped = false;
  int64_t width = 0, precision = -1;
};

int64_t read_number(const std::string& text, size_t& at) {
  int64_t value = 0;
  while (at < text.size() && text[at] >= '0' && text[at] <= '9') value = std::min<int64_t>(value * 10 + (text[at++] - '0'), 1 << 30);
  return value;
}

std::string in_base(Int value, unsigned base, bool capitals) {
  std::string digits;
  for (; value != 0; value /= base) {
    const auto digit = static_cast<int>(value % base);
    digits += static_cast<char>(digit < 10 ? '0' + digit : (capitals ? 'A' : 'a') + digit - 10);
  }
  std::reverse(digits.begin(), digits.end());
  return digits.empty() ? "0" : digits;
}

void group_thousands(std::string& digits) {
  size_t end = std::min(digits.find_first_of(".e"), digits.size());
  while (end > 3) digits.insert(end -= 3, 1, ',');
}

// The text of a number without its sign.
std::string magnitude(Runtime& runtime, const Value& value, const Spec& spec) {
  const char type = spec.type;
  std::string out;
  if (value.is_int() &&
      (type == '\0' || type == 'd' || type == 'i' || type == 'u' || type == 'x' || type == 'X' || type == 'o' || type == 'b')) {
    const Int n = value.integer() < 0 ? -value.integer() : value.integer();
    const unsigned base = type == 'x' || type == 'X' ? 16 : type == 'o' ? 8 : type == 'b' ? 2 : 10;
    out = in_base(n, base, type == 'X');
    if (spec.alternate && base != 10) out.insert(0, {'0', type});
  } else {
    const double x = std::fabs(value.number());
    const auto precision = static_cast<int>(std::min<int64_t>(spec.precision < 0 ? 6 : spec.precision, 1000));
    switch (type) {
      case 'f':
      case 'F': out = fmt::format("{:.{}f}", x, precision); break;
      case 'e': out = fmt::format("{:.{}e}", x, precision); break;
      case 'E': out = fmt::format("{:.{}E}", x, precision); break;
      case 'g': out = fmt::format("{:.{}g}", x, precision); break;
      case 'G': out = fmt::format("{:.{}G}", x, precision); break;
      case '%': out = fmt::format("{:.{}f}%", x * 100, precision); break;
      case '\0': out = spec.precision >= 0 ? fmt::format("{:.{}g}", x, precision) : float_text(x); break;
      default: runtime.fail("found the format type '{}', which does not fit {}", printable(std::string_view(&type, 1)), value.type_name());
    }
  }
  if (spec.grouped) group_thousands(out);
  return out;
}

std::string pad(Runtime& runtime, std::string body, const Spec& spec, char default_align, size_t sign_length) {
  const auto length = static_cast<int64_t>(count_chars(body));
  if (length >= spec.width) return body;
  const auto missing = static_cast<size_t>(spec.width - length);
  runtime.room(missing, spec.fill.size());
  char align = spec.align != '\0' ? spec.align : default_align;
  std::string fill = spec.fill;
  if (spec.zero && spec.align == '\0') {
    align = '=';
    fill.assign(1, '0');
  }
  const size_t left = align == '<' ? 0 : align == '^' ? missing / 2 : missing;
  std::string before, after;
  for (size_t i = 0; i < left; ++i) before += fill;
  for (size_t i = left; i < missing; ++i) after += fill;
  if (align == '=') return body.insert(sign_length, before);
  return before + body + after;
}

std::string format_number(Runtime& runtime, const Value& value, const Spec& spec) {
  const bool negative = value.is_int() ? value.integer() < 0 : std::signbit(value.number());
  std::string body;
  if (negative || spec.sign == '+' || spec.sign == ' ') body += negative ? '-' : spec.sign;
  const size_t sign_length = body.size();
  body += magnitude(runtime, value, spec);
  return pad(runtime, std::move(body), spec, '>', sign_length);
}

std::string format_text(Runtime& runtime, const std::string& text, const Spec& spec, char default_align) {
  const size_t end = spec.precision < 0 ? text.size() : char_offset(text, static_cast<size_t>(spec.precision));
  Spec plain = spec;
  plain.zero = false;
  return pad(runtime, text.substr(0, end), plain, default_align, 0);
}

// [[fill]align][sign][#][0][width][,][.precision][type]
std::string format_field(Runtime& runtime, const Value& value, const std::string& text) {
  Spec spec;
  size_t at = 0;
  const auto is_align = [&](size_t i) { return i < text.size() && std::string_view("<>^=").find(text[i]) != std::string_view::npos; };
  size_t after_first = 0;
  if (!text.empty()) next_char(text, after_first);
  if (!text.empty() && is_align(after_first)) {
    spec.fill = text.substr(0, after_first);
    spec.align = text[after_first];
    at = after_first + 1;
  } else if (is_align(0)) {
    spec.align = text[at++];
  }
  if (at < text.size() && (text[at] == '+' || text[at] == '-' || text[at] == ' ')) spec.sign = text[at++];
  if (at < text.size() && text[at] == '#') spec.alternate = (++at, true);
  if (at < text.size() && text[at] == '0') spec.zero = (++at, true);
  spec.width = read_number(text, at);
  if (at < text.size() && text[at] == ',') spec.grouped = (++at, true);
  if (at < text.size() && text[at] == '.') spec.precision = read_number(text, ++at);
  if (at < text.size()) spec.type = text[at++];
  if (at != text.size()) runtime.fail("found the format '{}', expected [[fill]align][sign][width][.precision][type]", printable(text));
  if (value.is_number() && !(value.is_bool() && spec.type == '\0')) return format_number(runtime, value, spec);
  if (spec.type != '\0' && spec.type != 's') runtime.fail("found the format '{}' for {}", printable(text), value.type_name());
  return format_text(runtime, to_text(runtime, value), spec, '<');
}

class BraceFormatter {
 public:
  BraceFormatter(Runtime& runtime, const Args& args) : runtime_(runtime), args_(args) {}

  std::string run(const std::string& format, int depth) {
    if (depth > 2) runtime_.fail("format: fields are nested too deep");
    std::string out;
    for (size_t at = 0; at < format.size();) {
      const char c = format[at++];
      if ((c == '{' || c == '}') && at < format.size() && format[at] == c) {
        out += format[at++];
      } else if (c == '{') {
        const size_t end = closing(format, at);
        out += field(format.substr(at, end - at), depth);
        at = end + 1;
      } else if (c == '}') {
        runtime_.fail("format: found a '}}' without a '{{'");
      } else {
        out += c;
      }
      runtime_.room(out.size());
    }
    return out;
  }

 private:
  size_t closing(const std::string& format, size_t at) const {
    for (int open = 1; at < format.size(); ++at) {
      open += format[at] == '{' ? 1 : format[at] == '}' ? -1 : 0;
      if (open == 0) return at;
    }
    runtime_.fail("format: found a '{{' without a '}}'");
  }

  std::string field(const std::string& text, int depth) {
    runtime_.scan(text.size());
    const size_t colon = text.find(':');
    std::string name = text.substr(0, colon);
    char conversion = '\0';
    if (name.size() >= 2 && name[name.size() - 2] == '!') {
      conversion = name.back();
      name.resize(name.size() - 2);
    }
    Value value = lookup(name);
    if (conversion == 'r')
      value = runtime_.string(repr(runtime_, value));
    else if (conversion == 's')
      value = runtime_.string(to_text(runtime_, value));
    else if (conversion != '\0')
      runtime_.fail("format: found the conversion '{}', expected r or s", printable(std::string_view(&conversion, 1)));
    const std::string spec = colon == std::string::npos ? "" : run(text.substr(colon + 1), depth + 1);
    return format_field(runtime_, value, spec);
  }

  // name, number or nothing, then .attribute and [key].
  Value lookup(const std::string& path) {
    size_t at = std::min(path.find_first_of(".["), path.size());
    Value value = first(path.substr(0, at));
    while (at < path.size()) {
      if (path[at] == '.') {
        const size_t end = std::min(path.find_first_of(".[", at + 1), path.size());
        const std::string name = path.substr(at + 1, end - at - 1);
        value = get_attribute(runtime_, value, name);
        if (value.is_undefined()) value = Undefined{};
        at = end;
      } else {
        const size_t end = path.find(']', at);
        if (path[at] != '[' || end == std::string::npos)
          runtime_.fail("format: found the field '{}', expected name.attribute or name[key]", printable(path));
        const std::string key = path.substr(at + 1, end - at - 1);
        size_t digits = 0;
        const auto index = static_cast<int>(read_number(key, digits));
        value = get_item(runtime_, value, digits == key.size() && !key.empty() ? Value(index) : runtime_.string(key));
        at = end + 1;
      }
    }
    return value;
  }
  Value first(const std::string& name) {
    size_t digits = 0;
    size_t index = static_cast<size_t>(read_number(name, digits));
    if (digits == name.size()) {
      if (name.empty()) index = next_++;
      if (index >= args_.positional.size())
        runtime_.fail("format: found {} arguments, expected at least {}", args_.positional.size(), index + 1);
      return args_.positional[index];
    }
    for (const auto& [key, value] : args_.keyword) {
      if (key == name) return value;
    }
    runtime_.fail("format: no argument is named '{}'", printable(name));
  }

  Runtime& runtime_;
  const Args& args_;
  size_t next_ = 0;
};

std::string format_time_part(const std::tm& time, std::string_view directive) {
  char buffer[128];
  std::string format(1, '%');
  format += directive;
  const size_t n = std::strftime(buffer, sizeof buffer, format.c_str(), &time);
  return std::string(buffer, n);
}

}  // namespace

Value percent_format(Runtime& runtime, const std::string& format, const Value& values) {
  const bool is_tuple = values.is_sequence(SequenceKind::kTuple);
  size_t next = 0;
  const auto take = [&]() -> Value {
    if (is_tuple ? next >= values.items().size() : next > 0) runtime.fail("'%': not enough values for the format");
    return is_tuple ? values.items()[next++] : (++next, values);
  };
  std::string out;
  for (size_t at = 0; at < format.size();) {
    runtime.room(out.size());
    if (format[at] != '%') {
      out += format[at++];
      continue;
    }
    runtime.step();
    ++at;
    Spec spec;
    std::optional<Value> named;
    if (at < format.size() && format[at] == '(') {
      const size_t end = format.find(')', at);
      if (end == std::string::npos || !values.is_dict()) runtime.fail("'%': found a named field, expected a dict of values");
      named = get_item(runtime, values, runtime.string(format.substr(at + 1, end - at - 1)));
      if (named->is_undefined()) runtime.fail("'%': the dict has no '{}'", printable(format.substr(at + 1, end - at - 1)));
      next = 1;
      at = end + 1;
    }
    for (; at < format.size() && std::string_view("-+ #0").find(format[at]) != std::string_view::npos; ++at) {
      if (format[at] == '-')
        spec.align = '<';
      else if (format[at] == '#')
        spec.alternate = true;
      else if (format[at] == '0')
        spec.zero = true;
      else if (spec.sign != '+')
        spec.sign = format[at];
    }
    spec.width = read_number(format, at);
    if (at < format.size() && format[at] == '.') spec.precision = read_number(format, ++at);
    if (at >= format.size()) runtime.fail("'%': the format ends inside a field");
    spec.type = format[at++];
    if (spec.type == '%') {
      out += '%';
      continue;
    }
    const Value value = named ? *named : take();
    const bool is_text = spec.type == 's' || spec.type == 'r' || spec.type == 'a' || spec.type == 'c';
    if (is_text) {
      std::string text;
      if (spec.type == 'c' && value.is_int() && is_valid_utf8(text) && value.integer() > 0 && value.integer() < 0xd800) {
        append_char(text, static_cast<char32_t>(value.integer()));
      } else {
        text = spec.type == 'r' || spec.type == 'a' ? repr(runtime, value) : to_text(runtime, value);
      }
      out += format_text(runtime, text, spec, '>');
    } else {
      if (!value.is_number())
        runtime.fail("'%{}': found {}, expected a number", printable(std::string_view(&spec.type, 1)), value.type_name());
      const bool is_integer = std::string_view("diuxXo").find(spec.type) != std::string_view::npos;
      if (spec.type == 'd' || spec.type == 'i' || spec.type == 'u') spec.precision = -1;
      out += format_number(runtime, is_integer ? to_int(runtime, value, 0, 10) : value, spec);
    }
  }
  if (is_tuple ? next < values.items().size() : next == 0 && !values.is_dict() && !values.is_sequence(SequenceKind::kList)) {
    runtime.fail("'%': more values than the format has fields");
  }
  return runtime.string(std::move(out));
}

Value brace_format(Runtime& runtime, const std::string& format, const Args& args) {
  return runtime.string(BraceFormatter(runtime, args).run(format, 0));
}

std::string format_time(Runtime& runtime, const std::string& format) {
  runtime.scan(format.size());
  std::string out;
  for (size_t at = 0; at < format.size(); ++at) {
    runtime.room(out.size());
    if (format[at] != '%' || at + 1 >= format.size()) {
      out += format[at];
      continue;
    }
    const bool unpadded = format[at + 1] == '-' && at + 2 < format.size();
    const std::string_view directive = std::string_view(format).substr(at + 1, unpadded ? 2 : 1);
    const char letter = directive.back();
    at += directive.size();
    if (letter == '%')
      out += '%';
    else if (letter == 'f')
      out += "000000";
    else if (std::string_view("aAbBcCdDeFgGhHIjklmMnpPrRsStTuUVwWxXyYzZ").find(letter) != std::string_view::npos)
      out += format_time_part(runtime.now(), directive);
    else
      runtime.fail("strftime_now: found '%{}', which is no date format", printable(directive));
  }
  return out;
}

Value to_int(Runtime& runtime, const Value& value, const Value& fallback, int base) {
  if (value.is_int()) return value.integer();
  if (value.is_float() || value.is_string()) {
    if (value.is_string()) {
      std::string text(strip(value.text(), nullptr, Side::kBoth));
      text.erase(std::remove(text.begin(), text.end(), '_'), text.end());
      char* end = nullptr;
      errno = 0;
      const long long parsed = std::strtoll(text.c_str(), &end, base);
      if (!text.empty() && *end == '\0' && end == text.c_str() + text.size() && errno == 0) return static_cast<Int>(parsed);
      if (errno == ERANGE) runtime.fail("int: found an integer of {} digits, which is too large", text.size());
    }
    const Value number = to_float(value, None{});
    if (number.is_none() || !std::isfinite(number.number())) return fallback;
    if (std::fabs(number.number()) > 0x1p100) runtime.fail("int: found a number larger than 2^100");
    return static_cast<Int>(number.number());
  }
  return fallback;
}

Value to_float(const Value& value, const Value& fallback) {
  if (value.is_number()) return value.number();
  if (!value.is_string()) return fallback;
  const std::string text(strip(value.text(), nullptr, Side::kBoth));
  const bool is_plain = !text.empty() && text.find_first_of("xXpP(") == std::string::npos;
  char* end = nullptr;
  const double parsed = std::strtod(text.c_str(), &end);
  return is_plain && end == text.c_str() + text.size() ? Value(parsed) : fallback;
}

}  // namespace cachalot::jinja
