// What the sampling kernel takes and gives: one row of logits per block, its settings, and lists that lie in one uploaded array.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace cachalot::cuda {

struct SeenToken {
  int token;
  int in_output;  // occurrences among the generated tokens
};
struct BiasedToken {
  int token;
  float bias;
};
struct TopToken {
  int token;
  float logit;
};

// SampleParams of one row. `begin`s count elements of the lists of SampleArgs.
struct SampleRow {
  double temperature = 0.0;  // 0: greedy
  double top_p = 1.0;        // 1 and more: off
  double log_min_p = 0.0;    // log(min(1, min_p)); -inf: off
  uint64_t seed = 0, step = 0;
  int top_k = 0;  // <= 0: off
  float repetition = 1.0f, presence = 0.0f, frequency = 0.0f;
  int seen_begin = 0, n_seen = 0;
  int bias_begin = 0, n_bias = 0;
  int allowed_begin = 0, n_allowed = -1;  // words; -1: every token may come
  int n_logprobs = -1, top_begin = 0;     // as in SampleParams; n_logprobs <= kMostTop
};
constexpr int kMostTop = 1024;

struct SampleResult {
  int token = -1;  // -1: nothing was left to choose from
  int sound = 0;   // 0: a NaN, +inf, or only -inf
  // With n_logprobs >= 0, of the raw logits:
  float logit = 0.0f, highest = 0.0f;
  uint64_t sum = 0;  // of mass_of(highest - logit)
  int n_top = 0;
};

struct SampleArgs {
  float* logits = nullptr;  // changed while the kernel runs and put back
  int64_t stride = 0;
  int n_rows = 0, vocab = 0;
  const SampleRow* rows = nullptr;                   // [n_rows], in the host's memory
  const SeenToken* seen = nullptr;                   // distinct within a row
  const BiasedToken* bias = nullptr;                 // likewise
  const uint32_t* allowed = nullptr;                 // words of 32 tokens
  float *seen_kept = nullptr, *bias_kept = nullptr;  // scratch, as long as the lists
  SampleResult* results = nullptr;                   // [n_rows], and `top` as well, in the host's memory
  TopToken* top = nullptr;
  int* tokens = nullptr;  // [n_rows], on the device, or null
};
// clusters: the device has them (compute capability 9.0).
cudaError_t launch_sample(const SampleArgs& args, bool clusters, cudaStream_t stream);
// n words of the host's memory, which is aligned to 16 bytes and readable up to a multiple of them; a word w < -1 becomes drawn[-2 - w].
cudaError_t launch_fetch(int* to, const int* host, int n, const int* drawn, cudaStream_t stream);

}  // namespace cachalot::cuda
