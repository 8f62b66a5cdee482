// How a request wants its tokens drawn. Public; src/ops/sampling.h says exactly what each number does.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace cachalot {

struct TokenBias {
  int token;
  float bias;  // added to the logit; -inf forbids the token
};

struct TokenLogprob {
  int token;
  float logprob;  // natural logarithm
};

struct SamplingOptions {
  float temperature = 1.0f;  // 0: the most likely token
  float top_p = 1.0f, min_p = 0.0f;
  float repetition = 1.0f, presence = 0.0f, frequency = 0.0f;  // penalties
  int top_k = 0;                                               // <= 0: off
  uint64_t seed = 0;
  std::vector<TokenBias> bias;
  int n_logprobs = -1;  // -1: none; 0: of the chosen token; n: also of the n most likely
};

// Says which tokens may come next: structured output. An object serves one request, and is called by one thread at a time.
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;
  // Bit t % 32 of word t / 32 is set when token t may come next; empty: any may. Valid until the next accept(). End-of-text tokens are
  // tokens like others: they are allowed exactly where the text may end.
  virtual std::span<const uint32_t> allowed() = 0;
  // Tells which token came. False when it was not allowed, which ends the request with an error.
  virtual bool accept(int token) = 0;
};

}  // namespace cachalot
