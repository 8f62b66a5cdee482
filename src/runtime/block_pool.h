// BlockPool: which KV pages are free, and how many sequences hold each of the others. Integers only: no memory, no device.
#pragma once

#include <optional>
#include <vector>

namespace cachalot {

class BlockPool {
 public:
  explicit BlockPool(int n_blocks);

  // A free block with one holder; nothing when all are held.
  std::optional<int> take();
  void share(int block);  // one more holder
  void drop(int block);   // one holder less; free at none
  [[nodiscard]] int n_free() const { return static_cast<int>(free_.size()); }
  [[nodiscard]] int n_blocks() const { return static_cast<int>(holders_.size()); }
  [[nodiscard]] int holders(int block) const { return holders_[static_cast<size_t>(block)]; }

 private:
  std::vector<int> free_;  // taken from the back
  std::vector<int> holders_;
};

}  // namespace cachalot
