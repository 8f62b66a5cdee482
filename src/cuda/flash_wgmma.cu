// Attention of many query rows on wgmma (FlashAttention-3: Shah et al. 2024). A block takes 128 rows of one head after another: one warp
// asks the copy engine for the query and for 128 keys and values at a time, two stages of each; two warpgroups take 64 rows each, with the
// scores of the next keys under way while the softmax of these is made and their values are weighed. Sums in f32.
#include "cuda/attention_kernels.h"
#include "cuda/device.cuh"
#include "cuda/flash.cuh"
#include "cuda/tensor_map.cuh"
#include "cuda/wgmma_flash.cuh"

namespace cachalot::cuda {
namespace {

constexpr int kQueries = 128, kStages = 2, kWorkers = 256, kThreads = kWorkers + 128;
constexpr int kNope = 128, kV = 128;
constexpr int kValueBoxes = kV / 64;

template <int kRope>
struct Shape {
  static constexpr int kK = kNope + kRope, kKeyBoxes = kK / 64;
  static constexpr int kKeyBytes = kKeyBoxes * kFlashBoxBytes, kValueBytes = kValueBoxes * kFlashBoxBytes;
  static constexpr int kBytes = 1024 + kKeyBytes + kStages * (kKeyBytes + kValueBytes);  // 1024: to align the query
};

struct FlashMaps {
  CUtensorMap q, k, k_rope, v;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// The blocks' shares of the work: tiles of 128 query rows, those with most keys first.
struct Item {
  int head = 0, row0 = 0, n_tiles = 0;
  ContextRun run;
};
__device__ __forceinline__ Item item_of(const FlashArgs& a, int index) {
  Item item;
  item.head = index % a.heads;
  index /= a.heads;
  item.run = a.runs.run[index % a.runs.n];
  item.row0 = (ceil_div(a.runs.most_q(), kQueries) - 1 - index / a.runs.n) * kQueries;
  if (item.row0 >= item.run.n_q) return item;
  const int seen = item.run.q_position + min(item.row0 + kQueries, item.run.n_q) - item.run.kv_position;  // by the last row
  item.n_tiles = ceil_div(max(min(item.run.n_keys, seen), 0), kFlashKeys);
  return item;
}

// A ring of stages as one side sees it.
struct Turn {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

template <int kRope, typename Out>
__global__ __launch_bounds__(kThreads, 1) void flash_wgmma_kernel(const __grid_constant__ FlashArgs a,
                                                                  const __grid_constant__ FlashMaps maps, int n_items) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<kRope>;
  extern __shared__ uint8_t raw[];
  __shared__ uint64_t query_full, query_empty, key_full[kStages], key_empty[kStages], value_full[kStages], value_empty[kStages];
  uint8_t* query = raw + (1024 - (shared_address(raw) & 1023u)) % 1024;  // [key boxes][128 rows][64]
  uint8_t* keys = query + S::kKeyBytes;                                  // [stages][key boxes][128 keys][64]
  uint8_t* values = keys + kStages * S::kKeyBytes;                       // [stages][2][128 keys][64]
  pdl_trigger();
  const int thread = static_cast<int>(threadIdx.x), group = __shfl_sync(~0u, thread >> 7, 0), lane = thread & 31;
  if (thread == 0) {
    barrier_init(&query_full, 1);
    barrier_init(&query_empty, kWorkers / 32);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&key_full[i], 1);
      barrier_init(&key_empty[i], kWorkers / 32);
      barrier_init(&value_full[i], 1);
      barrier_init(&value_empty[i], kWorkers / 32);
    }
    fence_async_proxy();
  }
  __syncthreads();
  pdl_wait();

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (thread != 0) return;
    Turn turn;
    uint32_t query_phase = 0;
    for (int index = static_cast<int>(blockIdx.x); index < n_items; index += static_cast<int>(gridDim.x)) {
      const Item item = item_of(a, index);
      if (item.n_tiles == 0) continue;
      const int kv_head = item.head / a.share;
      barrier_wait(&query_empty, query_phase ^ 1);
      query_phase ^= 1;
      barrier_expect(&query_full, S::kKeyBytes);
      for (int b = 0; b < S::kKeyBoxes; ++b)
        copy_box(query + b * kFlashBoxBytes, maps.q, item.head * S::kK + 64 * b, item.run.q_begin + item.row0, &query_full);
      for (int tile = 0; tile < item.n_tiles; ++tile, turn.next()) {
        const int row = item.run.kv_begin + tile * kFlashKeys;
        uint8_t* k_stage = keys + turn.stage * S::kKeyBytes;
        barrier_wait(&key_empty[turn.stage], turn.phase ^ 1);
        barrier_expect(&key_full[turn.stage], S::kKeyBytes);
        for (int b = 0; b < kNope / 64; ++b)
          copy_box(k_stage + b * kFlashBoxBytes, maps.k, kv_head * a.k_head + 64 * b, row, &key_full[turn.stage]);
        if constexpr (kRope > 0) copy_box(k_stage + kNope / 64 * kFlashBoxBytes, maps.k_rope, 0, row, &key_full[turn.stage]);
        uint8_t* v_stage = values + turn.stage * S::kValueBytes;
        barrier_wait(&value_empty[turn.stage], turn.phase ^ 1);
        barrier_expect(&value_full[turn.stage], S::kValueBytes);
        for (int b = 0; b < kValueBoxes; ++b)
          copy_box(v_stage + b * kFlashBoxBytes, maps.v, kv_head * a.v_head + 64 * b, row, &value_full[turn.stage]);
      }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  const int my_group = group - 1, warp = thread >> 5 & 3, g = lane >> 2, c = lane & 3;
  const float scale = a.scale * 1.44269504f;
  const auto arrive = [&](uint64_t* barrier) {
    if (lane == 0) barrier_arrive(barrier);
  };
  Turn key_turn, value_turn;
  uint32_t query_phase = 0;
  // The warpgroups ask in turns, so that the products of one are made during the softmax of the other.
  if (my_group == 1) asm volatile("bar.arrive 2, %0;" ::"n"(kWorkers) : "memory");
  for (int index = static_cast<int>(blockIdx.x); index < n_items; index += static_cast<int>(gridDim.x)) {
    const Item item = item_of(a, index);
    if (item.n_tiles == 0) continue;
    const ContextRun& run = item.run;
    const int first_row = item.row0 + my_group * 64, my_row = first_row + warp * 16 + g;  // and my_row + 8
    const int past = run.q_position - run.kv_position;
    int last_key[2];  // that a row sees
#pragma unroll
    for (int h = 0; h < 2; ++h) last_key[h] = min(run.n_keys - 1, past + my_row + 8 * h);
    const int all_see = min(run.n_keys - 1, past + first_row);

    float s[64], acc[64], largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, keep[2];
    uint32_t p[8][4];
    const auto ask_scores = [&] {
      const uint8_t *rows = query + my_group * 64 * 128, *stage = keys + key_turn.stage * S::kKeyBytes;
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < S::kK / 16; ++i) {
        const int at = (i >> 2) * kFlashBoxBytes + (i & 3) * 32;
        wgmma_flash_scores(s, wgmma_operand(rows + at), wgmma_operand(stage + at), i > 0);
      }
      wgmma_commit();
    };
    const auto ask_values = [&] {
      const uint8_t* stage = values + value_turn.stage * S::kValueBytes;
#pragma unroll
      for (int i = 0; i < kFlashKeys / 16; ++i) wgmma_flash_values(acc, p[i], wgmma_values_operand(stage + i * 16 * 128));
      wgmma_commit();
    };
    // s: from scores to weights, which are added to `sum`; keep: what earlier sums and values are to be multiplied by.
    const auto soften = [&](int tile) {
      const int key0 = tile * kFlashKeys;
      if (key0 + kFlashKeys - 1 > all_see) {
#pragma unroll
        for (int i = 0; i < 64; ++i)
          if (key0 + (i >> 2) * 8 + 2 * c + (i & 1) > last_key[i >> 1 & 1]) s[i] = -INFINITY;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float peak = largest[h];
#pragma unroll
        for (int i = 0; i < 64; i += 4) peak = fmaxf(peak, fmaxf(s[i + 2 * h], s[i + 2 * h + 1]));
        peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
        peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
        const float base = peak == -INFINITY ? 0.0f : peak * scale;  // a row that has seen nothing yet
        keep[h] = exp2_fast(fmaf(largest[h], scale, -base));
        largest[h] = peak;
        float added = 0.0f;
#pragma unroll
        for (int i = 0; i < 64; i += 4) {
          float &x = s[i + 2 * h], &y = s[i + 2 * h + 1];
          x = exp2_fast(fmaf(x, scale, -base));
          y = exp2_fast(fmaf(y, scale, -base));
          added += x + y;
        }
        sum[h] = fmaf(sum[h], keep[h], added);
      }
    };
    const auto pack_weights = [&] {
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) p[i][j] = pack_bf16(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
#pragma unroll
      for (int i = 0; i < 8; ++i) wgmma_pin(p[i]);
    };

    barrier_wait(&query_full, query_phase);
    query_phase ^= 1;
    barrier_wait(&key_full[key_turn.stage], key_turn.phase);
    ask_scores();
    wgmma_wait<0>();
    wgmma_pin(s);
    arrive(&key_empty[key_turn.stage]);
    key_turn.next();
    soften(0);
    pack_weights();
#pragma unroll
    for (int i = 0; i < 64; ++i) acc[i] = 0.0f;
    wgmma_pin(acc);
    for (int tile = 1; tile < item.n_tiles; ++tile) {
      barrier_wait(&key_full[key_turn.stage], key_turn.phase);
      barrier_wait(&value_full[value_turn.stage], value_turn.phase);
      asm volatile("bar.sync %0, %1;" ::"r"(2 + my_group), "n"(kWorkers) : "memory");
      ask_scores();
      ask_values();
      asm volatile("bar.arrive %0, %1;" ::"r"(3 - my_group), "n"(kWorkers) : "memory");
      wgmma_wait<1>();
      wgmma_pin(s);
      arrive(&key_empty[key_turn.stage]);
      key_turn.next();
      soften(tile);
      wgmma_wait<0>();
      wgmma_pin(acc);
      arrive(&value_empty[value_turn.stage]);
      value_turn.next();
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[i] *= keep[i >> 1 & 1];
      wgmma_pin(acc);
      pack_weights();
    }
    arrive(&query_empty);
    barrier_wait(&value_full[value_turn.stage], value_turn.phase);
    wgmma_fence();
    ask_values();
    wgmma_wait<0>();
    wgmma_pin(acc);
    arrive(&value_empty[value_turn.stage]);
    value_turn.next();

#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
      sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
      const int row = my_row + 8 * h;
      if (row >= run.n_q || sum[h] == 0.0f) continue;
      const RowWeights weight(a, run.q_begin + row, item.head, (largest[h] * scale + log2f(sum[h])) * 0.69314718f, sum[h]);
      Out* out = static_cast<Out*>(a.out.data) + (run.q_begin + row) * a.out.stride + item.head * kV + 2 * c;
#pragma unroll
      for (int n = 0; n < kV / 8; ++n)
        store_pair(out + 8 * n, acc[4 * n + 2 * h] * weight.here, acc[4 * n + 2 * h + 1] * weight.here, weight.before);
    }
  }
#else
  __trap();
#endif
}

template <int kRope, typename Out>
cudaError_t launch_shape(const FlashArgs& a, int n_multiprocessors, cudaStream_t stream) {
  using S = Shape<kRope>;
  static const cudaError_t raised =
      cudaFuncSetAttribute(flash_wgmma_kernel<kRope, Out>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes);
  if (raised != cudaSuccess) return raised;
  FlashMaps maps{};
  const int kv_heads = a.heads / a.share;
  const auto map = [](CUtensorMap& to, const void* rows, int n_rows, int cols, int64_t stride) {
    return make_tensor_map({rows, n_rows, cols, stride}, kQueries, to);
  };
  cudaError_t error = map(maps.q, a.q.data, a.q.rows, a.q.cols, a.q.stride);
  if (error == cudaSuccess) error = map(maps.k, a.k, a.n_kv_rows, (kv_heads - 1) * a.k_head + kNope, a.k_stride);
  if (error == cudaSuccess) error = map(maps.v, a.v, a.n_kv_rows, (kv_heads - 1) * a.v_head + kV, a.v_stride);
  if (error == cudaSuccess && kRope > 0) error = map(maps.k_rope, a.k_rope, a.n_kv_rows, kRope, a.k_rope_stride);
  if (error != cudaSuccess) return error;
  const int n_items = ceil_div(a.runs.most_q(), kQueries) * a.runs.n * a.heads;
  return launch(flash_wgmma_kernel<kRope, Out>, dim3(static_cast<unsigned>(min(n_items, n_multiprocessors))), kThreads, S::kBytes, stream,
                a, maps, n_items);
}
template <typename Out>
cudaError_t launch_out(const FlashArgs& a, int n_multiprocessors, cudaStream_t stream) {
  return a.rope == 64 ? launch_shape<64, Out>(a, n_multiprocessors, stream) : launch_shape<0, Out>(a, n_multiprocessors, stream);
}

}  // namespace

bool flash_wgmma_supports(const FlashArgs& a) { return a.k_dim == kNope && a.v_dim == kV && (a.rope == 64 || a.rope == 0); }

cudaError_t launch_flash_wgmma(const FlashArgs& a, int n_multiprocessors, cudaStream_t stream) {
  return a.out.type == DType::f32 ? launch_out<float>(a, n_multiprocessors, stream) : launch_out<bf16>(a, n_multiprocessors, stream);
}

}  // namespace cachalot::cuda
