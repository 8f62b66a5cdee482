// Absorbed MLA for query rows of several sequences: MQA over latent rows of 576 whose first 512 are the values (DeepSeek-V2 section 2.1;
// split context as in FlashDecoding). A block takes 16 heads of one row and a part of its context, whose rows come in by bulk copies. A
// warp scores half of the keys of a stage over a quarter of the columns, turns the scores of 2 heads into weights, and weighs 64 of the 512
// value columns. Per 64 keys: 73.7 kB from memory against 544 mma, so with long parts the reading of the cache is what limits, with short
// ones chains of instructions, and what of a multiprocessor the kernel leaves to those before and after it.
//
// So a part of up to 128 keys is one stage, as long as it needs to be, and fewer registers; longer ones go through two stages of 64 keys,
// by turns or, when they turn out to be short, both at once.
#include "cuda/mla_decode.cuh"

#include <algorithm>

namespace cachalot::cuda {
namespace {

[[maybe_unused]] constexpr int kHeads = 16, kK = kMlaK, kV = kMlaV, kPitch = kK + 8, kThreads = 256, kWarps = kThreads / 32;
constexpr int kQuarters = 4, kSteps = kK / 16 / kQuarters;
static_assert(kSteps * 16 * kQuarters == kK);

// Sizes in elements unless they say bytes.
template <int kStageCount, int kStageKeys, int kPieceRows>
struct Form {
  static constexpr int kStages = kStageCount, kKeys = kStageKeys, kMostKeys = kStages * kKeys;  // the last: of a turn
  // A multiprocessor begins a copy in 88 clocks, so one takes several rows. These pieces lie 16 bytes more than their length apart, and the
  // 8 keys of an mma tile are the rows of the same place in 8 pieces, so that they are in different banks. What the tiles call key 8 t + i:
  static constexpr int kRows = kPieceRows, kPiece = kRows * kK + 8, kGroup = 8 * kRows, kStage = kKeys / kRows * kPiece;
  static __device__ __forceinline__ constexpr int tile_at(int t) { return t / kRows * 8 * kPiece + t % kRows * kK; }
  static __device__ __forceinline__ constexpr int row_at(int row) { return row / kRows * kPiece + row % kRows * kK; }
  static __device__ __forceinline__ constexpr int row_of(int key) { return key / kGroup * kGroup + key % 8 * kRows + key / 8 % kRows; }
  static constexpr int kScorePitch = kMostKeys + 8, kWeightPitch = kMostKeys + 8;
  static constexpr int kQueryBytes = kHeads * kPitch * 2, kStageBytes = kStage * 2, kScoreBytes = kQuarters * kHeads * kScorePitch * 4;
  static constexpr int kFirstBytes = kQueryBytes > kScoreBytes ? kQueryBytes : kScoreBytes;
  static constexpr int kSharedBytes = kFirstBytes + kStages * kStageBytes + kHeads * kWeightPitch * 2;
  static_assert(kKeys % kGroup == 0 && kKeys / kRows % kWarps == 0 && (kStages == 1 || kKeys == 64) && kPiece * 2 % 16 == 0);
};

// Of shared memory at least, so that no multiprocessor has two blocks while another has none.
constexpr int kAlone = 116 * 1024;

[[maybe_unused]] __device__ __forceinline__ void ldmatrix2(uint32_t (&r)[2], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(p)));
}

// The bound concerns the form of two stages alone: without it the compiler takes 165 registers for 158, and long contexts take 4% longer.
template <typename F>
__global__ __maxnreg__(168) void mla_decode_kernel(const __grid_constant__ AttendArgs a) {
#if __CUDA_ARCH__ >= 900
  constexpr int kStages = F::kStages, kKeys = F::kKeys, kRows = F::kRows;
  constexpr int kTiles = kKeys / 16;                // of 8 keys, of a warp, which takes every other one
  constexpr int kFours = (F::kMostKeys + 63) / 64;  // a lane of the softmax has so many times four keys
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ int found[3];
  __shared__ float keeps[kHeads], sums[kHeads];      // what a head's results so far are multiplied with; its sum of exponentials
  bf16* query = reinterpret_cast<bf16*>(shared);     // [16][584], and when it is in registers,
  float* scores = reinterpret_cast<float*>(shared);  // [4 quarters][16][kScorePitch]
  bf16* stages = reinterpret_cast<bf16*>(shared + F::kFirstBytes);
  bf16* weights = stages + kStages * F::kStage;  // [16][kWeightPitch]
  if (gridDim.x == 1) pdl_trigger();
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31, g = lane >> 2, c = lane & 3;
  const int row = static_cast<int>(blockIdx.x), head0 = static_cast<int>(blockIdx.y) * kHeads, split = static_cast<int>(blockIdx.z);
  __shared__ uint64_t full[kStages];
  if (thread == 0) {
    for (uint64_t& barrier : full) barrier_init(&barrier, 1);
    fence_async_proxy();
  }
  // Where rows are decoded, row r is all of sequence r: its first pages are asked for together with what says so.
  constexpr int kPages = 64;
  const int guess = a.seq_begin + row;
  int pages[kPages / 32] = {};
#pragma unroll
  for (int i = 0; i < kPages / 32; ++i)
    if (row < a.n_seqs && i * 32 + lane < a.table_stride) pages[i] = a.block_table[guess * a.table_stride + i * 32 + lane];
  const RowContext context = find_row(a, row, found);
  const int share = mla_part_keys(context.n_keys, a.n_splits), first_key = split * share, n_keys = min(share, context.n_keys - first_key),
            n_old = context.n_old - first_key;  // of this part
  const MlaOutput to(a, row, split);
  if (n_keys <= 0) {
    pdl_wait();
    return to.nothing(a, head0, kHeads);
  }
  // Blocks of keys, and how many of them are in a turn.
  const int n_blocks = kStages == 1 ? 1 : ceil_div(n_keys, kKeys), at_once = kStages == 1 ? 1 : n_blocks <= kStages ? n_blocks : 1;

  const int* table = a.block_table + context.seq * a.table_stride;
  const int log_tokens = __ffs(a.layout.block_tokens) - 1;
  const auto slot_of = [&](int key) {  // the whole warp calls
    const int at = first_key + key, page = at >> log_tokens;
    int entry = __shfl_sync(~0u, pages[0], page & 31);
    const int further = __shfl_sync(~0u, pages[1], page & 31);
    if (page >= 32) entry = further;
    if (key >= n_keys) return int64_t{-1};
    if (context.seq != guess || page >= kPages) entry = table[page];
    return (static_cast<int64_t>(entry) << log_tokens) + (at & (a.layout.block_tokens - 1));
  };
  // A warp copies some pieces of each block of keys, by a lane each.
  constexpr int kCopies = kKeys / kRows / kWarps;
  const int my_piece = warp * kCopies + lane, my_key = my_piece * kRows;
  const auto copy_rows = [&](int block, int64_t slot, int from, int to) {
    if (from < to)
      bulk_copy(stages + block % kStages * F::kStage + my_piece * F::kPiece + from * kK, static_cast<const bf16*>(a.k) + (slot + from) * kK,
                static_cast<uint32_t>(to - from) * (kK * 2), &full[block % kStages]);
  };
  int64_t next_slot = slot_of(my_key);
  // Of the rows of a block those among the first `n`.
  const auto copy = [&](int block, int n) {
    if (block >= n_blocks) return;
    const int there = min(kKeys, n_keys - block * kKeys), key = block * kKeys + my_key;
    if (thread == 0) barrier_expect(&full[block % kStages], static_cast<uint32_t>(there) * (kK * 2));
    if (next_slot >= 0 && lane < kCopies) copy_rows(block, next_slot, 0, min(min(n, n_keys) - key, kRows));
    for (int r = there + warp; r < ceil_div(there, F::kGroup) * F::kGroup; r += kWarps)  // zeros: what lay there may be no numbers
      for (int u = lane; u < kK / 8; u += 32)
        *reinterpret_cast<uint4*>(stages + block % kStages * F::kStage + F::row_at(r) + u * 8) = make_uint4(0, 0, 0, 0);
    next_slot = slot_of(key + kKeys);
  };
  // The others.
  const auto copy_new = [&](int block, int n) {
    const int key = block * kKeys + my_key;
    if (block >= n_blocks) return;
    const int64_t slot = slot_of(key);
    if (lane < kCopies && slot >= 0) copy_rows(block, slot, max(n - key, 0), min(n_keys - key, kRows));
  };
  const auto arrived = [&](int block) { barrier_wait(&full[block % kStages], static_cast<uint32_t>(block / kStages) & 1u); };
  // Rows that earlier steps wrote need not wait for the kernels before this one.
#pragma unroll
  for (int i = 0; i < kStages; ++i) copy(i, n_old);
  pdl_wait();
  if (gridDim.x > 1) pdl_trigger();  // with several rows what would wait beside it costs more than it gains
#pragma unroll
  for (int i = 0; i < kStages; ++i) copy_new(i, n_old);
  const int quarter = warp >> 1, half = warp & 1, quarter_at = quarter * kSteps * 16;
  uint32_t held[kSteps][4];  // the query's columns of this quarter
  const bf16* q = static_cast<const bf16*>(a.q.data) + row * a.q.stride + head0 * kK;
  if (a.q_as_operands) {
    const uint4* from = reinterpret_cast<const uint4*>(q) + quarter * kSteps * 32 + lane;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint4 v = load16(from + k * 32);
      held[k][0] = v.x, held[k][1] = v.y, held[k][2] = v.z, held[k][3] = v.w;
    }
  } else {
    for (int i = thread; i < kHeads * (kK / 8); i += kThreads) {
      const int h = i / (kK / 8), u = i % (kK / 8);
      cp_async16(query + h * kPitch + u * 8, q + (head0 + h < a.heads ? h : 0) * kK + u * 8, head0 + h < a.heads);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) ldmatrix4(held[k], query + (lane & 15) * kPitch + (lane >> 4) * 8 + quarter_at + k * 16);
    __syncthreads();  // the scores take its place
  }

  const float scale = a.scale * kLog2E;                                   // scores in powers of two
  const int my_head = 2 * warp + (lane >> 4), my_four = 4 * (lane & 15);  // of the softmax
  float acc[8][4] = {}, largest = -INFINITY, sum = 0.0f;
  for (int block = 0; block < n_blocks; block += at_once) {
    const bf16* rows = stages + block % kStages * F::kStage;
    const int n = min(n_keys - block * kKeys, at_once * kKeys),  // keys of this turn
        n_tiles = ceil_div(n, F::kGroup) * (F::kGroup / 8);
    // Every other 8 keys of a block, in as many chains, so that the mma latency overlaps.
    for (int i = 0; i < at_once; ++i) {
      arrived(block + i);
      if (i * (kKeys / 8) + half >= n_tiles) break;
      float s[kTiles][4] = {};
      const bf16* k_at =
          rows + i * F::kStage + F::tile_at(half + (lane >> 4) * 2) + (lane & 7) * F::kPiece + (lane >> 3 & 1) * 8 + quarter_at;
      [[maybe_unused]] const bf16* k_last =
          rows + F::tile_at(half + kTiles / 2 * 4) + (lane & 7) * F::kPiece + (lane >> 3 & 1) * 8 + quarter_at;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        uint32_t b[kTiles / 2][4];
        [[maybe_unused]] uint32_t last[2];
#pragma unroll
        for (int t = 0; t < kTiles / 2; ++t) ldmatrix4(b[t], k_at + F::tile_at(4 * t) + k * 16);
        if constexpr (kTiles % 2 == 1) ldmatrix2(last, k_last + k * 16);
#pragma unroll
        for (int t = 0; t < kTiles / 2 * 2; ++t) mma_bf16(s[t], held[k], b[t >> 1][2 * (t & 1)], b[t >> 1][2 * (t & 1) + 1]);
        if constexpr (kTiles % 2 == 1) mma_bf16(s[kTiles - 1], held[k], last[0], last[1]);
      }
      float* s_at = scores + (quarter * kHeads + g) * F::kScorePitch + i * kKeys + half * 8 + 2 * c;
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          *reinterpret_cast<float2*>(s_at + 8 * h * F::kScorePitch + t * 16) = make_float2(s[t][2 * h], s[t][2 * h + 1]);
    }
    __syncthreads();

    float p[kFours][4], peak = largest;
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const int key = i * 64 + my_four;
      if (i * 64 >= at_once * kKeys) break;
      float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (F::kMostKeys % 64 == 0 || key < F::kMostKeys)
#pragma unroll
        for (int part = 0; part < kQuarters; ++part) {
          const float4 u = *reinterpret_cast<const float4*>(scores + (part * kHeads + my_head) * F::kScorePitch + key);
          v.x += u.x, v.y += u.y, v.z += u.z, v.w += u.w;
        }
      p[i][0] = v.x, p[i][1] = v.y, p[i][2] = v.z, p[i][3] = v.w;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool there = (F::kMostKeys % 64 == 0 || key < F::kMostKeys) && F::row_of(key + j) < n;
        p[i][j] = there ? p[i][j] * scale : -INFINITY;
        peak = fmaxf(peak, p[i][j]);
      }
    }
#pragma unroll
    for (int m = 8; m > 0; m >>= 1) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, m));
    const float keep = exp2f(largest - peak);
    largest = peak;
    sum *= keep;
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const int key = i * 64 + my_four;
      if (i * 64 >= at_once * kKeys) break;
#pragma unroll
      for (int j = 0; j < 4; ++j) sum += p[i][j] = exp2f(p[i][j] - peak);
      if (F::kMostKeys % 64 == 0 || key < F::kMostKeys)
        *reinterpret_cast<uint2*>(weights + my_head * F::kWeightPitch + key) =
            make_uint2(pack_bf16(p[i][0], p[i][1]), pack_bf16(p[i][2], p[i][3]));
    }
    if (block + at_once >= n_blocks)
#pragma unroll
      for (int m = 8; m > 0; m >>= 1) sum += __shfl_xor_sync(~0u, sum, m);
    if ((lane & 15) == 0) keeps[my_head] = keep, sums[my_head] = sum;
    __syncthreads();

    const float of_head[2] = {keeps[g], keeps[g + 8]};
    if (block > 0 && (of_head[0] != 1.0f || of_head[1] != 1.0f)) {
#pragma unroll
      for (int n8 = 0; n8 < 8; ++n8)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n8][i] *= of_head[i >> 1];
    }
    // 16 keys at a time, the next ones' operands asked for before these are used.
    const bf16 *v_at = rows + F::tile_at(lane >> 3 & 1) + (lane & 7) * F::kPiece + warp * 64 + (lane >> 4) * 8,
               *w_at = weights + (lane & 15) * F::kWeightPitch + (lane >> 4) * 8;
    uint32_t w[2][4], v[2][4][4];
    const auto load = [&](int set, int j) {
      ldmatrix4(w[set], w_at + j * 16);
#pragma unroll
      for (int t = 0; t < 4; ++t) ldmatrix4_transposed(v[set][t], v_at + F::tile_at(2 * j) + t * 16);
    };
    const int n_sixteens = n_tiles / 2;
    load(0, 0);
    for (int base = 0; base < n_sixteens; base += 2)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (base + j >= n_sixteens) break;
        if (base + j + 1 < n_sixteens) load(j ^ 1, base + j + 1);
#pragma unroll
        for (int t = 0; t < 8; ++t) mma_bf16(acc[t], w[j], v[j][t >> 1][2 * (t & 1)], v[j][t >> 1][2 * (t & 1) + 1]);
      }
    if (block + at_once < n_blocks) {
      __syncthreads();
      copy(block + kStages, n_keys);
    }
  }

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = head0 + g + 8 * h, col = head * kV + warp * 64;
    const bool there = head < a.heads;
    const float factor = 1.0f / sums[g + 8 * h];
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      const float2 u = make_float2(acc[n][2 * h] * factor, acc[n][2 * h + 1] * factor),
                   v = make_float2(acc[n + 1][2 * h] * factor, acc[n + 1][2 * h + 1] * factor);
      if (a.n_splits == 1) {
        if (!there) continue;
        *reinterpret_cast<uint32_t*>(to.out + col + n * 8 + 2 * c) = pack_bf16(u.x, u.y);
        *reinterpret_cast<uint32_t*>(to.out + col + n * 8 + 8 + 2 * c) = pack_bf16(v.x, v.y);
      } else if (a.half_parts) {
        const bool odd = (c & 1) != 0;
        const uint32_t x = pack_bf16(u.x, u.y), y = pack_bf16(v.x, v.y), other = __shfl_xor_sync(~0u, odd ? x : y, 1);
        bf16* part = reinterpret_cast<bf16*>(a.partial) + (to.part - a.partial) + col + (odd ? n + 1 : n) * 8 + (c >> 1) * 4;
        if (there) *reinterpret_cast<uint2*>(part) = odd ? make_uint2(other, y) : make_uint2(x, other);
      } else {  // neighbours exchange, so that a lane has four numbers in a row
        const bool odd = (c & 1) != 0;
        const float x = __shfl_xor_sync(~0u, odd ? u.x : v.x, 1), y = __shfl_xor_sync(~0u, odd ? u.y : v.y, 1);
        const float4 four = odd ? make_float4(x, y, v.x, v.y) : make_float4(u.x, u.y, x, y);
        if (there) *reinterpret_cast<float4*>(to.part + col + (odd ? n + 1 : n) * 8 + (c >> 1) * 4) = four;
      }
    }
  }
  if (a.n_splits > 1 && (lane & 15) == 0 && head0 + my_head < a.heads) to.part_lse[head0 + my_head] = largest + log2f(sum);
#endif
}

template <typename F>
cudaError_t launch_form(const AttendArgs& a, cudaStream_t stream) {
  return launch_heads16<mla_decode_kernel<F>>(a, kThreads, std::max(F::kSharedBytes, kAlone), stream);
}

}  // namespace

cudaError_t launch_mla_heads16(const AttendArgs& a, cudaStream_t stream) {
  return a.part_keys <= 64    ? launch_form<Form<1, 64, 4>>(a, stream)
         : a.part_keys <= 80  ? launch_form<Form<1, 80, 2>>(a, stream)
         : a.part_keys <= 128 ? launch_form<Form<1, 128, 4>>(a, stream)
                              : launch_form<Form<2, 64, 4>>(a, stream);
}

}  // namespace cachalot::cuda
