// Attributes, items and slices of values, and the methods of strings, lists and dicts.
#include <algorithm>
#include <array>

#include "text/jinja_builtins.h"
#include "text/jinja_text.h"

namespace cachalot::jinja {
namespace {

constexpr std::array<std::string_view, 43> kStringMethods = {
    "split",   "rsplit",  "strip",      "lstrip",     "rstrip",    "startswith",   "endswith",     "replace",      "upper",
    "lower",   "title",   "capitalize", "swapcase",   "casefold",  "find",         "rfind",        "index",        "rindex",
    "count",   "join",    "format",     "isdigit",    "isdecimal", "isnumeric",    "isalpha",      "isalnum",      "isspace",
    "isupper", "islower", "isascii",    "splitlines", "partition", "rpartition",   "removeprefix", "removesuffix", "zfill",
    "center",  "ljust",   "rjust",      "expandtabs", "istitle",   "isidentifier", "isprintable"};
constexpr std::array<std::string_view, 3> kListMethods = {"index", "count", "copy"};
constexpr std::array<std::string_view, 5> kDictMethods = {"items", "keys", "values", "get", "copy"};
// Python's other names on these types. A template may not use them: they change the value.
constexpr std::array<std::string_view, 12> kMutators = {"append", "clear",  "pop",     "reverse",    "insert", "sort",
                                                        "extend", "remove", "popitem", "setdefault", "update", "fromkeys"};

template <size_t N>
bool is_in(const std::array<std::string_view, N>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

Value loop_attribute(Runtime& runtime, const Value& object, const std::string& name) {
  const LoopObject& loop = object.loop();
  const auto& items = loop.items->items;
  const auto index = static_cast<Int>(loop.index), length = static_cast<Int>(items.size());
  if (name == "index") return index + 1;
  if (name == "index0") return index;
  if (name == "revindex") return length - index;
  if (name == "revindex0") return length - index - 1;
  if (name == "first") return index == 0;
  if (name == "last") return index + 1 == length;
  if (name == "length") return length;
  if (name == "depth") return 1;
  if (name == "depth0") return 0;
  if (name == "previtem" && index > 0) return items[loop.index - 1];
  if (name == "nextitem" && loop.index + 1 < items.size()) return items[loop.index + 1];
  if (name == "cycle") return runtime.method(name, object);
  return Undefined{};
}

// The Python attribute of that name, or undefined when the type has none.
Value own_attribute(Runtime& runtime, const Value& object, const std::string& name, bool& is_hidden) {
  is_hidden = name.starts_with("__");
  if (object.is_string() && is_in(kStringMethods, name)) return runtime.method(name, object);
  if (object.is_dict()) {
    if (is_in(kDictMethods, name)) return runtime.method(name, object);
    is_hidden = is_hidden || (is_in(kMutators, name) && (name == "clear" || name == "pop" || name == "popitem" || name == "setdefault" ||
                                                         name == "update" || name == "fromkeys"));
  }
  if (object.is_sequence(SequenceKind::kList) || object.is_sequence(SequenceKind::kTuple)) {
    if (is_in(kListMethods, name)) return runtime.method(name, object);
  }
  return Undefined{};
}

// Python's index into n elements; false when outside.
bool resolve_index(Int index, size_t n, size_t& out) {
  if (index < 0) index += static_cast<Int>(n);
  if (index < 0 || index >= static_cast<Int>(n)) return false;
  out = static_cast<size_t>(index);
  return true;
}

Value subscript(Runtime& runtime, const Value& object, const Value& key) {
  if (object.is_dict()) {
    const Value* found = find_key(runtime, object.dict(), key);
    return found != nullptr ? *found : Value(Undefined{});
  }
  if (!key.is_int()) return Undefined{};
  size_t index = 0;
  if (object.is_sequence() && object.sequence()->kind <= SequenceKind::kRange &&
      resolve_index(key.integer(), object.items().size(), index)) {
    return object.items()[index];
  }
  if (object.is_string()) {
    const std::string& text = object.text();
    runtime.scan(text.size());
    if (resolve_index(key.integer(), count_chars(text), index)) {
      const size_t begin = char_offset(text, index);
      size_t end = begin;
      next_char(text, end);
      return runtime.string(text.substr(begin, end - begin));
    }
  }
  return Undefined{};
}

[[noreturn]] void fail_undefined(Runtime& runtime, const Value& object, std::string_view wanted) {
  const std::string* name = object.undefined().name;
  runtime.fail("'{}' is undefined, so it has no '{}'", name != nullptr ? printable(*name) : "value", printable(wanted));
}

Int slice_bound(const Value& bound, Int fallback, Int low, Int high, Int n) {
  if (bound.is_none()) return fallback;
  Int at = bound.integer();
  if (at < 0) at += n;
  return std::clamp(at, low, high);
}

Value dict_method(Runtime& runtime, const std::string& name, const Value& self, const Args& args) {
  const DictObject& dict = self.dict();
  if (name == "get") {
    const ArgReader reader(runtime, "get", args, {"key", "default"}, 1);
    const Value* found = find_key(runtime, dict, *reader.get(0));
    return found != nullptr ? *found : reader.value(1, None{});
  }
  const ArgReader none(runtime, name, args, {});
  if (name == "copy") return self;
  std::vector<Value> items;
  for (const auto& [key, value] : dict.entries) {
    if (name == "items")
      items.push_back(runtime.tuple({key, value}));
    else
      items.push_back(name == "keys" ? key : value);
  }
  return runtime.sequence(name == "items"  ? SequenceKind::kItems
                          : name == "keys" ? SequenceKind::kKeys
                                           : SequenceKind::kValues,
                          std::move(items));
}

Value list_method(Runtime& runtime, const std::string& name, const Value& self, const Args& args) {
  if (name == "copy") return self;
  const ArgReader reader(runtime, name, args, {"value"}, 1);
  Int found = 0;
  for (size_t i = 0; i < self.items().size(); ++i) {
    if (!equal(runtime, self.items()[i], *reader.get(0))) continue;
    if (name == "index") return static_cast<Int>(i);
    ++found;
  }
  if (name == "index") runtime.fail("index: the value is not in the list");
  return found;
}

}  // namespace

bool is_string_method(std::string_view name) { return is_in(kStringMethods, name); }

Value get_attribute(Runtime& runtime, const Value& object, const std::string& name) {
  runtime.step();
  if (object.is_undefined()) fail_undefined(runtime, object, name);
  if (object.is_namespace()) {
    for (const auto& [key, value] : object.name_space().attributes) {
      if (key == name) return value;
    }
    return Undefined{&name};
  }
  if (object.is_loop()) return loop_attribute(runtime, object, name);
  bool is_hidden = false;
  Value own = own_attribute(runtime, object, name, is_hidden);
  if (!own.is_undefined()) return own;
  if (object.is_dict() && !is_hidden) {
    for (const auto& [key, value] : object.dict().entries) {
      if (key.is_string() && key.text() == name) return value;
    }
  }
  if (object.is_callable() && object.callable().macro != nullptr && name == "name") return runtime.string(object.callable().name);
  return Undefined{&name};
}

Value get_item(Runtime& runtime, const Value& object, const Value& key) {
  runtime.step();
  if (object.is_undefined()) fail_undefined(runtime, object, key.is_string() ? key.text() : "item");
  Value found = subscript(runtime, object, key);
  if (!found.is_undefined() || !key.is_string()) return found;
  if (object.is_dict() && find_key(runtime, object.dict(), key) != nullptr) return found;
  found = get_attribute(runtime, object, key.text());
  return found.is_undefined() ? Value(Undefined{}) : found;  // the key may not live as long as the template
}

Value get_slice(Runtime& runtime, const Value& object, const Value& start, const Value& stop, const Value& step) {
  if (object.is_undefined()) fail_undefined(runtime, object, "slice");
  const bool is_text = object.is_string();
  if (!is_text && !(object.is_sequence() && object.sequence()->kind <= SequenceKind::kRange)) return Undefined{};
  for (const Value* bound : {&start, &stop, &step}) {
    if (!bound->is_none() && !bound->is_int()) return Undefined{};
  }
  if (is_text) {
    runtime.scan(object.text().size());
    runtime.room(object.text().size(), sizeof(char32_t) + 1);
  }
  const std::u32string chars = is_text ? to_chars32(object.text()) : std::u32string();
  const Int n = static_cast<Int>(is_text ? chars.size() : object.items().size());
  const Int by = step.is_none() ? 1 : step.integer();
  if (by == 0) runtime.fail("found 0 as the step of a slice, expected another number");
  const Int low = by < 0 ? -1 : 0, high = by < 0 ? n - 1 : n;
  const Int from = slice_bound(start, by < 0 ? n - 1 : 0, low, high, n);
  const Int to = slice_bound(stop, by < 0 ? -1 : n, low, high, n);
  std::string text;
  std::vector<Value> items;
  for (Int i = from; by < 0 ? i > to : i < to; i += by) {
    if (is_text)
      append_char(text, chars[static_cast<size_t>(i)]);
    else
      items.push_back(object.items()[static_cast<size_t>(i)]);
  }
  if (is_text) return runtime.string(std::move(text));
  return runtime.sequence(object.sequence()->kind, std::move(items));
}

Value lookup_path(Runtime& runtime, const Value& item, const Value& path) {
  if (!path.is_string()) return get_item(runtime, item, path);
  Value at = item;
  const std::string dot = ".";
  for (const std::string_view part : split(path.text(), &dot, -1)) {
    const bool is_index = !part.empty() && part.size() < 10 && part.find_first_not_of("0123456789") == std::string_view::npos;
    at = get_item(runtime, at, is_index ? Value(std::stoi(std::string(part))) : runtime.string(part));
  }
  return at;
}

Value call_method(Runtime& runtime, const CallableObject& method, const Args& args) {
  if (method.self.is_string()) return call_string_method(runtime, method.name, method.self, args);
  if (method.self.is_dict()) return dict_method(runtime, method.name, method.self, args);
  if (method.self.is_loop()) {
    if (args.positional.empty() || !args.keyword.empty()) runtime.fail("cycle: found no values, expected at least one");
    return args.positional[method.self.loop().index % args.positional.size()];
  }
  return list_method(runtime, method.name, method.self, args);
}

}  // namespace cachalot::jinja
