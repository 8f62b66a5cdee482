// For few rows every launch is one trip to memory and back, so the work before and after attention is joined to the products beside it. The
// weights of both products are read before the kernels before have ended, and once for all rows.
#include "cuda/mla_few.h"

#include <cooperative_groups.h>

#include <type_traits>
#include <utility>

#include "cuda/gemm_stream.cuh"
#include "cuda/mla_decode.cuh"
#include "cuda/mla_prologue.cuh"

namespace cachalot::cuda {
namespace {

constexpr int kNope = kMlaFewHead, kTail = kMlaK - kMlaV, kValue = kMlaFewHead, kParts = 8, kThreads = kPrologueThreads,
              kWarps = kThreads / 32;

// ---- one row: products by a warp's lanes, and every block of a head sums the parts of the context itself. In a whole step of one row this
// takes a little less time than the kernels below.

__device__ __forceinline__ void unpack8(const uint4& v, float (&to)[8]) {
  const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = __uint_as_float((i & 1) == 0 ? pairs[i / 2] << 16 : pairs[i / 2] & 0xffff0000u);
}
__device__ __forceinline__ float dot8(const uint4& w, const float (&x)[8], float sum) {
  float v[8];
  unpack8(w, v);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(v[i], x[i], sum);
  return sum;
}
__device__ __forceinline__ uint4 weights16(const bf16* p) {
  uint4 v;
  load_stream(v, p, true);
  return v;
}

// Where number `col` of a head's absorbed query lies within its row.
__device__ __forceinline__ int place_of(bool as_operands, int head, int col) {
  return as_operands ? operand_at(head, col) : head * kMlaK + col;
}

// A block per part of a head's rows of W_UK, then one for the row of the cache. absorbed[h] = [W_UK,h q_n | rotated q_r].
constexpr int kUkRows = kMlaV / kParts, kUkEach = kUkRows / kWarps / 2;  // rows per block; pairs of rows per warp
template <typename Kv>
__global__ __launch_bounds__(kThreads) void absorb_one_kernel(const __grid_constant__ PrologueArgs a, const bf16* uk, bf16* absorbed,
                                                              bool as_operands) {
  __shared__ float shared[33];
  pdl_trigger();
  const int block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x), lane = thread & 31;
  if (block >= a.heads * kParts) {
    const RowPlace place(a, 0);
    pdl_wait();
    return prologue_row<bf16, Kv>(a, 0, place, shared);
  }
  const int head = block / kParts, row0 = block % kParts * kUkRows + (thread >> 5) * 2 * kUkEach, col = (lane & 15) * 8;
  uint4 w[kUkEach];
#pragma unroll
  for (int i = 0; i < kUkEach; ++i) w[i] = weights16(uk + (static_cast<int64_t>(head) * kMlaV + row0 + 2 * i + (lane >> 4)) * kNope + col);
  const Turn turn(a, 0);
  pdl_wait();
  const bf16* q = static_cast<const bf16*>(a.q.data) + head * (kNope + kTail);
  const auto place = [&](int col) { return place_of(as_operands, head, col); };
  float x[8], sum[kUkEach];
  unpack8(load16(q + col), x);
#pragma unroll
  for (int i = 0; i < kUkEach; ++i) {
    sum[i] = dot8(w[i], x, 0.0f);
#pragma unroll
    for (int m = 8; m > 0; m >>= 1) sum[i] += __shfl_xor_sync(~0u, sum[i], m);
    if ((lane & 15) == i) absorbed[place(row0 + 2 * i + (lane >> 4))] = from_f32<bf16>(sum[i]);
  }
  if (block % kParts == 0 && thread < kTail / 2) turn.pair(q + kNope, absorbed, thread, [&](int i) { return place(kMlaV + i); });
}

// A block per part of a head's rows of W_UV. The parts of the context are weighted by their shares of the softmax's sum.
constexpr int kUvRows = kValue / kParts, kUvEach = kUvRows / kWarps, kInFlight = 16;
__global__ __launch_bounds__(kThreads) void combine_uv_one_kernel(const __grid_constant__ AttendArgs a, const bf16* uv, bf16* context) {
  __shared__ __align__(16) float result[kMlaV];
  pdl_trigger();
  const int head = static_cast<int>(blockIdx.x) / kParts, thread = static_cast<int>(threadIdx.x), lane = thread & 31,
            out = static_cast<int>(blockIdx.x) % kParts * kUvRows + (thread >> 5) * kUvEach;
  uint4 w[kUvEach][2];
#pragma unroll
  for (int i = 0; i < kUvEach; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) w[i][j] = weights16(uv + (static_cast<int64_t>(head) * kValue + out + i) * kMlaV + j * 256 + lane * 8);
  pdl_wait();
  const float2* from = reinterpret_cast<const float2*>(a.partial + static_cast<int64_t>(head) * kMlaV) + thread;
  const float* lse = a.partial + static_cast<int64_t>(a.n_splits) * a.heads * kMlaV + head;
  float2 part[kInFlight], v = make_float2(0.0f, 0.0f);
  const auto load = [&](int first) {
#pragma unroll
    for (int s = 0; s < kInFlight; ++s)
      if (first + s < a.n_splits) part[s] = __ldcg(from + static_cast<int64_t>(first + s) * a.heads * (kMlaV / 2));
  };
  const auto lse_of = [&](int s) { return s < a.n_splits ? __ldcg(lse + s * a.heads) : -INFINITY; };
  const float x = lse_of(lane), y = lse_of(lane + 32);
  load(0);
  const float largest = warp_max(fmaxf(x, y));
  const float wx = x == -INFINITY ? 0.0f : exp2f(x - largest), wy = y == -INFINITY ? 0.0f : exp2f(y - largest), total = warp_sum(wx + wy);
  const float factor = total > 0.0f ? 1.0f / total : 0.0f;
  for (int first = 0; first < a.n_splits; first += kInFlight) {
    if (first > 0) load(first);
#pragma unroll
    for (int s = 0; s < kInFlight; ++s) {
      const float weight = __shfl_sync(~0u, first + s < 32 ? wx : wy, (first + s) & 31);
      const bool there = weight != 0.0f;  // otherwise nothing has been written
      v.x = fmaf(weight, there ? part[s].x : 0.0f, v.x), v.y = fmaf(weight, there ? part[s].y : 0.0f, v.y);
    }
  }
  reinterpret_cast<float2*>(result)[thread] = make_float2(v.x * factor, v.y * factor);
  __syncthreads();
  float sum[kUvEach] = {};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float c[8];
#pragma unroll
    for (int i = 0; i < 8; i += 4) *reinterpret_cast<float4*>(c + i) = *reinterpret_cast<const float4*>(result + j * 256 + lane * 8 + i);
#pragma unroll
    for (int i = 0; i < kUvEach; ++i) sum[i] = dot8(w[i][j], c, sum[i]);
  }
#pragma unroll
  for (int i = 0; i < kUvEach; ++i) {
    sum[i] = warp_sum(sum[i]);
    if (lane == i) context[head * kValue + out + i] = from_f32<bf16>(sum[i]);
  }
}

// ---- several rows: on the tensor cores, and the parts are summed once

// As absorb_one_kernel, with a block per row of the cache. A warp takes 16 rows of W_UK and half of their columns, and rotates a row's
// query.
constexpr int kUkTiles = kUkRows / 16, kHalves = kWarps / kUkTiles;
static_assert(kHalves * kRecordCols == kNope && kTail == 64 && kParts * kWarps >= kMlaFewRows);
template <typename Kv, int kColTiles>
__global__ __launch_bounds__(kThreads) void absorb_kernel(const __grid_constant__ PrologueArgs a, const bf16* uk, bf16* absorbed,
                                                          int64_t stride, bool as_operands) {
  constexpr int kCols = kColTiles * 8, kPitch = kUkRows + 4;
  __shared__ float reduce[33];
  __shared__ __align__(8) float sums[kHalves][kCols][kPitch];
  constexpr bool kLate = kColTiles == 1;  // measured: whether what follows attention may wait beside what comes before
  if (!kLate) pdl_trigger();
  const int block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31;
  if (block >= a.heads * kParts) {
    const int t = block - a.heads * kParts;
    const RowPlace place(a, t);
    pdl_wait();
    if (kLate) pdl_trigger();
    return prologue_row<bf16, Kv>(a, t, place, reduce);
  }
  const int head = block / kParts, part = block % kParts, tile = warp % kUkTiles, half = warp / kUkTiles, g = lane >> 2, c = lane & 3,
            n_rows = a.q.rows, turned = part + kParts * warp;
  const int64_t row0 = static_cast<int64_t>(head) * kMlaV + part * kUkRows + tile * 16;
  Frag<Tile::bf16> w[1];
  w[0].load(true, reinterpret_cast<const uint8_t*>(uk + (row0 + g) * kNope + half * kRecordCols), lane, 8 * kNope);
  const Turn turn(a, min(turned, n_rows - 1));
  pdl_wait();
  if (kLate) pdl_trigger();
  const bf16* q = static_cast<const bf16*>(a.q.data) + head * (kNope + kTail);
  const auto place = [&](int col) { return place_of(as_operands, head, col); };
  uint4 x[kColTiles][2];
#pragma unroll
  for (int n = 0; n < kColTiles; ++n)
#pragma unroll
    for (int s = 0; s < 2; ++s) x[n][s] = load16(q + min(n * 8 + g, n_rows - 1) * a.q.stride + half * kRecordCols + s * 32 + c * 8);
  if (turned < n_rows)
    turn.pair(q + turned * a.q.stride + kNope, absorbed + turned * stride, lane, [&](int i) { return place(kMlaV + i); });
  float acc[1][kColTiles][4] = {};
  stream_chunk<Tile::bf16>(
      w, [&](int n, int s) { return x[n][s]; }, acc);
#pragma unroll
  for (int n = 0; n < kColTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[half][n * 8 + 2 * c + (i & 1)][tile * 16 + g + 8 * (i >> 1)] = acc[0][n][i];
  __syncthreads();
  for (int t = warp; t < n_rows; t += kWarps) {
    const float2 u = *reinterpret_cast<const float2*>(&sums[0][t][2 * lane]), v = *reinterpret_cast<const float2*>(&sums[1][t][2 * lane]);
    *reinterpret_cast<uint32_t*>(absorbed + t * stride + place(part * kUkRows + 2 * lane)) = pack_bf16(u.x + v.x, u.y + v.y);
  }
}

// A cluster of kParts blocks per head. A block takes 64 numbers of the latent: their sums over the parts of the context, weighted by the
// parts' shares of the softmax's sum, times these columns of W_UV, a warp per 16 outputs. Then each block adds up its peers' products for
// 16 outputs.
constexpr int kUvCols = kMlaV / kParts;
static_assert(kUvCols == kRecordCols && kUvRows == 16 && kWarps == kParts);
template <int kColTiles, bool kHalf>
__global__ __launch_bounds__(kThreads) void combine_uv_kernel(const __grid_constant__ AttendArgs a, const bf16* uv, bf16* context,
                                                              int64_t stride) {
#if __CUDA_ARCH__ >= 900
  constexpr int kCols = kColTiles * 8, kPitch = kUvCols + 32, kLoads = kMaxSplits / kInFlight;
  __shared__ __align__(16) bf16 sums[kCols][kPitch];
  __shared__ float products[kParts][kCols][kUvRows];
  const auto cluster = cooperative_groups::this_cluster();
  auto started = cluster.barrier_arrive();
  const int head = static_cast<int>(blockIdx.x) / kParts, part = static_cast<int>(cluster.block_rank()),
            thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31, g = lane >> 2, c = lane & 3;
  Frag<Tile::bf16> w[1];
  const int64_t out = static_cast<int64_t>(head) * kValue + warp * 16 + g;
  w[0].load(true, reinterpret_cast<const uint8_t*>(uv + out * kMlaV + part * kUvCols), lane, 8 * kMlaV);
  pdl_wait();
  pdl_trigger();
  const int64_t step = static_cast<int64_t>(a.n_rows) * a.heads;
  const float* all_lse = a.partial + a.n_splits * step * kMlaV;
  // Half a warp per row: the lane's numbers are 4 own, ..., and it knows the weights of parts own, own + 16, ... Up to 8 rows the other
  // half takes every second part.
  constexpr int kHalfWarps = kColTiles == 1 ? 2 : 1, kEach = kInFlight / kHalfWarps;
  const int own = lane & 15, other = lane >> 4;
  for (int base = 2 / kHalfWarps * warp; base < a.n_rows; base += 2 / kHalfWarps * kWarps) {
    const int row = kHalfWarps == 1 ? base + other : base, there = min(row, a.n_rows - 1), part0 = kHalfWarps == 1 ? 0 : other;
    const int64_t at = static_cast<int64_t>(there) * a.heads + head;
    using Four = std::conditional_t<kHalf, uint2, float4>;
    const Four* from = reinterpret_cast<const Four*>(a.partial) + (at * kMlaV + part * kUvCols) / 4 + own;
    Four v[kEach];
    const auto load = [&](int first) {
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (const int s = first + part0 + kHalfWarps * i; s < a.n_splits) v[i] = __ldcg(from + s * step * (kMlaV / 4));
    };
    load(0);
    float weight[kLoads], largest = -INFINITY, total = 0.0f;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int s = j * kInFlight + own;
      weight[j] = s < a.n_splits ? __ldcg(all_lse + s * step + at) : -INFINITY;
      largest = fmaxf(largest, weight[j]);
    }
#pragma unroll
    for (int m = 8; m > 0; m >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, m));
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      weight[j] = weight[j] == -INFINITY ? 0.0f : exp2f(weight[j] - largest);
      total += weight[j];
    }
#pragma unroll
    for (int m = 8; m > 0; m >>= 1) total += __shfl_xor_sync(~0u, total, m);
    float sum[4] = {};
#pragma unroll 1
    for (int first = 0; first < a.n_splits; first += kInFlight) {
      if (first > 0) load(first);
      float of_these = weight[0];
#pragma unroll
      for (int j = 1; j < kLoads; ++j)
        if (first == j * kInFlight) of_these = weight[j];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float share = __shfl_sync(~0u, of_these, (lane & 16) | (part0 + kHalfWarps * i));
        float of[4];
        if constexpr (kHalf) {
          of[0] = __uint_as_float(v[i].x << 16), of[1] = __uint_as_float(v[i].x & 0xffff0000u);
          of[2] = __uint_as_float(v[i].y << 16), of[3] = __uint_as_float(v[i].y & 0xffff0000u);
        } else {
          of[0] = v[i].x, of[1] = v[i].y, of[2] = v[i].z, of[3] = v[i].w;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[k] = fmaf(share, share != 0.0f ? of[k] : 0.0f, sum[k]);  // otherwise nothing has been written
      }
    }
    const float factor = total > 0.0f ? 1.0f / total : 0.0f;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (kHalfWarps == 2) sum[k] += __shfl_xor_sync(~0u, sum[k], 16);
      sum[k] *= factor;
    }
    if (row < a.n_rows && part0 == 0)
      *reinterpret_cast<uint2*>(&sums[row][4 * own]) = make_uint2(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]));
  }
  __syncthreads();
  float acc[1][kColTiles][4] = {};
  stream_chunk<Tile::bf16>(
      w, [&](int n, int s) { return *reinterpret_cast<const uint4*>(&sums[min(n * 8 + g, a.n_rows - 1)][s * 32 + c * 8]); }, acc);
  cluster.barrier_wait(std::move(started));  // nobody writes to a block that has not begun
  float* to = cluster.map_shared_rank(&products[0][0][0], warp) + part * kCols * kUvRows;
#pragma unroll
  for (int n = 0; n < kColTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (const int t = n * 8 + 2 * c + (i & 1); t < a.n_rows) to[t * kUvRows + g + 8 * (i >> 1)] = acc[0][n][i];
  cluster.sync();
  for (int i = thread; i < a.n_rows * kUvRows; i += kThreads) {
    const int t = i / kUvRows, r = i % kUvRows;
    float v = 0.0f;
#pragma unroll
    for (int p = 0; p < kParts; ++p) v += products[p][t][r];
    context[t * stride + head * kValue + part * kUvRows + r] = from_f32<bf16>(v);
  }
#endif
}

// Calls f with the number of tiles of 8 columns that n rows are.
template <typename F>
cudaError_t with_col_tiles(int n, F&& f) {
  switch (ceil_div(n, 8)) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    case 4: return f(std::integral_constant<int, 4>{});
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

bool mla_few_supports(const MlaFewArgs& a) {
  const PrologueArgs& p = a.prologue;
  return p.q.rows <= kMlaFewRows && p.q.rows == a.attend.n_rows && p.rank == kMlaV && p.rope_dim == kTail && p.head_dim == kNope + kTail &&
         p.q.type == DType::bf16 && p.row.type == DType::bf16 && p.q.stride % 8 == 0 && reinterpret_cast<uintptr_t>(p.q.data) % 16 == 0 &&
         a.context.type == DType::bf16 && a.attend.n_splits > 1;
}

cudaError_t launch_mla_few(const MlaFewArgs& a, MlaKernel kernel, cudaStream_t stream) {
  const PrologueArgs& p = a.prologue;
  const auto blocks = static_cast<unsigned>(p.heads * kParts), rows = static_cast<unsigned>(p.q.rows);
  const auto *uk = static_cast<const bf16*>(a.uk), *uv = static_cast<const bf16*>(a.uv);
  auto *absorbed = static_cast<bf16*>(a.attend.q.data), *context = static_cast<bf16*>(a.context.data);
  return with_col_tiles(p.q.rows, [&](auto col_tiles) {
    cudaError_t error = with_rows(p.format, [&](auto kv) {
      using Kv = decltype(kv);
      return rows == 1 ? launch(absorb_one_kernel<Kv>, dim3(blocks + 1), kThreads, 0, stream, p, uk, absorbed, a.attend.q_as_operands)
                       : launch(absorb_kernel<Kv, col_tiles.value>, dim3(blocks + rows), kThreads, 0, stream, p, uk, absorbed,
                                a.attend.q.stride, a.attend.q_as_operands);
    });
    if (error == cudaSuccess) error = launch_mla_parts(a.attend, kernel, stream);
    if (error != cudaSuccess) return error;
    if (rows == 1) return launch(combine_uv_one_kernel, dim3(blocks), kThreads, 0, stream, a.attend, uv, context);
    return launch_clusters(a.attend.half_parts ? combine_uv_kernel<col_tiles.value, true> : combine_uv_kernel<col_tiles.value, false>,
                           kParts, dim3(blocks), kThreads, 0, stream, a.attend, uv, context, a.context.stride);
  });
}

}  // namespace cachalot::cuda
