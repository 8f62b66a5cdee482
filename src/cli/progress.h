// A progress bar on stderr, drawn on a terminal only, at most ten times a second, and wiped when it is done.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>

namespace cachalot {

class ProgressBar {
 public:
  explicit ProgressBar(std::string label, bool enabled = true);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void update(size_t done_bytes, size_t total_bytes);

 private:
  using Clock = std::chrono::steady_clock;
  std::string label_;
  bool enabled_, drawn_ = false;
  Clock::time_point start_ = Clock::now(), last_ = start_;
};

}  // namespace cachalot
