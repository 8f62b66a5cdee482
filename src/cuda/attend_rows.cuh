// Which sequence a query row belongs to, and how much context it sees. The index arrays of a batch are written between steps, before any
// kernel of the step begins (fetch_kernel triggers none), so that they may be read before pdl_wait.
#pragma once

#include "cuda/attention_kernels.h"
#include "cuda/device.cuh"

namespace cachalot::cuda {

struct RowContext {
  int seq = -1;
  int n_keys = 0;  // 0: padding, whose result is zero
  int n_old = 0;   // keys that were in the cache before this step
};
// All threads of the block call; `shared` holds three ints.
__device__ inline RowContext find_row(const AttendArgs& a, int row, int* shared) {
  if (threadIdx.x == 0) shared[0] = -1, shared[1] = shared[2] = 0;
  __syncthreads();
  const int absolute = a.row_begin + row;
  for (int s = a.seq_begin + static_cast<int>(threadIdx.x); s < a.seq_begin + a.n_seqs; s += static_cast<int>(blockDim.x)) {
    const int begin = a.q_start[s], end = a.q_start[s + 1], len = a.kv_len[s];
    if (begin <= absolute && absolute < end && len > 0)
      shared[0] = s, shared[1] = len - (end - 1 - absolute), shared[2] = len - (end - begin);
  }
  __syncthreads();
  return {shared[0], shared[1], shared[2]};
}

}  // namespace cachalot::cuda
