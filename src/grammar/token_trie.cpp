// The tree is laid out while the sorted vocabulary is read: each token shares a prefix with the one before it.
#include "grammar/token_trie.h"

#include <algorithm>
#include <numeric>

namespace cachalot {
namespace {

constexpr size_t kLongest = 1024;  // bytes; a longer token is never proposed, since the tree is walked recursively

}  // namespace

TokenTrie::TokenTrie(std::span<const std::string> token_bytes) : bytes_(token_bytes.begin(), token_bytes.end()) {
  for (const std::string& b : bytes_)
    if (b.size() <= kLongest && !b.empty()) tokens_.push_back(static_cast<int>(&b - bytes_.data()));
  std::sort(tokens_.begin(), tokens_.end(), [&](int a, int b) { return bytes(a) < bytes(b) || (bytes(a) == bytes(b) && a < b); });

  nodes_.emplace_back();
  std::vector<int> path{0};  // nodes from the root to the last token
  const auto close = [&](size_t depth) {
    while (path.size() > depth + 1) {
      nodes_[static_cast<size_t>(path.back())].end = static_cast<int>(nodes_.size());
      path.pop_back();
    }
  };
  std::string_view last;
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const std::string_view text = bytes(tokens_[i]);
    const auto same = static_cast<size_t>(std::mismatch(text.begin(), text.end(), last.begin(), last.end()).first - text.begin());
    close(same);
    for (size_t k = same; k < text.size(); ++k) {
      path.push_back(static_cast<int>(nodes_.size()));
      nodes_.push_back({.byte = static_cast<uint8_t>(text[k]), .tokens = static_cast<int>(i)});
    }
    ++nodes_[static_cast<size_t>(path.back())].n_tokens;
    last = text;
  }
  close(0);
  nodes_[0].end = static_cast<int>(nodes_.size());
}

}  // namespace cachalot
