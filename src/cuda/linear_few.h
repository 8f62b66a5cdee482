// Products of many rows of weights with few rows of x: the vocabulary matrix of a decode step.
#pragma once

#include "cuda/kernels.h"

namespace cachalot::cuda {

struct LinearFewArgs {
  Segment w;                // one matrix
  const void* x = nullptr;  // bf16
  int64_t x_stride = 0;
  float* y = nullptr;
  int64_t y_stride = 0;
  int n_rows = 0;
  int n_blocks = 0;        // the device's multiprocessors
  size_t most_shared = 0;  // dynamic shared memory that a block may have
};
bool linear_few_supports(const LinearFewArgs& args);
cudaError_t launch_linear_few(const LinearFewArgs& args, cudaStream_t stream);

}  // namespace cachalot::cuda
