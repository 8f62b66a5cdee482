// The mixture of experts of few rows per expert, whose weights have codes of 4 bits in groups of 128 (q4g128).
#pragma once

#include <cuda_runtime.h>

#include "cuda/kernels.h"

namespace cachalot::cuda {

constexpr int kFewRows = 8;       // of an expert that a block takes at once
constexpr int kWholeGroup = 128;  // columns of x that share a scale

// Rows of activations as whole numbers: codes [rows, 2 cols] bytes, and of each group of columns the sum and the scale.
struct WholeRows {
  uint8_t* codes = nullptr;
  float2* groups = nullptr;
};
// x, then more (no data: none): bf16, rows aligned to 16 bytes, cols in multiples of kWholeGroup.
cudaError_t launch_whole_rows(Mat x, WholeRows to, Mat more, WholeRows to_more, cudaStream_t stream);

// y [rows, w.out] = x w^T, or of gate rows w and up rows: silu(x w^T) * (x up^T).
struct FewProduct {
  Segment w;
  const uint8_t* up = nullptr;
  WholeRows x;
  void* y = nullptr;  // with gate and up bf16, otherwise f32; dense rows
};
bool few_supports(const FewProduct& product);
struct FewArgs {
  FewProduct routed, shared;               // shared.w has no data: none
  int first_matrix = 0;                    // of the expert 0
  MoePlan moe;                             // tile kFewRows, or 0: at most kInlinePairs pairs, which the kernel itself sorts
  bool by_token = false;                   // row of x for pair p: p / top_k, otherwise p
  int n_tokens = 0;                        // rows of the shared expert
  float tokens_per_pair = 0.0f;            // 1 / top_k; set by the launcher
  int shared_slots = 0, shared_parts = 1;  // blockIdx.y below shared_slots: the shared expert; set by the launcher
};
// The routing must have been there before the launch before this one let others start, as it is after launch_whole_rows.
cudaError_t launch_few_gate_up(const FewArgs& args, cudaStream_t stream);
cudaError_t launch_few_down(const FewArgs& args, cudaStream_t stream);

}  // namespace cachalot::cuda
