// Codes of 4 bits in groups of 128 times up to 8 rows of x, where there are so many rows of weights that every warp has some of its own: a
// block per multiprocessor, whose warps walk over row tiles and never meet. x is made whole numbers once, in shared memory, while the first
// weights are under way; the codes go to the integer tensor cores as they are.
#include "cuda/linear_few.h"

#include "cuda/whole_step.cuh"

namespace cachalot::cuda {
namespace {

constexpr int kMostWarps = 20, kLeastWarps = 12, kDepth = 4, kRows = 8;

size_t shared_bytes(const LinearFewArgs& a) {
  return static_cast<size_t>(a.n_rows) * static_cast<size_t>(a.w.cols * 2 + a.w.cols / WholeStep::kCols * 8);
}

template <bool kTwo>  // more than four rows of x
__global__ __launch_bounds__(kMostWarps * 32, 1) void linear_few_kernel(const __grid_constant__ LinearFewArgs a) {
  extern __shared__ __align__(16) uint8_t shared[];
  pdl_trigger();
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31, g = lane >> 2, c = lane & 3;
  const int n_warps = static_cast<int>(blockDim.x) >> 5, n_steps = a.w.cols / WholeStep::kCols, n_tiles = a.w.out / kRecordRows;
  const int stride = static_cast<int>(gridDim.x) * n_warps, tile_bytes = n_steps * WholeStep::kBytes;
  int tile = static_cast<int>(blockIdx.x) * n_warps + warp;
  const uint8_t* from = a.w.data + static_cast<int64_t>(tile) * tile_bytes;
  WholeStep w[kDepth];
#pragma unroll
  for (int u = 0; u < kDepth; ++u) w[u].load(tile < n_tiles, from + u * WholeStep::kBytes, lane);
  pdl_wait();

  const int row_bytes = a.w.cols * 2, parts = a.w.cols / 8;
  float2* groups = reinterpret_cast<float2*>(shared + a.n_rows * row_bytes);
  for (int base = thread - lane; base < a.n_rows * parts; base += n_warps * 32) {  // a warp's 32 parts are of one row
    const int row = base / parts, i = base % parts + lane;
    const WholePart part = whole_part<WholeStep::kCols>(load16(static_cast<const bf16*>(a.x) + row * a.x_stride + i * 8));
    store_whole(shared + row * row_bytes, i, part);
    if (lane % (WholeStep::kCols / 8) == 0) groups[row * n_steps + i / (WholeStep::kCols / 8)] = part.group;
  }
  __syncthreads();

  constexpr int kSets = kTwo ? 2 : 1;
  const uint8_t* x_at[kSets];
  const float2* group_at[kSets];
#pragma unroll
  for (int s = 0; s < kSets; ++s) {
    x_at[s] = shared + min(4 * s + (g >> 1), a.n_rows - 1) * row_bytes + (g & 1) * 64 + c * 16;
    group_at[s] = groups + min(4 * s + c, a.n_rows - 1) * n_steps;
  }
  for (; tile < n_tiles; tile += stride) {
    const uint8_t* next = from + static_cast<int64_t>(stride) * tile_bytes;
    float acc[kSets][2] = {};
    for (int step = 0; step < n_steps; step += kDepth) {
      const bool within = step + kDepth < n_steps;
      const uint8_t* ahead = within ? from + (step + kDepth) * WholeStep::kBytes : next;
#pragma unroll
      for (int u = 0; u < kDepth; ++u) {
        multiply_step<kSets>(
            w[u], kSets,
            [&](int s, int r) { return *reinterpret_cast<const uint4*>(x_at[s] + (step + u) * 2 * WholeStep::kCols + r * 128); },
            [&](int s) { return group_at[s][step + u]; }, acc);
        w[u].load(within || tile + stride < n_tiles, ahead + u * WholeStep::kBytes, lane);
      }
    }
#pragma unroll
    for (int s = 0; s < kSets; ++s)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (const int row = 4 * s + c; row < a.n_rows) a.y[row * a.y_stride + tile * kRecordRows + g + 8 * h] = acc[s][h];
    from = next;
  }
}

// Of the numbers of warps the one that leaves the fewest without a tile in the last turn.
int warps_for(int n_tiles, int n_blocks) {
  int best = kMostWarps, best_waste = n_tiles + n_blocks * kMostWarps;
  for (int n = kMostWarps; n >= kLeastWarps; --n) {
    const int all = n * n_blocks, waste = ceil_div(n_tiles, all) * all - n_tiles;
    if (waste < best_waste) best = n, best_waste = waste;
  }
  return best;
}

}  // namespace

bool linear_few_supports(const LinearFewArgs& a) {
  return a.w.tile == Tile::q4g128 && a.n_rows <= kRows && a.w.in == a.w.cols && a.w.cols % (kDepth * WholeStep::kCols) == 0 &&
         a.w.out % kRecordRows == 0 && a.w.out >= kRecordRows * kMostWarps * a.n_blocks && shared_bytes(a) <= a.most_shared;
}

cudaError_t launch_linear_few(const LinearFewArgs& a, cudaStream_t stream) {
  static const cudaError_t raised[2] = {
      cudaFuncSetAttribute(linear_few_kernel<false>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(a.most_shared)),
      cudaFuncSetAttribute(linear_few_kernel<true>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(a.most_shared))};
  for (const cudaError_t error : raised)
    if (error != cudaSuccess) return error;
  const int warps = warps_for(a.w.out / kRecordRows, a.n_blocks);
  return launch(a.n_rows > 4 ? linear_few_kernel<true> : linear_few_kernel<false>, dim3(static_cast<unsigned>(a.n_blocks)), warps * 32,
                shared_bytes(a), stream, a);
}

}  // namespace cachalot::cuda
