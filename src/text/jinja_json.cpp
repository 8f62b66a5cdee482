// JSON for templates: the tojson filter as chat templates know it (Python's json.dumps), and from_json.
#include <algorithm>
#include <cmath>

#include "base/json.h"
#include "text/jinja_builtins.h"
#include "text/jinja_text.h"

namespace cachalot::jinja {
namespace {

struct JsonStyle {
  bool ascii_only = false, sort_keys = false, break_lines = false;
  std::string indent;
  std::string item_separator = ", ", key_separator = ": ";
};

void append_escape(std::string& out, uint32_t unit) { out += fmt::format("\\u{:04x}", unit); }

void append_string(std::string& out, std::string_view text, bool ascii_only) {
  out += '"';
  for (size_t at = 0; at < text.size();) {
    const char32_t c = next_char(text, at);
    switch (c) {
      case '"': out += "\\\""; break;
      case '\\': out += "\\\\"; break;
      case '\n': out += "\\n"; break;
      case '\r': out += "\\r"; break;
      case '\t': out += "\\t"; break;
      case '\f': out += "\\f"; break;
      case '\b': out += "\\b"; break;
      default:
        if (c < 0x20 || (ascii_only && c >= 0x7f && c < 0x10000)) {
          append_escape(out, c);
        } else if (ascii_only && c >= 0x10000) {
          append_escape(out, 0xd800 + ((c - 0x10000) >> 10));
          append_escape(out, 0xdc00 + ((c - 0x10000) & 0x3ff));
        } else {
          append_char(out, c);
        }
    }
  }
  out += '"';
}

class JsonWriter {
 public:
  JsonWriter(Runtime& runtime, JsonStyle style) : runtime_(runtime), style_(std::move(style)) {}

  void write(const Value& value) {
    const Runtime::Nested nested(runtime_);
    runtime_.step();
    runtime_.room(out.size());
    if (value.is_string()) {
      const std::string& text = value.text();
      const auto is_escaped = [&](char c) {
        return static_cast<unsigned char>(c) < 0x20 || (style_.ascii_only && static_cast<unsigned char>(c) >= 0x7f);
      };
      runtime_.scan(text.size());
      runtime_.room(out.size() + text.size() + 5 * static_cast<size_t>(std::count_if(text.begin(), text.end(), is_escaped)));
      append_string(out, text, style_.ascii_only);
    } else if (value.is_none() || value.is_number()) {
      out += scalar(value);
    } else if (value.is_sequence(SequenceKind::kList) || value.is_sequence(SequenceKind::kTuple)) {
      write_list(value.items());
    } else if (value.is_dict()) {
      write_dict(value.dict());
    } else {
      runtime_.fail("tojson: found {}, expected data", value.type_name());
    }
  }

  std::string out;

 private:
  static std::string scalar(const Value& value) {
    if (value.is_none()) return "null";
    if (value.is_bool()) return value.boolean() ? "true" : "false";
    if (value.is_int()) return int_text(value.integer());
    if (std::isnan(value.number())) return "NaN";
    if (std::isinf(value.number())) return value.number() < 0 ? "-Infinity" : "Infinity";
    return float_text(value.number());
  }
  void new_line() {
    if (!style_.break_lines) return;
    out += '\n';
    runtime_.room(static_cast<size_t>(level_), style_.indent.size());
    for (int i = 0; i < level_; ++i) out += style_.indent;
  }
  void write_list(const std::vector<Value>& items) {
    if (items.empty()) {
      out += "[]";
      return;
    }
    out += '[';
    ++level_;
    for (size_t i = 0; i < items.size(); ++i) {
      if (i != 0) out += style_.item_separator;
      new_line();
      write(items[i]);
    }
    --level_;
    new_line();
    out += ']';
  }
  void write_dict(const DictObject& dict) {
    if (dict.entries.empty()) {
      out += "{}";
      return;
    }
    std::vector<const std::pair<Value, Value>*> entries;
    for (const auto& entry : dict.entries) entries.push_back(&entry);
    if (style_.sort_keys) {
      std::stable_sort(entries.begin(), entries.end(), [&](auto* a, auto* b) { return compare(runtime_, a->first, b->first) < 0; });
    }
    out += '{';
    ++level_;
    bool first = true;
    for (const auto* entry : entries) {
      if (!first) out += style_.item_separator;
      first = false;
      new_line();
      if (!entry->first.is_string() && !entry->first.is_number() && !entry->first.is_none()) {
        runtime_.fail("tojson: found {} as a key, expected a string", entry->first.type_name());
      }
      append_string(out, entry->first.is_string() ? entry->first.text() : scalar(entry->first), style_.ascii_only);
      out += style_.key_separator;
      write(entry->second);
    }
    --level_;
    new_line();
    out += '}';
  }

  Runtime& runtime_;
  const JsonStyle style_;
  int level_ = 0;
};

Value convert(Runtime& runtime, simdjson::dom::element element) {
  using Type = simdjson::dom::element_type;
  runtime.step();
  switch (element.type()) {
    case Type::ARRAY: {
      std::vector<Value> items;
      for (const auto item : simdjson::dom::array(element)) items.push_back(convert(runtime, item));
      return runtime.list(std::move(items));
    }
    case Type::OBJECT: {
      std::vector<std::pair<Value, Value>> entries;
      for (const auto [key, item] : simdjson::dom::object(element)) {
        Value value = convert(runtime, item);
        runtime.step(1 + entries.size() / 8);
        const auto same =
            std::find_if(entries.begin(), entries.end(), [key = key](const auto& entry) { return entry.first.text() == key; });
        if (same != entries.end())
          same->second = std::move(value);
        else
          entries.emplace_back(runtime.string(key), std::move(value));
      }
      return runtime.dict(std::move(entries));
    }
    case Type::STRING: return runtime.string(std::string_view(element));
    case Type::INT64: return static_cast<Int>(int64_t(element));
    case Type::UINT64: return static_cast<Int>(uint64_t(element));
    case Type::DOUBLE: return double(element);
    case Type::BOOL: return bool(element);
    default: return None{};
  }
}

}  // namespace

std::string to_json(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader reader(runtime, "tojson", args, {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.ascii_only = reader.flag(0, false);
  style.sort_keys = reader.flag(3, false);
  if (const Value* indent = reader.get(1); indent != nullptr && !indent->is_none()) {
    style.break_lines = true;
    style.item_separator.assign(1, ',');
    if (indent->is_string())
      style.indent = indent->text();
    else
      style.indent.assign(static_cast<size_t>(std::clamp<int64_t>(reader.integer(1, 0), 0, 1000)), ' ');
  }
  if (const Value* separators = reader.get(2); separators != nullptr && !separators->is_none()) {
    const auto parts = iterate(runtime, *separators);
    if (parts->items.size() != 2 || !parts->items[0].is_string() || !parts->items[1].is_string()) {
      runtime.fail("tojson: found other separators, expected two strings");
    }
    style.item_separator = parts->items[0].text();
    style.key_separator = parts->items[1].text();
  }
  JsonWriter writer(runtime, std::move(style));
  writer.write(value);
  return std::move(writer.out);
}

Value from_json(Runtime& runtime, const std::string& text) {
  runtime.scan(text.size());
  runtime.room(text.size(), 4);
  JsonLimits limits;
  limits.max_bytes = runtime.limits().max_memory_bytes;
  std::optional<JsonDocument> document;
  try {
    document = JsonDocument::parse(text, "from_json", limits);
  } catch (const Error& error) {
    runtime.fail_text(error.what());
  }
  return convert(runtime, document->root().element());
}

}  // namespace cachalot::jinja
