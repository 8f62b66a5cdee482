// Sampling as ops/sampling.h defines it, a block per row, or a cluster of blocks when there are few rows. A row is read once for its
// largest logit; the filters find the last token that stays by a histogram whose one interesting bin is sorted; then the race. All sums are
// of integers and all other arithmetic is sampling_math.h's, so the token is the host's whatever the number of threads.
#include <cooperative_groups.h>

#include "cuda/device.cuh"
#include "cuda/sample.h"
#include "ops/sampling_math.h"

namespace cachalot::cuda {
namespace {
using namespace sampling;

constexpr int kBins = 2048;  // also how many tokens a bin may hold to be sorted
constexpr float kLargest = 3.402823466e38f;

// Whether a token with this logit, of this id, is at or before the last one that stays.
struct Cut {
  float value;
  int token;
  __device__ bool keeps(float v, int i) const { return v > value || (v == value && i <= token); }
};

struct Shared {
  uint32_t low[kBins], high[kBins];  // sums of 64 bits per bin
  uint64_t members[kBins];
  uint64_t warp[32];
  double warp_entry[32];
  int warp_token[32];
  uint64_t before;
  // In the first block of a cluster, for all of them:
  uint32_t member_low, member_high;
  int count;
  Cut cut;
  // Of each block, for the others:
  uint64_t part;
  uint32_t part_number;
  double part_entry;
  int part_token;
  int found;
};

// Larger is more likely: the bits of a float in the order of its values, then the lower id.
__device__ uint32_t ordered(float v) {
  const uint32_t bits = __float_as_uint(v);
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}
__device__ float from_ordered(uint32_t key) { return __uint_as_float(key ^ ((key >> 31) != 0 ? 0x80000000u : 0xffffffffu)); }
__device__ uint64_t key_of(float v, int token) { return uint64_t{ordered(v)} << 32 | static_cast<uint32_t>(~token); }
__device__ int token_of(uint64_t key) { return static_cast<int>(~static_cast<uint32_t>(key)); }
__device__ float value_of(uint64_t key) { return from_ordered(static_cast<uint32_t>(key >> 32)); }

// The blocks of a cluster, or the one block, that work on a row. Calls with "each thread gets" meet in all of them.
template <int kThreads, int kBlocks>
struct Block {
  Shared& s;
  float* logits;
  int vocab;
  const uint32_t* allowed;  // null: all
  int n_allowed;

  static constexpr int kWarps = kThreads / 32;
  [[nodiscard]] __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  [[nodiscard]] __device__ static int rank() { return kBlocks == 1 ? 0 : static_cast<int>(blockIdx.x) % kBlocks; }
  __device__ static void meet() {
#if __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1) {
      cooperative_groups::this_cluster().sync();
      return;
    }
#endif
    __syncthreads();
  }
  // The shared memory of a block of the cluster.
  __device__ Shared& of(int block) const {
#if __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1) return *cooperative_groups::this_cluster().map_shared_rank(&s, block);
#endif
    return s;
  }
  // Which block meets a token in each4().
  __device__ static bool mine(int token) { return kBlocks == 1 || token / (4 * kThreads) % kBlocks == rank(); }

  // The raw logit; -0 becomes 0, as they compare equal.
  __device__ float raw(int i) const { return __fadd_rn(logits[i], 0.0f); }
  // With tokens that are not allowed, and what is not a number, at -inf.
  __device__ float fixed(float v, int i) const {
    if (allowed != nullptr && (i / 32 >= n_allowed || (allowed[i / 32] >> (i % 32) & 1u) == 0)) return -INFINITY;
    return isnan(v) ? -INFINITY : fminf(v, kLargest);
  }

  // f(first, v[4]) for each four tokens, of which those beyond the vocabulary are -inf; a thread meets its tokens by rising id.
  template <typename F>
  __device__ void each4(F&& f) const {
    const bool wide = (reinterpret_cast<uintptr_t>(logits) & 15) == 0;
#pragma unroll 2
    for (int i = (rank() * kThreads + thread()) * 4; i < vocab; i += kBlocks * kThreads * 4) {
      float v[4];
      if (wide && i + 4 <= vocab) {
        const float4 x = *reinterpret_cast<const float4*>(logits + i);
        v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = __fadd_rn(v[j], 0.0f);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = i + j < vocab ? raw(i + j) : -INFINITY;
      }
      f(i, v);
    }
  }
  // f(token, adjusted logit)
  template <typename F>
  __device__ void each(F&& f) const {
    each4([&](int first, const float* v) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (first + j < vocab) f(first + j, fixed(v[j], first + j));
    });
  }

  // The largest of all threads' keys, and of their numbers.
  __device__ void largest(uint64_t& key, uint32_t& number) const {
    for (int m = 16; m > 0; m >>= 1) {
      const uint64_t other = __shfl_xor_sync(~0u, key, m);
      key = other > key ? other : key;
    }
    number = warp_largest(number);
    __syncthreads();
    if ((thread() & 31) == 0) s.warp[thread() >> 5] = key, s.low[thread() >> 5] = number;
    __syncthreads();
#pragma unroll 4
    for (int w = 0; w < kWarps; ++w) key = max(key, s.warp[w]), number = max(number, s.low[w]);
    if constexpr (kBlocks > 1) {
      meet();
      if (thread() == 0) s.part = key, s.part_number = number;
      meet();
      for (int b = 0; b < kBlocks; ++b) key = max(key, of(b).part), number = max(number, of(b).part_number);
    }
  }
  __device__ static uint32_t warp_largest(uint32_t number) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(~0u, number);
#else
    return number;
#endif
  }
  __device__ void exchange(uint64_t part) const {
    meet();
    if (thread() == 0) s.part = part;
    meet();
  }
  __device__ uint64_t total(uint64_t sum) const {
    sum = block_total(sum);
    if constexpr (kBlocks > 1) {
      exchange(sum);
      sum = 0;
      for (int b = 0; b < kBlocks; ++b) sum += of(b).part;
    }
    return sum;
  }
  __device__ uint64_t block_total(uint64_t sum) const {
    for (int m = 16; m > 0; m >>= 1) sum += __shfl_xor_sync(~0u, sum, m);
    __syncthreads();
    if ((thread() & 31) == 0) s.warp[thread() >> 5] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += s.warp[w];
    return sum;
  }

  // Each block's bins become the sums of all blocks'.
  __device__ void merge_bins() const {
    meet();
    if constexpr (kBlocks > 1) {
      constexpr int kMine = kBins / kBlocks;
      static_assert(kMine <= kThreads);
      const int bin = rank() * kMine + thread();
      uint64_t sum = 0;
      if (thread() < kMine)
        for (int b = 0; b < kBlocks; ++b) sum += uint64_t{of(b).high[bin]} << 32 | of(b).low[bin];
      meet();
      if (thread() < kMine)
        for (int b = 0; b < kBlocks; ++b) of(b).low[bin] = static_cast<uint32_t>(sum), of(b).high[bin] = static_cast<uint32_t>(sum >> 32);
      meet();
    }
  }

  // The first bin with base + the sums up to and with it >= reach; kBins when there is none. s.before: base + the sums before it.
  __device__ int first_reaching(uint64_t base, double reach) const {
    constexpr int kEach = kBins / kThreads;
    const int lane = thread() & 31, first = thread() * kEach;
    uint64_t mine[kEach], sum = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) mine[j] = uint64_t{s.high[first + j]} << 32 | s.low[first + j], sum += mine[j];
    uint64_t before = sum;
    for (int m = 1; m < 32; m <<= 1) {
      const uint64_t other = __shfl_up_sync(~0u, before, m);
      if (lane >= m) before += other;
    }
    __syncthreads();
    if (lane == 31) s.warp[thread() >> 5] = before;
    if (thread() == 0) s.found = kBins;
    __syncthreads();
    before += base - sum;
    for (int w = 0; w < thread() >> 5; ++w) before += s.warp[w];
    int found = kBins;
    uint64_t before_found = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (found == kBins && static_cast<double>(before + mine[j]) >= reach) found = first + j, before_found = before;
      before += mine[j];
    }
    if (found < kBins) atomicMin(&s.found, found);
    __syncthreads();
    if (found < kBins && s.found == found) s.before = before_found;
    __syncthreads();
    return s.found;
  }

  // Sorts s.members [n], the most likely first.
  __device__ void sort(int n) const {
    int size = 2;
    while (size < n) size *= 2;
    for (int i = n + thread(); i < size; i += kThreads) s.members[i] = 0;
    for (int span = 2; span <= size; span *= 2) {
      for (int step = span / 2; step > 0; step /= 2) {
        __syncthreads();
        for (int i = thread(); i < size / 2; i += kThreads) {
          const int a = 2 * i - (i & (step - 1)), b = a + step;
          const uint64_t x = s.members[a], y = s.members[b];
          if ((x < y) == ((a & span) == 0)) s.members[a] = y, s.members[b] = x;
        }
      }
    }
    __syncthreads();
  }

  // The n-th token, by id, with this logit and a weight.
  template <typename Weight>
  __device__ int nth_equal(float value, uint64_t n, const Weight& weight) const {
    uint64_t seen = 0;
    for (int begin = 0; begin < vocab; begin += kThreads) {
      const int i = begin + thread();
      const float v = i < vocab ? fixed(raw(i), i) : -INFINITY;
      const bool hit = i < vocab && v == value && weight(v, i) > 0;
      const unsigned hits = __ballot_sync(~0u, hit);
      __syncthreads();
      if ((thread() & 31) == 0) s.warp[thread() >> 5] = static_cast<uint64_t>(__popc(hits));
      __syncthreads();
      uint64_t mine = seen + static_cast<uint64_t>(__popc(hits & ((1u << (thread() & 31)) - 1u))) + 1;
      for (int w = 0; w < kWarps; ++w) {
        if (w < thread() >> 5) mine += s.warp[w];
        seen += s.warp[w];
      }
      if (hit && mine == n) s.found = i;
      if (seen >= n) break;
    }
    __syncthreads();
    return s.found;
  }

  // Finds the last token that stays when the most likely ones are taken until their weights reach `reach` (with `share`: that part of the
  // sum of all weights). False when they never do. Weights are of the adjusted logits, which lie in [low, high] where they are not 0.
  // Logits go to bins by value, and the bin in which the sum is reached is sorted, or divided further when it is too full.
  template <typename Weight>
  __device__ bool select(float high, float low, double reach, bool share, const Weight& weight, Cut& cut) const {
    uint64_t base = 0;
    for (;;) {
      __syncthreads();
      for (int i = thread(); i < kBins; i += kThreads) s.low[i] = s.high[i] = 0;
      __syncthreads();
      const double top = static_cast<double>(high), scale = high > low ? kBins / (top - static_cast<double>(low)) : 0.0;
      const auto bin_of = [&](float v) {
        const double at = (top - static_cast<double>(v)) * scale;
        return at < kBins - 1 ? static_cast<int>(at) : kBins - 1;
      };
      each([&](int i, float v) {
        if (!(v >= low && v <= high)) return;
        const uint64_t w = weight(v, i);
        if (w == 0) return;
        const int bin = bin_of(v);
        const auto part = static_cast<uint32_t>(w);
        const uint32_t old = atomicAdd(&s.low[bin], part), rest = static_cast<uint32_t>(w >> 32) + (old + part < old ? 1u : 0u);
        if (rest != 0) atomicAdd(&s.high[bin], rest);
      });
      merge_bins();
      if (share) {
        uint64_t sum = 0;
        for (int i = thread(); i < kBins; i += kThreads) sum += uint64_t{s.high[i]} << 32 | s.low[i];
        reach = multiply(reach, static_cast<double>(block_total(sum)));
        share = false;
      }
      const int bin = first_reaching(base, reach);
      if (bin == kBins) return false;
      base = s.before;
      Shared& leader = of(0);
      if (rank() == 0 && thread() == 0) s.count = 0, s.member_low = ~0u, s.member_high = 0;
      meet();
      each([&](int i, float v) {
        if (!(v >= low && v <= high) || bin_of(v) != bin || weight(v, i) == 0) return;
        const int at = atomicAdd(&leader.count, 1);
        if (at < kBins) leader.members[at] = key_of(v, i);
        atomicMin(&leader.member_low, ordered(v));
        atomicMax(&leader.member_high, ordered(v));
      });
      meet();
      const int n = leader.count;
      low = from_ordered(leader.member_low);
      high = from_ordered(leader.member_high);
      if (n > kBins && low < high) continue;
      if (rank() == 0) {
        const Cut found = n > kBins ? cut_equals(low, base, n, reach, weight) : cut_members(base, n, reach, weight);
        if (thread() == 0) s.cut = found;
      }
      meet();
      cut = leader.cut;
      return true;
    }
  }
  // Of n equal logits the first, by id, whose weights reach `reach`.
  template <typename Weight>
  __device__ Cut cut_equals(float value, uint64_t base, int n, double reach, const Weight& weight) const {
    const uint64_t each_one = weight(value, -1);
    uint64_t few = 1, many = static_cast<uint64_t>(n);
    while (few < many) {
      const uint64_t middle = (few + many) / 2;
      if (static_cast<double>(base + middle * each_one) >= reach)
        many = middle;
      else
        few = middle + 1;
    }
    __syncthreads();
    return {value, nth_equal(value, few, weight)};
  }
  // Of s.members [n], sorted.
  template <typename Weight>
  __device__ Cut cut_members(uint64_t base, int n, double reach, const Weight& weight) const {
    sort(n);
    for (int i = thread(); i < kBins; i += kThreads) {
      const uint64_t key = i < n ? s.members[i] : 0, w = i < n ? weight(value_of(key), token_of(key)) : 0;
      s.low[i] = static_cast<uint32_t>(w);
      s.high[i] = static_cast<uint32_t>(w >> 32);
    }
    __syncthreads();
    const int last = min(first_reaching(base, reach), n - 1);
    return {value_of(s.members[last]), token_of(s.members[last])};
  }

  // The winner of the race among the tokens that `cut` keeps and whose logit over the temperature is at least `least`.
  __device__ int race(const SampleRow& p, double inverse, uint64_t likeliest, const Cut& cut, double least) const {
    const auto entry_of = [&](double x, int i) {
      const Words words = philox(p.seed, p.step, static_cast<uint32_t>(i) / 4);
      return race_entry(x, uniform_of(words.word[i % 4]));
    };
    double best = entry_of(multiply(static_cast<double>(value_of(likeliest)), inverse), token_of(likeliest));
    int token = token_of(likeliest);
    // Most tokens are passed over in f32, by bounds that only hold back losers: see Race in ops/sampling.cpp. `slack` covers the
    // roundings of f32; what is not a number is not passed over.
    const auto inverse_f32 = static_cast<float>(inverse);
    auto bar = static_cast<float>(best);
    const auto slack = [&](float x) { return 1e-6f * (fabsf(x) + fabsf(bar)) + 1e-3f; };
    each4([&](int first, const float* raw4) {
      float v[4];
      bool any = false;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = first + j;
        v[j] = i < vocab ? fixed(raw4[j], i) : -INFINITY;
        const float x = v[j] * inverse_f32;
        if (!cut.keeps(v[j], i) || bar - x > static_cast<float>(kLargestGumbel) + slack(x)) v[j] = -INFINITY;
        any = any || v[j] > -INFINITY;
      }
      if (!any) return;
      const Words words = philox(p.seed, p.step, static_cast<uint32_t>(first) / 4);  // once, whichever of the four want it
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (v[j] == -INFINITY) continue;
        const int i = first + j;
        const float u = uniform_of(words.word[j]), x = v[j] * inverse_f32;
        if (1.0f - u > __expf(x - bar + slack(x))) continue;
        const double exact = multiply(static_cast<double>(v[j]), inverse);
        if (exact < least) continue;
        const double entry = race_entry(exact, u);
        if (entry > best || (entry == best && i < token)) best = entry, token = i, bar = static_cast<float>(best);
      }
    });
    for (int m = 16; m > 0; m >>= 1) {
      const double other = __shfl_xor_sync(~0u, best, m);
      const int id = __shfl_xor_sync(~0u, token, m);
      if (other > best || (other == best && id < token)) best = other, token = id;
    }
    __syncthreads();
    if ((thread() & 31) == 0) s.warp_entry[thread() >> 5] = best, s.warp_token[thread() >> 5] = token;
    __syncthreads();
    best = s.warp_entry[0], token = s.warp_token[0];
    const auto enter = [&](double other, int id) {
      if (other > best || (other == best && id < token)) best = other, token = id;
    };
    for (int w = 1; w < kWarps; ++w) enter(s.warp_entry[w], s.warp_token[w]);
    if constexpr (kBlocks > 1) {
      meet();
      if (thread() == 0) s.part_entry = best, s.part_token = token;
      meet();
      for (int b = 0; b < kBlocks; ++b) enter(of(b).part_entry, of(b).part_token);
    }
    return token;
  }
};

// Penalties and biases, in place, by the block that reads the token; what was there is kept. Then, in the other direction, all is as it
// was.
template <typename Block, int kThreads>
__device__ void adjust(const SampleArgs& a, const SampleRow& p, float* logits) {
  for (int e = p.seen_begin + static_cast<int>(threadIdx.x); e < p.seen_begin + p.n_seen; e += kThreads) {
    const SeenToken seen = a.seen[e];
    if (!Block::mine(seen.token)) continue;
    float v = logits[seen.token];
    a.seen_kept[e] = v;
    v = v > 0.0f ? __fdiv_rn(v, p.repetition) : __fmul_rn(v, p.repetition);
    if (seen.in_output > 0) v = __fsub_rn(v, __fadd_rn(p.presence, __fmul_rn(p.frequency, static_cast<float>(seen.in_output))));
    logits[seen.token] = v;
  }
  __syncthreads();
  for (int e = p.bias_begin + static_cast<int>(threadIdx.x); e < p.bias_begin + p.n_bias; e += kThreads) {
    const BiasedToken biased = a.bias[e];
    if (!Block::mine(biased.token)) continue;
    const float v = logits[biased.token];
    a.bias_kept[e] = v;
    logits[biased.token] = __fadd_rn(v, biased.bias);
  }
  __syncthreads();
}
template <typename Block, int kThreads>
__device__ void restore(const SampleArgs& a, const SampleRow& p, float* logits) {
  __syncthreads();
  for (int e = p.bias_begin + static_cast<int>(threadIdx.x); e < p.bias_begin + p.n_bias; e += kThreads)
    if (Block::mine(a.bias[e].token)) logits[a.bias[e].token] = a.bias_kept[e];
  __syncthreads();
  for (int e = p.seen_begin + static_cast<int>(threadIdx.x); e < p.seen_begin + p.n_seen; e += kThreads)
    if (Block::mine(a.seen[e].token)) logits[a.seen[e].token] = a.seen_kept[e];
  __syncthreads();
}

__device__ void copy8(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

__device__ void leave(const SampleArgs& a, int row, const SampleResult& result) {
  a.results[row] = result;
  if (a.tokens != nullptr) a.tokens[row] = result.token;
}

template <int kThreads, int kBlocks>
__global__ __launch_bounds__(kThreads, 1024 / kThreads) void sample_kernel(const __grid_constant__ SampleArgs a) {
  __shared__ Shared shared;
  __shared__ SampleRow p;
#if __CUDA_ARCH__ < 900
  if constexpr (kBlocks > 1) return;
#endif
  pdl_trigger();
  const int row = static_cast<int>(blockIdx.x) / kBlocks;
  // From the host's memory, while the row is read.
  static_assert(sizeof(SampleRow) % 8 == 0 && sizeof(SampleRow) <= 8 * kThreads);
  if (threadIdx.x < sizeof(SampleRow) / 8)
    copy8(reinterpret_cast<uint64_t*>(&p) + threadIdx.x, reinterpret_cast<const uint64_t*>(a.rows + row) + threadIdx.x);
  pdl_wait();
  float* const logits = a.logits + row * a.stride;
  using Blocks = Block<kThreads, kBlocks>;
  Blocks block{shared, logits, a.vocab, nullptr, 0};
  SampleResult result;

  // The raw row: whether it is sound, its largest and smallest.
  bool sound = true;
  uint64_t best = 0;
  float least = INFINITY;
  const auto scan = [&](int i, float v) {
    if (v == -INFINITY) return;
    const uint64_t key = key_of(v, i);
    best = key > best ? key : best;
    least = fminf(least, v);
  };
  block.each4([&](int first, const float* v) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sound = sound && (first + j >= a.vocab || v[j] <= kLargest);
      scan(first + j, v[j]);
    }
  });
  cp_async_wait<0>();
  constexpr uint64_t kUnsound = ~uint64_t{0};  // larger than any key
  if (!sound) best = kUnsound;
  uint32_t not_least = ~ordered(least);
  block.largest(best, not_least);
  sound = best != kUnsound;
  const uint64_t raw_best = best;
  const float raw_least = from_ordered(~not_least);
  if (!sound || best == 0) {
    if (Blocks::rank() == 0 && threadIdx.x == 0) leave(a, row, result);
    Blocks::meet();  // a block's shared memory must outlive what the others read of it
    return;
  }
  result.sound = 1;
  result.highest = value_of(raw_best);

  const bool edited = p.n_seen + p.n_bias > 0, changed = edited || p.n_allowed >= 0;
  if (edited) adjust<Blocks, kThreads>(a, p, logits);
  if (p.n_allowed >= 0) {
    block.allowed = a.allowed + p.allowed_begin;
    block.n_allowed = p.n_allowed;
  }
  float low = raw_least;
  if (changed) {
    best = 0;
    least = INFINITY;
    block.each(scan);
    not_least = ~ordered(least);
    block.largest(best, not_least);
    low = from_ordered(~not_least);
  }
  if (best != 0) {
    result.token = token_of(best);
    if (p.temperature > 0.0) {
      const float high = value_of(best);
      const double inverse = divide(1.0, p.temperature), highest = multiply(static_cast<double>(high), inverse);
      Cut cut{-INFINITY, -1};
      const auto one = [&](float v, int i) { return v > -INFINITY && (i < 0 || cut.keeps(v, i)) ? uint64_t{1} : uint64_t{0}; };
      if (p.top_k > 0) {
        Cut found{};
        if (block.select(high, low, static_cast<double>(p.top_k), false, one, found)) cut = found;
      }
      if (p.top_p < 1.0) {
        const auto mass = [&](float v, int i) {
          return v > -INFINITY && (i < 0 || cut.keeps(v, i)) ? mass_of(add(highest, -multiply(static_cast<double>(v), inverse)))
                                                             : uint64_t{0};
        };
        // Below this no token has any mass.
        const auto bottom = static_cast<float>(fmax(static_cast<double>(low), static_cast<double>(high) - 34.0 * p.temperature));
        Cut found{};
        if (block.select(high, fminf(high, bottom), p.top_p, true, mass, found)) cut = found;
      }
      result.token = block.race(p, inverse, best, cut, add(highest, p.log_min_p));
    }
  }
  if (edited) restore<Blocks, kThreads>(a, p, logits);

  if (p.n_logprobs >= 0 && result.token >= 0) {
    block.allowed = nullptr;
    uint64_t sum = 0;
    const auto top = static_cast<double>(result.highest);
    block.each([&](int, float v) { sum += mass_of(top - static_cast<double>(v)); });
    result.sum = block.total(sum);
    result.logit = logits[result.token];
    if (p.n_logprobs > 0) {
      Cut cut{-INFINITY, -1};
      const auto one = [](float v, int) { return v > -INFINITY ? uint64_t{1} : uint64_t{0}; };
      block.select(result.highest, raw_least, static_cast<double>(p.n_logprobs), false, one, cut);
      Shared& leader = block.of(0);
      Blocks::meet();
      if (Blocks::rank() == 0 && threadIdx.x == 0) shared.count = 0;
      Blocks::meet();
      block.each([&](int i, float v) {
        if (v == -INFINITY || !cut.keeps(v, i)) return;
        const int at = atomicAdd(&leader.count, 1);
        if (at < kBins) leader.members[at] = key_of(v, i);
      });
      Blocks::meet();
      if (Blocks::rank() == 0) {
        result.n_top = min(shared.count, p.n_logprobs);
        block.sort(min(shared.count, kBins));
        for (int i = static_cast<int>(threadIdx.x); i < result.n_top; i += kThreads)
          a.top[p.top_begin + i] = {token_of(shared.members[i]), value_of(shared.members[i])};
      }
    }
  }
  if (Blocks::rank() == 0 && threadIdx.x == 0) leave(a, row, result);
  Blocks::meet();
}

// The one kernel that does not trigger the next: later ones read index arrays before they wait (attend_rows.cuh).
__global__ void fetch_kernel(int* to, const int4* host, int n, const int* drawn) {
  const int at = 4 * static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  int4 v{};
  if (at < n) v = host[at / 4];
  pdl_wait();
  const int words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (at + i < n) to[at + i] = words[i] < -1 ? drawn[-2 - words[i]] : words[i];
}

template <int kThreads, int kBlocks>
cudaError_t launch_blocks(const SampleArgs& a, cudaStream_t stream) {
  return launch_clusters(sample_kernel<kThreads, kBlocks>, kBlocks, dim3(static_cast<unsigned>(a.n_rows * kBlocks)), kThreads, 0, stream,
                         a);
}

}  // namespace

// Every multiprocessor has a block at most while rows are few; two rows share one when they are many.
cudaError_t launch_sample(const SampleArgs& a, bool clusters, cudaStream_t stream) {
  if (clusters && a.n_rows <= 16) return launch_blocks<1024, 8>(a, stream);
  if (clusters && a.n_rows <= 64) return launch_blocks<1024, 2>(a, stream);
  return a.n_rows <= 132 ? launch_blocks<1024, 1>(a, stream) : launch_blocks<512, 1>(a, stream);
}

cudaError_t launch_fetch(int* to, const int* host, int n, const int* drawn, cudaStream_t stream) {
  constexpr int kThreads = 256;
  return launch(fetch_kernel, dim3(static_cast<unsigned>(ceil_div(n, 4 * kThreads))), kThreads, 0, stream, to,
                reinterpret_cast<const int4*>(host), n, drawn);
}

}  // namespace cachalot::cuda
