// Automaton: a grammar made ready to run. Each rule is a deterministic automaton over bytes whose edges may also call another rule; a stack
// of return states makes them a pushdown automaton.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "grammar/grammar.h"

namespace cachalot {

class Automaton {
 public:
  // Throws Error for a grammar that is left recursive, matches no finite text, or is too large.
  explicit Automaton(const Grammar& grammar);

  struct ByteEdge {
    uint8_t low, high;
    int target;
  };
  struct CallEdge {
    int start;   // of the rule that is called
    int target;  // state to return to
  };
  struct TokenEdge {
    int token, target;
  };

  [[nodiscard]] int root() const { return root_; }
  [[nodiscard]] int n_states() const { return static_cast<int>(states_.size()); }
  [[nodiscard]] bool final(int state) const { return at(state).final; }
  [[nodiscard]] std::span<const ByteEdge> bytes(int state) const {
    return part(byte_edges_, at(state).bytes, at(state).n_bytes);
  }  // in order
  [[nodiscard]] std::span<const CallEdge> calls(int state) const { return part(call_edges_, at(state).calls, at(state).n_calls); }
  [[nodiscard]] std::span<const TokenEdge> tokens(int state) const { return part(token_edges_, at(state).tokens, at(state).n_tokens); }
  // Nothing but the end can follow.
  [[nodiscard]] bool ends(int state) const { return at(state).final && at(state).n_bytes + at(state).n_calls + at(state).n_tokens == 0; }
  // The count that a counted rule's state keeps: how many rounds of its body have begun. null for other states.
  struct Counter {
    int loop;      // the state between two rounds
    int end;       // the state behind the byte that ends the rule
    int min, max;  // rounds
  };
  [[nodiscard]] const Counter* counter(int state) const {
    return at(state).counter < 0 ? nullptr : &counters_[static_cast<size_t>(at(state).counter)];
  }
  // Equal for equal states of a well-known rule in any grammar; 0 for states of other rules.
  [[nodiscard]] int well_known(int state) const { return at(state).well_known; }
  // Stays itself under closure: no calls, not final.
  [[nodiscard]] bool simple(int state) const { return !at(state).final && at(state).n_calls == 0; }
  // -1: no edge.
  [[nodiscard]] int next(int state, uint8_t byte) const {
    for (const ByteEdge& e : bytes(state))
      if (byte <= e.high) return byte >= e.low ? e.target : -1;
    return -1;
  }

 private:
  struct State {
    int bytes = 0, n_bytes = 0, calls = 0, n_calls = 0, tokens = 0, n_tokens = 0;
    int counter = -1, well_known = 0;
    bool final = false;
  };
  [[nodiscard]] const State& at(int state) const { return states_[static_cast<size_t>(state)]; }
  template <typename T>
  static std::span<const T> part(const std::vector<T>& all, int first, int n) {
    return std::span<const T>(all).subspan(static_cast<size_t>(first), static_cast<size_t>(n));
  }
  void add_rule(const Grammar& grammar, const Grammar::Rule& rule);
  bool merge_equal_states(int first);
  void add_counter(const Grammar::Rule& rule, int first);
  void resolve_calls(std::span<const int> starts);
  void drop_endless(std::span<const int> starts);
  void refuse_left_recursion(std::span<const int> starts) const;

  std::vector<State> states_;
  std::vector<ByteEdge> byte_edges_;
  std::vector<CallEdge> call_edges_;  // while building, `start` is the rule's index
  std::vector<TokenEdge> token_edges_;
  std::vector<Counter> counters_;
  size_t work_ = 0, merge_work_ = 0;  // steps spent on making rules deterministic, and on merging states
  int root_ = 0;
};

}  // namespace cachalot
