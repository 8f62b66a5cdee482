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

// A thread per 64 bytes: 32 columns as 16 words, rearranged as permuted_column says.
__global__ void permute_kernel(const uint4* x, int64_t x_stride, uint4* y, int64_t y_stride, int groups, bool q6) {
  pdl_trigger();
  pdl_wait();
  const int group = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (group >= groups) return;
  const uint4* from = x + static_cast<int64_t>(blockIdx.y) * x_stride + group * 4;
  uint4* to = y + static_cast<int64_t>(blockIdx.y) * y_stride + group * 4;
  const uint4 a = from[0], b = from[1], c = from[2], d = from[3];
  if (q6) {
    to[0] = make_uint4(a.x, a.z, b.x, b.z);
    to[1] = make_uint4(a.y, a.w, b.y, b.w);
    to[2] = make_uint4(c.x, c.z, d.x, d.z);
    to[3] = make_uint4(c.y, c.w, d.y, d.w);
  } else {
    to[0] = make_uint4(a.x, b.x, c.x, d.x);
    to[1] = make_uint4(a.y, b.y, c.y, d.y);
    to[2] = make_uint4(a.z, b.z, c.z, d.z);
    to[3] = make_uint4(a.w, b.w, c.w, d.w);
  }
}

}  // namespace

cudaError_t launch_permute(Mat x, Mat y, ColumnOrder order, cudaStream_t stream) {
  const int groups = x.cols / 32;
  return launch(permute_kernel, dim3(static_cast<unsigned>(ceil_div(groups, 64)), static_cast<unsigned>(x.rows)), 64, 0, stream,
                static_cast<const uint4*>(x.data), x.stride / 8, static_cast<uint4*>(y.data), y.stride / 8, groups,
                order == ColumnOrder::q6);
}

cudaError_t launch_gemm_wgmma(const GemmArgs& a, cudaStream_t stream) {
  int rows = a.moe.tile;
  if (a.rowing != Rowing::moe_tiles) {  // the largest tile that still gives most of 132 multiprocessors a block
    const int blocks = ceil_div(a.w.out, a.swiglu ? 64 : 128) * a.n_heads;
    for (rows = 128; rows > 32 && (rows / 2 >= a.n_rows || blocks * ceil_div(a.n_rows, rows) < 110); rows /= 2) {
    }
  }
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
