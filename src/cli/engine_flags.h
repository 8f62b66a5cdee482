// Flags of commands that run many requests at once, and the engine options they make.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "cachalot/engine.h"
#include "cli/run_flags.h"

namespace cachalot {

struct EngineFlags {
  int max_num_seqs = 0, max_num_batched_tokens = 0;  // 0: what suits the device
  int max_draft_tokens = 4;
  double kv_cache_bytes = 0.0, swap_gib = 0.0;
  bool no_prefix_caching = false, batch_invariant = false;
  std::string speculation = "off";
};

// The largest numbers that the flags take.
struct EngineFlagLimits {
  int seqs = 4096, batched_tokens = 1 << 16;
};
void add_engine_flags(CLI::App& command, EngineFlags& flags, const EngineFlagLimits& limits = {});
// How the model must be loaded for such an engine.
ModelOptions model_options(const ModelFlags& model, const EngineFlags& flags);
EngineOptions many_requests(const ModelFlags& model, const EngineFlags& flags);

}  // namespace cachalot
