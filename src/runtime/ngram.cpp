// A table from the last tokens to where they last stood. A collision of hashes costs a wrong guess, no more.
#include "runtime/ngram.h"

#include <algorithm>

namespace cachalot {
namespace {

uint64_t hash_of(std::span<const int> tokens) {
  uint64_t h = 0x9E3779B97F4A7C15u;
  for (const int t : tokens) {
    h ^= static_cast<uint32_t>(t);
    h *= 0xFF51AFD7ED558CCDu;
    h ^= h >> 32;
  }
  return h;
}

}  // namespace

// Enters for each place the tokens before it; the end itself has no token yet.
void NgramGuesser::learn(std::span<const int> tokens) {
  for (; n_known_ < static_cast<int>(tokens.size()); ++n_known_)
    for (int n = kShortest; n <= std::min(kLongest, n_known_); ++n)
      behind_[n][hash_of(tokens.subspan(static_cast<size_t>(n_known_ - n), static_cast<size_t>(n)))] = n_known_;
}

std::vector<int> NgramGuesser::guess(std::span<const int> tokens, int most) {
  learn(tokens);
  const auto size = static_cast<int>(tokens.size());
  for (int n = std::min(kLongest, size); n >= kShortest; --n) {
    const auto found = behind_[n].find(hash_of(tokens.last(static_cast<size_t>(n))));
    if (found == behind_[n].end()) continue;
    const auto from = tokens.subspan(static_cast<size_t>(found->second), static_cast<size_t>(std::min(most, size - found->second)));
    return {from.begin(), from.end()};
  }
  return {};
}

}  // namespace cachalot
