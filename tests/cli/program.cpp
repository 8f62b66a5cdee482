// Processes and pseudo terminals by POSIX calls.
#include "cli/program.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <fstream>
#include <sstream>
#include <thread>

#include "support/support.h"

namespace cachalot::test {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kLongest = std::chrono::seconds(120);

std::string read_all(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

[[noreturn]] void become_program(const std::vector<std::string>& arguments) {
  std::vector<char*> argv;
  std::string program = CACHALOT_PROGRAM;
  argv.push_back(program.data());
  std::vector<std::string> copies = arguments;
  for (std::string& argument : copies) argv.push_back(argument.data());
  argv.push_back(nullptr);
  ::execv(program.c_str(), argv.data());
  ::_exit(127);
}

void redirect(const std::filesystem::path& path, int flags, int descriptor) {
  const int file = ::open(path.c_str(), flags, 0600);
  if (file < 0 || ::dup2(file, descriptor) < 0) ::_exit(126);
}

int code_of(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status); }

// Waits for a process, ending it when it takes too long.
int wait_for_end(pid_t process, int interrupt_after_ms) {
  const auto start = Clock::now();
  bool interrupted = interrupt_after_ms < 0;
  for (;;) {
    int status = 0;
    if (::waitpid(process, &status, WNOHANG) == process) return code_of(status);
    if (!interrupted && Clock::now() - start > std::chrono::milliseconds(interrupt_after_ms)) {
      interrupted = true;
      ::kill(process, SIGINT);
    }
    if (Clock::now() - start > kLongest) {
      ADD_FAILURE() << "the program did not end in time";
      ::kill(process, SIGKILL);
      ::waitpid(process, &status, 0);
      return code_of(status);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

}  // namespace

size_t ProgramResult::error_lines() const { return static_cast<size_t>(std::count(err.begin(), err.end(), '\n')); }

nlohmann::json ProgramResult::json() const {
  nlohmann::json value = nlohmann::json::parse(out, nullptr, false);
  if (value.is_discarded()) {
    ADD_FAILURE() << "no JSON: " << out << err;
    return {};
  }
  return value;
}

ProgramResult run_program(const std::vector<std::string>& arguments, const ProgramOptions& options) {
  const TempDir folder;
  const auto input = folder.write("in", options.input), out = folder.path() / "out", err = folder.path() / "err";
  const pid_t process = ::fork();
  if (process == 0) {
    redirect(input, O_RDONLY, STDIN_FILENO);
    redirect(out, O_WRONLY | O_CREAT, STDOUT_FILENO);
    redirect(err, O_WRONLY | O_CREAT, STDERR_FILENO);
    if (options.file_limit >= 0) {
      const auto limit = static_cast<rlim_t>(options.file_limit);
      const rlimit limits{limit, limit};
      ::setrlimit(RLIMIT_FSIZE, &limits);
    }
    for (const std::string& variable : options.environment) ::putenv(const_cast<char*>(variable.c_str()));
    become_program(arguments);
  }
  ProgramResult result;
  result.code = wait_for_end(process, options.interrupt_after_ms);
  result.out = read_all(out);
  result.err = read_all(err);
  return result;
}

Terminal::Terminal(const std::vector<std::string>& arguments) {
  process_ = ::forkpty(&master_, nullptr, nullptr, nullptr);
  if (process_ == 0) become_program(arguments);
}

Terminal::~Terminal() {
  if (process_ > 0) {
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
  }
  ::close(master_);
}

void Terminal::type(std::string_view text) const {
  ASSERT_EQ(::write(master_, text.data(), text.size()), static_cast<ssize_t>(text.size()));
}

bool Terminal::read_some(int milliseconds) {
  pollfd ready{master_, POLLIN, 0};
  if (::poll(&ready, 1, milliseconds) <= 0) return false;
  char chunk[4096];
  const ssize_t n = ::read(master_, chunk, sizeof chunk);
  if (n <= 0) return false;
  seen_.append(chunk, static_cast<size_t>(n));
  return true;
}

std::string Terminal::wait_for(std::string_view text) {
  const auto end = Clock::now() + std::chrono::seconds(60);
  for (;;) {
    const size_t at = seen_.find(text);
    if (at != std::string::npos) {
      std::string upto = seen_.substr(0, at + text.size());
      seen_.erase(0, at + text.size());
      return upto;
    }
    if (Clock::now() > end) {
      ADD_FAILURE() << "waited for \"" << text << "\", saw: " << seen_;
      return {};
    }
    if (!read_some(100)) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

std::string Terminal::read_for(int milliseconds) {
  const auto end = Clock::now() + std::chrono::milliseconds(milliseconds);
  while (Clock::now() < end) read_some(20);
  return std::exchange(seen_, {});
}

int Terminal::exit_code() {
  const auto end = Clock::now() + std::chrono::seconds(60);
  int status = 0;
  while (::waitpid(process_, &status, WNOHANG) != process_) {
    read_some(10);  // a full terminal would hold the program up
    if (Clock::now() > end) {
      ADD_FAILURE() << "the program did not end in time, saw: " << seen_;
      return -1;
    }
  }
  process_ = -1;
  return code_of(status);
}

}  // namespace cachalot::test
