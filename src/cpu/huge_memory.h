// HugeMemory: where packed weights live. Large anonymous mappings aligned to 2 MiB and advised to use huge pages: weights are read once
// per token from end to end, and with 4 KiB pages the page walks cost a third to a half of the bandwidth.
#pragma once

#include <cstddef>
#include <memory>

namespace cachalot::cpu {

class HugeMemory {
 public:
  // Zeroed, aligned to 64 bytes; freed when the returned pointer and those of its neighbours in the same mapping are gone.
  std::shared_ptr<std::byte> take(size_t bytes);

 private:
  std::shared_ptr<std::byte> chunk_;
  size_t size_ = 0, used_ = 0;
};

// A mapping of its own: zeroed, aligned to 2 MiB. Throws Error when the system refuses.
std::shared_ptr<std::byte> map_huge(size_t bytes);

}  // namespace cachalot::cpu
