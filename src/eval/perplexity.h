// Perplexity of a text under a model, by two methods that must not be compared with each other; every result carries its method's name.
#pragma once

#include <algorithm>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "model/decoder.h"

namespace cachalot {

enum class PerplexityMethod : uint8_t {
  // Consecutive windows of `window` tokens, the last partial one dropped, each run alone, behind BOS if there is one. All tokens of a
  // window are scored, but its first where nothing stands before it.
  windows,
  // llama-perplexity's: consecutive windows, the first token of each replaced by BOS when the model adds one; only the tokens of the
  // second half of a window are scored (positions window / 2 + 1 to the end).
  llama,
};
const char* name_of(PerplexityMethod method);

struct PerplexityOptions {
  PerplexityMethod method = PerplexityMethod::windows;
  int window = 512;
  int max_windows = 0;                                                    // 0: all
  int bos_id = -1;                                                        // -1: the method runs without BOS
  std::function<void(int done, int total, double running_ppl)> progress;  // after each window
  std::function<void(std::span<const float> logits)> on_scored;           // logits of each scored position, in order
};
// How many of `available` windows are scored.
inline int n_scored_windows(const PerplexityOptions& options, int available) {
  return options.max_windows > 0 ? std::min(options.max_windows, available) : available;
}
// "windows, 512 tokens, with BOS"
std::string describe(const PerplexityOptions& options);

// One window as a method cuts it: position p of `input`, from `first` on, predicts targets[p], where there is one.
struct ScoredWindow {
  std::vector<int> input, targets;
  int first = 0;
};
// Throws Error when the text is shorter than one window. available: windows that the text has.
std::vector<ScoredWindow> scored_windows(const Decoder& decoder, std::span<const int> tokens, const PerplexityOptions& options,
                                         int& available);

struct PerplexityResult {
  double mean_nll = 0.0;   // nats per scored token
  double ppl = 0.0;        // exp(mean_nll)
  double ppl_error = 0.0;  // one standard error of ppl
  int windows = 0, windows_available = 0;
  int64_t tokens = 0;  // scored
  std::string method;  // for people: name, window, BOS
};

// Throws Error when the text is shorter than one window, or a token id lies outside the vocabulary.
PerplexityResult perplexity(Ops& ops, const Decoder& decoder, std::span<const int> tokens, const PerplexityOptions& options);

// Logits f32 [n, vocab] of all positions of one sequence.
std::vector<float> sequence_logits(Ops& ops, const Decoder& decoder, std::span<const int> tokens);

}  // namespace cachalot
