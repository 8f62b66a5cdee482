// The search for a mix of types: how much each group of matrices hurts when it alone is rounded is measured on held-out text; then bits go
// where they save most. Groups are matrices of one kind in one layer (in one third of the layers, when there are many layers).
#pragma once

#include <functional>
#include <map>
#include <string>

#include "quant/quantize_model.h"

namespace cachalot {

struct MixGoal {
  double bits = 0.0;       // at most so many bits a weight, embedding and head aside; 0: no bound
  double ppl_ratio = 0.0;  // the smallest mix that is expected to stay below; 0: no bound
};

struct MixSearchResult {
  std::map<std::string, Scheme> schemes;  // of every matrix of the layers; for Recipe::exact
  double bits = 0.0;
  double expected_kl = 0.0, expected_ppl_ratio = 0.0;  // of rounding to nearest; GPTQ stays below
};

// Candidates are GGUF's: q3_k to q8_0, and where super-blocks do not divide iq4_nl to q8_0. What the recipe's rules name is left alone.
// Throws Error when there is no held-out text, or when no mix meets the goal.
MixSearchResult search_mix(const Checkpoint& base, const Config& config, Ops& ops, ThreadPool& pool, const Recipe& recipe,
                           const CalibrationSet& set, const MixGoal& goal,
                           const std::function<void(int done, int total, const std::string& what)>& progress);

}  // namespace cachalot
