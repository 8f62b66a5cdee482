// Where the columns of blocked activations lie (see ColumnOrder).
#pragma once

#include "cuda/kernels.h"

namespace cachalot::cuda {

// Where column k of an activation lies for records of each order.
__device__ __forceinline__ int permuted_column(ColumnOrder order, int k) {
  const int i = k & 1;
  if (order == ColumnOrder::own) return k;
  if (order == ColumnOrder::q6) return (k & ~15) | ((k >> 1 & 1) << 3) | ((k >> 2 & 3) << 1) | i;
  return (k & ~31) | ((k >> 2 & 1) << 4) | ((k >> 1 & 1) << 3) | ((k >> 3 & 3) << 1) | i;
}

// Where the four words (of two columns) of unit j of 32 columns come from: this one and three more, `step` apart.
__device__ __forceinline__ int permuted_word(ColumnOrder order, int j) {
  return order == ColumnOrder::own ? 4 * j : order == ColumnOrder::q6 ? (j >> 1) * 8 + (j & 1) : j;
}
__device__ __forceinline__ int permuted_step(ColumnOrder order) { return order == ColumnOrder::own ? 1 : order == ColumnOrder::q6 ? 2 : 4; }

}  // namespace cachalot::cuda
