// How far a model is from a base model over a text: from the base model's file of log-probabilities, or with both models at hand.
#pragma once

#include "eval/divergence.h"
#include "eval/perplexity.h"
#include "eval/sequence_runner.h"

namespace cachalot {

// Over the windows of the file, at the positions that it has. bos_id, max_windows and progress (whose number is the mean KL so far) of
// `options` count. Throws Error when vocabularies differ.
DivergenceMeter divergence_from_file(Ops& ops, const Decoder& decoder, const LogitFile& base, const PerplexityOptions& options);

// One window through two models in step. Both runners must have been made for equally many tokens and vocabularies.
void add_divergence(SequenceRunner& base, SequenceRunner& model, const ScoredWindow& window, DivergenceMeter& meter);

struct ModelOnOps {
  Ops& ops;
  const Decoder& decoder;
};
// Over the windows of a text, as `options` cut and score it.
DivergenceMeter divergence_between(const ModelOnOps& base, const ModelOnOps& model, std::span<const int> tokens,
                                   const PerplexityOptions& options);

}  // namespace cachalot
