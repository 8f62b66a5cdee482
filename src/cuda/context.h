// Errors of the CUDA runtime, and memory on the device.
#pragma once

#include <cuda_runtime.h>

#include "base/error.h"
#include "ops/ops.h"

namespace cachalot::cuda {

// Throws Error with what was tried. A failed launch or copy is not the user's input, but a server must be able to report it and go on.
inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) fail("CUDA: {} failed: {} ({})", what, cudaGetErrorString(error), cudaGetErrorName(error));
}
#define CACHALOT_CUDA_CHECK(call) ::cachalot::cuda::check_cuda((call), #call)

}  // namespace cachalot::cuda
