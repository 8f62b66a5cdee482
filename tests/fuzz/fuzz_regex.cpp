// Any bytes as a regular expression, and a text for it.
#include "grammar_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return cachalot::fuzz::run_grammar(cachalot::GrammarSource::Kind::regex, data, size);
}
