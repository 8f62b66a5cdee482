// Pace: moving averages of step times, and a line through those of steps with prompt rows.
#include "runtime/pace.h"

#include <algorithm>

namespace cachalot {
namespace {

constexpr double kWeight = 0.2;       // of a new measurement
constexpr double kLineWeight = 0.05;  // a line needs a longer memory than a mean
// Numbers of rows that differ less than this, relatively, say nothing about the slope.
constexpr double kLeastSpread = 0.1;
constexpr int kUnknownRows = 64;
constexpr double kForget = 0.99;  // of the largest number of rows seen, a step

void average(double& mean, double value, double weight) { mean = mean > 0.0 ? mean + weight * (value - mean) : value; }

}  // namespace

void Pace::record(int n_decode_rows, int n_prompt_rows, double seconds) {
  if (n_prompt_rows == 0) {
    if (n_decode_rows > 0) average(decode_seconds_, seconds, steps_since_decode_ >= kStale ? 1.0 : kWeight), steps_since_decode_ = 0;
    return;
  }
  steps_since_decode_ += n_decode_rows > 0;
  const double rows = n_prompt_rows;
  most_rows_ = std::max(rows, kForget * most_rows_);
  if (decode_seconds_ <= 0.0) {
    average(row_seconds_, seconds / rows, kWeight);
    return;
  }
  // A step reads the weights once, whoever its rows belong to: only what it took beyond a decoding step is due to the prompt.
  const double due = std::max(seconds - decode_seconds_, 0.05 * seconds);
  average(rows_, rows, kLineWeight);
  average(due_, due, kLineWeight);
  average(rows_rows_, rows * rows, kLineWeight);
  average(rows_due_, rows * due, kLineWeight);
  const double ratio = due_ / rows_, variance = rows_rows_ - rows_ * rows_;
  // As long as all steps had about as many rows, all of the time is theirs. A line that falls, or begins below zero, is noise.
  const double slope = variance > kLeastSpread * kLeastSpread * rows_ * rows_ ? (rows_due_ - rows_ * due_) / variance : ratio;
  row_seconds_ = std::clamp(slope, 0.02 * ratio, ratio);
  fixed_seconds_ = std::max(0.0, due_ - row_seconds_ * rows_);
}

int Pace::prompt_rows_within(double seconds) const {
  return row_seconds_ > 0.0 ? trusted((seconds - decode_seconds_ - fixed_seconds_) / row_seconds_) : kUnknownRows;
}

int Pace::prompt_rows_at_half_speed() const { return row_seconds_ > 0.0 ? trusted((decode_seconds_ + fixed_seconds_) / row_seconds_) : 0; }

int Pace::trusted(double rows) const { return static_cast<int>(std::clamp(rows, 0.0, std::max<double>(kUnknownRows, 2.0 * most_rows_))); }

}  // namespace cachalot
