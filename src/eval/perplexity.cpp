// Perplexity and logits of whole sequences, run in chunks whose logits fit a bounded buffer.
#include "eval/perplexity.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "runtime/runner.h"

namespace cachalot {
namespace {

constexpr size_t kLogitBytes = size_t{64} << 20;  // of one chunk

void check_ids(std::span<const int> tokens, int vocab) {
  for (size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] < 0 || tokens[i] >= vocab) fail("token {} of the input is id {}, expected 0 to {}", i, tokens[i], vocab - 1);
}

// Runs one sequence after the other through a cache that holds one.
class SequenceRunner {
 public:
  SequenceRunner(Ops& ops, const Decoder& decoder, int n_tokens)
      : ops_(ops),
        vocab_(decoder.config().vocab),
        chunk_(std::clamp(static_cast<int>(kLogitBytes / (static_cast<size_t>(vocab_) * sizeof(float))), 1, std::min(512, n_tokens))),
        cache_(ops, decoder.config(), ops.activation() == DType::bf16 ? KvFormat::bf16 : KvFormat::f32, 32, (n_tokens + 31) / 32),
        runner_(ops, decoder, cache_, {.max_tokens = chunk_, .max_seqs = 1, .max_logits = chunk_, .max_sequence = n_tokens}),
        rows_(static_cast<size_t>(chunk_) * static_cast<size_t>(vocab_)) {}

  // f(position, logits of that position) for each position, in order.
  template <typename F>
  void run(std::vector<int> tokens, F&& f) {
    Sequence sequence{std::move(tokens)};
    CACHALOT_CHECK(cache_.reserve(sequence, sequence.n_tokens()));
    while (sequence.n_computed < sequence.n_tokens()) {
      const int begin = sequence.n_computed, n = std::min(chunk_, sequence.n_tokens() - begin);
      const StepItem item{&sequence, n, WantLogits::all};
      const StepResult result = runner_.step({&item, 1});
      ops_.download(rows_.data(), result.logits.data, static_cast<size_t>(n) * static_cast<size_t>(vocab_) * sizeof(float));
      for (int i = 0; i < n; ++i)
        f(begin + i,
          std::span<const float>(rows_).subspan(static_cast<size_t>(i) * static_cast<size_t>(vocab_), static_cast<size_t>(vocab_)));
    }
    cache_.release(sequence);
  }

 private:
  Ops& ops_;
  int vocab_, chunk_;
  KvCache cache_;
  Runner runner_;
  std::vector<float> rows_;
};

double negative_log_likelihood(std::span<const float> logits, int token) {
  const float largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;  // of f32 exponentials: each is right to 1e-7 of itself, and so is their sum
  for (const float l : logits) sum += std::exp(l - largest);
  return std::log(sum) + static_cast<double>(largest) - static_cast<double>(logits[static_cast<size_t>(token)]);
}

}  // namespace

const char* name_of(PerplexityMethod method) { return method == PerplexityMethod::windows ? "windows" : "llama"; }

PerplexityResult perplexity(Ops& ops, const Decoder& decoder, std::span<const int> tokens, const PerplexityOptions& options) {
  const int window = options.window;
  if (window < 2) fail("the window is {} tokens, expected at least 2", window);
  if (window > decoder.max_positions()) fail("the window is {} tokens, but the model runs at most {}", window, decoder.max_positions());
  check_ids(tokens, decoder.config().vocab);
  PerplexityResult out;
  out.windows_available = static_cast<int>(tokens.size()) / window;
  out.windows = options.max_windows > 0 ? std::min(options.max_windows, out.windows_available) : out.windows_available;
  if (out.windows == 0) fail("the text has {} tokens, fewer than one window of {}", tokens.size(), window);
  out.method = fmt::format("{}, {} tokens, {} BOS", name_of(options.method), window, options.bos_id >= 0 ? "with" : "without");

  SequenceRunner runner(ops, decoder, window);
  double sum = 0.0, sum_of_squares = 0.0;
  for (int w = 0; w < out.windows; ++w) {
    const auto part = tokens.subspan(static_cast<size_t>(w) * static_cast<size_t>(window), static_cast<size_t>(window));
    std::vector<int> input(part.begin(), part.end());
    int first_scored = 0;  // position whose logits predict the first scored token
    int shift = 1;         // the token that position p predicts is part[p + shift]
    if (options.method == PerplexityMethod::windows && options.bos_id >= 0) {
      input.insert(input.begin(), options.bos_id);
      input.pop_back();
      shift = 0;
    } else if (options.method == PerplexityMethod::llama) {
      if (options.bos_id >= 0) input[0] = options.bos_id;
      first_scored = window / 2;
    }
    runner.run(std::move(input), [&](int position, std::span<const float> logits) {
      if (position < first_scored || position + shift >= window) return;
      const double nll = negative_log_likelihood(logits, part[static_cast<size_t>(position + shift)]);
      sum += nll;
      sum_of_squares += nll * nll;
      ++out.tokens;
    });
    if (options.progress) options.progress(w + 1, out.windows, std::exp(sum / static_cast<double>(out.tokens)));
  }
  const auto n = static_cast<double>(out.tokens);
  out.mean_nll = sum / n;
  out.ppl = std::exp(out.mean_nll);
  if (out.tokens > 1) out.ppl_error = out.ppl * std::sqrt(std::max(0.0, sum_of_squares / n - out.mean_nll * out.mean_nll) / (n - 1.0));
  return out;
}

std::vector<float> sequence_logits(Ops& ops, const Decoder& decoder, std::span<const int> tokens) {
  if (tokens.empty()) fail("no tokens were given");
  if (static_cast<int>(tokens.size()) > decoder.max_positions())
    fail("{} tokens were given, but the model runs at most {}", tokens.size(), decoder.max_positions());
  check_ids(tokens, decoder.config().vocab);
  const auto vocab = static_cast<size_t>(decoder.config().vocab);
  std::vector<float> out(tokens.size() * vocab);
  SequenceRunner runner(ops, decoder, static_cast<int>(tokens.size()));
  runner.run({tokens.begin(), tokens.end()}, [&](int position, std::span<const float> logits) {
    std::copy(logits.begin(), logits.end(), out.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(position) * vocab));
  });
  return out;
}

}  // namespace cachalot
