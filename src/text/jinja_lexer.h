// Splits a template into text and the tokens of its tags, white-space control applied as chat templates expect it
// (jinja's trim_blocks and lstrip_blocks on, one final newline dropped).
#pragma once

#include <string>
#include <vector>

#include "text/jinja_value.h"

namespace cachalot::jinja {

struct Token {
  enum class Kind : uint8_t { kText, kOutputBegin, kOutputEnd, kTagBegin, kTagEnd, kName, kString, kInt, kFloat, kOperator, kEnd } kind;
  int line;
  std::string text;  // of text, names, strings (escapes resolved) and operators
  Int integer = 0;
  double number = 0;
};

// Throws Error naming template and line. The last token is kEnd.
std::vector<Token> tokenize(const std::string& source, const std::string& name);

}  // namespace cachalot::jinja
