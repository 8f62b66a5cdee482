// Regular expressions as JSON Schema's `pattern` and the `regex` response format use them: the regular part of ECMA-262.
#pragma once

#include <string_view>

#include "grammar/code_points.h"
#include "grammar/grammar.h"

namespace cachalot {

struct RegexOptions {
  Spelling spelling = Spelling::utf8;
  bool whole = true;  // the whole text must match; otherwise the pattern may match anywhere in it, unless ^ and $ say so
};

// Throws Error naming the offset for what is malformed, not regular (back references, look-around, word boundaries) or too large.
Grammar::Expr parse_regex(Grammar& grammar, std::string_view pattern, const RegexOptions& options);

}  // namespace cachalot
