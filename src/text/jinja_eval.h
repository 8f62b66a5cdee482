// Runs a parsed template.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "text/jinja_ast.h"
#include "text/jinja_runtime.h"

namespace cachalot::jinja {

// The rendered text. `variables` are what the template sees besides the global functions. Throws Error as Runtime does.
std::string evaluate(const Body& body, Runtime& runtime, std::vector<std::pair<std::string, Value>> variables);

}  // namespace cachalot::jinja
