// SequenceRunner: runs one token sequence after the other through a cache that holds one, in chunks whose logits fit a bounded buffer.
#pragma once

#include <span>
#include <vector>

#include "runtime/runner.h"

namespace cachalot {

class SequenceRunner {
 public:
  // Sequences of at most n_tokens. Both must outlive this. Throws Error when the model runs fewer.
  SequenceRunner(Ops& ops, const Decoder& decoder, int n_tokens);

  // Begins a sequence whose logits are wanted from position `first_wanted` on. Rows that the cache holds of an earlier sequence with the
  // same beginning are kept. Throws Error for ids outside the vocabulary and for too many tokens.
  void start(std::span<const int> tokens, int first_wanted = 0);
  // One more token at the end.
  void append(int token);

  struct Chunk {
    int begin = 0, n = 0;           // positions [begin, begin + n)
    std::span<const float> logits;  // [n, vocab], valid until the next call
    [[nodiscard]] std::span<const float> row(int i) const {
      const size_t width = logits.size() / static_cast<size_t>(n);
      return logits.subspan(static_cast<size_t>(i) * width, width);
    }
  };
  // The next wanted logits, in order; n is 0 once all tokens have run.
  Chunk next();

  // f(position, logits of that position) for each wanted position, in order.
  template <typename F>
  void run(std::span<const int> tokens, int first_wanted, F&& f) {
    start(tokens, first_wanted);
    for (Chunk chunk = next(); chunk.n > 0; chunk = next())
      for (int i = 0; i < chunk.n; ++i) f(chunk.begin + i, chunk.row(i));
  }

  // What the model adds to `prompt`, always the most likely token: n of them, or up to and without one of `end_ids`.
  std::vector<int> greedy(std::span<const int> prompt, int n, std::span<const int> end_ids);

  [[nodiscard]] int vocab() const { return vocab_; }

 private:
  void check_id(int token, size_t at) const;

  Ops& ops_;
  int vocab_, max_tokens_, chunk_;
  KvCache cache_;
  Runner runner_;
  Sequence sequence_;
  int first_wanted_ = 0;
  std::vector<float> rows_;
};

// Index of the largest logit, the first one of equals.
int argmax(std::span<const float> logits);
// log of the sum of exponentials.
double log_sum_exp(std::span<const float> logits);

}  // namespace cachalot
