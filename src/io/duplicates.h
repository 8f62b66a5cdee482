// first_duplicate: finds a name that occurs twice among up to millions, in 16 bytes each, whatever names an attacker picks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace cachalot {

// name_of(i) gives the string_view of name i < n. Returns the name, or nothing when all differ. Sorting by (hash, name) keeps the
// worst case at n log n comparisons even when all hashes collide.
template <typename NameOf>
std::optional<std::string_view> first_duplicate(size_t n, NameOf&& name_of) {
  std::vector<std::pair<uint64_t, uint32_t>> order;
  order.reserve(n);
  for (size_t i = 0; i < n; ++i) order.emplace_back(std::hash<std::string_view>{}(name_of(i)), static_cast<uint32_t>(i));
  std::sort(order.begin(), order.end(), [&](const auto& a, const auto& b) {
    return a.first != b.first ? a.first < b.first : a.second != b.second && name_of(a.second) < name_of(b.second);
  });
  for (size_t i = 1; i < order.size(); ++i) {
    if (order[i].first == order[i - 1].first && name_of(order[i].second) == name_of(order[i - 1].second)) return name_of(order[i].second);
  }
  return std::nullopt;
}

}  // namespace cachalot
