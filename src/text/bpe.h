// Byte-pair merging of one piece of text: the pair with the lowest rank first, the leftmost of equals.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "text/vocabulary.h"

namespace cachalot {

constexpr size_t kMaxMerges = 1u << 22;

class Bpe {
 public:
  // `n_merges` is at most kMaxMerges.
  explicit Bpe(size_t n_merges = 0);

  // Adds the merge of the next rank; a pair named again takes the later rank, as in the reference.
  void add_merge(int left, int right, int merged);
  // Ids that start a merge: one for each byte. A byte without a token becomes `unknown` when that is not negative, else the tokens
  // of U+FFFD, and nothing when those lack too. Call once, with all tokens set.
  void set_bytes(const Vocabulary& vocabulary, int unknown);

  // Appends the ids of `piece`. O(n log n); short pieces need no heap.
  void encode(std::string_view piece, std::vector<int>& out) const;

  struct Merge {
    int left, right, merged;
  };
  [[nodiscard]] const std::vector<Merge>& merges() const { return merges_; }  // by rank

 private:
  static constexpr uint32_t kNoRank = 0xFFFFFFFF;
  struct Slot {
    uint64_t pair = ~0ull;  // left << 32 | right
    uint32_t rank = kNoRank;
  };
  [[nodiscard]] size_t slot_of(uint64_t pair) const;
  [[nodiscard]] uint32_t rank_of(int left, int right) const;
  void merge_short(std::vector<int>& ids, size_t from) const;
  void merge_long(std::vector<int>& ids, size_t from) const;

  std::vector<Merge> merges_;
  std::vector<Slot> slots_;  // open addressing, a power of two, at most half full
  int shift_ = 0;
  std::array<int, 256> byte_ids_{};  // -1: see replacement_
  std::vector<int> replacement_;
};

}  // namespace cachalot
