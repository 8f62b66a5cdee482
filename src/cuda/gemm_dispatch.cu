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
    case Tile::q5g32: return launch_tile_q5g32(a, rows, stream);
    case Tile::q6g16: return launch_tile_q6g16(a, rows, stream);
    case Tile::q8g32: return launch_tile_q8g32(a, rows, stream);
    case Tile::f8: return launch_tile_f8(a, rows, stream);
    case Tile::f32: break;
  }
  return cudaErrorInvalidValue;
}

namespace {

// A thread per 64 bytes: 32 columns as 16 words of a row, in the places of permuted_column. blockIdx.x: tile (z: head), blockIdx.y: 16
// rows.
__global__ void block_rows_kernel(const __grid_constant__ GemmArgs a, uint8_t* to, bool q6) {
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
  const int groups = a.w.cols / 32, first = static_cast<int>(blockIdx.y) * 16, last = min(first + 16, count);
  const int64_t tile_at = static_cast<int64_t>(blockIdx.z * gridDim.x + blockIdx.x) * (groups / 2);
  for (int i = static_cast<int>(threadIdx.x); i < (last - first) * groups; i += static_cast<int>(blockDim.x)) {
    const int r = first + i / groups, group = i % groups;
    int row = list != nullptr ? list[begin + r] : begin + r;
    if (a.x_by_token) row /= a.moe.top_k;
    const uint4* from =
        reinterpret_cast<const uint4*>(static_cast<const bf16*>(a.x) + row * a.x_stride + static_cast<int>(blockIdx.z) * a.x_head) +
        group * 4;
    const uint4 v0 = from[0], v1 = from[1], v2 = from[2], v3 = from[3];
    uint8_t* piece = to + ((tile_at + (group >> 1)) * a.tile_rows + r) * 128;
    const auto put = [&](int unit, uint4 v) { *reinterpret_cast<uint4*>(piece + (((4 * (group & 1) + unit) ^ (r & 7)) << 4)) = v; };
    if (q6) {
      put(0, make_uint4(v0.x, v0.z, v1.x, v1.z));
      put(1, make_uint4(v0.y, v0.w, v1.y, v1.w));
      put(2, make_uint4(v2.x, v2.z, v3.x, v3.z));
      put(3, make_uint4(v2.y, v2.w, v3.y, v3.w));
    } else {
      put(0, make_uint4(v0.x, v1.x, v2.x, v3.x));
      put(1, make_uint4(v0.y, v1.y, v2.y, v3.y));
      put(2, make_uint4(v0.z, v1.z, v2.z, v3.z));
      put(3, make_uint4(v0.w, v1.w, v2.w, v3.w));
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
  return launch(block_rows_kernel, grid, 256, 0, stream, a, static_cast<uint8_t*>(to), column_order(a.w.tile) == ColumnOrder::q6);
}

cudaError_t launch_gemm_wgmma(const GemmArgs& a, cudaStream_t stream) {
  const int rows = a.tile_rows;
  switch (a.w.tile) {
    case Tile::bf16: return launch_wgmma_bf16(a, rows, stream);
    case Tile::q4g32: return launch_wgmma_q4g32(a, rows, stream);
    case Tile::q4g64: return launch_wgmma_q4g64(a, rows, stream);
    case Tile::q5g32: return launch_wgmma_q5g32(a, rows, stream);
    case Tile::q6g16: return launch_wgmma_q6g16(a, rows, stream);
    case Tile::q8g32: return launch_wgmma_q8g32(a, rows, stream);
    case Tile::f8: return launch_wgmma_f8(a, rows, stream);
    case Tile::f32: break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace cachalot::cuda
