// From expressions to states: Thompson's construction for each rule, then subsets (Hopcroft, Motwani, Ullman, chapter 2), where a call of a
// rule is a letter of the alphabet like a byte.
#include "grammar/automaton.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "base/check.h"
#include "base/error.h"

namespace cachalot {
namespace {

constexpr size_t kMaxNfaStates = 200'000, kMaxStates = 60'000, kMaxWork = 5'000'000, kMaxMergeWork = 2'000'000;

struct Nfa {
  struct Edge {
    enum class Kind : uint8_t { bytes, rule, token } kind;
    uint8_t low, high;
    int id;  // rule or token
    int target;
  };
  struct State {
    std::vector<Edge> edges;
    std::vector<int> empty;  // states reached without a byte
  };
  std::vector<State> states;

  int add() {
    if (states.size() >= kMaxNfaStates)
      fail("the grammar is too large: more than {} positions (are there long repetitions?)", kMaxNfaStates);
    states.emplace_back();
    return static_cast<int>(states.size() - 1);
  }
  State& at(int s) { return states[static_cast<size_t>(s)]; }

  // Builds the expression behind state `from`; the state behind it.
  int build(const Grammar& g, Grammar::Expr e, int from) {
    const Grammar::Node& n = g.node(e);
    switch (n.kind) {
      case Grammar::Kind::empty: return from;
      case Grammar::Kind::bytes: {
        const int to = add();
        const ByteSet& set = g.set(n);
        for (int b = 0; b < 256; ++b) {
          if (!set[static_cast<size_t>(b)]) continue;
          int end = b;
          while (end < 255 && set[static_cast<size_t>(end) + 1]) ++end;
          at(from).edges.push_back({Edge::Kind::bytes, static_cast<uint8_t>(b), static_cast<uint8_t>(end), 0, to});
          b = end;
        }
        return to;
      }
      case Grammar::Kind::rule:
      case Grammar::Kind::token: {
        const int to = add();
        at(from).edges.push_back({n.kind == Grammar::Kind::rule ? Edge::Kind::rule : Edge::Kind::token, 0, 0, n.first, to});
        return to;
      }
      case Grammar::Kind::sequence:
        for (const Grammar::Expr child : g.children(n)) from = build(g, child, from);
        return from;
      case Grammar::Kind::choice: {
        const int to = add();
        for (const Grammar::Expr child : g.children(n)) {
          const int start = add();
          at(from).empty.push_back(start);
          const int end = build(g, child, start);
          at(end).empty.push_back(to);
        }
        return to;
      }
      case Grammar::Kind::repeat: return build_repeat(g, n, from);
    }
    return from;
  }

  int build_repeat(const Grammar& g, const Grammar::Node& n, int from) {
    const Grammar::Expr body = g.children(n)[0];
    for (int i = 0; i < n.min; ++i) from = build(g, body, from);
    const int end = add();
    if (n.max < 0) {
      const int loop = add();  // a state of its own: nothing before it may come back
      at(from).empty.push_back(loop);
      at(loop).empty.push_back(end);
      const int again = build(g, body, loop);
      at(again).empty.push_back(loop);
      return end;
    }
    for (int i = n.min; i < n.max; ++i) {
      at(from).empty.push_back(end);
      const int start = add();
      at(from).empty.push_back(start);
      from = build(g, body, start);
    }
    at(from).empty.push_back(end);
    return end;
  }
};

// The states reachable from `set` without a byte, sorted.
void close(Nfa& nfa, std::vector<int>& set, std::vector<uint32_t>& seen, uint32_t& round, size_t& work) {
  ++round;
  for (const int s : set) seen[static_cast<size_t>(s)] = round;
  for (size_t i = 0; i < set.size(); ++i)
    for (const int to : nfa.at(set[i]).empty)
      if (seen[static_cast<size_t>(to)] != round) {
        seen[static_cast<size_t>(to)] = round;
        set.push_back(to);
      }
  std::sort(set.begin(), set.end());
  work += set.size();
  if (work > kMaxWork) fail("the grammar is too complex to be made deterministic");
}

}  // namespace

void Automaton::add_rule(const Grammar& grammar, const Grammar::Rule& rule) {
  Nfa nfa;
  const int start = nfa.add();
  const int end = nfa.build(grammar, rule.body, start);
  std::vector<uint32_t> seen(nfa.states.size(), 0);
  uint32_t round = 0;

  std::map<std::vector<int>, int> known;
  std::vector<const std::vector<int>*> subsets;
  const int first = n_states();
  const auto id_of = [&](std::vector<int> set) {
    close(nfa, set, seen, round, work_);
    const auto [entry, added] = known.try_emplace(std::move(set), first + static_cast<int>(known.size()));
    if (added) {
      if (states_.size() >= kMaxStates) fail("the grammar is too large: more than {} states", kMaxStates);
      subsets.push_back(&entry->first);
      states_.emplace_back();
    }
    return entry->second;
  };
  id_of({start});
  for (size_t i = 0; i < subsets.size(); ++i) {
    const std::vector<int>& subset = *subsets[i];
    State state;
    std::vector<Nfa::Edge> bytes;
    std::map<int, std::vector<int>> calls, tokens;
    std::vector<int> borders;
    for (const int s : subset) {
      state.final |= s == end;
      for (const Nfa::Edge& e : nfa.at(s).edges) {
        if (e.kind == Nfa::Edge::Kind::rule) calls[e.id].push_back(e.target);
        if (e.kind == Nfa::Edge::Kind::token) tokens[e.id].push_back(e.target);
        if (e.kind != Nfa::Edge::Kind::bytes) continue;
        bytes.push_back(e);
        borders.push_back(e.low);
        borders.push_back(e.high + 1);
      }
    }
    std::sort(borders.begin(), borders.end());
    borders.erase(std::unique(borders.begin(), borders.end()), borders.end());
    std::vector<ByteEdge> edges;
    for (size_t b = 0; b + 1 < borders.size(); ++b) {
      std::vector<int> targets;
      for (const Nfa::Edge& e : bytes)
        if (e.low <= borders[b] && borders[b] <= e.high) targets.push_back(e.target);
      work_ += bytes.size();
      if (targets.empty()) continue;
      std::sort(targets.begin(), targets.end());
      targets.erase(std::unique(targets.begin(), targets.end()), targets.end());
      const int target = id_of(std::move(targets));
      const auto low = static_cast<uint8_t>(borders[b]), high = static_cast<uint8_t>(borders[b + 1] - 1);
      if (!edges.empty() && edges.back().target == target && edges.back().high + 1 == low)
        edges.back().high = high;
      else
        edges.push_back({low, high, target});
    }
    state.bytes = static_cast<int>(byte_edges_.size());
    state.n_bytes = static_cast<int>(edges.size());
    byte_edges_.insert(byte_edges_.end(), edges.begin(), edges.end());
    state.calls = static_cast<int>(call_edges_.size());
    for (auto& [called, targets] : calls) call_edges_.push_back({called, id_of(targets)});
    state.n_calls = static_cast<int>(calls.size());
    state.tokens = static_cast<int>(token_edges_.size());
    for (auto& [token, targets] : tokens) token_edges_.push_back({token, id_of(targets)});
    state.n_tokens = static_cast<int>(tokens.size());
    states_[static_cast<size_t>(first) + i] = state;
  }
  const bool merged = merge_equal_states(first);
  for (int s = first; s < n_states() && rule.well_known != 0 && merged; ++s)
    states_[static_cast<size_t>(s)].well_known = rule.well_known << 16 | (s - first + 1);
  if (rule.counted) add_counter(rule, first);
}

// Moore's minimisation: states from which the same texts lead to the end become one, so that what is found out about one serves all. Long
// chains cost the square of their length and gain nothing: past a bound on the work states stay as they are (false).
bool Automaton::merge_equal_states(int first) {
  const auto n = states_.size() - static_cast<size_t>(first);
  const auto local = [&](int state) { return static_cast<size_t>(state - first); };
  std::vector<int> group(n, 0);
  for (size_t n_groups = 0;;) {
    // What tells states apart: their group so far, and the groups that their edges lead to.
    std::map<std::vector<int>, int> known;
    std::vector<int> next(n);
    for (size_t i = 0; i < n; ++i) {
      const int s = first + static_cast<int>(i);
      std::vector<int> key{group[i], final(s) ? 1 : 0};
      int low = -1, high = -1, target = -1;  // neighbouring edges into one group are one
      const auto flush = [&] {
        if (target >= 0) key.insert(key.end(), {low, high, target});
      };
      for (const ByteEdge& e : bytes(s)) {
        const int to = group[local(e.target)];
        if (to == target && e.low == high + 1) {
          high = e.high;
          continue;
        }
        flush();
        low = e.low;
        high = e.high;
        target = to;
      }
      flush();
      for (const CallEdge& e : calls(s)) key.insert(key.end(), {-2, e.start, group[local(e.target)]});
      for (const TokenEdge& e : tokens(s)) key.insert(key.end(), {-3, e.token, group[local(e.target)]});
      merge_work_ += key.size();
      next[i] = known.try_emplace(std::move(key), static_cast<int>(known.size())).first->second;
    }
    if (merge_work_ > kMaxMergeWork) return false;
    group = std::move(next);
    if (known.size() == n_groups) break;
    n_groups = known.size();
  }

  std::vector<State> merged;
  for (size_t i = 0; i < n; ++i) {
    if (group[i] != static_cast<int>(merged.size())) continue;  // groups are numbered in the order of their first states
    State state = states_[static_cast<size_t>(first) + i];
    int n_bytes = 0;
    for (int e = state.bytes; e < state.bytes + state.n_bytes; ++e) {
      ByteEdge edge = byte_edges_[static_cast<size_t>(e)];
      edge.target = first + group[local(edge.target)];
      ByteEdge& last = byte_edges_[static_cast<size_t>(state.bytes + std::max(n_bytes - 1, 0))];
      if (n_bytes > 0 && last.target == edge.target && last.high + 1 == edge.low)
        last.high = edge.high;
      else
        byte_edges_[static_cast<size_t>(state.bytes + n_bytes++)] = edge;
    }
    state.n_bytes = n_bytes;
    for (int e = state.calls; e < state.calls + state.n_calls; ++e) {
      int& target = call_edges_[static_cast<size_t>(e)].target;
      target = first + group[local(target)];
    }
    for (int e = state.tokens; e < state.tokens + state.n_tokens; ++e) {
      int& target = token_edges_[static_cast<size_t>(e)].target;
      target = first + group[local(target)];
    }
    merged.push_back(state);
  }
  states_.resize(static_cast<size_t>(first));
  states_.insert(states_.end(), merged.begin(), merged.end());
  return true;
}

// Closes the automaton of the body to a loop: what led to its end leads to its beginning, from where one byte leads out.
void Automaton::add_counter(const Grammar::Rule& rule, int first) {
  const int counter = static_cast<int>(counters_.size()), end = n_states();
  counters_.push_back({first, end, rule.min, rule.max});
  CACHALOT_CHECK(!final(first) && next(first, rule.end) < 0, "the body of a counted rule is empty, or begins with its end");
  for (int s = first; s < end; ++s) {
    State& state = states_[static_cast<size_t>(s)];
    CACHALOT_CHECK(state.n_calls + state.n_tokens == 0 && (!state.final || state.n_bytes == 0), "the body of a counted rule");
    state.counter = counter;
    for (int e = state.bytes; e < state.bytes + state.n_bytes; ++e)
      if (int& target = byte_edges_[static_cast<size_t>(e)].target; final(target)) target = first;
  }
  State& loop = states_[static_cast<size_t>(first)];
  std::vector<ByteEdge> edges(byte_edges_.begin() + loop.bytes, byte_edges_.begin() + loop.bytes + loop.n_bytes);
  edges.push_back({rule.end, rule.end, end});
  std::sort(edges.begin(), edges.end(), [](const ByteEdge& a, const ByteEdge& b) { return a.low < b.low; });
  loop.bytes = static_cast<int>(byte_edges_.size());
  loop.n_bytes = static_cast<int>(edges.size());
  byte_edges_.insert(byte_edges_.end(), edges.begin(), edges.end());
  states_.push_back({.final = true});
}

// A state from which no end can be reached would be a trap: edges to such states go. What remains of the root must have an end.
void Automaton::drop_endless(std::span<const int> starts) {
  // Backwards from the final states. A call needs two good states: the one to return to, and the start of the rule.
  struct Into {
    int from, other;  // other: -1, or what must be good too
  };
  std::vector<std::vector<Into>> into(states_.size());
  std::vector<bool> good(states_.size(), false);
  std::vector<int> found;
  for (int s = 0; s < n_states(); ++s) {
    for (const ByteEdge& e : bytes(s)) into[static_cast<size_t>(e.target)].push_back({s, -1});
    for (const TokenEdge& e : tokens(s)) into[static_cast<size_t>(e.target)].push_back({s, -1});
    for (const CallEdge& e : calls(s)) {
      const int start = starts[static_cast<size_t>(e.start)];
      into[static_cast<size_t>(e.target)].push_back({s, start});
      into[static_cast<size_t>(start)].push_back({s, e.target});
    }
    if (!final(s)) continue;
    good[static_cast<size_t>(s)] = true;
    found.push_back(s);
  }
  while (!found.empty()) {
    const auto at = static_cast<size_t>(found.back());
    found.pop_back();
    for (const Into& edge : into[at]) {
      if (good[static_cast<size_t>(edge.from)] || (edge.other >= 0 && !good[static_cast<size_t>(edge.other)])) continue;
      good[static_cast<size_t>(edge.from)] = true;
      found.push_back(edge.from);
    }
  }
  const auto compact = [&](auto& edges, int first, int& n, auto keep) {
    const auto begin = edges.begin() + first;
    n = static_cast<int>(std::stable_partition(begin, begin + n, keep) - begin);
  };
  for (State& s : states_) {
    compact(byte_edges_, s.bytes, s.n_bytes, [&](const ByteEdge& e) { return good[static_cast<size_t>(e.target)]; });
    compact(token_edges_, s.tokens, s.n_tokens, [&](const TokenEdge& e) { return good[static_cast<size_t>(e.target)]; });
    compact(call_edges_, s.calls, s.n_calls, [&](const CallEdge& e) {
      return good[static_cast<size_t>(e.target)] && good[static_cast<size_t>(starts[static_cast<size_t>(e.start)])];
    });
  }
  if (!good[static_cast<size_t>(root_)]) fail("the grammar matches no finite text");
}

void Automaton::resolve_calls(std::span<const int> starts) {
  for (CallEdge& e : call_edges_) e.start = starts[static_cast<size_t>(e.start)];
}

// A rule that can call itself before a byte was read would never stop calling.
void Automaton::refuse_left_recursion(std::span<const int> starts) const {
  const size_t n = starts.size();
  // Rules lie one after the other.
  const auto rule_of = [&](int state) {
    return static_cast<size_t>(std::upper_bound(starts.begin(), starts.end(), state) - starts.begin()) - 1;
  };
  std::vector<bool> nullable(n, false), reached(states_.size(), false);  // reached: from its rule's start, before a byte is read
  std::vector<std::vector<size_t>> first_calls(n);
  std::vector<std::vector<int>> behind(n);  // of each rule: states that are reached once it is known to be nullable
  std::vector<int> found;
  const auto reach = [&](int state) {
    if (reached[static_cast<size_t>(state)]) return;
    reached[static_cast<size_t>(state)] = true;
    found.push_back(state);
  };
  for (const int start : starts) reach(start);
  while (!found.empty()) {
    const int at = found.back();
    found.pop_back();
    const size_t rule = rule_of(at);
    for (const CallEdge& e : calls(at)) {
      const size_t called = rule_of(e.start);
      first_calls[rule].push_back(called);
      if (nullable[called])
        reach(e.target);
      else
        behind[called].push_back(e.target);
    }
    if (!final(at) || nullable[rule]) continue;
    nullable[rule] = true;
    for (const int state : behind[rule]) reach(state);
  }
  // Depth-first: a rule met again while it is still open is a cycle.
  std::vector<uint8_t> mark(n, 0);
  for (size_t root = 0; root < n; ++root) {
    std::vector<std::pair<size_t, size_t>> path{{root, 0}};
    if (mark[root] != 0) continue;
    mark[root] = 1;
    while (!path.empty()) {
      auto& [rule, next] = path.back();
      if (next == first_calls[rule].size()) {
        mark[rule] = 2;
        path.pop_back();
        continue;
      }
      const size_t called = first_calls[rule][next++];
      if (mark[called] == 1) fail("the grammar is left recursive: a rule calls itself before anything was matched");
      if (mark[called] == 0) {
        mark[called] = 1;
        path.emplace_back(called, 0);
      }
    }
  }
}

Automaton::Automaton(const Grammar& grammar) {
  std::vector<int> starts;
  for (const Grammar::Rule& rule : grammar.rules()) {
    if (rule.body < 0) fail("rule \"{}\" is used and never defined", printable(rule.name));
    starts.push_back(n_states());
    add_rule(grammar, rule);
  }
  root_ = starts[static_cast<size_t>(grammar.root)];
  drop_endless(starts);
  resolve_calls(starts);
  refuse_left_recursion(starts);
}

}  // namespace cachalot
