// From a weight's form to the kernel compiled for it.
#include "cuda/gemm_stream.cuh"
#include "cuda/gemm_tile.cuh"
#include "cuda/gemm_wgmma.cuh"

namespace cachalot::cuda {

cudaError_t launch_gemm_stream(const GemmArgs& a, cudaStream_t stream) {
  const int rows = a.rowing == Rowing::dense || a.rowing == Rowing::heads ? a.n_rows : a.rowing == Rowing::moe_inline ? 8 : a.moe.tile;
  const int col_tiles = rows >= 32 ? 4 : (rows + 7) / 8;
  switch (a.w.tile) {
    case Tile::bf16: return launch_stream_bf16(a, col_tiles, stream);
    case Tile::q4g32: return launch_stream_q4g32(a, col_tiles, stream);
    case Tile::q4g64: return launch_stream_q4g64(a, col_tiles, stream);
    case Tile::q4g128: return launch_stream_q4g128(a, col_tiles, stream);
    case Tile::q5g32: return launch_stream_q5g32(a, col_tiles, stream);
    case Tile::q6g16: return launch_stream_q6g16(a, col_tiles, stream);
    case Tile::q8g32: return launch_stream_q8g32(a, col_tiles, stream);
    case Tile::f8: return launch_stream_f8(a, col_tiles, stream);
    case Tile::f32: break;
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_gemm_tile(const GemmArgs& a, cudaStream_t stream) {
  const int rows = a.rowing == Rowing::moe_tiles ? a.moe.tile : a.n_rows;
  switch (a.w.tile) {
    case Tile::bf16: return launch_tile_bf16(a, rows, stream);
    case Tile::q4g32: return launch_tile_q4g32(a, rows, stream);
    case Tile::q4g64: return launch_tile_q4g64(a, rows, stream);
    case Tile::q4g128: return launch_tile_q4g128(a, rows, stream);
    case Tile::q5g32: return launch_tile_q5g32(a, rows, stream);
    case Tile::q6g16: return launch_tile_q6g16(a, rows, stream);
    case Tile::q8g32: return launch_tile_q8g32(a, rows, stream);
    case Tile::f8: return launch_tile_f8(a, rows, stream);
    case Tile::f32: break;
  }
  return cudaErrorInvalidValue;
}

namespace {

// A lane per 16 bytes of the result: 8 lanes write a line, and their reads of four words each meet in the same line of x, which is 64
// columns of a row, put in the places of permuted_column. blockIdx.x: tile (z: head), blockIdx.y: 16 rows.
constexpr int kBlockRowsThreads = 256;
constexpr int64_t kStreamedBytes = 32 << 20;  // results of more bytes leave the L2 cache to x, whose rows are read several times
__global__ __launch_bounds__(kBlockRowsThreads) void block_rows_kernel(const __grid_constant__ GemmArgs a, uint8_t* to, ColumnOrder order) {
  pdl_trigger();
  pdl_wait();
  int begin = static_cast<int>(blockIdx.x) * a.tile_rows, count = 0;
  const int* list = nullptr;
  if (a.rowing == Rowing::moe_tiles) {
    const int3 tile = a.moe.tiles[blockIdx.x];
    begin = tile.y, count = tile.z, list = a.moe.order;
  } else {
    count = min(a.tile_rows, a.n_rows - begin);
  }
  const int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31, unit = lane & 7;
  const int n_chunks = a.w.cols / kRecordCols, first = static_cast<int>(blockIdx.y) * 16;
  const int64_t tile_at = static_cast<int64_t>(blockIdx.z * gridDim.x + blockIdx.x) * n_chunks;
  const bool streamed = static_cast<int64_t>(gridDim.z * gridDim.x) * a.tile_rows * n_chunks * 128 > kStreamedBytes;
  const int word = (unit >> 2) * 16 + permuted_word(order, unit & 3), step = permuted_step(order);
  for (int r = first + (lane >> 3); r < min(first + 16, count); r += 4) {
    int row = list != nullptr ? list[begin + r] : begin + r;
    if (a.x_by_token) row /= a.moe.top_k;
    const uint32_t* from =
        reinterpret_cast<const uint32_t*>(static_cast<const bf16*>(a.x) + row * a.x_stride + static_cast<int>(blockIdx.z) * a.x_head) +
        word;
    uint8_t* piece = to + (tile_at * a.tile_rows + r) * 128 + ((unit ^ (r & 7)) << 4);
#pragma unroll 4
    for (int chunk = warp; chunk < n_chunks; chunk += kBlockRowsThreads / 32) {
      const uint32_t* at = from + chunk * 32;
      const uint4 v = make_uint4(at[0], at[step], at[2 * step], at[3 * step]);
      uint4* there = reinterpret_cast<uint4*>(piece + static_cast<int64_t>(chunk) * a.tile_rows * 128);
      if (streamed)
        __stcs(there, v);
      else
        *there = v;
    }
  }
}

}  // namespace

// The largest tile that still gives most of 132 multiprocessors a block.
int wgmma_rows(const GemmArgs& a) {
  if (a.rowing == Rowing::moe_tiles) return a.moe.tile;
  const int blocks = ceil_div(a.w.out, a.swiglu ? 64 : 128) * a.n_heads;
  int rows = 128;
  while (rows > 32 && (rows / 2 >= a.n_rows || blocks * ceil_div(a.n_rows, rows) < 110)) rows /= 2;
  return rows;
}
int wgmma_tiles(const GemmArgs& a, int rows) {
  return a.rowing == Rowing::moe_tiles ? a.moe.max_tiles : ceil_div(a.n_rows, rows) * (a.rowing == Rowing::heads ? a.n_heads : 1);
}

cudaError_t launch_block_rows(const GemmArgs& a, void* to, cudaStream_t stream) {
  const int heads = a.rowing == Rowing::heads ? a.n_heads : 1;
  const dim3 grid(static_cast<unsigned>(wgmma_tiles(a, a.tile_rows) / heads), static_cast<unsigned>(a.tile_rows / 16),
                  static_cast<unsigned>(heads));
  return launch(block_rows_kernel, grid, kBlockRowsThreads, 0, stream, a, static_cast<uint8_t*>(to), column_order(a.w.tile, goes_wide(a)));
}

cudaError_t launch_gemm_wgmma(const GemmArgs& a, cudaStream_t stream) {
  const int rows = a.tile_rows;
  switch (a.w.tile) {
    case Tile::bf16: return launch_wgmma_bf16(a, rows, stream);
    case Tile::q4g32: return launch_wgmma_q4g32(a, rows, stream);
    case Tile::q4g64: return launch_wgmma_q4g64(a, rows, stream);
    case Tile::q4g128: return launch_wgmma_q4g128(a, rows, stream);
    case Tile::q5g32: return launch_wgmma_q5g32(a, rows, stream);
    case Tile::q6g16: return launch_wgmma_q6g16(a, rows, stream);
    case Tile::q8g32: return launch_wgmma_q8g32(a, rows, stream);
    case Tile::f8: return launch_wgmma_f8(a, rows, stream);
    case Tile::f32: break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace cachalot::cuda
