// GBNF: the grammar notation of llama.cpp, which the `grammar` and `ebnf` request fields hold.
#pragma once

#include <string_view>

#include "grammar/grammar.h"

namespace cachalot {

// name ::= alternatives, with "literals", [classes], ( groups ), * + ? {m,n}, . for any character and # comments; `root` is the start.
// Throws Error naming the line for what is malformed, for a rule that is used and not defined, and for a missing root.
Grammar parse_gbnf(std::string_view text);

}  // namespace cachalot
