// Absorbed MLA over fp8 cache rows (ops/kv_layout.h: 512 codes, 4 scales, 64 rope numbers in bf16; 656 bytes), for 16 heads of one row.
// The codes go to the tensor cores as f16, which holds them exactly. Scales never touch single numbers: a key's scale of a group multiplies
// the group's part of the score, and, for the values, the softmax weight of that key. Rows lie in shared memory as in the cache, 656 bytes
// apart, which spreads both ways of reading them over all banks, so that a copy takes as many rows at once as a page holds.
// What limits is the number of instructions, so nothing is computed twice: per 64 keys a warp scores 16 keys over half of the columns,
// turns the scores of 2 heads into weights, and weighs 64 of the 512 value columns. The last runs one block of keys behind, so that one
// barrier per block serves both exchanges.
#include "cuda/mla_decode.cuh"
#include "ops/kv_layout.h"

namespace cachalot::cuda {
namespace {

constexpr int kHeads = 16, kKeys = 64, kRow = kFp8Row, kThreads = 256, kStages = 4;
constexpr int kStageBytes = kKeys * kRow, kScorePitch = 72, kScoreFloats = 2 * kHeads * kScorePitch, kWeightPitch = 72;
// What the warps exchange per block of keys, besides scores; two of them in turn.
struct Exchange {
  __half weights[kHeads][kWeightPitch];  // of the softmax, relative to the largest score so far
  __half2 scales[4][kKeys / 2];          // of the keys' groups, in units
  float keep[kHeads], keep_unit[4];      // what sums so far are to be multiplied with
};
constexpr int kSharedBytes = kStages * kStageBytes + 2 * kScoreFloats * 4 + 2 * static_cast<int>(sizeof(Exchange));

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The scores of 16 keys by one warp: half of the 512 latent columns and half of the rope's. The columns are taken in an order that gives
// each lane 16 bytes of a key at a time: step s of unit (u, w) holds columns 128 u + 32 c + 16 w + 4 s .. + 3 for lane part c.
struct Query {
  uint32_t latent[16][4], rope[2][4];
  float back[2];  // what the latent part was divided by: a power of two per head, since f16 has a short range

  // q: the 16 heads of this block; heads from n_heads on are zero.
  __device__ __forceinline__ void load(const bf16* q, int n_heads, int half, int g, int c) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
    uint4 raw[2][8];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bf16* head = q + (g + 8 * h) * kMlaK;
      const bool there = g + 8 * h < n_heads;
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // u, w, half of a unit
        raw[h][i] = there ? load16(head + 128 * (2 * half + (i >> 2)) + 32 * c + 16 * (i >> 1 & 1) + 8 * (i & 1)) : zero;
        const uint32_t words[4] = {raw[h][i].x, raw[h][i].y, raw[h][i].z, raw[h][i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) largest = fmaxf(largest, fmaxf(fabsf(low_bf16(words[j])), fabsf(high_bf16(words[j]))));
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      const float2 power = power_for(largest);
      const float factor = power.x;
      back[h] = power.y;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t words[4] = {raw[h][i].x, raw[h][i].y, raw[h][i].z, raw[h][i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j)
          latent[2 * i + (j >> 1)][h + 2 * (j & 1)] = pack_f16(low_bf16(words[j]) * factor, high_bf16(words[j]) * factor);
      }
      const uint4 r = there ? load16(head + kMlaV + 16 * c + 8 * half) : zero;
      rope[0][h] = r.x, rope[0][h + 2] = r.y, rope[1][h] = r.z, rope[1][h + 2] = r.w;
    }
  }

  // rows: of the 16 keys. s[n]: 16 heads x 8 keys as mma leaves them.
  __device__ __forceinline__ void score(const uint8_t* rows, int half, int g, int c, float (&s)[2][4]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = 0.0f;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      float part[2][2][4] = {};
#pragma unroll
      for (int w = 0; w < 2; ++w)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const uint4 codes = *reinterpret_cast<const uint4*>(rows + (n * 8 + g) * kRow + 128 * (2 * half + u) + 32 * c + 16 * w);
          const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            uint32_t b0 = 0, b1 = 0;
            unpack_codes(words[j], b0, b1);
            mma_f16(part[n][w], latent[8 * u + 4 * w + j], b0, b1);
          }
        }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const uint8_t* key = rows + (n * 8 + 2 * c) * kRow + kFp8ScalesAt + 4 * (2 * half + u);
        const float scale[2] = {*reinterpret_cast<const float*>(key), *reinterpret_cast<const float*>(key + kRow)};
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = fmaf(scale[i & 1], part[n][0][i] + part[n][1][i], s[n][i]);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float part[4] = {};
      const uint4 key = *reinterpret_cast<const uint4*>(rows + (n * 8 + g) * kRow + kFp8RopeAt + 32 * c + 16 * half);
      mma_bf16(part, rope[0], key.x, key.y);
      mma_bf16(part, rope[1], key.z, key.w);
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = fmaf(s[n][i], back[i >> 1], part[i]);
    }
  }
};
#endif

__global__ __launch_bounds__(kThreads, 1) void mla_fp8_kernel(const __grid_constant__ AttendArgs a) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t stages[];  // [kStages][64][656]
  __shared__ uint64_t full[kStages];
  __shared__ int found[3];
  float* scores = reinterpret_cast<float*>(stages + kStages * kStageBytes);  // [2][2 halves][16][72]
  Exchange* exchanges = reinterpret_cast<Exchange*>(scores + 2 * kScoreFloats);
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
  if (thread < kStages) barrier_init(&full[thread], 1);
  fence_async_proxy();
  __syncthreads();

  // Lane i of warp 0 copies the rows of page i of a block of keys.
  const int* table = a.block_table + context.seq * a.table_stride;
  const int page_rows = a.layout.block_tokens, n_pages = kKeys / page_rows;
  const auto page_of = [&](int block) { return warp == 0 && lane < n_pages && block < last ? table[block * n_pages + lane] : 0; };
  int next_page = page_of(first);
  const auto copy = [&](int block) {  // block after block
    if (block >= last) return;
    uint8_t* stage = stages + (block - first) % kStages * kStageBytes;
    const int n = min(kKeys, context.n_keys - block * kKeys);
    if (warp == 0) {
      if (lane == 0) barrier_expect(&full[(block - first) % kStages], static_cast<uint32_t>(n) * kRow);
      __syncwarp();
      const int rows = min(page_rows, n - lane * page_rows);
      if (lane < n_pages && rows > 0)
        bulk_copy(stage + lane * page_rows * kRow, static_cast<const uint8_t*>(a.k) + static_cast<int64_t>(next_page) * page_rows * kRow,
                  static_cast<uint32_t>(rows) * kRow, &full[(block - first) % kStages]);
    }
    next_page = page_of(block + 1);
    for (int i = n * kRow / 16 + thread; i < kKeys * kRow / 16; i += kThreads)  // no rows: zeros, as what lay there may be no numbers
      *reinterpret_cast<uint4*>(stage + i * 16) = make_uint4(0, 0, 0, 0);
  };
  // Blocks that earlier steps wrote need not wait for the kernels before this one.
  const int n_early = min(2, context.n_old / kKeys - first);
  for (int i = 0; i < n_early; ++i) copy(first + i);
  pdl_wait();
  for (int i = max(n_early, 0); i < 2; ++i) copy(first + i);
  const int half = warp & 1, quarter = warp >> 1;
  Query query;
  query.load(static_cast<const bf16*>(a.q.data) + row * a.q.stride + head0 * kMlaK, a.heads - head0, half, g, c);

  __syncthreads();  // zeros in place of rows that are not there

  const float scale = a.scale * kLog2E;                // scores in powers of two
  float acc[8][4] = {};                                // this warp's 64 columns, in multiples of the unit of their group
  float largest = -INFINITY, sum = 0.0f, unit = 0.0f;  // of head 2 warp + lane / 16; of group `warp` (warps 0 to 3)
  for (int block = first; block <= last; ++block) {
    const uint8_t* rows = stages + (block - first) % kStages * kStageBytes;
    float* block_scores = scores + (block & 1) * kScoreFloats;
    if (block < last) {
      barrier_wait(&full[(block - first) % kStages], static_cast<uint32_t>((block - first) / kStages) & 1u);
      float s[2][4];
      query.score(rows + quarter * 16 * kRow, half, g, c, s);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          *reinterpret_cast<float2*>(block_scores + (half * kHeads + g + 8 * h) * kScorePitch + quarter * 16 + n * 8 + 2 * c) =
              make_float2(s[n][2 * h], s[n][2 * h + 1]);
    }
    __syncthreads();  // scores of this block and weights of the one before are there; the one before that is done with
    copy(block + 2);
    if (block < last) {
      Exchange& to_all = exchanges[block & 1];
      const int head = 2 * warp + (lane >> 4), key = 4 * (lane & 15);
      const float4 x = *reinterpret_cast<const float4*>(block_scores + head * kScorePitch + key),
                   y = *reinterpret_cast<const float4*>(block_scores + (kHeads + head) * kScorePitch + key);
      float p[4] = {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
      const int n = context.n_keys - block * kKeys - key;
#pragma unroll
      for (int i = 0; i < 4; ++i) p[i] = i < n ? p[i] * scale : -INFINITY;
      float peak = fmaxf(fmaxf(p[0], p[1]), fmaxf(p[2], p[3]));
#pragma unroll
      for (int m = 8; m > 0; m >>= 1) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, m));
      peak = fmaxf(peak, largest);
      const float keep = exp2_fast(largest - peak);
      largest = peak;
#pragma unroll
      for (int i = 0; i < 4; ++i) p[i] = exp2_fast(p[i] - peak);
      sum = fmaf(sum, keep, (p[0] + p[1]) + (p[2] + p[3]));
      *reinterpret_cast<uint2*>(&to_all.weights[head][key]) = make_uint2(pack_f16(p[0], p[1]), pack_f16(p[2], p[3]));
      if ((lane & 15) == 0) to_all.keep[head] = keep;
      if (warp < 4) {
        const uint8_t* at = rows + 2 * lane * kRow + kFp8ScalesAt + 4 * warp;
        const float u = *reinterpret_cast<const float*>(at), v = *reinterpret_cast<const float*>(at + kRow);
        const float most = fmaxf(unit, __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fmaxf(u, v)))));  // scales are positive
        const float per_unit = 1.0f / most;
        to_all.scales[warp][lane] = __floats2half2_rn(u * per_unit, v * per_unit);
        if (lane == 0) to_all.keep_unit[warp] = unit * per_unit;
        unit = most;
      }
    }
    if (block == first) continue;

    // Transposed reads of 8 keys x 8 pairs of columns: a word holds two keys of two neighbouring columns. Tile n of acc holds the even or
    // odd ones of 16 columns.
    const Exchange& from = exchanges[(block - 1) & 1];
    const uint8_t* values = stages + (block - 1 - first) % kStages * kStageBytes;
    const float keep[2] = {from.keep[g] * from.keep_unit[quarter], from.keep[g + 8] * from.keep_unit[quarter]};
    if (__any_sync(~0u, keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
      for (int n = 0; n < 8; ++n) acc[n][0] *= keep[0], acc[n][1] *= keep[0], acc[n][2] *= keep[1], acc[n][3] *= keep[1];
    }
    const uint8_t* v_at = values + ((lane & 7) + (lane >> 3 & 1) * 8) * kRow + warp * 64 + (lane >> 4) * 16;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t p[4];
      ldmatrix4(p, &from.weights[lane & 15][j * 16 + (lane >> 4) * 8]);
      const auto* key_scales = reinterpret_cast<const uint32_t*>(from.scales[quarter]) + j * 8 + c;
      const uint32_t low = key_scales[0], high = key_scales[4];
      p[0] = mul_f16x2(p[0], low), p[1] = mul_f16x2(p[1], low), p[2] = mul_f16x2(p[2], high), p[3] = mul_f16x2(p[3], high);
#pragma unroll
      for (int d = 0; d < 2; ++d) {
        uint32_t v[4];
        ldmatrix4_transposed(v, v_at + j * 16 * kRow + d * 32);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          uint32_t even[2], odd[2];
          unpack_codes(__byte_perm(v[2 * n], 0, 0x3120), even[0], odd[0]);
          unpack_codes(__byte_perm(v[2 * n + 1], 0, 0x3120), even[1], odd[1]);
          mma_f16(acc[4 * d + 2 * n], p, even[0], even[1]);
          mma_f16(acc[4 * d + 2 * n + 1], p, odd[0], odd[1]);
        }
      }
    }
  }

  // Each head's sum and largest score, each group's unit, to all.
  float* head_sum = scores;
  float* head_largest = scores + kHeads;
  float* group_unit = scores + 2 * kHeads;
#pragma unroll
  for (int m = 8; m > 0; m >>= 1) sum += __shfl_xor_sync(~0u, sum, m);
  __syncthreads();
  if ((lane & 15) == 0) head_sum[2 * warp + (lane >> 4)] = sum, head_largest[2 * warp + (lane >> 4)] = largest;
  if (warp < 4 && lane == 0) group_unit[warp] = unit;
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = head0 + g + 8 * h;
    if (head >= a.heads) continue;
    const float total = head_sum[g + 8 * h], factor = group_unit[quarter] / total;
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      const int col = head * kMlaV + warp * 64 + n * 8 + 4 * c;
      const float4 v =
          make_float4(acc[n][2 * h] * factor, acc[n + 1][2 * h] * factor, acc[n][2 * h + 1] * factor, acc[n + 1][2 * h + 1] * factor);
      if (a.n_splits > 1)
        *reinterpret_cast<float4*>(to.part + col) = v;
      else
        *reinterpret_cast<uint2*>(to.out + col) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
    }
    if (a.n_splits > 1 && warp == 0 && c == 0) to.part_lse[head] = head_largest[g + 8 * h] + log2f(total);
  }
#else
  __trap();
#endif
}

}  // namespace

cudaError_t launch_mla_fp8(const AttendArgs& a, cudaStream_t stream) {
  return launch_heads16<mla_fp8_kernel>(a, kThreads, kSharedBytes, stream);
}

}  // namespace cachalot::cuda
