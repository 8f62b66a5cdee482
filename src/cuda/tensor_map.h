// TensorMap: how the copy engine (sm_90) finds tiles of a matrix in memory. Made on the host, passed to kernels by value.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace cachalot::cuda {

// Of bf16 rows [any number, cols] without gaps: boxes of box_rows x 64 columns, stored with the 128-byte swizzle.
cudaError_t make_tensor_map(const void* rows, int cols, int box_rows, CUtensorMap& map);

}  // namespace cachalot::cuda
