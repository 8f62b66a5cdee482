// Experts of few rows each are read once, and nothing but reading should take time. With a launch per product the blocks of all
// multiprocessors begin and end together, and memory waits for them: here one block per multiprocessor walks over tasks of both products,
// and each of its warps has the next steps of its row tiles under way to a ring of its own, those of the next task before this one's end.
//   First product: a task is 128 gate rows and the up rows like them for up to kListRows rows of x, a warp taking half of the columns of a
//   row tile and of its counterpart; silu(gate) * up goes to memory as whole numbers. Second product: a task is a row tile per warp; it
//   waits until all of the list's first product is there. Tasks of the first product come first, and are drawn in order: no block waits
//   for one that waits.
#include "cuda/moe_tokens.h"

#include <algorithm>

#include "cuda/whole_step.cuh"

namespace cachalot::cuda {
namespace {

constexpr int kWarps = 16, kFinishers = 2, kConsumers = kWarps * 32, kThreads = kConsumers + 32 + kFinishers * 32;
[[maybe_unused]] constexpr int kSets = kListRows / 4, kSumPitch = 17;
constexpr int kGateRows = kWarps / 2 * kRecordRows, kDownRows = kWarps * kRecordRows;  // of a task
constexpr int kDepth = 4;  // steps in a warp's ring; more leave the kernels before and after no room beside this one
[[maybe_unused]] constexpr int kPrefetchBlocks = 64;
[[maybe_unused]] constexpr int kWords = kMostTokenPairs / 32, kTaskSlots = 4, kInnerSlots = 2;
constexpr int kMaskBytes = kMostListedExperts * kWords * 4;
constexpr int kSumBytes = kWarps * 2 * kListRows * kSumPitch * 4;  // of a task of the first product
static_assert(kGateRows == kWholeGroup && kMostTokenPairs <= kConsumers && kMostTokenPairs % 32 == 0 && kMaskBytes <= kSumBytes);
constexpr int kStatic = 2 * 1024;  // of shared memory, beside the 1,024 bytes that MoeTokensArgs::most_shared leaves

// Bytes from row to row of whole numbers in shared memory: the codes of some columns, then all groups. Neighbours lie in different banks.
__host__ __device__ constexpr int shared_pitch(int cols, int all_cols) { return 2 * cols + whole_groups(all_cols) * 8 + 16; }
// The rings lie first, then x, the sums of the first product, and inner rows for the second: as many columns as the experts have, twice.
constexpr int kRingBytes = kWarps * kDepth * WholeStep::kBytes;
__host__ __device__ inline int inner_pitch(const MoeTokensArgs& a) {
  return shared_pitch(a.down.cols, a.shared_down.cols > a.down.cols ? a.shared_down.cols : a.down.cols);
}
__host__ __device__ inline int inner_bytes(const MoeTokensArgs& a) {
  return (a.n_tokens < kListRows ? a.n_tokens : kListRows) * inner_pitch(a);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
struct Task {
  bool down;
  int list, part;  // list < 0: there are no more
};

// A task as the warps that multiply need it: the first one's rows of weights, and `steps` of each warp.
struct Posted {
  const uint8_t *w, *up;
  int list, part, steps;
  bool down;
};

// Lists of pairs of one expert; the first ones are of the shared expert, whose pairs are the tokens. And what the warps tell each other.
struct Lists {
  uint32_t leads[kWords];
  uint8_t expert[kMostLists], count[kMostLists];
  uint8_t pairs[kMostLists][kListRows];
  Posted task[kTaskSlots];  // the n-th task of the block at n % kTaskSlots
  uint64_t x_there, task_there[kTaskSlots], task_done[kTaskSlots], inner_there[kInnerSlots], inner_done[kInnerSlots], sums_there, sums_done;
};
static_assert(sizeof(Lists) <= kStatic + 1024);

struct Numbers {  // of tasks
  int shared_lists, lists, gate_shared, gate_each, down_each;
  __device__ __forceinline__ Task task(int t) const {
    // Lists of the shared expert side by side: they read the same weights.
    if (t < shared_lists * gate_shared) return {false, t % shared_lists, t / shared_lists};
    t -= shared_lists * gate_shared;
    const int routed = lists - shared_lists;
    if (t < routed * gate_each) return {false, shared_lists + t / gate_each, t % gate_each};
    t -= routed * gate_each;
    if (t < shared_lists * down_each) return {true, t % shared_lists, t / shared_lists};
    t -= shared_lists * down_each;
    return {true, t < routed * down_each ? shared_lists + t / down_each : -1, t % down_each};
  }
};

__device__ __forceinline__ void post(const MoeTokensArgs& a, Lists& lists, const Numbers& numbers, int n, const Task& t) {
  if ((threadIdx.x & 31) != 0) return;
  Posted& to = lists.task[n % kTaskSlots];
  to.list = t.list, to.part = t.part, to.down = t.down;
  if (t.list >= 0) {
    const bool shared = t.list < numbers.shared_lists;
    const int expert = shared ? 0 : lists.expert[t.list];
    const Segment& w = t.down ? (shared ? a.shared_down : a.down) : (shared ? a.shared_gate : a.gate);
    to.steps = w.cols / (t.down ? kWholeGroup : 2 * kWholeGroup);
    const int64_t at = (shared ? 0 : ((t.down ? a.first_down : a.first_gate) + expert) * w.matrix_bytes) +
                       static_cast<int64_t>(t.part * kWarps * to.steps) * WholeStep::kBytes;
    to.w = w.data + at, to.up = (shared ? a.shared_up : a.up) + at;
  }
  barrier_arrive(&lists.task_there[n % kTaskSlots]);
}

__device__ __forceinline__ void meet_warps() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }

// Every kListRows-th pair of an expert leads a list. `masks` [kMostListedExperts][kWords] is zero: the pairs of an expert. By the warps
// that multiply.
__device__ __forceinline__ void make_lists(const MoeTokensArgs& a, Lists& lists, uint32_t* masks, int shared_lists) {
  const int thread = static_cast<int>(threadIdx.x), word = thread >> 5, n_pairs = a.n_tokens * a.top_k, n_words = (n_pairs + 31) >> 5;
  const int id = thread < n_pairs ? __ldcg(a.ids + thread) : -1;
  uint32_t* same = masks + max(id, 0) * kWords;
  if (id >= 0) atomicOr(same + word, 1u << (thread & 31));
  meet_warps();
  int lead = -1, rank = 0, n = 0;
  if (word < kWords) {
    if (id >= 0) {
#pragma unroll 1
      for (int w = 0; w < n_words; ++w) {
        const uint32_t bits = same[w];
        n += __popc(bits);
        rank += __popc(bits & (w < word ? ~0u : w == word ? (1u << (thread & 31)) - 1u : 0u));
      }
      int skip = rank - rank % kListRows;
#pragma unroll 1
      for (int w = 0; lead < 0; ++w) {
        uint32_t bits = same[w];
        const int here = __popc(bits);
        if (skip < here) {
          for (; skip > 0; --skip) bits &= bits - 1u;
          lead = 32 * w + __ffs(static_cast<int>(bits)) - 1;
        }
        skip -= here;
      }
    }
    const uint32_t leads = __ballot_sync(~0u, id >= 0 && lead == thread);
    if ((thread & 31) == 0) lists.leads[word] = leads;
  }
  meet_warps();
  if (id >= 0) {
    int list = shared_lists;
#pragma unroll 1
    for (int w = 0; w <= lead >> 5; ++w) list += __popc(lists.leads[w] & (w < lead >> 5 ? ~0u : (1u << (lead & 31)) - 1u));
    lists.pairs[list][rank % kListRows] = static_cast<uint8_t>(thread);
    if (lead == thread) {
      lists.expert[list] = static_cast<uint8_t>(id);
      lists.count[list] = static_cast<uint8_t>(min(n - rank, kListRows));
    }
  }
}

// Gate and up sums of the warps into whole numbers of silu(gate) * up, `part` of the 128 columns' groups; half a warp takes a row.
__device__ __forceinline__ void store_inner(const float* sums, const WholeRows& h, int cols, int row, int h_row, bool there, int part) {
  constexpr int kOther = kListRows * kSumPitch;  // from gates to ups; twice: to the other half of the columns
  const int unit = static_cast<int>(threadIdx.x) & 15;
  const float* from = sums + unit / 2 * 4 * kOther + row * kSumPitch + unit % 2 * 8;
  float v[8], sum = 0.0f, largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float gate = from[i] + from[2 * kOther + i], up = from[kOther + i] + from[3 * kOther + i];
    v[i] = __fdividef(gate, 1.0f + __expf(-gate)) * up;
    sum += v[i];
    largest = fmaxf(largest, fabsf(v[i]));
  }
  join_parts<kWholeGroup / 8>(sum, largest);
  if (!there) return;
  const WholePart whole = whole_part(v, sum, largest);
  store_whole(h.codes + static_cast<int64_t>(h_row) * 2 * cols, part * (kWholeGroup / 8) + unit, whole);
  if (unit == 0) h.groups[h_row * whole_groups(cols) + part] = whole.group;
}

// The shared expert's weights are brought to L2 while the routing is being made, by the blocks that are there before the last kernel's are
// gone.
__device__ __forceinline__ void prefetch_shared(const MoeTokensArgs& a) {
  const int bytes = a.shared_gate.out / kRecordRows * (a.shared_gate.cols / kWholeGroup) * WholeStep::kBytes;  // of each of its matrices
  const int each = (bytes / (kPrefetchBlocks * 32 * kFinishers) / 64 + 1) * 64;
  const int lane = static_cast<int>(blockIdx.x) * 32 * kFinishers + static_cast<int>(threadIdx.x) - (kWarps + 1) * 32;
  const int begin = lane * each, some = min(each, bytes - begin);
  if (some <= 0) return;
  for (const uint8_t* from : {a.shared_gate.data, a.shared_up, a.shared_down.data})
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from + begin), "r"(some));
}

// What one warp does beside the others: it draws the block's tasks and brings inner rows, once they are there, for the second product.
__device__ __forceinline__ void feed(const MoeTokensArgs& a, Lists& lists, const Numbers& numbers, uint8_t* inner, bool first_posted) {
  const int lane = static_cast<int>(threadIdx.x) & 31, pitch = inner_pitch(a), bytes = inner_bytes(a);
  int slot = 0;
  uint32_t inner_round = 0;
  for (int n = 0;; ++n) {
    int drawn = static_cast<int>(blockIdx.x);
    if (n > 1) barrier_wait(&lists.task_done[(n - 2) % kTaskSlots], static_cast<uint32_t>((n - 2) / kTaskSlots) & 1u);
    if (n > 0) {
      if (lane == 0) drawn = a.n_blocks + static_cast<int>(atomicAdd(a.state + 1, 1u));
      drawn = __shfl_sync(~0u, drawn, 0);
    }
    const Task t = numbers.task(drawn);
    if (n > 0 || !first_posted) post(a, lists, numbers, n, t);
    if (t.list < 0) return;
    if (!t.down) continue;
    const bool shared = t.list < numbers.shared_lists;
    const int count = lists.count[t.list], cols = shared ? a.shared_down.cols : a.down.cols;
    const WholeRows& h = shared ? a.shared_h : a.h;
    const auto all = static_cast<unsigned>((shared ? numbers.gate_shared : numbers.gate_each) * min((count + 1) / 2, kFinishers));
    unsigned there = 0;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(a.state + 2 + t.list) : "memory");
    while (there < all);
    asm volatile("fence.proxy.async;" ::: "memory");
    const int row = lane < count ? lists.pairs[t.list][lane] : 0, groups = whole_groups(cols);
    for (int first = 0; first < cols; first += a.down.cols) {
      barrier_wait(&lists.inner_done[slot], inner_round ^ 1u);
      const int some = min(a.down.cols, cols - first);
      if (lane == 0) barrier_expect(&lists.inner_there[slot], static_cast<uint32_t>(count * (2 * some + groups * 8)));
      __syncwarp();
      if (lane < count) {
        uint8_t* to = inner + slot * bytes + lane * pitch;
        bulk_copy(to, h.codes + static_cast<int64_t>(row) * 2 * cols + 2 * first, static_cast<uint32_t>(2 * some),
                  &lists.inner_there[slot]);
        bulk_copy(to + 2 * a.down.cols, h.groups + row * groups, static_cast<uint32_t>(groups * 8), &lists.inner_there[slot]);
      }
      if (++slot == kInnerSlots) slot = 0, inner_round ^= 1u;
    }
  }
}

// What some warps do beside the others: the end of the first product's tasks.
__device__ __forceinline__ void finish(const MoeTokensArgs& a, Lists& lists, const Numbers& numbers, const float* sums) {
  const int lane = static_cast<int>(threadIdx.x) & 31, finisher = (static_cast<int>(threadIdx.x) >> 5) - (kWarps + 1);
  uint32_t round = 0;
  for (int n = 0;; ++n) {
    barrier_wait(&lists.task_there[n % kTaskSlots], static_cast<uint32_t>(n / kTaskSlots) & 1u);
    const Posted& t = lists.task[n % kTaskSlots];
    if (t.list < 0) return;
    if (!t.down) {
      const bool shared = t.list < numbers.shared_lists;
      const int count = lists.count[t.list], cols = shared ? a.shared_down.cols : a.down.cols;
      barrier_wait(&lists.sums_there, round);
#pragma unroll 1
      for (int first = 2 * finisher; first < count; first += 2 * kFinishers) {
        const int row = first + (lane >> 4);
        store_inner(sums, shared ? a.shared_h : a.h, cols, row, lists.pairs[t.list][min(row, count - 1)], row < count, t.part);
      }
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(&lists.sums_done);
        if (2 * finisher < count) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(a.state + 2 + t.list) : "memory");
      }
      round ^= 1u;
    }
    if (lane == 0) barrier_arrive(&lists.task_done[n % kTaskSlots]);
  }
}
#endif

__global__ __launch_bounds__(kThreads, 1) void moe_tokens_kernel(const __grid_constant__ MoeTokensArgs a) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  __shared__ Lists lists;
  pdl_trigger();
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31, g = lane >> 2, c = lane & 3;
  const int block = static_cast<int>(blockIdx.x), x_pitch = shared_pitch(a.gate.cols, a.gate.cols);
  uint8_t *x_rows = shared_bytes + kRingBytes, *inner = x_rows + a.n_tokens * x_pitch + kSumBytes;
  float* sums = reinterpret_cast<float*>(inner - kSumBytes);
  uint32_t* masks = reinterpret_cast<uint32_t*>(sums);  // at first
  Numbers numbers{};
  numbers.shared_lists = numbers.lists = a.shared_gate.data != nullptr ? (a.n_tokens + kListRows - 1) / kListRows : 0;
  numbers.gate_shared = a.shared_gate.out / kGateRows, numbers.gate_each = a.gate.out / kGateRows;
  numbers.down_each = a.down.out / kDownRows;
  const bool early = block < numbers.shared_lists * numbers.gate_shared;  // the first task does not hang on the routing
  if (warp == kWarps) {
    if (lane < kTaskSlots) barrier_init(&lists.task_there[lane], 1), barrier_init(&lists.task_done[lane], kWarps + kFinishers);
    if (lane < kInnerSlots) barrier_init(&lists.inner_there[lane], 1), barrier_init(&lists.inner_done[lane], kWarps);
    if (lane == 0) barrier_init(&lists.x_there, 1), barrier_init(&lists.sums_there, kWarps), barrier_init(&lists.sums_done, kFinishers);
    fence_async_proxy();
    __syncwarp();
    if (early) post(a, lists, numbers, 0, numbers.task(block));
  } else if (warp < kWarps) {
    for (int i = thread; i < kMaskBytes / 16; i += kConsumers) reinterpret_cast<uint4*>(masks)[i] = make_uint4(0, 0, 0, 0);
    if (thread < a.n_tokens && numbers.shared_lists > 0) {
      lists.pairs[thread / kListRows][thread % kListRows] = static_cast<uint8_t>(thread);
      if (thread < numbers.shared_lists) lists.count[thread] = static_cast<uint8_t>(min(a.n_tokens - thread * kListRows, kListRows));
    }
  }
  __syncthreads();
  if (warp >= kWarps) {
    if (warp > kWarps && block < kPrefetchBlocks && numbers.shared_lists > 0) prefetch_shared(a);
    pdl_wait();
    if (warp == kWarps) {
      const int bytes = a.gate.cols * 2;
      if (lane == 0) barrier_expect(&lists.x_there, static_cast<uint32_t>(a.n_tokens * bytes));
      __syncwarp();
      if (lane < a.n_tokens) bulk_copy(x_rows + lane * x_pitch, static_cast<const bf16*>(a.x) + lane * a.x_stride, bytes, &lists.x_there);
    }
    __syncthreads();  // the lists are there
#pragma unroll
    for (int w = 0; w < kWords; ++w) numbers.lists += __popc(lists.leads[w]);
    if (warp == kWarps)
      feed(a, lists, numbers, inner, early);
    else
      finish(a, lists, numbers, sums);
    __syncthreads();
    // The last block leaves the state as it was.
    if (warp == kWarps && lane == 0) {
      __threadfence();
      if (atomicAdd(a.state, 1u) == gridDim.x - 1)
        for (int i = 0; i < 2 + numbers.lists; ++i) a.state[i] = 0;
    }
    return;
  }

  // The ring: the steps of the block's tasks in their order. Those of a task of the first product are of gate rows, then of up rows.
  uint8_t* ring = shared_bytes + warp * (kDepth * WholeStep::kBytes);
  const uint32_t to_ring = shared_address(ring) + lane * 16;
  const uint8_t *from = nullptr, *from_up = nullptr;
  int left = 0, left_up = 0, n_asked = 0;
  const uint64_t policy = once_policy();
  bool more = true;
  const auto next_rows = [&] {
    if (left_up > 0) {
      from = from_up, left = left_up, left_up = 0;
    } else if (more) {
      barrier_wait(&lists.task_there[n_asked % kTaskSlots], static_cast<uint32_t>(n_asked / kTaskSlots) & 1u);
      const Posted& t = lists.task[n_asked % kTaskSlots];
      more = t.list >= 0;
      if (!more) return;
      ++n_asked;
      const int at = warp * t.steps * WholeStep::kBytes + lane * 16;
      left = t.steps, left_up = t.down ? 0 : left;
      from = t.w + at, from_up = t.up + at;
    }
  };
  const auto ask = [&](int to) {
    if (left == 0) next_rows();
    ask_for_step(left > 0, to_ring + to, from, lane, policy);
    if (left > 0) from += WholeStep::kBytes, --left;
  };
  const auto fill = [&] {
#pragma unroll 1
    for (int i = 0; i < kDepth - 1; ++i) ask(i * WholeStep::kBytes);
  };
  if (early) fill();
  pdl_wait();
  make_lists(a, lists, masks, numbers.shared_lists);
  __syncthreads();
  if (!early) fill();
  barrier_wait(&lists.x_there, 0);
  {
    const int chunks = a.gate.cols / 256;  // of 32 parts of a row
#pragma unroll 1
    for (int chunk = warp; chunk < a.n_tokens * chunks; chunk += kWarps) {
      const int row = chunk / chunks, part = (chunk - row * chunks) * 32 + lane;
      uint8_t* to = x_rows + row * x_pitch;
      const WholePart whole = whole_part<kWholeGroup>(reinterpret_cast<const uint4*>(to)[part]);
      __syncwarp();  // the chunk's whole numbers take its place
      store_whole(to, part, whole);
      if (part % 16 == 0) reinterpret_cast<float2*>(to + 2 * a.gate.cols)[part / 16] = whole.group;
    }
  }
  meet_warps();

  int at = 0, free = (kDepth - 1) * WholeStep::kBytes;  // where this step is, and where the one before was
  const auto run = [&](int n, const uint8_t* const(&x)[kSets], const uint8_t* const(&group)[kSets], int n_sets, float(&acc)[kSets][2]) {
#pragma unroll 1
    for (int step = 0; step < n; ++step) {
      cp_async_wait<kDepth - 2>();
      __syncwarp();
      ask(free);
      WholeStep w;
      w.load_shared(ring + at, lane);
      multiply_step<kSets>(
          w, n_sets, [&](int s, int r) { return *reinterpret_cast<const uint4*>(x[s] + step * 2 * kWholeGroup + r * 2 * kRecordCols); },
          [&](int s) { return reinterpret_cast<const float2*>(group[s])[step]; }, acc);
      free = at, at += WholeStep::kBytes;
      if (at == kDepth * WholeStep::kBytes) at = 0;
    }
  };
  int inner_slot = 0;
  uint32_t inner_round = 0, sum_round = 0;
  for (int n = 0;; ++n) {
    barrier_wait(&lists.task_there[n % kTaskSlots], static_cast<uint32_t>(n / kTaskSlots) & 1u);
    const Posted& t = lists.task[n % kTaskSlots];
    if (t.list < 0) break;
    const bool shared = t.list < numbers.shared_lists;
    const int count = lists.count[t.list], n_sets = (count + 3) / 4;
    const uint8_t* pairs = lists.pairs[t.list];
    const uint8_t *x[kSets], *group[kSets];
    float acc[kSets][2] = {}, up[kSets][2] = {};
    if (!t.down) {
      const int first = warp % 2 * t.steps;
      const auto row = [&](int i) {
        const int pair = pairs[min(i, count - 1)];
        return x_rows + (shared ? pair : pair / a.top_k) * x_pitch;
      };
#pragma unroll
      for (int s = 0; s < kSets; ++s) {
        x[s] = row(4 * s + (g >> 1)) + (g & 1) * 64 + c * 16 + first * 2 * kWholeGroup;
        group[s] = row(4 * s + c) + 2 * a.gate.cols + first * 8;
      }
      run(t.steps, x, group, n_sets, acc);
      run(t.steps, x, group, n_sets, up);
    } else {
      const int pitch = inner_pitch(a), bytes = inner_bytes(a), some = a.down.cols / kWholeGroup;
      for (int first = 0; first < t.steps; first += some) {
        const uint8_t* rows = inner + inner_slot * bytes;
#pragma unroll
        for (int s = 0; s < kSets; ++s) {
          x[s] = rows + min(4 * s + (g >> 1), count - 1) * pitch + (g & 1) * 64 + c * 16;
          group[s] = rows + min(4 * s + c, count - 1) * pitch + 2 * a.down.cols + first * 8;
        }
        barrier_wait(&lists.inner_there[inner_slot], inner_round);
        run(min(some, t.steps - first), x, group, n_sets, acc);
        __syncwarp();
        if (lane == 0) barrier_arrive(&lists.inner_done[inner_slot]);
        if (++inner_slot == kInnerSlots) inner_slot = 0, inner_round ^= 1u;
      }
    }
    if (t.down) {
      float* to = (shared ? a.shared_y : a.y) + (t.part * kWarps + warp) * kRecordRows + g;
#pragma unroll
      for (int s = 0; s < kSets; ++s)
        if (4 * s + c < count) {
          float* row = to + static_cast<int64_t>(pairs[4 * s + c]) * a.down.out;
          row[0] = acc[s][0], row[8] = acc[s][1];
        }
    } else {
      barrier_wait(&lists.sums_done, sum_round ^ 1u);
      float* to = sums + warp * (2 * kListRows * kSumPitch) + c * kSumPitch + g;
#pragma unroll
      for (int s = 0; s < kSets; ++s)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          to[4 * s * kSumPitch + 8 * i] = acc[s][i];
          to[(kListRows + 4 * s) * kSumPitch + 8 * i] = up[s][i];
        }
      __syncwarp();
      if (lane == 0) barrier_arrive(&lists.sums_there);
      sum_round ^= 1u;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&lists.task_done[n % kTaskSlots]);
  }
  __syncthreads();
#endif
}

int shared_bytes_for(const MoeTokensArgs& a) {
  return kRingBytes + a.n_tokens * shared_pitch(a.gate.cols, a.gate.cols) + kSumBytes + kInnerSlots * inner_bytes(a);
}

}  // namespace

bool moe_tokens_supports(const MoeTokensArgs& a) {
  if (a.n_tokens > kMostTokens || a.n_tokens * a.top_k > kMostTokenPairs) return false;
  const auto suits = [&](const Segment& s, int rows) {
    return s.tile == Tile::q4g128 && s.in == s.cols && s.cols % kWholeGroup == 0 && s.out % rows == 0;
  };
  if (!suits(a.gate, kGateRows) || !suits(a.down, kDownRows) || a.gate.cols % (2 * kWholeGroup) != 0 || a.down.cols != a.gate.out)
    return false;
  if (a.shared_gate.data != nullptr &&
      (!suits(a.shared_gate, kGateRows) || !suits(a.shared_down, kDownRows) || a.shared_gate.cols != a.gate.cols ||
       a.shared_down.cols != a.shared_gate.out || a.shared_down.out != a.down.out))
    return false;
  // The ring never reaches beyond the next task.
  const int least = std::min({a.gate.cols, a.down.cols, a.shared_gate.data != nullptr ? a.shared_down.cols : a.down.cols});
  return least >= kDepth * kWholeGroup && shared_bytes_for(a) + kStatic <= static_cast<int>(a.most_shared);
}

cudaError_t launch_moe_tokens(const MoeTokensArgs& a, cudaStream_t stream) {
  static const cudaError_t raised =
      cudaFuncSetAttribute(moe_tokens_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(a.most_shared) - kStatic);
  if (raised != cudaSuccess) return raised;
  return launch(moe_tokens_kernel, dim3(static_cast<unsigned>(a.n_blocks)), kThreads, static_cast<size_t>(shared_bytes_for(a)), stream, a);
}

}  // namespace cachalot::cuda
