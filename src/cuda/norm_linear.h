// The end of a layer and the first product of the next, for one row in one launch.
#pragma once

#include <cuda_runtime.h>

#include "cuda/kernels.h"

namespace cachalot::cuda {

struct NormLinearArgs {
  const float* residual = nullptr;  // [cols], aligned to 16 bytes, as delta and norm are
  const void* delta = nullptr;      // bf16 [cols]
  float* sum = nullptr;             // [cols]: residual + delta, or null
  const float* norm = nullptr;      // [cols]
  float eps = 0.0f;
  Segment w;  // in == cols
  int matrix = 0;
  const float* bias = nullptr;  // [out] or null
  void* y = nullptr;            // bf16 [out] = W rmsnorm(residual + delta) + bias
};
// False where the kernel cannot take them.
bool norm_linear_supports(const NormLinearArgs& args);
cudaError_t launch_norm_linear(const NormLinearArgs& args, cudaStream_t stream);

}  // namespace cachalot::cuda
