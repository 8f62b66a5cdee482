// The mixture of experts of many rows per expert (sm_90a), whose weights have codes of 4 bits.
#pragma once

#include <cuda_runtime.h>

#include "cuda/kernels.h"

namespace cachalot::cuda {

constexpr int kManyRows = 128;  // of x per tile

// x and the first product's y are blocked: bf16 [tiles][columns / 64][128 rows of a tile][64], each piece as it will lie in shared memory.
struct ManyProduct {
  Segment w;                    // gates, or down
  const uint8_t* up = nullptr;  // the first product: y = silu(x w^T) * (x up^T), otherwise y = x w^T
  const void* x = nullptr;
  void* y = nullptr;  // of the second product [rows, w.out], of pairs in bf16, of the shared expert in f32
};
bool many_supports(const Segment& w);

struct ManyArgs {
  ManyProduct routed, shared;  // shared.w has no data: none; it is of the same form as routed.w
  int first_matrix = 0;        // of the expert 0
  MoePlan plan;                // of tiles of kManyRows
  int n_tokens = 0;            // rows of the shared expert
  unsigned* drawn = nullptr;   // a counter that is 0: how many items blocks have gone on to
  int n_multiprocessors = 0;
};
cudaError_t launch_many_gate_up(const ManyArgs& args, cudaStream_t stream);
cudaError_t launch_many_down(const ManyArgs& args, cudaStream_t stream);

}  // namespace cachalot::cuda
