// BlockPool: a free list and holder counts.
#include "runtime/block_pool.h"

#include "base/check.h"

namespace cachalot {

BlockPool::BlockPool(int n_blocks) : holders_(static_cast<size_t>(n_blocks), 0) {
  for (int b = n_blocks - 1; b >= 0; --b) free_.push_back(b);
}

std::optional<int> BlockPool::take() {
  if (free_.empty()) return std::nullopt;
  const int block = free_.back();
  free_.pop_back();
  holders_[static_cast<size_t>(block)] = 1;
  return block;
}

void BlockPool::share(int block) {
  CACHALOT_CHECK(block >= 0 && block < n_blocks() && holders(block) > 0, "block {} of {}", block, n_blocks());
  ++holders_[static_cast<size_t>(block)];
}

void BlockPool::drop(int block) {
  CACHALOT_CHECK(block >= 0 && block < n_blocks() && holders(block) > 0, "block {} of {}", block, n_blocks());
  if (--holders_[static_cast<size_t>(block)] == 0) free_.push_back(block);
}

}  // namespace cachalot
