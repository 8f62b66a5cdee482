// Arena: bump allocation of temporaries on a device. It grows while the largest step is still unknown and then never allocates again.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "base/check.h"

namespace cachalot {

class Arena {
 public:
  using Alloc = std::function<std::shared_ptr<void>(size_t)>;
  explicit Arena(Alloc alloc) : alloc_(std::move(alloc)) {}

  // 256-byte aligned.
  void* take(size_t bytes) {
    bytes = (bytes + 255) & ~size_t{255};
    if (chunks_.empty() || top_ + bytes > base_ + chunks_.back().size) grow(bytes);
    void* out = static_cast<std::byte*>(chunks_.back().memory.get()) + (top_ - base_);
    top_ += bytes;
    peak_ = std::max(peak_, top_);
    return out;
  }
  [[nodiscard]] size_t mark() const { return top_; }
  void release(size_t mark) {
    CACHALOT_CHECK(mark <= top_, "{} after {}", mark, top_);
    top_ = mark;
    if (mark == 0 && !chunks_.empty() && peak_ > chunks_.front().size) {  // one chunk of the whole size from the next step on
      wanted_ = peak_;
      chunks_.clear();
    }
    while (chunks_.size() > 1 && top_ < base_) {
      chunks_.pop_back();
      base_ = chunks_.back().begin;
    }
    if (chunks_.empty()) base_ = 0;
  }
  // The chunk that temporaries come from now.
  [[nodiscard]] std::shared_ptr<void> memory() const { return chunks_.empty() ? nullptr : chunks_.back().memory; }
  [[nodiscard]] size_t capacity() const { return chunks_.empty() ? wanted_ : base_ + chunks_.back().size; }

 private:
  struct Chunk {
    std::shared_ptr<void> memory;
    size_t begin, size;
  };
  void grow(size_t bytes) {
    base_ = chunks_.empty() ? 0 : base_ + chunks_.back().size;
    const size_t size = std::max({bytes, wanted_, base_, size_t{1} << 20});
    chunks_.push_back({alloc_(size), base_, size});
    top_ = base_;
    wanted_ = 0;
  }

  Alloc alloc_;
  std::vector<Chunk> chunks_;
  size_t base_ = 0, top_ = 0;  // offset of the last chunk, and of the next free byte, over all chunks
  size_t peak_ = 0;            // largest top_ so far, what was skipped at the ends of chunks included
  size_t wanted_ = 0;
};

}  // namespace cachalot
