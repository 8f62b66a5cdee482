// JSON Schema (draft 2020-12, a subset) to a grammar. The texts that the grammar matches are a subset of the valid ones: properties come in
// the schema's order, and members that the schema does not name appear only where it says so. A keyword that cannot be honoured is an
// Error, never ignored; annotations (title, description, default, examples, $comment, deprecated, readOnly, writeOnly, format of other
// names) are.
//
// Honoured: type (one or several), enum, const, properties, required, additionalProperties, minProperties and maxProperties without named
// properties, items, prefixItems, minItems, maxItems, minLength, maxLength, pattern, format (date, time, date-time, uuid, ipv4, email,
// hostname, uri), minimum, maximum, exclusiveMinimum, exclusiveMaximum, anyOf, oneOf (of alternatives that exclude each other visibly),
// allOf (of one schema, or of objects that name different properties), $ref within the document, $defs, definitions.
#pragma once

#include <string_view>

#include "grammar/grammar.h"

namespace cachalot {

// Throws Error naming the place in the schema ("schema.properties.age").
Grammar parse_json_schema(std::string_view text);
// Any JSON object.
Grammar json_object_grammar();

// Adds the schema as a rule of a grammar that holds more than it (a tool call around its arguments).
int add_json_schema(Grammar& grammar, std::string_view text);

}  // namespace cachalot
