// Any bytes as a JSON schema (none: any JSON object), and a text for it.
#include "grammar_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using Kind = cachalot::GrammarSource::Kind;
  return cachalot::fuzz::run_grammar(size == 0 || data[0] == 0 ? Kind::json_object : Kind::json_schema, data, size);
}
