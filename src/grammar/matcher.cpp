// Closure, steps and masks.
#include "grammar/matcher.h"

#include <algorithm>

#include "base/error.h"

namespace cachalot {
namespace {

constexpr int kMaxDepth = 1000;  // calls under way
constexpr size_t kFew = 256;     // tokens kept as a list
constexpr uint16_t kNever = 0xFFFF;

uint64_t mix(uint64_t a, uint64_t b) {  // the finaliser of MurmurHash3
  uint64_t x = a * 0x9E3779B97F4A7C15u ^ (b + 0x7F4A7C15u);
  x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCDu;
  x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53u;
  return x ^ (x >> 33);
}

}  // namespace

int CallStacks::push(int return_state, int below) {
  const uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(return_state)) << 32 | static_cast<uint32_t>(below);
  const int depth = below < 0 ? 1 : top(below).depth + 1;
  if (depth > kMaxDepth) return kTooDeep;
  const auto [entry, added] = by_key_.try_emplace(key, static_cast<int>(frames_.size()));
  if (added) frames_.push_back({return_state, below, depth, mix(static_cast<uint64_t>(return_state), hash(below))});
  return entry->second;
}

class CompiledGrammar::Shared {
 public:
  std::mutex mutex;
  std::unordered_map<int, std::shared_ptr<const StateTokens>> states;  // by Automaton::well_known; a fixed, small number
};

std::shared_ptr<CompiledGrammar::Shared> CompiledGrammar::make_shared_states() { return std::make_shared<Shared>(); }

CompiledGrammar::CompiledGrammar(const Grammar& grammar, std::shared_ptr<const TokenTrie> trie, std::vector<int> eos_ids, size_t budget,
                                 std::shared_ptr<Shared> shared)
    : automaton_(grammar), trie_(std::move(trie)), eos_ids_(std::move(eos_ids)), budget_(budget), shared_(std::move(shared)) {}

// Follows calls and returns until only states remain that read something.
void CompiledGrammar::close(Position& position, std::vector<Position::Item> items, CallStacks& stacks) const {
  for (size_t i = 0; i < items.size(); ++i) {
    const Position::Item item = items[i];
    const auto add = [&](int state, int stack) {
      const Position::Item next{state, stack};
      if (stack != CallStacks::kTooDeep && items.size() < kMaxItems && std::find(items.begin(), items.end(), next) == items.end())
        items.push_back(next);
    };
    if (!automaton_.bytes(item.state).empty() || !automaton_.tokens(item.state).empty()) position.items.push_back(item);
    for (const Automaton::CallEdge& call : automaton_.calls(item.state)) {
      // A call that nothing follows needs no place to return to. But a counting rule that stands at the end of what is known is one whose
      // count is unknown, and here it begins.
      const bool returns =
          !automaton_.ends(call.target) || (item.stack == CallStacks::kUnknown && automaton_.counter(call.start) != nullptr);
      add(call.start, returns ? stacks.push(call.target, item.stack) : item.stack);
    }
    if (!automaton_.final(item.state)) continue;
    if (item.stack < 0)
      position.ended = true;
    else
      add(stacks.top(item.stack).state, stacks.top(item.stack).below);
  }
}

Position CompiledGrammar::start(CallStacks& stacks) const {
  Position p;
  close(p, {{automaton_.root(), CallStacks::kEmpty}}, stacks);
  return p;
}

// One state over a byte; false when it does not fit. A counting rule at the end of what is known has no limits: they are looked at later.
bool CompiledGrammar::advance(Position::Item& item, uint8_t byte) const {
  const int next = automaton_.next(item.state, byte);
  if (next < 0) return false;
  if (const Automaton::Counter* counter = automaton_.counter(item.state); counter != nullptr && counter->loop == item.state) {
    const bool limited = item.stack != CallStacks::kUnknown;
    if (next == counter->end) {
      if (limited && item.count < counter->min) return false;
      item.count = 0;
    } else {
      if (limited && item.count >= counter->max) return false;
      ++item.count;
    }
  }
  item.state = next;
  return true;
}

Position CompiledGrammar::step(const Position& from, uint8_t byte, CallStacks& stacks) const {
  Position to;
  if (from.items.size() == 1) {  // by far the most frequent case: one state within a string or a literal
    Position::Item item = from.items[0];
    if (!advance(item, byte)) return to;
    if (automaton_.simple(item.state)) {
      to.items.push_back(item);
      return to;
    }
  }
  std::vector<Position::Item> items;
  for (Position::Item item : from.items)
    if (advance(item, byte) && std::find(items.begin(), items.end(), item) == items.end()) items.push_back(item);
  if (!items.empty()) close(to, std::move(items), stacks);
  return to;
}

Position CompiledGrammar::step_token(const Position& from, int token, CallStacks& stacks) const {
  Position to;
  std::vector<Position::Item> items;
  for (const Position::Item& item : from.items)
    for (const Automaton::TokenEdge& e : automaton_.tokens(item.state))
      if (e.token == token) items.push_back({e.target, item.stack});
  if (!items.empty()) close(to, std::move(items), stacks);
  return to;
}

// Walks the vocabulary's tree below a node from a position, and tells of each node that fits.
template <typename OnNode>
void CompiledGrammar::walk(int n, const Position& at, CallStacks& stacks, const OnNode& on_node) const {
  const int end = trie_->node(n).end;
  for (int c = n + 1; c < end; c = trie_->node(c).end) {
    const TokenTrie::Node& child = trie_->node(c);
    const Position next = step(at, child.byte, stacks);
    if (next.items.empty() && !next.ended) continue;
    on_node(c, at, next);
    if (c + 1 < child.end && !next.items.empty()) walk(c, next, stacks, on_node);
  }
}

std::shared_ptr<CompiledGrammar::StateTokens> CompiledGrammar::find_tokens(int state) const {
  auto made = std::make_shared<StateTokens>();
  const bool counts = automaton_.counter(state) != nullptr;
  const auto n_vocab = static_cast<size_t>(trie_->n_vocab());
  if (counts)
    made->rounds.assign(n_vocab, kNever);
  else
    made->mask.assign((n_vocab + 31) / 32, 0u);
  CallStacks stacks;
  Position start;
  start.items.push_back({state, CallStacks::kUnknown});
  walk(0, start, stacks, [&](int n, const Position& at, const Position& next) {
    const TokenTrie::Node& node = trie_->node(n);
    const int rounds = counts ? (next.items.empty() ? at : next).items[0].count : 0;
    if (next.ended && (counts || n + 1 < node.end)) made->returned.push_back({n, rounds});
    made->most_rounds = std::max(made->most_rounds, rounds);
    for (const int token : trie_->tokens(node)) {
      if (!counts)
        made->mask[static_cast<size_t>(token) / 32] |= 1u << (token % 32);
      else if (!next.ended)
        made->rounds[static_cast<size_t>(token)] = static_cast<uint16_t>(rounds);
    }
  });
  if (counts) return made;
  size_t n = 0;
  for (const uint32_t word : made->mask) n += static_cast<size_t>(__builtin_popcount(word));
  if (n <= kFew) {
    for (size_t w = 0; w < made->mask.size(); ++w)
      for (uint32_t bits = made->mask[w]; bits != 0; bits &= bits - 1) made->few.push_back(static_cast<int>(w * 32) + __builtin_ctz(bits));
    made->mask = {};
  }
  return made;
}

std::shared_ptr<const CompiledGrammar::StateTokens> CompiledGrammar::tokens_of(int state) const {
  const int well_known = automaton_.well_known(state);
  {
    const std::lock_guard lock(well_known != 0 ? shared_->mutex : mutex_);
    const auto& states = well_known != 0 ? shared_->states : states_;
    const auto found = states.find(well_known != 0 ? well_known : state);
    if (found != states.end()) return found->second;
  }
  const std::shared_ptr<const StateTokens> made = find_tokens(state);
  if (well_known != 0) {
    const std::lock_guard lock(shared_->mutex);
    return shared_->states.emplace(well_known, made).first->second;
  }
  const std::lock_guard lock(mutex_);
  make_room(made->bytes());
  if (states_.emplace(state, made).second) kept_ += made->bytes();
  return made;
}

void CompiledGrammar::make_room(size_t bytes) const {
  if (kept_ + bytes <= budget_) return;
  states_.clear();
  masks_.clear();
  kept_ = 0;
}

std::shared_ptr<const TokenMask> CompiledGrammar::make_mask(const Position& at, CallStacks& stacks) const {
  auto out = std::make_shared<TokenMask>((static_cast<size_t>(trie_->n_vocab()) + 31) / 32, 0u);
  const auto set = [&](int token) {
    if (token >= 0 && token < trie_->n_vocab()) (*out)[static_cast<size_t>(token) / 32] |= 1u << (token % 32);
  };
  for (const Position::Item& item : at.items) {
    for (const Automaton::TokenEdge& e : automaton_.tokens(item.state)) set(e.token);
    if (automaton_.bytes(item.state).empty()) continue;
    const auto known = tokens_of(item.state);
    const Automaton::Counter* counter = automaton_.counter(item.state);
    const int left = counter != nullptr ? counter->max - item.count : 0, missing = counter != nullptr ? counter->min - item.count : 0;
    for (const int token : known->few) set(token);
    for (size_t w = 0; w < known->mask.size(); ++w) (*out)[w] |= known->mask[w];
    const auto most = static_cast<uint16_t>(std::min<int>(left, kNever - 1));
    for (size_t w = 0; w * 32 < known->rounds.size(); ++w) {
      uint32_t bits = 0;
      for (size_t i = 0; i < 32 && w * 32 + i < known->rounds.size(); ++i)
        bits |= static_cast<uint32_t>(known->rounds[w * 32 + i] <= most) << i;
      (*out)[w] |= bits;
    }
    if ((item.stack < 0 && counter == nullptr) || known->returned.empty()) continue;
    Position behind;
    if (item.stack >= 0) close(behind, {{stacks.top(item.stack).state, stacks.top(item.stack).below}}, stacks);
    for (const StateTokens::Return& r : known->returned) {
      if (counter != nullptr && (r.rounds > left || r.rounds < missing)) continue;
      if (counter != nullptr)
        for (const int token : trie_->tokens(trie_->node(r.node))) set(token);
      walk(r.node, behind, stacks, [&](int n, const Position&, const Position&) {
        for (const int token : trie_->tokens(trie_->node(n))) set(token);
      });
    }
  }
  if (at.ended)
    for (const int eos : eos_ids_) set(eos);
  return out;
}

// Counts that allow the same tokens have equal keys: no token sees further than the most rounds that one begins.
uint64_t CompiledGrammar::count_key(const Position::Item& item) const {
  const Automaton::Counter* counter = automaton_.counter(item.state);
  if (counter == nullptr) return 0;
  const int most = tokens_of(item.state)->most_rounds + 1;
  const auto clamped = [&](int n) { return static_cast<uint64_t>(std::clamp(n, 0, most)); };
  return 1 + (clamped(counter->max - item.count) << 32 | clamped(counter->min - item.count));
}

std::shared_ptr<const TokenMask> CompiledGrammar::mask(const Position& at, CallStacks& stacks) const {
  Key key{at.ended ? 1u : 0u, at.ended ? 3u : 2u};
  std::vector<std::pair<int, uint64_t>> parts;
  for (const Position::Item& item : at.items) parts.emplace_back(item.state, mix(stacks.hash(item.stack), count_key(item)));
  std::sort(parts.begin(), parts.end());
  for (const auto& [state, stack] : parts) {
    key.a = mix(key.a, mix(static_cast<uint64_t>(state), stack));
    key.b = mix(key.b ^ 0x5851F42D4C957F2Du, mix(stack, static_cast<uint64_t>(state) + 0x14057B7Eu));
  }
  {
    const std::lock_guard lock(mutex_);
    const auto found = masks_.find(key);
    if (found != masks_.end()) return found->second;
  }
  auto made = make_mask(at, stacks);
  const std::lock_guard lock(mutex_);
  const size_t bytes = made->size() * 4 + 128;
  make_room(bytes);
  if (masks_.emplace(key, made).second) kept_ += bytes;
  return made;
}

}  // namespace cachalot
