// Experts of few rows each. What limits gemm_stream.cuh there is instructions, half of which open the codes; here x comes as whole numbers
// and the codes go to the integer tensor cores as they are. A block takes some row tiles of an expert (gate tiles and their up tiles, or
// neighbours) for up to 4 kSets rows of x. kSplit warps share a row tile, each every kSplit-th step of 64 or 128 columns, which is one or
// two records; the next steps of a warp are under way to its ring in shared memory, where x lies, too.
#include <cooperative_groups.h>

#include <algorithm>
#include <type_traits>

#include "cuda/moe_few.h"
#include "cuda/whole_records.cuh"
#include "cuda/whole_step.cuh"

namespace cachalot::cuda {
namespace {

constexpr int kStepCols = kWholeGroup, kRowsThreads = 256;
constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kSumPitch = 17;

// Bytes from row to row of x in shared memory: the codes of `window` columns, then all groups. Those of four rows lie in different banks.
__host__ __device__ constexpr int shared_pitch(int window, int cols, bool fine) { return 2 * window + whole_groups(cols, fine) * 8 + 16; }

// The forms of a launch's weights: codes of 4 bits in groups of 128; q4g32; any with finer groups than the first.
enum class FewForm : uint8_t { wide, fine4, fine };

// kRing: bytes of a warp's ring. kBlocks: per multiprocessor, by registers and by shared memory.
template <bool kIsGate, FewForm kOfWeights, int kWarpsPerTile, int kRowSets, int kRing, int kBlocks>
struct FewShape {
  static constexpr FewForm kForm = kOfWeights;
  static constexpr bool kGate = kIsGate, kFine = kForm != FewForm::wide;
  static constexpr int kSplit = kWarpsPerTile, kSets = kRowSets, kResident = kBlocks;
  static constexpr int kRows = (kGate ? 8 : 16) * kWarps / kSplit, kMost = 4 * kSets;  // of y and of x, per block
  static constexpr int kRingBytes = kWarps * kRing, kMostShared = 226 * 1024 / kBlocks - 2560;
  static constexpr int kCluster = kGate ? kStepCols / kRows : 1;  // blocks that have a group of h together
  static_assert(kRing % 16 == 0 && kMost * kSumPitch * 4 <= kRing && (!kGate || kMost * kRows / 8 <= kThreads));
};

// Of a row's part, which is i of its columns / 8: the sum of the whole numbers of four neighbouring lanes' parts.
__device__ __forceinline__ int join_whole_sums(const WholePart& part) {
  int sum = whole_sum(part);
  sum += __shfl_xor_sync(~0u, sum, 1);
  return sum + __shfl_xor_sync(~0u, sum, 2);
}
// What is known of the groups of a row of `cols` columns, as far as part i is the first of one; `whole` is of join_whole_sums.
template <bool kFine>
__device__ __forceinline__ void store_group(float2* groups, int cols, int i, const WholePart& part, int whole) {
  constexpr int kParts = kStepCols / 8;
  if constexpr (kFine) {
    float* to = reinterpret_cast<float*>(groups);
    if (i % 4 == 0) {
      const int upper = (whole + 512) & ~1023;
      float* sums = to + i / kParts * 8 + i / 4 % 4;
      sums[0] = static_cast<float>(upper), sums[4] = static_cast<float>(whole - upper);
    }
    if (i % kParts == 0) to[cols / kStepCols * 8 + i / kParts] = 16.0f * part.group.y;
  } else if (i % kParts == 0) {
    groups[i / kParts] = part.group;
  }
}

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
template <typename Shape, typename Sums>
__device__ __forceinline__ void store_whole_rows(const Sums& sum_of, const int* rows, int count, WholeRows to, int out, int block) {
  constexpr int kEach = Shape::kRows / 8, kCluster = Shape::kCluster, kSplit = Shape::kSplit;
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
  const int i = block * kEach + unit;
  const WholePart part = whole_part(v, sum, largest);
  const int whole = Shape::kFine ? join_whole_sums(part) : 0;
  if (row >= count) return;
  store_whole<Shape::kFine>(to.codes + static_cast<int64_t>(rows[row]) * 2 * out, i, part);
  store_group<Shape::kFine>(to.groups + rows[row] * whole_groups(out, Shape::kFine), out, i, part, whole);
}

template <Tile kTile>
using TileOf = std::integral_constant<Tile, kTile>;

// The step of a warp: two records of 4-bit codes in groups of 128, or RecordStep.
template <Tile kTile>
struct FewStep : RecordStep<kTile> {};
template <>
struct FewStep<Tile::q4g128> {
  static constexpr int kRecords = 2, kBytes = WholeStep::kBytes;
  static constexpr float kFactor = 1.0f;
  static __device__ __forceinline__ void ask(bool there, uint32_t to, const uint8_t* from, int lane, uint64_t policy) {
    ask_for_step(there, to, from, lane, policy);
  }
  static __device__ __forceinline__ int x_part(int c) { return c; }
};

// What a block works on: rows `begin` and on of the pairs' order or of the tokens, or pairs of a list.
struct FewWork {
  int block, matrix, begin, count;
  bool shared;
  const int* list;
};

// acc = the products of the warp's part of a row tile with the block's rows of x, which are rows_of_y of y.
template <Tile kTile, typename Shape>
__device__ __forceinline__ void multiply_rows(const FewArgs& a, const FewProduct& p, const FewWork& work, uint8_t* shared_bytes,
                                              uint64_t* x_there, int* rows_of_y, float (&acc)[Shape::kSets][2]) {
  using Step = FewStep<kTile>;
  constexpr int kSplit = Shape::kSplit, kSets = Shape::kSets, kWarpRing = Shape::kRingBytes / kWarps;
  constexpr int kDepth = kWarpRing / Step::kBytes, kRing = kDepth * Step::kBytes;
  constexpr int kSteps = 2 / Step::kRecords;  // per group of x
  constexpr bool kFine = Shape::kFine;
  static_assert(kDepth >= 2 && kFine == (kTile != Tile::q4g128));
  const int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, c = lane & 3;
  uint8_t* x_rows = shared_bytes + Shape::kRingBytes;
  const int n_groups = p.w.cols / kStepCols, n_steps = n_groups * kSteps, part = warp % kSplit, place = warp / kSplit;
  const bool up = Shape::kGate && warp >= kWarps / 2;
  const int tile = work.block * (Shape::kRows / 16) + (up ? place - kWarps / kSplit / 2 : place);
  const bool works = tile * 16 < p.w.out;
  const uint8_t* from =
      (up ? p.up : p.w.data) + work.matrix * p.w.matrix_bytes + (tile * n_steps + part) * static_cast<int64_t>(Step::kBytes);
  uint8_t* ring = shared_bytes + warp * kWarpRing;
  const uint32_t to_ring = shared_address(ring) + lane * 16;
  from += lane * 16;
  int left = works ? n_steps - part : 0;  // to be asked for
  const uint64_t policy = once_policy();
  const auto ask = [&](int to) {
    Step::ask(left > 0, to_ring + to, from, lane, policy);
    from += kSplit * Step::kBytes, left -= kSplit;
  };
#pragma unroll
  for (int i = 0; i < kDepth - 1; ++i) ask(i * Step::kBytes);
  __syncthreads();  // the barrier is there
  const int window = min(a.window, n_groups), pitch = shared_pitch(window * kStepCols, p.w.cols, kFine);
  int row = 0;
  const auto copy_x = [&](int first) {  // the codes of the groups from `first` on, at first all that is known of groups, too; by one warp
    const int groups = first == 0 ? whole_groups(p.w.cols, kFine) : 0, bytes = min(window, n_groups - first) * 2 * kStepCols;
    if (lane == 0) barrier_expect(x_there, static_cast<uint32_t>(work.count * (bytes + groups * 8)));
    __syncwarp();
    if (lane >= work.count) return;
    uint8_t* to = x_rows + lane * pitch;
    const uint8_t* codes = p.x.codes + static_cast<int64_t>(row) * 2 * p.w.cols + first * 2 * kStepCols;
    bulk_copy(to, codes, static_cast<uint32_t>(bytes), x_there);
    if (groups > 0) bulk_copy(to + window * 2 * kStepCols, p.x.groups + row * groups, static_cast<uint32_t>(groups * 8), x_there);
  };
  if (warp == 0) {
    int to = work.begin + min(lane, work.count - 1);
    if (!work.shared) to = a.moe.tile > 0 ? __ldcg(a.moe.order + to) : work.list[to];
    row = a.by_token && !work.shared ? static_cast<int>((static_cast<float>(to) + 0.5f) * a.tokens_per_pair) : to;
    if (lane < Shape::kMost) rows_of_y[lane] = to;
    pdl_wait();
    copy_x(0);
  }
  // Bytes of x, and of what is known of its groups.
  constexpr int kStepX = Step::kRecords * 2 * kRecordCols, kStepGroup = Step::kRecords * (kFine ? 16 : 4);
  const uint8_t* x = x_rows + (g >> 1) * pitch + (g & 1) * 64 + Step::x_part(c) * 16 + part * kStepX;
  const uint8_t* groups_of_x = x_rows + window * 2 * kStepCols;
  const uint8_t* group = groups_of_x + part * kStepGroup + (kFine ? (g >> 1) * pitch + (g & 1) * 16 + c * 4 : c * pitch);
  const float* scales = reinterpret_cast<const float*>(groups_of_x + c * pitch + n_groups * 32);
  const int n_sets = (work.count + 3) >> 2;
  // For fine weights the number of sets is a constant of the loop, so that the compiler mixes what they do.
  const auto run = [&](auto used) {
    [[maybe_unused]] constexpr int kUsed = decltype(used)::value;
    int step = part, at = 0, free = (kDepth - 1) * Step::kBytes;  // where this step is, and where the one before was
    uint32_t round = 0;
    for (int first = 0; first < n_groups; first += window, round ^= 1) {
      if (first > 0) {
        __syncthreads();
        if (warp == 0) copy_x(first);
        x -= window * 2 * kStepCols;
      }
      barrier_wait(x_there, round);
      if (works)
        for (const int end = min(first + window, n_groups) * kSteps; step < end; step += kSplit) {
          cp_async_wait<kDepth - 2>();
          __syncwarp();
          ask(free);
          const auto x_at = [&](int s, int r, int byte) {
            return *reinterpret_cast<const uint4*>(x + 4 * s * pitch + 2 * kRecordCols * r + byte);
          };
          if constexpr (kFine) {
            const float* scale = scales + step / kSteps;
            Step::template multiply<kUsed>(
                ring + at, lane, x_at, [&](int s) { return *reinterpret_cast<const float*>(group + 4 * s * pitch); },
                [&](int s) { return scale[s * pitch]; }, acc);
          } else {
            WholeStep w;
            w.load_shared(ring + at, lane);
            multiply_step<kSets>(
                w, n_sets, [&](int s, int r) { return x_at(s, r, 0); },
                [&](int s) { return *reinterpret_cast<const float2*>(group + 4 * s * pitch); }, acc);
          }
          x += kSplit * kStepX, group += kSplit * kStepGroup;
          free = at, at += Step::kBytes;
          if (at == kRing) at = 0;
        }
    }
  };
  if constexpr (!kFine || kSets == 1) {
    run(std::integral_constant<int, kSets>{});
  } else if (n_sets == 1) {
    run(std::integral_constant<int, 1>{});
  } else if (n_sets == 2) {
    run(std::integral_constant<int, 2>{});
  } else if constexpr (kSets > 2) {
    if (n_sets == 3)
      run(std::integral_constant<int, 3>{});
    else
      run(std::integral_constant<int, kSets>{});
  }
  if constexpr (Step::kFactor != 1.0f)
#pragma unroll
    for (auto& sums : acc) sums[0] *= Step::kFactor, sums[1] *= Step::kFactor;
}
#endif

template <typename Shape>
__global__ __launch_bounds__(kThreads, Shape::kResident) void few_kernel(const __grid_constant__ FewArgs a) {
#if __CUDA_ARCH__ >= 900
  constexpr int kMost = Shape::kMost, kRows = Shape::kRows, kSplit = Shape::kSplit;
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  __shared__ uint64_t x_there;
  __shared__ int rows_of_y[kMost], lists[kWarps][kFewRows];
  pdl_trigger();
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31, g = lane >> 2, c = lane & 3;
  if (thread == 0) {
    barrier_init(&x_there, 1);
    fence_async_proxy();
  }
  int slot = static_cast<int>(blockIdx.y);
  FewWork work{static_cast<int>(blockIdx.x), 0, 0, 0, slot < a.shared_slots, lists[0]};
  const FewProduct p = work.shared ? a.shared : a.routed;
  if (work.shared) {
    work.begin = slot / a.shared_parts * kMost, work.block += slot % a.shared_parts * static_cast<int>(gridDim.x);
    work.count = min(a.n_tokens - work.begin, kMost);
  } else if (slot -= a.shared_slots; a.moe.tile > 0) {
    const int* tile = reinterpret_cast<const int*>(a.moe.tiles + slot);
    work.matrix = a.first_matrix + __ldcg(tile), work.begin = __ldcg(tile + 1), work.count = __ldcg(tile + 2);
  } else {
    work.count = inline_pairs(a.moe, slot, lane, lists[warp], work.matrix);
    work.matrix += a.first_matrix;
  }
  if (work.count <= 0 || work.block * kRows >= p.w.out) return;

  float acc[Shape::kSets][2] = {};
  const auto multiply = [&](auto tile) { multiply_rows<decltype(tile)::value, Shape>(a, p, work, shared_bytes, &x_there, rows_of_y, acc); };
  if constexpr (!Shape::kFine)
    multiply(TileOf<Tile::q4g128>{});
  else if (Shape::kForm == FewForm::fine4 || p.w.tile == Tile::q4g32)
    multiply(TileOf<Tile::q4g32>{});
  else if (p.w.tile == Tile::q5g32)
    multiply(TileOf<Tile::q5g32>{});
  else if (p.w.tile == Tile::q6g16)
    multiply(TileOf<Tile::q6g16>{});
  else
    multiply(TileOf<Tile::q8g32>{});

  // The sums go where the warp's ring was.
  const auto sum_of = [&](int of_warp, int x_row, int r) -> float& {
    return reinterpret_cast<float*>(shared_bytes + of_warp * (Shape::kRingBytes / kWarps))[x_row * kSumPitch + r];
  };
  __syncwarp();
#pragma unroll
  for (int s = 0; s < Shape::kSets; ++s)
#pragma unroll
    for (int h = 0; h < 2; ++h) sum_of(warp, 4 * s + c, g + 8 * h) = acc[s][h];
  __syncthreads();
  if constexpr (Shape::kGate) {
    store_whole_rows<Shape>(sum_of, rows_of_y, work.count, p.h, p.w.out, work.block);
  } else {
    for (int i = thread; i < work.count * kRows; i += kThreads) {
      const int r = i % kRows, j = i / kRows;
      if (work.block * kRows + r >= p.w.out) continue;
      float v = 0.0f;
#pragma unroll
      for (int k = 0; k < kSplit; ++k) v += sum_of(r / 16 * kSplit + k, j, r % 16);
      p.y[static_cast<int64_t>(rows_of_y[j]) * p.w.out + work.block * kRows + r] = v;
    }
  }
#endif
}

// A block per row. Others may start once the kernels before this one have ended: theirs is the routing.
template <bool kFine>
__global__ __launch_bounds__(kRowsThreads) void whole_rows_kernel(Mat x, WholeRows to) {
  pdl_wait();
  pdl_trigger();
  const int row = static_cast<int>(blockIdx.x);
  const uint4* from = reinterpret_cast<const uint4*>(static_cast<const bf16*>(x.data) + row * x.stride);
  uint8_t* codes = to.codes + static_cast<int64_t>(row) * 2 * x.cols;
  float2* groups = to.groups + row * whole_groups(x.cols, kFine);
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, n = x.cols / 8;
  for (int base = thread - lane; base < n; base += kRowsThreads) {
    const int i = base + lane;
    const WholePart part = whole_part<kStepCols>(i < n ? load16(from + i) : make_uint4(0, 0, 0, 0));
    const int whole = kFine ? join_whole_sums(part) : 0;
    if (i >= n) continue;
    store_whole<kFine>(codes, i, part);
    store_group<kFine>(groups, x.cols, i, part, whole);
  }
}

template <typename Shape>
cudaError_t launch_shape(FewArgs a, cudaStream_t stream) {
  constexpr auto kKernel = few_kernel<Shape>;
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
  // As many groups of x at once, an even number, as shared memory has room for.
  const int rows = std::min(Shape::kMost, ceil_div(a.moe.n_pairs, 4) * 4), n_steps = ceil_div(cols / kStepCols, 2) * 2;
  const int left = (Shape::kMostShared - Shape::kRingBytes) / rows - shared_pitch(0, cols, Shape::kFine);
  a.window = std::min(n_steps, left / (4 * kStepCols) * 2);
  if (a.window <= 0) return cudaErrorInvalidValue;
  const int bytes = Shape::kRingBytes + rows * shared_pitch(a.window * kStepCols, cols, Shape::kFine);
  static const cudaError_t raised = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kMostShared);
  if (raised != cudaSuccess) return raised;
  return launch_clusters(kKernel, Shape::kCluster, grid, kThreads, static_cast<size_t>(bytes), stream, a);
}
// Which form is best was measured. Of very few rows the second product has too few blocks with a warp per row tile.
template <bool kGate>
cudaError_t launch_wide(const FewArgs& a, cudaStream_t stream) {
  constexpr int kSplit = kGate ? 1 : 2, kStep = WholeStep::kBytes;
  constexpr FewForm kForm = FewForm::wide;
  if (a.moe.tile == 0 && a.moe.n_pairs <= 24) return launch_shape<FewShape<kGate, kForm, kSplit, 1, 4 * kStep, 4>>(a, stream);
  if (a.moe.tile == 0) return launch_shape<FewShape<kGate, kForm, 1, 1, 6 * kStep, 3>>(a, stream);
  if (a.moe.tile <= 8) return launch_shape<FewShape<kGate, kForm, 1, 2, 4 * kStep, 3>>(a, stream);
  return a.moe.tile <= 16 ? launch_shape<FewShape<kGate, kForm, 1, 4, 4 * kStep, 3>>(a, stream)
                          : launch_shape<FewShape<kGate, kForm, 1, 8, 4 * kStep, 3>>(a, stream);
}
template <FewForm kForm>
cudaError_t launch_fine_gate_up(const FewArgs& a, cudaStream_t stream) {
  constexpr int kStep = RecordStep<Tile::q4g32>::kBytes;
  if (a.moe.tile == 0 && a.moe.n_pairs <= 12) return launch_shape<FewShape<true, kForm, 1, 1, 5 * kStep, 3>>(a, stream);
  if (a.moe.tile == 0) return launch_shape<FewShape<true, kForm, 1, 1, 3 * kStep, 4>>(a, stream);
  return a.moe.tile <= 8 ? launch_shape<FewShape<true, kForm, 1, 2, 3 * kStep, 3>>(a, stream)
                         : launch_shape<FewShape<true, kForm, 1, 4, 3 * kStep, 3>>(a, stream);
}
cudaError_t launch_fine_down(const FewArgs& a, cudaStream_t stream) {
  constexpr FewForm kForm = FewForm::fine;
  constexpr int kStep = RecordStep<Tile::q5g32>::kBytes;
  if (a.moe.tile == 0 && a.moe.n_pairs <= 12) return launch_shape<FewShape<false, kForm, 4, 1, 4 * kStep, 3>>(a, stream);
  if (a.moe.tile == 0) return launch_shape<FewShape<false, kForm, 2, 1, 4 * kStep, 3>>(a, stream);
  return a.moe.tile <= 8 ? launch_shape<FewShape<false, kForm, 1, 2, 5 * kStep, 2>>(a, stream)
                         : launch_shape<FewShape<false, kForm, 1, 4, 5 * RecordStep<Tile::q6g16>::kBytes, 3>>(a, stream);
}

}  // namespace

bool few_supports(const FewArgs& first, const FewArgs& second) {
  const auto suits = [&](const FewProduct& p, bool gate) {
    const Tile t = p.w.tile;
    const bool form = first.fine ? t == Tile::q4g32 || t == Tile::q5g32 || t == Tile::q6g16 || t == Tile::q8g32 : t == Tile::q4g128;
    const int most = !first.fine ? kMostFewColumns : gate ? kMostFineColumns : kMostFineInner;
    return form && p.w.in == p.w.cols && p.w.cols % kWholeGroup == 0 && p.w.cols <= most && p.w.out % kWholeGroup == 0;
  };
  return suits(first.routed, true) && suits(second.routed, false) &&
         (first.shared.w.data == nullptr || (suits(first.shared, true) && suits(second.shared, false)));
}

cudaError_t launch_whole_rows(Mat x, WholeRows to, bool fine, cudaStream_t stream) {
  return launch(fine ? whole_rows_kernel<true> : whole_rows_kernel<false>, dim3(static_cast<unsigned>(x.rows)), kRowsThreads, 0, stream, x,
                to);
}
cudaError_t launch_few_gate_up(const FewArgs& args, cudaStream_t stream) {
  if (!args.fine) return launch_wide<true>(args, stream);
  const bool all4 = args.routed.w.tile == Tile::q4g32 && (args.shared.w.data == nullptr || args.shared.w.tile == Tile::q4g32);
  return all4 ? launch_fine_gate_up<FewForm::fine4>(args, stream) : launch_fine_gate_up<FewForm::fine>(args, stream);
}
cudaError_t launch_few_down(const FewArgs& args, cudaStream_t stream) {
  return args.fine ? launch_fine_down(args, stream) : launch_wide<false>(args, stream);
}

}  // namespace cachalot::cuda
