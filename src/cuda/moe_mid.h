// The mixture of experts of some rows per expert, whose weights have codes of 4 bits in groups of 128 (q4g128): more rows than moe_few.h
// is made for, and fewer than it takes to make converting the weights cheap.
#pragma once

#include <cuda_runtime.h>

#include "cuda/kernels.h"

namespace cachalot::cuda {

constexpr int kMidGroup = 128;  // columns that share a scale

// Tiles of up to 32 rows go to moe_mid_parts.cu, larger ones to moe_mid.cu.
constexpr bool mid_in_parts(int tile) { return tile <= 32; }
// Floats behind each group of a tile: the sums of the rows' columns, [rows]. With x in parts: and what the rows are to be multiplied by at
// the end, [rows], and what the products of this group are.
constexpr int mid_scales(int tile) { return mid_in_parts(tile) ? 2 * tile + 4 : tile; }

// Activations of a product: [tiles][cols / 128][2][rows of a tile][64] in bf16, each piece of rows x 128 bytes as it will lie in shared
// memory, and the sums of 128 columns [tiles][cols / 128][rows of a tile]; scaled as moe_mid.cu says. Or in parts, which are numbers of a
// byte: [tiles][cols / 128][2 parts][rows of a tile][128], and [tiles][cols / 128][mid_scales].
struct MidRows {
  uint8_t* x = nullptr;
  float* sums = nullptr;
};

// Where the pairs (t, k), numbered t * top_k + k, go: tile e < n_experts has the first rows of expert e, the tiles from there on what is
// left. launch_mid_rows makes it.
struct MidPlan {
  const int* ids = nullptr;  // [T, top_k], dense
  int n_pairs = 0, top_k = 0, n_experts = 0;
  int tile = 0;           // rows: 16, 24, 32, 48 or 64
  int max_tiles = 0;      // n_experts + n_pairs / tile
  int2* tiles = nullptr;  // [max_tiles] expert and number of rows, which is 0 behind the last
  int* pairs = nullptr;   // [max_tiles, tile]
  // For launch_mid_both: items drawn, tiles, and of each tile (behind the experts' those of the shared expert) how much of the first
  // product is done.
  int* state = nullptr;
  int n_states = 0;
};

// Of gate rows w and up rows: h = silu(x w^T) * (x up^T); otherwise y [rows, w.out] = x w^T.
struct MidProduct {
  Segment w;
  const uint8_t* up = nullptr;
  MidRows x, h;
  void* y = nullptr;  // of the experts bf16, of the shared expert f32
};
bool mid_supports(const MidProduct& product);
bool mid_supports(const MidPlan& plan);
struct MidArgs {
  MidProduct routed, shared;  // shared.w has no data: none
  int first_matrix = 0;       // of the expert 0
  MidPlan plan;
  int n_tokens = 0;  // rows of the shared expert, in tiles of plan.tile
  int n_multiprocessors = 0;
};
// Makes the plan, and puts the rows of the pairs' tokens in place, and those of the shared expert if it has memory.
cudaError_t launch_mid_rows(Mat x, const MidPlan& plan, MidRows routed, MidRows shared, cudaStream_t stream);
cudaError_t launch_mid_gate_up(const MidArgs& args, cudaStream_t stream);
cudaError_t launch_mid_down(const MidArgs& args, cudaStream_t stream);
// Both, for tiles in parts.
cudaError_t launch_mid_both(const MidArgs& gate_up, const MidArgs& down, cudaStream_t stream);

}  // namespace cachalot::cuda
