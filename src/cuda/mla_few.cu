// For few rows every launch is one trip to memory and back, so the work before and after attention is joined to the products beside it. The
// weights of both products are read before the kernels before have ended.
#include "cuda/mla_few.h"

#include "cuda/mla_decode.cuh"
#include "cuda/mla_prologue.cuh"

namespace cachalot::cuda {
namespace {

constexpr int kNope = kMlaFewHead, kTail = kMlaK - kMlaV, kValue = kMlaFewHead, kParts = 8, kThreads = kPrologueThreads;

__device__ __forceinline__ void unpack8(const uint4& v, float (&to)[8]) {
  const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = __uint_as_float((i & 1) == 0 ? pairs[i / 2] << 16 : pairs[i / 2] & 0xffff0000u);
}
__device__ __forceinline__ float dot8(const uint4& w, const float (&x)[8], float sum) {
  float v[8];
  unpack8(w, v);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(v[i], x[i], sum);
  return sum;
}
__device__ __forceinline__ uint4 weights16(const bf16* p) {
  uint4 v;
  load_stream(v, p, true);
  return v;
}

// blockIdx.x: part of a head's rows of W_UK; then a block per row of the cache. absorbed[t, h] = [W_UK,h q_n | rotated q_r].
constexpr int kUkRows = kMlaV / kParts, kUkEach = kUkRows / (kThreads / 32) / 2;  // rows per block; pairs of rows per warp
template <typename Kv>
__global__ __launch_bounds__(kThreads) void absorb_kernel(const __grid_constant__ PrologueArgs a, const bf16* uk, bf16* absorbed,
                                                          int64_t stride) {
  __shared__ float shared[33];
  pdl_trigger();
  const int block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x), lane = thread & 31;
  if (block >= a.heads * kParts) {
    const int t = block - a.heads * kParts;
    const Turn turn(a, t);
    pdl_wait();
    return prologue_row<bf16, Kv>(a, t, turn, shared);
  }
  const int head = block / kParts, row0 = block % kParts * kUkRows + (thread >> 5) * 2 * kUkEach, col = (lane & 15) * 8;
  uint4 w[kUkEach];
#pragma unroll
  for (int i = 0; i < kUkEach; ++i) w[i] = weights16(uk + (static_cast<int64_t>(head) * kMlaV + row0 + 2 * i + (lane >> 4)) * kNope + col);
  pdl_wait();
  const bf16* q = static_cast<const bf16*>(a.q.data) + head * (kNope + kTail);
  bf16* to = absorbed + head * kMlaK;
  for (int t = 0; t < a.q.rows; ++t) {
    float x[8], sum[kUkEach];
    unpack8(load16(q + t * a.q.stride + col), x);
#pragma unroll
    for (int i = 0; i < kUkEach; ++i) {
      sum[i] = dot8(w[i], x, 0.0f);
#pragma unroll
      for (int m = 8; m > 0; m >>= 1) sum[i] += __shfl_xor_sync(~0u, sum[i], m);
      if ((lane & 15) == i) to[t * stride + row0 + 2 * i + (lane >> 4)] = from_f32<bf16>(sum[i]);
    }
  }
  for (int i = thread; block % kParts == 0 && i < a.q.rows * kTail / 2; i += kThreads) {
    const int t = i / (kTail / 2);
    Turn(a, t).pair(q + t * a.q.stride + kNope, to + t * stride + kMlaV, i % (kTail / 2));
  }
}

// blockIdx.x: part of a head's rows of W_UV; blockIdx.y: row. The parts of the context, weighted by their shares of the softmax's sum, are
// summed by every block of a head.
constexpr int kUvRows = kValue / kParts, kUvEach = kUvRows / (kThreads / 32), kInFlight = 16;
__global__ __launch_bounds__(kThreads) void combine_uv_kernel(const __grid_constant__ AttendArgs a, const bf16* uv, bf16* context,
                                                              int64_t stride) {
  __shared__ __align__(16) float result[kMlaV];
  pdl_trigger();
  const int head = static_cast<int>(blockIdx.x) / kParts, row = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x),
            lane = thread & 31, out = static_cast<int>(blockIdx.x) % kParts * kUvRows + (thread >> 5) * kUvEach;
  uint4 w[kUvEach][2];
#pragma unroll
  for (int i = 0; i < kUvEach; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) w[i][j] = weights16(uv + (static_cast<int64_t>(head) * kValue + out + i) * kMlaV + j * 256 + lane * 8);
  pdl_wait();
  const int64_t step = static_cast<int64_t>(a.n_rows) * a.heads, at = static_cast<int64_t>(row) * a.heads + head;
  const float2* from = reinterpret_cast<const float2*>(a.partial + at * kMlaV) + thread;
  const float* lse = a.partial + a.n_splits * step * kMlaV + at;
  float2 part[kInFlight], v = make_float2(0.0f, 0.0f);
  const auto load = [&](int first) {
#pragma unroll
    for (int s = 0; s < kInFlight; ++s)
      if (first + s < a.n_splits) part[s] = __ldcg(from + (first + s) * step * (kMlaV / 2));
  };
  load(0);
  const auto lse_of = [&](int s) { return s < a.n_splits ? __ldcg(lse + s * step) : -INFINITY; };
  const float x = lse_of(lane), y = lse_of(lane + 32), largest = warp_max(fmaxf(x, y));
  const float wx = x == -INFINITY ? 0.0f : exp2f(x - largest), wy = y == -INFINITY ? 0.0f : exp2f(y - largest), total = warp_sum(wx + wy);
  const float factor = total > 0.0f ? 1.0f / total : 0.0f;
  for (int first = 0; first < a.n_splits; first += kInFlight) {
    if (first > 0) load(first);
#pragma unroll
    for (int s = 0; s < kInFlight; ++s) {
      const float weight = __shfl_sync(~0u, first + s < 32 ? wx : wy, (first + s) & 31);
      if (first + s < a.n_splits && weight != 0.0f) v.x = fmaf(weight, part[s].x, v.x), v.y = fmaf(weight, part[s].y, v.y);
    }
  }
  reinterpret_cast<float2*>(result)[thread] = make_float2(v.x * factor, v.y * factor);
  __syncthreads();
  float sum[kUvEach] = {};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float c[8];
#pragma unroll
    for (int i = 0; i < 8; i += 4) *reinterpret_cast<float4*>(c + i) = *reinterpret_cast<const float4*>(result + j * 256 + lane * 8 + i);
#pragma unroll
    for (int i = 0; i < kUvEach; ++i) sum[i] = dot8(w[i][j], c, sum[i]);
  }
#pragma unroll
  for (int i = 0; i < kUvEach; ++i) {
    sum[i] = warp_sum(sum[i]);
    if (lane == i) context[row * stride + head * kValue + out + i] = from_f32<bf16>(sum[i]);
  }
}

}  // namespace

bool mla_few_supports(const MlaFewArgs& a) {
  const PrologueArgs& p = a.prologue;
  return p.q.rows <= kMlaFewRows && p.q.rows == a.attend.n_rows && p.rank == kMlaV && p.rope_dim == kTail && p.head_dim == kNope + kTail &&
         p.q.type == DType::bf16 && p.row.type == DType::bf16 && p.q.stride % 8 == 0 && reinterpret_cast<uintptr_t>(p.q.data) % 16 == 0 &&
         a.context.type == DType::bf16 && a.attend.n_splits > 1;
}

cudaError_t launch_mla_few(const MlaFewArgs& a, MlaKernel kernel, cudaStream_t stream) {
  const PrologueArgs& p = a.prologue;
  const auto heads = static_cast<unsigned>(p.heads), rows = static_cast<unsigned>(p.q.rows);
  cudaError_t error = with_rows(p.format, [&](auto kv) {
    return launch(absorb_kernel<decltype(kv)>, dim3(heads * kParts + rows), kThreads, 0, stream, p, static_cast<const bf16*>(a.uk),
                  static_cast<bf16*>(a.attend.q.data), a.attend.q.stride);
  });
  if (error == cudaSuccess) error = launch_mla_parts(a.attend, kernel, stream);
  if (error != cudaSuccess) return error;
  return launch(combine_uv_kernel, dim3(heads * kParts, rows), kThreads, 0, stream, a.attend, static_cast<const bf16*>(a.uv),
                static_cast<bf16*>(a.context.data), a.context.stride);
}

}  // namespace cachalot::cuda
