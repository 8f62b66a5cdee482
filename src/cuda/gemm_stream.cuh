// The product for few rows: y^T = W x^T with the rows of W as mma's 16 and up to 8 kColTiles rows of x as its 8 columns. What limits it is
// the reading of W, so: a block of 8 warps takes 16 (or 2 x 16) rows of W, the warps take the 64-column chunks in turn, each issues the
// loads of several chunks before it uses the first, and loads what does not depend on the kernel before while that one still runs.
// Codes go to the tensor cores as exact integers; scales are applied to the f32 sums of each group, minima through the sum of x over it.
// The order of the sums depends on the format and on nothing else, so a row's result does not depend on its neighbours.
#pragma once

#include "cuda/formats.cuh"
#include "cuda/kernels.h"

namespace cachalot::cuda {

inline constexpr int kStreamWarps = 8;

// y[at] = v (+ bias) (+ beta y[at]), or silu(v) * up.
__device__ __forceinline__ void store_result(const GemmArgs& a, float v, float up, int out, int64_t at) {
  if (a.bias != nullptr) v += a.bias[out];
  if (a.swiglu) v = v / (1.0f + __expf(-v)) * up;
  if (a.y_is_f32) {
    float* y = static_cast<float*>(a.y) + at;
    *y = a.beta != 0.0f ? fmaf(a.beta, *y, v) : v;
  } else {
    bf16* y = static_cast<bf16*>(a.y) + at;
    *y = from_f32<bf16>(a.beta != 0.0f ? fmaf(a.beta, to_f32(*y), v) : v);
  }
}

// One chunk of 64 columns: acc += W x for kRowTiles x kColTiles mma tiles.
template <Tile kTile, int kRowTiles, int kColTiles>
__device__ __forceinline__ void stream_chunk(const Frag<kTile> (&w)[kRowTiles], const bf16* const (&x)[kColTiles], int col, int c,
                                             float (&acc)[kRowTiles][kColTiles][4]) {
  constexpr TileInfo kInfo = tile_info(kTile);
  constexpr int kMmas = kTile == Tile::bf16 ? 4 : kInfo.group / 16;  // per group
  constexpr uint32_t kOne = 0x3f803f80u;
  float part[kRowTiles][kColTiles][4], sum[kColTiles][4];
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    uint4 b[kColTiles];
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
      if constexpr (kTile == Tile::q6g16) {
        const uint2 low = *reinterpret_cast<const uint2*>(x[n] + col + 32 * s + 4 * c);
        const uint2 high = *reinterpret_cast<const uint2*>(x[n] + col + 32 * s + 16 + 4 * c);
        b[n] = make_uint4(low.x, low.y, high.x, high.y);
      } else {
        b[n] = *reinterpret_cast<const uint4*>(x[n] + col + 32 * s + 8 * c);
      }
    }
    uint32_t a[kRowTiles][2][4];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) w[r].operands(s, a[r]);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int index = 2 * s + m;
      if constexpr (kTile == Tile::bf16) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
          for (int n = 0; n < kColTiles; ++n) mma_bf16(acc[r][n], a[r][m], m == 0 ? b[n].x : b[n].z, m == 0 ? b[n].y : b[n].w);
      } else {
        if (index % kMmas == 0) {
#pragma unroll
          for (int n = 0; n < kColTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              sum[n][i] = 0.0f;
#pragma unroll
              for (int r = 0; r < kRowTiles; ++r) part[r][n][i] = 0.0f;
            }
        }
#pragma unroll
        for (int n = 0; n < kColTiles; ++n) {
          const uint32_t b0 = m == 0 ? b[n].x : b[n].z, b1 = m == 0 ? b[n].y : b[n].w;
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) mma_bf16(part[r][n], a[r][m], b0, b1);
          if constexpr (kInfo.has_min) {
            const uint32_t ones[4] = {kOne, kOne, kOne, kOne};
            mma_bf16(sum[n], ones, b0, b1);
          }
        }
        if (index % kMmas == kMmas - 1) {
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const float2 sm = w[r].scale(s, m, h);
#pragma unroll
              for (int n = 0; n < kColTiles; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                  float& to = acc[r][n][2 * h + i];
                  to = fmaf(sm.x, part[r][n][2 * h + i], to);
                  if constexpr (kInfo.has_min) to = fmaf(-sm.y, sum[n][2 * h + i], to);
                }
            }
        }
      }
    }
  }
}

// The rows that a block works on, resolved from its Rowing.
struct StreamRows {
  int matrix = 0, count = 0;
  const int* list = nullptr;  // pairs, or null: rows begin, begin + 1, ...
  int begin = 0;
};

// Finds the pairs of the expert of pair blockIdx.y; count 0 when an earlier pair leads. `list` holds n_pairs ints. All threads call.
__device__ inline StreamRows inline_rows(const MoePlan& plan, int* list) {
  __shared__ int count;
  const int self = static_cast<int>(blockIdx.y), lane = static_cast<int>(threadIdx.x) & 31;
  const int expert = plan.ids[self];
  if (threadIdx.x < 32) {
    int n = 0;
    bool leads = expert >= 0;
    for (int base = 0; base < plan.n_pairs; base += 32) {
      const int p = base + lane;
      const bool same = p < plan.n_pairs && plan.ids[p] == expert;
      const uint32_t mask = __ballot_sync(~0u, same);
      const uint32_t before = self <= base ? 0u : self - base >= 32 ? ~0u : (1u << (self - base)) - 1u;
      if (mask & before) leads = false;
      if (same) list[n + __popc(mask & ((1u << lane) - 1u))] = p;
      n += __popc(mask);
    }
    if (lane == 0) count = leads ? n : 0;
  }
  __syncthreads();
  return {expert, count, list, 0};
}

// Adds the warps' sums in their order and writes y.
template <int kRowTiles, int kColTiles>
__device__ __forceinline__ void stream_store(const GemmArgs& a, const StreamRows& rows, int done, const float* reduce) {
  constexpr int kRows = kRowTiles * 16, kCols = kColTiles * 8;
  const int n_out = a.swiglu ? 16 : kRows, n_cols = min(kCols, rows.count - done);
  for (int i = static_cast<int>(threadIdx.x); i < n_out * n_cols; i += kStreamWarps * 32) {
    const int r = i % n_out, col = i / n_out, out = static_cast<int>(blockIdx.x) * n_out + r;
    if (out >= a.w.out) continue;
    float v = 0.0f, up = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kStreamWarps; ++warp) {
      v += reduce[(warp * kCols + col) * (kRows + 1) + r];
      if (a.swiglu) up += reduce[(warp * kCols + col) * (kRows + 1) + 16 + r];
    }
    int row = rows.begin + done + col;
    if (rows.list != nullptr) row = rows.list[row];
    const int64_t at = row * a.y_stride + out + (a.rowing == Rowing::heads ? rows.matrix * a.y_head : 0);
    store_result(a, v, up, out, at);
  }
}

template <Tile kTile, int kRowTiles, int kColTiles>
__global__ __launch_bounds__(kStreamWarps * 32) void stream_kernel(const __grid_constant__ GemmArgs a) {
  // Chunks in flight per warp: about 64 registers of weights.
  constexpr int kDepth = kTile == Tile::bf16 ? 4 / kRowTiles : tile_info(kTile).code_bits == 8 ? 4 / kRowTiles : 4;
  constexpr int kRows = kRowTiles * 16, kCols = kColTiles * 8;
  extern __shared__ float reduce[];  // [kStreamWarps][kCols][kRows + 1]
  __shared__ int pair_list[64];
  pdl_trigger();
  const int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, c = lane & 3;
  const int n_chunks = a.w.cols / kRecordCols;
  const bool moe = a.rowing == Rowing::moe_inline || a.rowing == Rowing::moe_tiles;

  StreamRows rows;
  if (moe) {
    pdl_wait();
    if (a.rowing == Rowing::moe_inline) {
      rows = inline_rows(a.moe, pair_list);
    } else {
      const int3 tile = a.moe.tiles[blockIdx.y];
      rows = {tile.x, tile.z, a.moe.order, tile.y};
    }
    if (rows.count == 0) return;
  } else {
    rows.matrix = a.rowing == Rowing::heads ? static_cast<int>(blockIdx.y) : 0;
    rows.begin = static_cast<int>(blockIdx.z) * kCols;
    rows.count = min(kCols, a.n_rows - rows.begin);
  }

  // Row tiles of this block; the second is the up half with swiglu, else the next 16 rows.
  const int64_t matrix_at = static_cast<int64_t>(a.first_matrix + rows.matrix) * a.w.matrix_bytes;
  const int last_tile = (a.w.out + 15) / 16 - 1;
  const uint8_t* base[kRowTiles];
  int64_t next[kRowTiles];
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    const int tile = a.swiglu ? static_cast<int>(blockIdx.x) : min(static_cast<int>(blockIdx.x) * kRowTiles + r, last_tile);
    const uint8_t* matrix = (a.swiglu && r == 1 ? a.w_up : a.w.data) + matrix_at;
    if constexpr (kTile == Tile::bf16) {
      const int row = min(tile * 16 + g, a.w.out - 1), row8 = min(tile * 16 + g + 8, a.w.out - 1);
      base[r] = matrix + static_cast<int64_t>(row) * a.w.cols * 2;
      next[r] = static_cast<int64_t>(row8 - row) * a.w.cols;
    } else {
      base[r] = matrix + static_cast<int64_t>(tile) * n_chunks * tile_info(kTile).bytes;
      next[r] = 0;
    }
  }
  constexpr int kChunkBytes = kTile == Tile::bf16 ? kRecordCols * 2 : tile_info(kTile).bytes;

  Frag<kTile> w[kDepth][kRowTiles];
  const auto load = [&](int first) {
#pragma unroll
    for (int u = 0; u < kDepth; ++u) {
      const int chunk = first + u * kStreamWarps;
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        if (chunk < n_chunks)
          w[u][r].load(base[r] + static_cast<int64_t>(chunk) * kChunkBytes, lane, next[r]);
        else
          w[u][r].zero();
      }
    }
  };

  for (int done = 0; done < rows.count; done += kCols) {
    load(warp);
    if (!moe && done == 0) pdl_wait();
    const bf16* x[kColTiles];
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
      const int i = min(done + n * 8 + g, rows.count - 1);
      int row = rows.begin + i;
      if (rows.list != nullptr) row = rows.list[row];
      if (a.x_by_token) row /= a.moe.top_k;
      x[n] = static_cast<const bf16*>(a.x) + row * a.x_stride + (a.rowing == Rowing::heads ? rows.matrix * a.x_head : 0);
    }
    float acc[kRowTiles][kColTiles][4] = {};
    for (int first = warp;;) {
#pragma unroll
      for (int u = 0; u < kDepth; ++u)
        stream_chunk<kTile, kRowTiles, kColTiles>(w[u], x, min(first + u * kStreamWarps, n_chunks - 1) * kRecordCols, c, acc);
      first += kDepth * kStreamWarps;
      if (first >= n_chunks) break;
      load(first);
    }
    if (done > 0) __syncthreads();
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int n = 0; n < kColTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          reduce[(warp * kCols + n * 8 + 2 * c + (i & 1)) * (kRows + 1) + r * 16 + g + 8 * (i >> 1)] = acc[r][n][i];
    __syncthreads();
    stream_store<kRowTiles, kColTiles>(a, rows, done, reduce);
  }
}

template <Tile kTile, int kRowTiles, int kColTiles>
cudaError_t launch_stream_instance(const GemmArgs& a, cudaStream_t stream) {
  const int row_blocks = a.swiglu ? (a.w.out + 15) / 16 : ceil_div(a.w.out, kRowTiles * 16);
  dim3 grid(static_cast<unsigned>(row_blocks));
  switch (a.rowing) {
    case Rowing::moe_inline: grid.y = static_cast<unsigned>(a.moe.n_pairs); break;
    case Rowing::moe_tiles: grid.y = static_cast<unsigned>(a.moe.max_tiles); break;
    case Rowing::heads: grid.y = static_cast<unsigned>(a.n_heads); [[fallthrough]];
    case Rowing::dense: grid.z = static_cast<unsigned>(ceil_div(a.n_rows, kColTiles * 8)); break;
  }
  const size_t shared = sizeof(float) * kStreamWarps * kColTiles * 8 * (kRowTiles * 16 + 1);
  return launch(stream_kernel<kTile, kRowTiles, kColTiles>, grid, kStreamWarps * 32, shared, stream, a);
}
template <Tile kTile>
cudaError_t launch_stream_format(const GemmArgs& a, int col_tiles, cudaStream_t stream) {
  // Two row tiles halve the reading of x; small outputs need the blocks instead.
  const bool two = a.swiglu || a.w.out >= 8192 || (a.rowing == Rowing::moe_tiles && a.w.out >= 1024);
  switch (col_tiles) {
    case 1: return two ? launch_stream_instance<kTile, 2, 1>(a, stream) : launch_stream_instance<kTile, 1, 1>(a, stream);
    case 2: return two ? launch_stream_instance<kTile, 2, 2>(a, stream) : launch_stream_instance<kTile, 1, 2>(a, stream);
    default: return two ? launch_stream_instance<kTile, 2, 4>(a, stream) : launch_stream_instance<kTile, 1, 4>(a, stream);
  }
}

// One per format, each in its own file of inst/.
cudaError_t launch_stream_bf16(const GemmArgs& a, int col_tiles, cudaStream_t stream);
cudaError_t launch_stream_q4g32(const GemmArgs& a, int col_tiles, cudaStream_t stream);
cudaError_t launch_stream_q4g64(const GemmArgs& a, int col_tiles, cudaStream_t stream);
cudaError_t launch_stream_q5g32(const GemmArgs& a, int col_tiles, cudaStream_t stream);
cudaError_t launch_stream_q6g16(const GemmArgs& a, int col_tiles, cudaStream_t stream);
cudaError_t launch_stream_q8g32(const GemmArgs& a, int col_tiles, cudaStream_t stream);
cudaError_t launch_stream_f8(const GemmArgs& a, int col_tiles, cudaStream_t stream);

}  // namespace cachalot::cuda
