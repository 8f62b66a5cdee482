// The experts' products for many rows, weights in bf16 (sm_90a): kRows rows of x, which lie blocked, times 256 rows of W (with swiglu 128
// gates and their ups). One warp brings 64 columns of both at a time to shared memory, several ahead; two warpgroups multiply. Blocks go on
// to further tiles, so that their first columns come while the last results are written.
#include "cuda/column_order.cuh"
#include "cuda/tensor_map.cuh"
#include "cuda/wgmma_flash.cuh"
#include "cuda/wgmma_mla.cuh"

namespace cachalot::cuda {
namespace {

constexpr int kOutRows = 256, kBoxRows = 64, kBoxes = kOutRows / kBoxRows, kWorkers = 256, kThreads = kWorkers + 128;
constexpr int kBoxBytes = kBoxRows * 128;

template <int kRows>
struct WideShape {
  static constexpr int kStages = kRows == 128 ? 4 : 5, kXBytes = kRows * 128, kStageBytes = kXBytes + kBoxes * kBoxBytes;
  static constexpr int kBytes = kStages * kStageBytes + 1024;  // 1024: alignment
};

// Boxes of gates and ups take turns, so that a thread has a column's gate and up in registers of its own.
struct WideMaps {
  CUtensorMap w, up;
};

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ uint32_t swiglu_pair(float gate0, float up0, float gate1, float up1) {
  return pack_bf16(__fdividef(gate0, 1.0f + __expf(-gate0)) * up0, __fdividef(gate1, 1.0f + __expf(-gate1)) * up1);
}
#endif

template <int kRows, bool kSwiglu>
__global__ __launch_bounds__(kThreads, 1) void wide_kernel(const __grid_constant__ GemmArgs a, const __grid_constant__ WideMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using S = WideShape<kRows>;
  constexpr int kOut = kSwiglu ? kOutRows / 2 : kOutRows, kPieces = kRows / 64, kAcc = 64 * kPieces;
  extern __shared__ uint8_t raw[];
  __shared__ uint64_t full[S::kStages], empty[S::kStages];
  uint8_t* stages = raw + (1024 - (shared_address(raw) & 1023u)) % 1024;  // [stages][x, then 4 boxes of W]
  pdl_trigger();
  const int thread = static_cast<int>(threadIdx.x), group = __shfl_sync(~0u, thread >> 7, 0), lane = thread & 31;
  if (thread == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], kWorkers / 32);
    }
    fence_async_proxy();
  }
  __syncthreads();
  pdl_wait();
  const int n_chunks = a.w.cols / 64, n_blocks = ceil_div(a.w.out, kOut), n_items = a.moe.max_tiles * n_blocks;
  int stage = 0;
  uint32_t phase = 0;
  const auto next = [&] {
    if (++stage == S::kStages) stage = 0, phase ^= 1;
  };

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (thread != 0) return;
    const int matrix_rows = static_cast<int>(a.w.matrix_bytes / (2 * a.w.cols));  // from matrix to matrix: gates and ups may lie in one
    for (int item = static_cast<int>(blockIdx.x); item < n_items; item += static_cast<int>(gridDim.x)) {
      const int index = item / n_blocks, first = item % n_blocks * kOut;
      const int3 tile = a.moe.tiles[index];
      if (tile.z == 0) break;
      const uint8_t* x = static_cast<const uint8_t*>(a.x) + static_cast<int64_t>(index) * n_chunks * S::kXBytes;
      const int row = (a.first_matrix + tile.x) * matrix_rows + first;
      for (int chunk = 0; chunk < n_chunks; ++chunk, next()) {
        uint8_t* to = stages + stage * S::kStageBytes;
        barrier_wait(&empty[stage], phase ^ 1);
        barrier_expect(&full[stage], S::kStageBytes);
        bulk_copy(to, x + static_cast<int64_t>(chunk) * S::kXBytes, S::kXBytes, &full[stage]);
        to += S::kXBytes;
        for (int b = 0; b < kBoxes; ++b) {
          const bool up = kSwiglu && b % 2 != 0;
          copy_box(to + b * kBoxBytes, up ? maps.up : maps.w, chunk * 64, row + (kSwiglu ? b / 2 : b) * kBoxRows, &full[stage]);
        }
      }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const int my_group = group - 1, warp = thread >> 5 & 3, g = lane >> 2, c = lane & 3;
  const int my_row = (kRows == 128 ? my_group * 64 : 0) + warp * 16 + g;  // and my_row + 8
  const int my_w = kRows == 128 ? 0 : my_group * 128;
  for (int item = static_cast<int>(blockIdx.x); item < n_items; item += static_cast<int>(gridDim.x)) {
    const int index = item / n_blocks, first = item % n_blocks * kOut;
    const int3 tile = a.moe.tiles[index];
    if (tile.z == 0) break;
    float acc[kAcc];
#pragma unroll
    for (int i = 0; i < kAcc; ++i) acc[i] = 0.0f;
    wgmma_pin(acc);
    int before = -1;  // the stage that may still be read
    for (int chunk = 0; chunk < n_chunks; ++chunk, next()) {
      const uint8_t* x = stages + stage * S::kStageBytes;
      const uint8_t* w = x + S::kXBytes + my_w * 128;
      barrier_wait(&full[stage], phase);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint64_t rows = wgmma_operand(x + (kRows == 128 ? my_group * 64 * 128 : 0) + k * 32), weights = wgmma_operand(w + k * 32);
        if constexpr (kRows == 128)
          wgmma_rows256(acc, rows, weights);
        else
          wgmma_flash_scores(acc, rows, weights, 1);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (before >= 0 && lane == 0) barrier_arrive(&empty[before]);
      before = stage;
    }
    wgmma_wait<0>();
    wgmma_pin(acc);
    if (before >= 0 && lane == 0) barrier_arrive(&empty[before]);

#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = my_row + 8 * h;
      if (row >= tile.z) continue;
      if constexpr (kSwiglu) {  // blocked, each unit of 8 columns by four lanes
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          const int col = first + my_w / 2 + piece * 64;
          if (col >= a.w.out) continue;
          auto* to = static_cast<uint8_t*>(a.y) + (static_cast<int64_t>(index) * a.y_chunks + col / 64) * S::kXBytes + row * 128;
#pragma unroll
          for (int unit = 0; unit < 8; ++unit) {
            const float *gate = acc + piece * 64 + 4 * unit + 2 * h, *up = gate + 32;
            const int at = permuted_column(a.y_order, unit * 8 + 2 * c);
            if (col + unit * 8 + 2 * c < a.w.out)
              *reinterpret_cast<uint32_t*>(to + (((at >> 3) ^ (row & 7)) << 4) + (at & 7) * 2) =
                  swiglu_pair(gate[0], up[0], gate[1], up[1]);
          }
        }
      } else {
        const int64_t at = static_cast<int64_t>(a.moe.order[tile.y + row]) * a.y_stride;
#pragma unroll
        for (int i = 0; i < kAcc / 4; ++i) {
          const int col = first + my_w + 8 * i + 2 * c;
          if (col >= a.w.out) continue;
          const float x = acc[4 * i + 2 * h], y = acc[4 * i + 2 * h + 1];
          if (a.y_is_f32)
            *reinterpret_cast<float2*>(static_cast<float*>(a.y) + at + col) = make_float2(x, y);
          else
            *reinterpret_cast<uint32_t*>(static_cast<bf16*>(a.y) + at + col) = pack_bf16(x, y);
        }
      }
    }
  }
#else
  __trap();
#endif
}

template <int kRows, bool kSwiglu>
cudaError_t launch_shape(const GemmArgs& a, int n_multiprocessors, cudaStream_t stream) {
  constexpr int kBytes = WideShape<kRows>::kBytes;
  static const cudaError_t raised = cudaFuncSetAttribute(wide_kernel<kRows, kSwiglu>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (raised != cudaSuccess) return raised;
  WideMaps maps{};
  const int64_t n_rows = (a.first_matrix + a.moe.n_experts - 1) * (a.w.matrix_bytes / (2 * a.w.cols)) + a.w.out;
  cudaError_t error = make_tensor_map({a.w.data, n_rows, a.w.cols, a.w.cols}, kBoxRows, maps.w);
  if (error == cudaSuccess && kSwiglu) error = make_tensor_map({a.w_up, n_rows, a.w.cols, a.w.cols}, kBoxRows, maps.up);
  if (error != cudaSuccess) return error;
  return launch(wide_kernel<kRows, kSwiglu>, dim3(static_cast<unsigned>(n_multiprocessors)), kThreads, kBytes, stream, a, maps);
}

}  // namespace

cudaError_t launch_moe_wide(const GemmArgs& a, int n_multiprocessors, cudaStream_t stream) {
  // Pairs of columns are written at once.
  if (a.bias != nullptr || a.beta != 0.0f || a.w.out % 2 != 0 || a.tile_rows != a.moe.tile ||
      (a.swiglu != (a.y_order != ColumnOrder::plain)) || (!a.swiglu && a.y_stride % 2 != 0))
    return cudaErrorInvalidValue;
  if (a.tile_rows == 128)
    return a.swiglu ? launch_shape<128, true>(a, n_multiprocessors, stream) : launch_shape<128, false>(a, n_multiprocessors, stream);
  return a.swiglu ? launch_shape<64, true>(a, n_multiprocessors, stream) : launch_shape<64, false>(a, n_multiprocessors, stream);
}

}  // namespace cachalot::cuda
