// Experts of some rows each (sm_90a), codes of 4 bits in groups of 128, in tiles of 16 to 32 rows: both products in one launch. What wgmma
// takes per instruction at so few rows is more than its multiplications do, and opening codes takes as long; so codes go to it as numbers
// of a byte: one in the lower half of a byte is the e4m3 number code * 2^-9, below 8 a subnormal one, from 8 on in the first binade. That
// is three instructions for eight codes, and 32 columns an instruction. x has two parts, the nearest e4m3 and what is left, which together
// are as exact as bf16 down to 2^-11 of a row's largest number, and 2^-19 of that below. Sums of 128 columns are scaled in f32, and the
// minimum times the sum of those columns of x is taken off.
//
// A block per multiprocessor draws items: 128 gates and their ups of a tile, then 256 rows of the second product. One warp draws and asks
// for weights, 256 columns at a time and several ahead, one asks for x (of the second product once all of the tile is there); four
// warpgroups of 64 rows multiply, each hiding what the others wait for; two warps bring results to memory meanwhile.
#include "cuda/formats.cuh"
#include "cuda/mid_rows.cuh"
#include "cuda/wgmma.cuh"

namespace cachalot::cuda {
namespace {

constexpr int kWorkers = 512, kThreads = kWorkers + 128;
[[maybe_unused]] constexpr int kWorkerWarps = kWorkers / 32, kFinishers = 2;  // warps
[[maybe_unused]] constexpr int kSlots = 16;                                   // items that a block may know of
// At the launch, of threads that multiply and of the others: so few that the launch before has room beside a block.
constexpr int kLaunchRegisters = 88, kRegisters = 96, kHelperRegisters = 40;
static_assert(kWorkers * kRegisters + 128 * kHelperRegisters <= kThreads * kLaunchRegisters);

template <int kValue>
struct Number {
  static constexpr int value = kValue;
};
template <int kN>
struct PartsShape {
  static constexpr bool kSide = kN <= 24;  // both parts of x side by side in one instruction, or one after the other
  static constexpr int kSums = kSide ? kN : kN / 2;
  static_assert(kSums % 4 == 0);
  static constexpr int kGroupX = kN * 2 * kMidGroup, kScales = mid_scales(kN);  // of x per group: bytes, and floats behind them
  static constexpr int kWeightsAt = kStageGroups * kGroupX, kSumsAt = kWeightsAt + kRowTiles * kSlotBytes;
  static constexpr int kStageBytes = (kSumsAt + kStageGroups * kScales * 4 + 1023) / 1024 * 1024;
  static constexpr int kOutPitch = 2 * 256 + 16, kOutBytes = kN * kOutPitch;  // results on their way: 256 columns in bf16, or 128 in f32
  static constexpr int kStages = (226 * 1024 - 1024 - kOutBytes) / kStageBytes;
  static constexpr int kBytes = kStages * kStageBytes + kOutBytes + 1024;  // 1024: alignment
};
struct BothArgs {
  MidProduct products[4];  // experts' gate and up, shared expert's, experts' down, shared expert's; without data: none
  int first_matrix[2];     // of the expert 0, of gate and up and of down
  MidPlan plan;
  int n_tokens, shared_tiles;
};

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A record's codes as the A operands of two wgmma; `from` is at the lane's codes.
__device__ __forceinline__ void open_codes(const uint8_t* from, uint32_t (*a)[4]) {
  const uint4 v = *reinterpret_cast<const uint4*>(from);
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a[i >> 1][i & 1] = words[i] & 0x0f0f0f0fu;
    a[i >> 1][2 + (i & 1)] = (words[i] >> 4) & 0x0f0f0f0fu;
  }
}

constexpr uint32_t kOperandHigh = static_cast<uint32_t>(wgmma_operand_at(0) >> 32);
// sum = 64 rows x 128 columns times both parts of x at `b`.
template <int kN>
__device__ __forceinline__ void multiply_group(float (&sum)[PartsShape<kN>::kSums], uint32_t (&a)[4][4], uint32_t b) {
  wgmma_pin(sum);
#pragma unroll
  for (int i = 0; i < 4; ++i) wgmma_pin(a[i]);
  wgmma_fence();
  if constexpr (PartsShape<kN>::kSide) {
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma_e4m3_add<2 * kN>(sum, a[i], b + ((i * 32) >> 4), kOperandHigh, i > 0);
  } else {
    // The small parts first, while sums are small: these keep about 14 bits.
#pragma unroll
    for (int i = 0; i < 8; ++i) wgmma_e4m3_add<kN>(sum, a[i & 3], b + (((i < 4 ? kN * 128 : 0) + (i & 3) * 32) >> 4), kOperandHigh, i > 0);
  }
  wgmma_commit();
}

// acc += 128 columns: scales and minima of rows g and g + 8 of a row tile in `scales`, those of x in `of_x`, at the lane's columns.
template <int kN>
__device__ __forceinline__ void apply_scales(const uint8_t* scales, const float* of_x, float of_group, float (&acc)[kN / 2],
                                             const float (&sum)[PartsShape<kN>::kSums]) {
  const float2 s = half2_of(*reinterpret_cast<const uint32_t*>(scales)),
               t = half2_of(*reinterpret_cast<const uint32_t*>(scales + kInfo.bytes));
  const float low = s.x * of_group, high = t.x * of_group;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    const float2 x = *reinterpret_cast<const float2*>(of_x + 8 * j);
    const auto both = [&](int i) {
      i += 4 * j;
      if constexpr (PartsShape<kN>::kSide) return sum[i] + sum[kN / 2 + i];
      return sum[i];
    };
    acc[4 * j] = fmaf(-s.y, x.x, fmaf(low, both(0), acc[4 * j]));
    acc[4 * j + 1] = fmaf(-s.y, x.y, fmaf(low, both(1), acc[4 * j + 1]));
    acc[4 * j + 2] = fmaf(-t.y, x.x, fmaf(high, both(2), acc[4 * j + 2]));
    acc[4 * j + 3] = fmaf(-t.y, x.y, fmaf(high, both(3), acc[4 * j + 3]));
  }
}
// The items of work: all of the first product, then all of the second, the shared expert's first in each. They are drawn in this order, so
// that no item waits for one that nobody has begun.
struct Item {
  int product;      // 2 for the second product, plus 1 for the shared expert; -1: there are no more
  int tile, block;  // `block`: 128 gates and their ups, or 256 rows of the second product
};
struct Items {
  int blocks[4], n[3];  // of the products in turn: blocks per tile; items of all but the last
  __device__ __forceinline__ Items(const BothArgs& a, int n_tiles) {
#pragma unroll
    for (int i = 0; i < 4; ++i) blocks[i] = a.products[i].w.data == nullptr ? 0 : ceil_div(a.products[i].w.out, i < 2 ? 128 : 256);
    n[0] = a.shared_tiles * blocks[1], n[1] = n_tiles * blocks[0], n[2] = a.shared_tiles * blocks[3];
  }
  __device__ __forceinline__ Item item(int i, int n_tiles) const {
    if (i < n[0]) return {1, i / blocks[1], i % blocks[1]};
    i -= n[0];
    if (i < n[1]) return {0, i / blocks[0], i % blocks[0]};
    i -= n[1];
    if (i < n[2]) return {3, i / blocks[3], i % blocks[3]};
    i -= n[2];
    return {i < n_tiles * blocks[2] ? 2 : -1, i / blocks[2], i % blocks[2]};
  }
};
#endif

template <int kN>
__global__ void __maxnreg__(kLaunchRegisters) both_kernel(const __grid_constant__ BothArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using S = PartsShape<kN>;
  extern __shared__ uint8_t raw[];
  __shared__ uint64_t full[S::kStages], empty[S::kStages], item_there[kSlots], ups_there, out_there, out_free;
  __shared__ Item items[kSlots];
  uint8_t* stages = raw + (1024 - (shared_address(raw) & 1023u)) % 1024;
  uint8_t* out = stages + S::kStages * S::kStageBytes;
  const int thread = static_cast<int>(threadIdx.x), group = __shfl_sync(~0u, thread >> 7, 0), lane = thread & 31;
  if (thread == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(&full[i], 2);
      barrier_init(&empty[i], kWorkerWarps);
    }
    for (int i = 0; i < kSlots; ++i) barrier_init(&item_there[i], 1);
    barrier_init(&ups_there, kWorkerWarps / 2);
    barrier_init(&out_there, kWorkerWarps);
    barrier_init(&out_free, kFinishers);
    fence_async_proxy();
  }
  __syncthreads();
  int stage = 0, n = 0;  // n: of the block's items
  uint32_t phase = 0;
  const auto next = [&] {
    if (++stage == S::kStages) stage = 0, phase ^= 1;
  };
  const auto next_item = [&] {
    barrier_wait(&item_there[n % kSlots], static_cast<uint32_t>(n / kSlots) & 1u);
    return items[n++ % kSlots];
  };

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kHelperRegisters));
    const int warp = thread >> 5;
    if (warp == 0) {
      // Draws the block's items and asks for weights. Those of an expert's first tile are known before the plan is.
      const uint64_t policy = once_policy();
      const Items first(a, a.plan.n_experts);
      int drawn = static_cast<int>(blockIdx.x), n_tiles = a.plan.n_experts;
      bool waited = false;
      const auto wait_for_plan = [&] {
        if (waited) return;
        pdl_wait();
        waited = true;
        n_tiles = __ldcg(a.plan.state + 1);
      };
      const auto draw = [&] {
        int i = 0;
        if (lane == 0) i = static_cast<int>(gridDim.x) + atomicAdd(a.plan.state, 1);
        return __shfl_sync(~0u, i, 0);
      };
      if (drawn >= first.n[0] + first.n[1]) wait_for_plan();
      while (true) {
        Item item;
        while (true) {  // experts without rows are passed over
          item = Items(a, n_tiles).item(drawn, n_tiles);
          if (!waited || item.product < 0 || item.product % 2 != 0 || __ldcg(&a.plan.tiles[item.tile].y) > 0) break;
          drawn = draw();
        }
        if (lane == 0) {
          items[n % kSlots] = item;
          barrier_arrive(&item_there[n % kSlots]);
        }
        ++n;
        if (item.product < 0) return;
        int expert = item.tile;
        if (item.product % 2 != 0)
          expert = -a.first_matrix[item.product / 2];
        else if (item.tile >= a.plan.n_experts)
          expert = __ldcg(&a.plan.tiles[item.tile].x);
        if (waited) drawn = draw();
        const MidProduct& p = a.products[item.product];
        const bool gate = item.product < 2;
        const int n_groups = p.w.cols / kMidGroup, last = ceil_div(p.w.out, 16) - 1;
        const int row_tile = min(gate ? item.block * 8 + (lane & 7) : item.block * 16 + (lane & 15), last);
        const uint8_t* w = (gate && (lane & 8) != 0 ? p.up : p.w.data) +
                           static_cast<int64_t>(a.first_matrix[item.product / 2] + expert) * p.w.matrix_bytes +
                           static_cast<int64_t>(row_tile) * n_groups * kGroupBytes;
        for (int k = 0; k < n_groups; k += kStageGroups, next()) {
          const auto bytes = static_cast<uint32_t>(min(kStageGroups, n_groups - k) * kGroupBytes);
          barrier_wait(&empty[stage], phase ^ 1);
          if (lane == 0) barrier_expect(&full[stage], kRowTiles * bytes);
          __syncwarp();
          if (lane < kRowTiles)
            bulk_copy(stages + stage * S::kStageBytes + S::kWeightsAt + lane * kSlotBytes, w + k * kGroupBytes, bytes, &full[stage],
                      policy);
        }
        if (!waited) wait_for_plan(), drawn = draw();
      }
    } else if (warp == 1) {
      // Asks for x, of the second product once all of the first product's blocks of the tile are there.
      if (lane != 0) return;
      pdl_wait();
      while (true) {
        const Item item = next_item();
        if (item.product < 0) return;
        const MidProduct& p = a.products[item.product];
        const int n_groups = p.w.cols / kMidGroup;
        if (item.product >= 2) {
          const int gates = a.products[item.product - 2].w.out / 128 * kFinishers;
          const int* done = a.plan.state + 2 + item.tile + (item.product == 3 ? a.plan.max_tiles : 0);
          int there = 0;
          do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(done) : "memory");
          while (there < gates);
          asm volatile("fence.proxy.async;" ::: "memory");
        }
        const uint8_t* x = p.x.x + static_cast<int64_t>(item.tile) * n_groups * S::kGroupX;
        const float* sums = p.x.sums + static_cast<int64_t>(item.tile) * n_groups * S::kScales;
        for (int k = 0; k < n_groups; k += kStageGroups, next()) {
          uint8_t* to = stages + stage * S::kStageBytes;
          const auto of_group = static_cast<uint32_t>(S::kGroupX), of_sums = static_cast<uint32_t>(S::kScales * 4),
                     groups = static_cast<uint32_t>(min(kStageGroups, n_groups - k));
          barrier_wait(&empty[stage], phase ^ 1);
          barrier_expect(&full[stage], groups * (of_group + of_sums));
          bulk_copy(to, x + static_cast<int64_t>(k) * S::kGroupX, groups * of_group, &full[stage]);
          bulk_copy(to + S::kSumsAt, sums + k * S::kScales, groups * of_sums, &full[stage]);
        }
      }
    } else {
      // What follows the products: no warp that multiplies waits for memory.
      pdl_wait();
      uint32_t out_phase = 0;
      const int unit = lane & 15, first = (warp - 2) * 2 + (lane >> 4);
      while (true) {
        const Item item = next_item();
        if (item.product < 0) return;
        if (item.product == 3) {
          barrier_wait(&out_there, out_phase);
          if (lane == 0) barrier_arrive(&out_free);
          out_phase ^= 1u;
          continue;
        }
        const MidProduct& p = a.products[item.product];
        const int rows = item.product == 1 ? min(kN, a.n_tokens - item.tile * kN) : __ldcg(&a.plan.tiles[item.tile].y);
        const auto done = [&] {
          __syncwarp();
          if (lane == 0) barrier_arrive(&out_free);
          out_phase ^= 1u;
        };
        if (item.product < 2) {
          const int64_t at = static_cast<int64_t>(item.tile) * (p.w.out / kMidGroup) + item.block;
          const MidRows& h = a.products[item.product + 2].x;
          uint8_t* to = h.x + at * S::kGroupX;
          float* scales = h.sums + at * S::kScales;
          barrier_wait(&out_there, out_phase);
          float largest = 0.0f;
#pragma unroll 4
          for (int row = lane >> 4; row < rows; row += 2) {
            const float* from = reinterpret_cast<const float*>(out + row * S::kOutPitch) + unit * 4;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const float4 v = reinterpret_cast<const float4*>(from)[16 * i];
              largest = fmaxf(fmaxf(fmaxf(largest, fabsf(v.x)), fmaxf(fabsf(v.y), fabsf(v.z))), fabsf(v.w));
            }
          }
          const float2 scale = scales_for(warp_max(largest));
#pragma unroll 1
          for (int row = first; row < rows; row += 2 * kFinishers) {
            const float2* from = reinterpret_cast<const float2*>(out + row * S::kOutPitch) + unit_word(unit);
            float sum = 0.0f;
            const uint4 v = split_unit([&](int i) { return from[4 * i]; }, unit, scale.x, sum);
            *reinterpret_cast<uint4*>(to + part_place(unit, row, kN)) = v;
            if (unit == 0) scales[row] = sum;
          }
          if (lane == 0 && warp == 2) scales[2 * kN] = scale.y * kCodes;
          done();
          if (lane == 0)
            asm volatile(
                "red.release.gpu.global.add.u32 [%0], 1;" ::"l"(a.plan.state + 2 + item.tile + (item.product == 1 ? a.plan.max_tiles : 0))
                : "memory");
        } else {
          bf16* y = static_cast<bf16*>(p.y) + item.block * 256 + lane * 8;
          const bool there = item.block * 256 + lane * 8 < p.w.out;
          barrier_wait(&out_there, out_phase);
#pragma unroll 4
          for (int row = warp - 2; row < rows; row += kFinishers) {
            const int64_t to = __ldcg(a.plan.pairs + item.tile * kN + row);
            if (there) *reinterpret_cast<uint4*>(y + to * p.w.out) = *reinterpret_cast<const uint4*>(out + row * S::kOutPitch + lane * 16);
          }
          done();
        }
      }
    }
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
  const auto first_operand = static_cast<uint32_t>(wgmma_operand(stages));
  const int warp = (thread >> 5) - 4, g = lane >> 2, c = lane & 3;  // 16 warps, a row tile each
  const int scales_at = kInfo.scale_at + g * 4 - lane * 16;
  const uint8_t* my_codes = stages + S::kWeightsAt + warp * kSlotBytes + lane * 16;
  const float* my_sums = reinterpret_cast<const float*>(stages + S::kSumsAt) + 2 * c;
  uint32_t out_phase = 0, ups_phase = 0;
  pdl_wait();
  pdl_trigger();
  while (true) {
    const Item item = next_item();
    if (item.product < 0) return;
    const MidProduct& p = a.products[item.product];
    const int n_groups = p.w.cols / kMidGroup;
    float acc[kN / 2], sum[S::kSums];
#pragma unroll
    for (int j = 0; j < kN / 2; ++j) acc[j] = 0.0f;
#pragma unroll
    for (int j = 0; j < S::kSums; ++j) sum[j] = 0.0f;
    const auto release = [&] {
      __syncwarp();
      if (lane == 0) barrier_arrive(&empty[stage]);
      next();
    };
    // The groups of a stage. What one warpgroup waits for the others hide.
    const auto take = [&](auto groups_constant) {
      constexpr int kGroups = decltype(groups_constant)::value;
      const uint32_t at = stage * S::kStageBytes;
      // From one lane, so that the compiler keeps it in uniform registers.
      const uint32_t x = __shfl_sync(~0u, first_operand + (at >> 4), 0);
      uint32_t operands[4][4];
      barrier_wait(&full[stage], phase);
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const uint8_t* codes = my_codes + at + i * kGroupBytes;
        const float* of_x = my_sums + at / 4 + i * S::kScales;
        open_codes(codes, operands);
        open_codes(codes + kInfo.bytes, operands + 2);
        multiply_group<kN>(sum, operands, x + i * (S::kGroupX >> 4));
        wgmma_wait<0>();
        wgmma_pin(sum);
#pragma unroll
        for (int j = 0; j < 4; ++j) wgmma_pin(operands[j]);
        apply_scales<kN>(codes + scales_at, of_x, of_x[2 * kN - 2 * c], acc, sum);
      }
    };
    for (int k = 0; k < n_groups; k += kStageGroups) {
      if (k > 0) release();
      if (k + kStageGroups <= n_groups)
        take(Number<kStageGroups>{});
      else
        take(Number<1>{});
    }

    if (item.product < 2) {
      float2 of_rows[kN / 8];
#pragma unroll
      for (int j = 0; j < kN / 8; ++j) of_rows[j] = *reinterpret_cast<const float2*>(my_sums + stage * (S::kStageBytes / 4) + kN + 8 * j);
      release();
      const auto value = [&](int j) { return acc[j] * ((j & 1) == 0 ? of_rows[j >> 2].x : of_rows[j >> 2].y); };
      const auto place = [&](int j) {
        const int row = (j >> 2) * 8 + 2 * c + (j & 1), col = warp % 8 * 16 + g + 8 * (j >> 1 & 1);
        return reinterpret_cast<float*>(out + row * S::kOutPitch) + col;
      };
      if (warp >= kWorkerWarps / 2) {
        barrier_wait(&out_free, out_phase ^ 1u);
#pragma unroll
        for (int j = 0; j < kN / 2; ++j) *place(j) = value(j);
        __syncwarp();
        if (lane == 0) barrier_arrive(&ups_there);
      } else {
        barrier_wait(&ups_there, ups_phase);
#pragma unroll
        for (int j = 0; j < kN / 2; ++j) {
          float* at = place(j);
          const float gate = value(j);
          *at = to_f32(from_f32<bf16>(__fdividef(gate, 1.0f + __expf(-gate)) * *at));
        }
        __syncwarp();
      }
      ups_phase ^= 1u;
    } else {
      release();
      barrier_wait(&out_free, out_phase ^ 1u);
#pragma unroll
      for (int j = 0; j < kN / 2; ++j) {
        const int row = (j >> 2) * 8 + 2 * c + (j & 1), col = warp * 16 + g + 8 * (j >> 1 & 1);
        if (item.product == 2) {
          reinterpret_cast<bf16*>(out + row * S::kOutPitch)[col] = from_f32<bf16>(acc[j]);
        } else if (item.tile * kN + row < a.n_tokens && item.block * 256 + col < p.w.out) {
          static_cast<float*>(p.y)[static_cast<int64_t>(item.tile * kN + row) * p.w.out + item.block * 256 + col] = acc[j];
        }
      }
      __syncwarp();
    }
    if (lane == 0) barrier_arrive(&out_there);
    out_phase ^= 1u;
  }
#else
  __trap();
#endif
}

template <int kN>
cudaError_t launch_tile(const BothArgs& a, int n_blocks, cudaStream_t stream) {
  constexpr int kBytes = PartsShape<kN>::kBytes;
  static const cudaError_t raised = cudaFuncSetAttribute(both_kernel<kN>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (raised != cudaSuccess) return raised;
  return launch(both_kernel<kN>, dim3(static_cast<unsigned>(n_blocks)), kThreads, kBytes, stream, a);
}

}  // namespace

cudaError_t launch_mid_both(const MidArgs& gate_up, const MidArgs& down, cudaStream_t stream) {
  const int tile = gate_up.plan.tile, shared_tiles = gate_up.shared.w.data == nullptr ? 0 : ceil_div(gate_up.n_tokens, tile);
  const BothArgs args{{gate_up.routed, gate_up.shared, down.routed, down.shared},
                      {gate_up.first_matrix, down.first_matrix},
                      gate_up.plan,
                      gate_up.n_tokens,
                      shared_tiles};
  switch (tile) {
    case 16: return launch_tile<16>(args, gate_up.n_multiprocessors, stream);
    case 24: return launch_tile<24>(args, gate_up.n_multiprocessors, stream);
    case 32: return launch_tile<32>(args, gate_up.n_multiprocessors, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace cachalot::cuda
