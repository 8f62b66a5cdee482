// TensorMap: how the copy engine (sm_90) finds tiles of a matrix in memory. Made on the host, passed to kernels by value.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace cachalot::cuda {

// A matrix in bf16 whose rows are `stride` numbers apart; both the matrix and its rows begin at multiples of 16 bytes.
struct TensorRows {
  const void* data = nullptr;
  int64_t n_rows = 0;
  int cols = 0;
  int64_t stride = 0;
};
constexpr int64_t kAnyRows = int64_t{1} << 31;  // where nothing outside is ever asked for

// Boxes of box_rows x 64 columns, stored with the 128-byte swizzle.
cudaError_t make_tensor_map(const TensorRows& rows, int box_rows, CUtensorMap& map);

}  // namespace cachalot::cuda
