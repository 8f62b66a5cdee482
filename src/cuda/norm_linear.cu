// For one row a norm is a launch and a trip to memory, so the product that follows makes it: every block reads the whole row, a warp the
// columns that it multiplies, and the norm's factor is applied to the product. A block takes 16 rows of W, its 8 warps the 64-column chunks
// in turn, all of which are asked for before the kernels before have ended.
#include "cuda/norm_linear.h"

#include <type_traits>

#include "cuda/gemm_stream.cuh"

namespace cachalot::cuda {
namespace {

constexpr int kWarps = 8, kEach = 4, kMostCols = kWarps * kEach * kRecordCols;  // chunks of a warp

template <Tile kTile>
__global__ __launch_bounds__(kWarps * 32, 2) void norm_linear_kernel(const __grid_constant__ NormLinearArgs a) {
  constexpr bool kQ6 = kTile == Tile::q6g16;
  __shared__ __align__(16) bf16 x[kMostCols];
  __shared__ float products[kWarps][kRecordRows], squares[kWarps];
  pdl_trigger();
  const int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, c = lane & 3;
  const int tile = static_cast<int>(blockIdx.x), n_chunks = a.w.cols / kRecordCols;
  const uint8_t* matrix = a.w.data + a.matrix * a.w.matrix_bytes;
  Frag<kTile> w[kEach][1];
  float2 norm[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int chunk = i * kWarps + warp;
    const bool there = chunk < n_chunks;
    w[i][0].load(there, matrix + (static_cast<int64_t>(tile) * n_chunks + chunk) * tile_info(kTile).bytes, lane, scales_from(kTile, chunk));
    if (there) norm[i] = __ldg(reinterpret_cast<const float2*>(a.norm + chunk * kRecordCols) + lane);
  }
  pdl_wait();
  float2 v[kEach];
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = (i * kWarps + warp) * kRecordCols + 2 * lane;
    if (at >= a.w.cols) break;
    const uint32_t delta = *reinterpret_cast<const uint32_t*>(static_cast<const bf16*>(a.delta) + at);
    v[i] = *reinterpret_cast<const float2*>(a.residual + at);
    v[i].x += __uint_as_float(delta << 16), v[i].y += __uint_as_float(delta & 0xffff0000u);
  }
  float acc[1][1][4] = {};
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int chunk = i * kWarps + warp, at = chunk * kRecordCols + 2 * lane;
    if (chunk >= n_chunks) break;
    square += v[i].x * v[i].x + v[i].y * v[i].y;
    *reinterpret_cast<uint32_t*>(x + at) = pack_bf16(v[i].x * norm[i].x, v[i].y * norm[i].y);
    if (chunk == tile && a.sum != nullptr) *reinterpret_cast<float2*>(a.sum + at) = v[i];
    __syncwarp();
    const auto input = [&](int, int s) {
      const bf16* from = x + chunk * kRecordCols + 32 * s + c * (kQ6 ? 4 : 8);
      if constexpr (!kQ6) return *reinterpret_cast<const uint4*>(from);
      const uint2 low = *reinterpret_cast<const uint2*>(from), high = *reinterpret_cast<const uint2*>(from + 16);
      return make_uint4(low.x, low.y, high.x, high.y);
    };
    stream_chunk<kTile, 1, 1>(w[i], input, acc);  // every column of the mma is the same row
  }
  square = warp_sum(square);
  if (lane == 0) squares[warp] = square;
  if (c == 0) products[warp][g] = acc[0][0][0], products[warp][g + 8] = acc[0][0][2];
  __syncthreads();
  const int r = static_cast<int>(threadIdx.x), out = tile * kRecordRows + r;
  if (r >= kRecordRows || out >= a.w.out) return;
  float sum = 0.0f, product = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += squares[i], product += products[i][r];
  product *= rsqrtf(sum / static_cast<float>(a.w.cols) + a.eps);
  static_cast<bf16*>(a.y)[out] = from_f32<bf16>(a.bias != nullptr ? product + a.bias[out] : product);
}

template <typename F>
cudaError_t with_tile(Tile tile, F&& f) {
  switch (tile) {
    case Tile::q4g32: return f(std::integral_constant<Tile, Tile::q4g32>{});
    case Tile::q4g64: return f(std::integral_constant<Tile, Tile::q4g64>{});
    case Tile::q4g128: return f(std::integral_constant<Tile, Tile::q4g128>{});
    case Tile::q5g32: return f(std::integral_constant<Tile, Tile::q5g32>{});
    case Tile::q6g16: return f(std::integral_constant<Tile, Tile::q6g16>{});
    case Tile::q8g32: return f(std::integral_constant<Tile, Tile::q8g32>{});
    case Tile::f8: return f(std::integral_constant<Tile, Tile::f8>{});
    case Tile::f32:
    case Tile::bf16: break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace

bool norm_linear_supports(const NormLinearArgs& a) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  // The first blocks write a chunk of the sum each. With bf16 weights, whose reading takes longer than the norm, the step became slower.
  return is_record(a.w.tile) && a.w.in == a.w.cols && a.w.cols <= kMostCols && a.w.out * kRecordCols >= a.w.cols * kRecordRows &&
         aligned(a.residual) && aligned(a.delta) && aligned(a.sum) && aligned(a.norm);
}

cudaError_t launch_norm_linear(const NormLinearArgs& a, cudaStream_t stream) {
  return with_tile(a.w.tile, [&](auto tile) {
    return launch(norm_linear_kernel<tile.value>, dim3(static_cast<unsigned>(ceil_div(a.w.out, kRecordRows))), kWarps * 32, 0, stream, a);
  });
}

}  // namespace cachalot::cuda
