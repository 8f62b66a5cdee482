// Names, sizes and fallbacks of schemes.
#include "quant/scheme.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "base/check.h"

namespace cachalot {

double bits_per_weight(const Scheme& scheme, int in) {
  if (is_planar(scheme.format)) {
    const int bits = planar_bits(scheme.format);
    return bits + (16.0 + (scheme.symmetric ? 0 : bits)) / group_of(scheme, in);
  }
  if (scheme.format == Format::fp8_block) return 8.0 + 32.0 / (kFp8Block * kFp8Block);
  const FormatInfo& entry = info(scheme.format);
  return 8.0 * entry.block_bytes / entry.block_elems;
}

std::string name_of(const Scheme& scheme) {
  if (!is_planar(scheme.format)) return std::string(info(scheme.format).name);
  const std::string group = scheme.group > 0 ? fmt::format("g{}", scheme.group) : "row";
  return fmt::format("int{} {} {}", planar_bits(scheme.format), group, scheme.symmetric ? "sym" : "zp");
}

std::optional<Scheme> scheme_of_name(std::string_view name) {
  std::string lower(name);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](char c) { return c == '-' || c == ',' ? ' ' : static_cast<char>(std::tolower(c)); });
  if (lower == "fp8") return Scheme{Format::fp8_block};
  if (const auto format = format_of_name(lower); format && !is_planar(*format)) return Scheme{*format};
  if (!lower.starts_with("int4") && !lower.starts_with("int8")) return std::nullopt;
  Scheme scheme{lower[3] == '4' ? Format::int4_planar : Format::int8_planar, 128, false};
  std::string_view rest = std::string_view(lower).substr(4);
  while (!rest.empty()) {
    if (rest[0] == ' ') {
      rest.remove_prefix(1);
      continue;
    }
    const std::string_view word = rest.substr(0, rest.find(' '));
    rest.remove_prefix(word.size());
    if (word == "sym")
      scheme.symmetric = true;
    else if (word == "row")
      scheme.group = 0;
    else if (word.starts_with("g")) {
      int group = 0;
      const auto [end, error] = std::from_chars(word.data() + 1, word.data() + word.size(), group);
      if (error != std::errc() || end != word.data() + word.size() || (group != 32 && group != 64 && group != 128)) return std::nullopt;
      scheme.group = group;
    } else if (word != "zp") {
      return std::nullopt;
    }
  }
  return scheme;
}

bool fits(const Scheme& scheme, int in) {
  if (is_planar(scheme.format)) return in % group_of(scheme, in) == 0 && in % 8 == 0;
  return in % info(scheme.format).block_elems == 0;
}

Scheme fallback(const Scheme& scheme, int in) {
  if (fits(scheme, in)) return scheme;
  if (is_planar(scheme.format)) {
    for (const int group : {64, 32, 0}) {
      const Scheme smaller{scheme.format, group, scheme.symmetric};
      if ((group == 0 || group < scheme.group) && fits(smaller, in)) return smaller;
    }
    return {Format::f16};
  }
  const auto small_block = [](Format format) {
    switch (format) {
      case Format::q2_k:
      case Format::q3_k: return Format::q4_0;
      case Format::q4_k: return Format::q5_0;
      case Format::q5_k: return Format::q5_1;
      case Format::q6_k: return Format::q8_0;
      case Format::iq4_xs: return Format::iq4_nl;
      default: return Format::f16;
    }
  };
  const Scheme smaller{small_block(scheme.format)};
  return fits(smaller, in) ? smaller : Scheme{Format::f16};
}

}  // namespace cachalot
