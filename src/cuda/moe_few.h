// The mixture of experts of few rows per expert. Its weights have codes of 4 bits in groups of 128 (q4g128), or finer groups throughout
// (q4g32, q5g32, q6g16, q8g32), where each product and the shared expert's may have another form.
#pragma once

#include <cuda_runtime.h>

#include "cuda/kernels.h"

namespace cachalot::cuda {

constexpr int kFewRows = 4;            // of an expert that a block takes at once when the kernel itself sorts the pairs
constexpr int kMostFewColumns = 8192;  // of a matrix
constexpr int kMostFineColumns = 7168, kMostFineInner = 6144;  // likewise, of fine groups in the first product and in the second
constexpr int kWholeGroup = 128;                               // columns of x that share a scale

// Rows of activations as whole numbers: codes [rows, 2 cols] bytes, and what is known of their groups of columns, [rows, whole_groups(cols,
// fine)]: of each the sum and the scale / 16. For fine weights: of each the sums of the whole numbers of 32 columns, which are multiples of
// 1,024 and what is left, four numbers each; behind them the groups' scales.
struct WholeRows {
  uint8_t* codes = nullptr;
  float2* groups = nullptr;
};
constexpr int whole_groups(int cols, bool fine = false) {  // rows are multiples of 16 bytes
  const int n = cols / kWholeGroup;
  return fine ? n * 4 + (n + 3) / 4 * 2 : (n + 1) / 2 * 2;
}
// x is bf16, rows aligned to 16 bytes, cols in multiples of kWholeGroup.
cudaError_t launch_whole_rows(Mat x, WholeRows to, bool fine, cudaStream_t stream);

// Of gate rows w and up rows: h = silu(x w^T) * (x up^T) in whole numbers; otherwise y [rows, w.out] = x w^T.
struct FewProduct {
  Segment w;
  const uint8_t* up = nullptr;
  WholeRows x, h;
  float* y = nullptr;
};
struct FewArgs {
  FewProduct routed, shared;  // shared.w has no data: none
  bool fine = false;          // what the weights' groups are, in both products
  int first_matrix = 0;       // of the expert 0
  MoePlan moe;                // tile 8, 16 or, not fine, 32, or 0: at most kInlinePairs pairs, which the kernel itself sorts
  bool by_token = false;      // row of x for pair p: p / top_k, otherwise p
  int n_tokens = 0;           // rows of the shared expert
  // Set by the launchers.
  float tokens_per_pair = 0.0f;            // 1 / top_k
  int window = 0;                          // steps of kWholeGroup columns of x that a block holds at once
  int shared_slots = 0, shared_parts = 1;  // blockIdx.y below shared_slots: the shared expert
};
bool few_supports(const FewArgs& first, const FewArgs& second);  // the weights
// The routing must have been there before the launch before these two let others start, as it is after launch_whole_rows.
cudaError_t launch_few_gate_up(const FewArgs& args, cudaStream_t stream);
cudaError_t launch_few_down(const FewArgs& args, cudaStream_t stream);

}  // namespace cachalot::cuda
