// Absorbed MLA: which kernel, and into how many parts the context is cut. The sum over the parts of any attention.
#include <algorithm>

#include "cuda/mla_decode.cuh"

namespace cachalot::cuda {
namespace {

// A block per (row, head), four of kV columns per thread: the parts weighted by their shares of the softmax's sum.
template <int kV>
__global__ __launch_bounds__(kV < 128 ? 32 : kV / 4) void combine_kernel(const __grid_constant__ AttendArgs a) {
  __shared__ float weights[kMaxSplits];
  pdl_trigger();
  pdl_wait();
  const int row = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y), lane = static_cast<int>(threadIdx.x) & 31;
  if (threadIdx.x < 32) {
    const float* lse = a.partial + static_cast<int64_t>(a.n_splits) * a.n_rows * a.heads * kV;
    const auto lse_of = [&](int s) { return s < a.n_splits ? lse[static_cast<int64_t>(s * a.n_rows + row) * a.heads + head] : -INFINITY; };
    const float x = lse_of(lane), y = lse_of(lane + 32), largest = warp_max(fmaxf(x, y));
    const float wx = x == -INFINITY ? 0.0f : exp2f(x - largest), wy = y == -INFINITY ? 0.0f : exp2f(y - largest), total = warp_sum(wx + wy);
    const float factor = total > 0.0f ? 1.0f / total : 0.0f;
    weights[lane] = wx * factor;
    weights[lane + 32] = wy * factor;
  }
  __syncthreads();
  if (threadIdx.x >= kV / 4) return;
  float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const float* from = a.partial + (static_cast<int64_t>(row) * a.heads + head) * kV + threadIdx.x * 4;
  const int64_t step = static_cast<int64_t>(a.n_rows) * a.heads * kV;
#pragma unroll 8
  for (int s = 0; s < a.n_splits; ++s) {
    const float w = weights[s];
    const float4 x = w != 0.0f ? *reinterpret_cast<const float4*>(from + s * step) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    v.x = fmaf(w, x.x, v.x), v.y = fmaf(w, x.y, v.y), v.z = fmaf(w, x.z, v.z), v.w = fmaf(w, x.w, v.w);
  }
  const uint2 packed = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
  *reinterpret_cast<uint2*>(static_cast<bf16*>(a.out.data) + row * a.out.stride + head * kV + threadIdx.x * 4) = packed;
}

// Heads and keys that a block takes at a time.
int block_heads(MlaKernel kernel) { return kernel == MlaKernel::heads64 ? 64 : 16; }
int block_keys(MlaKernel kernel) { return kernel == MlaKernel::heads64 ? 128 : 64; }

}  // namespace

MlaKernel mla_decode_kernel_for(const AttendArgs& a, bool hopper) {
  const auto aligned = [](const Mat& m) {
    return m.type == DType::bf16 && reinterpret_cast<uintptr_t>(m.data) % 16 == 0 && m.stride % 8 == 0;
  };
  const KvLayout& l = a.layout;
  if (l.heads != 1 || l.k_dim != kMlaK || l.v_dim != kMlaV || !l.v_is_k_prefix || !aligned(a.q) || !aligned(a.out) ||
      reinterpret_cast<uintptr_t>(a.k) % 16 != 0)
    return MlaKernel::none;
  // Turning codes into tiles costs a block of 64 heads more than it saves, until there is work for several.
  if (l.format == KvFormat::fp8) return !hopper ? MlaKernel::none : a.heads >= 64 && a.n_rows >= 4 ? MlaKernel::heads64 : MlaKernel::fp8;
  if (l.format != KvFormat::bf16 || !hopper) return MlaKernel::none;
  return a.heads >= 64 ? MlaKernel::heads64 : MlaKernel::heads16;
}

// The number of parts that keeps 132 multiprocessors evenly busy: waves times blocks of keys per part, and what combining costs. heads16
// cuts its parts by 8 keys, takes up to two blocks of them at once, and the sums over its parts, which ask for 16 of them at a time, cost
// more where every block makes them (one row); measured.
int mla_decode_splits(MlaKernel kernel, int n_rows, int heads, int max_kv) {
  const int groups = n_rows * ceil_div(heads, block_heads(kernel)), blocks = ceil_div(max_kv > 0 ? max_kv : 1, block_keys(kernel));
  const bool fine = kernel == MlaKernel::heads16;
  int best = 1;
  double best_cost = 1e30;
  for (int s = 1; s <= kMaxSplits && s <= blocks; ++s) {
    const double combining = s == 1 ? 0.0 : fine ? 1.0 + (n_rows == 1 ? 1.3 : 0.64) * ceil_div(s, 16) : 1.0 + 0.02 * s;
    double share = fine ? std::max(1.0, static_cast<double>(max_kv) / (64 * s)) : ceil_div(blocks, s);
    if (fine && share <= 2.0) share = 0.5 + 0.5 * share;
    const double cost = ceil_div(groups * s, 132) * (share + 1.5) + combining;
    if (cost < best_cost) best_cost = cost, best = s;
  }
  return best;
}

cudaError_t launch_mla_parts(const AttendArgs& a, MlaKernel kernel, cudaStream_t stream) {
  return kernel == MlaKernel::fp8       ? launch_mla_fp8(a, stream)
         : kernel == MlaKernel::heads64 ? launch_mla_heads64(a, stream)
                                        : launch_mla_heads16(a, stream);
}

cudaError_t launch_attend_combine(const AttendArgs& a, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(a.n_rows), static_cast<unsigned>(a.heads));
  switch (a.layout.v_dim) {
    case 64: return launch(combine_kernel<64>, grid, 32, 0, stream, a);
    case 128: return launch(combine_kernel<128>, grid, 32, 0, stream, a);
    case kMlaV: return launch(combine_kernel<kMlaV>, grid, kMlaV / 4, 0, stream, a);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t launch_mla_decode(const AttendArgs& a, MlaKernel kernel, cudaStream_t stream) {
  const cudaError_t error = launch_mla_parts(a, kernel, stream);
  return error != cudaSuccess || a.n_splits == 1 ? error : launch_attend_combine(a, stream);
}

}  // namespace cachalot::cuda
