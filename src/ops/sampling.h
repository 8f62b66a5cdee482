// Sampling: how a token is drawn from logits, defined so that every device and every batch gives the same token for the same logits.
//
// In this order: tokens that are not allowed are dropped; repetition, presence and frequency penalties on tokens seen; logit bias;
// temperature; top-k; top-p; min-p. Probabilities are whole numbers of 2^-46 of the largest (sampling_math.h), so that their sums have no
// order. Then the draw is an exponential race: the token with the largest log p_i - log(-log u_i), u_i = uniform(seed, step, i), from a
// counter-based generator. So no order of summation and no neighbour in the batch can change the result.
// Temperature 0 takes the largest logit, lowest id first.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cachalot/sampling.h"

namespace cachalot {

struct TokenCount {
  int token;
  int in_prompt;  // occurrences in the prompt
  int in_output;  // occurrences among the generated tokens
};
struct SampleParams {
  float temperature = 1.0f;                 // 0: greedy
  int top_k = 0;                            // <= 0: off
  float top_p = 1.0f;                       // smallest set of most likely tokens with at least this probability
  float min_p = 0.0f;                       // drop tokens less likely than min_p times the most likely
  float repetition = 1.0f;                  // divides positive, multiplies negative logits of tokens seen in prompt or output
  float presence = 0.0f, frequency = 0.0f;  // subtracted once, and per occurrence in the output
  uint64_t seed = 0;
  uint64_t step = 0;  // number of tokens that this sequence has generated
  std::span<const TokenCount> history;
  std::span<const TokenBias> bias;
  std::span<const uint32_t> allowed;  // bit t % 32 of word t / 32: token t may come; tokens beyond its end may not; empty: all may
  int n_logprobs = -1;  // -1: none; 0: of the chosen token; n: also of the n most likely. Of the raw logits, before all of the above.
};

struct Sampled {
  int token = -1;
  float logprob = 0.0f;
  std::vector<TokenLogprob> top;
  bool finite = true;  // false: the logits held a NaN or +inf, or nothing was left to choose from; token is -1
};

// The host implementation, the meaning of sample(). logits [n_vocab] is not changed.
Sampled sample_token(std::span<const float> logits, const SampleParams& params);

// The log probability of a logit, given the row's largest one and the sum of mass_of(highest - l) over its logits l.
float logprob_of(float logit, float highest, uint64_t sum);

// The generator: a uniform number in (0, 1) for (seed, step, token), from Philox-4x32-10 (Salmon et al. 2011) with the key (low, high word
// of the seed) and the counter (token / 4, 0, low, high word of the step). Word token % 4 of the result, w, gives ((w >> 9) + 0.5) / 2^23,
// which f32 holds exactly.
float sample_uniform(uint64_t seed, uint64_t step, uint32_t token);

}  // namespace cachalot
