// MemoryPlan: how much of a device is left for KV pages once everything else has its place.
#pragma once

#include <string>

#include "runtime/runner.h"

namespace cachalot {

struct MemoryPlan {
  double utilization = 0.0;
  // Bytes. `other` is held by other programs, and by this one for anything but what is named here.
  size_t total = 0, other = 0, weights = 0, step = 0, graphs = 0;
  size_t kv = 0;  // what is left of utilization * total
  size_t block_bytes = 0;
  int n_blocks = 0, block_tokens = 0;

  [[nodiscard]] std::string text() const;  // one line, for people
};

// Measures, with the model loaded and before its cache is made: on a device with memory of its own the largest steps are run and the graphs
// recorded once, on a cache of one page; on the host, where that would take too long, the step's memory is estimated. Throws Error with all
// the numbers when not even one sequence of limits.max_sequence fits, or utilization is not between 0 and 1.
MemoryPlan plan_memory(Ops& ops, const Decoder& decoder, const RunnerLimits& limits, KvFormat format, int block_tokens, double utilization);

// The number of KV blocks of that plan.
inline int kv_blocks_that_fit(Ops& ops, const Decoder& decoder, const RunnerLimits& limits, KvFormat format, int block_tokens,
                              double utilization) {
  return plan_memory(ops, decoder, limits, format, block_tokens, utilization).n_blocks;
}

}  // namespace cachalot
