// Windows through one model and a file, or through two models in step.
#include "eval/kl.h"

#include <algorithm>

#include "base/error.h"

namespace cachalot {

DivergenceMeter divergence_from_file(Ops& ops, const Decoder& decoder, const LogitFile& base, const PerplexityOptions& options) {
  if (decoder.config().vocab != base.vocab())
    fail("{}: a vocabulary of {}, but the model's has {}", base.name(), base.vocab(), decoder.config().vocab);
  if (base.window() > decoder.max_positions())
    fail("{}: windows of {} tokens, but the model runs at most {}", base.name(), base.window(), decoder.max_positions());
  const int n = n_scored_windows(options, base.n_windows());
  const auto size = static_cast<size_t>(base.window());
  SequenceRunner runner(ops, decoder, base.window());
  DivergenceMeter meter;
  for (int w = 0; w < n; ++w) {
    const std::span<const int> tokens = base.tokens().subspan(static_cast<size_t>(w) * size, size);
    std::vector<int> input(tokens.begin(), tokens.end());
    if (options.bos_id >= 0) input[0] = options.bos_id;
    const int first = base.window() / 2;
    runner.run(input, first, [&](int position, std::span<const float> logits) {
      if (position + 1 < base.window()) meter.add(base.row(w, position - first), logits, tokens[static_cast<size_t>(position) + 1]);
    });
    if (options.progress) options.progress(w + 1, n, meter.mean_kl());
  }
  return meter;
}

DivergenceMeter divergence_between(const ModelOnOps& base, const ModelOnOps& model, std::span<const int> tokens,
                                   const PerplexityOptions& options) {
  if (base.decoder.config().vocab != model.decoder.config().vocab)
    fail("the base model has a vocabulary of {}, the model of {}", base.decoder.config().vocab, model.decoder.config().vocab);
  int available = 0;
  const std::vector<ScoredWindow> windows = scored_windows(model.decoder, tokens, options, available);
  SequenceRunner first(base.ops, base.decoder, options.window), second(model.ops, model.decoder, options.window);
  DivergenceMeter meter;
  int done = 0;
  for (const ScoredWindow& window : windows) {
    add_divergence(first, second, window, meter);
    if (options.progress) options.progress(++done, static_cast<int>(windows.size()), meter.mean_kl());
  }
  return meter;
}

void add_divergence(SequenceRunner& base, SequenceRunner& model, const ScoredWindow& window, DivergenceMeter& meter) {
  base.start(window.input, window.first);
  model.start(window.input, window.first);
  for (;;) {
    const SequenceRunner::Chunk a = base.next(), b = model.next();
    CACHALOT_CHECK(a.n == b.n && a.begin == b.begin, "chunks of {} and {}", a.n, b.n);
    if (a.n == 0) return;
    for (int i = 0; i < a.n; ++i) {
      const auto position = static_cast<size_t>(a.begin + i);
      if (position < window.targets.size()) meter.add(a.row(i), b.row(i), window.targets[position]);
    }
  }
}

}  // namespace cachalot
