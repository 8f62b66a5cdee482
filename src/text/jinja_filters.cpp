// Filters: each is one small function in the table at the end.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>

#include "text/jinja_builtins.h"
#include "text/jinja_text.h"

namespace cachalot::jinja {
namespace {

using Filter = Value (*)(Runtime&, const Value&, const Args&);

std::string soft_text(Runtime& runtime, const Value& value) {
  std::string text = to_text(runtime, value);
  runtime.scan(text.size());
  return text;
}

// --- text ---
template <std::string (*kChange)(std::string_view)>
Value change_text(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader none(runtime, "filter", args, {});
  const std::string text = soft_text(runtime, value);
  runtime.room(text.size(), 3);
  return runtime.string(kChange(text));
}
Value trim(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader reader(runtime, "trim", args, {"chars"});
  const bool has_chars = reader.get(0) != nullptr && !reader.get(0)->is_none();
  const std::string text = soft_text(runtime, value);
  if (has_chars) return call_string_method(runtime, "strip", runtime.string(text), args);
  return runtime.string(strip(text, nullptr, Side::kBoth));
}
Value replace_filter(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader reader(runtime, "replace", args, {"old", "new", "count"}, 2);
  const bool all = reader.get(2) == nullptr || reader.get(2)->is_none();
  return runtime.string(replace(runtime, soft_text(runtime, value), to_text(runtime, *reader.get(0)), to_text(runtime, *reader.get(1)),
                                all ? -1 : reader.integer(2, -1)));
}
Value escape_filter(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader none(runtime, "escape", args, {});
  if (value.is_markup()) return value;
  const std::string text = soft_text(runtime, value);
  runtime.room(text.size(), 5);
  return runtime.string(escape_html(text), true);
}
Value safe(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader none(runtime, "safe", args, {});
  return runtime.string(soft_text(runtime, value), true);
}
Value string_filter(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader none(runtime, "string", args, {});
  return value.is_string() ? value : runtime.string(soft_text(runtime, value));
}
Value indent(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader reader(runtime, "indent", args, {"width", "first", "blank"});
  if (!value.is_string()) runtime.fail("indent: found {}, expected a string", value.type_name());
  const bool is_text = reader.get(0) != nullptr && reader.get(0)->is_string();
  const std::string margin =
      is_text ? reader.text(0) : std::string(static_cast<size_t>(std::clamp<int64_t>(reader.integer(0, 4), 0, 1000)), ' ');
  const bool first = reader.flag(1, false), blank = reader.flag(2, false);
  runtime.scan(value.text().size());
  const std::string text = value.text() + "\n";
  const auto lines = split_lines(text, false);
  std::string out;
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i != 0) out += '\n';
    if (i == 0 ? first : blank || !lines[i].empty()) out += margin;
    out += lines[i];
    runtime.room(out.size() + margin.size());
  }
  return runtime.string(std::move(out));
}
Value truncate(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader reader(runtime, "truncate", args, {"length", "killwords", "end", "leeway"});
  const std::string text = soft_text(runtime, value);
  const std::string end = reader.get(2) != nullptr ? reader.text(2) : "...";
  const int64_t length = reader.integer(0, 255), leeway = reader.integer(3, 5), keep = length - static_cast<int64_t>(count_chars(end));
  if (keep < 0 || leeway < 0) runtime.fail("truncate: found length {} and leeway {}, expected more", length, leeway);
  if (static_cast<int64_t>(count_chars(text)) <= length + leeway) return runtime.string(text);
  std::string kept = text.substr(0, char_offset(text, static_cast<size_t>(keep)));
  if (!reader.flag(1, false)) kept = kept.substr(0, kept.rfind(' '));
  return runtime.string(kept + end);
}
Value wordcount(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader none(runtime, "wordcount", args, {});
  const std::string text = soft_text(runtime, value);
  Int words = 0;
  bool inside = false;
  for (size_t at = 0; at < text.size();) {
    const char32_t c = next_char(text, at);
    const bool is_word = c == '_' || is_letter(c) || is_decimal(c);
    words += is_word && !inside ? 1 : 0;
    inside = is_word;
  }
  return words;
}
Value center(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader reader(runtime, "center", args, {"width"});
  return call_string_method(runtime, "center", runtime.string(soft_text(runtime, value)), {{reader.value(0, 80)}, {}});
}
Value format_filter(Runtime& runtime, const Value& value, const Args& args) {
  if (!args.positional.empty() && !args.keyword.empty()) runtime.fail("format: found positional and named arguments, expected one kind");
  if (args.keyword.empty()) return percent_format(runtime, soft_text(runtime, value), runtime.tuple(args.positional));
  std::vector<std::pair<Value, Value>> entries;
  for (const auto& [key, item] : args.keyword) entries.emplace_back(runtime.string(key), item);
  return percent_format(runtime, soft_text(runtime, value), runtime.dict(std::move(entries)));
}
Value urlencode(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader none(runtime, "urlencode", args, {});
  const std::string text = soft_text(runtime, value);
  runtime.room(text.size(), 3);
  std::string out;
  for (const char c : text) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       std::string_view("-._~/").find(c) != std::string_view::npos;
    out += plain ? std::string(1, c) : fmt::format("%{:02X}", static_cast<unsigned char>(c));
  }
  return runtime.string(std::move(out));
}

// --- numbers ---
Value int_filter(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader reader(runtime, "int", args, {"default", "base"});
  const int64_t base = reader.integer(1, 10);
  if (base != 0 && (base < 2 || base > 36)) runtime.fail("int: found base {}, expected 2 to 36", base);
  return to_int(runtime, value, reader.value(0, 0), static_cast<int>(base));
}
Value float_filter(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader reader(runtime, "float", args, {"default"});
  return to_float(value, reader.value(0, 0.0));
}
Value abs_filter(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader none(runtime, "abs", args, {});
  if (value.is_int()) return value.integer() < 0 ? -value.integer() : value.integer();
  if (!value.is_float()) runtime.fail("abs: found {}, expected a number", value.type_name());
  return std::fabs(value.number());
}
Value round_filter(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader reader(runtime, "round", args, {"precision", "method"});
  const std::string method = reader.get(1) != nullptr ? reader.text(1) : "common";
  const int64_t precision = std::clamp<int64_t>(reader.integer(0, 0), -300, 300);
  if (!value.is_number()) runtime.fail("round: found {}, expected a number", value.type_name());
  const double power = std::pow(10.0, static_cast<double>(precision));
  if (method == "ceil") return std::ceil(value.number() * power) / power;
  if (method == "floor") return std::floor(value.number() * power) / power;
  if (method != "common") runtime.fail("round: found the method '{}', expected common, ceil or floor", printable(method));
  if (value.is_int() && precision >= 0) return value.integer();
  if (precision < 0) {
    const double rounded = std::nearbyint(value.number() * power) / power;
    return value.is_int() ? Value(static_cast<Int>(rounded)) : Value(rounded);
  }
  return std::strtod(fmt::format("{:.{}f}", value.number(), precision).c_str(), nullptr);
}

// --- sequences ---
Value length(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader none(runtime, "length", args, {});
  if (value.is_string()) return runtime.scan(value.text().size()), static_cast<Int>(count_chars(value.text()));
  if (value.is_sequence()) return static_cast<Int>(value.items().size());
  if (value.is_dict()) return static_cast<Int>(value.dict().entries.size());
  if (value.is_loop()) return static_cast<Int>(value.loop().items->items.size());
  if (value.is_undefined()) return 0;
  runtime.fail("length: found {}, expected a string, list or dict", value.type_name());
}
Value first(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader none(runtime, "first", args, {});
  if (value.is_iterator()) {
    IteratorObject& iterator = value.iterator();
    return iterator.next < iterator.items.size() ? iterator.items[iterator.next++] : Value(Undefined{});
  }
  if (value.is_string()) return get_item(runtime, value, 0);
  const auto items = iterate(runtime, value);
  return items->items.empty() ? Value(Undefined{}) : items->items.front();
}
Value last(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader none(runtime, "last", args, {});
  if (value.is_iterator()) runtime.fail("last: found an iterator, expected a list; use the list filter before it");
  if (value.is_string()) return get_item(runtime, value, -1);
  const auto items = iterate(runtime, value);
  return items->items.empty() ? Value(Undefined{}) : items->items.back();
}
Value list_filter(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader none(runtime, "list", args, {});
  return runtime.list(iterate(runtime, value)->items);
}
Value items_filter(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader none(runtime, "items", args, {});
  std::vector<Value> items;
  if (value.is_dict()) {
    for (const auto& [key, item] : value.dict().entries) items.push_back(runtime.tuple({key, item}));
  } else if (!value.is_undefined()) {
    runtime.fail("items: found {}, expected a dict", value.type_name());
  }
  return runtime.iterator(std::move(items));
}
Value reverse(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader none(runtime, "reverse", args, {});
  if (value.is_string()) return get_slice(runtime, value, None{}, None{}, -1);
  std::vector<Value> items = iterate(runtime, value)->items;
  std::reverse(items.begin(), items.end());
  return runtime.iterator(std::move(items));
}
Value join_filter(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader reader(runtime, "join", args, {"d", "attribute"});
  const std::string separator = reader.get(0) != nullptr ? to_text(runtime, *reader.get(0)) : "";
  const auto items = iterate(runtime, value);
  if (reader.get(1) == nullptr || reader.get(1)->is_none()) return join(runtime, separator, items->items, false);
  std::vector<Value> found;
  for (const Value& item : items->items) found.push_back(lookup_path(runtime, item, *reader.get(1)));
  return join(runtime, separator, found, false);
}

// What to order or tell apart an item by: itself or an attribute, strings without regard to case unless asked.
Value key_of(Runtime& runtime, const Value& item, const Value* attribute, bool case_sensitive) {
  Value key = attribute != nullptr && !attribute->is_none() ? lookup_path(runtime, item, *attribute) : item;
  return key.is_string() && !case_sensitive ? runtime.string(lower(key.text())) : key;
}
std::vector<Value> sorted(Runtime& runtime, const std::vector<Value>& items, const std::vector<Value>& keys, bool descending) {
  std::vector<size_t> order(items.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return descending ? compare(runtime, keys[b], keys[a]) < 0 : compare(runtime, keys[a], keys[b]) < 0;
  });
  std::vector<Value> out;
  for (const size_t i : order) out.push_back(items[i]);
  return out;
}
Value sort_filter(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader reader(runtime, "sort", args, {"reverse", "case_sensitive", "attribute"});
  const auto items = iterate(runtime, value);
  const Value* attribute = reader.get(2);
  std::vector<Value> keys;
  for (const Value& item : items->items) {
    if (attribute == nullptr || !attribute->is_string()) {
      keys.push_back(key_of(runtime, item, attribute, reader.flag(1, false)));
      continue;
    }
    std::vector<Value> parts;
    const std::string comma = ",";
    for (const std::string_view part : split(attribute->text(), &comma, -1)) {
      const Value path = runtime.string(part);
      parts.push_back(key_of(runtime, item, &path, reader.flag(1, false)));
    }
    keys.push_back(runtime.list(std::move(parts)));
  }
  return runtime.list(sorted(runtime, items->items, keys, reader.flag(0, false)));
}
Value dictsort(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader reader(runtime, "dictsort", args, {"case_sensitive", "by", "reverse"});
  if (!value.is_dict()) runtime.fail("dictsort: found {}, expected a dict", value.type_name());
  const std::string by = reader.get(1) != nullptr ? reader.text(1) : "key";
  if (by != "key" && by != "value") runtime.fail("dictsort: found by='{}', expected key or value", printable(by));
  std::vector<Value> items, keys;
  for (const auto& [key, item] : value.dict().entries) {
    items.push_back(runtime.tuple({key, item}));
    keys.push_back(key_of(runtime, by == "key" ? key : item, nullptr, reader.flag(0, false)));
  }
  return runtime.list(sorted(runtime, items, keys, reader.flag(2, false)));
}
Value unique(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader reader(runtime, "unique", args, {"case_sensitive", "attribute"});
  std::vector<Value> keys, out;
  const auto source = iterate(runtime, value);
  for (const Value& item : source->items) {
    Value key = key_of(runtime, item, reader.get(1), reader.flag(0, false));
    if (std::any_of(keys.begin(), keys.end(), [&](const Value& seen) { return equal(runtime, seen, key); })) continue;
    keys.push_back(std::move(key));
    out.push_back(item);
  }
  return runtime.iterator(std::move(out));
}
template <int kSign>
Value extreme(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader reader(runtime, kSign < 0 ? "min" : "max", args, {"case_sensitive", "attribute"});
  const auto items = iterate(runtime, value);
  Value best = Undefined{}, best_key;
  for (size_t i = 0; i < items->items.size(); ++i) {
    Value key = key_of(runtime, items->items[i], reader.get(1), reader.flag(0, false));
    if (i != 0 && kSign * compare(runtime, key, best_key) <= 0) continue;
    best = items->items[i];
    best_key = std::move(key);
  }
  return best;
}
Value sum(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader reader(runtime, "sum", args, {"attribute", "start"});
  Value total = reader.value(1, 0);
  const auto source = iterate(runtime, value);
  for (const Value& item : source->items) {
    const bool by_attribute = reader.get(0) != nullptr && !reader.get(0)->is_none();
    total = add(runtime, total, by_attribute ? lookup_path(runtime, item, *reader.get(0)) : item);
  }
  return total;
}
Value batch(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader reader(runtime, "batch", args, {"linecount", "fill_with"}, 1);
  const auto size = static_cast<size_t>(std::max<int64_t>(reader.integer(0, 1), 1));
  std::vector<Value> rows, row;
  const auto source = iterate(runtime, value);
  for (const Value& item : source->items) {
    if (row.size() == size) rows.push_back(runtime.list(std::exchange(row, {})));
    row.push_back(item);
  }
  if (!row.empty()) {
    if (reader.get(1) != nullptr && !reader.get(1)->is_none()) {
      runtime.room(size, sizeof(Value));
      row.resize(std::max(size, row.size()), *reader.get(1));
    }
    rows.push_back(runtime.list(std::move(row)));
  }
  return runtime.iterator(std::move(rows));
}
Value map_filter(Runtime& runtime, const Value& value, const Args& args) {
  std::vector<Value> out;
  if (!value.truthy()) return runtime.iterator({});
  if (args.positional.empty()) {
    const ArgReader reader(runtime, "map", args, {"attribute", "default"}, 1);
    const auto source = iterate(runtime, value);
    for (const Value& item : source->items) {
      Value found = lookup_path(runtime, item, *reader.get(0));
      const bool use_default = found.is_undefined() && reader.get(1) != nullptr && !reader.get(1)->is_none();
      out.push_back(use_default ? *reader.get(1) : std::move(found));
    }
    return runtime.iterator(std::move(out));
  }
  if (!args.positional[0].is_string()) runtime.fail("map: found {}, expected the name of a filter", args.positional[0].type_name());
  const std::string name = args.positional[0].text();
  const Args rest{{args.positional.begin() + 1, args.positional.end()}, args.keyword};
  const auto source = iterate(runtime, value);
  for (const Value& item : source->items) out.push_back(call_filter(runtime, name, item, rest));
  return runtime.iterator(std::move(out));
}
template <bool kKeep, bool kAttribute>
Value choose(Runtime& runtime, const Value& value, const Args& args) {
  if (!value.truthy()) return runtime.iterator({});
  constexpr size_t kName = kAttribute ? 1 : 0;
  if (args.positional.size() < kName) runtime.fail("selectattr: found no attribute, expected one");
  const bool has_test = args.positional.size() > kName;
  if (has_test && !args.positional[kName].is_string())
    runtime.fail("select: found {}, expected the name of a test", args.positional[kName].type_name());
  Args rest;
  if (has_test) rest = {{args.positional.begin() + kName + 1, args.positional.end()}, args.keyword};
  std::vector<Value> out;
  const auto source = iterate(runtime, value);
  for (const Value& item : source->items) {
    const Value subject = kAttribute ? lookup_path(runtime, item, args.positional[0]) : item;
    const bool holds = has_test ? call_test(runtime, args.positional[kName].text(), subject, rest) : subject.truthy();
    if (holds == kKeep) out.push_back(item);
  }
  return runtime.iterator(std::move(out));
}

// --- other ---
Value default_filter(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader reader(runtime, "default", args, {"default_value", "boolean"});
  const bool use_default = value.is_undefined() || (reader.flag(1, false) && !value.truthy());
  return use_default ? reader.value(0, runtime.string("")) : value;
}
Value tojson(Runtime& runtime, const Value& value, const Args& args) { return runtime.string(to_json(runtime, value, args)); }
Value from_json_filter(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader none(runtime, "from_json", args, {});
  if (!value.is_string()) runtime.fail("from_json: found {}, expected a string", value.type_name());
  return from_json(runtime, value.text());
}
Value attr(Runtime& runtime, const Value& value, const Args& args) {
  const ArgReader reader(runtime, "attr", args, {"name"}, 1);
  if (value.is_dict()) return Undefined{};  // this filter looks at attributes alone, and data has none
  Value found = get_attribute(runtime, value, reader.text(0));
  return found.is_undefined() ? Value(Undefined{}) : found;
}

const std::map<std::string_view, Filter>& filters() {
  static const std::map<std::string_view, Filter> table = {{"abs", abs_filter},
                                                           {"attr", attr},
                                                           {"batch", batch},
                                                           {"capitalize", change_text<capitalize>},
                                                           {"center", center},
                                                           {"count", length},
                                                           {"d", default_filter},
                                                           {"default", default_filter},
                                                           {"dictsort", dictsort},
                                                           {"e", escape_filter},
                                                           {"escape", escape_filter},
                                                           {"first", first},
                                                           {"float", float_filter},
                                                           {"format", format_filter},
                                                           {"from_json", from_json_filter},
                                                           {"fromjson", from_json_filter},
                                                           {"indent", indent},
                                                           {"int", int_filter},
                                                           {"items", items_filter},
                                                           {"join", join_filter},
                                                           {"last", last},
                                                           {"length", length},
                                                           {"list", list_filter},
                                                           {"lower", change_text<lower>},
                                                           {"map", map_filter},
                                                           {"max", extreme<1>},
                                                           {"min", extreme<-1>},
                                                           {"reject", choose<false, false>},
                                                           {"rejectattr", choose<false, true>},
                                                           {"replace", replace_filter},
                                                           {"reverse", reverse},
                                                           {"round", round_filter},
                                                           {"safe", safe},
                                                           {"select", choose<true, false>},
                                                           {"selectattr", choose<true, true>},
                                                           {"sort", sort_filter},
                                                           {"string", string_filter},
                                                           {"sum", sum},
                                                           {"title", change_text<title_filter>},
                                                           {"tojson", tojson},
                                                           {"trim", trim},
                                                           {"truncate", truncate},
                                                           {"unique", unique},
                                                           {"upper", change_text<upper>},
                                                           {"urlencode", urlencode},
                                                           {"wordcount", wordcount}};
  return table;
}

}  // namespace

bool is_filter(std::string_view name) { return filters().contains(name); }

Value call_filter(Runtime& runtime, const std::string& name, const Value& value, const Args& args) {
  const Runtime::Nested nested(runtime);
  runtime.step();
  const auto found = filters().find(name);
  if (found == filters().end()) runtime.fail("unknown filter '{}'", printable(name));
  return found->second(runtime, value, args);
}

}  // namespace cachalot::jinja
