// Rotary frequencies and tables. All in double: at position 100,000 an f32 angle is off by several thousandths of a radian.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/check.h"
#include "model/config.h"

namespace cachalot {
namespace {

// Blends interpolated and plain frequencies: dimensions that turn more than beta_fast times over the original context stay, those that
// turn less than beta_slow times are stretched by the factor.
void apply_yarn(const RopeConfig& r, std::vector<double>& freq) {
  const double d = r.dim, two_pi = 2.0 * std::numbers::pi;
  const auto corrected = [&](double turns) { return d * std::log(r.original_positions / (turns * two_pi)) / (2.0 * std::log(r.theta)); };
  const double low = std::max(std::floor(corrected(r.beta_fast)), 0.0);
  double high = std::min(std::ceil(corrected(r.beta_slow)), d - 1.0);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < freq.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    freq[i] = freq[i] / r.factor * ramp + freq[i] * (1.0 - ramp);
  }
}

void apply_llama3(const RopeConfig& r, std::vector<double>& freq) {
  const double low_wavelength = r.original_positions / r.low_freq_factor, high_wavelength = r.original_positions / r.high_freq_factor;
  for (double& f : freq) {
    const double wavelength = 2.0 * std::numbers::pi / f;
    if (wavelength < high_wavelength) continue;
    if (wavelength > low_wavelength) {
      f /= r.factor;
      continue;
    }
    const double smooth = (r.original_positions / wavelength - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor);
    f = (1.0 - smooth) * f / r.factor + smooth * f;
  }
}

}  // namespace

std::vector<double> rope_frequencies(const RopeConfig& r) {
  std::vector<double> freq(static_cast<size_t>(r.dim / 2));
  for (size_t i = 0; i < freq.size(); ++i) freq[i] = std::pow(r.theta, -2.0 * static_cast<double>(i) / r.dim);
  switch (r.scaling) {
    case RopeConfig::Scaling::none: break;
    case RopeConfig::Scaling::linear:
      for (double& f : freq) f /= r.factor;
      break;
    case RopeConfig::Scaling::yarn: apply_yarn(r, freq); break;
    case RopeConfig::Scaling::llama3: apply_llama3(r, freq); break;
  }
  if (!r.freq_factors.empty()) {
    CACHALOT_CHECK(r.freq_factors.size() == freq.size());
    for (size_t i = 0; i < freq.size(); ++i) freq[i] /= r.freq_factors[i];
  }
  return freq;
}

std::vector<float> rope_table(const RopeConfig& r, int n_positions) {
  const std::vector<double> freq = rope_frequencies(r);
  const size_t half = freq.size();
  std::vector<float> table(static_cast<size_t>(n_positions) * half * 2);
  for (size_t p = 0; p < static_cast<size_t>(n_positions); ++p) {
    float* row = table.data() + p * half * 2;
    for (size_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(p) * freq[i];
      row[i] = static_cast<float>(std::cos(angle) * r.magnitude);
      row[half + i] = static_cast<float>(std::sin(angle) * r.magnitude);
    }
  }
  return table;
}

}  // namespace cachalot
