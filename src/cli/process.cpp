// Terminal, memory and signals by POSIX calls.
#include "cli/process.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include "base/error.h"
#include "cli/commands.h"

namespace cachalot {
namespace {

volatile std::sig_atomic_t g_interrupts = 0;
int g_pipe[2] = {-1, -1};
struct sigaction g_previous;

void on_interrupt(int) {
  g_interrupts = g_interrupts + 1;
  if (g_interrupts >= 4) _exit(kExitInterrupted);
  const int saved = errno;
  const char byte = 0;
  [[maybe_unused]] const ssize_t written = write(g_pipe[1], &byte, 1);
  errno = saved;
}

}  // namespace

bool stdout_is_terminal() { return isatty(STDOUT_FILENO) == 1; }
bool stderr_is_terminal() { return isatty(STDERR_FILENO) == 1; }
bool stdin_is_terminal() { return isatty(STDIN_FILENO) == 1; }

size_t peak_memory_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<size_t>(usage.ru_maxrss) * 1024;
}

InterruptGuard::InterruptGuard() {
  g_interrupts = 0;
  if (pipe2(g_pipe, O_NONBLOCK | O_CLOEXEC) != 0) fail("cannot make a pipe: {}", std::strerror(errno));
  struct sigaction action {};
  action.sa_handler = on_interrupt;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, &g_previous);
}

InterruptGuard::~InterruptGuard() {
  sigaction(SIGINT, &g_previous, nullptr);
  close(g_pipe[0]);
  close(g_pipe[1]);
}

int InterruptGuard::count() { return g_interrupts; }
int InterruptGuard::descriptor() { return g_pipe[0]; }

void InterruptGuard::reset() {
  char bytes[16];
  while (read(g_pipe[0], bytes, sizeof bytes) > 0) {
  }
  g_interrupts = 0;
}

}  // namespace cachalot
