// From a weight's form to the kernel compiled for it.
#include "cuda/gemm_stream.cuh"
#include "cuda/gemm_tile.cuh"

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

}  // namespace cachalot::cuda
