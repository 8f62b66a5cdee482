// The launchers of the CUDA kernels: plain structs and a stream in, an error code out. Nothing here allocates or waits.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/layout.h"
#include "tensor/dtype.h"

namespace cachalot::cuda {

// A matrix on the device: [rows, cols], rows `stride` elements apart.
struct Mat {
  void* data = nullptr;
  DType type = DType::f32;
  int rows = 0, cols = 0;
  int64_t stride = 0;
};

// ---- elementwise.cu ----
cudaError_t launch_embed(const Segment& table, const int* ids, Mat x, cudaStream_t stream);
// heads rows of n per row of x and y: head h at column h * n.
cudaError_t launch_rmsnorm(Mat x, const float* w, float eps, Mat y, int heads, int n, cudaStream_t stream);
cudaError_t launch_add_rmsnorm(Mat residual, Mat delta, const float* w, float eps, Mat y, cudaStream_t stream);
cudaError_t launch_rope(Mat x, int heads, int head_dim, int64_t head_stride, const int* pos, const float* cos_sin, int64_t cos_sin_stride,
                        int rope_dim, bool interleaved, cudaStream_t stream);
cudaError_t launch_gather_rows(Mat x, const int* ids, Mat y, cudaStream_t stream);
cudaError_t launch_scatter_add_rows(Mat x, const int* ids, const float* weights, Mat y, cudaStream_t stream);
// h[t, i] = silu(gate_up[t, i]) * gate_up[t, inner + i]
cudaError_t launch_swiglu(Mat gate_up, Mat h, cudaStream_t stream);
// y = x converted: per head n numbers, then zeros up to `padded`. Heads begin x_head and y_head columns apart.
cudaError_t launch_copy_heads(Mat x, int x_head, Mat y, int y_head, int heads, int n, int padded, cudaStream_t stream);
// Copies `tail` numbers of each head: from x column h * (in + tail) + in to y column h * (out + tail) + out.
cudaError_t launch_copy_tails(Mat x, Mat y, int heads, int in, int out, int tail, cudaStream_t stream);
cudaError_t launch_fill(float* to, float value, int64_t n, cudaStream_t stream);

// ---- route.cu ----
struct RouteArgs {
  const float* logits = nullptr;  // [T, n_experts]
  int64_t logits_stride = 0;
  const float* bias = nullptr;  // [n_experts] or null
  int* ids = nullptr;           // [T, top_k]
  int64_t ids_stride = 0;
  float* weights = nullptr;  // [T, top_k]
  int64_t weights_stride = 0;
  int n_tokens = 0, n_experts = 0, top_k = 0, n_group = 1, topk_group = 1;
  int group_score = 0;  // 0 none, 1 max, 2 sum of the two largest
  bool sigmoid = false, normalise = false;
  float scale = 1.0f;
};
cudaError_t launch_route(const RouteArgs& args, cudaStream_t stream);

// Pairs (t, k), numbered t * top_k + k, sorted by expert and cut into tiles of at most `tile` pairs of one expert.
struct MoePlan {
  const int* ids = nullptr;  // [T, top_k], dense
  int n_pairs = 0, top_k = 0, n_experts = 0;
  int* order = nullptr;   // [n_pairs]
  int3* tiles = nullptr;  // [max_tiles] expert, begin in `order`, count; count 0 past the last
  int max_tiles = 0, tile = 0;
  bool streamed = true;       // few pairs per expert: for the streaming kernel
  bool clusters = false;      // the device has clusters of blocks (sm_90)
  unsigned* drawn = nullptr;  // two counters that become 0, or null
};
cudaError_t launch_moe_plan(const MoePlan& plan, cudaStream_t stream);

// ---- moe_combine.cu ----
struct CombineArgs {
  Mat pairs, shared;  // [T * top_k, n], f32 or bf16; f32 [T, n], or no data
  const int* ids = nullptr;
  Mat weights;  // f32 [T, top_k]
  Mat y;
  // Of the second call only.
  Mat residual;  // f32 [T, n]
  const float* norm = nullptr;
  float eps = 0.0f;
  bool clusters = false;  // the device has them (sm_90)
  bool alone = false;     // the experts' launch is better off when the launches behind this one do not wait beside it
};
// y[t] = sum_k weights[t, k] * pairs[t * top_k + k] + (shared[t] when it has data); pairs of experts < 0 are left out.
cudaError_t launch_moe_combine(const CombineArgs& args, cudaStream_t stream);
// residual[t] += that sum; y[t] = rmsnorm(residual[t]), in bf16.
bool combine_norm_supports(Mat residual, Mat y, bool clusters);
cudaError_t launch_moe_combine_norm(const CombineArgs& args, cudaStream_t stream);

// ---- GEMM ----
constexpr int kInlinePairs = 64;
// Where the rows of x and y of a product come from.
enum class Rowing : uint8_t {
  dense,       // row t
  heads,       // matrix h = blockIdx.y: columns at h * x_head, h * y_head
  moe_inline,  // blockIdx.y = pair; the first pair of each expert takes all of its pairs (at most kInlinePairs pairs)
  moe_tiles,   // blockIdx.y = tile of the plan
};
// Activations as the kernels on wgmma want them, for weights of one tile form: [tile][cols / 64][tile_rows][64], each piece of
// tile_rows x 128 bytes as it will lie in shared memory (128-byte swizzle), columns in the order of the records.
// For the kernel that reads weights in bf16 as they lie, in their own order.
enum class ColumnOrder : uint8_t { plain, records, q6, own };
// Experts in bf16 with so many rows per tile that both operands of wgmma are worth bringing to shared memory (moe_wide.cu).
constexpr bool is_wide(Tile tile, int tile_rows) { return tile == Tile::bf16 && tile_rows >= 64; }
constexpr ColumnOrder column_order(Tile tile, bool wide) {
  return wide ? ColumnOrder::own : tile == Tile::q6g16 ? ColumnOrder::q6 : ColumnOrder::records;
}
struct GemmArgs {
  Segment w;                      // rows [row_begin, ...) of y; with swiglu, gate rows
  const uint8_t* w_up = nullptr;  // swiglu: the up rows, in the same form
  int first_matrix = 0;
  const void* x = nullptr;  // bf16 [T, cols], rows aligned to 16 bytes (f32 allowed for the plain kernels)
  bool x_is_f32 = false;
  int64_t x_stride = 0;
  void* y = nullptr;
  bool y_is_f32 = false;
  int64_t y_stride = 0;
  int n_rows = 0;  // T (dense, heads, shared expert)
  float beta = 0.0f;
  const float* bias = nullptr;  // [out] or null
  bool swiglu = false;
  // wgmma: rows of x per block; x is in the blocked form of w. y_order: plain, or y is blocked likewise, y_chunks pieces of 64 columns.
  int tile_rows = 0;
  ColumnOrder y_order = ColumnOrder::plain;
  int y_chunks = 0;
  Rowing rowing = Rowing::dense;
  int n_heads = 1;
  int x_head = 0, y_head = 0;  // columns per head
  int tail = 0;                // heads, streamed, y in bf16: numbers copied behind each head\'s columns
  MoePlan moe;
  bool x_by_token = false;  // MoE: x row of pair p is p / top_k, otherwise p
  // MoE, streamed: the shared expert's product over rows 0 .. n_rows - 1 in the same launch; its tile form must be that of w.
  Segment shared_w;  // no data: none
  const uint8_t* shared_up = nullptr;
  const void* shared_x = nullptr;
  int64_t shared_x_stride = 0;
  void* shared_y = nullptr;  // of the type of y
  int64_t shared_y_stride = 0;
  int shared_slots = 0;  // blockIdx.y below this: the shared expert; set by the launcher
};
// Few rows: weights are streamed once. Dense formats bf16 and records.
cudaError_t launch_gemm_stream(const GemmArgs& args, cudaStream_t stream);
// Many rows: tiles of 128 outputs x 64 or 128 rows on the tensor cores.
cudaError_t launch_gemm_tile(const GemmArgs& args, cudaStream_t stream);
// The same on sm_90a. First the rows per block (0 < rows <= 128) and the number of tiles for these args, then x into its blocked form at
// `to` [n_tiles * rows, cols], then the product with x = to.
int wgmma_rows(const GemmArgs& args);
int wgmma_tiles(const GemmArgs& args, int rows);
cudaError_t launch_block_rows(const GemmArgs& args, void* to, cudaStream_t stream);
cudaError_t launch_gemm_wgmma(const GemmArgs& args, cudaStream_t stream);
// The same for products that goes_wide() holds for, without bias and beta.
cudaError_t launch_moe_wide(const GemmArgs& args, int n_multiprocessors, cudaStream_t stream);
inline bool goes_wide(const GemmArgs& args) { return args.rowing == Rowing::moe_tiles && is_wide(args.w.tile, args.moe.tile); }
// Any rows, f32 arithmetic, weights f32 or bf16: the slow and exact form.
cudaError_t launch_gemm_simt(const GemmArgs& args, cudaStream_t stream);

// ---- pack.cu ----
// The stored formats that have a record form; layouts as in tensor/format.h.
enum class PackFrom : uint8_t { none, q4_0, q4_1, q5_0, q8_0, q4_k, q6_k, int4_planar, fp8_block };
// Turns raw blocks on the device, one matrix, into records.
struct PackArgs {
  const uint8_t* data = nullptr;
  const uint8_t* scales = nullptr;
  const uint8_t* zeros = nullptr;
  PackFrom from = PackFrom::none;
  int out = 0, in = 0, group = 0;
  int64_t row_bytes = 0;
  uint8_t* to = nullptr;
  Tile tile = Tile::q4g32;
};
cudaError_t launch_pack(const PackArgs& args, cudaStream_t stream);

// The weights of one matrix as bf16 rows [out, cols].
cudaError_t launch_unpack(const Segment& w, int matrix, void* to, cudaStream_t stream);

}  // namespace cachalot::cuda
