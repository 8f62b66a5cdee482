// Absorbed MLA of one row in one launch: at a row each step on the way is one trip to memory, and a launch between two steps costs as much.
// A cluster of 8 blocks takes two heads, each block an eighth of the context, and the blocks exchange through shared memory: first the
// absorbed query, of which each makes 64 numbers per head; then the results of their parts of the context, 64 numbers of the latent to each
// block; then the products of these with 64 columns of W_UV. Weights and the rows of earlier steps are asked for before the kernels before
// have ended.
//   scores, 16 keys as mma's rows, the heads as its columns; 8 warps: 4 x 16 keys, two halves of their columns
//   result^T = V^T weights: 16 values as mma's rows, a warp per 64 values
#include <cooperative_groups.h>

#include <utility>

#include "cuda/mla_decode.cuh"
#include "cuda/mla_few.h"
#include "cuda/mla_prologue.cuh"

namespace cachalot::cuda {
namespace {

constexpr int kHeads = 2, kParts = 8, kThreads = kPrologueThreads, kWarps = kThreads / 32;  // of a cluster; blocks; of a block
constexpr int kNope = kMlaFewHead, kValue = kMlaFewHead, kTail = kMlaK - kMlaV, kSlice = kMlaV / kParts;
constexpr int kKeys = 64, kStages = 2, kPitch = kMlaK + 8, kScorePitch = kKeys + 8;
constexpr int kOuts = kHeads * kValue / kParts;                                                // results of a block
constexpr int kUkEach = kHeads * kSlice / kWarps / 2, kUvEach = kHeads * kValue / kWarps / 4;  // rows per half warp; per quarter
static_assert(kMlaOneKeys == kParts * kStages * kKeys && kWarps == kParts && kOuts == 32 && kUkEach == 8 && kUvEach == 8 && kTail == 64);

struct Shared {
  bf16 stages[kStages][kKeys][kPitch];            // rows of the cache
  uint4 uv[kUvEach][kThreads];                    // each thread's own part of W_UV
  bf16 query[kHeads][kPitch];                     // absorbed, then rotated
  bf16 fresh[kMlaK];                              // the row that is new
  float scores[kStages][2][kHeads][kScorePitch];  // by halves of the columns
  float parts[kParts][kHeads][kSlice];            // of the block's slice of the latent, from each block
  float2 shares[kParts][kHeads];                  // their largest scores and sums of powers
  float products[kParts][kOuts];                  // of the block's results, from each block
};

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void unpack8(const uint4& v, float (&to)[8]) {
  const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = (i & 1) == 0 ? low_bf16(pairs[i / 2]) : high_bf16(pairs[i / 2]);
}
__device__ __forceinline__ float dot8(const uint4& w, const float (&x)[8]) {
  float v[8], sum = 0.0f;
  unpack8(w, v);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(v[i], x[i], sum);
  return sum;
}

// A block's keys: an eighth of them, in units of 16.
struct Part {
  int begin, n;
  __device__ __forceinline__ Part(int n_keys, int rank) {
    const int each = (n_keys + 16 * kParts - 1) / (16 * kParts) * 16;
    begin = min(rank * each, n_keys);
    n = min(each, n_keys - begin);
  }
};
#endif

__global__ __launch_bounds__(kThreads) void mla_one_kernel(const __grid_constant__ PrologueArgs p, const __grid_constant__ AttendArgs a,
                                                           const bf16* uk, const bf16* uv, bf16* context_out) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ float reduce[33];
  __shared__ int found[3];
  __shared__ uint64_t full[kStages];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  pdl_trigger();
  const auto cluster = cooperative_groups::this_cluster();
  auto started = cluster.barrier_arrive();
  const int rank = static_cast<int>(cluster.block_rank()), head0 = static_cast<int>(blockIdx.x) / kParts * kHeads;
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31, g = lane >> 2, c = lane & 3;
  if (thread == 0) {
    for (uint64_t& barrier : full) barrier_init(&barrier, 1);
    fence_async_proxy();
  }
  const RowContext context = find_row(a, 0, found);
  const Part part(context.n_keys, rank);
  const int n_stages = (part.n + kKeys - 1) / kKeys;

  // The rows of a stage that earlier steps wrote come by bulk copies, 8 per warp; what follows the last key is zeros.
  const int* table = a.block_table + context.seq * a.table_stride;
  const auto ask = [&](int stage) {
    if (stage >= n_stages) return;
    bf16(*to)[kPitch] = s.stages[stage];
    const int first = part.begin + stage * kKeys, n = min(kKeys, part.n - stage * kKeys), old = min(n, max(context.n_old - first, 0));
    if (thread == 0) barrier_expect(&full[stage], static_cast<uint32_t>(old * kMlaK * 2));
    const int r = warp * 8 + (lane & 7);
    if (lane < 8 && r < old) {
      const int key = first + r;
      const int64_t slot = static_cast<int64_t>(table[key / a.layout.block_tokens]) * a.layout.block_tokens + key % a.layout.block_tokens;
      bulk_copy(to[r], static_cast<const bf16*>(a.k) + slot * kMlaK, kMlaK * 2, &full[stage]);
    }
    for (int row = n + warp; row < (n + 15) / 16 * 16; row += kWarps)
      for (int u = lane; u < kMlaK / 8; u += 32) *reinterpret_cast<uint4*>(&to[row][u * 8]) = make_uint4(0, 0, 0, 0);
  };
  for (int stage = 0; stage < kStages; ++stage) ask(stage);

  // Weights: of W_UK the rows of the block's slice, 8 per half warp; of W_UV its columns, 32 rows per warp, of which 8 lanes take one.
  const int uk_head = warp / (kWarps / kHeads), uk_row = warp % (kWarps / kHeads) * 16 + (lane >> 4) * kUkEach;  // within the slice
  uint4 w[kUkEach];
#pragma unroll
  for (int i = 0; i < kUkEach; ++i)
    load_stream(w[i], uk + (static_cast<int64_t>(head0 + uk_head) * kMlaV + rank * kSlice + uk_row + i) * kNope + (lane & 15) * 8, true);
#pragma unroll
  for (int i = 0; i < kUvEach; ++i) {
    const int row = warp * 32 + i * 4 + (lane >> 3);
    cp_async16(&s.uv[i][thread], uv + (static_cast<int64_t>(head0) * kValue + row) * kMlaV + rank * kSlice + (lane & 7) * 8);
  }
  cp_async_commit();
  const Turn turn(p, 0);
  const int slot = p.slots[0], new_key = context.n_keys - 1;
  const bool has_new = new_key >= part.begin && new_key < part.begin + part.n;
  float2 norm = make_float2(0.0f, 0.0f);
  if (has_new) norm = *reinterpret_cast<const float2*>(p.norm + 2 * thread);
  pdl_wait();

  // The absorbed query. Half a warp has 8 numbers of it, which its first 8 lanes give to a block each.
  const bf16* q = static_cast<const bf16*>(p.q.data) + head0 * (kNope + kTail);
  const bf16* row = static_cast<const bf16*>(p.row.data);
  uint32_t latent = 0;
  if (has_new) latent = *reinterpret_cast<const uint32_t*>(row + 2 * thread);
  if (thread < kHeads * kTail / 2) {
    const int head = thread / (kTail / 2);
    turn.pair(q + head * (kNope + kTail) + kNope, &s.query[head][kMlaV], thread % (kTail / 2));
  }
  {
    float x[8], sum[kUkEach];
    unpack8(load16(q + uk_head * (kNope + kTail) + (lane & 15) * 8), x);
#pragma unroll
    for (int i = 0; i < kUkEach; ++i) {
      sum[i] = dot8(w[i], x);
#pragma unroll
      for (int m = 8; m > 0; m >>= 1) sum[i] += __shfl_xor_sync(~0u, sum[i], m);
    }
    cluster.barrier_wait(std::move(started));  // nobody writes to a block that has not begun
    if ((lane & 15) < kParts) {
      bf16* to = cluster.map_shared_rank(&s.query[uk_head][rank * kSlice + uk_row], lane & 7);
      *reinterpret_cast<uint4*>(to) =
          make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7]));
    }
  }
  auto absorbed = cluster.barrier_arrive();
  if (has_new) {  // the norm of the latent and the rotated key, into its stage and by one cluster into its page
    const float u = low_bf16(latent), v = high_bf16(latent);
    const float factor = rsqrtf(block_sum(u * u + v * v, reduce) / static_cast<float>(kMlaV) + p.eps);
    *reinterpret_cast<uint32_t*>(&s.fresh[2 * thread]) = pack_bf16(u * factor * norm.x, v * factor * norm.y);
    if (thread < kTail / 2) turn.pair(row + kMlaV, &s.fresh[kMlaV], thread);
    __syncthreads();
    const int at = new_key - part.begin;
    if (thread < kMlaK / 8) {
      const uint4 piece = *reinterpret_cast<const uint4*>(&s.fresh[thread * 8]);
      *reinterpret_cast<uint4*>(&s.stages[at / kKeys][at % kKeys][thread * 8]) = piece;
      if (head0 == 0 && slot >= 0)
        reinterpret_cast<uint4*>(static_cast<bf16*>(p.pages) + static_cast<int64_t>(slot) * kMlaK)[thread] = piece;
    }
  }
  cluster.barrier_wait(std::move(absorbed));

  const float scale = a.scale * kLog2E;                       // scores in powers of two
  const int tile = warp & 3, half = warp >> 2, head = g & 1;  // the columns of mma repeat the two heads
  float acc[4][4] = {}, largest = -INFINITY, sum = 0.0f;
  for (int stage = 0; stage < n_stages; ++stage) {
    const bf16(*keys)[kPitch] = s.stages[stage];
    const int n = min(kKeys, part.n - stage * kKeys);
    float(*scores)[kHeads][kScorePitch] = s.scores[stage];
    barrier_wait(&full[stage], 0);
    if (tile * 16 < n) {
      constexpr int kSteps = kMlaK / 32;  // of half of the columns
      float v[2][4] = {};
      const bf16* k_at = &keys[tile * 16 + (lane & 15)][half * (kMlaK / 2) + (lane >> 4) * 8];
      const bf16* q_at = &s.query[head][half * (kMlaK / 2) + 2 * c];
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        uint32_t ka[4];
        ldmatrix4(ka, k_at + k * 16);
        mma_bf16(v[k & 1], ka, *reinterpret_cast<const uint32_t*>(q_at + k * 16), *reinterpret_cast<const uint32_t*>(q_at + k * 16 + 8));
      }
      if (c == 0)
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[half][i & 1][tile * 16 + g + 8 * (i >> 1)] = (v[0][i] + v[1][i]) * scale;
    }
    __syncthreads();

    // Every warp: the weights of all 64 keys for the lane's head.
    float weight[4][4], peak = largest;
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = j * 16 + (i >> 1) * 8 + 2 * c + (i & 1);
        weight[j][i] = key < n ? scores[0][head][key] + scores[1][head][key] : -INFINITY;
        peak = fmaxf(peak, weight[j][i]);
      }
    peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
    peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
    const float keep = exp2f(largest - peak);
    largest = peak;
    sum *= keep;
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum += weight[j][i] = exp2f(weight[j][i] - peak);
    const float keep0 = __shfl_sync(~0u, keep, 0), keep1 = __shfl_sync(~0u, keep, 4);
#pragma unroll
    for (int t = 0; t < 4; ++t) acc[t][0] *= keep0, acc[t][1] *= keep1, acc[t][2] *= keep0, acc[t][3] *= keep1;
    const bf16* v_at = &keys[(lane & 7) + ((lane >> 4) << 3)][warp * kSlice + ((lane >> 3) & 1) * 8];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j * 16 >= n) break;
      const uint32_t b0 = pack_bf16(weight[j][0], weight[j][1]), b1 = pack_bf16(weight[j][2], weight[j][3]);
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        uint32_t va[4];
        ldmatrix4_transposed(va, v_at + j * 16 * kPitch + t * 16);
        mma_bf16(acc[t], va, b0, b1);
      }
    }
  }

  // Of the part's result the 64 numbers of a warp go to a block; lane 4g + c has values g and g + 8 of its tile c.
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  {
    float* to = cluster.map_shared_rank(&s.parts[rank][0][0], warp) + c * 16 + g;
#pragma unroll
    for (int t = 0; t < 4; ++t)
      if (t == c) to[0] = acc[t][0], to[kSlice] = acc[t][1], to[8] = acc[t][2], to[kSlice + 8] = acc[t][3];
    if (c == 0 && g < kHeads) *cluster.map_shared_rank(&s.shares[rank][g], warp) = make_float2(largest, sum);
  }
  cluster.sync();

  // The slice of the latent of the warp's head: the parts weighted by their shares of the softmax's sum. 8 columns per lane.
  const int own = warp / (kWarps / kHeads);
  const float2 share = s.shares[lane & 7][own];
  float most = share.x;
#pragma unroll
  for (int m = 1; m < kParts; m *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, m));
  const float power = share.x == -INFINITY ? 0.0f : exp2f(share.x - most);
  float total = power * share.y;
#pragma unroll
  for (int m = 1; m < kParts; m *= 2) total += __shfl_xor_sync(~0u, total, m);
  const float factor = total > 0.0f ? power / total : 0.0f;
  float x[8] = {};
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const float f = __shfl_sync(~0u, factor, i);
    const float* from = &s.parts[i][own][(lane & 7) * 8];
    const float4 u = *reinterpret_cast<const float4*>(from), v = *reinterpret_cast<const float4*>(from + 4);
    x[0] = fmaf(f, u.x, x[0]), x[1] = fmaf(f, u.y, x[1]), x[2] = fmaf(f, u.z, x[2]), x[3] = fmaf(f, u.w, x[3]);
    x[4] = fmaf(f, v.x, x[4]), x[5] = fmaf(f, v.y, x[5]), x[6] = fmaf(f, v.z, x[6]), x[7] = fmaf(f, v.w, x[7]);
  }
  cp_async_wait<0>();
  float y[kUvEach];
#pragma unroll
  for (int i = 0; i < kUvEach; ++i) y[i] = dot8(s.uv[i][thread], x);
    // Sums over 8 lanes, each of which keeps the row of its own number.
#pragma unroll
  for (int m = kUvEach / 2; m > 0; m /= 2)
#pragma unroll
    for (int i = 0; i < m; ++i) {
      const bool upper = (lane & m) != 0;
      const float keep = upper ? y[i + m] : y[i], give = upper ? y[i] : y[i + m];
      y[i] = keep + __shfl_xor_sync(~0u, give, m);
    }
  cluster.map_shared_rank(&s.products[rank][0], warp)[(lane & 7) * 4 + (lane >> 3)] = y[0];
  cluster.sync();
  if (thread < kOuts) {
    float v = 0.0f;
#pragma unroll
    for (int i = 0; i < kParts; ++i) v += s.products[i][thread];
    context_out[head0 * kValue + rank * kOuts + thread] = from_f32<bf16>(v);
  }
#endif
}

}  // namespace

bool mla_one_supports(const MlaFewArgs& a) {
  const PrologueArgs& p = a.prologue;
  return p.q.rows == 1 && a.attend.n_rows == 1 && a.attend.heads % kHeads == 0 && p.format == KvFormat::bf16 && p.rank == kMlaV &&
         p.rope_dim == kTail && p.head_dim == kNope + kTail && p.q.type == DType::bf16 && p.row.type == DType::bf16 &&
         reinterpret_cast<uintptr_t>(p.q.data) % 16 == 0 && reinterpret_cast<uintptr_t>(p.row.data) % 4 == 0 &&
         reinterpret_cast<uintptr_t>(p.pages) % 16 == 0 && a.context.type == DType::bf16;
}

cudaError_t launch_mla_one(const MlaFewArgs& a, cudaStream_t stream) {
  static const cudaError_t raised =
      cudaFuncSetAttribute(mla_one_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sizeof(Shared)));
  if (raised != cudaSuccess) return raised;
  return launch_clusters(mla_one_kernel, kParts, dim3(static_cast<unsigned>(a.attend.heads / kHeads * kParts)), kThreads, sizeof(Shared),
                         stream, a.prologue, a.attend, static_cast<const bf16*>(a.uk), static_cast<const bf16*>(a.uv),
                         static_cast<bf16*>(a.context.data));
}

}  // namespace cachalot::cuda
