// Attention of few query rows over separate keys and values in bf16 (GQA, MHA): a block takes up to 8 query heads of one KV head, one row
// and a part of its context (FlashDecoding), each of 4 warps 16 keys at a time on its own. Both products have the cache as the A operand
// (keys x dims, then dims x keys) and the heads as the 8 columns of B, so that no column is idle for models with 8 heads per KV head.
// Rows go from memory to the registers of the operands: the order of dims within a sum is free, so a lane takes 16 bytes of a row at once.
#include "cuda/attend_rows.cuh"

namespace cachalot::cuda {
namespace {

constexpr int kHeads = 8, kUnit = 16, kWarps = 4, kThreads = kWarps * 32;
constexpr int kPartKeys = kUnit * kWarps;  // contexts are cut into parts of a multiple of this

__device__ __forceinline__ uint32_t transpose_8x8(uint32_t v) {
  uint32_t t;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(v));
  return t;
}
__device__ __forceinline__ uint32_t& word(uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

template <int kD>
__global__ __launch_bounds__(kThreads) void gqa_decode_kernel(const __grid_constant__ AttendArgs a) {
  constexpr int kPieces = kD / 32, kHalves = kD / 64, kTiles = kD / 16;
  __shared__ int found[3];
  __shared__ float sums[kWarps][kHeads][kD + 4], stats[2][kWarps][kHeads];
  pdl_trigger();
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31, g = lane >> 2, c = lane & 3;
  const int share = a.heads / a.layout.heads, groups = ceil_div(share, kHeads);
  const int row = static_cast<int>(blockIdx.x), kv_head = static_cast<int>(blockIdx.y) / groups, split = static_cast<int>(blockIdx.z);
  const int in_group = static_cast<int>(blockIdx.y) % groups * kHeads, n_heads = min(kHeads, share - in_group),
            head0 = kv_head * share + in_group;
  const RowContext context = find_row(a, row, found);
  const int n_keys = context.n_keys, parts = ceil_div(n_keys, kPartKeys), per_split = ceil_div(parts, a.n_splits) * kPartKeys;
  const int first = split * per_split, last = min(first + per_split, n_keys);

  // Of 16 keys from `key` on: the pages of the first and the second eight, which a page boundary may separate.
  const int* table = a.block_table + context.seq * a.table_stride;
  const int page_shift = __ffs(a.layout.block_tokens) - 1, in_page = a.layout.block_tokens - 1;
  const auto pages_of = [&](int key) {
    int2 pages = make_int2(0, 0);
    if (key < last) pages.x = pages.y = table[key >> page_shift];
    if (key + 8 < last) pages.y = table[(key + 8) >> page_shift];
    return pages;
  };
  const int width = a.layout.heads * kD;
  const bf16 *k_pages = static_cast<const bf16*>(a.k) + kv_head * kD, *v_pages = static_cast<const bf16*>(a.v) + kv_head * kD;
  const auto row_at = [&](int2 pages, int key, int i) {  // of key + i, an offset in elements
    return ((static_cast<int64_t>(i < 8 ? pages.x : pages.y) << page_shift) + ((key + i) & in_page)) * width;
  };
  uint4 keys[2][kPieces], values[4][kHalves];
  const auto load_keys = [&](int key, int2 pages) {  // rows g and g + 8, dims 32 i + 8 c ...
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool there = key + g + 8 * h < last;
      const bf16* from = k_pages + row_at(pages, key, g + 8 * h) + 8 * c;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) keys[h][i] = there ? load16(from + 32 * i) : make_uint4(0, 0, 0, 0);
    }
  };
  const auto load_values = [&](int key, int2 pages) {  // rows 2c, 2c + 1, 2c + 8, 2c + 9, dims 64 i + 8 g ...; zeros past the context
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = 2 * c + (j & 1) + 8 * (j >> 1);
      const bool there = key + r < last;
      const bf16* from = v_pages + row_at(pages, key, r) + 8 * g;
#pragma unroll
      for (int i = 0; i < kHalves; ++i) values[j][i] = there ? load16(from + 64 * i) : make_uint4(0, 0, 0, 0);
    }
  };

  // Rows that earlier steps wrote need not wait for the kernels before this one.
  int key = first + warp * kUnit;
  int2 pages = pages_of(key), next_pages = pages_of(key + kPartKeys);
  const bool early = key + kUnit <= context.n_old;
  if (early) load_keys(key, pages);
  pdl_wait();
  if (!early && key < last) load_keys(key, pages);
  uint4 query[kPieces];  // head g, dims as the keys'
  const bf16* q = static_cast<const bf16*>(a.q.data) + row * a.q.stride + (head0 + g) * kD + 8 * c;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) query[i] = g < n_heads && n_keys > 0 ? load16(q + 32 * i) : make_uint4(0, 0, 0, 0);

  const float scale = a.scale * 1.44269504f;                                              // scores in powers of two
  float acc[kTiles][4] = {}, largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};  // of heads 2c and 2c + 1
  for (; key < last; key += kPartKeys) {
    load_values(key, pages);
    float s[4] = {};  // keys g and g + 8 (the last two), heads 2c and 2c + 1
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t k[4] = {word(keys[0][i], 2 * h), word(keys[1][i], 2 * h), word(keys[0][i], 2 * h + 1), word(keys[1][i], 2 * h + 1)};
        mma_bf16(s, k, word(query[i], 2 * h), word(query[i], 2 * h + 1));
      }
    const int here = key;
    pages = next_pages;
    if (here + kPartKeys < last) load_keys(here + kPartKeys, pages);
    next_pages = pages_of(here + 2 * kPartKeys);

    float keep[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      s[h] = here + g < last ? s[h] * scale : -INFINITY;
      s[h + 2] = here + g + 8 < last ? s[h + 2] * scale : -INFINITY;
      float peak = fmaxf(s[h], s[h + 2]);
      peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 4));
      peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 8));
      peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 16));
      peak = fmaxf(peak, largest[h]);  // finite: key `here` is there
      keep[h] = exp2f(largest[h] - peak);
      largest[h] = peak;
      s[h] = exp2f(s[h] - peak), s[h + 2] = exp2f(s[h + 2] - peak);
      sum[h] = sum[h] * keep[h] + s[h] + s[h + 2];
    }
    const uint32_t p0 = transpose_8x8(pack_bf16(s[0], s[1])), p1 = transpose_8x8(pack_bf16(s[2], s[3]));
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      acc[t][0] *= keep[0], acc[t][1] *= keep[1], acc[t][2] *= keep[0], acc[t][3] *= keep[1];
      const int i = t / 4, w = t % 4;  // dims 64 i + 8 g + 2 w (rows g) and + 1 (rows g + 8)
      const uint32_t v[4] = {__byte_perm(word(values[0][i], w), word(values[1][i], w), 0x5410),
                             __byte_perm(word(values[0][i], w), word(values[1][i], w), 0x7632),
                             __byte_perm(word(values[2][i], w), word(values[3][i], w), 0x5410),
                             __byte_perm(word(values[2][i], w), word(values[3][i], w), 0x7632)};
      mma_bf16(acc[t], v, p0, p1);
    }
  }

  // The warps' sums meet in shared memory.
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int m = 4; m < 32; m *= 2) sum[h] += __shfl_xor_sync(~0u, sum[h], m);
    if (g == 0) stats[0][warp][2 * c + h] = largest[h], stats[1][warp][2 * c + h] = sum[h];
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      *reinterpret_cast<float2*>(&sums[warp][2 * c + h][t / 4 * 64 + 8 * g + t % 4 * 2]) = make_float2(acc[t][h], acc[t][2 + h]);
  }
  __syncthreads();
  for (int i = thread; i < n_heads * (kD / 4); i += kThreads) {
    const int h = i / (kD / 4), d = i % (kD / 4) * 4, head = head0 + h;
    float peak = -INFINITY, total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) peak = fmaxf(peak, stats[0][w][h]);
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float part = stats[0][w][h] == -INFINITY ? 0.0f : exp2f(stats[0][w][h] - peak);
      const float4 x = *reinterpret_cast<const float4*>(&sums[w][h][d]);
      total = fmaf(part, stats[1][w][h], total);
      v.x = fmaf(part, x.x, v.x), v.y = fmaf(part, x.y, v.y), v.z = fmaf(part, x.z, v.z), v.w = fmaf(part, x.w, v.w);
    }
    const float factor = total > 0.0f ? 1.0f / total : 0.0f;  // padding, and parts without keys: zeros
    v = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
    const int64_t at = static_cast<int64_t>(split * a.n_rows + row) * a.heads + head;
    if (a.n_splits == 1) {
      bf16* out = static_cast<bf16*>(a.out.data) + row * a.out.stride + head * kD + d;
      *reinterpret_cast<uint2*>(out) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
    } else {
      if (first < last) *reinterpret_cast<float4*>(a.partial + at * kD + d) = v;
      if (d == 0)
        a.partial[static_cast<int64_t>(a.n_splits) * a.n_rows * a.heads * kD + at] = first < last ? peak + log2f(total) : -INFINITY;
    }
  }
}

template <int kD>
cudaError_t launch_dims(const AttendArgs& a, cudaStream_t stream) {
  const int groups = ceil_div(a.heads / a.layout.heads, kHeads);
  const dim3 grid(static_cast<unsigned>(a.n_rows), static_cast<unsigned>(a.layout.heads * groups), static_cast<unsigned>(a.n_splits));
  return launch(gqa_decode_kernel<kD>, grid, kThreads, 0, stream, a);
}

}  // namespace

bool gqa_decode_supports(const AttendArgs& a) {
  const auto aligned = [](const Mat& m) {
    return m.type == DType::bf16 && reinterpret_cast<uintptr_t>(m.data) % 16 == 0 && m.stride % 8 == 0;
  };
  const KvLayout& l = a.layout;
  return !l.v_is_k_prefix && l.format == KvFormat::bf16 && l.k_dim == l.v_dim && (l.k_dim == 64 || l.k_dim == 128) && aligned(a.q) &&
         aligned(a.out) && reinterpret_cast<uintptr_t>(a.k) % 16 == 0 && reinterpret_cast<uintptr_t>(a.v) % 16 == 0;
}

// Parts until each of 132 multiprocessors has three blocks, but none of fewer than 64 keys.
int gqa_decode_splits(const AttendArgs& a, int max_kv) {
  const int blocks = a.n_rows * a.layout.heads * ceil_div(a.heads / a.layout.heads, kHeads), parts = ceil_div(max_kv, kPartKeys);
  const int most = parts < kMaxSplits ? parts : kMaxSplits, wanted = 3 * 132 / blocks;
  const int splits = wanted < most ? wanted : most;
  return splits > 1 ? splits : 1;
}

cudaError_t launch_gqa_decode(const AttendArgs& a, cudaStream_t stream) {
  const cudaError_t error = a.layout.k_dim == 64 ? launch_dims<64>(a, stream) : launch_dims<128>(a, stream);
  return error != cudaSuccess || a.n_splits == 1 ? error : launch_attend_combine(a, stream);
}

}  // namespace cachalot::cuda
