// The mixture of experts of one row: what limits it is the reading of the chosen experts, and the time before and after. One block per
// multiprocessor for the whole layer. One warp asks for weights by bulk copies into a ring of stages, never stopping between the two
// products: the shared expert's before the routing is known, the second product's while the first is still being summed up. Sixteen warps
// multiply, each its own columns of every row tile, so that only the sums at the end of each product need the block to meet.
//   first product: a task is 16 gate rows and the 16 up rows like them; silu(gate) * up times the routing weight goes to h in memory; all
//   blocks meet; second product: y = [W_1 | W_2 | ... | W_shared] h, a row tile per block.
#include "cuda/moe_one.h"

#include <algorithm>

#include "cuda/moe_ring.cuh"

namespace cachalot::cuda {
namespace {

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

// Shared memory after the stages: the input of the product; sum and scale of each of its groups; and sums of each warp.
template <Tile kTile>
__host__ __device__ inline int vector_bytes(int chunks) {
  return chunks * (kRecordCols * 2 + (Stage<kTile>::kWhole ? Stage<kTile>::kGroups * 8 : 0));
}
template <Tile kTile>
int fixed_bytes(const MoeOneArgs& a) {
  const Shares s(a);
  return std::max(vector_bytes<kTile>(s.chunks) + share_of(s.tasks, 0, a.n_blocks) * kRingWarps * 32 * 4,
                  vector_bytes<kTile>(s.down_chunks) + share_of(s.row_tiles, 0, a.n_blocks) * kRingWarps * 16 * 4);
}
template <Tile kTile>
int stages_for(const MoeOneArgs& a) {
  const int left = static_cast<int>(a.most_shared) - fixed_bytes<kTile>(a);
  return left < 0 ? 0 : std::min(kMostStages, left / Stage<kTile>::kBytes);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// acc += rows g and g + 8 of the record times chunk `chunk` of the input. All 8 columns of the mma are the same row.
template <Tile kTile>
__device__ __forceinline__ void multiply_record(const Frag<kTile>& w, const uint8_t* vector, const float2* groups, int chunk, int lane,
                                                float (&acc)[2]) {
  using S = Stage<kTile>;
  if constexpr (S::kWhole) {
    float2 group[S::kGroups];
#pragma unroll
    for (int i = 0; i < S::kGroups; ++i) group[i] = groups[chunk * S::kGroups + i];
    multiply_whole<kTile>(w, *reinterpret_cast<const uint4*>(vector + ((chunk * 2 + ((lane >> 2) & 1)) * 4 + (lane & 3)) * 16), group, acc);
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

// `chunks` chunks of a row of bf16 into shared memory: as they are, or as whole numbers. A thread takes 8 columns.
template <Tile kTile>
__device__ __forceinline__ void stage_vector(const void* from, int chunks, uint8_t* to, float2* groups, int thread) {
  using S = Stage<kTile>;
  const int lane = thread & 31, n = chunks * 8;
  for (int base = thread - lane; base < n; base += kRingWarps * 32) {
    const int i = base + lane;
    const uint4 v = i < n ? __ldcg(static_cast<const uint4*>(from) + i) : make_uint4(0, 0, 0, 0);
    if constexpr (!S::kWhole) {
      if (i < n) reinterpret_cast<uint4*>(to)[i] = v;
    } else {
      const WholePart part = whole_part<kTile>(v);
      if (i < n) store_whole(to, i, part);
      if (i < n && lane % (S::kGroup / 8) == 0) groups[i / (S::kGroup / 8)] = part.group;
    }
  }
}

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
      for (int i = 0; i < S::kChunks / kRingWarps; ++i) {
        const int mine = i * kRingWarps + warp, at = chunk + mine;
        if (at >= shares.chunks) break;
#pragma unroll
        for (int half = 0; half < 2; ++half)
          multiply_record<kTile>(stage_record<kTile>(stage + half * S::kHalf + mine * S::kRecord, S::kHalfPitch, lane), rest, groups, at,
                                 lane, acc[half]);
      }
      release();
    }
    if (c < 2) {
      float* to = reduce + (j * kRingWarps + warp) * 32 + c * 16 + g;
      to[0] = c == 0 ? acc[0][0] : acc[1][0], to[8] = c == 0 ? acc[0][1] : acc[1][1];
    }
  }
  meet_consumers();
  if (thread < n_tasks * 16) {
    const int j = thread >> 4, r = thread & 15, n = task(j);
    float gate = 0.0f, up = 0.0f;
#pragma unroll
    for (int w = 0; w < kRingWarps; ++w) gate += reduce[(j * kRingWarps + w) * 32 + r], up += reduce[(j * kRingWarps + w) * 32 + 16 + r];
    const float v = gate / (1.0f + __expf(-gate)) * up;
    static_cast<bf16*>(a.h)[n * 16 + r] = from_f32<bf16>(weight != 0.0f ? v * weight : 0.0f);
  }
  meet_blocks(a.barrier, a.n_blocks);  // every block's part of h is there

  place(shares.down_chunks);
  stage_vector<kTile>(a.h, shares.down_chunks, rest, groups, thread);
  meet_consumers();
  const int n_tiles = share_of(shares.row_tiles, block, a.n_blocks);
  for (int j = 0; j < n_tiles; ++j) {
    float acc[2] = {};
    for (int chunk = 0; chunk < shares.down_chunks; chunk += 2 * S::kChunks) {
      const uint8_t* stage = take();
#pragma unroll
      for (int i = 0; i < 2 * S::kChunks / kRingWarps; ++i) {
        const int mine = i * kRingWarps + warp, at = chunk + mine;
        if (at >= shares.down_chunks) break;
        multiply_record<kTile>(stage_record<kTile>(stage + mine * S::kRecord, S::kWholePitch, lane), rest, groups, at, lane, acc);
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

// Few registers, so that the kernels before and after have room beside it.
template <Tile kTile>
__global__ __launch_bounds__(kRingThreads, 1) void moe_one_kernel(const __grid_constant__ MoeOneArgs a, int n_stages) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t full[kMostStages], empty[kMostStages];
  pdl_trigger();
  if (threadIdx.x == 0) {
    for (int i = 0; i < n_stages; ++i) barrier_init(&full[i], 1), barrier_init(&empty[i], kRingWarps);
    fence_async_proxy();
  }
  __syncthreads();
  const Shares shares(a);
  if (threadIdx.x >= kRingWarps * 32)
    ask_for_weights<kTile>(a, shares, shared, n_stages, full, empty);
  else
    multiply<kTile>(a, shares, shared, n_stages, shared + n_stages * Stage<kTile>::kBytes, full, empty);
#endif
}

template <typename F>
bool with_form(Tile tile, F&& f) {
  return tile == Tile::bf16 ? f(std::integral_constant<Tile, Tile::bf16>{}) : with_whole_form(tile, f);
}

}  // namespace

bool moe_one_supports(const MoeOneArgs& a) {
  const auto whole = [&](const Segment& s) { return s.tile == a.gate.tile && s.in == s.cols && s.out % kRecordRows == 0; };
  if (a.top_k > 32 || !whole(a.gate) || !whole(a.down) || a.down.cols != a.gate.out) return false;
  if (a.shared_gate.data != nullptr && (!whole(a.shared_gate) || !whole(a.shared_down) || a.shared_gate.cols != a.gate.cols ||
                                        a.shared_down.cols != a.shared_gate.out || a.shared_down.out != a.down.out))
    return false;
  const Shares s(a);
  if (share_of(s.tasks, 0, a.n_blocks) > 2 * kRingWarps) return false;  // a thread per row of them
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
    error = launch(moe_one_kernel<tile.value>, dim3(static_cast<unsigned>(a.n_blocks)), kRingThreads, bytes, stream, a, n_stages);
    return true;
  });
  return error;
}

}  // namespace cachalot::cuda
