// The filters, tests, methods and functions a template can use, by name.
#pragma once

#include "text/jinja_runtime.h"

namespace cachalot::jinja {

// What a filter or test may need back from the evaluator: `map` and `select` call others by name.
bool is_filter(std::string_view name);
bool is_test(std::string_view name);
Value call_filter(Runtime& runtime, const std::string& name, const Value& value, const Args& args);
bool call_test(Runtime& runtime, const std::string& name, const Value& value, const Args& args);
// namespace, range, dict, raise_exception, strftime_now.
bool is_global(std::string_view name);
Value call_global(Runtime& runtime, const std::string& name, const Args& args);

// object.name and object[key]; both look in the other place as well, as jinja does. Undefined when there is nothing.
Value get_attribute(Runtime& runtime, const Value& object, const std::string& name);
Value get_item(Runtime& runtime, const Value& object, const Value& key);
Value get_slice(Runtime& runtime, const Value& object, const Value& start, const Value& stop, const Value& step);
Value call_method(Runtime& runtime, const CallableObject& method, const Args& args);
Value call_string_method(Runtime& runtime, const std::string& name, const Value& self, const Args& args);
bool is_string_method(std::string_view name);

// Pieces shared between them.
Value add(Runtime& runtime, const Value& a, const Value& b);
Value repeat(Runtime& runtime, const Value& value, Int times);
Value lookup_path(Runtime& runtime, const Value& item, const Value& path);  // "a.b.0" or an index, as filters' attribute= takes it
Value from_json(Runtime& runtime, const std::string& text);
std::string to_json(Runtime& runtime, const Value& value, const Args& args);
Value percent_format(Runtime& runtime, const std::string& format, const Value& values);
Value brace_format(Runtime& runtime, const std::string& format, const Args& args);
std::string format_time(Runtime& runtime, const std::string& format);
Value to_int(Runtime& runtime, const Value& value, const Value& fallback, int base);
Value to_float(const Value& value, const Value& fallback);
Value join(Runtime& runtime, std::string_view separator, const std::vector<Value>& items, bool only_strings);
std::string replace(Runtime& runtime, std::string_view text, std::string_view from, std::string_view to, int64_t limit);

}  // namespace cachalot::jinja
