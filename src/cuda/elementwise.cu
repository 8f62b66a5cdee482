// The row-wise operations: embedding, norms, rope, gathers. One block or warp per row, f32 arithmetic.
#include "cuda/formats.cuh"
#include "cuda/kernels.h"

namespace cachalot::cuda {
namespace {

__global__ void embed_kernel(const Segment table, const int* ids, float* x, int64_t x_stride, int n) {
  pdl_trigger();
  pdl_wait();
  const int row = static_cast<int>(blockIdx.x), id = ids[row];
  for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) {
    float v = 0.0f;
    if (id >= 0 && id < table.out) {
      if (table.tile == Tile::f32)
        v = reinterpret_cast<const float*>(table.data)[static_cast<int64_t>(id) * table.cols + i];
      else if (table.tile == Tile::bf16)
        v = to_f32(reinterpret_cast<const bf16*>(table.data)[static_cast<int64_t>(id) * table.cols + i]);
      else
        v = record_weight(table.tile, table.data, table.cols, id, i);
    }
    x[row * x_stride + i] = v;
  }
}

// One block per (row, head). Up to 8 values per thread stay in registers.
constexpr int kNormThreads = 256, kNormValues = 8;

template <typename In, typename Out>
__global__ __launch_bounds__(kNormThreads) void rmsnorm_kernel(const In* x, int64_t x_stride, const float* w, float eps, Out* y,
                                                               int64_t y_stride, int n) {
  __shared__ float shared[33];
  pdl_trigger();
  const int thread = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
  float weight[kNormValues], v[kNormValues];
#pragma unroll
  for (int i = 0; i < kNormValues; ++i) weight[i] = i * step + thread < n ? w[i * step + thread] : 0.0f;
  pdl_wait();
  x += blockIdx.x * x_stride + static_cast<int64_t>(blockIdx.y) * n;
  y += blockIdx.x * y_stride + static_cast<int64_t>(blockIdx.y) * n;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kNormValues; ++i) {
    v[i] = i * step + thread < n ? to_f32(x[i * step + thread]) : 0.0f;
    sum += v[i] * v[i];
  }
  for (int i = kNormValues * step + thread; i < n; i += step) {
    const float u = to_f32(x[i]);
    sum += u * u;
  }
  const float factor = rsqrtf(block_sum(sum, shared) / static_cast<float>(n) + eps);
#pragma unroll
  for (int i = 0; i < kNormValues; ++i)
    if (i * step + thread < n) y[i * step + thread] = from_f32<Out>(v[i] * factor * weight[i]);
  for (int i = kNormValues * step + thread; i < n; i += step) y[i] = from_f32<Out>(to_f32(x[i]) * factor * w[i]);
}

template <typename Delta, typename Out>
__global__ __launch_bounds__(kNormThreads) void add_rmsnorm_kernel(float* residual, int64_t r_stride, const Delta* delta, int64_t d_stride,
                                                                   const float* w, float eps, Out* y, int64_t y_stride, int n) {
  __shared__ float shared[33];
  pdl_trigger();
  pdl_wait();
  residual += blockIdx.x * r_stride;
  delta += blockIdx.x * d_stride;
  y += blockIdx.x * y_stride;
  float sum = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kNormThreads) {
    const float v = residual[i] + to_f32(delta[i]);
    residual[i] = v;
    sum += v * v;
  }
  const float factor = rsqrtf(block_sum(sum, shared) / static_cast<float>(n) + eps);
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kNormThreads) y[i] = from_f32<Out>(residual[i] * factor * w[i]);
}

// The same for n <= 2048 in multiples of 8 and aligned rows: one pass, 8 values per thread in two vector loads.
template <typename Delta, typename Out>
__global__ __launch_bounds__(kNormThreads) void add_rmsnorm_wide_kernel(float* residual, int64_t r_stride, const Delta* delta,
                                                                        int64_t d_stride, const float* w, float eps, Out* y,
                                                                        int64_t y_stride, int n) {
  __shared__ float shared[33];
  pdl_trigger();
  const int at = static_cast<int>(threadIdx.x) * kNormValues;
  const bool mine = at < n;
  float weight[kNormValues], v[kNormValues];
  if (mine)
#pragma unroll
    for (int i = 0; i < kNormValues; i += 4) *reinterpret_cast<float4*>(weight + i) = *reinterpret_cast<const float4*>(w + at + i);
  pdl_wait();
  float sum = 0.0f;
  if (mine) {
    float* r = residual + blockIdx.x * r_stride + at;
    alignas(16) Delta d[kNormValues];
#pragma unroll
    for (int i = 0; i < static_cast<int>(kNormValues * sizeof(Delta)); i += 16)
      *reinterpret_cast<uint4*>(reinterpret_cast<char*>(d) + i) =
          *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(delta + blockIdx.x * d_stride + at) + i);
#pragma unroll
    for (int i = 0; i < kNormValues; i += 4) *reinterpret_cast<float4*>(v + i) = *reinterpret_cast<const float4*>(r + i);
#pragma unroll
    for (int i = 0; i < kNormValues; ++i) {
      v[i] += to_f32(d[i]);
      sum += v[i] * v[i];
    }
#pragma unroll
    for (int i = 0; i < kNormValues; i += 4) *reinterpret_cast<float4*>(r + i) = *reinterpret_cast<const float4*>(v + i);
  }
  const float factor = rsqrtf(block_sum(sum, shared) / static_cast<float>(n) + eps);
  if (mine) {
    alignas(16) Out o[kNormValues];
#pragma unroll
    for (int i = 0; i < kNormValues; ++i) o[i] = from_f32<Out>(v[i] * factor * weight[i]);
#pragma unroll
    for (int i = 0; i < static_cast<int>(kNormValues * sizeof(Out)); i += 16)
      *reinterpret_cast<uint4*>(reinterpret_cast<char*>(y + blockIdx.x * y_stride + at) + i) =
          *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(o) + i);
  }
}

template <typename T>
__global__ void rope_kernel(T* x, int64_t stride, int heads, int head_dim, int64_t head_stride, const int* pos, const float* cos_sin,
                            int64_t table_stride, int dim, bool interleaved) {
  pdl_trigger();
  const int row = static_cast<int>(blockIdx.x), half = dim / 2, p = pos[row];  // written by the host between steps
  if (p < 0) {  // padding; a kernel that nobody waits in could end before the one before it
    pdl_wait();
    return;
  }
  const float* table = cos_sin + p * table_stride;
  for (int i = static_cast<int>(threadIdx.x); i < heads * half; i += static_cast<int>(blockDim.x)) {
    const int head = i / half, j = i % half;
    T* to = x + row * stride + head * head_stride + head_dim - dim;
    T* first = to + (interleaved ? 2 * j : j);
    T* second = to + (interleaved ? 2 * j + 1 : j + half);
    const float cos = table[j], sin = table[half + j];
    if (i < static_cast<int>(blockDim.x)) pdl_wait();
    const float a = to_f32(*first), b = to_f32(*second);
    *first = from_f32<T>(a * cos - b * sin);
    *second = from_f32<T>(a * sin + b * cos);
  }
}

template <typename In, typename Out>
__global__ void gather_kernel(const In* x, int64_t x_stride, int x_rows, const int* ids, Out* y, int64_t y_stride, int n) {
  pdl_trigger();
  pdl_wait();
  const int id = ids == nullptr ? static_cast<int>(blockIdx.x) : ids[blockIdx.x];
  const bool there = id >= 0 && id < x_rows;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x))
    y[blockIdx.x * y_stride + i] = there ? from_f32<Out>(to_f32(x[id * x_stride + i])) : from_f32<Out>(0.0f);
}

// One block per column range walks the rows in order, so equal ids add up in a fixed order.
template <typename In>
__global__ void scatter_add_kernel(const In* x, int64_t x_stride, int rows, const int* ids, const float* weights, float* y,
                                   int64_t y_stride, int n) {
  pdl_trigger();
  pdl_wait();
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= n) return;
  for (int r = 0; r < rows; ++r)
    if (ids[r] >= 0) y[ids[r] * y_stride + i] += weights[r] * to_f32(x[r * x_stride + i]);
}

template <typename T>
__global__ void swiglu_kernel(const T* x, int64_t x_stride, T* h, int64_t h_stride, int inner) {
  pdl_trigger();
  pdl_wait();
  const T* gate = x + static_cast<int64_t>(blockIdx.y) * x_stride;
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= inner) return;
  const float g = to_f32(gate[i]);
  h[static_cast<int64_t>(blockIdx.y) * h_stride + i] = from_f32<T>(g / (1.0f + expf(-g)) * to_f32(gate[inner + i]));
}

// The same for bf16, inner in multiples of 8 and aligned rows: 8 numbers per thread.
__global__ void swiglu_wide_kernel(const bf16* x, int64_t x_stride, bf16* h, int64_t h_stride, int inner) {
  pdl_trigger();
  pdl_wait();
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * 8;
  if (i >= inner) return;
  const bf16* gate = x + static_cast<int64_t>(blockIdx.y) * x_stride + i;
  alignas(16) bf16 g[8], u[8];
  *reinterpret_cast<uint4*>(g) = load16(gate);
  *reinterpret_cast<uint4*>(u) = load16(gate + inner);
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const float v = to_f32(g[k]);
    g[k] = from_f32<bf16>(v / (1.0f + expf(-v)) * to_f32(u[k]));
  }
  *reinterpret_cast<uint4*>(h + static_cast<int64_t>(blockIdx.y) * h_stride + i) = *reinterpret_cast<const uint4*>(g);
}

template <typename In, typename Out>
__global__ void copy_heads_kernel(const In* x, int64_t x_stride, int x_head, Out* y, int64_t y_stride, int y_head, int heads, int n,
                                  int padded) {
  pdl_trigger();
  pdl_wait();
  for (int i = static_cast<int>(threadIdx.x); i < heads * padded; i += static_cast<int>(blockDim.x)) {
    const int h = i / padded, j = i % padded;
    y[blockIdx.x * y_stride + h * y_head + j] = from_f32<Out>(j < n ? to_f32(x[blockIdx.x * x_stride + h * x_head + j]) : 0.0f);
  }
}

template <typename T>
__global__ void copy_tails_kernel(const T* x, int64_t x_stride, T* y, int64_t y_stride, int heads, int in, int out, int tail) {
  pdl_trigger();
  pdl_wait();
  for (int i = static_cast<int>(threadIdx.x); i < heads * tail; i += static_cast<int>(blockDim.x)) {
    const int h = i / tail, j = i % tail;
    y[blockIdx.x * y_stride + h * (out + tail) + out + j] = x[blockIdx.x * x_stride + h * (in + tail) + in + j];
  }
}

__global__ void fill_kernel(float* to, float value, int64_t n) {
  pdl_trigger();
  pdl_wait();
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x) to[i] = value;
}

dim3 rows_of(int n) { return dim3(static_cast<unsigned>(n)); }
int threads_for(int n) { return n >= 1024 ? 256 : n >= 256 ? 128 : n > 32 ? 64 : 32; }
template <typename T>
bool aligned16(const T* p, int64_t stride) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride * static_cast<int64_t>(sizeof(T)) % 16 == 0;
}

}  // namespace

cudaError_t launch_embed(const Segment& table, const int* ids, Mat x, cudaStream_t stream) {
  return launch(embed_kernel, rows_of(x.rows), threads_for(x.cols), 0, stream, table, ids, static_cast<float*>(x.data), x.stride, x.cols);
}

cudaError_t launch_rmsnorm(Mat x, const float* w, float eps, Mat y, int heads, int n, cudaStream_t stream) {
  return with_activation(x.type, [&](auto in) {
    return with_activation(y.type, [&](auto out) {
      using In = decltype(in);
      using Out = decltype(out);
      return launch(rmsnorm_kernel<In, Out>, dim3(static_cast<unsigned>(x.rows), static_cast<unsigned>(heads)), threads_for(n), 0, stream,
                    static_cast<const In*>(x.data), x.stride, w, eps, static_cast<Out*>(y.data), y.stride, n);
    });
  });
}

cudaError_t launch_add_rmsnorm(Mat residual, Mat delta, const float* w, float eps, Mat y, cudaStream_t stream) {
  return with_activation(delta.type, [&](auto in) {
    return with_activation(y.type, [&](auto out) {
      using In = decltype(in);
      using Out = decltype(out);
      auto* r = static_cast<float*>(residual.data);
      const auto* d = static_cast<const In*>(delta.data);
      auto* o = static_cast<Out*>(y.data);
      const int n = residual.cols;
      const bool wide = n <= kNormThreads * kNormValues && n % kNormValues == 0 && aligned16(r, residual.stride) &&
                        aligned16(d, delta.stride) && aligned16(o, y.stride) && aligned16(w, 0);
      return launch(wide ? add_rmsnorm_wide_kernel<In, Out> : add_rmsnorm_kernel<In, Out>, rows_of(residual.rows), kNormThreads, 0, stream,
                    r, residual.stride, d, delta.stride, w, eps, o, y.stride, n);
    });
  });
}

cudaError_t launch_rope(Mat x, int heads, int head_dim, int64_t head_stride, const int* pos, const float* cos_sin, int64_t cos_sin_stride,
                        int rope_dim, bool interleaved, cudaStream_t stream) {
  return with_activation(x.type, [&](auto t) {
    using T = decltype(t);
    return launch(rope_kernel<T>, rows_of(x.rows), threads_for(heads * rope_dim / 2), 0, stream, static_cast<T*>(x.data), x.stride, heads,
                  head_dim, head_stride, pos, cos_sin, cos_sin_stride, rope_dim, interleaved);
  });
}

cudaError_t launch_gather_rows(Mat x, const int* ids, Mat y, cudaStream_t stream) {
  return with_activation(x.type, [&](auto in) {
    return with_activation(y.type, [&](auto out) {
      using In = decltype(in);
      using Out = decltype(out);
      return launch(gather_kernel<In, Out>, rows_of(y.rows), threads_for(y.cols), 0, stream, static_cast<const In*>(x.data), x.stride,
                    x.rows, ids, static_cast<Out*>(y.data), y.stride, y.cols);
    });
  });
}

cudaError_t launch_scatter_add_rows(Mat x, const int* ids, const float* weights, Mat y, cudaStream_t stream) {
  return with_activation(x.type, [&](auto in) {
    using In = decltype(in);
    return launch(scatter_add_kernel<In>, rows_of(ceil_div(x.cols, 128)), 128, 0, stream, static_cast<const In*>(x.data), x.stride, x.rows,
                  ids, weights, static_cast<float*>(y.data), y.stride, x.cols);
  });
}

cudaError_t launch_swiglu(Mat gate_up, Mat h, cudaStream_t stream) {
  const auto* x = static_cast<const bf16*>(gate_up.data);
  auto* to = static_cast<bf16*>(h.data);
  if (h.type == DType::bf16 && h.cols % 8 == 0 && aligned16(x, gate_up.stride) && aligned16(to, h.stride)) {
    const dim3 grid(static_cast<unsigned>(ceil_div(h.cols, 8 * 128)), static_cast<unsigned>(h.rows));
    return launch(swiglu_wide_kernel, grid, 128, 0, stream, x, gate_up.stride, to, h.stride, h.cols);
  }
  return with_activation(h.type, [&](auto t) {
    using T = decltype(t);
    return launch(swiglu_kernel<T>, dim3(static_cast<unsigned>(ceil_div(h.cols, 256)), static_cast<unsigned>(h.rows)), 256, 0, stream,
                  static_cast<const T*>(gate_up.data), gate_up.stride, static_cast<T*>(h.data), h.stride, h.cols);
  });
}

cudaError_t launch_copy_heads(Mat x, int x_head, Mat y, int y_head, int heads, int n, int padded, cudaStream_t stream) {
  return with_activation(x.type, [&](auto in) {
    return with_activation(y.type, [&](auto out) {
      using In = decltype(in);
      using Out = decltype(out);
      return launch(copy_heads_kernel<In, Out>, rows_of(x.rows), threads_for(heads * padded), 0, stream, static_cast<const In*>(x.data),
                    x.stride, x_head, static_cast<Out*>(y.data), y.stride, y_head, heads, n, padded);
    });
  });
}

cudaError_t launch_copy_tails(Mat x, Mat y, int heads, int in, int out, int tail, cudaStream_t stream) {
  return with_activation(x.type, [&](auto t) {
    using T = decltype(t);
    return launch(copy_tails_kernel<T>, rows_of(x.rows), threads_for(heads * tail), 0, stream, static_cast<const T*>(x.data), x.stride,
                  static_cast<T*>(y.data), y.stride, heads, in, out, tail);
  });
}

cudaError_t launch_fill(float* to, float value, int64_t n, cudaStream_t stream) {
  return launch(fill_kernel, rows_of(static_cast<int>(n / 1024 + 1 < 1024 ? n / 1024 + 1 : 1024)), 256, 0, stream, to, value, n);
}

}  // namespace cachalot::cuda
