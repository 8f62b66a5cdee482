// Copies of boxes that a TensorMap describes, by the copy engine (sm_90).
#pragma once

#include "cuda/device.cuh"
#include "cuda/tensor_map.h"

namespace cachalot::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// The box whose first number is at (row, col); what lies outside of the matrix is zero.
__device__ __forceinline__ void copy_box(void* shared, const CUtensorMap& map, int col, int row, uint64_t* barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                   shared_address(shared)),
               "l"(&map), "r"(col), "r"(row), "r"(shared_address(barrier))
               : "memory");
}
#endif

}  // namespace cachalot::cuda
