// Numbers between bounds: an interval of whole numbers is split by digits, as a range of code points is split by bytes.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/error.h"
#include "grammar/json_rules.h"

namespace cachalot {
namespace {

constexpr int64_t kLargest = 999'999'999'999'999;  // fifteen digits, which every reader of JSON holds exactly

// Decimal numbers from low to high, both with n digits (leading zeros count), as alternatives.
void same_length(Grammar& g, const std::string& low, const std::string& high, std::vector<Grammar::Expr>& out) {
  const size_t n = low.size();
  size_t same = 0;
  while (same < n && low[same] == high[same]) ++same;
  const Grammar::Expr prefix = g.literal(low.substr(0, same));
  if (same == n) {
    out.push_back(prefix);
    return;
  }
  const size_t rest = n - same - 1;
  const auto digits = [&](size_t count) { return g.repeat(g.byte_range('0', '9'), static_cast<int>(count), static_cast<int>(count)); };
  int from = low[same], to = high[same];
  const std::string low_rest = low.substr(same + 1), high_rest = high.substr(same + 1);
  if (low_rest != std::string(rest, '0')) {
    std::vector<Grammar::Expr> parts;
    same_length(g, low_rest, std::string(rest, '9'), parts);
    out.push_back(g.sequence({prefix, g.literal(std::string(1, low[same])), g.choice(parts)}));
    ++from;
  }
  if (high_rest != std::string(rest, '9')) {
    std::vector<Grammar::Expr> parts;
    same_length(g, std::string(rest, '0'), high_rest, parts);
    out.push_back(g.sequence({prefix, g.literal(std::string(1, high[same])), g.choice(parts)}));
    --to;
  }
  if (from <= to) out.push_back(g.sequence({prefix, g.byte_range(from, to), digits(rest)}));
}

// Whole numbers from low to high, 0 <= low <= high.
void non_negative(Grammar& g, int64_t low, int64_t high, std::vector<Grammar::Expr>& out) {
  while (low <= high) {
    const std::string text = std::to_string(low);
    const int64_t end = std::min(high, low < 10 ? int64_t{9} : static_cast<int64_t>(std::pow(10.0, static_cast<double>(text.size()))) - 1);
    same_length(g, text, std::to_string(end), out);
    low = end + 1;
  }
}

void add_integers(Grammar& g, int64_t low, int64_t high, std::vector<Grammar::Expr>& out) {
  if (low < 0) {
    std::vector<Grammar::Expr> parts;
    non_negative(g, std::max<int64_t>(1, -std::min<int64_t>(high, -1)), -low, parts);
    out.push_back(g.sequence({g.literal("-"), g.choice(parts)}));
  }
  if (high >= 0) non_negative(g, std::max<int64_t>(low, 0), high, out);
}

struct Interval {
  int64_t low, high;
};

Interval whole_interval(const NumberBounds& b) {
  Interval i{-kLargest, kLargest};
  const auto clamp = [](double v) { return static_cast<int64_t>(std::clamp(v, -1e15, 1e15)); };
  if (b.low) i.low = std::max(i.low, clamp(b.low_open ? std::floor(*b.low) + 1.0 : std::ceil(*b.low)));
  if (b.high) i.high = std::min(i.high, clamp(b.high_open ? std::ceil(*b.high) - 1.0 : std::floor(*b.high)));
  return i;
}

}  // namespace

Grammar::Expr bounded_integer(Grammar& g, const NumberBounds& bounds) {
  const Interval i = whole_interval(bounds);
  if (i.low > i.high) fail("no whole number lies between the bounds");
  std::vector<Grammar::Expr> out;
  add_integers(g, i.low, i.high, out);
  return g.choice(out);
}

Grammar::Expr bounded_number(Grammar& g, const NumberBounds& bounds) {
  for (const auto& bound : {bounds.low, bounds.high})
    if (bound && (*bound != std::floor(*bound) || std::abs(*bound) > static_cast<double>(kLargest)))
      fail("bounds of type number must be whole and have at most 15 digits, found {}", *bound);
  std::vector<Grammar::Expr> out;
  const Interval whole = whole_interval(bounds);
  if (whole.low <= whole.high) add_integers(g, whole.low, whole.high, out);
  // With a fraction that is not zero: its whole part m lies in [low, high - 1] above zero, and -m - 1 .. -m below.
  const Grammar::Expr fraction =
      g.sequence({g.literal("."), g.repeat(g.literal("0"), 0, 8), g.byte_range('1', '9'), g.repeat(g.byte_range('0', '9'), 0, 8)});
  const int64_t low = bounds.low ? static_cast<int64_t>(*bounds.low) : -kLargest,
                high = bounds.high ? static_cast<int64_t>(*bounds.high) : kLargest;
  if (high > 0 && std::max<int64_t>(low, 0) <= high - 1) {
    std::vector<Grammar::Expr> parts;
    non_negative(g, std::max<int64_t>(low, 0), high - 1, parts);
    out.push_back(g.sequence({g.choice(parts), fraction}));
  }
  if (low < 0 && std::max<int64_t>(-high, 0) <= -low - 1) {
    std::vector<Grammar::Expr> parts;
    non_negative(g, std::max<int64_t>(-high, 0), -low - 1, parts);
    out.push_back(g.sequence({g.literal("-"), g.choice(parts), fraction}));
  }
  if (out.empty()) fail("no number lies between the bounds");
  return g.choice(out);
}

}  // namespace cachalot
