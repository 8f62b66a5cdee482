// The mixture of experts of one row: what limits it is the reading of the chosen experts, and the time before and after. One block per
// multiprocessor for the whole layer. One warp asks for weights by bulk copies into a ring of stages, never stopping between the two
// products: the shared expert's before the routing is known, the second product's while the first is still being summed up. Sixteen warps
// multiply, each its own columns of every row tile, so that only the sums at the end of each product need the block to meet.
// Codes of 4 bits meet x as whole numbers of 16 bits in two bytes, on the integer tensor cores: turning codes into bf16 takes 28
// instructions per record and lane of a kind that starts every second clock, this takes 8.
//   first product: a task is 16 gate rows and the 16 up rows like them; silu(gate) * up times the routing weight goes to h in memory; all
//   blocks meet; second product: y = [W_1 | W_2 | ... | W_shared] h, a row tile per block.
#include "cuda/moe_one.h"

#include <algorithm>

#include "cuda/formats.cuh"

namespace cachalot::cuda {
namespace {

constexpr int kWarps = 16, kThreads = kWarps * 32 + 32, kMostStages = 8;

// A stage holds kChunks chunks of 64 columns of gate rows and as many of up rows, or 2 kChunks chunks of down rows. Rows of bf16 lie
// apart by a pitch that lets 8 lanes read two rows without conflicts.
template <Tile kTile>
struct Stage {
  static constexpr bool kRows = kTile == Tile::bf16;
  static constexpr int kChunks = kRows || tile_info(kTile).code_bits == 8 ? 16 : 32;
  static constexpr int kRecord = kRows ? kRecordCols * 2 : tile_info(kTile).bytes;
  static constexpr int kHalfPitch = kChunks * kRecord + 64, kWholePitch = 2 * kChunks * kRecord + 64;  // of rows
  static constexpr int kHalf = kRows ? kRecordRows * kHalfPitch : kChunks * kRecord;
  static constexpr int kBytes = 2 * kHalf;
  static constexpr bool kWhole = tile_info(kTile).has_min;  // 4-bit codes: x as whole numbers
  static constexpr int kGroup = kWhole ? tile_info(kTile).group : kRecordCols, kGroups = kRecordCols / kGroup;  // per chunk
};

// How the work is cut; the same on host and device.
struct Shares {
  int routed, tasks, chunks, inner_chunks, down_chunks, row_tiles;
  __host__ __device__ explicit Shares(const MoeOneArgs& a)
      : routed(a.top_k * (a.gate.out / 16)),
        tasks(routed + a.shared_gate.out / 16),
        chunks(a.gate.cols / kRecordCols),
        inner_chunks(a.down.cols / kRecordCols),
        down_chunks(a.top_k * inner_chunks + a.shared_down.cols / kRecordCols),
        row_tiles(a.down.out / 16) {}
};
__host__ __device__ inline int share_of(int n, int block, int blocks) { return (n - block + blocks - 1) / blocks; }

// Shared memory after the stages: the input of the product; sum and scale of each of its groups; and sums of each warp.
template <Tile kTile>
__host__ __device__ inline int vector_bytes(int chunks) {
  return chunks * (kRecordCols * 2 + (Stage<kTile>::kWhole ? Stage<kTile>::kGroups * 8 : 0));
}
template <Tile kTile>
int fixed_bytes(const MoeOneArgs& a) {
  const Shares s(a);
  return std::max(vector_bytes<kTile>(s.chunks) + share_of(s.tasks, 0, a.n_blocks) * kWarps * 32 * 4,
                  vector_bytes<kTile>(s.down_chunks) + share_of(s.row_tiles, 0, a.n_blocks) * kWarps * 16 * 4);
}
template <Tile kTile>
int stages_for(const MoeOneArgs& a) {
  const int left = static_cast<int>(a.most_shared) - fixed_bytes<kTile>(a);
  return left < 0 ? 0 : std::min(kMostStages, left / Stage<kTile>::kBytes);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void prefetch_l2(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
}
__device__ __forceinline__ void meet_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(kWarps * 32) : "memory"); }

template <Tile kTile>
__device__ __forceinline__ Frag<kTile> stage_record(const uint8_t* from, int pitch, int lane) {
  Frag<kTile> f;
  if constexpr (kTile == Tile::bf16) {
    const uint8_t* row = from + (lane >> 2) * pitch + (lane & 3) * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) f.codes[i] = *reinterpret_cast<const uint4*>(row + (i & 1) * 8 * pitch + (i >> 1) * 64);
  } else {
    constexpr TileInfo kInfo = tile_info(kTile);
#pragma unroll
    for (int i = 0; i < Frag<kTile>::kCodeVectors; ++i) f.codes[i] = *reinterpret_cast<const uint4*>(from + 512 * i + lane * 16);
    const uint8_t* s = from + kInfo.scale_at;
    if constexpr (kTile == Tile::q4g32) {
      f.scales = *reinterpret_cast<const uint4*>(s + (lane >> 2) * 16);
    } else if constexpr (kTile == Tile::f8) {
      f.scales.x = *reinterpret_cast<const uint32_t*>(s);
    } else {
      const uint2 v = *reinterpret_cast<const uint2*>(s + (lane >> 2) * 8);
      f.scales.x = v.x, f.scales.y = v.y;
    }
  }
  return f;
}

// d += a b: codes (unsigned) of 16 rows times columns of signed bytes.
__device__ __forceinline__ void mma_k32(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_k16(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a0), "r"(a1), "r"(b));
}

// acc += rows g and g + 8 of the record times chunk `chunk` of the input. In bf16 all 8 columns of the mma are the same row; of whole
// numbers the even columns are the high bytes and the odd ones the low bytes, codes in the upper half of a byte count 16-fold.
template <Tile kTile>
__device__ __forceinline__ void multiply_record(const Frag<kTile>& w, const uint8_t* vector, const float2* groups, int chunk, int lane,
                                                float (&acc)[2]) {
  using S = Stage<kTile>;
  constexpr uint32_t kLow = 0x0f0f0f0fu, kHigh = 0xf0f0f0f0u;
  if constexpr (S::kWhole) {
    const uint4 x = *reinterpret_cast<const uint4*>(vector + ((chunk * 2 + ((lane >> 2) & 1)) * 4 + (lane & 3)) * 16);
    const uint4 v = w.codes[0];
    int low[S::kGroups][4] = {}, high[S::kGroups][4] = {};
    if constexpr (S::kGroups == 1) {
      mma_k32(low[0], {v.x & kLow, v.y & kLow, v.z & kLow, v.w & kLow}, x.x, x.y);
      mma_k32(high[0], {v.x & kHigh, v.y & kHigh, v.z & kHigh, v.w & kHigh}, x.z, x.w);
    } else {
      mma_k16(low[0], v.x & kLow, v.y & kLow, x.x);
      mma_k16(low[1], v.z & kLow, v.w & kLow, x.y);
      mma_k16(high[0], v.x & kHigh, v.y & kHigh, x.z);
      mma_k16(high[1], v.z & kHigh, v.w & kHigh, x.w);
    }
#pragma unroll
    for (int i = 0; i < S::kGroups; ++i) {
      const float2 group = groups[chunk * S::kGroups + i];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 scale = half2_of(S::kGroups == 1 ? (h == 0 ? w.scales.x : w.scales.y)
                                                      : (h == 0 ? (i == 0 ? w.scales.x : w.scales.y) : (i == 0 ? w.scales.z : w.scales.w)));
        const int sum = (low[i][2 * h] * 256 + low[i][2 * h + 1]) * 16 + (high[i][2 * h] * 256 + high[i][2 * h + 1]);
        acc[h] = fmaf(scale.x * group.y, static_cast<float>(sum), acc[h]);
        acc[h] = fmaf(-scale.y, group.x, acc[h]);
      }
    }
  } else {
    static_assert(kTile == Tile::bf16);
    float part[4] = {};
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const uint4 b = *reinterpret_cast<const uint4*>(vector + chunk * kRecordCols * 2 + 64 * s + (lane & 3) * 16);
      uint32_t a[2][4];
      w.operands(s, a);
      mma_bf16(part, a[0], b.x, b.y);
      mma_bf16(part, a[1], b.z, b.w);
    }
    acc[0] += part[0], acc[1] += part[2];
  }
}

// `chunks` chunks of a row of bf16 into shared memory: as they are, or as whole numbers of at most 127 * 256, with the sum and 1 / 16 of
// the scale of each group. A thread takes 8 columns, which are a lane's in a step of a record; bytes in the order of its codes.
template <Tile kTile>
__device__ __forceinline__ void stage_vector(const void* from, int chunks, uint8_t* to, float2* groups, int thread) {
  using S = Stage<kTile>;
  const int lane = thread & 31, n = chunks * 8;
  for (int base = thread - lane; base < n; base += kWarps * 32) {
    const int i = base + lane;
    const uint4 v = i < n ? __ldcg(static_cast<const uint4*>(from) + i) : make_uint4(0, 0, 0, 0);
    if constexpr (!S::kWhole) {
      if (i < n) reinterpret_cast<uint4*>(to)[i] = v;
    } else {
      const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
      float x[8], sum = 0.0f, largest = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        x[j] = __uint_as_float((j & 1) == 0 ? pairs[j / 2] << 16 : pairs[j / 2] & 0xffff0000u);
        sum += x[j];
        largest = fmaxf(largest, fabsf(x[j]));
      }
#pragma unroll
      for (int m = 1; m < S::kGroup / 8; m *= 2) {
        sum += __shfl_xor_sync(~0u, sum, m);
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, m));
      }
      constexpr float kMost = 127.0f * 256.0f;
      const float inverse = largest > 0.0f ? kMost / largest : 0.0f;
      int q[8], high[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) q[j] = __float2int_rn(x[j] * inverse), high[j] = (q[j] + 128) >> 8;
      const auto bytes = [](const int(&b)[8], int first) {  // codes first, first + 4, first + 1, first + 5
        return static_cast<uint32_t>((b[first] & 255) | (b[first + 4] & 255) << 8 | (b[first + 1] & 255) << 16 |
                                     (b[first + 5] & 255) << 24);
      };
      uint32_t* at = reinterpret_cast<uint32_t*>(to + (i >> 3) * (kRecordCols * 2) + (i & 3) * 16) + ((i >> 2) & 1);
      if (i < n) {
        at[0] = bytes(high, 0), at[2] = bytes(high, 2);
#pragma unroll
        for (int j = 0; j < 8; ++j) q[j] -= high[j] * 256;
        at[16] = bytes(q, 0), at[18] = bytes(q, 2);
        if (lane % (S::kGroup / 8) == 0) groups[i / (S::kGroup / 8)] = make_float2(sum, largest * (1.0f / (16.0f * kMost)));
      }
    }
  }
}

// The ring as its two sides see it: which stage is next, and how often the ring has gone round.
struct Ring {
  int stage = 0, stages;
  uint32_t round = 0;
  __device__ __forceinline__ void next() {
    if (++stage == stages) stage = 0, round ^= 1u;
  }
};

template <Tile kTile>
__device__ __forceinline__ void ask_for_weights(const MoeOneArgs& a, const Shares& shares, uint8_t* stages, int n_stages, uint64_t* full,
                                                uint64_t* empty) {
  using S = Stage<kTile>;
  const int lane = static_cast<int>(threadIdx.x) & 31, block = static_cast<int>(blockIdx.x);
  Ring ring{0, n_stages};
  // n chunks of the 16 rows of tile `tile`, from chunk `from` on.
  const auto copy = [&](const uint8_t* matrix, int tile, int chunks, int from, int n, uint8_t* to, int pitch) {
    if constexpr (S::kRows) {
      if (lane < kRecordRows)
        bulk_copy(to + lane * pitch, matrix + (static_cast<int64_t>(tile * kRecordRows + lane) * chunks + from) * S::kRecord,
                  static_cast<uint32_t>(n * S::kRecord), &full[ring.stage]);
    } else if (lane == 0) {
      bulk_copy(to, matrix + (static_cast<int64_t>(tile) * chunks + from) * S::kRecord, static_cast<uint32_t>(n * S::kRecord),
                &full[ring.stage]);
    }
  };
  const auto begin = [&](int records) {
    barrier_wait(&empty[ring.stage], ring.round ^ 1u);
    if (lane == 0) barrier_expect(&full[ring.stage], static_cast<uint32_t>(records * (S::kRows ? kRecordRows : 1) * S::kRecord));
    __syncwarp();
    return stages + ring.stage * S::kBytes;
  };
  int id = -1;
  bool known = false;
  const auto know = [&] {
    if (known) return;
    pdl_wait();
    id = lane < a.top_k ? a.ids[lane] : -1;
    known = true;
  };
  const auto expert = [&](int slot) { return max(__shfl_sync(~0u, id, slot), 0); };
  const int tiles = a.gate.out / 16, shared_chunks = a.shared_down.cols / kRecordCols;
  for (int n = block + (share_of(shares.tasks, block, a.n_blocks) - 1) * a.n_blocks; n >= 0; n -= a.n_blocks) {
    const uint8_t *gate = a.shared_gate.data, *up = a.shared_up;
    int tile = n - shares.routed;
    if (n < shares.routed) {
      know();
      const int64_t matrix = (a.first_gate + expert(n / tiles)) * a.gate.matrix_bytes;
      gate = a.gate.data + matrix, up = a.up + matrix, tile = n % tiles;
    }
    for (int chunk = 0; chunk < shares.chunks; chunk += S::kChunks) {
      const int some = min(S::kChunks, shares.chunks - chunk);
      uint8_t* to = begin(2 * some);
      copy(gate, tile, shares.chunks, chunk, some, to, S::kHalfPitch);
      copy(up, tile, shares.chunks, chunk, some, to + S::kHalf, S::kHalfPitch);
      ring.next();
    }
    if (n >= shares.routed && n - a.n_blocks < shares.routed && lane == 0)  // while there is nothing else to ask for
      for (int t = block; t < shares.row_tiles; t += a.n_blocks) {
        const int bytes = shared_chunks * S::kRecord * (S::kRows ? kRecordRows : 1);
        prefetch_l2(a.shared_down.data + static_cast<int64_t>(t) * bytes, static_cast<uint32_t>(bytes));
      }
  }
  know();
  for (int t = block; t < shares.row_tiles; t += a.n_blocks) {
    for (int chunk = 0; chunk < shares.down_chunks;) {
      const int some = min(2 * S::kChunks, shares.down_chunks - chunk);
      uint8_t* to = begin(some);
      for (const int end = chunk + some; chunk < end;) {
        const int slot = chunk / shares.inner_chunks;
        const bool routed = slot < a.top_k;
        const int first = (routed ? slot : a.top_k) * shares.inner_chunks, width = routed ? shares.inner_chunks : shared_chunks;
        const int n = min(end, first + width) - chunk;
        const uint8_t* matrix = a.shared_down.data;
        if (routed) matrix = a.down.data + (a.first_down + expert(slot)) * a.down.matrix_bytes;
        copy(matrix, t, width, chunk - first, n, to, S::kWholePitch);
        to += n * S::kRecord, chunk += n;
      }
      ring.next();
    }
  }
}

template <Tile kTile>
__device__ __forceinline__ void multiply(const MoeOneArgs& a, const Shares& shares, const uint8_t* stages, int n_stages, uint8_t* rest,
                                         uint64_t* full, uint64_t* empty) {
  using S = Stage<kTile>;
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31, g = lane >> 2, c = lane & 3,
            block = static_cast<int>(blockIdx.x);
  Ring ring{0, n_stages};
  const auto take = [&] {
    barrier_wait(&full[ring.stage], ring.round);
    return stages + ring.stage * S::kBytes;
  };
  const auto release = [&] {
    __syncwarp();
    if (lane == 0) barrier_arrive(&empty[ring.stage]);
    ring.next();
  };
  float2* groups = nullptr;
  float* reduce = nullptr;
  const auto place = [&](int chunks) {
    groups = reinterpret_cast<float2*>(rest + chunks * kRecordCols * 2);
    reduce = reinterpret_cast<float*>(rest + vector_bytes<kTile>(chunks));
  };

  place(shares.chunks);
  pdl_wait();
  stage_vector<kTile>(a.x, shares.chunks, rest, groups, thread);
  // The task and row whose sums this thread will add.
  const int n_tasks = share_of(shares.tasks, block, a.n_blocks), tiles = a.gate.out / 16;
  const auto task = [&](int j) { return block + (n_tasks - 1 - j) * a.n_blocks; };
  float weight = 1.0f;
  if (thread < n_tasks * 16 && task(thread >> 4) < shares.routed) {
    const int slot = task(thread >> 4) / tiles;
    weight = a.ids[slot] < 0 ? 0.0f : a.weights[slot];
  }
  meet_consumers();
  for (int j = 0; j < n_tasks; ++j) {
    float acc[2][2] = {};
    for (int chunk = 0; chunk < shares.chunks; chunk += S::kChunks) {
      const uint8_t* stage = take();
#pragma unroll
      for (int i = 0; i < S::kChunks / kWarps; ++i) {
        const int mine = i * kWarps + warp, at = chunk + mine;
        if (at >= shares.chunks) break;
#pragma unroll
        for (int half = 0; half < 2; ++half)
          multiply_record<kTile>(stage_record<kTile>(stage + half * S::kHalf + mine * S::kRecord, S::kHalfPitch, lane), rest, groups, at,
                                 lane, acc[half]);
      }
      release();
    }
    if (c < 2) {
      float* to = reduce + (j * kWarps + warp) * 32 + c * 16 + g;
      to[0] = c == 0 ? acc[0][0] : acc[1][0], to[8] = c == 0 ? acc[0][1] : acc[1][1];
    }
  }
  meet_consumers();
  if (thread < n_tasks * 16) {
    const int j = thread >> 4, r = thread & 15, n = task(j);
    float gate = 0.0f, up = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) gate += reduce[(j * kWarps + w) * 32 + r], up += reduce[(j * kWarps + w) * 32 + 16 + r];
    const float v = gate / (1.0f + __expf(-gate)) * up;
    static_cast<bf16*>(a.h)[n * 16 + r] = from_f32<bf16>(weight != 0.0f ? v * weight : 0.0f);
  }
  // Every block's part of h is there when all have counted themselves in.
  meet_consumers();
  if (thread == 0) {
    const auto blocks = static_cast<unsigned long long>(a.n_blocks);
    unsigned long long there = 0;
    asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], 1;" : "=l"(there) : "l"(a.barrier) : "memory");
    const unsigned long long all = (there / blocks + 1) * blocks;
    do asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(there) : "l"(a.barrier) : "memory");
    while (there < all);
  }
  meet_consumers();

  place(shares.down_chunks);
  stage_vector<kTile>(a.h, shares.down_chunks, rest, groups, thread);
  meet_consumers();
  const int n_tiles = share_of(shares.row_tiles, block, a.n_blocks);
  for (int j = 0; j < n_tiles; ++j) {
    float acc[2] = {};
    for (int chunk = 0; chunk < shares.down_chunks; chunk += 2 * S::kChunks) {
      const uint8_t* stage = take();
#pragma unroll
      for (int i = 0; i < 2 * S::kChunks / kWarps; ++i) {
        const int mine = i * kWarps + warp, at = chunk + mine;
        if (at >= shares.down_chunks) break;
        multiply_record<kTile>(stage_record<kTile>(stage + mine * S::kRecord, S::kWholePitch, lane), rest, groups, at, lane, acc);
      }
      release();
    }
    if (c == 0) {
      float* to = reduce + (j * kWarps + warp) * 16 + g;
      to[0] = acc[0], to[8] = acc[1];
    }
  }
  meet_consumers();
  for (int i = thread; i < n_tiles * 16; i += kWarps * 32) {
    const int j = i >> 4, r = i & 15;
    float v = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) v += reduce[(j * kWarps + w) * 16 + r];
    static_cast<bf16*>(a.y)[(block + j * a.n_blocks) * 16 + r] = from_f32<bf16>(v);
  }
}
#endif

// Few registers, so that the kernels before and after have room beside it.
template <Tile kTile>
__global__ __launch_bounds__(kThreads, 1) void moe_one_kernel(const __grid_constant__ MoeOneArgs a, int n_stages) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t full[kMostStages], empty[kMostStages];
  pdl_trigger();
  if (threadIdx.x == 0) {
    for (int i = 0; i < n_stages; ++i) barrier_init(&full[i], 1), barrier_init(&empty[i], kWarps);
    fence_async_proxy();
  }
  __syncthreads();
  const Shares shares(a);
  if (threadIdx.x >= kWarps * 32)
    ask_for_weights<kTile>(a, shares, shared, n_stages, full, empty);
  else
    multiply<kTile>(a, shares, shared, n_stages, shared + n_stages * Stage<kTile>::kBytes, full, empty);
#endif
}

template <typename F>
bool with_form(Tile tile, F&& f) {
  switch (tile) {
    case Tile::q4g32: return f(std::integral_constant<Tile, Tile::q4g32>{});
    case Tile::q4g64: return f(std::integral_constant<Tile, Tile::q4g64>{});
    case Tile::bf16: return f(std::integral_constant<Tile, Tile::bf16>{});
    default: return false;
  }
}

}  // namespace

bool moe_one_supports(const MoeOneArgs& a) {
  const auto whole = [&](const Segment& s) { return s.tile == a.gate.tile && s.in == s.cols && s.out % kRecordRows == 0; };
  if (a.top_k > 32 || !whole(a.gate) || !whole(a.down) || a.down.cols != a.gate.out) return false;
  if (a.shared_gate.data != nullptr && (!whole(a.shared_gate) || !whole(a.shared_down) || a.shared_gate.cols != a.gate.cols ||
                                        a.shared_down.cols != a.shared_gate.out || a.shared_down.out != a.down.out))
    return false;
  const Shares s(a);
  if (share_of(s.tasks, 0, a.n_blocks) > 2 * kWarps) return false;  // a thread per row of them
  return with_form(a.gate.tile, [&](auto tile) { return stages_for<tile.value>(a) >= 2; });
}

cudaError_t launch_moe_one(const MoeOneArgs& a, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  with_form(a.gate.tile, [&](auto tile) {
    static const cudaError_t raised =
        cudaFuncSetAttribute(moe_one_kernel<tile.value>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(a.most_shared));
    error = raised;
    if (error != cudaSuccess) return false;
    const int n_stages = stages_for<tile.value>(a);
    const size_t bytes = static_cast<size_t>(n_stages * Stage<tile.value>::kBytes + fixed_bytes<tile.value>(a));
    error = launch(moe_one_kernel<tile.value>, dim3(static_cast<unsigned>(a.n_blocks)), kThreads, bytes, stream, a, n_stages);
    return true;
  });
  return error;
}

}  // namespace cachalot::cuda
