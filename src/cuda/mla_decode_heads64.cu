// Absorbed MLA for many heads, where it is the arithmetic that limits: 64 heads of one row per block, on wgmma (sm_90a). Per 128 keys:
//   - two stages of 64 cached rows, each nine swizzled tiles of 64 columns that the copy engine fills; each of the two warpgroups scores
//   one
//     stage (64 heads x 64 keys, columns 0..575);
//   - the groups exchange their rows' largest scores, and their softmax weights through shared memory: weights take the place of the
//   stage's
//     last tile, the rope keys, which nothing reads after the scores;
//   - each group weighs 256 of the 512 value columns with the weights of both stages: 64 x 256 sums in registers.
// A stage is filled again as soon as both groups are through with its values. 17.8 MFLOP against 147 kB, mostly from L2, as the blocks of a
// row's other heads read the same.
// Rows in fp8 are turned into the same tiles, in f16, by the group whose stage it is, the first group's while the second half of the values
// is being weighed; there is no room for the codes beside the stages.
#include "cuda/mla_decode.cuh"
#include "cuda/tensor_map.cuh"
#include "cuda/wgmma_mla.cuh"

namespace cachalot::cuda {
namespace {

constexpr int kHeads = 64, kKeys = 64, kThreads = 256, kTiles = kMlaK / 64, kRopeTile = kTiles - 1;
constexpr int kTileBytes = kWgmmaTileBytes, kStageBytes = kTiles * kTileBytes;
static_assert(kRopeTile * 64 == kMlaV);
static_assert(kKeys * 128 == kTileBytes);
constexpr int kSharedBytes = 3 * kStageBytes + 1024;  // query, two stages, alignment

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
// fp8 rows become f16, which holds codes exactly and a product with the scale in 11 bits, times this: a group below 1.7e-3 would lose bits
// of its scale, a number above 4,000 would be infinite.
constexpr float kUnit = 16.0f;
// 16 codes of a row as two units of 8.
__device__ __forceinline__ void scale_codes(const uint4& codes, uint32_t scale, uint4 (&units)[2]) {
  uint32_t v[8];
  unpack_codes(codes.x, v[0], v[1]);
  unpack_codes(codes.y, v[2], v[3]);
  unpack_codes(codes.z, v[4], v[5]);
  unpack_codes(codes.w, v[6], v[7]);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = mul_f16x2(v[i], scale);
  units[0] = make_uint4(v[0], v[1], v[2], v[3]);
  units[1] = make_uint4(v[4], v[5], v[6], v[7]);
}
// 8 bf16 as f16, times a factor.
__device__ __forceinline__ uint4 half_unit(const uint4& pairs, float factor) {
  const auto convert = [&](uint32_t pair) {
    constexpr float kMost = 65504.0f;
    return pack_f16(fminf(fmaxf(low_bf16(pair) * factor, -kMost), kMost), fminf(fmaxf(high_bf16(pair) * factor, -kMost), kMost));
  };
  return make_uint4(convert(pairs.x), convert(pairs.y), convert(pairs.z), convert(pairs.w));
}
#endif

template <bool kFp8>
__global__ __launch_bounds__(kThreads, 1) void mla_heads64_kernel(const __grid_constant__ AttendArgs a,
                                                                  const __grid_constant__ CUtensorMap map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t raw[];
  __shared__ uint64_t full[2], empty[2];
  __shared__ float exchange[2][kHeads], query_power[kHeads];
  __shared__ int found[3];
  uint8_t* query = raw + (1024 - (shared_address(raw) & 1023u)) % 1024;  // [9 tiles][64 heads][64]
  uint8_t* stages = query + kStageBytes;                                 // [2][9 tiles][64 keys][64]
  pdl_trigger();
  const int thread = static_cast<int>(threadIdx.x), group = __shfl_sync(~0u, thread >> 7, 0), warp = thread >> 5 & 3, lane = thread & 31,
            g = lane >> 2, c = lane & 3;
  const int row = static_cast<int>(blockIdx.y), head0 = static_cast<int>(blockIdx.x) * kHeads, split = static_cast<int>(blockIdx.z);
  const RowContext context = find_row(a, row, found);
  const int n_pairs = (context.n_keys + 2 * kKeys - 1) / (2 * kKeys), share = (n_pairs + a.n_splits - 1) / a.n_splits;
  const int first = 2 * split * share, last = min(first + 2 * share, (context.n_keys + kKeys - 1) / kKeys);  // blocks of 64 keys
  const MlaOutput to(a, row, split);
  if (first >= last) {
    pdl_wait();
    return to.nothing(a, head0, kHeads);
  }
  if (thread < 2) {
    barrier_init(&full[thread], 1);
    barrier_init(&empty[thread], kThreads / 32);
  }
  fence_async_proxy();
  __syncthreads();

  // The first warp of each group fills the group's stage, box by box: a page's rows of one tile. n_pages divides 32, so that a lane stays
  // with one page of the block.
  const int* table = a.block_table + context.seq * a.table_stride;
  const int page_rows = a.layout.block_tokens, n_pages = kKeys / page_rows, my_page = lane % n_pages;
  uint8_t* my_stage = stages + group * kStageBytes;
  const auto page_of = [&](int block) {
    return warp == 0 && block < last && block * kKeys + my_page * page_rows < context.n_keys ? table[block * n_pages + my_page] : -1;
  };
  int next_page = kFp8 ? -1 : page_of(first + group);
  const auto copy = [&](int block) {
    if (warp != 0 || block >= last) return;
    if (lane == 0) {
      const int n = min(n_pages, (context.n_keys - block * kKeys + page_rows - 1) / page_rows);
      barrier_expect(&full[group], static_cast<uint32_t>(n * page_rows * kTiles * 128));
    }
    __syncwarp();
    if (next_page >= 0)
      for (int tile = lane / n_pages; tile < kTiles; tile += 32 / n_pages)
        copy_box(my_stage + tile * kTileBytes + my_page * page_rows * 128, map, tile * 64, next_page * page_rows, &full[group]);
    next_page = page_of(block + 2);
  };
  // fp8: a thread's four rows of the block, r = 16 i + 4 warp + lane / 8; eight lanes take 128 codes of a row.
  const auto* pages = static_cast<const uint8_t*>(a.k);
  const int shift = 31 - __clz(page_rows), unit = lane & 7;
  int next_slot[4] = {};  // -1: past the context
  const auto find_slots = [&](int block) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = block * kKeys + 16 * i + 4 * warp + (lane >> 3);
      next_slot[i] = key < context.n_keys ? (table[key >> shift] << shift) + (key & (page_rows - 1)) : -1;
    }
  };
  const auto prefetch = [&](int block) {
    const int key = block * kKeys + (thread & 127) * page_rows;
    if ((thread & 127) < n_pages && key < context.n_keys)
      asm volatile(
          "cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(pages + (static_cast<int64_t>(table[key >> shift]) << shift) * kFp8Row),
          "r"(page_rows * kFp8Row)
          : "memory");
  };
  const auto fill = [&](int block) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      uint4 codes[2][4], scales[2], rope[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const bool there = next_slot[i + j] >= 0;
        const uint8_t* from = pages + static_cast<int64_t>(there ? next_slot[i + j] : 0) * kFp8Row;
        const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < 4; ++k) codes[j][k] = there ? load16(from + 128 * k + 16 * unit) : zero;
        scales[j] = there ? load16(from + kFp8ScalesAt) : zero;
        rope[j] = there ? load16(from + kFp8RopeAt + 16 * unit) : zero;
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int r = 16 * (i + j) + 4 * warp + (lane >> 3);
        const uint32_t scale[4] = {scales[j].x, scales[j].y, scales[j].z, scales[j].w};
        uint8_t* to_row = my_stage + r * 128;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          uint4 units[2];
          const float group_scale = __uint_as_float(scale[k]) * kUnit;
          scale_codes(codes[j][k], pack_f16(group_scale, group_scale), units);
          // The lanes of a row write to two tiles: one half in the other order, so that they meet different banks.
          const int swap = unit >> 2, at = 2 * (unit & 3);
          uint8_t* tile = to_row + (2 * k + (unit >> 2)) * kTileBytes;
          *reinterpret_cast<uint4*>(tile + (((at + swap) ^ (r & 7)) << 4)) = swap == 0 ? units[0] : units[1];
          *reinterpret_cast<uint4*>(tile + (((at + 1 - swap) ^ (r & 7)) << 4)) = swap == 0 ? units[1] : units[0];
        }
        *reinterpret_cast<uint4*>(to_row + kRopeTile * kTileBytes + ((unit ^ (r & 7)) << 4)) = half_unit(rope[j], kUnit);
      }
    }
    fence_async_proxy();
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
    find_slots(block + 2);
    prefetch(block + 4);
  };
  if constexpr (kFp8) {
    prefetch(first + group);
    prefetch(first + group + 2);
    find_slots(first + group);
    pdl_wait();
    fill(first + group);
  } else {
    // Rows that earlier steps wrote need not wait for the kernels before this one.
    const bool early = (first + group + 1) * kKeys <= context.n_old;
    if (early) copy(first + group);
    pdl_wait();
    if (!early) copy(first + group);
  }
  const bf16* q = static_cast<const bf16*>(a.q.data) + row * a.q.stride;
  const auto query_unit = [&](int h, int i) {  // of 8 numbers
    return reinterpret_cast<uint4*>(query + (i >> 3) * kTileBytes + h * 128 + (((i & 7) ^ (h & 7)) << 4));
  };
  constexpr int kUnits = kMlaK / 8;
  if constexpr (kFp8) {  // four threads per head
    const int h = thread >> 2;
    const bool there = head0 + h < a.heads;
    uint4 mine[kUnits / 4];
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < kUnits / 4; ++i) {
      mine[i] = there ? load16(q + (head0 + h) * kMlaK + (4 * i + (thread & 3)) * 8) : make_uint4(0, 0, 0, 0);
      const uint32_t words[4] = {mine[i].x, mine[i].y, mine[i].z, mine[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) most = fmaxf(most, fmaxf(fabsf(low_bf16(words[j])), fabsf(high_bf16(words[j]))));
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const float2 power = power_for(most);
    if ((thread & 3) == 0) query_power[h] = power.y;
#pragma unroll
    for (int i = 0; i < kUnits / 4; ++i) *query_unit(h, 4 * i + (thread & 3)) = half_unit(mine[i], power.x);
  } else {
    for (int i = thread; i < kHeads * kUnits; i += kThreads) {
      const int h = i / kUnits;
      const bool there = head0 + h < a.heads;
      cp_async16(query_unit(h, i % kUnits), q + (there ? head0 + h : 0) * kMlaK + i % kUnits * 8, there);
    }
    cp_async_commit();
    cp_async_wait<0>();
  }
  fence_async_proxy();
  __syncthreads();

  const int my_row = warp * 16 + g;  // and my_row + 8
  float scale[2] = {a.scale * kLog2E, a.scale * kLog2E};
  if constexpr (kFp8) scale[0] *= query_power[my_row] / kUnit, scale[1] *= query_power[my_row + 8] / kUnit;
  float acc[128], largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 128; ++i) acc[i] = 0.0f;
  uint32_t phase = 0;
  for (int pair = first; pair < last; pair += 2, phase ^= 1) {
    const int block = pair + group, n = max(context.n_keys - block * kKeys, 0);
    if constexpr (!kFp8) {
      if (block < last)
        barrier_wait(&full[group], phase);
      else if (pair > first)
        barrier_wait(&empty[group], phase ^ 1);
      // Rows past the context, or a whole block that is not there: zeros as values, as what lies there may be no numbers.
      for (int i = thread & 127; i < (kKeys - n) * kRopeTile * 8; i += 128) {
        const int r = n + i / (kRopeTile * 8), unit = i % (kRopeTile * 8);
        *reinterpret_cast<uint4*>(my_stage + (unit >> 3) * kTileBytes + r * 128 + (unit & 7) * 16) = make_uint4(0, 0, 0, 0);
      }
    }
    float s[32], peak[2] = {-INFINITY, -INFINITY};
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kMlaK / 16; ++i)
      wgmma_scores<kFp8>(s, wgmma_operand(query + (i >> 2) * kTileBytes + (i & 3) * 32),
                         wgmma_operand(my_stage + (i >> 2) * kTileBytes + (i & 3) * 32), i > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(s);
    if (n < kKeys) {
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if ((i >> 2) * 8 + 2 * c + (i & 1) >= n) s[i] = -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) peak[i >> 1 & 1] = fmaxf(peak[i >> 1 & 1], s[i]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      peak[h] = fmaxf(peak[h], __shfl_xor_sync(~0u, peak[h], 1));
      peak[h] = fmaxf(peak[h], __shfl_xor_sync(~0u, peak[h], 2));
      if (c == 0) exchange[group][my_row + 8 * h] = peak[h];
    }
    __syncthreads();
    float keep[2], offset[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float m = fmaxf(largest[h], fmaxf(peak[h], exchange[group ^ 1][my_row + 8 * h]) * scale[h]);
      keep[h] = exp2f(largest[h] - m);
      largest[h] = m;
      offset[h] = -m;
      sum[h] *= keep[h];
    }
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const int h = i >> 1 & 1;
      const float x = exp2f(fmaf(s[i], scale[h], offset[h])), y = exp2f(fmaf(s[i + 1], scale[h], offset[h]));
      sum[h] += x + y;
      const int r = my_row + 8 * h;
      *reinterpret_cast<uint32_t*>(my_stage + kRopeTile * kTileBytes + r * 128 + (((i >> 2) ^ (r & 7)) << 4) + 4 * c) =
          kFp8 ? pack_f16(x, y) : pack_bf16(x, y);
    }
    if (__any_sync(~0u, keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < 128; ++i) acc[i] *= keep[i >> 1 & 1];
    }
    fence_async_proxy();
    __syncthreads();

    wgmma_pin(acc);
    wgmma_fence();
#pragma unroll
    for (int stage = 0; stage < 2; ++stage) {
      const uint8_t* rows = stages + stage * kStageBytes;
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma_values<kFp8>(acc, wgmma_operand(rows + kRopeTile * kTileBytes + k * 32),
                           wgmma_operand_by_rows(rows + group * 4 * kTileBytes + k * 2048));
      wgmma_commit();
    }
    const auto release = [&](int stage) {
      if (lane == 0) barrier_arrive(&empty[stage]);
      if (group != stage) return;
      if constexpr (kFp8) {
        if (pair + 2 >= last) return;
        barrier_wait(&empty[stage], phase);
        fill(pair + 2 + stage);
      } else if (warp == 0 && pair + 2 + stage < last) {
        barrier_wait(&empty[stage], phase);
        copy(pair + 2 + stage);
      }
    };
    wgmma_wait<1>();
    release(0);
    wgmma_wait<0>();
    wgmma_pin(acc);
    release(1);
  }

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
    sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
    if (c == 0) exchange[group][my_row + 8 * h] = sum[h];
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = head0 + my_row + 8 * h;
    if (head >= a.heads) continue;
    const float total = sum[h] + exchange[group ^ 1][my_row + 8 * h], factor = (kFp8 ? 1.0f / kUnit : 1.0f) / total;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int col = head * kMlaV + group * 256 + i * 8 + 2 * c;
      const float x = acc[4 * i + 2 * h] * factor, y = acc[4 * i + 2 * h + 1] * factor;
      if (a.n_splits > 1)
        *reinterpret_cast<float2*>(to.part + col) = make_float2(x, y);
      else
        *reinterpret_cast<uint32_t*>(to.out + col) = pack_bf16(x, y);
    }
    if (a.n_splits > 1 && group == 0 && c == 0) to.part_lse[head] = largest[h] + log2f(total);
  }
#else
  __trap();
#endif
}

template <bool kFp8>
cudaError_t launch_rows(const AttendArgs& a, cudaStream_t stream) {
  static const cudaError_t raised =
      cudaFuncSetAttribute(mla_heads64_kernel<kFp8>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (raised != cudaSuccess) return raised;
  CUtensorMap map{};
  if constexpr (!kFp8) {
    const cudaError_t made = make_tensor_map({a.k, kAnyRows, kMlaK, kMlaK}, a.layout.block_tokens, map);
    if (made != cudaSuccess) return made;
  }
  const dim3 grid(static_cast<unsigned>(ceil_div(a.heads, kHeads)), static_cast<unsigned>(a.n_rows), static_cast<unsigned>(a.n_splits));
  return launch(mla_heads64_kernel<kFp8>, grid, kThreads, kSharedBytes, stream, a, map);
}

}  // namespace

cudaError_t launch_mla_heads64(const AttendArgs& a, cudaStream_t stream) {
  return a.layout.format == KvFormat::fp8 ? launch_rows<true>(a, stream) : launch_rows<false>(a, stream);
}

}  // namespace cachalot::cuda
