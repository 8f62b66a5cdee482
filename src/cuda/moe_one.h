// The mixture of experts of one row, in one launch.
#pragma once

#include <cuda_runtime.h>

#include "cuda/kernels.h"

namespace cachalot::cuda {

// All segments have the same form of weights, in == cols, and rows in multiples of 16.
struct MoeOneArgs {
  Segment gate, down;                // of the experts
  const uint8_t* up = nullptr;       // rows like gate's
  Segment shared_gate, shared_down;  // no data: no shared expert
  const uint8_t* shared_up = nullptr;
  int first_gate = 0, first_down = 0;  // matrix of expert 0
  const int* ids = nullptr;            // [top_k]; -1: none
  const float* weights = nullptr;      // [top_k]
  int top_k = 0;
  const void* x = nullptr;                // bf16 [gate.cols], aligned to 16 bytes
  void* h = nullptr;                      // bf16 [top_k * inner + shared inner]: scratch
  void* y = nullptr;                      // bf16 [down.out]
  unsigned long long* barrier = nullptr;  // counts the blocks of all launches that have finished their part of h
  unsigned* drawn = nullptr;              // 0 between launches: the tasks that blocks have drawn
  int n_blocks = 0;                       // as many as the device has multiprocessors: all must run at once
  size_t most_shared = 0;                 // shared memory that a block may have
};
// False where the kernel cannot take them.
bool moe_one_supports(const MoeOneArgs& args);
cudaError_t launch_moe_one(const MoeOneArgs& args, cudaStream_t stream);

}  // namespace cachalot::cuda
