// Experts of some rows each (sm_90a), codes of 4 bits in groups of 128. What gemm_wgmma.cuh spends there is instructions that turn codes
// into weights; here codes are wgmma's A operand as they are, by five instructions for eight: a code in the lowest bits of a bf16 is the
// subnormal number code * 2^-133, four bits higher it is 16 times that (the lowest bit of the exponent goes on counting). x comes times
// 2^80, or 2^76 where codes count 16-fold, so that the products are ordinary numbers. The sums of a group of 128 columns are scaled in
// f32, and the minimum times the sum of those columns of x, made beforehand, is taken off.
//
// A block has 256 rows of W (128 gates and their ups) for the rows of x of a tile, and goes on to further tiles. One warp brings 256
// columns of both at a time to shared memory, several ahead; two warpgroups have two times 64 rows each, so that one half is converted and
// scaled while the other is multiplied.
#include "cuda/formats.cuh"
#include "cuda/mid_rows.cuh"
#include "cuda/wgmma.cuh"

namespace cachalot::cuda {
namespace {

constexpr int kWorkers = 256, kThreads = kWorkers + 128;
[[maybe_unused]] constexpr float kResult = 0x1p53f;

template <int kValue>
struct Number {
  static constexpr int value = kValue;
};
template <int kN>
struct MidShape {
  static constexpr int kGroupX = kN * 2 * kMidGroup;  // bytes of x per group
  static constexpr int kWeightsAt = kStageGroups * kGroupX, kSumsAt = kWeightsAt + kRowTiles * kSlotBytes;
  static constexpr int kStageBytes = (kSumsAt + kStageGroups * kN * 4 + 1023) / 1024 * 1024;
  static constexpr int kOutPitch = 136, kOutBytes = kN * kOutPitch * 2;
  static constexpr int kStages = (226 * 1024 - 1024 - kOutBytes) / kStageBytes;
  static constexpr int kRegisters = 232;                                   // of a multiplying thread
  static_assert(kRegisters % 8 == 0);                                      // setmaxnreg
  static constexpr int kBytes = kStages * kStageBytes + kOutBytes + 1024;  // 1024: alignment
};

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A record's codes as the A operands of four wgmma; `from` is at the lane's codes.
__device__ __forceinline__ void open_codes(const uint8_t* from, uint32_t (&a)[4][4]) {
  const uint4 v = *reinterpret_cast<const uint4*>(from);
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int s = i >> 1, h = i & 1;
    const uint32_t next = words[i] >> 8;
    a[2 * s][h] = words[i] & 0x000f000fu, a[2 * s][2 + h] = words[i] & 0x00f000f0u;
    a[2 * s + 1][h] = next & 0x000f000fu, a[2 * s + 1][2 + h] = next & 0x00f000f0u;
  }
}

constexpr uint32_t kOperandHigh = static_cast<uint32_t>(wgmma_operand_at(0) >> 32);
// sum = 64 rows x 128 columns times x at `b`.
template <int kN>
__device__ __forceinline__ void multiply_group(float (&sum)[kN / 2], uint32_t (&a)[2][4][4], uint32_t b) {
  wgmma_pin(sum);
#pragma unroll
  for (int i = 0; i < 8; ++i) wgmma_pin(a[i >> 2][i & 3]);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 8; ++i)
    wgmma_bf16_add<kN>(sum, a[i >> 2][i & 3], b + (((i >> 2) * kN * 128 + (i & 3) * 32) >> 4), kOperandHigh, i > 0);
  wgmma_commit();
}

// Scales and minima of rows g and g + 8 of a row tile, and the sums of x.
template <int kN>
struct Scales {
  uint32_t low, high;
  float2 x[kN / 8];
  __device__ __forceinline__ void load(const uint8_t* scales, const float* of_x) {
    low = *reinterpret_cast<const uint32_t*>(scales), high = *reinterpret_cast<const uint32_t*>(scales + kInfo.bytes);
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) x[j] = *reinterpret_cast<const float2*>(of_x + 8 * j);
  }
  // acc += scale * sum - minimum * (sums of x)
  __device__ __forceinline__ void apply(float (&acc)[kN / 2], const float (&sum)[kN / 2]) const {
    const float2 s = half2_of(low), t = half2_of(high);
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      acc[4 * j] = fmaf(-s.y, x[j].x, fmaf(s.x, sum[4 * j], acc[4 * j]));
      acc[4 * j + 1] = fmaf(-s.y, x[j].y, fmaf(s.x, sum[4 * j + 1], acc[4 * j + 1]));
      acc[4 * j + 2] = fmaf(-t.y, x[j].x, fmaf(t.x, sum[4 * j + 2], acc[4 * j + 2]));
      acc[4 * j + 3] = fmaf(-t.y, x[j].y, fmaf(t.x, sum[4 * j + 3], acc[4 * j + 3]));
    }
  }
};

__device__ __forceinline__ void meet_workers() { asm volatile("bar.sync 1, %0;" ::"n"(kWorkers) : "memory"); }
#endif

// The items of a launch: first those of the shared expert, tile by tile.
struct Item {
  bool shared;
  int tile, block;  // 256 rows of W
};
template <bool kGate>
__device__ __forceinline__ int blocks_of(const MidProduct& p) {
  return ceil_div(p.w.out, kGate ? 128 : 256);
}

template <bool kGate, int kN>
__global__ __launch_bounds__(kThreads, 1) void mid_kernel(const __grid_constant__ MidArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using S = MidShape<kN>;
  extern __shared__ uint8_t raw[];
  __shared__ uint64_t full[S::kStages], empty[S::kStages];
  uint8_t* stages = raw + (1024 - (shared_address(raw) & 1023u)) % 1024;
  bf16* out = reinterpret_cast<bf16*>(stages + S::kStages * S::kStageBytes);
  const int thread = static_cast<int>(threadIdx.x), group = __shfl_sync(~0u, thread >> 7, 0), lane = thread & 31;
  if (thread == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(&full[i], 2);
      barrier_init(&empty[i], kWorkers / 32);
    }
    fence_async_proxy();
  }
  __syncthreads();
  const int shared_blocks = blocks_of<kGate>(a.shared), routed_blocks = blocks_of<kGate>(a.routed);
  const int n_shared = a.shared.w.data == nullptr ? 0 : ceil_div(a.n_tokens, kN) * shared_blocks;
  const int n_first = n_shared + a.plan.n_experts * routed_blocks, n_items = n_shared + a.plan.max_tiles * routed_blocks;
  const auto item_of = [&](int i) {
    return i < n_shared ? Item{true, i / shared_blocks, i % shared_blocks}
                        : Item{false, (i - n_shared) / routed_blocks, (i - n_shared) % routed_blocks};
  };
  const auto tile_of = [&](int i) {  // expert, rows; at the end no rows
    if (i >= n_items) return make_int2(0, 0);
    const Item item = item_of(i);
    if (item.shared) return make_int2(0, min(kN, a.n_tokens - item.tile * kN));
    const int2* t = a.plan.tiles + item.tile;
    return make_int2(__shfl_sync(~0u, __ldcg(&t->x), 0), __shfl_sync(~0u, __ldcg(&t->y), 0));
  };
  // The first tile of each expert counts, with rows or without.
  const auto ends = [&](int i, int2 tile) { return i >= n_first && tile.y == 0; };
  int stage = 0;
  uint32_t phase = 0;
  const auto next = [&] {
    if (++stage == S::kStages) stage = 0, phase ^= 1;
  };

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    // One warp asks for weights, which may be before the launch before has ended, and one for x.
    const bool of_x = thread >= 32;
    if (thread >= 64) return;
    bool waited = of_x;
    const uint64_t policy = once_policy();
    if (of_x) pdl_wait();
    for (int i = static_cast<int>(blockIdx.x); i < n_items; i += static_cast<int>(gridDim.x)) {
      const Item item = item_of(i);
      int expert = item.shared ? 0 : item.tile;
      if (i >= n_first) {
        if (!waited) pdl_wait(), waited = true;
        const int2 tile = tile_of(i);
        if (tile.y == 0) break;
        expert = tile.x;
      }
      const MidProduct& p = item.shared ? a.shared : a.routed;
      const int n_groups = p.w.cols / kMidGroup, last = ceil_div(p.w.out, 16) - 1;
      const int row_tile = min(kGate ? item.block * 8 + (lane & 7) : item.block * 16 + (lane & 15), last);
      const uint8_t* w = (kGate && (lane & 8) != 0 ? p.up : p.w.data) +
                         (item.shared ? 0 : static_cast<int64_t>(a.first_matrix + expert) * p.w.matrix_bytes) +
                         static_cast<int64_t>(row_tile) * n_groups * kGroupBytes;
      const uint8_t* x = p.x.x + static_cast<int64_t>(item.tile) * n_groups * S::kGroupX;
      const float* sums = p.x.sums + static_cast<int64_t>(item.tile) * n_groups * kN;
      for (int k = 0; k < n_groups; k += kStageGroups, next()) {
        const int n = min(kStageGroups, n_groups - k);
        uint8_t* to = stages + stage * S::kStageBytes;
        barrier_wait(&empty[stage], phase ^ 1);
        if (of_x) {
          if (lane != 0) continue;
          const auto of_group = static_cast<uint32_t>(S::kGroupX), of_sums = static_cast<uint32_t>(kN * 4),
                     groups = static_cast<uint32_t>(n);
          barrier_expect(&full[stage], groups * (of_group + of_sums));
          bulk_copy(to, x + static_cast<int64_t>(k) * S::kGroupX, groups * of_group, &full[stage]);
          bulk_copy(to + S::kSumsAt, sums + k * kN, groups * of_sums, &full[stage]);
        } else {
          const auto bytes = static_cast<uint32_t>(n * kGroupBytes);
          if (lane == 0) barrier_expect(&full[stage], kRowTiles * bytes);
          __syncwarp();
          if (lane < kRowTiles) bulk_copy(to + S::kWeightsAt + lane * kSlotBytes, w + k * kGroupBytes, bytes, &full[stage], policy);
        }
      }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::kRegisters));
  const auto first_operand = static_cast<uint32_t>(wgmma_operand(stages));
  const int warp = (thread >> 5) - 4, g = lane >> 2, c = lane & 3;  // 8 warps, a row tile each of both halves
  const int scales_at = kInfo.scale_at + g * 4 - lane * 16;
  const uint8_t* my_codes = stages + S::kWeightsAt + warp * kSlotBytes + lane * 16;
  const float* my_sums = reinterpret_cast<const float*>(stages + S::kSumsAt) + 2 * c;
  pdl_wait();
  pdl_trigger();
  int2 tile = tile_of(static_cast<int>(blockIdx.x));
  for (int i = static_cast<int>(blockIdx.x); !ends(i, tile); i += static_cast<int>(gridDim.x)) {
    const Item item = item_of(i);
    const int2 next_tile = tile_of(i + static_cast<int>(gridDim.x));
    const MidProduct& p = item.shared ? a.shared : a.routed;
    const int n_groups = p.w.cols / kMidGroup;
    float acc[2][kN / 2], sum[2][kN / 2];
#pragma unroll
    for (int j = 0; j < kN / 2; ++j) acc[0][j] = acc[1][j] = sum[0][j] = sum[1][j] = 0.0f;
    // The groups of a stage: while one half of a group is multiplied the next is opened and the one before scaled. (Nothing may be under
    // way from stage to stage, or the compiler lets every wgmma wait.)
    const auto take = [&](auto groups_constant) {
      constexpr int kGroups = decltype(groups_constant)::value;
      const uint32_t at = stage * S::kStageBytes;
      const auto weights_of = [&](int i) { return my_codes + at + (i & 1) * 8 * kSlotBytes + (i >> 1) * kGroupBytes; };
      Scales<kN> scales;
      const auto load_scales = [&](int i) { scales.load(weights_of(i) + scales_at, my_sums + at / 4 + (i >> 1) * kN); };
      // From one lane, so that the compiler keeps it in uniform registers.
      const uint32_t x = __shfl_sync(~0u, first_operand + (at >> 4), 0);
      uint32_t operands[2][2][4][4];
      const auto scale = [&](int i) {
        wgmma_pin(sum[i & 1]);
#pragma unroll
        for (int j = 0; j < 8; ++j) wgmma_pin(operands[i & 1][j >> 2][j & 3]);
        load_scales(i);
        scales.apply(acc[i & 1], sum[i & 1]);
      };
      barrier_wait(&full[stage], phase);
#pragma unroll
      for (int i = 0; i < 2 * kGroups; ++i) {
        open_codes(weights_of(i), operands[i & 1][0]);
        open_codes(weights_of(i) + kInfo.bytes, operands[i & 1][1]);
        multiply_group<kN>(sum[i & 1], operands[i & 1], x + (i >> 1) * (S::kGroupX >> 4));
        if (i == 0) continue;
        wgmma_wait<1>();
        scale(i - 1);
      }
      wgmma_wait<0>();
      scale(2 * kGroups - 1);
      __syncwarp();
      if (lane == 0) barrier_arrive(&empty[stage]);
      next();
    };
    for (int k = 0; k + kStageGroups <= n_groups; k += kStageGroups) take(Number<kStageGroups>{});
    if (n_groups % kStageGroups != 0) take(Number<1>{});

    if constexpr (kGate) {
      meet_workers();  // everyone has read what was there before
#pragma unroll
      for (int j = 0; j < kN / 2; ++j) {
        const int row = (j >> 2) * 8 + 2 * c + (j & 1), col = warp * 16 + g + 8 * (j >> 1 & 1);
        const float gate = acc[0][j] * kResult, up = acc[1][j] * kResult;
        out[row * S::kOutPitch + col] = from_f32<bf16>(__fdividef(gate, 1.0f + __expf(-gate)) * up);
      }
      meet_workers();
      const int n_out = p.w.out / kMidGroup;
      const int64_t at = static_cast<int64_t>(item.tile) * n_out + item.block;
      uint8_t* to = p.h.x + at * S::kGroupX;
      for (int j = thread - 128; j < kN * 16; j += kWorkers) {
        const int row = j >> 4, unit = j & 15;
        const uint32_t* from = reinterpret_cast<const uint32_t*>(out + row * S::kOutPitch) + unit_word(unit);
        float of_unit = 0.0f;
        const uint4 v = scaled_unit({from[0], from[4], from[8], from[12]}, unit, of_unit);
        of_unit = sum_of_units(of_unit);
        if (row >= tile.y) continue;
        *reinterpret_cast<uint4*>(to + unit_place(unit, row, kN)) = v;
        if (unit == 0) p.h.sums[at * kN + row] = of_unit;
      }
    } else if (item.shared) {
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const int half = j / (kN / 2), i = j % (kN / 2);
        const int row = (i >> 2) * 8 + 2 * c + (i & 1), col = item.block * 256 + half * 128 + warp * 16 + g + 8 * (i >> 1 & 1);
        if (row < tile.y && col < p.w.out)
          static_cast<float*>(p.y)[static_cast<int64_t>(item.tile * kN + row) * p.w.out + col] = acc[half][i] * kResult;
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (item.block * 256 + half * 128 >= p.w.out) break;
        meet_workers();
#pragma unroll
        for (int j = 0; j < kN / 2; ++j)
          out[((j >> 2) * 8 + 2 * c + (j & 1)) * S::kOutPitch + warp * 16 + g + 8 * (j >> 1 & 1)] = from_f32<bf16>(acc[half][j] * kResult);
        meet_workers();
        bf16* y = static_cast<bf16*>(p.y) + item.block * 256 + half * 128 + (thread & 15) * 8;
        for (int row = (thread - 128) >> 4; row < tile.y; row += kWorkers / 16) {
          const int64_t to = __ldcg(a.plan.pairs + item.tile * kN + row);
          *reinterpret_cast<uint4*>(y + to * p.w.out) = *reinterpret_cast<const uint4*>(out + row * S::kOutPitch + (thread & 15) * 8);
        }
      }
    }
    tile = next_tile;
  }
#else
  __trap();
#endif
}

template <bool kGate, int kN>
cudaError_t launch_tile(const MidArgs& a, cudaStream_t stream) {
  constexpr int kBytes = MidShape<kN>::kBytes;
  static const cudaError_t raised = cudaFuncSetAttribute(mid_kernel<kGate, kN>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (raised != cudaSuccess) return raised;
  return launch(mid_kernel<kGate, kN>, dim3(static_cast<unsigned>(a.n_multiprocessors)), kThreads, kBytes, stream, a);
}
template <bool kGate>
cudaError_t launch_mid(const MidArgs& a, cudaStream_t stream) {
  switch (a.plan.tile) {
    case 48: return launch_tile<kGate, 48>(a, stream);
    case 64: return launch_tile<kGate, 64>(a, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

bool mid_supports(const MidProduct& p) { return p.w.tile == Tile::q4g128 && p.w.in == p.w.cols && p.w.out % kMidGroup == 0; }

cudaError_t launch_mid_gate_up(const MidArgs& args, cudaStream_t stream) { return launch_mid<true>(args, stream); }
cudaError_t launch_mid_down(const MidArgs& args, cudaStream_t stream) { return launch_mid<false>(args, stream); }

}  // namespace cachalot::cuda
