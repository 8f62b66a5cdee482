// As mla_decode.cu for one query row, whose context is in few blocks, which then wait for what they have asked for and no longer for
// memory. 8 warps score 8 keys each with most of the query in registers, several keys' operands asked for at once, then each weighs 64 of
// the 512 value columns, all repeating the cheap softmax of 16 x 64. With mla_decode.cu instead a step of one row takes as long where the
// experts' codes have 4 bits, and 5 us a layer longer where they are bf16; of eight rows in bf16 60 us a layer longer, so that few rows of
// such models come here, too. Its 170 kB of shared memory instead of 207 leave
// more of L1, through which bf16 experts are streamed; that this is the reason was not measured by itself.
#include "cuda/mla_decode.cuh"

namespace cachalot::cuda {
namespace {

[[maybe_unused]] constexpr int kHeads = 16, kKeys = 64, kK = kMlaK, kV = kMlaV, kPitch = kK + 8, kScorePitch = 72, kThreads = 256;
constexpr int kQueryBytes = kHeads * kPitch * 2, kStageBytes = kKeys * kPitch * 2, kScoreBytes = kHeads * kScorePitch * 4;
constexpr int kSharedBytes = kQueryBytes + 2 * kStageBytes + kScoreBytes;

__global__ __launch_bounds__(kThreads, 1) void mla_one_kernel(const __grid_constant__ AttendArgs a) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ int found[3];
  bf16* query = reinterpret_cast<bf16*>(shared);                                     // [16][584]
  bf16* stages = reinterpret_cast<bf16*>(shared + kQueryBytes);                      // [2][64][584]
  float* scores = reinterpret_cast<float*>(shared + kQueryBytes + 2 * kStageBytes);  // [16][72]
  pdl_trigger();
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31, g = lane >> 2, c = lane & 3;
  const int row = static_cast<int>(blockIdx.x), head0 = static_cast<int>(blockIdx.y) * kHeads, split = static_cast<int>(blockIdx.z);
  const RowContext context = find_row(a, row, found);
  const int n_blocks = (context.n_keys + kKeys - 1) / kKeys, share = (n_blocks + a.n_splits - 1) / a.n_splits;
  const int first = split * share, last = min(first + share, n_blocks);
  const MlaOutput to(a, row, split);
  if (first >= last) {
    pdl_wait();
    return to.nothing(a, head0, kHeads);
  }

  // Rows of the cache come by bulk copies, 8 rows per warp, which leave the load units to the operands.
  const int* table = a.block_table + context.seq * a.table_stride;
  const int block_tokens = a.layout.block_tokens;
  const auto slot_of = [&](int key) {
    return key < context.n_keys ? static_cast<int64_t>(table[key / block_tokens]) * block_tokens + key % block_tokens : int64_t{-1};
  };
  __shared__ uint64_t full[2];
  if (thread == 0) {
    barrier_init(&full[0], 1);
    barrier_init(&full[1], 1);
    fence_async_proxy();
  }
  __syncthreads();
  const int my_key = warp * 8 + (lane & 7);
  int64_t next_slot = slot_of(first * kKeys + my_key);
  const auto copy_row = [&](int block, int64_t slot) {
    const int stage = (block - first) & 1;
    bulk_copy(stages + (stage * kKeys + my_key) * kPitch, static_cast<const bf16*>(a.k) + slot * kK, kK * 2, &full[stage]);
  };
  // Of the rows of a block those among the first `n`.
  const auto copy = [&](int block, int n) {
    if (block >= last) return;
    const int stage = (block - first) & 1;
    bf16* stage_rows = stages + stage * (kKeys * kPitch);
    if (thread == 0) barrier_expect(&full[stage], static_cast<uint32_t>(min(kKeys, context.n_keys - block * kKeys)) * (kK * 2));
    if (lane < 8 && next_slot >= 0 && block * kKeys + my_key < n) copy_row(block, next_slot);
    for (int r = 0; r < 8; ++r)  // rows past the context: zeros, as what lay there may be no numbers
      if (block * kKeys + warp * 8 + r >= context.n_keys)
        for (int u = lane; u < kK / 8; u += 32)
          *reinterpret_cast<uint4*>(stage_rows + (warp * 8 + r) * kPitch + u * 8) = make_uint4(0, 0, 0, 0);
    next_slot = slot_of((block + 1) * kKeys + my_key);
  };
  // The others.
  const auto copy_new = [&](int block, int n) {
    const int key = block * kKeys + my_key;
    if (block < last && lane < 8 && key >= n && key < context.n_keys) copy_row(block, slot_of(key));
  };
  const auto arrived = [&](int block) { barrier_wait(&full[(block - first) & 1], ((block - first) >> 1) & 1); };
  // Rows that earlier steps wrote need not wait for the kernels before this one.
  copy(first, context.n_old), copy(first + 1, context.n_old);
  pdl_wait();
  copy_new(first, context.n_old), copy_new(first + 1, context.n_old);
  const bf16* q = static_cast<const bf16*>(a.q.data) + row * a.q.stride + head0 * kK;
  for (int i = thread; i < kHeads * (kK / 8); i += kThreads) {
    const int h = i / (kK / 8), u = i % (kK / 8);
    cp_async16(query + h * kPitch + u * 8, q + (head0 + h < a.heads ? h : 0) * kK + u * 8, head0 + h < a.heads);
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  // Two thirds of the query stay in registers, the rest is read again for each block.
  constexpr int kHeld = 24;  // steps of 16
  const bf16* q_at = query + (lane & 15) * kPitch + (lane >> 4) * 8;
  uint32_t held[kHeld][4];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) ldmatrix4(held[k], q_at + k * 16);

  const float scale = a.scale * 1.44269504f;  // scores in powers of two
  float acc[8][4] = {}, largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
  for (int block = first; block < last; ++block) {
    const bf16* keys = stages + ((block - first) & 1) * (kKeys * kPitch);
    arrived(block);
    // Scores of 16 heads x 8 keys, in two chains so that the mma latency overlaps.
    float s[2][4] = {};
    const bf16* k_at = keys + (warp * 8 + (lane & 7)) * kPitch + (lane >> 3) * 8;
    constexpr int kAhead = 6;  // pairs of steps
#pragma unroll
    for (int k0 = 0; k0 < kK / 16; k0 += 2 * kAhead) {
      uint32_t kb[kAhead][4];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) ldmatrix4(kb[j], k_at + (k0 + 2 * j) * 16);
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int k = k0 + 2 * j;
        if (k < kHeld) {
          mma_bf16(s[0], held[k], kb[j][0], kb[j][1]);
          mma_bf16(s[1], held[k + 1], kb[j][2], kb[j][3]);
        } else {
          uint32_t qa[2][4];
          ldmatrix4(qa[0], q_at + k * 16);
          ldmatrix4(qa[1], q_at + k * 16 + 16);
          mma_bf16(s[0], qa[0], kb[j][0], kb[j][1]);
          mma_bf16(s[1], qa[1], kb[j][2], kb[j][3]);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = block * kKeys + warp * 8 + 2 * c;
      float2 v = make_float2((s[0][2 * h] + s[1][2 * h]) * scale, (s[0][2 * h + 1] + s[1][2 * h + 1]) * scale);
      if (key >= context.n_keys) v.x = -INFINITY;
      if (key + 1 >= context.n_keys) v.y = -INFINITY;
      *reinterpret_cast<float2*>(scores + (g + 8 * h) * kScorePitch + warp * 8 + 2 * c) = v;
    }
    __syncthreads();

    // Every warp: the weights of all 64 keys as A operands of 4 steps of 16.
    float p[2][16], peak[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 v = *reinterpret_cast<const float2*>(scores + (g + 8 * h) * kScorePitch + j * 8 + 2 * c);
        p[h][2 * j] = v.x, p[h][2 * j + 1] = v.y;
        peak[h] = fmaxf(peak[h], fmaxf(v.x, v.y));
      }
    float keep[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      peak[h] = fmaxf(peak[h], __shfl_xor_sync(~0u, peak[h], 1));
      peak[h] = fmaxf(peak[h], __shfl_xor_sync(~0u, peak[h], 2));
      peak[h] = fmaxf(peak[h], largest[h]);
      keep[h] = exp2f(largest[h] - peak[h]);
      largest[h] = peak[h];
      float add = 0.0f;
#pragma unroll
      for (int j = 0; j < 16; ++j) add += p[h][j] = exp2f(p[h][j] - peak[h]);
      sum[h] = sum[h] * keep[h] + add;
    }
    if (keep[0] != 1.0f || keep[1] != 1.0f) {
#pragma unroll
      for (int n = 0; n < 8; ++n) acc[n][0] *= keep[0], acc[n][1] *= keep[0], acc[n][2] *= keep[1], acc[n][3] *= keep[1];
    }
    const bf16* v_at = keys + (lane & 15) * kPitch + warp * 64 + (lane >> 4) * 8;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t pa[4] = {pack_bf16(p[0][4 * j], p[0][4 * j + 1]), pack_bf16(p[1][4 * j], p[1][4 * j + 1]),
                              pack_bf16(p[0][4 * j + 2], p[0][4 * j + 3]), pack_bf16(p[1][4 * j + 2], p[1][4 * j + 3])};
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        uint32_t vb[4];
        ldmatrix4_transposed(vb, v_at + j * 16 * kPitch + n * 8);
        mma_bf16(acc[n], pa, vb[0], vb[1]);
        mma_bf16(acc[n + 1], pa, vb[2], vb[3]);
      }
    }
    __syncthreads();
    copy(block + 2, context.n_keys);
  }

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
    sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
    const int head = head0 + g + 8 * h, col = head * kV + warp * 64;
    const bool there = head < a.heads;
    const float factor = 1.0f / sum[h];
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      const float2 u = make_float2(acc[n][2 * h] * factor, acc[n][2 * h + 1] * factor),
                   v = make_float2(acc[n + 1][2 * h] * factor, acc[n + 1][2 * h + 1] * factor);
      if (a.n_splits == 1) {
        if (!there) continue;
        *reinterpret_cast<uint32_t*>(to.out + col + n * 8 + 2 * c) = pack_bf16(u.x, u.y);
        *reinterpret_cast<uint32_t*>(to.out + col + n * 8 + 8 + 2 * c) = pack_bf16(v.x, v.y);
      } else {  // neighbours exchange, so that a lane has four numbers in a row
        const bool odd = (c & 1) != 0;
        const float x = __shfl_xor_sync(~0u, odd ? u.x : v.x, 1), y = __shfl_xor_sync(~0u, odd ? u.y : v.y, 1);
        const float4 four = odd ? make_float4(x, y, v.x, v.y) : make_float4(u.x, u.y, x, y);
        if (there) *reinterpret_cast<float4*>(to.part + col + (odd ? n + 1 : n) * 8 + (c >> 1) * 4) = four;
      }
    }
    if (there && a.n_splits > 1 && warp == 0 && c == 0) to.part_lse[head] = largest[h] + log2f(sum[h]);
  }
#endif
}

}  // namespace

cudaError_t launch_mla_one(const AttendArgs& a, cudaStream_t stream) {
  return launch_heads16<mla_one_kernel>(a, kThreads, kSharedBytes, stream);
}

}  // namespace cachalot::cuda
