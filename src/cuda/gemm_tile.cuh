// The product for many rows: a block of 8 warps makes 128 outputs (with swiglu 64 gates and their ups) for 16 kColTiles rows of x. x goes
// through shared memory in four stages; W goes straight from memory to the registers of the warps that use it, one chunk ahead, since its
// records already lie in operand order, and is turned into bf16 weights there. Grouped: the blocks of an expert take the rows of its pairs.
#pragma once

#include "cuda/formats.cuh"
#include "cuda/kernels.h"

namespace cachalot::cuda {

inline constexpr int kTileStages = 4, kTileOut = 128, kTilePitch = kTileOut + 4;

template <int kColTiles>
struct TileShape {
  static constexpr int kRows = 16 * kColTiles;  // of x
  static constexpr int kStageBytes = kRows * kRecordCols * 2;
  static constexpr int kPipeBytes = kTileStages * kStageBytes, kOutBytes = kRows * kTilePitch * 4;
  static constexpr int kSharedBytes = kPipeBytes > kOutBytes ? kPipeBytes : kOutBytes;
};

// x rows in shared memory are 128 bytes; odd rows have their halves swapped, so that a quarter warp's 16-byte reads meet no bank twice.
__device__ __forceinline__ int tile_place(int row, int unit) { return row * 128 + ((unit ^ ((row & 1) << 2)) << 4); }

template <Tile kTile, int kColTiles>
__global__ __launch_bounds__(256, 1) void tile_kernel(const __grid_constant__ GemmArgs a) {
  using Shape = TileShape<kColTiles>;
  constexpr int kUnits = Shape::kRows * 8 / 256;  // 16-byte units that a thread copies per stage
  extern __shared__ __align__(128) uint8_t shared[];
  pdl_trigger();
  pdl_wait();
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31, g = lane >> 2, c = lane & 3;
  const int warp_out = warp & 3, warp_row = warp >> 2, n_chunks = a.w.cols / kRecordCols;

  int matrix = 0, begin = static_cast<int>(blockIdx.y) * Shape::kRows, count = 0, head = 0;
  const int* list = nullptr;
  if (a.rowing == Rowing::moe_tiles) {
    const int3 tile = a.moe.tiles[blockIdx.y];
    if (tile.z == 0) return;
    matrix = tile.x, begin = tile.y, count = tile.z, list = a.moe.order;
  } else {
    count = min(Shape::kRows, a.n_rows - begin);
    if (a.rowing == Rowing::heads) matrix = head = static_cast<int>(blockIdx.z);
  }
  const auto y_row = [&](int i) { return list != nullptr ? list[begin + i] : begin + i; };

  const bf16* from[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int r = i * 32 + (thread >> 3);
    int row = y_row(min(r, count - 1));
    if (a.x_by_token) row /= a.moe.top_k;
    from[i] = static_cast<const bf16*>(a.x) + row * a.x_stride + head * a.x_head + (thread & 7) * 8;
  }
  const auto copy = [&](int chunk) {
    if (chunk < n_chunks) {
      uint8_t* stage = shared + (chunk % kTileStages) * Shape::kStageBytes;
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const int r = i * 32 + (thread >> 3);
        cp_async16(stage + tile_place(r, thread & 7), from[i] + chunk * kRecordCols, r < count);
      }
    }
    cp_async_commit();
  };

  const uint8_t* base[2];
  int64_t next[2] = {};  // bf16
  const int last_tile = (a.w.out + 15) / 16 - 1, block = static_cast<int>(blockIdx.x);
  const int64_t matrix_at = static_cast<int64_t>(a.first_matrix + matrix) * a.w.matrix_bytes;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int tile = min(a.swiglu ? block * 4 + warp_out : block * 8 + warp_out * 2 + r, last_tile);
    const uint8_t* start = (a.swiglu && r == 1 ? a.w_up : a.w.data) + matrix_at;
    if constexpr (kTile == Tile::bf16) {
      const int row = min(tile * 16 + g, a.w.out - 1), row8 = min(tile * 16 + g + 8, a.w.out - 1);
      base[r] = start + static_cast<int64_t>(row) * a.w.cols * 2;
      next[r] = static_cast<int64_t>(row8 - row) * a.w.cols;
    } else {
      base[r] = start + static_cast<int64_t>(tile) * n_chunks * tile_info(kTile).bytes;
    }
  }
  constexpr int kChunkBytes = kTile == Tile::bf16 ? kRecordCols * 2 : tile_info(kTile).bytes;
  Frag<kTile> w[2][2];
  const auto load = [&](int slot, int chunk) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      w[slot][r].load(chunk < n_chunks, base[r] + static_cast<int64_t>(chunk) * kChunkBytes, lane,
                      kTile == Tile::bf16 ? next[r] : scales_from(kTile, chunk));
  };

  float acc[2][kColTiles][4] = {};
  const auto multiply = [&](int slot, int chunk) {
    const uint8_t* stage = shared + (chunk % kTileStages) * Shape::kStageBytes;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      uint32_t weights[2][2][4];
      w[slot][0].weights(s, weights[0]);
      w[slot][1].weights(s, weights[1]);
#pragma unroll
      for (int n = 0; n < kColTiles; ++n) {
        const int row = warp_row * kColTiles * 8 + n * 8 + g;
        uint4 b;
        if constexpr (kTile == Tile::q6g16) {
          const uint2 low = *reinterpret_cast<const uint2*>(stage + tile_place(row, 4 * s + (c >> 1)) + 8 * (c & 1));
          const uint2 high = *reinterpret_cast<const uint2*>(stage + tile_place(row, 4 * s + 2 + (c >> 1)) + 8 * (c & 1));
          b = make_uint4(low.x, low.y, high.x, high.y);
        } else {
          b = *reinterpret_cast<const uint4*>(stage + tile_place(row, 4 * s + c));
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          mma_bf16(acc[r][n], weights[r][0], b.x, b.y);
          mma_bf16(acc[r][n], weights[r][1], b.z, b.w);
        }
      }
    }
  };

#pragma unroll
  for (int i = 0; i < kTileStages - 1; ++i) copy(i);
  load(0, 0);
  for (int chunk = 0; chunk < n_chunks; chunk += 2) {
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      if (chunk + slot < n_chunks) {
        cp_async_wait<kTileStages - 2>();
        __syncthreads();
        copy(chunk + slot + kTileStages - 1);
        load(slot ^ 1, chunk + slot + 1);
        multiply(slot, chunk + slot);
      }
    }
  }
  cp_async_wait<0>();
  __syncthreads();

  // Through shared memory, so that rows of y are written in runs.
  float* out = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (a.swiglu && r == 1) break;
#pragma unroll
    for (int n = 0; n < kColTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = warp_row * kColTiles * 8 + n * 8 + 2 * c + (i & 1);
        const int col = (a.swiglu ? warp_out * 16 : warp_out * 32 + r * 16) + g + 8 * (i >> 1);
        float v = acc[r][n][i];
        if (a.swiglu) v = v / (1.0f + __expf(-v)) * acc[1][n][i];
        out[row * kTilePitch + col] = v;
      }
  }
  __syncthreads();
  const int n_out = a.swiglu ? kTileOut / 2 : kTileOut, first = block * n_out;
  for (int i = thread; i < n_out * count; i += 256) {
    const int col = i % n_out, row = i / n_out;
    if (first + col >= a.w.out) continue;
    float v = out[row * kTilePitch + col];
    if (a.bias != nullptr) v += a.bias[first + col];
    const int64_t at = y_row(row) * a.y_stride + head * a.y_head + first + col;
    if (a.y_is_f32) {
      float* y = static_cast<float*>(a.y) + at;
      *y = a.beta != 0.0f ? fmaf(a.beta, *y, v) : v;
    } else {
      bf16* y = static_cast<bf16*>(a.y) + at;
      *y = from_f32<bf16>(a.beta != 0.0f ? fmaf(a.beta, to_f32(*y), v) : v);
    }
  }
}

template <Tile kTile, int kColTiles>
cudaError_t launch_tile_instance(const GemmArgs& a, cudaStream_t stream) {
  using Shape = TileShape<kColTiles>;
  static const cudaError_t raised =
      cudaFuncSetAttribute(tile_kernel<kTile, kColTiles>, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  if (raised != cudaSuccess) return raised;
  dim3 grid(static_cast<unsigned>(ceil_div(a.w.out, a.swiglu ? kTileOut / 2 : kTileOut)));
  if (a.rowing == Rowing::moe_tiles)
    grid.y = static_cast<unsigned>(a.moe.max_tiles);
  else
    grid.y = static_cast<unsigned>(ceil_div(a.n_rows, Shape::kRows));
  if (a.rowing == Rowing::heads) grid.z = static_cast<unsigned>(a.n_heads);
  return launch(tile_kernel<kTile, kColTiles>, grid, 256, Shape::kSharedBytes, stream, a);
}
template <Tile kTile>
cudaError_t launch_tile_format(const GemmArgs& a, int rows, cudaStream_t stream) {
  return rows > 64 ? launch_tile_instance<kTile, 8>(a, stream) : launch_tile_instance<kTile, 4>(a, stream);
}

// One per format, each in its own file of inst/. `rows`: of x per block, 64 or 128.
cudaError_t launch_tile_bf16(const GemmArgs& a, int rows, cudaStream_t stream);
cudaError_t launch_tile_q4g32(const GemmArgs& a, int rows, cudaStream_t stream);
cudaError_t launch_tile_q4g64(const GemmArgs& a, int rows, cudaStream_t stream);
cudaError_t launch_tile_q4g128(const GemmArgs& a, int rows, cudaStream_t stream);
cudaError_t launch_tile_q5g32(const GemmArgs& a, int rows, cudaStream_t stream);
cudaError_t launch_tile_q6g16(const GemmArgs& a, int rows, cudaStream_t stream);
cudaError_t launch_tile_q8g32(const GemmArgs& a, int rows, cudaStream_t stream);
cudaError_t launch_tile_f8(const GemmArgs& a, int rows, cudaStream_t stream);

}  // namespace cachalot::cuda
