// Pace: moving averages of step times.
#include "runtime/pace.h"

#include <algorithm>

namespace cachalot {
namespace {

constexpr double kWeight = 0.2;  // of a new measurement
constexpr int kUnknownRows = 64, kManyRows = 1 << 30;

void average(double& mean, double value) { mean = mean > 0.0 ? mean + kWeight * (value - mean) : value; }

}  // namespace

void Pace::record(int n_decode_rows, int n_prompt_rows, double seconds) {
  if (n_prompt_rows == 0) {
    if (n_decode_rows > 0) average(decode_seconds_, seconds);
    return;
  }
  // A step reads the weights once, whoever its rows belong to: only what it took beyond a decoding step is due to the prompt.
  const double due = n_decode_rows > 0 ? std::max(seconds - decode_seconds_, 0.05 * seconds) : seconds;
  average(row_seconds_, due / n_prompt_rows);
}

int Pace::prompt_rows_within(double seconds) const {
  if (row_seconds_ <= 0.0) return kUnknownRows;
  return static_cast<int>(std::clamp((seconds - decode_seconds_) / row_seconds_, 0.0, double{kManyRows}));
}

}  // namespace cachalot
