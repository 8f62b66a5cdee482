// The experts' products for many rows, weights with codes of 4 bits (sm_90a): 128 rows of x, which lie blocked, times 256 rows of W (with
// swiglu 128 gates and their ups). One warp brings 128 columns of both at a time to shared memory, several ahead; four warpgroups, 64 rows
// of W each, turn the codes of 64 columns into bf16, which are wgmma's A operand: while one's are multiplied, others' are turned. Blocks
// draw further tiles.
//
// A code in the lowest bits of a bf16 is the subnormal number code * 2^-133, four bits higher 16 times that. Three operations on pairs make
// the weight scale * code - minimum of it: u = (code - zero) * 2^-7 exactly, where zero is minimum / scale rounded; v = u * low + rest,
// where scale * 2^7 = high + low and rest = zero * scale - minimum; then u * high + v, the one rounding that counts.
#include "cuda/column_order.cuh"
#include "cuda/formats.cuh"
#include "cuda/moe_many.h"
#include "cuda/wgmma.cuh"

namespace cachalot::cuda {
namespace {

constexpr int kRows = kManyRows, kGroup = 128, kRowTiles = 16, kGroups = 4, kWorkers = kGroups * 128, kThreads = kWorkers + 128;
constexpr int kPieceBytes = kRows * 128, kXBytes = 2 * kPieceBytes, kStages = 4;
constexpr int kOutTokens = 32, kOutBytes = kOutTokens * 128;  // of a warpgroup: 64 outputs in bf16, or twice 32 of them

template <Tile kTile>
struct ManyShape {
  static constexpr int kRecordBytes = tile_info(kTile).bytes, kSlotBytes = 2 * kRecordBytes;
  static constexpr int kStageBytes = kXBytes + kRowTiles * kSlotBytes;
  static constexpr int kBytes = kStages * kStageBytes + kGroups * kOutBytes + 1024;  // 1024: alignment
  static_assert(kStageBytes % 1024 == 0 && kBytes <= 227 * 1024);
};

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kOutRows = kRowTiles * 16;
constexpr uint32_t kUp = 0x7e807e80u, kUp16 = 0x7c807c80u;  // 2^126, 2^122

// Of rows g and g + 8 of a row tile, each twice in bf16.
struct Scale {
  uint32_t zero, high, low, rest;
  __device__ __forceinline__ void of(uint32_t stored) {
    const float2 v = half2_of(stored);
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(v.x));
    const float z = fminf(fmaxf(rintf(v.y * inverse), 0.0f), 15.0f), scale = v.x * 128.0f, r = fmaf(z, v.x, -v.y);
    zero = pack_bf16(z * -0.0078125f, z * -0.0078125f);
    high = pack_bf16(scale, scale);
    const float l = scale - __uint_as_float(high << 16);
    low = pack_bf16(l, l);
    rest = pack_bf16(r, r);
  }
  __device__ __forceinline__ uint32_t weights(uint32_t codes, uint32_t up) const {
    const uint32_t u = fma_bf16x2(codes, up, zero);
    return fma_bf16x2(u, high, fma_bf16x2(u, low, rest));
  }
};

// The scale of row g + 8 h in step `step` of 32 columns of a group, of a row tile's two records.
template <Tile kTile>
__device__ __forceinline__ void load_scale(const uint8_t* records, int step, int g, int h, Scale& scale) {
  const uint8_t* at = records + tile_info(kTile).scale_at + (step >> 1) * tile_info(kTile).bytes;
  if constexpr (kTile == Tile::q4g32)
    scale.of(*reinterpret_cast<const uint32_t*>(at + 16 * g + 8 * h + 4 * (step & 1)));
  else if constexpr (kTile == Tile::q4g64)
    scale.of(*reinterpret_cast<const uint32_t*>(at + 8 * g + 4 * h));
  else
    scale.of(*reinterpret_cast<const uint32_t*>(at + 4 * g + h * tile_info(kTile).bytes));
}
constexpr int scale_steps(Tile tile) { return tile == Tile::q4g32 ? 1 : tile == Tile::q4g64 ? 2 : 4; }  // that share a scale

// Eight weights of a row for one of both halves of the A operands of two wgmma.
__device__ __forceinline__ void open_word(uint32_t word, const Scale& scale, int half, uint32_t (&a)[4], uint32_t (&b)[4]) {
  const uint32_t next = word >> 8;
  a[half] = scale.weights(word & 0x000f000fu, kUp), a[2 + half] = scale.weights(word & 0x00f000f0u, kUp16);
  b[half] = scale.weights(next & 0x000f000fu, kUp), b[2 + half] = scale.weights(next & 0x00f000f0u, kUp16);
}

constexpr uint32_t kOperandHigh = static_cast<uint32_t>(wgmma_operand_at(0) >> 32);
template <int kN>
__device__ __forceinline__ void multiply_record(float (&acc)[kN / 2], uint32_t (&a)[4][4], uint32_t x) {
  wgmma_pin(acc);
#pragma unroll
  for (int i = 0; i < 4; ++i) wgmma_pin(a[i]);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) wgmma_bf16<kN>(acc, a[i], static_cast<uint64_t>(kOperandHigh) << 32 | (x + ((i * 32) >> 4)));
  wgmma_commit();
}

__device__ __forceinline__ void meet_group(int group) { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); }

// Four 8 x 8 blocks, lane l giving the row l % 8 of block l / 8 after transposition.
__device__ __forceinline__ void stmatrix4_transposed(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(to)), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
__device__ __forceinline__ float swiglu_of(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

// Where a warpgroup stands in the ring of stages.
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// What a thread of a warpgroup needs for all items. `out` is the warpgroup's, `warp` counts within it.
struct Worker {
  const uint8_t* stages;
  uint8_t* out;
  uint64_t *full, *empty;
  uint32_t first_operand;
  int group, warp, lane;
};

// The rows of W of a warp are those of a row tile; with swiglu rows 0 to 7 or 8 to 15 of a tile of gates and of that of their ups, so that
// a thread has both.
template <Tile kTile, bool kGate, int kN>
__device__ __forceinline__ void multiply_item(const Worker& me, Ring& ring, int n_groups, float (&acc)[kN / 2]) {
  using S = ManyShape<kTile>;
  const int warp = me.group * 4 + me.warp, g = me.lane >> 2;
  const int first_slot = kGate ? warp >> 1 : warp;                                // and, with swiglu, the slot of the ups
  const int first_row = kGate ? warp & 1 : 0, second_row = kGate ? warp & 1 : 1;  // rows g or g + 8
  uint32_t operands[4][4];
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) acc[i] = 0.0f;
  const uint8_t* const first_of = me.stages + kXBytes + first_slot * S::kSlotBytes;
  constexpr int kApart = kGate ? kRowTiles / 2 * S::kSlotBytes : 0;
  const auto codes_of = [&](const uint8_t* first, int record, uint32_t(&words)[2][2]) {  // of the first and of the second rows
    const uint8_t* at = first + record * S::kRecordBytes + me.lane * 16;
    const uint4 v = *reinterpret_cast<const uint4*>(at);
    if constexpr (kGate) {
      const uint4 w = *reinterpret_cast<const uint4*>(at + kApart);
      const bool odd = first_row != 0;
      words[0][0] = odd ? v.y : v.x, words[0][1] = odd ? v.w : v.z;
      words[1][0] = odd ? w.y : w.x, words[1][1] = odd ? w.w : w.z;
    } else {
      words[0][0] = v.x, words[0][1] = v.z, words[1][0] = v.y, words[1][1] = v.w;
    }
  };
  Scale scales[2];
  const auto scales_of = [&](const uint8_t* first, int step) {
    load_scale<kTile>(first, step, g, first_row, scales[0]);
    load_scale<kTile>(first + kApart, step, g, second_row, scales[1]);
  };
  uint32_t words[2][2];
  const uint8_t* first = first_of + ring.stage * S::kStageBytes;
  barrier_wait(&me.full[ring.stage], ring.phase);
  codes_of(first, 0, words);
  scales_of(first, 0);
  for (int k = 0; k < n_groups; ++k) {
    const int stage = ring.stage;
    // From one lane, so that the compiler keeps it in uniform registers.
    const uint32_t x = __shfl_sync(~0u, me.first_operand + ((stage * S::kStageBytes) >> 4), 0);
    ring.next();
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // records
#pragma unroll
      for (int j = 0; j < 2; ++j) {  // steps of 32 columns
        if (2 * i + j > 0 && (2 * i + j) % scale_steps(kTile) == 0) scales_of(first, 2 * i + j);
        open_word(words[0][j], scales[0], 0, operands[2 * j], operands[2 * j + 1]);
        open_word(words[1][j], scales[1], 1, operands[2 * j], operands[2 * j + 1]);
      }
      multiply_record<kN>(acc, operands, x + i * (kPieceBytes >> 4));
      // While that is under way, what the next step begins with.
      if (i == 0) {
        codes_of(first, 1, words);
      } else if (k + 1 < n_groups) {
        first = first_of + ring.stage * S::kStageBytes;
        barrier_wait(&me.full[ring.stage], ring.phase);
        codes_of(first, 0, words);
        scales_of(first, 0);
      }
      wgmma_wait<0>();
      wgmma_pin(acc);
#pragma unroll
      for (int j = 0; j < 4; ++j) wgmma_pin(operands[j]);
    }
    if (me.lane == 0) barrier_arrive(&me.empty[stage]);
  }
}

// 256 rows of W and a tile of x. Those of the shared expert, which may be longer, come first.
struct Item {
  bool shared;
  int index, block;
  int3 tile;  // expert, first row, rows; at the end no rows
};
template <bool kGate>
__device__ __forceinline__ Item item_of(const ManyArgs& a, int i) {
  constexpr int kOuts = kGate ? kOutRows / 2 : kOutRows;
  const int shared_blocks = ceil_div(a.shared.w.out, kOuts), n_shared = ceil_div(a.n_tokens, kRows) * shared_blocks;
  if (i < n_shared) {
    const int index = i / shared_blocks;
    return {true, index, i % shared_blocks, make_int3(0, index * kRows, min(kRows, a.n_tokens - index * kRows))};
  }
  const int blocks = ceil_div(a.routed.w.out, kOuts), index = (i - n_shared) / blocks;
  return {false, index, (i - n_shared) % blocks, index < a.plan.max_tiles ? a.plan.tiles[index] : make_int3(0, 0, 0)};
}

template <Tile kTile, bool kGate, int kN>
__device__ __forceinline__ void take_item(const ManyArgs& a, const Worker& me, Ring& ring, const Item& item) {
  float acc[kN / 2];
  const int3 tile = item.tile;
  const ManyProduct& product = item.shared ? a.shared : a.routed;
  const int out = product.w.out, thread = me.warp * 32 + me.lane;
  multiply_item<kTile, kGate, kN>(me, ring, product.w.cols / kGroup, acc);
  if constexpr (kGate) {  // 32 outputs
    const int col = item.block * (kOutRows / 2) + me.group * 32;
    if (col >= out) return;
    constexpr ColumnOrder kOrder = ColumnOrder::records;
    const int unit = thread & 3, word = permuted_word(kOrder, unit), step = permuted_step(kOrder);
    uint8_t* y = static_cast<uint8_t*>(product.y) + (static_cast<int64_t>(item.index) * (out / 64) + col / 64) * kPieceBytes;
    // Rows of 64 bytes, whose units of 16 lie so that 8 rows meet in no bank.
    const auto place = [](int row, int unit) { return row * 64 + ((unit ^ (row >> 1 & 3)) << 4); };
#pragma unroll
    for (int pass = 0; pass < kN / kOutTokens; ++pass) {
      if (pass * kOutTokens >= tile.z) break;
      uint8_t* results = me.out + (pass & 1) * (kOutBytes / 2);
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* v = acc + (pass * 4 + i) * 4;
        pairs[i] = pack_bf16(swiglu_of(v[0], v[2]), swiglu_of(v[1], v[3]));
      }
      if (pass == 0) meet_group(me.group);  // everyone has read what the last item left; later ones have met since
      stmatrix4_transposed(results + place(me.lane, me.warp), pairs[0], pairs[1], pairs[2], pairs[3]);
      meet_group(me.group);
      const int in_pass = thread >> 2, row = pass * kOutTokens + in_pass;
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int w = word + j * step;
        words[j] = *reinterpret_cast<const uint32_t*>(results + place(in_pass, w >> 2) + (w & 3) * 4);
      }
      if (row < tile.z)
        *reinterpret_cast<uint4*>(y + row * 128 + (((me.group & 1) * 4 + unit) ^ (row & 7)) * 16) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
  } else {
    const int col = item.block * kOutRows + me.group * 64;
    if (col >= out) return;
    if (item.shared) {  // in f32, as they lie in registers: 8 outputs are 32 bytes of a row
      const int g = me.lane >> 2, c = me.lane & 3;
      float* y = static_cast<float*>(product.y) + static_cast<int64_t>(tile.y) * out + col + me.warp * 16 + g;
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) {
        const int row = (i >> 2) * 8 + 2 * c + (i & 1);
        if (row < tile.z) y[static_cast<int64_t>(row) * out + 8 * (i >> 1 & 1)] = acc[i];
      }
      return;
    }
    const int unit = thread & 7, row0 = thread >> 3;
    bf16* y = static_cast<bf16*>(product.y) + col + unit * 8;
    int to[kN / 16];
#pragma unroll
    for (int i = 0; i < kN / 16; ++i) to[i] = row0 + 16 * i < tile.z ? a.plan.order[tile.y + row0 + 16 * i] : -1;
    const int r = me.lane & 7, my_unit = me.warp * 2 + (me.lane >> 3 & 1);
    uint8_t* results = me.out + ((me.lane >> 4) * 8 + r) * 128 + ((my_unit ^ r) << 4);
#pragma unroll
    for (int pass = 0; pass < kN / kOutTokens; ++pass) {
      if (pass * kOutTokens >= tile.z) break;
      meet_group(me.group);  // everyone has read what was there before
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float* v = acc + pass * 16 + j * 8;
        stmatrix4_transposed(results + j * 16 * 128, pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                             pack_bf16(v[6], v[7]));
      }
      meet_group(me.group);
#pragma unroll
      for (int i = 0; i < kOutTokens / 16; ++i) {
        const int in_pass = row0 + 16 * i, row = to[pass * (kOutTokens / 16) + i];
        if (row >= 0)
          *reinterpret_cast<uint4*>(y + static_cast<int64_t>(row) * out) =
              *reinterpret_cast<const uint4*>(me.out + in_pass * 128 + ((unit ^ (in_pass & 7)) << 4));
      }
    }
  }
}
#endif

template <Tile kTile, bool kGate>
__global__ __launch_bounds__(kThreads, 1) void many_kernel(const __grid_constant__ ManyArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using S = ManyShape<kTile>;
  extern __shared__ uint8_t raw[];
  __shared__ uint64_t full[kStages], empty[kStages];
  // Of a stage that begins one: tile (of the shared expert ~tile), block, first row and rows; without rows the end.
  __shared__ int4 items[kStages];
  uint8_t* stages = raw + (1024 - (shared_address(raw) & 1023u)) % 1024;  // [stages][x, then 16 row tiles of W], results
  pdl_trigger();
  const int thread = static_cast<int>(threadIdx.x), group = __shfl_sync(~0u, thread >> 7, 0), lane = thread & 31;
  if (thread == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], kWorkers / 32);
    }
    fence_async_proxy();
  }
  __syncthreads();
  pdl_wait();
  Ring ring;

  if (group == kGroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (thread >= kWorkers + 32) return;
    Item item = item_of<kGate>(a, static_cast<int>(blockIdx.x));
    for (;;) {
      const ManyProduct& product = item.shared ? a.shared : a.routed;
      const int n_groups = product.w.cols / kGroup, last = ceil_div(product.w.out, 16) - 1;
      const int row_tile = min(kGate ? item.block * 8 + (lane & 7) : item.block * 16 + (lane & 15), last);
      const uint8_t* w = (kGate && (lane & 8) != 0 ? product.up : product.w.data) +
                         (item.shared ? 0 : (a.first_matrix + item.tile.x) * product.w.matrix_bytes) +
                         static_cast<int64_t>(row_tile) * n_groups * S::kSlotBytes;
      const uint8_t* x =
          static_cast<const uint8_t*>(product.x) + static_cast<int64_t>(item.index) * n_groups * kXBytes + (lane & 1) * kPieceBytes;
      const auto x_bytes = static_cast<uint32_t>(ceil_div(item.tile.z, 32) * 32 * 128);
      const int4 begun = make_int4(item.shared ? ~item.index : item.index, item.block, item.tile.y, item.tile.z);
      int next = 0;
      if (lane == 0 && begun.w != 0) next = static_cast<int>(gridDim.x + atomicAdd(a.drawn, 1u));
      for (int k = 0; k < n_groups; ++k, ring.next()) {
        uint8_t* to = stages + ring.stage * S::kStageBytes;
        barrier_wait(&empty[ring.stage], ring.phase ^ 1);
        if (k == 0 && lane == 0) items[ring.stage] = begun;
        if (begun.w == 0) {
          if (lane == 0) barrier_arrive(&full[ring.stage]);
          return;
        }
        if (lane == 0) barrier_expect(&full[ring.stage], S::kStageBytes - kXBytes + 2 * x_bytes);
        __syncwarp();
        if (lane < kRowTiles)
          bulk_copy(to + kXBytes + lane * S::kSlotBytes, w + k * S::kSlotBytes, S::kSlotBytes, &full[ring.stage]);
        else if (lane < kRowTiles + 2)
          bulk_copy(to + (lane & 1) * kPieceBytes, x + static_cast<int64_t>(k) * kXBytes, x_bytes, &full[ring.stage]);
        if (k == min(4, n_groups - 1)) item = item_of<kGate>(a, __shfl_sync(~0u, next, 0));  // there before it is wanted
      }
    }
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
  const Worker me{.stages = stages,
                  .out = stages + kStages * S::kStageBytes + group * kOutBytes,
                  .full = full,
                  .empty = empty,
                  .first_operand = static_cast<uint32_t>(wgmma_operand(stages)),
                  .group = group,
                  .warp = thread >> 5 & 3,
                  .lane = lane};
  for (;;) {
    barrier_wait(&full[ring.stage], ring.phase);
    const int4 begun = items[ring.stage];
    if (begun.w == 0) break;
    const Item item{begun.x < 0, begun.x < 0 ? ~begun.x : begun.x, begun.y, {0, begun.z, begun.w}};
    // The compiler finds registers for three loops, not for four.
    if (item.tile.z <= kRows / 2)
      take_item<kTile, kGate, kRows / 2>(a, me, ring, item);
    else if (item.tile.z <= kRows / 4 * 3)
      take_item<kTile, kGate, kRows / 4 * 3>(a, me, ring, item);
    else
      take_item<kTile, kGate, kRows>(a, me, ring, item);
  }
#else
  __trap();
#endif
}

template <Tile kTile, bool kGate>
cudaError_t launch_many(const ManyArgs& a, cudaStream_t stream) {
  constexpr int kBytes = ManyShape<kTile>::kBytes;
  static const cudaError_t raised = cudaFuncSetAttribute(many_kernel<kTile, kGate>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (raised != cudaSuccess) return raised;
  return launch(many_kernel<kTile, kGate>, dim3(static_cast<unsigned>(a.n_multiprocessors)), kThreads, kBytes, stream, a);
}
template <bool kGate>
cudaError_t launch_form(const ManyArgs& a, cudaStream_t stream) {
  switch (a.routed.w.tile) {
    case Tile::q4g32: return launch_many<Tile::q4g32, kGate>(a, stream);
    case Tile::q4g64: return launch_many<Tile::q4g64, kGate>(a, stream);
    case Tile::q4g128: return launch_many<Tile::q4g128, kGate>(a, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

bool many_supports(const Segment& w) {
  return (w.tile == Tile::q4g128 || w.tile == Tile::q4g64 || w.tile == Tile::q4g32) && w.in == w.cols && w.cols % kGroup == 0 &&
         w.out % 64 == 0;
}
cudaError_t launch_many_gate_up(const ManyArgs& args, cudaStream_t stream) { return launch_form<true>(args, stream); }
cudaError_t launch_many_down(const ManyArgs& args, cudaStream_t stream) { return launch_form<false>(args, stream); }

}  // namespace cachalot::cuda
