// Runner: turns "these sequences, so many new tokens each" into a Batch, and runs the decoder on it.
#pragma once

#include <span>
#include <vector>

#include "runtime/kv_cache.h"

namespace cachalot {

// Which form of MLA the rows of a step take. `automatic` is the cheaper one by count of operations; the others are for tests.
enum class MlaForm : uint8_t { automatic, absorbed, expanded };

// Expanded is cheaper for n_q new tokens on n_cached cached ones when n_q (n_cached + n_q / 2) > q* n_cached, with
// q* = R (P + V) / (2R - P - V): 171 for DeepSeek-V2 and V3. See attention_mla.cpp for the letters.
bool prefers_expanded(const MlaDims& dims, int n_q, int n_cached);

enum class WantLogits : uint8_t { none, last, all };

struct StepItem {
  Sequence* sequence = nullptr;
  int n_new = 0;  // tokens [n_computed, n_computed + n_new) are run; they must be there, and their blocks reserved
  WantLogits want = WantLogits::last;
};

struct StepResult {
  View logits;                 // f32 [rows, vocab] on the device, valid until the next step
  std::vector<int> first_row;  // per item: its first row in `logits`; -1 when it wanted none
};

struct RunnerLimits {
  int max_tokens = 512;  // rows of a step
  int max_seqs = 1;
  int max_logits = 1;       // logit rows of a step
  int max_sequence = 4096;  // tokens of one sequence
};

class Runner {
 public:
  Runner(Ops& ops, const Decoder& decoder, KvCache& cache, const RunnerLimits& limits, MlaForm form = MlaForm::automatic);

  // One forward step; afterwards each item's n_computed has grown by n_new.
  StepResult step(std::span<const StepItem> items);
  [[nodiscard]] const RunnerLimits& limits() const { return limits_; }

 private:
  [[nodiscard]] bool short_queries(const StepItem& item) const;
  void lay_out(std::span<const StepItem> items, StepResult& result);

  Ops& ops_;
  const Decoder& decoder_;
  KvCache& cache_;
  RunnerLimits limits_;
  MlaForm form_;
  int max_blocks_;
  std::vector<int> host_;  // all index arrays of the batch, in the order of `offset_*`
  Buffer device_;          // the same on the device
  Buffer logits_;          // f32 [max_logits, vocab]
  Batch batch_;
};

}  // namespace cachalot
