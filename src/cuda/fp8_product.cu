// Operands of the fp8 product: rows of x as E4M3 in groups of 128 with a scale each, and f8 records back into rows of E4M3 with a scale per
// 128 x 128 numbers, as weights in fp8_block are stored.
#include <cuda_fp8.h>

#include <cfloat>

#include "cuda/device.cuh"
#include "cuda/fp8_product.h"

namespace cachalot::cuda {
namespace {

// A warp per group of 128 columns, 8 groups per block. blockIdx.x: row.
constexpr int kThreads = 256;
__global__ __launch_bounds__(kThreads) void quantize_rows_kernel(const bf16* x, int64_t stride, Fp8Rows to) {
  pdl_trigger();
  pdl_wait();
  const int group = static_cast<int>(blockIdx.y) * (kThreads / 32) + (static_cast<int>(threadIdx.x) >> 5),
            row = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x) & 31, col = group * 128 + lane * 4;
  if (col >= to.cols) return;
  const uint2 pair = load8(x + row * stride + col);
  const float v[4] = {__uint_as_float(pair.x << 16), __uint_as_float(pair.x & 0xffff0000u), __uint_as_float(pair.y << 16),
                      __uint_as_float(pair.y & 0xffff0000u)};
  const float largest = warp_max(fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3]))));
  const float scale = fmaxf(largest / 448.0f, FLT_MIN), factor = 1.0f / scale;
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) codes |= static_cast<uint32_t>(__nv_cvt_float_to_fp8(v[i] * factor, __NV_SATFINITE, __NV_E4M3)) << (8 * i);
  *reinterpret_cast<uint32_t*>(to.codes + static_cast<int64_t>(row) * to.cols + col) = codes;
  if (lane == 0) to.scales[static_cast<int64_t>(group) * to.scale_stride + row] = scale;
}

// A warp per record.
__global__ __launch_bounds__(kThreads) void unpack_f8_kernel(const uint8_t* records, int out, Fp8Rows to) {
  pdl_trigger();
  pdl_wait();
  constexpr TileInfo kInfo = tile_info(Tile::f8);
  const int n_chunks = to.cols / kRecordCols, lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, c = lane & 3;
  const int64_t record = int64_t{blockIdx.x} * (kThreads / 32) + (threadIdx.x >> 5);
  const int tile = static_cast<int>(record / n_chunks), chunk = static_cast<int>(record % n_chunks);
  if (tile * kRecordRows >= out) return;
  const uint8_t* from = records + record * kInfo.bytes;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const uint4 v = *reinterpret_cast<const uint4*>(from + 512 * s + lane * 16);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = tile * kRecordRows + g + 8 * h;
      if (row < out)
        *reinterpret_cast<uint2*>(to.codes + static_cast<int64_t>(row) * to.cols + chunk * kRecordCols + 32 * s + 8 * c) =
            make_uint2(__byte_perm(h == 0 ? v.x : v.z, 0, 0x3120), __byte_perm(h == 0 ? v.y : v.w, 0, 0x3120));
    }
  }
  if (lane == 0 && tile % 8 == 0 && chunk % 2 == 0)
    to.scales[static_cast<int64_t>(tile / 8) * to.scale_stride + chunk / 2] = *reinterpret_cast<const float*>(from + kInfo.scale_at);
}

}  // namespace

cudaError_t launch_quantize_rows(Mat x, const Fp8Rows& to, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(x.rows), static_cast<unsigned>(ceil_div(x.cols, 128 * (kThreads / 32))));
  return launch(quantize_rows_kernel, grid, kThreads, 0, stream, static_cast<const bf16*>(x.data), x.stride, to);
}

cudaError_t launch_unpack_f8(const Segment& w, int matrix, const Fp8Rows& to, cudaStream_t stream) {
  const int records = ceil_div(w.out, kRecordRows) * (w.cols / kRecordCols);
  return launch(unpack_f8_kernel, dim3(static_cast<unsigned>(ceil_div(records, kThreads / 32))), kThreads, 0, stream,
                w.data + matrix * w.matrix_bytes, w.out, to);
}

}  // namespace cachalot::cuda
