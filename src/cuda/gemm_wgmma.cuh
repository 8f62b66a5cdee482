// The product for many rows on Hopper: 128 outputs (two warpgroups of 64 rows of W; with swiglu 64 gates and their ups) for kN rows of x.
// W goes from memory to registers two chunks ahead, is turned into bf16 there, and is wgmma's A operand; x is its B operand in shared
// memory, where one bulk copy per chunk puts it: launch_block_rows has gathered its rows and laid them out. While one chunk is multiplied,
// its successor's weights are converted.
#pragma once

#include "cuda/column_order.cuh"
#include "cuda/formats.cuh"
#include "cuda/kernels.h"
#include "cuda/wgmma.cuh"

namespace cachalot::cuda {

template <int kN>
struct WgmmaShape {
  static constexpr int kStages = 5, kStageBytes = kN * kRecordCols * 2, kOutPitch = 132;
  static constexpr int kPipeBytes = kStages * kStageBytes, kOutBytes = kN * kOutPitch * 4;
  static constexpr int kSharedBytes = (kPipeBytes > kOutBytes ? kPipeBytes : kOutBytes) + 1024;
};

template <int kIndex>
struct Slot {
  static constexpr int value = kIndex;
};

// Blocks per multiprocessor that the registers must allow. Converting weights is a chain of short latencies: it wants many warps.
constexpr int wgmma_blocks(Tile tile, int columns) {
  if (tile == Tile::bf16) return columns == 128 ? 1 : 2;
  return columns == 32 && (tile == Tile::q4g64 || tile == Tile::q4g128) ? 3 : 2;
}

template <Tile kTile, int kN>
__global__ __launch_bounds__(256, wgmma_blocks(kTile, kN)) void wgmma_kernel(const __grid_constant__ GemmArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = WgmmaShape<kN>;
  constexpr int kStages = Shape::kStages;
  extern __shared__ uint8_t raw_shared[];
  __shared__ uint64_t full[kStages];
  uint8_t* shared = raw_shared + ((1024 - (shared_address(raw_shared) & 1023)) & 1023);
  pdl_trigger();
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31, g = lane >> 2, c = lane & 3;
  const int group = warp >> 2, n_chunks = a.w.cols / kRecordCols, block = static_cast<int>(blockIdx.x);
  if (thread == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(&full[i], 1);
    fence_async_proxy();
  }
  pdl_wait();

  int matrix = 0, begin = static_cast<int>(blockIdx.y) * kN, count = 0, head = 0;
  const int* list = nullptr;
  if (a.rowing == Rowing::moe_tiles) {
    const int3 tile = a.moe.tiles[blockIdx.y];
    if (tile.z == 0) return;
    matrix = tile.x, begin = tile.y, count = tile.z, list = a.moe.order;
  } else {
    count = min(kN, a.n_rows - begin);
    if (a.rowing == Rowing::heads) matrix = head = static_cast<int>(blockIdx.z);
  }
  __syncthreads();
  const int x_tile = static_cast<int>(blockIdx.z * gridDim.y + blockIdx.y);
  const uint8_t* x = static_cast<const uint8_t*>(a.x) + static_cast<int64_t>(x_tile) * n_chunks * Shape::kStageBytes;
  const auto copy = [&](int chunk) {  // by one thread
    if (chunk >= n_chunks) return;
    uint64_t* barrier = &full[chunk % kStages];
    barrier_expect(barrier, Shape::kStageBytes);
    bulk_copy(shared + (chunk % kStages) * Shape::kStageBytes, x + static_cast<int64_t>(chunk) * Shape::kStageBytes, Shape::kStageBytes,
              barrier);
  };

  const int last_tile = (a.w.out + 15) / 16 - 1, tile = min(a.swiglu ? block * 4 + (warp & 3) : block * 8 + warp, last_tile);
  const uint8_t* weights = (a.swiglu && group == 1 ? a.w_up : a.w.data) + static_cast<int64_t>(a.first_matrix + matrix) * a.w.matrix_bytes;
  int64_t next = 0;
  if constexpr (kTile == Tile::bf16) {
    const int row = min(tile * 16 + g, a.w.out - 1), row8 = min(tile * 16 + g + 8, a.w.out - 1);
    weights += static_cast<int64_t>(row) * a.w.cols * 2;
    next = static_cast<int64_t>(row8 - row) * a.w.cols;
  } else {
    weights += static_cast<int64_t>(tile) * n_chunks * tile_info(kTile).bytes;
  }
  constexpr int kChunkBytes = kTile == Tile::bf16 ? kRecordCols * 2 : tile_info(kTile).bytes;
  const uint32_t opaque_zero = static_cast<uint32_t>(a.n_rows) >> 31;
  Frag<kTile> stored[2];
  const auto load = [&](int slot, int chunk) {
    stored[slot].load(chunk < n_chunks, weights + static_cast<int64_t>(chunk) * kChunkBytes, lane,
                      kTile == Tile::bf16 ? next : scales_from(kTile, chunk));
  };

  if (thread == 0)
    for (int i = 0; i < kStages - 2; ++i) copy(i);
  load(0, 0);
  load(1, 1);
  float acc[kN / 2] = {};
  uint32_t operand[2][2][2][4] = {};
  const auto step = [&](auto slot_constant, int chunk) {
    constexpr int slot = decltype(slot_constant)::value;
    stored[slot].weights(0, operand[slot][0]);
    stored[slot].weights(1, operand[slot][1]);
    // bf16 weights are operands as they were loaded. They must not share registers with what the loop carries on, which is written while
    // wgmma still reads: an operation that no compiler can leave out gives them their own.
    if constexpr (kTile == Tile::bf16) {
#pragma unroll
      for (int i = 0; i < 16; ++i) operand[slot][i >> 3][i >> 2 & 1][i & 3] ^= opaque_zero;
    }
    load(slot, chunk + 2);
    __syncthreads();  // everyone is done with the chunk before the last one, whose stage is filled again
    if (thread == 0) copy(chunk + kStages - 2);
    barrier_wait(&full[chunk % kStages], static_cast<uint32_t>(chunk / kStages) & 1u);
    const uint8_t* stage = shared + (chunk % kStages) * Shape::kStageBytes;
    wgmma_pin(acc);
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma_pin(operand[slot][i >> 1][i & 1]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma_bf16<kN>(acc, operand[slot][i >> 1][i & 1], wgmma_operand(stage + i * 32));
    wgmma_commit();
    wgmma_wait<1>();  // the chunk before this one is done, and its registers may be written again
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma_pin(operand[slot ^ 1][i >> 1][i & 1]);
  };
  int chunk = 0;
  for (; chunk + 1 < n_chunks; chunk += 2) {
    step(Slot<0>{}, chunk);
    step(Slot<1>{}, chunk + 1);
  }
  if (chunk < n_chunks) step(Slot<0>{}, chunk);
  wgmma_wait<0>();
  wgmma_pin(acc);
  __syncthreads();

  float* out = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    const int row = (i >> 2) * 8 + 2 * c + (i & 1), col = warp * 16 + g + 8 * (i >> 1 & 1);
    out[row * Shape::kOutPitch + col] = acc[i];
  }
  __syncthreads();
  const int log_out = a.swiglu ? 6 : 7, first = block << log_out;
  const int64_t y_unit = a.y_is_f32 ? 4 : 2;
  if (a.y_order != ColumnOrder::plain && a.swiglu && a.bias == nullptr && first + 64 <= a.w.out) {
    // 16 bytes per thread, the places of permuted_column: words `word`, `word` + `step`, ... of half of the 64 columns.
    const int unit = thread & 7, word = permuted_word(a.y_order, unit & 3), step = permuted_step(a.y_order);
    uint8_t* y = static_cast<uint8_t*>(a.y) + (static_cast<int64_t>(x_tile) * a.y_chunks + block) * (kN * 128);
    for (int row = thread >> 3; row < count; row += 32) {
      const float* from = out + row * Shape::kOutPitch + (unit >> 2) * 32 + 2 * word;
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 gate = *reinterpret_cast<const float2*>(from + 2 * i * step),
                     up = *reinterpret_cast<const float2*>(from + 2 * i * step + 64);
        pairs[i] = pack_bf16(__fdividef(gate.x, 1.0f + __expf(-gate.x)) * up.x, __fdividef(gate.y, 1.0f + __expf(-gate.y)) * up.y);
      }
      *reinterpret_cast<uint4*>(y + row * 128 + ((unit ^ (row & 7)) << 4)) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    return;
  }
  if (a.y_order == ColumnOrder::plain && !a.swiglu && a.bias == nullptr && a.beta == 0.0f && first + 128 <= a.w.out &&
      (a.y_stride | a.y_head) % 8 == 0 && reinterpret_cast<uintptr_t>(a.y) % 16 == 0) {  // 8 columns per thread
    for (int i = thread; i < count * 16; i += 256) {
      const int row = i >> 4, col = (i & 15) * 8;
      const float4 v = *reinterpret_cast<const float4*>(out + row * Shape::kOutPitch + col),
                   w = *reinterpret_cast<const float4*>(out + row * Shape::kOutPitch + col + 4);
      const int64_t at = (list != nullptr ? list[begin + row] : begin + row) * a.y_stride + head * a.y_head + first + col;
      auto* y = reinterpret_cast<uint4*>(static_cast<uint8_t*>(a.y) + at * y_unit);
      if (a.y_is_f32) {
        y[0] = make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
        y[1] = make_uint4(__float_as_uint(w.x), __float_as_uint(w.y), __float_as_uint(w.z), __float_as_uint(w.w));
      } else {
        y[0] = make_uint4(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w), pack_bf16(w.x, w.y), pack_bf16(w.z, w.w));
      }
    }
    return;
  }
  for (int i = thread; i < count << log_out; i += 256) {
    const int col = i & ((1 << log_out) - 1), row = i >> log_out, to = first + col;
    if (to >= a.w.out) continue;
    float v = out[row * Shape::kOutPitch + col];
    if (a.swiglu) v = v / (1.0f + __expf(-v)) * out[row * Shape::kOutPitch + 64 + col];
    if (a.bias != nullptr) v += a.bias[to];
    if (a.y_order != ColumnOrder::plain) {
      const int at = permuted_column(a.y_order, to & 63);
      const int64_t piece = static_cast<int64_t>(x_tile) * a.y_chunks + (to >> 6);
      static_cast<bf16*>(a.y)[(piece * kN + row) * 64 + ((((at >> 3) ^ (row & 7)) << 3) | (at & 7))] = from_f32<bf16>(v);
      continue;
    }
    const int64_t at = (list != nullptr ? list[begin + row] : begin + row) * a.y_stride + head * a.y_head + to;
    if (a.y_is_f32) {
      float* y = static_cast<float*>(a.y) + at;
      *y = a.beta != 0.0f ? fmaf(a.beta, *y, v) : v;
    } else {
      bf16* y = static_cast<bf16*>(a.y) + at;
      *y = from_f32<bf16>(a.beta != 0.0f ? fmaf(a.beta, to_f32(*y), v) : v);
    }
  }
#else
  __trap();
#endif
}

template <Tile kTile, int kN>
cudaError_t launch_wgmma_instance(const GemmArgs& a, cudaStream_t stream) {
  using Shape = WgmmaShape<kN>;
  static const cudaError_t raised =
      cudaFuncSetAttribute(wgmma_kernel<kTile, kN>, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  if (raised != cudaSuccess) return raised;
  dim3 grid(static_cast<unsigned>(ceil_div(a.w.out, a.swiglu ? 64 : 128)));
  grid.y = static_cast<unsigned>(a.rowing == Rowing::moe_tiles ? a.moe.max_tiles : ceil_div(a.n_rows, kN));
  if (a.tile_rows != kN) return cudaErrorInvalidValue;
  if (a.rowing == Rowing::heads) grid.z = static_cast<unsigned>(a.n_heads);
  return launch(wgmma_kernel<kTile, kN>, grid, 256, Shape::kSharedBytes, stream, a);
}
// `rows`: of x per block, 32, 64 or 128.
template <Tile kTile>
cudaError_t launch_wgmma_format(const GemmArgs& a, int rows, cudaStream_t stream) {
  return rows > 64   ? launch_wgmma_instance<kTile, 128>(a, stream)
         : rows > 32 ? launch_wgmma_instance<kTile, 64>(a, stream)
                     : launch_wgmma_instance<kTile, 32>(a, stream);
}

cudaError_t launch_wgmma_bf16(const GemmArgs& a, int rows, cudaStream_t stream);
cudaError_t launch_wgmma_q4g32(const GemmArgs& a, int rows, cudaStream_t stream);
cudaError_t launch_wgmma_q4g64(const GemmArgs& a, int rows, cudaStream_t stream);
cudaError_t launch_wgmma_q4g128(const GemmArgs& a, int rows, cudaStream_t stream);
cudaError_t launch_wgmma_q5g32(const GemmArgs& a, int rows, cudaStream_t stream);
cudaError_t launch_wgmma_q6g16(const GemmArgs& a, int rows, cudaStream_t stream);
cudaError_t launch_wgmma_q8g32(const GemmArgs& a, int rows, cudaStream_t stream);
cudaError_t launch_wgmma_f8(const GemmArgs& a, int rows, cudaStream_t stream);

}  // namespace cachalot::cuda
