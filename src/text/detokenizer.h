// Token ids to text as they come, never half a character: bytes wait (three at most) until the character is whole.
#pragma once

#include <string>
#include <string_view>

#include "text/tokenizer.h"

namespace cachalot {

// Bytes in any cut to well-formed UTF-8. Invalid parts become U+FFFD at once; all output joined equals unicode::replace_invalid of
// all input joined.
class Utf8Stream {
 public:
  [[nodiscard]] std::string push(std::string_view bytes);
  // What is left: one U+FFFD for a character cut short, else nothing. The stream is then new.
  [[nodiscard]] std::string finish();

 private:
  std::string held_;  // the beginning of one character
};

class Detokenizer {
 public:
  // The tokenizer must outlive this. `skip_special` leaves control tokens out of the text.
  explicit Detokenizer(const Tokenizer& tokenizer, bool skip_special = false) : tokenizer_(&tokenizer), skip_special_(skip_special) {}

  // Text that became certain with this token; often empty for one byte of several. Ids out of range give nothing.
  [[nodiscard]] std::string push(int id);
  [[nodiscard]] std::string finish() { return stream_.finish(); }

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  Utf8Stream stream_;
};

}  // namespace cachalot
