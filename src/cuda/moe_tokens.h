// The mixture of experts of up to 16 tokens up to the sum over the experts, in one launch; weights have codes of 4 bits in groups of 128
// (q4g128).
#pragma once

#include <cuda_runtime.h>

#include "cuda/kernels.h"
#include "cuda/moe_few.h"

namespace cachalot::cuda {

constexpr int kMostTokens = 16, kMostTokenPairs = 128;
constexpr int kMostListedExperts = 256;
constexpr int kListRows = 8;  // of x that an expert is multiplied with at once
constexpr int kMostLists = kMostTokenPairs + kMostTokens / kListRows;

struct MoeTokensArgs {
  Segment gate, down;                // of the experts
  const uint8_t* up = nullptr;       // rows like gate's
  Segment shared_gate, shared_down;  // no data: no shared expert
  const uint8_t* shared_up = nullptr;
  int first_gate = 0, first_down = 0;  // matrix of expert 0
  const int* ids = nullptr;            // [n_tokens, top_k]; -1: none
  int top_k = 0, n_tokens = 0;
  const void* x = nullptr;  // bf16 [n_tokens, gate.cols], rows aligned to 16 bytes
  int64_t x_stride = 0;
  WholeRows h, shared_h;      // scratch: inner rows of the pairs and of the tokens
  float* y = nullptr;         // [n_tokens * top_k, down.out], of pairs of experts >= 0
  float* shared_y = nullptr;  // [n_tokens, down.out]
  unsigned* state = nullptr;  // [kMoeTokensState], 0 between launches
  int n_blocks = 0;           // as many as the device has multiprocessors: all must run at once
  size_t most_shared = 0;     // shared memory that a block may have
};
constexpr int kMoeTokensState = 2 + kMostLists;  // blocks that have ended; tasks drawn; of each list the parts of h that are there
// False where the kernel cannot take them.
bool moe_tokens_supports(const MoeTokensArgs& args);
cudaError_t launch_moe_tokens(const MoeTokensArgs& args, cudaStream_t stream);

}  // namespace cachalot::cuda
