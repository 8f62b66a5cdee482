// Parses a template into statements.
#pragma once

#include "text/jinja_ast.h"
#include "text/jinja_limits.h"

namespace cachalot::jinja {

// Throws Error naming template and line on a syntax error, an unknown tag, filter or test, or too deep nesting. `source` must be valid
// UTF-8.
Body parse(const std::string& source, const std::string& name, const TemplateLimits& limits);

}  // namespace cachalot::jinja
