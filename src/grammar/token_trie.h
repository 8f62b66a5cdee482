// TokenTrie: the vocabulary as a tree of bytes, so that a whole family of tokens is refused by its first bytes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace cachalot {

class TokenTrie {
 public:
  // token_bytes[i]: what token i adds to a text; empty: it adds none (control tokens), and is not in the tree.
  explicit TokenTrie(std::span<const std::string> token_bytes);

  struct Node {
    uint8_t byte = 0;  // that leads here
    int end = 0;       // one behind the last node below
    int tokens = 0, n_tokens = 0;
  };
  // Node 0 is the root; nodes are in depth-first order: the first child of n is n + 1 (when n + 1 < end), its next sibling is its end.
  [[nodiscard]] const Node& node(int n) const { return nodes_[static_cast<size_t>(n)]; }
  [[nodiscard]] std::span<const int> tokens(const Node& n) const {
    return std::span<const int>(tokens_).subspan(static_cast<size_t>(n.tokens), static_cast<size_t>(n.n_tokens));
  }
  [[nodiscard]] const std::string& bytes(int token) const { return bytes_[static_cast<size_t>(token)]; }
  [[nodiscard]] int n_vocab() const { return static_cast<int>(bytes_.size()); }

 private:
  std::vector<std::string> bytes_;
  std::vector<Node> nodes_;
  std::vector<int> tokens_;
};

}  // namespace cachalot
