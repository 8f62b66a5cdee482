// Attention of many query rows (FlashAttention-2: Dao 2023): a block takes 128 rows of one sequence and head, 16 per warp, with the
// query in registers; keys and values come 64 at a time through two stages of shared memory; softmax in registers, sums in f32.
#include "cuda/attention_kernels.h"
#include "cuda/flash.cuh"

namespace cachalot::cuda {
namespace {

constexpr int kQueries = 128, kKeys = 64, kThreads = 256;

template <int kNope, int kRope, int kV>
struct Shape {
  static constexpr int kK = kNope + kRope, kKPitch = kK + 8, kVPitch = kV + 8;
  static constexpr int kStage = kKeys * (kKPitch + kVPitch);  // elements
  static constexpr int kQuery = kQueries * kKPitch;
  static constexpr int kBytes = 2 * (2 * kStage > kQuery ? 2 * kStage : kQuery);
};

template <int kNope, int kRope, int kV, typename Out>
__global__ __launch_bounds__(kThreads, 1) void flash_kernel(const __grid_constant__ FlashArgs a) {
  using S = Shape<kNope, kRope, kV>;
  extern __shared__ __align__(128) uint8_t raw[];
  bf16* shared = reinterpret_cast<bf16*>(raw);
  pdl_trigger();
  pdl_wait();
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31, g = lane >> 2, c = lane & 3;
  const int head = static_cast<int>(blockIdx.y), kv_head = head / a.share;
  const int row0 = (static_cast<int>(gridDim.x) - 1 - static_cast<int>(blockIdx.x)) * kQueries;  // the long rows first
  const ContextRun run = a.runs.run[blockIdx.z];
  if (row0 >= run.n_q) return;

  const bf16* q = static_cast<const bf16*>(a.q.data) + run.q_begin * a.q.stride + head * S::kK;
  for (int i = thread; i < kQueries * (S::kK / 8); i += kThreads) {
    const int r = i / (S::kK / 8), u = i % (S::kK / 8), row = row0 + r;
    cp_async16(shared + r * S::kKPitch + u * 8, q + (row < run.n_q ? row : 0) * a.q.stride + u * 8, row < run.n_q);
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  uint32_t query[S::kK / 16][4];
#pragma unroll
  for (int k = 0; k < S::kK / 16; ++k) ldmatrix4(query[k], shared + (warp * 16 + (lane & 15)) * S::kKPitch + k * 16 + (lane >> 4) * 8);
  __syncthreads();

  const int past = run.q_position - run.kv_position;
  const int seen = min(run.n_keys, past + min(row0 + kQueries, run.n_q));  // keys that the last row sees
  const int n_tiles = seen > 0 ? (seen + kKeys - 1) / kKeys : 0;
  const bf16 *k_from = static_cast<const bf16*>(a.k) + run.kv_begin * a.k_stride + kv_head * a.k_head,
             *rope_from = static_cast<const bf16*>(a.k_rope) + run.kv_begin * a.k_rope_stride,
             *v_from = static_cast<const bf16*>(a.v) + run.kv_begin * a.v_stride + kv_head * a.v_head;
  const auto copy = [&](int tile) {
    if (tile < n_tiles) {
      bf16* keys = shared + (tile & 1) * S::kStage;
      bf16* values = keys + kKeys * S::kKPitch;
      for (int i = thread; i < kKeys * (kNope / 8); i += kThreads) {
        const int r = i / (kNope / 8), u = i % (kNope / 8), key = tile * kKeys + r;
        cp_async16(keys + r * S::kKPitch + u * 8, k_from + (key < run.n_keys ? key : 0) * a.k_stride + u * 8, key < run.n_keys);
      }
      if constexpr (kRope > 0) {
        for (int i = thread; i < kKeys * (kRope / 8); i += kThreads) {
          const int r = i / (kRope / 8), u = i % (kRope / 8), key = tile * kKeys + r;
          cp_async16(keys + r * S::kKPitch + kNope + u * 8, rope_from + (key < run.n_keys ? key : 0) * a.k_rope_stride + u * 8,
                     key < run.n_keys);
        }
      }
      for (int i = thread; i < kKeys * (kV / 8); i += kThreads) {
        const int r = i / (kV / 8), u = i % (kV / 8), key = tile * kKeys + r;
        cp_async16(values + r * S::kVPitch + u * 8, v_from + (key < run.n_keys ? key : 0) * a.v_stride + u * 8, key < run.n_keys);
      }
    }
    cp_async_commit();
  };
  copy(0);

  const float scale = a.scale * 1.44269504f;
  float acc[kV / 8][4] = {}, largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
  const int my_row = row0 + warp * 16 + g;  // and my_row + 8
  for (int tile = 0; tile < n_tiles; ++tile) {
    copy(tile + 1);
    cp_async_wait<1>();
    __syncthreads();
    const bf16* keys = shared + (tile & 1) * S::kStage;
    const bf16* values = keys + kKeys * S::kKPitch;
    float s[kKeys / 8][4] = {};
#pragma unroll
    for (int k = 0; k < S::kK / 16; ++k)
#pragma unroll
      for (int n = 0; n < kKeys / 8; n += 2) {
        uint32_t kb[4];
        ldmatrix4(kb, keys + (n * 8 + (lane & 7) + (lane >> 4) * 8) * S::kKPitch + k * 16 + ((lane >> 3) & 1) * 8);
        mma_bf16(s[n], query[k], kb[0], kb[1]);
        mma_bf16(s[n + 1], query[k], kb[2], kb[3]);
      }
    const int key0 = tile * kKeys;
    const bool edge = key0 + kKeys > run.n_keys || key0 + kKeys - 1 > past + row0 + warp * 16;
    float peak[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] *= scale;
        if (edge) {
          const int key = key0 + n * 8 + 2 * c + (i & 1), row = my_row + 8 * (i >> 1);
          if (key >= run.n_keys || key > past + row) s[n][i] = -INFINITY;
        }
        peak[i >> 1] = fmaxf(peak[i >> 1], s[n][i]);
      }
    float keep[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      peak[h] = fmaxf(peak[h], __shfl_xor_sync(~0u, peak[h], 1));
      peak[h] = fmaxf(peak[h], __shfl_xor_sync(~0u, peak[h], 2));
      peak[h] = fmaxf(peak[h], largest[h]);
      const float base = peak[h] == -INFINITY ? 0.0f : peak[h];  // a row that has seen nothing yet
      keep[h] = exp2f(largest[h] - base);
      largest[h] = peak[h];
      peak[h] = base;
      sum[h] *= keep[h];
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] = exp2f(s[n][i] - peak[i >> 1]);
        sum[i >> 1] += s[n][i];
      }
#pragma unroll
    for (int n = 0; n < kV / 8; ++n) acc[n][0] *= keep[0], acc[n][1] *= keep[0], acc[n][2] *= keep[1], acc[n][3] *= keep[1];
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
      const uint32_t p[4] = {pack_bf16(s[2 * j][0], s[2 * j][1]), pack_bf16(s[2 * j][2], s[2 * j][3]),
                             pack_bf16(s[2 * j + 1][0], s[2 * j + 1][1]), pack_bf16(s[2 * j + 1][2], s[2 * j + 1][3])};
#pragma unroll
      for (int n = 0; n < kV / 8; n += 2) {
        uint32_t vb[4];
        ldmatrix4_transposed(vb, values + (j * 16 + (lane & 15)) * S::kVPitch + n * 8 + (lane >> 4) * 8);
        mma_bf16(acc[n], p, vb[0], vb[1]);
        mma_bf16(acc[n + 1], p, vb[2], vb[3]);
      }
    }
    __syncthreads();
  }

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
    sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
    const int row = my_row + 8 * h;
    if (row >= run.n_q || sum[h] == 0.0f) continue;
    const RowWeights weight(a, run.q_begin + row, head, (largest[h] + log2f(sum[h])) * 0.69314718f, sum[h]);
    Out* out = static_cast<Out*>(a.out.data) + (run.q_begin + row) * a.out.stride + head * kV + 2 * c;
#pragma unroll
    for (int n = 0; n < kV / 8; ++n) store_pair(out + 8 * n, acc[n][2 * h] * weight.here, acc[n][2 * h + 1] * weight.here, weight.before);
  }
}

template <int kNope, int kRope, int kV, typename Out>
cudaError_t launch_shape(const FlashArgs& a, cudaStream_t stream) {
  constexpr int kBytes = Shape<kNope, kRope, kV>::kBytes;
  static const cudaError_t raised =
      cudaFuncSetAttribute(flash_kernel<kNope, kRope, kV, Out>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (raised != cudaSuccess) return raised;
  const dim3 grid(static_cast<unsigned>(ceil_div(a.runs.most_q(), kQueries)), static_cast<unsigned>(a.heads),
                  static_cast<unsigned>(a.runs.n));
  return launch(flash_kernel<kNope, kRope, kV, Out>, grid, kThreads, kBytes, stream, a);
}
template <typename Out>
cudaError_t launch_out(const FlashArgs& a, cudaStream_t stream) {
  if (a.k_dim == 128 && a.rope == 64) return launch_shape<128, 64, 128, Out>(a, stream);
  if (a.k_dim == 128) return launch_shape<128, 0, 128, Out>(a, stream);
  return launch_shape<64, 0, 64, Out>(a, stream);
}

}  // namespace

bool flash_supports(const FlashArgs& a) {
  const auto aligned = [](const void* p, int64_t stride) { return reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride % 8 == 0; };
  const bool shape = (a.k_dim == 128 && (a.rope == 64 || a.rope == 0) && a.v_dim == 128) || (a.k_dim == 64 && a.rope == 0 && a.v_dim == 64);
  return shape && a.q.type == DType::bf16 && aligned(a.q.data, a.q.stride) && aligned(a.k, a.k_stride) && aligned(a.v, a.v_stride) &&
         (a.rope == 0 || aligned(a.k_rope, a.k_rope_stride)) && a.k_head % 8 == 0 && a.v_head % 8 == 0;
}

cudaError_t launch_flash(const FlashArgs& a, cudaStream_t stream) {
  return a.out.type == DType::f32 ? launch_out<float>(a, stream) : launch_out<bf16>(a, stream);
}

}  // namespace cachalot::cuda
