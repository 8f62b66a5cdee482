// One compiled pre-tokenizer pattern: PCRE2 with JIT, under limits on backtracking, memory and time.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "text/pretokenizer.h"

// PCRE2 names its compiled pattern this way for 8-bit code units.
struct pcre2_real_code_8;

namespace cachalot {

class RegexSplitter {
 public:
  // Oniguruma's $ and ^ match at every line, so PCRE2_MULTILINE is set. The one difference left is that \s takes U+180E.
  // Errors: Error naming `where`, the offset and PCRE2's reason.
  RegexSplitter(SplitStep step, std::string where);
  ~RegexSplitter();
  RegexSplitter(const RegexSplitter&) = delete;
  RegexSplitter& operator=(const RegexSplitter&) = delete;

  // Calls `sink` with the pieces of `text` in order. Errors: Error when matching passes a limit.
  void split(std::string_view text, const std::function<void(std::string_view)>& sink) const;

 private:
  SplitStep step_;
  std::string where_;
  pcre2_real_code_8* code_ = nullptr;
};

}  // namespace cachalot
