// Running the program: once with files for its streams, or in a terminal of its own.
#pragma once

#include <sys/types.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace cachalot::test {

struct ProgramResult {
  int code = -1;  // exit code; -signal when a signal ended it
  std::string out, err;

  // Lines of `err`.
  [[nodiscard]] size_t error_lines() const;
  [[nodiscard]] nlohmann::json json() const;  // of `out`; a test failure and null when that is no JSON
};

struct ProgramOptions {
  std::string input;                     // what the program reads
  std::vector<std::string> environment;  // NAME=VALUE, besides this process's own
  int interrupt_after_ms = -1;           // sends SIGINT then
  int64_t file_limit = -1;               // bytes that a file that it writes may grow to, as on a full disk
};
// Runs `cachalot ARGUMENTS`; a test failure when it takes longer than two minutes.
ProgramResult run_program(const std::vector<std::string>& arguments, const ProgramOptions& options = {});

// The program in a pseudo terminal.
class Terminal {
 public:
  explicit Terminal(const std::vector<std::string>& arguments);
  ~Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  void type(std::string_view text) const;
  // Waits until `text` was printed after what earlier calls found, and returns all up to its end. A test failure after a minute.
  std::string wait_for(std::string_view text);
  // What was printed since the last call of wait_for, within so much time.
  std::string read_for(int milliseconds);
  // Waits for the end and returns the exit code.
  int exit_code();

 private:
  // False when nothing came.
  bool read_some(int milliseconds);

  pid_t process_ = -1;
  int master_ = -1;
  std::string seen_;
};

}  // namespace cachalot::test
