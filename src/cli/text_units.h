// Figures as a person reads them: "12.5 MB", "12.5 M", "1.25 s".
#pragma once

#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <string>

namespace cachalot {

// Decimal units: 1 kB = 1000 bytes.
inline std::string bytes_text(double bytes) {
  constexpr std::array<const char*, 5> kUnits{"B", "kB", "MB", "GB", "TB"};
  size_t unit = 0;
  for (; bytes >= 999.5 && unit + 1 < kUnits.size(); ++unit) bytes /= 1000.0;
  return unit == 0 ? fmt::format("{:.0f} B", bytes)
                   : fmt::format("{:.{}f} {}", bytes,
                                 bytes < 9.995   ? 2
                                 : bytes < 99.95 ? 1
                                                 : 0,
                                 kUnits[unit]);
}

inline std::string count_text(double count) {
  constexpr std::array<const char*, 5> kUnits{"", " k", " M", " B", " T"};
  size_t unit = 0;
  for (; count >= 999.5 && unit + 1 < kUnits.size(); ++unit) count /= 1000.0;
  return unit == 0 ? fmt::format("{:.0f}", count)
                   : fmt::format("{:.{}f}{}", count,
                                 count < 9.995   ? 2
                                 : count < 99.95 ? 1
                                                 : 0,
                                 kUnits[unit]);
}

inline std::string seconds_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.0f} us", seconds * 1e6);
  if (seconds < 1.0) return fmt::format("{:.1f} ms", seconds * 1e3);
  return fmt::format("{:.2f} s", seconds);
}

}  // namespace cachalot
