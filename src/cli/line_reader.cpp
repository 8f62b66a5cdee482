// Reads by poll(2) and read(2), to hear Ctrl-C while waiting.
#include "cli/line_reader.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "base/error.h"
#include "cli/process.h"

namespace cachalot {
namespace {

constexpr size_t kMaxMessage = 64u << 20;  // bytes
constexpr std::string_view kFence = "\"\"\"";

// False when Ctrl-C was pressed.
bool wait_for_input() {
  while (InterruptGuard::count() == 0) {
    pollfd inputs[2] = {{STDIN_FILENO, POLLIN, 0}, {InterruptGuard::descriptor(), POLLIN, 0}};
    if (::poll(inputs, 2, -1) > 0 && inputs[1].revents == 0) return true;
  }
  return false;
}

}  // namespace

LineReader::Result LineReader::read_line(std::string& line) {
  size_t searched = 0;
  for (;;) {
    const size_t newline = buffer_.find('\n', searched);
    if (newline != std::string::npos) {
      line = buffer_.substr(0, newline);
      buffer_.erase(0, newline + 1);
      if (!line.empty() && line.back() == '\r') line.pop_back();
      return Result::line;
    }
    if (end_) {
      if (buffer_.empty()) return Result::end;
      line = std::move(buffer_);
      buffer_.clear();
      return Result::line;
    }
    searched = buffer_.size();
    if (!wait_for_input()) {
      buffer_.clear();
      return Result::interrupted;
    }
    char chunk[4096];
    const ssize_t n = ::read(STDIN_FILENO, chunk, sizeof chunk);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0)
      end_ = true;
    else
      buffer_.append(chunk, static_cast<size_t>(n));
    if (buffer_.size() > kMaxMessage) fail("standard input: found a line of more than {} bytes, expected at most that", kMaxMessage);
  }
}

LineReader::Result LineReader::read_message(std::string& message, const char* more) {
  const auto next = [&](std::string& line) {
    if (stdin_is_terminal()) {
      std::fputs(more, stdout);
      std::fflush(stdout);
    }
    const Result result = read_line(line);
    if (message.size() + line.size() > kMaxMessage)
      fail("standard input: found a message of more than {} bytes, expected at most that", kMaxMessage);
    return result;
  };
  std::string line;
  Result result = read_line(line);
  message.clear();
  if (result != Result::line) return result;
  plain_ = !line.starts_with(kFence) && !line.ends_with('\\');

  if (line.starts_with(kFence)) {
    line.erase(0, kFence.size());
    bool first = true;
    while (!line.ends_with(kFence)) {
      if (!first || !line.empty()) message += line + "\n";  // a line with the opening fence alone is no line of the message
      first = false;
      result = next(line);
      if (result == Result::interrupted) return result;
      if (result == Result::end) return Result::line;
    }
    message += line.substr(0, line.size() - kFence.size());
    if (message.ends_with('\n')) message.pop_back();
    return Result::line;
  }
  while (line.ends_with('\\')) {
    line.pop_back();
    message += line + "\n";
    result = next(line);
    if (result == Result::interrupted) return result;
    if (result == Result::end) return Result::line;
  }
  message += line;
  return Result::line;
}

}  // namespace cachalot
