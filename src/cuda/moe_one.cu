// The mixture of experts of one row: what limits it is the reading of the chosen experts, and the time before and after. One block per
// multiprocessor for the whole layer. One warp asks for weights by bulk copies into a ring of stages, never stopping between the two
// products: the shared expert's before the routing is known, the second product's while the first is still being summed up. Sixteen warps
// multiply, each its own columns of every row tile, so that only the sums at the end of each product need the block to meet.
//   first product: a task is some gate rows and the up rows like them; silu(gate) * up times the routing weight goes to h in memory; all
//   blocks meet; second product: y = [W_1 | W_2 | ... | W_shared] h, a row tile per block.
// Multiprocessors do not read equally fast, so the last tasks of the first product go to the blocks that are first to ask for them.
#include "cuda/moe_one.h"

#include <algorithm>
#include <type_traits>

#include "cuda/moe_ring.cuh"

namespace cachalot::cuda {
namespace {

// Gate rows of a task, and as many up rows. Those of bf16 make up one row tile, those of records two.
template <Tile kTile>
constexpr int kTaskRows = Stage<kTile>::kRows ? 8 : 16;
constexpr int kMostTasks = 64;

// How the work is cut; the same on host and device.
struct Shares {
  int rows, routed, fixed, shared, most, chunks, inner_chunks, down_chunks, row_tiles;
  __host__ __device__ Shares(const MoeOneArgs& a, int task_rows)
      : rows(task_rows),
        routed(a.top_k * (a.gate.out / rows)),
        // Of the routed tasks, those that have a block from the start. Whole numbers are short of instructions: their blocks keep pace.
        fixed(a.gate.tile == Tile::bf16 ? routed * 3 / 4 : routed),
        shared(a.shared_gate.out / rows),
        most((routed + shared) * 3 / (2 * a.n_blocks) + 2),  // tasks of a block
        chunks(a.gate.cols / kRecordCols),
        inner_chunks(a.down.cols / kRecordCols),
        down_chunks(a.top_k * inner_chunks + a.shared_down.cols / kRecordCols),
        row_tiles(a.down.out / 16) {}
};

// Shared memory after the stages: the input of the product; sum and scale of each of its groups; and sums of each warp.
template <Tile kTile>
__host__ __device__ inline int vector_bytes(int chunks) {
  using S = Stage<kTile>;
  return chunks * kRecordCols * 2 + (S::kWhole ? chunks / S::kUnit * S::kGroups * 8 : 0);
}
template <Tile kTile>
int fixed_bytes(const MoeOneArgs& a) {
  const Shares s(a, kTaskRows<kTile>);
  return std::max(vector_bytes<kTile>(s.chunks) + s.most * kRingWarps * 2 * s.rows * 4,
                  vector_bytes<kTile>(s.down_chunks) + share_of(s.row_tiles, 0, a.n_blocks) * kRingWarps * 16 * 4);
}
template <Tile kTile>
int stages_for(const MoeOneArgs& a) {
  const int left = static_cast<int>(a.most_shared) - fixed_bytes<kTile>(a);
  return left < 0 ? 0 : std::min(kMostStages, left / Stage<kTile>::kBytes);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// acc += rows g and g + 8 of the unit of records at chunk `mine` of the stage times chunk `chunk` (and the next) of the input. All 8
// columns of the mma are the same row.
template <Tile kTile>
__device__ __forceinline__ void multiply_unit(const uint8_t* stage, int mine, int pitch, const uint8_t* vector, const float2* groups,
                                              int chunk, int lane, float (&acc)[2]) {
  using S = Stage<kTile>;
  if constexpr (S::kUnit == 2) {
    const uint8_t* x_at = vector + ((chunk * 2 + ((lane >> 2) & 1)) * 4 + (lane & 3)) * 16;
    const uint8_t* from = stage + mine * S::kRecord;
    WholeStep w;
    w.load_shared(from, lane);
    float sum[1][2] = {{acc[0], acc[1]}};
    multiply_step<1>(
        w, 1, [&](int, int r) { return *reinterpret_cast<const uint4*>(x_at + r * kRecordCols * 2); },
        [&](int) { return groups[chunk / 2]; }, sum);
    acc[0] = sum[0][0], acc[1] = sum[0][1];
  } else if constexpr (S::kWhole) {
    const Frag<kTile> w = stage_record<kTile>(stage, mine, pitch, lane);
    float2 group[S::kGroups];
#pragma unroll
    for (int i = 0; i < S::kGroups; ++i) group[i] = groups[chunk * S::kGroups + i];
    multiply_whole<kTile>(w, *reinterpret_cast<const uint4*>(vector + ((chunk * 2 + ((lane >> 2) & 1)) * 4 + (lane & 3)) * 16), group, acc);
  } else {
    static_assert(kTile == Tile::bf16);
    const Frag<kTile> w = stage_record<kTile>(stage, mine, pitch, lane);
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

// `chunks` chunks of a row of bf16 into shared memory: as they are, or as whole numbers. A thread takes 8 columns.
template <Tile kTile>
__device__ __forceinline__ void stage_vector(const void* from, int chunks, uint8_t* to, float2* groups, int thread) {
  using S = Stage<kTile>;
  constexpr int kAtOnce = 3;  // asked for before the first is used
  const int lane = thread & 31, n = chunks * 8;
  for (int base = thread - lane; base < n; base += kAtOnce * kRingWarps * 32) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int i = base + k * kRingWarps * 32 + lane;
      v[k] = i < n ? __ldcg(static_cast<const uint4*>(from) + i) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int i = base + k * kRingWarps * 32 + lane;
      if (i - lane >= n) break;
      if constexpr (!S::kWhole) {
        if (i < n) reinterpret_cast<uint4*>(to)[i] = v[k];
      } else {
        const WholePart part = whole_part<S::kGroup>(v[k]);
        if (i < n) store_whole(to, i, part);
        if (i < n && lane % (S::kGroup / 8) == 0) groups[i / (S::kGroup / 8)] = part.group;
      }
    }
  }
}

// What both sides of the ring share besides its stages.
struct Meeting {
  uint64_t full[kMostStages], empty[kMostStages];
  int task[kMostStages];  // of a stage of the first product; -1: the product is complete
};

template <Tile kTile>
__device__ __forceinline__ void ask_for_weights(const MoeOneArgs& a, const Shares& shares, uint8_t* stages, int n_stages,
                                                Meeting& meeting) {
  using S = Stage<kTile>;
  const int lane = static_cast<int>(threadIdx.x) & 31, block = static_cast<int>(blockIdx.x);
  Ring ring{0, n_stages};
  const uint64_t policy = once_policy();
  const auto begin = [&](int records, int task) {
    barrier_wait(&meeting.empty[ring.stage], ring.round ^ 1u);
    if (lane == 0) {
      meeting.task[ring.stage] = task;
      barrier_expect(&meeting.full[ring.stage], static_cast<uint32_t>(records * (S::kRows ? kRecordRows : 1) * S::kRecord));
    }
    __syncwarp();
    return stages + ring.stage * S::kBytes;
  };
  // n chunks of a row from `from`, or of a row tile.
  const auto copy = [&](const uint8_t* from, int n, uint8_t* to) {
    bulk_copy(to, from, static_cast<uint32_t>(n * S::kRecord), &meeting.full[ring.stage], policy);
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
  const int tiles = a.gate.out / shares.rows, shared_chunks = a.shared_down.cols / kRecordCols;
  const int n_shared = share_of(shares.shared, block, a.n_blocks), n_fixed = share_of(shares.fixed, block, a.n_blocks);
  unsigned drawn = 0;
  const auto draw = [&] {
    if (lane == 0) drawn = atomicAdd(a.drawn, 1u);
  };
  for (int i = 0;; ++i) {
    const uint8_t *gate = a.shared_gate.data, *up = a.shared_up;
    int task = block + i * a.n_blocks, tile = task;
    if (i < n_shared) {
      task += shares.routed;
    } else {
      know();
      task -= n_shared * a.n_blocks;
      if (i >= n_shared + n_fixed) {
        if (shares.fixed == shares.routed || i == shares.most) break;
        if (i == n_shared) draw();
        task = shares.fixed + static_cast<int>(__shfl_sync(~0u, drawn, 0));
        if (task >= shares.routed) break;
      }
      const int64_t matrix = (a.first_gate + expert(task / tiles)) * a.gate.matrix_bytes;
      gate = a.gate.data + matrix, up = a.up + matrix, tile = task % tiles;
      if (i + 1 >= n_shared + n_fixed && i + 1 < shares.most && shares.fixed < shares.routed) draw();  // there when it is needed
    }
    constexpr int kChunks = S::kRows ? 2 * S::kChunks : S::kChunks;
    for (int chunk = 0; chunk < shares.chunks; chunk += kChunks) {
      const int some = min(kChunks, shares.chunks - chunk);
      uint8_t* to = begin(S::kRows ? some : 2 * some, task);
      if constexpr (S::kRows) {
        if (lane < kRecordRows) {
          const uint8_t* from = lane < 8 ? gate : up;
          copy(from + (static_cast<int64_t>(tile * 8 + (lane & 7)) * shares.chunks + chunk) * S::kRecord, some, to + lane * S::kWholePitch);
        }
      } else if (lane < 2) {
        copy((lane == 0 ? gate : up) + (static_cast<int64_t>(tile) * shares.chunks + chunk) * S::kRecord, some, to + lane * S::kHalf);
      }
      ring.next();
    }
    if (i + 1 == n_shared && lane == 0)  // while there is nothing else to ask for
      for (int t = block; t < shares.row_tiles; t += a.n_blocks) {
        const int bytes = shared_chunks * S::kRecord * (S::kRows ? kRecordRows : 1);
        prefetch_l2(a.shared_down.data + static_cast<int64_t>(t) * bytes, static_cast<uint32_t>(bytes));
      }
  }
  begin(0, -1);
  ring.next();
  for (int t = block; t < shares.row_tiles; t += a.n_blocks) {
    for (int chunk = 0; chunk < shares.down_chunks;) {
      const int some = min(2 * S::kChunks, shares.down_chunks - chunk);
      uint8_t* to = begin(some, 0);
      for (const int end = chunk + some; chunk < end;) {
        const int slot = chunk / shares.inner_chunks;
        const bool routed = slot < a.top_k;
        const int first = (routed ? slot : a.top_k) * shares.inner_chunks, width = routed ? shares.inner_chunks : shared_chunks;
        const int n = min(end, first + width) - chunk;
        const uint8_t* matrix = a.shared_down.data;
        if (routed) matrix = a.down.data + (a.first_down + expert(slot)) * a.down.matrix_bytes;
        if constexpr (S::kRows) {
          if (lane < kRecordRows)
            copy(matrix + (static_cast<int64_t>(t * kRecordRows + lane) * width + chunk - first) * S::kRecord, n,
                 to + lane * S::kWholePitch);
        } else if (lane == 0) {
          copy(matrix + (static_cast<int64_t>(t) * width + chunk - first) * S::kRecord, n, to);
        }
        to += n * S::kRecord, chunk += n;
      }
      ring.next();
    }
  }
}

template <Tile kTile>
__device__ __forceinline__ void multiply(const MoeOneArgs& a, const Shares& shares, const uint8_t* stages, int n_stages, uint8_t* rest,
                                         Meeting& meeting) {
  using S = Stage<kTile>;
  constexpr int kRows = kTaskRows<kTile>;
  __shared__ int tasks[kMostTasks];
  __shared__ float weights[32];  // of the chosen experts
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31, g = lane >> 2, c = lane & 3,
            block = static_cast<int>(blockIdx.x);
  Ring ring{0, n_stages};
  const auto take = [&] {
    barrier_wait(&meeting.full[ring.stage], ring.round);
    return stages + ring.stage * S::kBytes;
  };
  const auto release = [&] {
    __syncwarp();
    if (lane == 0) barrier_arrive(&meeting.empty[ring.stage]);
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
  if (thread < a.top_k) weights[thread] = a.ids[thread] < 0 ? 0.0f : a.weights[thread];
  meet_consumers();
  int n_tasks = 0;
  for (;; ++n_tasks) {
    const uint8_t* stage = take();
    const int task = meeting.task[ring.stage];
    if (task < 0) break;
    float gate[2] = {}, up[2] = {};  // of rows: 16 of each; in bf16 8 gate rows, then 8 up rows
    for (int chunk = 0;;) {
#pragma unroll
      for (int i = 0; i < 2 * S::kChunks / (kRingWarps * S::kUnit) / (S::kRows ? 1 : 2); ++i) {
        const int mine = (i * kRingWarps + warp) * S::kUnit, at = chunk + mine;
        if (at >= shares.chunks) break;
        multiply_unit<kTile>(stage, mine, S::kWholePitch, rest, groups, at, lane, gate);
        if constexpr (!S::kRows) multiply_unit<kTile>(stage + S::kHalf, mine, 0, rest, groups, at, lane, up);
      }
      release();
      chunk += S::kRows ? 2 * S::kChunks : S::kChunks;
      if (chunk >= shares.chunks) break;
      stage = take();
    }
    if (thread == 0) tasks[n_tasks] = task;
    if (c < (S::kRows ? 1 : 2)) {
      float* to = reduce + (n_tasks * kRingWarps + warp) * 2 * kRows + c * 16 + g;
      to[0] = c == 0 ? gate[0] : up[0], to[8] = c == 0 ? gate[1] : up[1];
    }
  }
  release();
  meet_consumers();
  if (thread < n_tasks * kRows) {
    const int j = thread / kRows, r = thread % kRows, task = tasks[j];
    float gate = 0.0f, up = 0.0f;
#pragma unroll
    for (int w = 0; w < kRingWarps; ++w) {
      const float* from = reduce + (j * kRingWarps + w) * 2 * kRows + r;
      gate += from[0], up += from[kRows];
    }
    const float weight = task < shares.routed ? weights[task / (a.gate.out / kRows)] : 1.0f;
    const float v = gate / (1.0f + __expf(-gate)) * up;
    static_cast<bf16*>(a.h)[task * kRows + r] = from_f32<bf16>(weight != 0.0f ? v * weight : 0.0f);
  }
  meet_blocks(a.barrier, a.n_blocks);  // every block's part of h is there, and no block draws any more
  if (block == 0 && thread == 0) *a.drawn = 0;

  place(shares.down_chunks);
  stage_vector<kTile>(a.h, shares.down_chunks, rest, groups, thread);
  meet_consumers();
  const int n_tiles = share_of(shares.row_tiles, block, a.n_blocks);
  for (int j = 0; j < n_tiles; ++j) {
    float acc[2] = {};
    for (int chunk = 0; chunk < shares.down_chunks; chunk += 2 * S::kChunks) {
      const uint8_t* stage = take();
#pragma unroll
      for (int i = 0; i < 2 * S::kChunks / (kRingWarps * S::kUnit); ++i) {
        const int mine = (i * kRingWarps + warp) * S::kUnit, at = chunk + mine;
        if (at >= shares.down_chunks) break;
        multiply_unit<kTile>(stage, mine, S::kWholePitch, rest, groups, at, lane, acc);
      }
      release();
    }
    if (c == 0) {
      float* to = reduce + (j * kRingWarps + warp) * 16 + g;
      to[0] = acc[0], to[8] = acc[1];
    }
  }
  meet_consumers();
  for (int i = thread; i < n_tiles * 16; i += kRingWarps * 32) {
    const int j = i >> 4, r = i & 15;
    float v = 0.0f;
#pragma unroll
    for (int w = 0; w < kRingWarps; ++w) v += reduce[(j * kRingWarps + w) * 16 + r];
    static_cast<bf16*>(a.y)[(block + j * a.n_blocks) * 16 + r] = from_f32<bf16>(v);
  }
}
#endif

// As if of 1,024 threads: no more than 64 registers, so that the kernels before and after have room beside it.
template <Tile kTile>
__global__ __launch_bounds__(1024, 1) void moe_one_kernel(const __grid_constant__ MoeOneArgs a, int n_stages) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Meeting meeting;
  pdl_trigger();
  if (threadIdx.x == 0) {
    for (int i = 0; i < n_stages; ++i) barrier_init(&meeting.full[i], 1), barrier_init(&meeting.empty[i], kRingWarps);
    fence_async_proxy();
  }
  __syncthreads();
  const Shares shares(a, kTaskRows<kTile>);
  if (threadIdx.x >= kRingWarps * 32)
    ask_for_weights<kTile>(a, shares, shared, n_stages, meeting);
  else
    multiply<kTile>(a, shares, shared, n_stages, shared + n_stages * Stage<kTile>::kBytes, meeting);
#endif
}

template <typename F>
bool with_form(Tile tile, F&& f) {
  switch (tile) {
    case Tile::q4g32: return f(std::integral_constant<Tile, Tile::q4g32>{});
    case Tile::q4g64: return f(std::integral_constant<Tile, Tile::q4g64>{});
    case Tile::q4g128: return f(std::integral_constant<Tile, Tile::q4g128>{});
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
  return with_form(a.gate.tile, [&](auto tile) {
    const Shares s(a, kTaskRows<tile.value>);
    return s.most <= kMostTasks && s.most * s.rows <= kRingWarps * 32 && stages_for<tile.value>(a) >= 2;  // a thread per row of them
  });
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
    error = launch(moe_one_kernel<tile.value>, dim3(static_cast<unsigned>(a.n_blocks)), kRingThreads, bytes, stream, a, n_stages);
    return true;
  });
  return error;
}

}  // namespace cachalot::cuda
