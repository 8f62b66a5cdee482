// The product for few rows: y^T = W x^T with the rows of W as mma's 16 and up to 8 kColTiles rows of x as its 8 columns. What limits it is
// the reading of W, so: a block takes 16 or 2 x 16 rows of W, its 8 or 4 warps take the 64-column chunks in turn, many
// warps keep loads in flight, and what does not depend on the kernel before is loaded while that one still runs.
// Codes go to the tensor cores as exact integers; scales are applied to the f32 sums of each group, minima through the sum of x over it.
// The order of the sums depends on the format and the number of warps, not on the other rows; see launch_stream_format for the latter.
#pragma once

#include "cuda/formats.cuh"
#include "cuda/kernels.h"

namespace cachalot::cuda {

// The lane's columns of step `s` of a chunk, from x at the lane's own columns on.
template <Tile kTile>
__device__ __forceinline__ uint4 stream_input(const bf16* x, int s) {
  if constexpr (kTile != Tile::q6g16) return load16(x + 32 * s);
  const uint2 low = load8(x + 32 * s), high = load8(x + 32 * s + 16);
  return make_uint4(low.x, low.y, high.x, high.y);
}

// One chunk of 64 columns: acc += W x for kRowTiles x kColTiles mma tiles. input(n, s): step s of rows n of x.
template <Tile kTile, int kRowTiles, int kColTiles, typename Input>
__device__ __forceinline__ void stream_chunk(const Frag<kTile> (&w)[kRowTiles], const Input& input, float (&acc)[kRowTiles][kColTiles][4]) {
  constexpr TileInfo kInfo = tile_info(kTile);
  constexpr int kMmas = kTile == Tile::bf16 ? 4 : kInfo.group / 16;  // per group
  constexpr uint32_t kOne = 0x3f803f80u;
  float part[kRowTiles][kColTiles][4], sum[kColTiles][4];
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    uint4 b[kColTiles];
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) b[n] = input(n, s);
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

// What a block works on, resolved from its Rowing: a matrix, where x and y are, and which rows.
struct StreamWork {
  Segment w;
  const uint8_t* up = nullptr;
  const bf16* x = nullptr;
  int64_t x_stride = 0;
  void* y = nullptr;
  int64_t y_stride = 0;
  int matrix = 0, begin = 0, count = 0;
  const int* list = nullptr;  // pairs, or null: rows begin, begin + 1, ...
  bool late = false;          // which weights are read depends on the kernel before
  bool by_token = false;
  int block = 0;  // of rows of w
};

// Finds the pairs of the expert of pair `self`; count 0 when an earlier pair leads. `list` holds n_pairs ints. All threads call.
__device__ inline void inline_rows(const MoePlan& plan, int self, int* list, StreamWork& work) {
  __shared__ int count;
  const int lane = static_cast<int>(threadIdx.x) & 31;
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
  work.matrix = expert, work.count = count, work.list = list;
}

// All threads of the block call. pair_list: kInlinePairs ints of shared memory.
__device__ __forceinline__ StreamWork resolve_work(const GemmArgs& a, int block_rows, int n_cols, int* pair_list) {
  StreamWork work{a.w, a.w_up, static_cast<const bf16*>(a.x), a.x_stride, a.y, a.y_stride};
  work.block = static_cast<int>(blockIdx.x);
  const int slot = static_cast<int>(blockIdx.y);
  switch (a.rowing) {
    case Rowing::heads:
      work.matrix = slot;
      work.x += slot * a.x_head;
      work.y = a.y_is_f32 ? static_cast<void*>(static_cast<float*>(a.y) + slot * a.y_head) : static_cast<bf16*>(a.y) + slot * a.y_head;
      [[fallthrough]];
    case Rowing::dense:
      work.begin = static_cast<int>(blockIdx.z) * n_cols;
      work.count = min(n_cols, a.n_rows - work.begin);
      break;
    case Rowing::moe_inline:
    case Rowing::moe_tiles:
      if (slot < a.shared_slots) {
        const int parts = ceil_div(ceil_div(a.shared_w.out, block_rows), static_cast<int>(gridDim.x));
        const int begin = slot / parts * n_cols;
        return {a.shared_w,
                a.shared_up,
                static_cast<const bf16*>(a.shared_x),
                a.shared_x_stride,
                a.shared_y,
                a.shared_y_stride,
                0,
                begin,
                min(n_cols, a.n_rows - begin),
                nullptr,
                false,
                false,
                slot % parts * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)};
      }
      pdl_wait();
      work.late = true;
      work.by_token = a.x_by_token;
      if (a.rowing == Rowing::moe_inline) {
        inline_rows(a.moe, slot - a.shared_slots, pair_list, work);
      } else {
        const int3 tile = a.moe.tiles[slot - a.shared_slots];
        work.matrix = tile.x, work.begin = tile.y, work.count = tile.z, work.list = a.moe.order;
      }
      break;
  }
  work.matrix += a.first_matrix;
  return work;
}

// Adds the warps' sums in their order and writes y: y (+)= v (+ bias), or silu(v) * up. reduce: [kWarps][kCols][kRows + 1].
template <int kRowTiles, int kColTiles, int kWarps>
__device__ __forceinline__ void stream_store(const GemmArgs& a, const StreamWork& work, int done, const float* reduce) {
  constexpr int kRows = kRowTiles * 16, kCols = kColTiles * 8;
  const bool swiglu = kRowTiles == 2 && a.swiglu;
  const int log_out = swiglu || kRowTiles == 1 ? 4 : 5, n_cols = min(kCols, work.count - done);
  for (int i = static_cast<int>(threadIdx.x); i < n_cols << log_out; i += kWarps * 32) {
    const int r = i & ((1 << log_out) - 1), col = i >> log_out, out = (work.block << log_out) + r;
    if (out >= work.w.out) continue;
    float v = 0.0f, up = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      v += reduce[(warp * kCols + col) * (kRows + 1) + r];
      if (swiglu) up += reduce[(warp * kCols + col) * (kRows + 1) + 16 + r];
    }
    if (a.bias != nullptr) v += a.bias[out];
    if (swiglu) v = v / (1.0f + __expf(-v)) * up;
    int row = work.begin + done + col;
    if (work.list != nullptr) row = work.list[row];
    const int64_t at = row * work.y_stride + out;
    if (a.y_is_f32) {
      float* y = static_cast<float*>(work.y) + at;
      *y = a.beta != 0.0f ? fmaf(a.beta, *y, v) : v;
    } else {
      bf16* y = static_cast<bf16*>(work.y) + at;
      *y = from_f32<bf16>(a.beta != 0.0f ? fmaf(a.beta, to_f32(*y), v) : v);
    }
  }
}

// More rows of W per warp cost fewer instructions per weight; fewer give more blocks. More warps shorten a block.
// Chunks in flight per warp, and blocks per multiprocessor that the registers must allow: measured. With two row tiles many warps with one
// chunk each do better than few with more.
constexpr int stream_depth(Tile tile, int row_tiles, int col_tiles) {
  if (row_tiles == 2) return 1;
  return col_tiles > 2 ? 2 : 4;
}
constexpr int stream_blocks(Tile tile, int row_tiles, int col_tiles, int warps) {
  if (warps == 8) return row_tiles == 2 && col_tiles == 1 && tile_info(tile).code_bits == 4 ? 3 : 2;
  if (tile == Tile::bf16) return col_tiles == 1 ? 4 : 3;
  if (tile_info(tile).code_bits == 8) return col_tiles == 1 ? 6 : col_tiles == 2 ? 5 : 4;
  return col_tiles == 1 ? (tile == Tile::q4g64 || tile == Tile::q4g128 ? 8 : 7) : col_tiles == 2 ? 5 : 4;
}

template <Tile kTile, int kRowTiles, int kColTiles, int kWarps>
__global__ __launch_bounds__(kWarps * 32,
                             stream_blocks(kTile, kRowTiles, kColTiles, kWarps)) void stream_kernel(const __grid_constant__ GemmArgs a) {
  constexpr int kRows = kRowTiles * 16, kCols = kColTiles * 8;
  constexpr int kDepth = stream_depth(kTile, kRowTiles, kColTiles);  // chunks in flight per warp
  constexpr int kChunkBytes = kTile == Tile::bf16 ? kRecordCols * 2 : tile_info(kTile).bytes;
  extern __shared__ float reduce[];
  __shared__ int pair_list[kInlinePairs];
  pdl_trigger();
  const int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, c = lane & 3;
  const int block_rows = a.swiglu ? 16 : kRows;
  const StreamWork work = resolve_work(a, block_rows, kCols, pair_list);
  if (work.count <= 0 || work.block * block_rows >= work.w.out) return;
  const int n_chunks = work.w.cols / kRecordCols;

  // Row tiles of this block; the second is the up half with swiglu, else the next 16 rows. Pointers to this warp's first chunk.
  const int last_tile = (work.w.out + 15) / 16 - 1;
  const uint8_t* start[kRowTiles];
  int64_t next[kRowTiles];
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    const int tile = a.swiglu ? work.block : min(work.block * kRowTiles + r, last_tile);
    const uint8_t* matrix = (a.swiglu && r == 1 ? work.up : work.w.data) + work.matrix * work.w.matrix_bytes;
    next[r] = scales_from(kTile, warp);  // of all chunks of this warp, which are an even number apart
    if constexpr (kTile == Tile::bf16) {
      const int row = min(tile * 16 + g, work.w.out - 1), row8 = min(tile * 16 + g + 8, work.w.out - 1);
      start[r] = matrix + static_cast<int64_t>(row) * work.w.cols * 2 + warp * kChunkBytes;
      next[r] = static_cast<int64_t>(row8 - row) * work.w.cols;
    } else {
      start[r] = matrix + (static_cast<int64_t>(tile) * n_chunks + warp) * kChunkBytes;
    }
  }
  // A ring of kDepth chunks per warp: each slot is loaded again as soon as it has been used.
  Frag<kTile> w[kDepth][kRowTiles];
  for (int done = 0; done < work.count; done += kCols) {
    const uint8_t* from[kRowTiles];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      from[r] = start[r];
#pragma unroll
      for (int u = 0; u < kDepth; ++u) w[u][r].load(warp + u * kWarps < n_chunks, from[r] + u * kWarps * kChunkBytes, lane, next[r]);
    }
    if (!work.late && done == 0) pdl_wait();
    const bf16* x[kColTiles];
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
      int row = work.begin + min(done + n * 8 + g, work.count - 1);
      if (work.list != nullptr) row = work.list[row];
      if (work.by_token) row /= a.moe.top_k;
      x[n] = work.x + row * work.x_stride + warp * kRecordCols + c * (kTile == Tile::q6g16 ? 4 : 8);
    }
    // Where registers allow it x is asked for as early as the weights: its parts come from L2, one trip after another otherwise.
    constexpr bool kAhead = kRowTiles == 1 && kColTiles == 1 && kWarps == 8;
    uint4 ahead[kAhead ? kDepth : 1][2];
    const auto ask = [&](int u, int chunk, int col) {
      if (chunk < n_chunks) ahead[u][0] = stream_input<kTile>(x[0] + col, 0), ahead[u][1] = stream_input<kTile>(x[0] + col, 1);
    };
    if constexpr (kAhead)
#pragma unroll
      for (int u = 0; u < kDepth; ++u) ask(u, warp + u * kWarps, u * kWarps * kRecordCols);
    float acc[kRowTiles][kColTiles][4] = {};
    for (int first = warp; first < n_chunks; first += kDepth * kWarps) {
#pragma unroll
      for (int u = 0; u < kDepth; ++u) {
        const auto input = [&](int n, int s) {
          if constexpr (kAhead) return ahead[u][s];
          return stream_input<kTile>(x[n] + u * kWarps * kRecordCols, s);
        };
        if (first + u * kWarps < n_chunks) stream_chunk<kTile, kRowTiles, kColTiles>(w[u], input, acc);
        if constexpr (kAhead) ask(u, first + (kDepth + u) * kWarps, (kDepth + u) * kWarps * kRecordCols);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
          w[u][r].load(first + (kDepth + u) * kWarps < n_chunks, from[r] + (kDepth + u) * kWarps * kChunkBytes, lane, next[r]);
      }
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) from[r] += kDepth * kWarps * kChunkBytes;
#pragma unroll
      for (int n = 0; n < kColTiles; ++n) x[n] += kDepth * kWarps * kRecordCols;
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
    stream_store<kRowTiles, kColTiles, kWarps>(a, work, done, reduce);
    if (a.tail > 0 && work.block == 0) {  // heads: what follows the columns of each head, 8 numbers at a time
      const int units = a.tail / 8;
      for (int i = static_cast<int>(threadIdx.x); i < units * work.count; i += kWarps * 32) {
        const int row = work.begin + i / units, j = i % units * 8;
        *reinterpret_cast<uint4*>(static_cast<bf16*>(work.y) + row * work.y_stride + a.w.out + j) =
            load16(work.x + row * work.x_stride + a.w.in + j);
      }
    }
  }
}

template <Tile kTile, int kRowTiles, int kColTiles, int kWarps>
cudaError_t launch_stream_instance(GemmArgs a, cudaStream_t stream) {
  constexpr int kCols = kColTiles * 8;
  const int rows = a.swiglu ? 16 : kRowTiles * 16, blocks = ceil_div(a.w.out, rows);
  dim3 grid(static_cast<unsigned>(blocks));
  switch (a.rowing) {
    case Rowing::moe_inline: grid.y = static_cast<unsigned>(a.moe.n_pairs); break;
    case Rowing::moe_tiles: grid.y = static_cast<unsigned>(a.moe.max_tiles); break;
    case Rowing::heads: grid.y = static_cast<unsigned>(a.n_heads); [[fallthrough]];
    case Rowing::dense: grid.z = static_cast<unsigned>(ceil_div(a.n_rows, kCols)); break;
  }
  // The shared expert's blocks come first: they do not wait for the routing, and with more columns they take longer.
  if (a.shared_w.data != nullptr) a.shared_slots = ceil_div(a.n_rows, kCols) * ceil_div(ceil_div(a.shared_w.out, rows), blocks);
  grid.y += static_cast<unsigned>(a.shared_slots);
  const size_t shared = sizeof(float) * kWarps * kCols * (kRowTiles * 16 + 1);
  return launch(stream_kernel<kTile, kRowTiles, kColTiles, kWarps>, grid, kWarps * 32, shared, stream, a);
}
template <Tile kTile>
cudaError_t launch_stream_format(const GemmArgs& a, int col_tiles, cudaStream_t stream) {
  const bool moe = a.rowing == Rowing::moe_inline || a.rowing == Rowing::moe_tiles;
  const bool two = a.swiglu || a.w.out >= 8192 || (moe && a.w.out >= 1024) || a.w.cols <= 256;
  if (two && col_tiles == 1 && ((a.rowing == Rowing::moe_inline && a.moe.n_pairs <= 8) || (a.swiglu && !moe && a.w.out <= 4096)))
    return launch_stream_instance<kTile, 2, 1, 8>(a, stream);
  switch (col_tiles) {
    case 1: return two ? launch_stream_instance<kTile, 2, 1, 4>(a, stream) : launch_stream_instance<kTile, 1, 1, 8>(a, stream);
    case 2: return two ? launch_stream_instance<kTile, 2, 2, 4>(a, stream) : launch_stream_instance<kTile, 1, 2, 8>(a, stream);
    case 3: return two ? launch_stream_instance<kTile, 2, 3, 4>(a, stream) : launch_stream_instance<kTile, 1, 3, 8>(a, stream);
    default: return two ? launch_stream_instance<kTile, 2, 4, 4>(a, stream) : launch_stream_instance<kTile, 1, 4, 8>(a, stream);
  }
}

// One per format, each in its own file of inst/.
cudaError_t launch_stream_bf16(const GemmArgs& a, int col_tiles, cudaStream_t stream);
cudaError_t launch_stream_q4g32(const GemmArgs& a, int col_tiles, cudaStream_t stream);
cudaError_t launch_stream_q4g64(const GemmArgs& a, int col_tiles, cudaStream_t stream);
cudaError_t launch_stream_q4g128(const GemmArgs& a, int col_tiles, cudaStream_t stream);
cudaError_t launch_stream_q5g32(const GemmArgs& a, int col_tiles, cudaStream_t stream);
cudaError_t launch_stream_q6g16(const GemmArgs& a, int col_tiles, cudaStream_t stream);
cudaError_t launch_stream_q8g32(const GemmArgs& a, int col_tiles, cudaStream_t stream);
cudaError_t launch_stream_f8(const GemmArgs& a, int col_tiles, cudaStream_t stream);

}  // namespace cachalot::cuda
