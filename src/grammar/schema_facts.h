// What a JSON schema's keywords say, before anything is made of them. A keyword that is not known is refused by name.
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace cachalot {

bool member(const JsonValue& v, std::string_view key);
JsonValue child(const JsonValue& v, std::string_view key);  // of an object that has it
// A keyword that counts: 0 to 10,000; `fallback` when it is absent.
int count_of(const JsonValue& v, std::string_view key, int fallback);

// The types that "type" names, in its order; none: it is absent, and all are allowed.
std::vector<std::string> type_names(const JsonValue& v);
bool has_name(const std::vector<std::string>& names, std::string_view name);
// Whether a value is of one of these types, none standing for all.
bool has_type(simdjson::dom::element value, const std::vector<std::string>& names);

// Throws Error for a keyword that is neither an annotation nor one of `known`.
void allow_only(const JsonValue& v, const std::vector<std::string_view>& known);
// The same for the keywords that concern these types.
void allow_only_of(const JsonValue& v, const std::vector<std::string>& types);

// The values of "const" and "enum".
std::vector<simdjson::dom::element> values_of(const JsonValue& v);

// By what a schema's values can be told from those of another, each as JSON text; empty: not known. The schema is no $ref.
struct Marks {
  std::set<std::string> types;                           // integers are numbers
  std::set<std::string> values;                          // when there are only these
  std::map<std::string, std::set<std::string>> members;  // that are required and have only these values
};
Marks marks_of(const JsonValue& v);
// Whether it is plain that no value fits both.
bool plainly_disjoint(const Marks& a, const Marks& b);

}  // namespace cachalot
