// What a step must read and compute, counted from the model, so that a speed can be held against the machine's peaks.
// docs/benchmarks.md has the definitions.
#pragma once

#include <array>
#include <map>
#include <span>
#include <string>

#include "model/decoder.h"

namespace cachalot {

// The weights of a model as its file stores them: filled while it loads (ModelOptions::on_linear).
class StoredWeights {
 public:
  void add(std::span<const LinearSource> sources, const Linear& packed);

  struct Weight {
    double bytes = 0.0;   // in the file, scales and biases included
    double params = 0.0;  // numbers
  };
  // Nothing for an absent Linear. A Linear that add() was not told of is a mistake.
  [[nodiscard]] Weight of(const Linear& w) const;
  // The format with the most bytes: "Q4_K".
  [[nodiscard]] std::string main_format() const;

 private:
  std::map<const Packed*, Weight> weights_;
  std::array<double, kNumFormats> bytes_of_format_{};
};

// The part of one sequence in a step: n_new tokens behind n_cached ones.
struct SequenceStep {
  int n_new = 0, n_cached = 0;
};

struct StepCost {
  double weight_bytes = 0.0, kv_bytes = 0.0;  // read
  double flops = 0.0;

  [[nodiscard]] double bytes() const { return weight_bytes + kv_bytes; }
  StepCost& operator+=(const StepCost& other);
};

class ModelCost {
 public:
  // kv_token_bytes: of one token in all layers.
  ModelCost(const Decoder& decoder, const StoredWeights& stored, double kv_token_bytes);

  [[nodiscard]] StepCost step(std::span<const SequenceStep> sequences, int n_logits) const;
  [[nodiscard]] double params() const { return total_.params; }
  [[nodiscard]] double stored_bytes() const { return total_.bytes; }

 private:
  using Weight = StoredWeights::Weight;
  void add_layer(const Layer& layer, const StoredWeights& stored);

  Config config_;
  double kv_token_bytes_;
  Weight total_;          // everything once
  Weight fixed_;          // read by every step and applied to every row
  Weight experts_;        // all routed ones
  Weight head_;           // read when logits are wanted, applied to their rows
  Weight kv_b_;           // of latent attention: both halves
  double embed_row_ = 0;  // bytes
};

}  // namespace cachalot
