// Sequence: a text as tokens, and the part of it whose rows are in the KV cache.
#pragma once

#include <vector>

namespace cachalot {

// Logical block i holds the rows of tokens [i, i + 1) * block_tokens.
struct Sequence {
  std::vector<int> tokens;
  int n_computed = 0;
  std::vector<int> blocks;

  [[nodiscard]] int n_tokens() const { return static_cast<int>(tokens.size()); }
};

constexpr int blocks_for(int n_tokens, int block_tokens) { return (n_tokens + block_tokens - 1) / block_tokens; }

}  // namespace cachalot
