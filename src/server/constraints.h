// Wanted shapes of answers, enforced: from a request's ConstraintSpec to what masks its tokens.
#pragma once

#include "server/service.h"
#include "text/tokenizer.h"

namespace cachalot::server {

// Compiles for the tokenizer's vocabulary, which must outlive the result; takes a tenth of a second. Safe to call from several threads at
// once.
ConstraintFactory make_constraints(const Tokenizer& tokenizer, std::vector<int> eos_ids);

}  // namespace cachalot::server
