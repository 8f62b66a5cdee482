// BlockPool: which KV pages are free, how many hold each of the others, and which prefix of a text a page's rows belong to.
// Integers only: no memory, no device.
//
// A page is held by sequences (or by anything else that wants to keep it: to pin a page is to share() it). A page without holders is
// free, but when it was published it keeps its content until it is needed: free pages are used up in the order in which they were
// dropped, those without known content first.
//
// Published pages form a tree: a page's parent holds the tokens just before its own, and the parents of first pages are roots, one per
// salt. A page is found by a hash chained from its parent's, and taken only when its parent is the very page it was published under and
// its tokens are equal, so that no collision of hashes can put one text's rows under another. This needs that whoever holds a published
// page holds its parents too, and drops children first; free parents are then used up after their children.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace cachalot {

struct BlockHash {
  uint64_t high = 0, low = 0;
  bool operator==(const BlockHash&) const = default;
};

class BlockPool {
 public:
  // hash_bits < 128 shortens the hashes, for tests of collisions.
  BlockPool(int n_blocks, int block_tokens, int hash_bits = 128);

  // A free block with one holder; nothing when all are held.
  std::optional<int> take();
  void share(int block);  // one more holder; the block is held, or free with published content
  void drop(int block);   // one holder less; free at none
  [[nodiscard]] int n_free() const { return n_free_; }
  [[nodiscard]] int n_cached() const { return n_cached_; }  // of the free ones, those with published content
  [[nodiscard]] int n_blocks() const { return static_cast<int>(blocks_.size()); }
  [[nodiscard]] int block_tokens() const { return block_tokens_; }
  [[nodiscard]] int holders(int block) const { return at(block).holders; }

  // Who is a page's parent: a block, or the root of a salt. Roots are only good until the next call of publish(), take() or drop().
  using Parent = int;
  static constexpr Parent kNoParent = -1;
  [[nodiscard]] Parent find_root(std::string_view salt) const;  // kNoParent: nothing was published with this salt
  Parent make_root(std::string_view salt);                      // publish() under it at once

  // The page below `parent` that holds exactly these block_tokens tokens.
  [[nodiscard]] std::optional<int> find(Parent parent, std::span<const int> tokens) const;
  // Among the newest pages below `parent`, the one that begins with most of these tokens.
  struct Partial {
    int block = -1, n_same = 0;
  };
  [[nodiscard]] Partial find_partial(Parent parent, std::span<const int> tokens) const;
  // Makes the content of a held page known: its first rows are those of `tokens` (1 to block_tokens of them; fewer than block_tokens can
  // only be found by find_partial and may not become a parent). Returns the page that stands for this content, which is another one when
  // an equal one was known before, and nothing when it cannot be published because of a collision.
  std::optional<int> publish(Parent parent, int block, std::span<const int> tokens);
  [[nodiscard]] bool published(int block) const { return at(block).n_tokens > 0; }
  [[nodiscard]] const BlockHash& hash(int block) const { return at(block).hash; }

  [[nodiscard]] int64_t n_evicted() const { return n_evicted_; }  // published pages that were used for something else
  void check_invariants() const;

 private:
  struct Block {
    int holders = 0;
    int previous = -1, next = -1;  // in the list of free blocks
    int n_tokens = 0;              // published; 0: not
    Parent parent = kNoParent;
    int first_child = -1, next_sibling = -1, previous_sibling = -1;
    BlockHash hash;
  };
  struct Root {
    std::string salt;
    int first_child = -1;
    BlockHash hash;
  };
  struct HashOf {
    size_t operator()(const BlockHash& h) const { return h.low; }
  };

  // Roots are counted down from -2.
  static Parent root_id(size_t index) { return -2 - static_cast<int>(index); }
  static size_t root_index(Parent parent) { return static_cast<size_t>(-2 - parent); }
  [[nodiscard]] Block& at(int block) { return blocks_[static_cast<size_t>(block)]; }
  [[nodiscard]] const Block& at(int block) const { return blocks_[static_cast<size_t>(block)]; }
  [[nodiscard]] std::span<const int> tokens_of(int block) const;
  [[nodiscard]] int first_child(Parent parent) const;
  [[nodiscard]] BlockHash chained(Parent parent, std::span<const int> tokens) const;
  [[nodiscard]] BlockHash shortened(BlockHash hash) const;
  void set_first_child(Parent parent, int block);
  void append_free(int block, bool in_front);
  void remove_free(int block);
  void unpublish(int block);

  int block_tokens_, hash_bits_;
  std::vector<Block> blocks_;
  std::vector<int> tokens_;  // [n_blocks, block_tokens]
  int free_head_ = -1, free_tail_ = -1, n_free_ = 0, n_cached_ = 0;
  int64_t n_evicted_ = 0;
  std::unordered_map<BlockHash, int, HashOf> index_;
  std::vector<Root> roots_;  // those without children are empty and in free_roots_
  std::vector<size_t> free_roots_;
  std::unordered_map<std::string, size_t> root_of_salt_;
};

}  // namespace cachalot
