// The plain product in f32 arithmetic, for weights held in f32 or bf16 and activations in either: routers, the f32 mode, and whatever the
// tensor-core kernels do not take. Few rows: a warp per row of W. Many rows: tiles of 64 x 64 through shared memory.
#include "cuda/device.cuh"
#include "cuda/kernels.h"

namespace cachalot::cuda {
namespace {

__device__ __forceinline__ void store(const GemmArgs& a, float v, float up, int out, int64_t at) {
  if (a.bias != nullptr) v += a.bias[out];
  if (a.swiglu) {
    if (a.bias != nullptr) up += a.bias[a.w.out + out];
    v = v / (1.0f + expf(-v)) * up;
  }
  if (a.y_is_f32) {
    float* y = static_cast<float*>(a.y) + at;
    *y = a.beta != 0.0f ? fmaf(a.beta, *y, v) : v;
  } else {
    bf16* y = static_cast<bf16*>(a.y) + at;
    *y = from_f32<bf16>(a.beta != 0.0f ? fmaf(a.beta, to_f32(*y), v) : v);
  }
}

__device__ __forceinline__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ __forceinline__ float4 load4(const bf16* p) {
  const uint2 v = *reinterpret_cast<const uint2*>(p);
  return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u), __uint_as_float(v.y << 16),
                     __uint_as_float(v.y & 0xffff0000u));
}

// blockIdx.x: 8 rows of W, a warp each; blockIdx.y: row, (row, head) or pair.
template <typename W, typename X>
__global__ __launch_bounds__(256) void simt_row_kernel(const __grid_constant__ GemmArgs a) {
  pdl_trigger();
  pdl_wait();
  const int out = static_cast<int>(blockIdx.x) * 8 + (static_cast<int>(threadIdx.x) >> 5), lane = static_cast<int>(threadIdx.x) & 31;
  if (out >= a.w.out) return;
  int x_row = static_cast<int>(blockIdx.y), y_row = x_row, matrix = a.first_matrix, head = 0;
  if (a.rowing == Rowing::heads) {
    head = static_cast<int>(blockIdx.y) % a.n_heads;
    x_row = y_row = static_cast<int>(blockIdx.y) / a.n_heads;
    matrix += head;
  } else if (a.rowing != Rowing::dense) {
    const int expert = a.moe.ids[x_row];
    if (expert < 0) return;
    matrix += expert;
    if (a.x_by_token) x_row /= a.moe.top_k;
  }
  const int64_t at = matrix * a.w.matrix_bytes + static_cast<int64_t>(out) * a.w.cols * static_cast<int64_t>(sizeof(W));
  const W* w = reinterpret_cast<const W*>(a.w.data + at);
  const W* up = a.swiglu ? reinterpret_cast<const W*>(a.w_up + at) : nullptr;
  const X* x = static_cast<const X*>(a.x) + x_row * a.x_stride + (a.rowing == Rowing::heads ? head * a.x_head : 0);
  float sum = 0.0f, up_sum = 0.0f;
  int k0 = 0;
  if (sizeof(W) == 4 && up == nullptr && a.w.in % 4 == 0 && reinterpret_cast<uintptr_t>(x) % (4 * sizeof(X)) == 0) {
    // Four at a time, 8 loads in flight: routers are latency and nothing else.
    for (; k0 + 1024 <= a.w.in; k0 += 1024) {
      float4 wv[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) wv[i] = *reinterpret_cast<const float4*>(w + k0 + i * 128 + lane * 4);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 xv = load4(x + k0 + i * 128 + lane * 4);
        sum = fmaf(wv[i].x, xv.x, sum);
        sum = fmaf(wv[i].y, xv.y, sum);
        sum = fmaf(wv[i].z, xv.z, sum);
        sum = fmaf(wv[i].w, xv.w, sum);
      }
    }
  }
#pragma unroll 4
  for (int k = k0 + lane; k < a.w.in; k += 32) {
    const float v = to_f32(x[k]);
    sum = fmaf(to_f32(w[k]), v, sum);
    if (up != nullptr) up_sum = fmaf(to_f32(up[k]), v, up_sum);
  }
  sum = warp_sum(sum);
  up_sum = warp_sum(up_sum);
  if (lane == 0) store(a, sum, up_sum, out, y_row * a.y_stride + out + (a.rowing == Rowing::heads ? head * a.y_head : 0));
}

constexpr int kSide = 64, kDepth = 16;
// Dense only. 256 threads, 4 x 4 results each.
template <typename W, typename X>
__global__ __launch_bounds__(256) void simt_tile_kernel(const __grid_constant__ GemmArgs a) {
  __shared__ float ws[kDepth][kSide + 4], xs[kDepth][kSide + 4];
  pdl_trigger();
  pdl_wait();
  const int out0 = static_cast<int>(blockIdx.x) * kSide, row0 = static_cast<int>(blockIdx.y) * kSide,
            tx = static_cast<int>(threadIdx.x) & 15, ty = static_cast<int>(threadIdx.x) >> 4;
  const W* w = reinterpret_cast<const W*>(a.w.data + a.first_matrix * a.w.matrix_bytes);
  const X* x = static_cast<const X*>(a.x);
  float acc[4][4] = {};
  for (int k0 = 0; k0 < a.w.in; k0 += kDepth) {
    for (int i = static_cast<int>(threadIdx.x); i < kSide * kDepth; i += 256) {
      const int k = i % kDepth, r = i / kDepth;
      ws[k][r] = out0 + r < a.w.out && k0 + k < a.w.in ? to_f32(w[static_cast<int64_t>(out0 + r) * a.w.cols + k0 + k]) : 0.0f;
      xs[k][r] = row0 + r < a.n_rows && k0 + k < a.w.in ? to_f32(x[(row0 + r) * a.x_stride + k0 + k]) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      const float4 wv = *reinterpret_cast<const float4*>(&ws[k][tx * 4]), xv = *reinterpret_cast<const float4*>(&xs[k][ty * 4]);
      const float wr[4] = {wv.x, wv.y, wv.z, wv.w}, xr[4] = {xv.x, xv.y, xv.z, xv.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] = fmaf(xr[i], wr[j], acc[i][j]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = row0 + ty * 4 + i, out = out0 + tx * 4 + j;
      if (row < a.n_rows && out < a.w.out) store(a, acc[i][j], 0.0f, out, row * a.y_stride + out);
    }
}

template <typename W, typename X>
cudaError_t launch_typed(const GemmArgs& a, cudaStream_t stream) {
  if (a.rowing == Rowing::dense && a.n_rows > 64 && !a.swiglu)
    return launch(simt_tile_kernel<W, X>,
                  dim3(static_cast<unsigned>(ceil_div(a.w.out, kSide)), static_cast<unsigned>(ceil_div(a.n_rows, kSide))), 256, 0, stream,
                  a);
  const int y = a.rowing == Rowing::dense ? a.n_rows : a.rowing == Rowing::heads ? a.n_rows * a.n_heads : a.moe.n_pairs;
  if (y > 65535) return cudaErrorInvalidConfiguration;
  return launch(simt_row_kernel<W, X>, dim3(static_cast<unsigned>(ceil_div(a.w.out, 8)), static_cast<unsigned>(y)), 256, 0, stream, a);
}

}  // namespace

cudaError_t launch_gemm_simt(const GemmArgs& a, cudaStream_t stream) {
  if (a.w.tile == Tile::f32) return a.x_is_f32 ? launch_typed<float, float>(a, stream) : launch_typed<float, bf16>(a, stream);
  if (a.w.tile == Tile::bf16) return a.x_is_f32 ? launch_typed<bf16, float>(a, stream) : launch_typed<bf16, bf16>(a, stream);
  return cudaErrorInvalidValue;
}

}  // namespace cachalot::cuda
