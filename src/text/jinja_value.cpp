// Implementation of what Python does with values: truth, text, equality, order, membership.
#include "text/jinja_value.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "text/jinja_runtime.h"
#include "text/jinja_text.h"

namespace cachalot::jinja {

bool Value::truthy() const {
  if (is_undefined() || is_none()) return false;
  if (is_int()) return integer() != 0;
  if (is_float()) return number() != 0;
  if (is_string()) return !text().empty();
  if (is_sequence()) return !items().empty();
  if (is_dict()) return !dict().entries.empty();
  return true;
}

int Value::depth() const {
  if (is_sequence()) return sequence()->depth;
  if (is_dict()) return dict().depth;
  if (is_iterator()) return iterator().depth;
  if (is_loop()) return loop().items->depth + 1;
  if (is_callable()) return callable().self.depth() + 1;
  return 0;
}

const char* Value::type_name() const {
  if (is_undefined()) return "an undefined value";
  if (is_none()) return "none";
  if (is_bool()) return "a boolean";
  if (is_int()) return "an integer";
  if (is_float()) return "a float";
  if (is_string()) return "a string";
  if (is_sequence(SequenceKind::kTuple)) return "a tuple";
  if (is_sequence()) return "a list";
  if (is_dict()) return "a dict";
  if (is_iterator()) return "an iterator";
  if (is_namespace()) return "a namespace";
  return is_loop() ? "a loop" : "a function";
}

bool Value::same_object(const Value& other) const {
  if (data_.index() != other.data_.index()) return false;
  if (is_undefined() || is_float()) return false;
  if (is_none()) return true;
  if (is_int()) return integer() == other.integer();
  if (is_string()) return text() == other.text();
  if (is_sequence()) return sequence() == other.sequence();
  if (is_dict()) return &dict() == &other.dict();
  if (is_iterator()) return &iterator() == &other.iterator();
  if (is_loop()) return &loop() == &other.loop();
  if (is_callable()) return &callable() == &other.callable();
  return &name_space() == &other.name_space();
}

std::string int_text(Int value) {
  if (value == 0) return "0";
  std::string digits;
  const bool negative = value < 0;
  for (; value != 0; value /= 10) digits += static_cast<char>('0' + static_cast<int>(negative ? -(value % 10) : value % 10));
  if (negative) digits += '-';
  std::reverse(digits.begin(), digits.end());
  return digits;
}

std::string float_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific).ptr;
  std::string text(buffer, end);
  const size_t e = text.find('e');
  const int exponent = std::atoi(text.c_str() + e + 1);
  if (exponent < -4 || exponent >= 16) {
    return text.substr(0, e) + fmt::format("e{}{:02}", exponent < 0 ? '-' : '+', std::abs(exponent));
  }
  const auto fixed_end = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::fixed).ptr;
  text.assign(buffer, fixed_end);
  return text.find('.') == std::string::npos ? text + ".0" : text;
}

namespace {

void append_repr(Runtime& runtime, std::string& out, const Value& value);

void append_sequence(Runtime& runtime, std::string& out, const SequenceObject& sequence) {
  static constexpr std::pair<const char*, const char*> kBrackets[] = {
      {"[", "]"}, {"(", ")"}, {"range(", ")"}, {"dict_keys([", "])"}, {"dict_values([", "])"}, {"dict_items([", "])"}};
  const auto& [open, close] = kBrackets[static_cast<size_t>(sequence.kind)];
  out += open;
  if (sequence.kind == SequenceKind::kRange) {
    const auto& items = sequence.items;
    const Int first = items.empty() ? 0 : items.front().integer(), step = items.size() > 1 ? items[1].integer() - first : 1;
    const Int end = items.empty() ? 0 : items.back().integer() + step;
    out += int_text(first) + ", " + int_text(end) + (step == 1 ? std::string() : ", " + int_text(step));
  } else {
    for (size_t i = 0; i < sequence.items.size(); ++i) {
      if (i != 0) out += ", ";
      append_repr(runtime, out, sequence.items[i]);
    }
    if (sequence.kind == SequenceKind::kTuple && sequence.items.size() == 1) out += ',';
  }
  out += close;
}

void append_repr(Runtime& runtime, std::string& out, const Value& value) {
  const Runtime::Nested nested(runtime);
  runtime.step();
  runtime.room(out.size());
  if (value.is_string()) {
    runtime.scan(value.text().size());
    runtime.room(value.text().size(), 4);  // as it grows when every byte is escaped
    out += value.is_markup() ? "Markup(" + quote(value.text()) + ")" : quote(value.text());
  } else if (value.is_sequence()) {
    append_sequence(runtime, out, *value.sequence());
  } else if (value.is_dict()) {
    out += '{';
    bool first = true;
    for (const auto& [key, item] : value.dict().entries) {
      if (!first) out += ", ";
      first = false;
      append_repr(runtime, out, key);
      out += ": ";
      append_repr(runtime, out, item);
    }
    out += '}';
  } else if (value.is_namespace()) {
    out += "<Namespace {";
    bool first = true;
    for (const auto& [key, item] : value.name_space().attributes) {
      out += (first ? "" : ", ") + quote(key) + ": ";
      first = false;
      append_repr(runtime, out, item);
    }
    out += "}>";
  } else if (value.is_undefined()) {
    out += "Undefined";
  } else {
    out += to_text(runtime, value);
  }
}

}  // namespace

std::string repr(Runtime& runtime, const Value& value) {
  std::string out;
  append_repr(runtime, out, value);
  return out;
}

std::string to_text(Runtime& runtime, const Value& value) {
  if (value.is_undefined()) return {};
  if (value.is_string()) return value.text();
  if (value.is_none()) return "None";
  if (value.is_bool()) return value.boolean() ? "True" : "False";
  if (value.is_int()) return int_text(value.integer());
  if (value.is_float()) return float_text(value.number());
  if (value.is_iterator()) return "<generator object>";
  if (value.is_loop()) return fmt::format("<LoopContext {}/{}>", value.loop().index + 1, value.loop().items->items.size());
  if (value.is_callable()) {
    const CallableObject& callable = value.callable();
    return callable.kind == CallableObject::Kind::kMacro ? fmt::format("<Macro {}>", quote(callable.name))
                                                         : fmt::format("<function {}>", callable.name);
  }
  return repr(runtime, value);
}

bool equal(Runtime& runtime, const Value& a, const Value& b) {
  const Runtime::Nested nested(runtime);
  runtime.step();
  if (a.is_number() && b.is_number()) {
    if (a.is_int() && b.is_int()) return a.integer() == b.integer();
    return a.number() == b.number();
  }
  if (a.is_string() && b.is_string()) {
    runtime.scan(std::min(a.text().size(), b.text().size()));
    return a.text() == b.text();
  }
  if (a.is_sequence() && b.is_sequence()) {
    if (a.sequence()->kind != b.sequence()->kind || a.items().size() != b.items().size()) return false;
    for (size_t i = 0; i < a.items().size(); ++i) {
      if (!equal(runtime, a.items()[i], b.items()[i])) return false;
    }
    return true;
  }
  if (a.is_dict() && b.is_dict()) {
    if (a.dict().entries.size() != b.dict().entries.size()) return false;
    for (const auto& [key, item] : a.dict().entries) {
      const Value* other = find_key(runtime, b.dict(), key);
      if (other == nullptr || !equal(runtime, item, *other)) return false;
    }
    return true;
  }
  if (a.is_undefined() && b.is_undefined()) return true;
  return a.same_object(b);
}

int compare(Runtime& runtime, const Value& a, const Value& b) {
  const Runtime::Nested nested(runtime);
  runtime.step();
  if (a.is_number() && b.is_number()) {
    if (a.is_int() && b.is_int()) return a.integer() < b.integer() ? -1 : a.integer() > b.integer() ? 1 : 0;
    return a.number() < b.number() ? -1 : a.number() > b.number() ? 1 : 0;
  }
  if (a.is_string() && b.is_string()) {
    runtime.scan(std::min(a.text().size(), b.text().size()));
    return a.text().compare(b.text());  // bytes of UTF-8 sort as code points do
  }
  if (a.is_sequence() && b.is_sequence() && a.sequence()->kind == b.sequence()->kind) {
    const size_t n = std::min(a.items().size(), b.items().size());
    for (size_t i = 0; i < n; ++i) {
      if (!equal(runtime, a.items()[i], b.items()[i])) return compare(runtime, a.items()[i], b.items()[i]);
    }
    return a.items().size() < b.items().size() ? -1 : a.items().size() > b.items().size() ? 1 : 0;
  }
  if (a.is_undefined() || b.is_undefined()) {
    const std::string* name = a.is_undefined() ? a.undefined().name : b.undefined().name;
    runtime.fail("'{}' is undefined", name != nullptr ? printable(*name) : "value");
  }
  runtime.fail("cannot order {} and {}", a.type_name(), b.type_name());
}

const Value* find_key(Runtime& runtime, const DictObject& dict, const Value& key) {
  runtime.step(1 + dict.entries.size() / 8);
  for (const auto& [name, value] : dict.entries) {
    if (key.is_string() && name.is_string() ? key.text() == name.text() : equal(runtime, key, name)) return &value;
  }
  return nullptr;
}

bool contains(Runtime& runtime, const Value& container, const Value& item) {
  if (container.is_string()) {
    if (!item.is_string()) runtime.fail("'in' of a string: found {}, expected a string", item.type_name());
    runtime.scan(4 * (container.text().size() + item.text().size()));
    return find(container.text(), item.text()) != std::string_view::npos;
  }
  if (container.is_dict()) return find_key(runtime, container.dict(), item) != nullptr;
  const auto items = iterate(runtime, container);
  return std::any_of(items->items.begin(), items->items.end(), [&](const Value& value) { return equal(runtime, value, item); });
}

std::shared_ptr<const SequenceObject> iterate(Runtime& runtime, const Value& value) {
  if (value.is_sequence()) return value.sequence();
  std::vector<Value> items;
  if (value.is_string()) {
    const std::string& text = value.text();
    runtime.room(count_chars(text), 2 * sizeof(Value));
    for (size_t at = 0; at < text.size();) {
      const size_t start = at;
      next_char(text, at);
      items.push_back(runtime.string(text.substr(start, at - start)));
    }
  } else if (value.is_dict()) {
    for (const auto& entry : value.dict().entries) items.push_back(entry.first);
  } else if (value.is_iterator()) {
    IteratorObject& iterator = value.iterator();
    items.assign(iterator.items.begin() + static_cast<std::ptrdiff_t>(iterator.next), iterator.items.end());
    iterator.next = iterator.items.size();
  } else if (!value.is_undefined()) {
    runtime.fail("found {}, expected something to iterate over", value.type_name());
  }
  return runtime.list(std::move(items)).sequence();
}

}  // namespace cachalot::jinja
