// gather_importance: runs a text through a model layer by layer and sums the squared inputs of every weight matrix, experts apart.
#pragma once

#include <functional>
#include <span>

#include "model/decoder.h"
#include "quant/imatrix.h"

namespace cachalot {

struct GatherOptions {
  int window = 512;     // consecutive windows of the text, the last partial one dropped, as llama-imatrix cuts it
  int max_windows = 0;  // 0: all
  int bos_id = -1;      // replaces the first token of each window; -1: none
  bool head = false;    // output.weight too
  std::function<void(int done, int total)> progress;  // layers
};

// MLA is run in its absorbed form, so attn_k_b and attn_v_b have entries for each head, and attn_kv_b one of the latent. Memory holds one
// layer and the residual stream of all tokens. `ops` must have host memory. Throws Error when the text is shorter than one window, when an
// id lies outside the vocabulary, or when a sum is not finite.
ImportanceMatrix gather_importance(const Checkpoint& checkpoint, const Config& config, Ops& ops, std::span<const int> tokens,
                                   const GatherOptions& options);

}  // namespace cachalot
