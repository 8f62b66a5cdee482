// The tensors of a Hugging Face model, piece by piece, as writers need them: which there are, in which shapes.
#pragma once

#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "model/config.h"

namespace cachalot {

// A matrix, a stack of experts' matrices (each a tensor of its own in the files), or a vector.
struct HfEntry {
  std::string canonical;  // GGUF's name; hf_name_of gives the file's
  int n_matrices = 0;     // 0: a vector of `out` numbers
  int out = 0, in = 0;
};

// Embedding, final norm, and the head unless it is tied.
std::vector<HfEntry> hf_globals(const Config& config);
// One layer, latent attention with kv_b whole. Biases and the router's are there when `model` has them.
std::vector<HfEntry> hf_layer(const Config& config, const Checkpoint& model, int layer);
// The prediction layer behind the last one, or nothing when `model` has none.
std::vector<HfEntry> hf_prediction_layer(const Config& config, const Checkpoint& model);

}  // namespace cachalot
