// Draws "loading  [#####-----]  45%  4.5 GB of 10.0 GB  1.20 GB/s".
#include "cli/progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "cli/process.h"
#include "cli/text_units.h"

namespace cachalot {

ProgressBar::ProgressBar(std::string label, bool enabled) : label_(std::move(label)), enabled_(enabled && stderr_is_terminal()) {}

ProgressBar::~ProgressBar() {
  if (!drawn_) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
}

void ProgressBar::update(size_t done_bytes, size_t total_bytes) {
  const auto now = Clock::now();
  if (!enabled_ || total_bytes == 0 || now - last_ < std::chrono::milliseconds(100)) return;
  last_ = now;
  drawn_ = true;
  constexpr int kWidth = 28;
  const double part = std::min(1.0, static_cast<double>(done_bytes) / static_cast<double>(total_bytes));
  const int filled = static_cast<int>(part * kWidth);
  const double seconds = std::chrono::duration<double>(now - start_).count();
  fmt::print(stderr, "\r\033[K{} [{:#>{}}{:->{}}] {:3.0f}%  {} of {}  {}/s", label_, "", filled, "", kWidth - filled, part * 100.0,
             bytes_text(static_cast<double>(done_bytes)), bytes_text(static_cast<double>(total_bytes)),
             bytes_text(static_cast<double>(done_bytes) / std::max(seconds, 1e-3)));
  std::fflush(stderr);
}

}  // namespace cachalot
