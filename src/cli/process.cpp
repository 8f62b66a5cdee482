// Terminal, memory and signals by POSIX calls.
#include "cli/process.h"

#include <sys/resource.h>
#include <unistd.h>
#include <csignal>

#include "cli/commands.h"

namespace cachalot {
namespace {

volatile std::sig_atomic_t g_interrupts = 0;
struct sigaction g_previous;

void on_interrupt(int) {
  g_interrupts = g_interrupts + 1;
  if (g_interrupts >= 4) _exit(kExitInterrupted);
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
  struct sigaction action {};
  action.sa_handler = on_interrupt;  // without SA_RESTART: a read at the prompt returns
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, &g_previous);
}
InterruptGuard::~InterruptGuard() { sigaction(SIGINT, &g_previous, nullptr); }
int InterruptGuard::count() { return g_interrupts; }
void InterruptGuard::reset() { g_interrupts = 0; }

}  // namespace cachalot
