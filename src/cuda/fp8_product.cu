// Operands of the fp8 product: rows of x as E4M3 in groups of 128 with a scale each, and f8 records back into rows of E4M3 with a scale per
// 128 x 128 numbers, as weights in fp8_block are stored.
#include <cuda_fp8.h>

#include <cfloat>

#include "cuda/device.cuh"
#include "cuda/fp8_product.h"

namespace cachalot::cuda {
namespace {

// Half a warp per group of 128 columns, 16 groups per block. blockIdx.x: row.
constexpr int kThreads = 256;
__global__ __launch_bounds__(kThreads) void quantize_rows_kernel(const bf16* x, int64_t stride, Fp8Rows to) {
  pdl_trigger();
  pdl_wait();
  const int thread = static_cast<int>(threadIdx.x), row = static_cast<int>(blockIdx.x);
  const int col = (static_cast<int>(blockIdx.y) * kThreads + thread) * 8;
  const bool there = col < to.cols;
  const uint4 raw = there ? load16(x + row * stride + col) : make_uint4(0, 0, 0, 0);
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  float v[8], largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[i] = __uint_as_float((i & 1) == 0 ? words[i >> 1] << 16 : words[i >> 1] & 0xffff0000u);
    largest = fmaxf(largest, fabsf(v[i]));
  }
#pragma unroll
  for (int m = 8; m > 0; m >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, m));
  const float scale = fmaxf(largest / 448.0f, FLT_MIN), factor = 1.0f / scale;
  if (!there) return;
  uint32_t codes[2] = {};
#pragma unroll
  for (int i = 0; i < 8; i += 2)
    codes[i >> 2] |=
        static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(make_float2(v[i] * factor, v[i + 1] * factor), __NV_SATFINITE, __NV_E4M3))
        << (8 * (i & 3));
  *reinterpret_cast<uint2*>(to.codes + static_cast<int64_t>(row) * to.cols + col) = make_uint2(codes[0], codes[1]);
  if ((thread & 15) == 0) to.scales[static_cast<int64_t>(col / 128) * to.scale_stride + row] = scale;
}

// A warp per two records, which share a scale.
__global__ __launch_bounds__(kThreads) void unpack_f8_kernel(const uint8_t* records, int out, Fp8Rows to) {
  pdl_trigger();
  pdl_wait();
  constexpr TileInfo kInfo = tile_info(Tile::f8);
  const int n_groups = to.cols / 128, lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, c = lane & 3;
  const int64_t pair = int64_t{blockIdx.x} * (kThreads / 32) + (threadIdx.x >> 5);
  const int tile = static_cast<int>(pair / n_groups), group = static_cast<int>(pair % n_groups);
  if (tile * kRecordRows >= out) return;
  const uint8_t* from = records + 2 * pair * kInfo.bytes;
  uint4 v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = *reinterpret_cast<const uint4*>(from + (i >> 1) * kInfo.bytes + 512 * (i & 1) + lane * 16);
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = tile * kRecordRows + g + 8 * h;
      if (row < out)
        *reinterpret_cast<uint2*>(to.codes + static_cast<int64_t>(row) * to.cols + group * 128 + 32 * i + 8 * c) =
            make_uint2(__byte_perm(h == 0 ? v[i].x : v[i].z, 0, 0x3120), __byte_perm(h == 0 ? v[i].y : v[i].w, 0, 0x3120));
    }
  if (lane == 0 && tile % 8 == 0)
    to.scales[static_cast<int64_t>(tile / 8) * to.scale_stride + group] = *reinterpret_cast<const float*>(from + kInfo.scale_at);
}

}  // namespace

cudaError_t launch_quantize_rows(Mat x, const Fp8Rows& to, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(x.rows), static_cast<unsigned>(ceil_div(x.cols, 8 * kThreads)));
  return launch(quantize_rows_kernel, grid, kThreads, 0, stream, static_cast<const bf16*>(x.data), x.stride, to);
}

cudaError_t launch_unpack_f8(const Segment& w, int matrix, const Fp8Rows& to, cudaStream_t stream) {
  const int pairs = ceil_div(w.out, kRecordRows) * (w.cols / 128);
  return launch(unpack_f8_kernel, dim3(static_cast<unsigned>(ceil_div(pairs, kThreads / 32))), kThreads, 0, stream,
                w.data + matrix * w.matrix_bytes, w.out, to);
}

}  // namespace cachalot::cuda
