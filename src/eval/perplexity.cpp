// Perplexity and logits of whole sequences, run in chunks whose logits fit a bounded buffer.
#include "eval/perplexity.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "eval/sequence_runner.h"

namespace cachalot {

const char* name_of(PerplexityMethod method) { return method == PerplexityMethod::windows ? "windows" : "llama"; }

std::vector<ScoredWindow> scored_windows(const Decoder& decoder, std::span<const int> tokens, const PerplexityOptions& options,
                                         int& available) {
  const int window = options.window;
  // Of a window of two tokens, llama-perplexity's method would score none.
  const int least = options.method == PerplexityMethod::llama ? 3 : 2;
  if (window < least) fail("the window is {} tokens, expected at least {}", window, least);
  if (window > decoder.max_positions()) fail("the window is {} tokens, but the model runs at most {}", window, decoder.max_positions());
  available = static_cast<int>(tokens.size()) / window;
  const int n = n_scored_windows(options, available);
  if (n == 0) fail("the text has {} tokens, fewer than one window of {}", tokens.size(), window);
  const bool llama = options.method == PerplexityMethod::llama;
  std::vector<ScoredWindow> out;
  for (int w = 0; w < n; ++w) {
    const auto part = tokens.subspan(static_cast<size_t>(w) * static_cast<size_t>(window), static_cast<size_t>(window));
    ScoredWindow one{.input = {part.begin(), part.end()}, .targets = {part.begin(), part.end()}, .first = llama ? window / 2 : 0};
    if (!llama && options.bos_id >= 0) {
      one.input.insert(one.input.begin(), options.bos_id);
      one.input.pop_back();
    } else {
      if (llama && options.bos_id >= 0) one.input[0] = options.bos_id;
      one.targets.erase(one.targets.begin());
    }
    out.push_back(std::move(one));
  }
  return out;
}

std::string describe(const PerplexityOptions& options) {
  return fmt::format("{}, {} tokens, {} BOS", name_of(options.method), options.window, options.bos_id >= 0 ? "with" : "without");
}

PerplexityResult perplexity(Ops& ops, const Decoder& decoder, std::span<const int> tokens, const PerplexityOptions& options) {
  PerplexityResult out;
  const std::vector<ScoredWindow> windows = scored_windows(decoder, tokens, options, out.windows_available);
  out.windows = static_cast<int>(windows.size());
  out.method = describe(options);
  SequenceRunner runner(ops, decoder, options.window);
  double sum = 0.0, sum_of_squares = 0.0;
  int done = 0;
  for (const ScoredWindow& window : windows) {
    runner.run(window.input, window.first, [&](int position, std::span<const float> logits) {
      if (position >= static_cast<int>(window.targets.size())) return;
      const int target = window.targets[static_cast<size_t>(position)];
      if (target < 0 || target >= runner.vocab()) fail("a token of the text is id {}, expected 0 to {}", target, runner.vocab() - 1);
      const double nll = log_sum_exp(logits) - static_cast<double>(logits[static_cast<size_t>(target)]);
      sum += nll;
      sum_of_squares += nll * nll;
      ++out.tokens;
      if (options.on_scored) options.on_scored(logits);
    });
    if (options.progress) options.progress(++done, out.windows, std::exp(sum / static_cast<double>(out.tokens)));
  }
  const auto n = static_cast<double>(out.tokens);
  out.mean_nll = sum / n;
  out.ppl = std::exp(out.mean_nll);
  if (out.tokens > 1) out.ppl_error = out.ppl * std::sqrt(std::max(0.0, sum_of_squares / n - out.mean_nll * out.mean_nll) / (n - 1.0));
  return out;
}

std::vector<float> sequence_logits(Ops& ops, const Decoder& decoder, std::span<const int> tokens) {
  if (tokens.empty()) fail("no tokens were given");
  const auto vocab = static_cast<size_t>(decoder.config().vocab);
  SequenceRunner runner(ops, decoder, static_cast<int>(tokens.size()));
  std::vector<float> out;
  out.reserve(tokens.size() * vocab);
  runner.run(tokens, 0, [&](int, std::span<const float> logits) { out.insert(out.end(), logits.begin(), logits.end()); });
  return out;
}

}  // namespace cachalot
