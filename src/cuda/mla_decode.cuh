// What the kernels of absorbed MLA share: sizes, and where a block's results go. A block takes some heads of one row and a part (split) of
// its context; with several parts their results are f32 or bf16, divided by their own sums, and combined by a second kernel.
#pragma once

#include "cuda/attend_rows.cuh"

namespace cachalot::cuda {

constexpr int kMlaK = 576, kMlaV = 512;
constexpr float kLog2E = 1.44269504f;

// An fp8 row of 656 bytes: 512 codes, 4 scales, 64 rope numbers in bf16.
constexpr int kFp8Row = 656, kFp8ScalesAt = 512, kFp8RopeAt = 528;
static_assert(kFp8Row == static_cast<int>(fp8_row_bytes(kMlaV, kMlaK - kMlaV)) && kFp8ScalesAt == kMlaV &&
              kFp8RopeAt == kFp8ScalesAt + 4 * (kMlaV / kKvScaleGroup));

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Four codes as two pairs of f16. One instruction for two codes; moving the bits by hand takes seven for four and was a fifth slower.
__device__ __forceinline__ void unpack_codes(uint32_t codes, uint32_t& low, uint32_t& high) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}" : "=r"(low), "=r"(high) : "r"(codes));
}
__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  uint32_t out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
__device__ __forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
// The power of two that brings a number of this magnitude to 1 to 2, and its inverse: f16 has a short range.
__device__ __forceinline__ float2 power_for(float magnitude) {
  const uint32_t exponent = min(max(__float_as_uint(magnitude) >> 23, 1u), 253u);
  return make_float2(__uint_as_float((254u - exponent) << 23), __uint_as_float(exponent << 23));
}
#endif

// Where number `col` of head `head` of a query row lies when it is laid out as mma's A operand: for each kOperandHeads heads steps of 16
// columns, a lane's 8 numbers together.
__device__ __forceinline__ int operand_at(int head, int col) {
  return head / kOperandHeads * (kOperandHeads * kMlaK) + (col / 16 * 32 + head % 8 * 4 + col % 8 / 2) * 8 +
         (head / 8 % 2 + col / 8 % 2 * 2) * 2 + col % 2;
}

struct MlaOutput {
  float *part, *part_lse;  // [heads, 512], and log2 of the sums of exponentials [heads], of this row and part
  bf16* out;               // [heads, 512] of this row

  __device__ __forceinline__ MlaOutput(const AttendArgs& a, int row, int split)
      : part(a.partial + static_cast<int64_t>(split * a.n_rows + row) * a.heads * kMlaV),
        part_lse(a.partial + static_cast<int64_t>(a.n_splits) * a.n_rows * a.heads * kMlaV +
                 static_cast<int64_t>(split * a.n_rows + row) * a.heads),
        out(static_cast<bf16*>(a.out.data) + row * a.out.stride) {}
  // For a part without keys. All threads call.
  __device__ __forceinline__ void nothing(const AttendArgs& a, int head0, int n_heads) const {
    const int thread = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
    if (a.n_splits > 1) {
      for (int h = thread; h < n_heads; h += step)
        if (head0 + h < a.heads) part_lse[head0 + h] = -INFINITY;
    } else {
      for (int i = thread; i < n_heads * kMlaV; i += step)
        if (head0 + i / kMlaV < a.heads) out[head0 * kMlaV + i] = from_f32<bf16>(0.0f);
    }
  }
};

// A block per row, 16 heads and part of the context, with `shared` bytes of shared memory.
template <auto kKernel>
cudaError_t launch_heads16(const AttendArgs& a, int threads, int shared, cudaStream_t stream) {
  static const cudaError_t raised = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (raised != cudaSuccess) return raised;
  const dim3 grid(static_cast<unsigned>(a.n_rows), static_cast<unsigned>(ceil_div(a.heads, 16)), static_cast<unsigned>(a.n_splits));
  return launch(kKernel, grid, threads, static_cast<size_t>(shared), stream, a);
}

// Attention itself, without the sum over its parts.
cudaError_t launch_mla_parts(const AttendArgs& args, MlaKernel kernel, cudaStream_t stream);
cudaError_t launch_mla_heads16(const AttendArgs& args, cudaStream_t stream);
cudaError_t launch_mla_fp8(const AttendArgs& args, cudaStream_t stream);
cudaError_t launch_mla_heads64(const AttendArgs& args, cudaStream_t stream);

}  // namespace cachalot::cuda
