// Lines from the standard input, with Ctrl-C told apart from the end, and messages of several lines.
#pragma once

#include <string>

namespace cachalot {

class LineReader {
 public:
  enum class Result { line, end, interrupted };

  // One line without its line end. Ctrl-C breaks the wait off (an InterruptGuard must exist); a line begun is then dropped.
  Result read_line(std::string& line);

  // A message: one line; or several, where each but the last ends with a backslash; or all that stands between a pair of """. `more` is
  // shown before each further line when the input is a terminal.
  Result read_message(std::string& message, const char* more);
  // Whether the last message was one line as typed: only such a one can be a command.
  [[nodiscard]] bool was_plain_line() const { return plain_; }

 private:
  std::string buffer_;
  bool end_ = false, plain_ = false;
};

}  // namespace cachalot
