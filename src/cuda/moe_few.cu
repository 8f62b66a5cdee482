// Experts of few rows each, codes of 4 bits in groups of 128. What limits gemm_stream.cuh there is instructions, half of which open the
// codes; here x comes as whole numbers and the codes go to the integer tensor cores as they are. A block takes some row tiles of an expert
// (gate tiles and their up tiles, or neighbours) for up to 4 kSets rows of x. kSplit warps share a row tile, each every kSplit-th step of
// 128 columns, which is two records; the next steps of a warp are under way to its ring in shared memory, where x lies, too.
#include <cooperative_groups.h>

#include <algorithm>

#include "cuda/moe_few.h"
#include "cuda/whole_step.cuh"

namespace cachalot::cuda {
namespace {

constexpr int kStepCols = kWholeGroup, kRowsThreads = 256;
constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kStepBytes = WholeStep::kBytes;
constexpr int kSumPitch = 17;

// Bytes from row to row of x in shared memory: the codes of `window` columns, then all groups. Those of four rows lie in different banks.
__host__ __device__ constexpr int shared_pitch(int window, int cols) { return 2 * window + whole_groups(cols) * 8 + 16; }

// kDepth: steps in a warp's ring. kBlocks: per multiprocessor, by registers and by shared memory.
template <bool kGate, int kSplit, int kSets, int kDepth, int kBlocks>
struct FewShape {
  static constexpr int kRows = (kGate ? 8 : 16) * kWarps / kSplit, kMost = 4 * kSets;  // of y and of x, per block
  static constexpr int kRingBytes = kWarps * kDepth * kStepBytes, kMostShared = 226 * 1024 / kBlocks - 2560;
  static constexpr int kCluster = kGate ? kStepCols / kRows : 1;  // blocks that have a group of h together
  static_assert(kMost * kSumPitch * 4 <= kDepth * kStepBytes && (!kGate || kMost * kRows / 8 <= kThreads));
};

#if __CUDA_ARCH__ >= 900
// Every kFewRows-th pair of an expert leads as many: if pair `self` does, their number and `list`, by a warp; otherwise 0.
__device__ __forceinline__ int inline_pairs(const MoePlan& plan, int self, int lane, int* list, int& expert) {
  constexpr int kWords = kInlinePairs / 32;
  int id[kWords], n = 0, rank = 0;
  uint32_t same[kWords];
#pragma unroll
  for (int w = 0; w < kWords; ++w) id[w] = 32 * w + lane < plan.n_pairs ? __ldcg(plan.ids + 32 * w + lane) : -1;
  expert = __shfl_sync(~0u, self < 32 ? id[0] : id[1], self & 31);
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const uint32_t earlier = self >= 32 * (w + 1) ? ~0u : self >= 32 * w ? (1u << (self - 32 * w)) - 1u : 0u;
    same[w] = __ballot_sync(~0u, id[w] == expert);
    rank += __popc(same[w] & earlier);
  }
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const int place = n + __popc(same[w] & ((1u << lane) - 1u)) - rank;
    if (id[w] == expert && place >= 0 && place < kFewRows) list[place] = 32 * w + lane;
    n += __popc(same[w]);
  }
  __syncwarp();
  return expert >= 0 && rank % kFewRows == 0 ? min(n - rank, kFewRows) : 0;
}

// Gate and up sums of the block's warps into whole numbers of silu(gate) * up; a thread takes eight columns of a row.
template <typename Shape, int kSplit, typename Sums>
__device__ __forceinline__ void store_whole_rows(const Sums& sum_of, const int* rows, int count, WholeRows to, int out, int block) {
  constexpr int kEach = Shape::kRows / 8, kCluster = Shape::kCluster;
  const int row = static_cast<int>(threadIdx.x) / kEach, unit = static_cast<int>(threadIdx.x) % kEach;
  float v[8] = {}, sum = 0.0f, largest = 0.0f;
  if (row < count) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float gate = 0.0f, up = 0.0f;
#pragma unroll
      for (int k = 0; k < kSplit; ++k) {
        const int warp = unit / 2 * kSplit + k, r = unit % 2 * 8 + i;
        gate += sum_of(warp, row, r), up += sum_of(kWarps / 2 + warp, row, r);
      }
      v[i] = __fdividef(gate, 1.0f + __expf(-gate)) * up;
      sum += v[i];
      largest = fmaxf(largest, fabsf(v[i]));
    }
  }
  join_parts<kEach>(sum, largest);
  if constexpr (kCluster > 1) {
    __shared__ float2 of_rank[kCluster][Shape::kMost];
    const auto cluster = cooperative_groups::this_cluster();
    const unsigned rank = cluster.block_rank();
    if (unit == 0 && row < count)
#pragma unroll
      for (int r = 0; r < kCluster; ++r) cluster.map_shared_rank(&of_rank[0][0], r)[rank * Shape::kMost + row] = make_float2(sum, largest);
    cluster.sync();
    if (row < count) {
      sum = largest = 0.0f;
#pragma unroll
      for (int r = 0; r < kCluster; ++r) sum += of_rank[r][row].x, largest = fmaxf(largest, of_rank[r][row].y);
    }
  }
  if (row >= count) return;
  const int i = block * kEach + unit;
  const WholePart part = whole_part(v, sum, largest);
  store_whole(to.codes + static_cast<int64_t>(rows[row]) * 2 * out, i, part);
  if (i % (kStepCols / 8) == 0) to.groups[rows[row] * whole_groups(out) + i / (kStepCols / 8)] = part.group;
}

#endif

template <bool kGate, int kSplit, int kSets, int kDepth, int kBlocks>
__global__ __launch_bounds__(kThreads, kBlocks) void few_kernel(const __grid_constant__ FewArgs a) {
#if __CUDA_ARCH__ >= 900
  using Shape = FewShape<kGate, kSplit, kSets, kDepth, kBlocks>;
  constexpr int kMost = Shape::kMost, kRows = Shape::kRows;
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  uint8_t* x_rows = shared_bytes + Shape::kRingBytes;
  __shared__ uint64_t x_there;
  __shared__ int rows_of_y[kMost], lists[kWarps][kFewRows];
  pdl_trigger();
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31, g = lane >> 2, c = lane & 3;
  if (thread == 0) {
    barrier_init(&x_there, 1);
    fence_async_proxy();
  }
  int block = static_cast<int>(blockIdx.x), slot = static_cast<int>(blockIdx.y), matrix = 0, begin = 0, count = 0;
  const bool shared = slot < a.shared_slots;
  const FewProduct p = shared ? a.shared : a.routed;
  if (shared) {
    begin = slot / a.shared_parts * kMost, block += slot % a.shared_parts * static_cast<int>(gridDim.x);
    count = min(a.n_tokens - begin, kMost);
  } else if (slot -= a.shared_slots; a.moe.tile > 0) {
    const int* tile = reinterpret_cast<const int*>(a.moe.tiles + slot);
    matrix = a.first_matrix + __ldcg(tile), begin = __ldcg(tile + 1), count = __ldcg(tile + 2);
  } else {
    count = inline_pairs(a.moe, slot, lane, lists[warp], matrix);
    matrix += a.first_matrix;
  }
  if (count <= 0 || block * kRows >= p.w.out) return;

  const int n_steps = p.w.cols / kStepCols, part = warp % kSplit, place = warp / kSplit;
  const bool up = kGate && warp >= kWarps / 2;
  const int tile = block * (kRows / 16) + (up ? place - kWarps / kSplit / 2 : place);
  const bool works = tile * 16 < p.w.out;
  const uint8_t* from = (up ? p.up : p.w.data) + matrix * p.w.matrix_bytes + (tile * n_steps + part) * static_cast<int64_t>(kStepBytes);
  uint8_t* ring = shared_bytes + warp * (kDepth * kStepBytes);
  const uint32_t to_ring = shared_address(ring) + lane * 16;
  from += lane * 16;
  int left = works ? n_steps - part : 0;  // to be asked for
  const uint64_t policy = once_policy();
  const auto ask = [&](int to) {
    ask_for_step(left > 0, to_ring + to, from, lane, policy);
    from += kSplit * kStepBytes, left -= kSplit;
  };
#pragma unroll
  for (int i = 0; i < kDepth - 1; ++i) ask(i * kStepBytes);
  __syncthreads();  // the barrier is there
  const int window = min(a.window, n_steps), pitch = shared_pitch(window * kStepCols, p.w.cols);
  int row = 0;
  const auto copy_x = [&](int first) {  // the codes of the steps from `first` on, at first all groups, too; by one warp
    const int groups = first == 0 ? whole_groups(p.w.cols) : 0, bytes = min(window, n_steps - first) * 2 * kStepCols;
    if (lane == 0) barrier_expect(&x_there, static_cast<uint32_t>(count * (bytes + groups * 8)));
    __syncwarp();
    if (lane >= count) return;
    uint8_t* to = x_rows + lane * pitch;
    const uint8_t* codes = p.x.codes + static_cast<int64_t>(row) * 2 * p.w.cols + first * 2 * kStepCols;
    bulk_copy(to, codes, static_cast<uint32_t>(bytes), &x_there);
    if (groups > 0) bulk_copy(to + window * 2 * kStepCols, p.x.groups + row * groups, static_cast<uint32_t>(groups * 8), &x_there);
  };
  if (warp == 0) {
    int to = begin + min(lane, count - 1);
    if (!shared) to = a.moe.tile > 0 ? __ldcg(a.moe.order + to) : lists[0][to];
    row = a.by_token && !shared ? static_cast<int>((static_cast<float>(to) + 0.5f) * a.tokens_per_pair) : to;
    if (lane < kMost) rows_of_y[lane] = to;
    pdl_wait();
    copy_x(0);
  }
  const uint8_t* x = x_rows + (g >> 1) * pitch + (g & 1) * 64 + c * 16 + part * 2 * kStepCols;
  const uint8_t* group = x_rows + c * pitch + window * 2 * kStepCols + part * 8;
  const int n_sets = (count + 3) >> 2;
  float acc[kSets][2] = {};
  int step = part, at = 0, free = (kDepth - 1) * kStepBytes;  // where this step is, and where the one before was
  uint32_t round = 0;
  for (int first = 0; first < n_steps; first += window, round ^= 1) {
    if (first > 0) {
      __syncthreads();
      if (warp == 0) copy_x(first);
      x -= window * 2 * kStepCols;
    }
    barrier_wait(&x_there, round);
    if (works)
      for (const int end = min(first + window, n_steps); step < end; step += kSplit) {
        cp_async_wait<kDepth - 2>();
        __syncwarp();
        ask(free);
        WholeStep w;
        w.load_shared(ring + at, lane);
        multiply_step<kSets>(
            w, n_sets, [&](int s, int r) { return *reinterpret_cast<const uint4*>(x + 4 * s * pitch + 128 * r); },
            [&](int s) { return *reinterpret_cast<const float2*>(group + 4 * s * pitch); }, acc);
        x += kSplit * 2 * kStepCols, group += kSplit * 8;
        free = at, at += kStepBytes;
        if (at == kDepth * kStepBytes) at = 0;
      }
  }
  // The sums go where the warp's ring was.
  const auto sum_of = [&](int of_warp, int x_row, int r) -> float& {
    return reinterpret_cast<float*>(shared_bytes + of_warp * (kDepth * kStepBytes))[x_row * kSumPitch + r];
  };
  __syncwarp();
#pragma unroll
  for (int s = 0; s < kSets; ++s)
#pragma unroll
    for (int h = 0; h < 2; ++h) sum_of(warp, 4 * s + c, g + 8 * h) = acc[s][h];
  __syncthreads();
  if constexpr (kGate) {
    store_whole_rows<Shape, kSplit>(sum_of, rows_of_y, count, p.h, p.w.out, block);
  } else {
    for (int i = thread; i < count * kRows; i += kThreads) {
      const int r = i % kRows, j = i / kRows;
      if (block * kRows + r >= p.w.out) continue;
      float v = 0.0f;
#pragma unroll
      for (int k = 0; k < kSplit; ++k) v += sum_of(r / 16 * kSplit + k, j, r % 16);
      p.y[static_cast<int64_t>(rows_of_y[j]) * p.w.out + block * kRows + r] = v;
    }
  }
#endif
}

// A block per row. Others may start once the kernels before this one have ended: theirs is the routing.
__global__ __launch_bounds__(kRowsThreads) void whole_rows_kernel(Mat x, WholeRows to) {
  pdl_wait();
  pdl_trigger();
  const int row = static_cast<int>(blockIdx.x);
  const uint4* from = reinterpret_cast<const uint4*>(static_cast<const bf16*>(x.data) + row * x.stride);
  uint8_t* codes = to.codes + static_cast<int64_t>(row) * 2 * x.cols;
  float2* groups = to.groups + row * whole_groups(x.cols);
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, n = x.cols / 8, each = kStepCols / 8;
  for (int base = thread - lane; base < n; base += kRowsThreads) {
    const int i = base + lane;
    const WholePart part = whole_part<kStepCols>(i < n ? load16(from + i) : make_uint4(0, 0, 0, 0));
    if (i < n) store_whole(codes, i, part);
    if (i < n && i % each == 0) groups[i / each] = part.group;
  }
}

template <bool kGate, int kSplit, int kSets, int kDepth, int kBlocks>
cudaError_t launch_shape(FewArgs a, cudaStream_t stream) {
  using Shape = FewShape<kGate, kSplit, kSets, kDepth, kBlocks>;
  constexpr auto kKernel = few_kernel<kGate, kSplit, kSets, kDepth, kBlocks>;
  const int blocks = ceil_div(a.routed.w.out, Shape::kRows);
  dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(a.moe.tile > 0 ? a.moe.max_tiles : a.moe.n_pairs));
  a.tokens_per_pair = 1.0f / static_cast<float>(a.moe.top_k);
  int cols = a.routed.w.cols;
  // The shared expert's blocks come first: its weights do not hang on the routing.
  if (a.shared.w.data != nullptr) {
    a.shared_parts = ceil_div(ceil_div(a.shared.w.out, Shape::kRows), blocks);
    a.shared_slots = ceil_div(a.n_tokens, Shape::kMost) * a.shared_parts;
    grid.y += static_cast<unsigned>(a.shared_slots);
    cols = std::max(cols, a.shared.w.cols);
  }
  // As many steps of x at once, an even number, as shared memory has room for.
  const int rows = std::min(Shape::kMost, ceil_div(a.moe.n_pairs, 4) * 4), n_steps = ceil_div(cols / kStepCols, 2) * 2;
  const int left = (Shape::kMostShared - Shape::kRingBytes) / rows - shared_pitch(0, cols);
  a.window = std::min(n_steps, left / (4 * kStepCols) * 2);
  if (a.window <= 0) return cudaErrorInvalidValue;
  const int bytes = Shape::kRingBytes + rows * shared_pitch(a.window * kStepCols, cols);
  static const cudaError_t raised = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kMostShared);
  if (raised != cudaSuccess) return raised;
  return launch_clusters(kKernel, Shape::kCluster, grid, kThreads, static_cast<size_t>(bytes), stream, a);
}
template <bool kGate>
cudaError_t launch_few(const FewArgs& a, cudaStream_t stream) {
  // Measured. Of very few rows the second product has too few blocks with a warp per row tile.
  constexpr int kSplit = kGate ? 1 : 2;
  if (a.moe.tile == 0 && a.moe.n_pairs <= 24) return launch_shape<kGate, kSplit, 1, 4, 4>(a, stream);
  if (a.moe.tile == 0) return launch_shape<kGate, 1, 1, 6, 3>(a, stream);
  if (a.moe.tile <= 8) return launch_shape<kGate, 1, 2, 4, 3>(a, stream);
  return a.moe.tile <= 16 ? launch_shape<kGate, 1, 4, 4, 3>(a, stream) : launch_shape<kGate, 1, 8, 4, 3>(a, stream);
}

}  // namespace

bool few_supports(const FewProduct& p) {
  return p.w.tile == Tile::q4g128 && p.w.in == p.w.cols && p.w.cols <= kMostFewColumns && p.w.out % kWholeGroup == 0;
}

cudaError_t launch_whole_rows(Mat x, WholeRows to, cudaStream_t stream) {
  return launch(whole_rows_kernel, dim3(static_cast<unsigned>(x.rows)), kRowsThreads, 0, stream, x, to);
}
cudaError_t launch_few_gate_up(const FewArgs& args, cudaStream_t stream) { return launch_few<true>(args, stream); }
cudaError_t launch_few_down(const FewArgs& args, cudaStream_t stream) { return launch_few<false>(args, stream); }

}  // namespace cachalot::cuda
