// BlockPool: an intrusive list of free blocks, holder counts, and the tree of published prefixes.
#include "runtime/block_pool.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "base/check.h"

namespace cachalot {
namespace {

constexpr int kMaxBlockTokens = 256;
// Many different first pages may hang below one root; looking at the newest keeps the search for a partial match short.
constexpr int kMaxPartialCandidates = 64;

BlockHash to_hash(XXH128_hash_t h) { return {h.high64, h.low64}; }

}  // namespace

BlockPool::BlockPool(int n_blocks, int block_tokens, int hash_bits)
    : block_tokens_(block_tokens),
      hash_bits_(hash_bits),
      blocks_(static_cast<size_t>(n_blocks)),
      tokens_(static_cast<size_t>(n_blocks) * static_cast<size_t>(block_tokens)) {
  CACHALOT_CHECK(block_tokens > 0 && block_tokens <= kMaxBlockTokens, "{} tokens", block_tokens);
  for (int b = 0; b < n_blocks; ++b) append_free(b, /*in_front=*/false);
}

void BlockPool::append_free(int block, bool in_front) {
  Block& b = at(block);
  b.previous = in_front ? -1 : free_tail_;
  b.next = in_front ? free_head_ : -1;
  (b.previous >= 0 ? at(b.previous).next : free_head_) = block;
  (b.next >= 0 ? at(b.next).previous : free_tail_) = block;
  ++n_free_;
  n_cached_ += b.n_tokens > 0;
}

void BlockPool::remove_free(int block) {
  Block& b = at(block);
  (b.previous >= 0 ? at(b.previous).next : free_head_) = b.next;
  (b.next >= 0 ? at(b.next).previous : free_tail_) = b.previous;
  b.previous = b.next = -1;
  --n_free_;
  n_cached_ -= b.n_tokens > 0;
}

std::optional<int> BlockPool::take() {
  if (free_head_ < 0) return std::nullopt;
  const int block = free_head_;
  remove_free(block);
  if (at(block).n_tokens > 0) {
    ++n_evicted_;
    unpublish(block);
  }
  at(block).holders = 1;
  return block;
}

void BlockPool::share(int block) {
  CACHALOT_CHECK(block >= 0 && block < n_blocks(), "block {} of {}", block, n_blocks());
  CACHALOT_CHECK(holders(block) > 0 || published(block), "block {} is free and holds nothing", block);
  if (at(block).holders++ == 0) remove_free(block);
}

void BlockPool::drop(int block) {
  CACHALOT_CHECK(block >= 0 && block < n_blocks() && holders(block) > 0, "block {} of {}", block, n_blocks());
  if (--at(block).holders == 0) append_free(block, /*in_front=*/!published(block));
}

std::span<const int> BlockPool::tokens_of(int block) const {
  return {tokens_.data() + static_cast<size_t>(block) * static_cast<size_t>(block_tokens_), static_cast<size_t>(at(block).n_tokens)};
}

int BlockPool::first_child(Parent parent) const { return parent >= 0 ? at(parent).first_child : roots_[root_index(parent)].first_child; }

void BlockPool::set_first_child(Parent parent, int block) {
  if (parent >= 0) {
    at(parent).first_child = block;
    return;
  }
  Root& root = roots_[root_index(parent)];
  root.first_child = block;
  if (block >= 0) return;
  root_of_salt_.erase(root.salt);
  root = {};
  free_roots_.push_back(root_index(parent));
}

BlockHash BlockPool::shortened(BlockHash hash) const {
  if (hash_bits_ >= 128) return hash;
  return {0, hash.low & ((uint64_t{1} << std::min(hash_bits_, 63)) - 1)};
}

BlockHash BlockPool::chained(Parent parent, std::span<const int> tokens) const {
  const BlockHash& before = parent >= 0 ? at(parent).hash : roots_[root_index(parent)].hash;
  std::array<int, 4 + kMaxBlockTokens> words;
  std::memcpy(words.data(), &before, sizeof before);
  std::ranges::copy(tokens, words.begin() + 4);
  return shortened(to_hash(XXH3_128bits(words.data(), (4 + tokens.size()) * sizeof(int))));
}

BlockPool::Parent BlockPool::find_root(std::string_view salt) const {
  const auto found = root_of_salt_.find(std::string(salt));
  return found == root_of_salt_.end() ? kNoParent : root_id(found->second);
}

BlockPool::Parent BlockPool::make_root(std::string_view salt) {
  if (const Parent known = find_root(salt); known != kNoParent) return known;
  size_t index = roots_.size();
  if (free_roots_.empty()) {
    roots_.emplace_back();
  } else {
    index = free_roots_.back();
    free_roots_.pop_back();
  }
  roots_[index] = {std::string(salt), -1, shortened(to_hash(XXH3_128bits(salt.data(), salt.size())))};
  root_of_salt_.emplace(salt, index);
  return root_id(index);
}

std::optional<int> BlockPool::find(Parent parent, std::span<const int> tokens) const {
  if (parent == kNoParent) return std::nullopt;
  const auto found = index_.find(chained(parent, tokens));
  if (found == index_.end() || at(found->second).parent != parent || !std::ranges::equal(tokens_of(found->second), tokens))
    return std::nullopt;
  return found->second;
}

BlockPool::Partial BlockPool::find_partial(Parent parent, std::span<const int> tokens) const {
  Partial best;
  if (parent == kNoParent) return best;
  int n_seen = 0;
  for (int child = first_child(parent); child >= 0 && n_seen < kMaxPartialCandidates; child = at(child).next_sibling, ++n_seen) {
    const auto known = tokens_of(child);
    const auto n_same = static_cast<int>(std::ranges::mismatch(known, tokens).in1 - known.begin());
    if (n_same > best.n_same) best = {child, n_same};
  }
  return best;
}

std::optional<int> BlockPool::publish(Parent parent, int block, std::span<const int> tokens) {
  CACHALOT_CHECK(holders(block) > 0 && !published(block) && parent != kNoParent, "block {} below {}", block, parent);
  CACHALOT_CHECK(!tokens.empty() && std::ssize(tokens) <= block_tokens_, "{} tokens", tokens.size());
  CACHALOT_CHECK(parent < 0 || at(parent).n_tokens == block_tokens_, "block {} is no parent", parent);
  const BlockHash hash = chained(parent, tokens);
  const auto [entry, added] = index_.try_emplace(hash, block);
  if (!added) {
    const Block& known = at(entry->second);
    if (known.parent == parent && std::ranges::equal(tokens_of(entry->second), tokens)) return entry->second;
    // The root may have been made for this page.
    if (parent < 0 && first_child(parent) < 0) set_first_child(parent, -1);
    return std::nullopt;
  }
  Block& b = at(block);
  b.hash = hash;
  b.parent = parent;
  b.n_tokens = static_cast<int>(tokens.size());
  std::ranges::copy(tokens, tokens_.begin() + static_cast<std::ptrdiff_t>(block) * block_tokens_);
  b.next_sibling = first_child(parent);
  if (b.next_sibling >= 0) at(b.next_sibling).previous_sibling = block;
  set_first_child(parent, block);
  return block;
}

// The block is in no list of free blocks. What was published below it can no longer be reached, and is forgotten too.
void BlockPool::unpublish(int block) {
  Block& b = at(block);
  while (b.first_child >= 0) {
    const int child = b.first_child;
    const bool is_free = holders(child) == 0;
    if (is_free) remove_free(child);
    unpublish(child);
    if (is_free) append_free(child, /*in_front=*/true);
  }
  if (b.previous_sibling >= 0) at(b.previous_sibling).next_sibling = b.next_sibling;
  if (b.next_sibling >= 0) at(b.next_sibling).previous_sibling = b.previous_sibling;
  if (b.previous_sibling < 0) set_first_child(b.parent, b.next_sibling);
  index_.erase(b.hash);
  b.n_tokens = 0;
  b.parent = kNoParent;
  b.next_sibling = b.previous_sibling = -1;
}

void BlockPool::check_invariants() const {
  int n_free = 0, n_cached = 0, n_published = 0, n_children = 0;
  for (int b = free_head_, before = -1; b >= 0; before = b, b = at(b).next) {
    CACHALOT_CHECK(at(b).holders == 0 && at(b).previous == before && n_free < n_blocks(), "free block {}", b);
    ++n_free;
    n_cached += published(b);
  }
  const auto count_children = [&](Parent parent) {
    for (int c = first_child(parent), before = -1; c >= 0; before = c, c = at(c).next_sibling, ++n_children)
      CACHALOT_CHECK(at(c).parent == parent && at(c).previous_sibling == before && published(c), "block {} below {}", c, parent);
  };
  int n_held = 0;
  for (int b = 0; b < n_blocks(); ++b) {
    n_held += holders(b) > 0;
    n_published += published(b);
    count_children(b);
    if (!published(b)) continue;
    const auto found = index_.find(at(b).hash);
    CACHALOT_CHECK(found != index_.end() && found->second == b, "block {} is not in the index", b);
    CACHALOT_CHECK(holders(b) == 0 || at(b).parent < 0 || holders(at(b).parent) > 0, "block {} is held without its parent", b);
  }
  for (const auto& [salt, index] : root_of_salt_) {
    CACHALOT_CHECK(roots_[index].salt == salt && roots_[index].first_child >= 0, "an empty root");
    count_children(root_id(index));
  }
  CACHALOT_CHECK(n_free == n_free_ && n_cached == n_cached_ && n_free + n_held == n_blocks(), "{} free, {} held, {} blocks", n_free, n_held,
                 n_blocks());
  CACHALOT_CHECK(n_published == static_cast<int>(index_.size()) && n_published == n_children,
                 "{} published, {} in the index, {} in the tree", n_published, index_.size(), n_children);
}

}  // namespace cachalot
