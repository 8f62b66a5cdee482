// An EngineCore on a ShadowModel with a clock of its own, and all its events by request.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "runtime/engine_core.h"
#include "shadow_model.h"

namespace cachalot::test {

inline ModelFacts small_facts() {
  ModelFacts facts{.name = "shadow", .vocab = 1000, .eos_ids = {0}};
  facts.max_context = 256;
  facts.n_blocks = 64;
  facts.block_tokens = 8;
  facts.max_requests = 4;
  facts.max_step_tokens = 64;
  return facts;
}

struct CoreRig {
  explicit CoreRig(const ModelFacts& facts = small_facts(), CoreOptions options = {}, const ShadowCosts& costs = {}) {
    options.check_invariants = facts.n_blocks <= 256;
    auto owned = std::make_unique<ShadowModel>(facts, &clock, costs, /*check_all_rows=*/facts.n_blocks <= 256);
    model = owned.get();
    core = std::make_unique<EngineCore>(std::move(owned), options, [this] { return clock; });
  }

  RequestId add(Request request) {
    check_request(request, core->info());
    const RequestId id = next_id++;
    core->add(
        id, std::move(request),
        [this](const TokenEvent& e) {
          events[e.request].push_back(e);
          times[e.request].push_back(clock);
        },
        clock);
    return id;
  }
  // Steps until nothing is left, or `limit` steps were taken.
  void run(int limit = 100000) {
    for (; limit > 0 && core->has_work(); --limit) core->step();
  }
  [[nodiscard]] std::vector<int> text(RequestId id) {
    std::vector<int> out;
    for (const TokenEvent& e : events[id])
      if (e.token >= 0 && !e.is_end_token) out.push_back(e.token);
    return out;
  }
  [[nodiscard]] const TokenEvent& last(RequestId id) { return events[id].back(); }
  [[nodiscard]] bool ended(RequestId id) { return !events[id].empty() && last(id).finish != FinishReason::none; }

  double clock = 0.0;
  ShadowModel* model = nullptr;
  std::unique_ptr<EngineCore> core;
  std::map<RequestId, std::vector<TokenEvent>> events;
  std::map<RequestId, std::vector<double>> times;
  RequestId next_id = 1;
};

// What a ShadowModel answers.
inline std::vector<int> foretold(const std::vector<int>& prompt, int n, int vocab = 1000) {
  uint64_t hash = 0;
  for (const int token : prompt) hash = extended(hash, token);
  std::vector<int> out;
  for (; n > 0; --n) {
    out.push_back(next_token(hash, vocab));
    hash = extended(hash, out.back());
  }
  return out;
}

// n tokens, different for different seeds.
inline std::vector<int> some_prompt(int n, int seed) {
  std::vector<int> out;
  for (int i = 0; i < n; ++i) out.push_back(1 + (seed * 131 + i * 17) % 999);
  return out;
}

}  // namespace cachalot::test
