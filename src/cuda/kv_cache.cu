// The cache's rows: written (after MLA's prologue, or as they come) and gathered. One block per row, f32 arithmetic.
#include "cuda/attention_kernels.h"
#include "cuda/mla_prologue.cuh"

namespace cachalot::cuda {
namespace {

// One block per row: norm of the latent, rotation of q and of the shared key, and the row into its page.
template <typename T, typename Kv>
__global__ __launch_bounds__(kPrologueThreads) void mla_prologue_kernel(const __grid_constant__ PrologueArgs a) {
  __shared__ float shared[33];
  pdl_trigger();
  const int t = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x), half = a.rope_dim / 2;
  const RowPlace place(a, t);
  pdl_wait();
  T* q = static_cast<T*>(a.q.data) + t * a.q.stride;
  for (int i = thread; i < a.heads * half; i += kPrologueThreads) {
    T* from = q + i / half * a.head_dim + a.head_dim - a.rope_dim;
    place.turn.pair(from, from, i % half, [](int at) { return at; });
  }
  prologue_row<T, Kv>(a, t, place, shared);
}

// A warp per head of q, k or v of a row.
constexpr int kGqaWarps = 8;
template <typename T, typename Kv>
__global__ __launch_bounds__(kGqaWarps * 32) void gqa_prologue_kernel(const __grid_constant__ GqaPrologueArgs a) {
  __shared__ float heads[kGqaWarps][kMostGqaDim];
  pdl_trigger();
  const int t = static_cast<int>(blockIdx.x), warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31;
  const int head = static_cast<int>(blockIdx.y) * kGqaWarps + warp, half = a.rope_dim / 2, plain = a.dim - a.rope_dim;
  const int position = a.positions[t], slot = a.slots[t];  // written by the host between steps
  const bool is_q = head < a.heads, is_v = head >= a.heads + a.kv_heads;
  pdl_wait();
  if (head >= a.heads + 2 * a.kv_heads || (!is_q && slot < 0)) return;
  const Mat& rows = is_q ? a.q : is_v ? a.v : a.k;
  const int of_kind = is_q ? head : head - a.heads - (is_v ? a.kv_heads : 0);
  T* from = static_cast<T*>(rows.data) + t * rows.stride + of_kind * a.dim;
  Kv* page = static_cast<Kv*>(is_v ? a.v_pages : a.k_pages) + (static_cast<int64_t>(slot) * a.kv_heads + of_kind) * a.dim;
  const auto put = [&](int i, float v) {
    const T rounded = from_f32<T>(v);
    if (is_q)
      from[i] = rounded;
    else
      page[i] = from_f32<Kv>(to_f32(rounded));
  };
  if (is_v) {
    for (int i = lane; i < a.dim; i += 32) put(i, to_f32(from[i]));
    return;
  }
  float* x = heads[warp];
  float sum = 0.0f;
  for (int i = lane; i < a.dim; i += 32) {
    x[i] = to_f32(from[i]);
    sum += x[i] * x[i];
  }
  if (const float* norm = is_q ? a.q_norm : a.k_norm; norm != nullptr) {
    const float factor = rsqrtf(warp_sum(sum) / static_cast<float>(a.dim) + a.eps);
    for (int i = lane; i < a.dim; i += 32) x[i] *= factor * norm[i];
  }
  __syncwarp();
  for (int i = lane; i < plain; i += 32) put(i, x[i]);
  const float* table = a.cos_sin + (position < 0 ? 0 : position) * a.cos_sin_stride;
  for (int j = lane; j < half; j += 32) {
    const int first = plain + (a.interleaved ? 2 * j : j), second = plain + (a.interleaved ? 2 * j + 1 : j + half);
    const float u = x[first], v = x[second], cos = position < 0 ? 1.0f : table[j], sin = position < 0 ? 0.0f : table[half + j];
    put(first, u * cos - v * sin);
    put(second, u * sin + v * cos);
  }
}

template <typename In, typename Out>
__global__ void kv_write_kernel(Out* pages, const int* slots, const In* x, int64_t stride, int n) {
  pdl_trigger();
  const int slot = slots[blockIdx.x];  // written by the host between steps
  pdl_wait();
  if (slot < 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x))
    pages[static_cast<int64_t>(slot) * n + i] = from_f32<Out>(to_f32(x[blockIdx.x * stride + i]));
}

// A warp per group of 128 latent numbers; the rope key by all.
constexpr int kFp8Threads = 128;
template <typename In>
__global__ __launch_bounds__(kFp8Threads) void kv_write_fp8_kernel(uint8_t* pages, const int* slots, const In* x, int64_t stride, int rank,
                                                                   int width) {
  pdl_trigger();
  const int slot = slots[blockIdx.x], thread = static_cast<int>(threadIdx.x);
  pdl_wait();
  if (slot < 0) return;
  uint8_t* row = pages + slot * fp8_bytes(rank, width);
  x += blockIdx.x * stride;
  for (int group = thread >> 5; group * kKvScaleGroup < rank; group += kFp8Threads / 32) {
    const int at = group * kKvScaleGroup + 4 * (thread & 31);
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = at < rank ? to_f32(x[at + i]) : 0.0f;
    write_fp8_group(row, rank, group, v);
  }
  bf16* tail = reinterpret_cast<bf16*>(row + fp8_tail_at(rank));
  for (int i = thread; i < width - rank; i += kFp8Threads) tail[i] = from_f32<bf16>(to_f32(x[rank + i]));
}

struct GatherArgs {
  const void* pages = nullptr;
  int block_tokens = 0;
  const int* table = nullptr;
  int64_t table_stride = 0;
  ContextRuns runs;
  int rank = 0;
  Mat out;
};
// A warp per row.
constexpr int kGatherWarps = 8;
template <typename Kv, typename Out>
__global__ __launch_bounds__(kGatherWarps * 32) void kv_gather_kernel(const __grid_constant__ GatherArgs a) {
  pdl_trigger();
  const int row = static_cast<int>(blockIdx.x) * kGatherWarps + (static_cast<int>(threadIdx.x) >> 5),
            lane = static_cast<int>(threadIdx.x) & 31;
  if (row >= a.out.rows) return pdl_wait();
  int64_t slot = -1;
  for (int i = 0; i < a.runs.n; ++i) {
    const ContextRun& run = a.runs.run[i];
    const int at = row - run.kv_begin, token = run.kv_position + at;
    if (at >= 0 && at < run.n_keys)
      slot = static_cast<int64_t>(a.table[run.seq * a.table_stride + token / a.block_tokens]) * a.block_tokens + token % a.block_tokens;
  }
  pdl_wait();
  Out* out = static_cast<Out*>(a.out.data) + row * a.out.stride;
  const int n = a.out.cols;
  if constexpr (std::is_same_v<Kv, Out>) {
    constexpr int kUnit = 16 / sizeof(Out);
    const bool aligned = n % kUnit == 0 && a.out.stride % kUnit == 0 && reinterpret_cast<uintptr_t>(a.out.data) % 16 == 0;
    if (aligned) {
      const Kv* from = static_cast<const Kv*>(a.pages) + slot * n;
      for (int i = lane * kUnit; i < n; i += 32 * kUnit)
        *reinterpret_cast<uint4*>(out + i) = slot < 0 ? make_uint4(0, 0, 0, 0) : load16(from + i);
      return;
    }
  }
  for (int i = lane; i < n; i += 32) out[i] = from_f32<Out>(slot < 0 ? 0.0f : read_kv<Kv>(a.pages, slot, n, a.rank, i));
}

int threads_for(int n) { return n > 512 ? 256 : n > 128 ? 128 : 64; }

}  // namespace

cudaError_t launch_mla_prologue(const PrologueArgs& a, cudaStream_t stream) {
  return with_rows(a.format, [&](auto kv) {
    return with_activation(a.q.type, [&](auto t) {
      return launch(mla_prologue_kernel<decltype(t), decltype(kv)>, dim3(static_cast<unsigned>(a.q.rows)), kPrologueThreads, 0, stream, a);
    });
  });
}

cudaError_t launch_gqa_prologue(const GqaPrologueArgs& a, cudaStream_t stream) {
  if (a.dim > kMostGqaDim || a.format == KvFormat::fp8) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(a.q.rows), static_cast<unsigned>(ceil_div(a.heads + 2 * a.kv_heads, kGqaWarps)));
  return with_type(dtype_of(a.format), [&](auto kv) {
    return with_activation(
        a.q.type, [&](auto t) { return launch(gqa_prologue_kernel<decltype(t), decltype(kv)>, grid, kGqaWarps * 32, 0, stream, a); });
  });
}

cudaError_t launch_kv_write(void* pages, const KvLayout& layout, const int* slots, Mat rows, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(rows.rows));
  return with_activation(rows.type, [&](auto in) {
    using In = decltype(in);
    const auto* x = static_cast<const In*>(rows.data);
    if (layout.format == KvFormat::fp8)
      return launch(kv_write_fp8_kernel<In>, grid, kFp8Threads, 0, stream, static_cast<uint8_t*>(pages), slots, x, rows.stride,
                    layout.v_dim, rows.cols);
    return with_type(dtype_of(layout.format), [&](auto out) {
      using Out = decltype(out);
      return launch(kv_write_kernel<In, Out>, grid, threads_for(rows.cols), 0, stream, static_cast<Out*>(pages), slots, x, rows.stride,
                    rows.cols);
    });
  });
}

cudaError_t launch_kv_gather(const void* pages, const KvLayout& layout, const int* table, int64_t table_stride, const ContextRuns& runs,
                             Mat out, cudaStream_t stream) {
  const GatherArgs args{pages, layout.block_tokens, table, table_stride, runs, layout.v_dim, out};
  const dim3 grid(static_cast<unsigned>(ceil_div(out.rows, kGatherWarps)));
  return with_rows(layout.format, [&](auto kv) {
    return with_activation(
        out.type, [&](auto o) { return launch(kv_gather_kernel<decltype(kv), decltype(o)>, grid, kGatherWarps * 32, 0, stream, args); });
  });
}

}  // namespace cachalot::cuda
