// Tests ("x is defined") and the global functions.
#include <algorithm>
#include <map>

#include "text/jinja_builtins.h"
#include "text/jinja_text.h"

namespace cachalot::jinja {
namespace {

using Test = bool (*)(Runtime&, const Value&, const Args&);

const Value& one_argument(Runtime& runtime, const char* name, const Args& args) {
  if (args.positional.size() != 1 || !args.keyword.empty()) {
    runtime.fail("test '{}': found {} arguments, expected one", name, args.positional.size() + args.keyword.size());
  }
  return args.positional[0];
}

bool is_sequence(const Value& v) {
  return v.is_string() || v.is_dict() || v.is_undefined() || (v.is_sequence() && v.sequence()->kind <= SequenceKind::kRange);
}
bool is_iterable(const Value& v) { return v.is_string() || v.is_dict() || v.is_undefined() || v.is_sequence() || v.is_iterator(); }

Int remainder(Runtime& runtime, const Value& value, Int by) {
  if (!value.is_int()) runtime.fail("found {}, expected an integer", value.type_name());
  if (by == 0) runtime.fail("division by zero");
  return value.integer() % by;
}

enum class Order : uint8_t { kLess, kLessEqual, kGreater, kGreaterEqual };
template <Order kOrder>
bool ordered(Runtime& runtime, const Value& value, const Args& args) {
  const int order = compare(runtime, value, one_argument(runtime, "comparison", args));
  if (kOrder == Order::kLess) return order < 0;
  if (kOrder == Order::kLessEqual) return order <= 0;
  return kOrder == Order::kGreater ? order > 0 : order >= 0;
}

bool has_case(Runtime& runtime, const Value& value, const char* method) {
  return call_string_method(runtime, method, runtime.string(to_text(runtime, value)), {}).truthy();
}

// Tests of a value alone.
using PlainTest = bool (*)(const Value&);
const std::map<std::string_view, PlainTest>& plain_tests() {
  static const std::map<std::string_view, PlainTest> table = {
      {"defined", [](const Value& v) { return !v.is_undefined(); }},
      {"undefined", [](const Value& v) { return v.is_undefined(); }},
      {"none", [](const Value& v) { return v.is_none(); }},
      {"boolean", [](const Value& v) { return v.is_bool(); }},
      {"true", [](const Value& v) { return v.is_bool() && v.boolean(); }},
      {"false", [](const Value& v) { return v.is_bool() && !v.boolean(); }},
      {"integer", [](const Value& v) { return v.is_int() && !v.is_bool(); }},
      {"float", [](const Value& v) { return v.is_float(); }},
      {"number", [](const Value& v) { return v.is_number(); }},
      {"string", [](const Value& v) { return v.is_string(); }},
      {"mapping", [](const Value& v) { return v.is_dict(); }},
      {"sequence", is_sequence},
      {"iterable", is_iterable},
      {"callable", [](const Value& v) { return v.is_callable() || v.is_undefined() || v.is_loop(); }},
      {"escaped", [](const Value& v) { return v.is_markup(); }}};
  return table;
}

const std::map<std::string_view, Test>& tests() {
  static constexpr Test kEqual = [](Runtime& r, const Value& v, const Args& a) { return equal(r, v, one_argument(r, "eq", a)); };
  static constexpr Test kUnequal = [](Runtime& r, const Value& v, const Args& a) { return !equal(r, v, one_argument(r, "ne", a)); };
  static constexpr Test kGreater = ordered<Order::kGreater>;
  static constexpr Test kGreaterEqual = ordered<Order::kGreaterEqual>;
  static constexpr Test kLess = ordered<Order::kLess>;
  static constexpr Test kLessEqual = ordered<Order::kLessEqual>;
  static const std::map<std::string_view, Test> table = {
      {"odd", [](Runtime& r, const Value& v, const Args&) { return remainder(r, v, 2) != 0; }},
      {"even", [](Runtime& r, const Value& v, const Args&) { return remainder(r, v, 2) == 0; }},
      {"divisibleby",
       [](Runtime& r, const Value& v, const Args& a) {
         const Value& by = one_argument(r, "divisibleby", a);
         if (!by.is_int()) r.fail("divisibleby: found {}, expected an integer", by.type_name());
         return remainder(r, v, by.integer()) == 0;
       }},
      {"upper", [](Runtime& r, const Value& v, const Args&) { return has_case(r, v, "isupper"); }},
      {"lower", [](Runtime& r, const Value& v, const Args&) { return has_case(r, v, "islower"); }},
      {"sameas", [](Runtime& r, const Value& v, const Args& a) { return v.same_object(one_argument(r, "sameas", a)); }},
      {"in", [](Runtime& r, const Value& v, const Args& a) { return contains(r, one_argument(r, "in", a), v); }},
      {"filter", [](Runtime&, const Value& v, const Args&) { return v.is_string() && is_filter(v.text()); }},
      {"test", [](Runtime&, const Value& v, const Args&) { return v.is_string() && is_test(v.text()); }},
      {"==", kEqual},
      {"eq", kEqual},
      {"equalto", kEqual},
      {"!=", kUnequal},
      {"ne", kUnequal},
      {">", kGreater},
      {"gt", kGreater},
      {"greaterthan", kGreater},
      {">=", kGreaterEqual},
      {"ge", kGreaterEqual},
      {"<", kLess},
      {"lt", kLess},
      {"lessthan", kLess},
      {"<=", kLessEqual},
      {"le", kLessEqual}};
  return table;
}

// --- global functions ---
std::vector<std::pair<Value, Value>> dict_entries(Runtime& runtime, const Args& args) {
  std::vector<std::pair<Value, Value>> entries;
  const auto put = [&](const Value& key, const Value& value) {
    runtime.step(1 + entries.size() / 4);
    const auto same = std::find_if(entries.begin(), entries.end(), [&](const auto& entry) { return equal(runtime, entry.first, key); });
    if (same != entries.end())
      same->second = value;
    else
      entries.emplace_back(key, value);
  };
  if (args.positional.size() > 1) runtime.fail("dict: found {} arguments, expected at most one", args.positional.size());
  if (!args.positional.empty()) {
    const Value& from = args.positional[0];
    if (from.is_dict()) {
      for (const auto& [key, value] : from.dict().entries) put(key, value);
    } else {
      const auto pairs = iterate(runtime, from);
      for (const Value& pair : pairs->items) {
        const auto parts = iterate(runtime, pair);
        if (parts->items.size() != 2) runtime.fail("dict: found an item of {} values, expected pairs", parts->items.size());
        put(parts->items[0], parts->items[1]);
      }
    }
  }
  for (const auto& [key, value] : args.keyword) put(runtime.string(key), value);
  return entries;
}

Value make_namespace(Runtime& runtime, const Args& args) {
  NamespaceObject* result = runtime.name_space();
  for (const auto& [key, value] : dict_entries(runtime, args)) {
    if (!key.is_string()) runtime.fail("namespace: found {} as a name, expected a string", key.type_name());
    if (key.text().starts_with('_')) runtime.fail("namespace: found the name '{}', expected no leading underscore", printable(key.text()));
    result->attributes.emplace_back(key.text(), value);
  }
  return result;
}

Value range(Runtime& runtime, const Args& args) {
  if (args.positional.empty() || args.positional.size() > 3 || !args.keyword.empty()) {
    runtime.fail("range: found {} arguments, expected 1 to 3", args.positional.size());
  }
  Int bounds[3] = {0, 0, 1};
  for (size_t i = 0; i < args.positional.size(); ++i) {
    if (!args.positional[i].is_int()) runtime.fail("range: found {}, expected an integer", args.positional[i].type_name());
    bounds[args.positional.size() == 1 ? 1 : i] = args.positional[i].integer();
  }
  const auto [start, stop, step] = bounds;
  if (step == 0) runtime.fail("range: found a step of 0, expected another number");
  const Int span = step > 0 ? stop - start : start - stop, by = step > 0 ? step : -step;
  const Int n = span <= 0 ? 0 : (span + by - 1) / by;
  constexpr Int kLongest = 100'000;  // the sandbox of the original engine refuses more as well
  if (n > kLongest) runtime.fail("range: found {} numbers, expected at most {}", int_text(n), int_text(kLongest));
  std::vector<Value> items;
  for (Int i = 0; i < n; ++i) items.emplace_back(start + i * step);
  return runtime.sequence(SequenceKind::kRange, std::move(items));
}

}  // namespace

bool is_test(std::string_view name) { return tests().contains(name) || plain_tests().contains(name); }

bool call_test(Runtime& runtime, const std::string& name, const Value& value, const Args& args) {
  runtime.step();
  if (const auto plain = plain_tests().find(name); plain != plain_tests().end()) {
    const ArgReader none(runtime, name, args, {});
    return plain->second(value);
  }
  const auto found = tests().find(name);
  if (found == tests().end()) runtime.fail("unknown test '{}'", printable(name));
  return found->second(runtime, value, args);
}

bool is_global(std::string_view name) {
  return name == "namespace" || name == "range" || name == "dict" || name == "raise_exception" || name == "strftime_now";
}

Value call_global(Runtime& runtime, const std::string& name, const Args& args) {
  if (name == "namespace") return make_namespace(runtime, args);
  if (name == "range") return range(runtime, args);
  if (name == "dict") return runtime.dict(dict_entries(runtime, args));
  if (name == "strftime_now") {
    const ArgReader reader(runtime, name, args, {"format"}, 1);
    return runtime.string(format_time(runtime, reader.text(0)));
  }
  const ArgReader reader(runtime, name, args, {"message"}, 1);
  runtime.fail("the template refuses this conversation: {}", printable(to_text(runtime, *reader.get(0)), 1000));
}

}  // namespace cachalot::jinja
