// Lines from the standard input, with Ctrl-C told apart from the end, and messages of several lines.
#pragma once

#include <string>

namespace cachalot {

class LineReader {
 public:
  enum class Result { line, end, interrupted };

  // One line without its line end. Waits in read(2), which Ctrl-C (InterruptGuard) breaks off; a line begun is then dropped.
  Result read_line(std::string& line);

  // A message: one line; or several, where each but the last ends with a backslash; or all that stands between a pair of """. `more` is
  // shown before each further line when the input is a terminal.
  Result read_message(std::string& message, const char* more);

 private:
  std::string buffer_;
  bool end_ = false;
};

}  // namespace cachalot
