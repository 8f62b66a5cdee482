// Attention for any head sizes and cache types: a block per (row, head), a warp per key in turn, online softmax in f32.
#include <cfloat>

#include "cuda/attend_rows.cuh"
#include "cuda/flash.cuh"
#include "cuda/kv_rows.cuh"

namespace cachalot::cuda {
namespace {

constexpr int kWarps = 8, kMaxV = 512, kMaxQ = 1024;

// Runs the keys [0, n) and leaves in `out` [v_dim] (shared) the weighted sum, not yet divided, with the largest score and the sum of
// exponentials as result. key(i, d) and value(i, d) read one number.
template <typename Key, typename Value>
__device__ float2 attend_keys(const float* q, int q_dim, int v_dim, int n, float scale, const Key& key, const Value& value, float* merge,
                              float* out) {
  const int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31;
  float acc[kMaxV / 32] = {}, largest = -INFINITY, sum = 0.0f;
  for (int i = warp; i < n; i += kWarps) {
    float score = 0.0f;
    for (int d = lane; d < q_dim; d += 32) score = fmaf(q[d], key(i, d), score);
    score = warp_sum(score) * scale;
    const float m = fmaxf(largest, score), keep = expf(largest - m), p = expf(score - m);
    largest = m;
    sum = sum * keep + p;
#pragma unroll
    for (int j = 0; j < kMaxV / 32; ++j)
      if (j * 32 + lane < v_dim) acc[j] = fmaf(p, value(i, j * 32 + lane), acc[j] * keep);
  }
  // merge: [kWarps] largest, [kWarps] sums, [kWarps][v_dim] weighted sums
  if (lane == 0) merge[warp] = largest, merge[kWarps + warp] = sum;
#pragma unroll
  for (int j = 0; j < kMaxV / 32; ++j)
    if (j * 32 + lane < v_dim) merge[2 * kWarps + warp * v_dim + j * 32 + lane] = acc[j];
  __syncthreads();
  float m = -INFINITY, total = 0.0f;
  for (int w = 0; w < kWarps; ++w) m = fmaxf(m, merge[w]);
  for (int w = 0; w < kWarps; ++w)
    if (merge[w] > -INFINITY) total += merge[kWarps + w] * expf(merge[w] - m);
  for (int d = static_cast<int>(threadIdx.x); d < v_dim; d += kWarps * 32) {
    float v = 0.0f;
    for (int w = 0; w < kWarps; ++w)
      if (merge[w] > -INFINITY) v = fmaf(merge[2 * kWarps + w * v_dim + d], expf(merge[w] - m), v);
    out[d] = v;
  }
  __syncthreads();
  return make_float2(m, total);
}

template <typename Kv, typename Act>
__global__ __launch_bounds__(kWarps * 32) void paged_kernel(const __grid_constant__ AttendArgs a) {
  __shared__ float q[kMaxQ], merge[kWarps * (kMaxV + 2)], sum[kMaxV];
  __shared__ int found[3];
  pdl_trigger();
  pdl_wait();
  const int row = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  const KvLayout& l = a.layout;
  const RowContext context = find_row(a, row, found);
  Act* out = static_cast<Act*>(a.out.data) + row * a.out.stride + head * l.v_dim;
  if (context.n_keys <= 0) {
    for (int d = static_cast<int>(threadIdx.x); d < l.v_dim; d += kWarps * 32) out[d] = from_f32<Act>(0.0f);
    return;
  }
  const Act* query = static_cast<const Act*>(a.q.data) + row * a.q.stride + head * l.k_dim;
  for (int d = static_cast<int>(threadIdx.x); d < l.k_dim; d += kWarps * 32) q[d] = to_f32(query[d]);
  __syncthreads();
  const int kv_head = head / (a.heads / l.heads), k_width = l.heads * l.k_dim, v_width = l.v_is_k_prefix ? k_width : l.heads * l.v_dim;
  const int* table = a.block_table + context.seq * a.table_stride;
  const void* v = l.v_is_k_prefix ? a.k : a.v;
  const int k_at = kv_head * l.k_dim, v_at = l.v_is_k_prefix ? k_at : kv_head * l.v_dim;
  const auto slot = [&](int i) { return static_cast<int64_t>(table[i / l.block_tokens]) * l.block_tokens + i % l.block_tokens; };
  const float2 stats = attend_keys(
      q, l.k_dim, l.v_dim, context.n_keys, a.scale, [&](int i, int d) { return read_kv<Kv>(a.k, slot(i), k_width, l.v_dim, k_at + d); },
      [&](int i, int d) { return read_kv<Kv>(v, slot(i), v_width, l.v_dim, v_at + d); }, merge, sum);
  for (int d = static_cast<int>(threadIdx.x); d < l.v_dim; d += kWarps * 32) out[d] = from_f32<Act>(sum[d] / stats.y);
}

template <typename Act, typename Out>
__global__ __launch_bounds__(kWarps * 32) void ragged_kernel(const __grid_constant__ RaggedArgs a) {
  __shared__ float q[kMaxQ], merge[kWarps * (kMaxV + 2)], sum[kMaxV];
  pdl_trigger();
  pdl_wait();
  const int row = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y), q_dim = a.nope + a.rope, kv_dim = a.nope + a.v_dim;
  const int n = min(a.kv.rows, a.q_position + row - a.kv_position + 1);
  Out* out = static_cast<Out*>(a.out.data) + row * a.out.stride + head * a.v_dim;
  if (n <= 0) return;
  const Act* query = static_cast<const Act*>(a.q.data) + row * a.q.stride + head * q_dim;
  for (int d = static_cast<int>(threadIdx.x); d < q_dim; d += kWarps * 32) q[d] = to_f32(query[d]);
  __syncthreads();
  const Act* kv = static_cast<const Act*>(a.kv.data) + head * kv_dim;
  const Act* rope = static_cast<const Act*>(a.latent.data) + a.latent_rope_at - a.nope;
  const float2 stats = attend_keys(
      q, q_dim, a.v_dim, n, a.scale,
      [&](int i, int d) { return to_f32(d < a.nope ? kv[i * a.kv.stride + d] : rope[i * a.latent.stride + d]); },
      [&](int i, int d) { return to_f32(kv[i * a.kv.stride + a.nope + d]); }, merge, sum);
  float keep = 0.0f, add = 1.0f / stats.y;
  if (a.lse != nullptr) {
    float& lse = a.lse[static_cast<int64_t>(row) * a.heads + head];
    const LseMerge merge(stats.x + logf(stats.y), lse);
    keep = merge.before, add *= merge.here;
    __syncthreads();
    if (threadIdx.x == 0) lse = merge.total;
  }
  for (int d = static_cast<int>(threadIdx.x); d < a.v_dim; d += kWarps * 32)
    out[d] = from_f32<Out>((keep == 0.0f ? 0.0f : keep * to_f32(out[d])) + add * sum[d]);
}

}  // namespace

cudaError_t launch_attend_generic(const AttendArgs& a, cudaStream_t stream) {
  if (a.layout.k_dim > kMaxQ || a.layout.v_dim > kMaxV) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(a.n_rows), static_cast<unsigned>(a.heads));
  return with_rows(a.layout.format, [&](auto kv) {
    return with_activation(a.q.type,
                           [&](auto act) { return launch(paged_kernel<decltype(kv), decltype(act)>, grid, kWarps * 32, 0, stream, a); });
  });
}

cudaError_t launch_attend_ragged(const RaggedArgs& a, cudaStream_t stream) {
  if (a.nope + a.rope > kMaxQ || a.v_dim > kMaxV) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(a.q.rows), static_cast<unsigned>(a.heads));
  return with_activation(a.q.type, [&](auto act) {
    return with_activation(a.out.type,
                           [&](auto out) { return launch(ragged_kernel<decltype(act), decltype(out)>, grid, kWarps * 32, 0, stream, a); });
  });
}

}  // namespace cachalot::cuda
