// CompiledGrammar: an automaton over a vocabulary, with what was found out about it so far; shared by the requests that use the grammar.
// Matcher: where one text stands in it.
//
// A position is a set of (state, stack of return states). Which tokens may follow a state is found by walking the vocabulary's tree with
// the automaton, once per state: the tokens that stay above the stack are the same wherever the state occurs, and only tokens that return
// from the rule need to look at what lies below (the split that Dong et al. 2024, "XGrammar", section 3.1, describe).
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "grammar/automaton.h"
#include "grammar/token_trie.h"

namespace cachalot {

using TokenMask = std::vector<uint32_t>;  // bit t % 32 of word t / 32: token t

// Return states of calls that are under way, shared among positions; equal stacks have equal indices.
class CallStacks {
 public:
  static constexpr int kEmpty = -1, kUnknown = -2;  // the whole text's end; the end of what is known
  static constexpr int kTooDeep = -3;

  int push(int return_state, int below);  // kTooDeep past the limit
  struct Frame {
    int state, below, depth;
    uint64_t hash;
  };
  [[nodiscard]] const Frame& top(int stack) const { return frames_[static_cast<size_t>(stack)]; }
  [[nodiscard]] uint64_t hash(int stack) const { return stack < 0 ? static_cast<uint64_t>(stack) : top(stack).hash; }

 private:
  std::vector<Frame> frames_;
  std::unordered_map<uint64_t, int> by_key_;
};

struct Position {
  struct Item {
    int state, stack;
    int count = 0;  // rounds begun, where the state's rule counts
    bool operator==(const Item&) const = default;
  };
  std::vector<Item> items;  // states with edges over bytes or tokens
  bool ended = false;       // the text, or what is known of it, may end here
};

class CompiledGrammar {
 public:
  static constexpr size_t kMaxItems = 768;  // places at once: what a very ambiguous grammar has more is given up
  // budget: bytes of masks to keep.
  // What is known of the states of well-known rules, for all grammars over one vocabulary.
  class Shared;
  CompiledGrammar(const Grammar& grammar, std::shared_ptr<const TokenTrie> trie, std::vector<int> eos_ids, size_t budget,
                  std::shared_ptr<Shared> shared);
  static std::shared_ptr<Shared> make_shared_states();

  [[nodiscard]] const Automaton& automaton() const { return automaton_; }
  [[nodiscard]] const TokenTrie& trie() const { return *trie_; }
  [[nodiscard]] std::span<const int> eos_ids() const { return eos_ids_; }

  [[nodiscard]] Position start(CallStacks& stacks) const;
  // Empty (no items, not ended) when the byte does not fit.
  [[nodiscard]] Position step(const Position& from, uint8_t byte, CallStacks& stacks) const;
  [[nodiscard]] Position step_token(const Position& from, int token, CallStacks& stacks) const;
  // Tokens that may follow, end tokens where the text may end. Thread-safe.
  std::shared_ptr<const TokenMask> mask(const Position& at, CallStacks& stacks) const;

 private:
  // What is known of a state wherever it occurs.
  struct StateTokens {
    TokenMask mask;                // tokens that stay within the rule (or end with it); empty when few, or when the rule counts
    std::vector<int> few;          // the same as a list
    std::vector<uint16_t> rounds;  // counting rules: rounds that each token begins and stays within; kNever: it does not fit
    int most_rounds = 0;           // of a token
    struct Return {
      int node;    // of the tree, behind which the rule has ended
      int rounds;  // begun until there
    };
    std::vector<Return> returned;
    [[nodiscard]] size_t bytes() const {
      return mask.size() * 4 + few.size() * sizeof(int) + rounds.size() * 2 + returned.size() * sizeof(Return) + 128;
    }
  };
  template <typename OnNode>
  void walk(int n, const Position& at, CallStacks& stacks, const OnNode& on_node) const;
  bool advance(Position::Item& item, uint8_t byte) const;
  [[nodiscard]] uint64_t count_key(const Position::Item& item) const;
  void make_room(size_t bytes) const;  // under mutex_
  void close(Position& position, std::vector<Position::Item> items, CallStacks& stacks) const;
  std::shared_ptr<const StateTokens> tokens_of(int state) const;
  [[nodiscard]] std::shared_ptr<StateTokens> find_tokens(int state) const;
  [[nodiscard]] std::shared_ptr<const TokenMask> make_mask(const Position& at, CallStacks& stacks) const;

  Automaton automaton_;
  std::shared_ptr<const TokenTrie> trie_;
  std::vector<int> eos_ids_;
  size_t budget_;
  std::shared_ptr<Shared> shared_;

  struct Key {
    uint64_t a, b;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& k) const { return static_cast<size_t>(k.a); }
  };
  mutable std::mutex mutex_;
  mutable std::unordered_map<int, std::shared_ptr<const StateTokens>> states_;
  mutable std::unordered_map<Key, std::shared_ptr<const TokenMask>, KeyHash> masks_;
  mutable size_t kept_ = 0;  // bytes of states_ and masks_
};

}  // namespace cachalot
