// Packing on the device: raw blocks of one matrix into the records of layout.h.
#include "cuda/formats.cuh"
#include "cuda/kernels.h"

namespace cachalot::cuda {
namespace {

constexpr int kFp8Side = 128;  // of the square blocks that share a scale

__device__ float f16_at(const uint8_t* p) {
  const __half_raw raw{static_cast<unsigned short>(p[0] | (p[1] << 8))};
  return __half2float(__half(raw));
}
__device__ void k_scale(const uint8_t* scales, int j, int& scale, int& min) {
  if (j < 4) {
    scale = scales[j] & 63;
    min = scales[j + 4] & 63;
  } else {
    scale = (scales[j + 4] & 15) | ((scales[j - 4] >> 6) << 4);
    min = (scales[j + 4] >> 4) | ((scales[j] >> 6) << 4);
  }
}

// The stored code of (row, k), unsigned, or as a signed byte's bits.
__device__ int code_of(const PackArgs& a, int row, int k) {
  const uint8_t* data = a.data + row * a.row_bytes;
  switch (a.from) {
    case PackFrom::q4_0:
    case PackFrom::q4_1: {
      const bool one = a.from == PackFrom::q4_1;
      const uint8_t* block = data + (k / 32) * (one ? 20 : 18) + (one ? 4 : 2);
      return (block[k % 16] >> (k % 32 >= 16 ? 4 : 0)) & 15;
    }
    case PackFrom::q5_0: {
      const uint8_t* block = data + (k / 32) * 22;
      return ((block[6 + k % 16] >> (k % 32 >= 16 ? 4 : 0)) & 15) | (((block[2 + (k % 32) / 8] >> (k % 8)) & 1) << 4);
    }
    case PackFrom::q8_0: return data[(k / 32) * 34 + 2 + k % 32];
    case PackFrom::q4_k: return (data[(k / 256) * 144 + 16 + (k % 256) / 64 * 32 + k % 32] >> (k % 64 >= 32 ? 4 : 0)) & 15;
    case PackFrom::q6_k: {
      const uint8_t* block = data + (k / 256) * 210;
      const int half = (k % 256) / 128, quarter = (k % 128) / 32, l = k % 32;
      const int low = (block[64 * half + l + (quarter & 1) * 32] >> (quarter >= 2 ? 4 : 0)) & 15;
      return low | (((block[128 + 32 * half + l] >> (2 * quarter)) & 3) << 4);
    }
    case PackFrom::int4_planar: return (data[k / 2] >> (4 * (k % 2))) & 15;
    case PackFrom::fp8_block: return data[k];
    default: return 0;
  }
}
// Scale and minimum of the group that holds (row, k).
__device__ float2 scale_of(const PackArgs& a, int row, int k) {
  const uint8_t* data = a.data + row * a.row_bytes;
  switch (a.from) {
    case PackFrom::q4_0: {
      const float d = f16_at(data + (k / 32) * 18);
      return make_float2(d, 8.0f * d);
    }
    case PackFrom::q4_1: return make_float2(f16_at(data + (k / 32) * 20), -f16_at(data + (k / 32) * 20 + 2));
    case PackFrom::q5_0: return make_float2(f16_at(data + (k / 32) * 22), 0.0f);
    case PackFrom::q8_0: return make_float2(f16_at(data + (k / 32) * 34), 0.0f);
    case PackFrom::q4_k: {
      const uint8_t* block = data + (k / 256) * 144;
      int scale = 0, min = 0;
      k_scale(block + 4, (k % 256) / 32, scale, min);
      return make_float2(f16_at(block) * static_cast<float>(scale), f16_at(block + 2) * static_cast<float>(min));
    }
    case PackFrom::q6_k: {
      const uint8_t* block = data + (k / 256) * 210;
      return make_float2(f16_at(block + 208) * static_cast<float>(static_cast<int8_t>(block[192 + (k % 256) / 16])), 0.0f);
    }
    case PackFrom::int4_planar: {
      const int64_t at = static_cast<int64_t>(row) * (a.in / a.group) + k / a.group;
      const float scale = f16_at(a.scales + 2 * at);
      return make_float2(scale, scale * static_cast<float>(a.zeros[at]));
    }
    case PackFrom::fp8_block:
      return make_float2(reinterpret_cast<const float*>(
                             a.scales)[static_cast<int64_t>(row / kFp8Side) * ((a.in + kFp8Side - 1) / kFp8Side) + k / kFp8Side],
                         0.0f);
    default: return make_float2(0.0f, 0.0f);
  }
}

// A warp per record; rows and columns beyond the matrix get scale 0 and a code that means 0.
__global__ void pack_kernel(const PackArgs a) {
  const int lane = static_cast<int>(threadIdx.x), g = lane >> 2, c = lane & 3, n_chunks = (a.in + kRecordCols - 1) / kRecordCols;
  const TileInfo t = tile_info(a.tile);
  const int row_tile = static_cast<int>(blockIdx.y), chunk = static_cast<int>(blockIdx.x);
  uint8_t* record = a.to + (static_cast<int64_t>(row_tile) * n_chunks + chunk) * t.bytes;
  const bool q6 = a.tile == Tile::q6g16;
  uint32_t words[8] = {}, high[2] = {};
  for (int s = 0; s < 2; ++s)
    for (int h = 0; h < 2; ++h)
      for (int j = 0; j < 8; ++j) {
        const int row = row_tile * 16 + g + 8 * h, k = chunk * 64 + 32 * s + step_column(q6, c, j), i = j >> 1, odd = j & 1;
        const auto code = static_cast<uint32_t>(row < a.out && k < a.in ? code_of(a, row, k) : t.zero);
        if (t.code_bits == 8) {
          words[4 * s + 2 * h + (j >> 2)] |= code << (8 * (((j & 1) << 1) | ((j >> 1) & 1)));
        } else {
          words[2 * s + h] |= (code & 15u) << (4 * (i + 4 * odd));
          if (t.code_bits == 5) high[0] |= (code >> 4) << (high_bit(false, 2 * s + h, i) + 16 * odd);
          if (t.code_bits == 6) high[s] |= (code >> 4) << (high_bit(true, h, i) + 16 * odd);
        }
      }
  for (int i = 0; i < (t.code_bits == 8 ? 8 : 4); ++i) reinterpret_cast<uint32_t*>(record + 512 * (i / 4))[lane * 4 + i % 4] = words[i];
  if (t.code_bits == 5) reinterpret_cast<uint32_t*>(record + t.high_at)[lane] = high[0];
  if (t.code_bits == 6) {
    reinterpret_cast<uint32_t*>(record + t.high_at)[2 * lane] = high[0];
    reinterpret_cast<uint32_t*>(record + t.high_at)[2 * lane + 1] = high[1];
  }
  uint8_t* scales = record + t.scale_at;
  if (a.tile == Tile::f8) {
    if (lane == 0) *reinterpret_cast<float*>(scales) = scale_of(a, row_tile * 16, chunk * 64).x;
    return;
  }
  if (a.tile == Tile::q4g128) {
    const int row = row_tile * 16 + lane + 8 * (chunk % 2);
    const float2 v = lane < 8 && row < a.out ? scale_of(a, row, chunk / 2 * 128) : make_float2(0.0f, 0.0f);
    if (lane < 8) reinterpret_cast<__half2*>(scales)[lane] = __floats2half2_rn(v.x, v.y);
    return;
  }
  const int groups = 64 / t.group, numbers = t.has_min ? 2 : 1;
  for (int i = lane; i < 16 * groups; i += 32) {
    const int group = i % groups, h = (i / groups) & 1, gg = i / groups / 2, row = row_tile * 16 + gg + 8 * h,
              k = chunk * 64 + group * t.group;
    const float2 v = row < a.out && k < a.in ? scale_of(a, row, k) : make_float2(0.0f, 0.0f);
    __half* to = reinterpret_cast<__half*>(scales) + i * numbers;
    to[0] = __float2half(v.x);
    if (t.has_min) to[1] = __float2half(v.y);
  }
}

// One instruction; left to itself the compiler made four of some.
__device__ __forceinline__ void store16(void* p, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// A warp per record: lane 4g + c writes columns 8c .. 8c + 7 of each step in rows g and g + 8.
template <Tile kTile>
__global__ __launch_bounds__(256) void unpack_kernel(const uint8_t* matrix, bf16* to, int out, int cols) {
  pdl_trigger();
  pdl_wait();
  const int warp = static_cast<int>(blockIdx.x) * 8 + (static_cast<int>(threadIdx.x) >> 5), lane = static_cast<int>(threadIdx.x) & 31;
  const int g = lane >> 2, c = lane & 3, n_chunks = cols / kRecordCols;
  if (warp >= (out + 15) / 16 * n_chunks) return;
  Frag<kTile> stored;
  stored.load(true, matrix + static_cast<int64_t>(warp) * tile_info(kTile).bytes, lane, scales_from(kTile, warp));
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    uint32_t a[2][4];
    stored.weights(s, a);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp / n_chunks * 16 + g + 8 * h;
      if (row >= out) continue;
      bf16* at = to + static_cast<int64_t>(row) * cols + warp % n_chunks * kRecordCols + 32 * s;
      if constexpr (kTile == Tile::q6g16) {
        *reinterpret_cast<uint2*>(at + 4 * c) = make_uint2(a[0][h], a[0][2 + h]);
        *reinterpret_cast<uint2*>(at + 16 + 4 * c) = make_uint2(a[1][h], a[1][2 + h]);
      } else {
        store16(at + 8 * c, a[0][h], a[0][2 + h], a[1][h], a[1][2 + h]);
      }
    }
  }
}

template <Tile kTile>
cudaError_t launch_unpack_form(const Segment& w, int matrix, void* to, cudaStream_t stream) {
  const int records = ceil_div(w.out, kRecordRows) * (w.cols / kRecordCols);
  return launch(unpack_kernel<kTile>, dim3(static_cast<unsigned>(ceil_div(records, 8))), 256, 0, stream, w.data + matrix * w.matrix_bytes,
                static_cast<bf16*>(to), w.out, w.cols);
}

}  // namespace

cudaError_t launch_pack(const PackArgs& a, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(a.in, kRecordCols)), static_cast<unsigned>(ceil_div(a.out, kRecordRows)));
  pack_kernel<<<grid, 32, 0, stream>>>(a);
  return cudaGetLastError();
}

cudaError_t launch_unpack(const Segment& w, int matrix, void* to, cudaStream_t stream) {
  switch (w.tile) {
    case Tile::q4g32: return launch_unpack_form<Tile::q4g32>(w, matrix, to, stream);
    case Tile::q4g64: return launch_unpack_form<Tile::q4g64>(w, matrix, to, stream);
    case Tile::q4g128: return launch_unpack_form<Tile::q4g128>(w, matrix, to, stream);
    case Tile::q5g32: return launch_unpack_form<Tile::q5g32>(w, matrix, to, stream);
    case Tile::q6g16: return launch_unpack_form<Tile::q6g16>(w, matrix, to, stream);
    case Tile::q8g32: return launch_unpack_form<Tile::q8g32>(w, matrix, to, stream);
    case Tile::f8: return launch_unpack_form<Tile::f8>(w, matrix, to, stream);
    case Tile::f32:
    case Tile::bf16: break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace cachalot::cuda
