// What the process knows about itself: its terminal, its peak memory, and Ctrl-C.
#pragma once

#include <cstddef>

namespace cachalot {

bool stdout_is_terminal();
bool stderr_is_terminal();
bool stdin_is_terminal();

size_t peak_memory_bytes();  // largest resident set so far

// While one exists, Ctrl-C is counted and does not end the process, and interrupts a blocked read; the fourth without a reset() does end
// it, in case nobody looks at the count any more.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

  [[nodiscard]] static int count();
  // Readable from a Ctrl-C until reset(): for poll(), which a signal need not wake, as any thread may get it.
  [[nodiscard]] static int descriptor();
  static void reset();
};

}  // namespace cachalot
