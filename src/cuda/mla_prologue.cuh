// What MLA does with a row between its first projection and attention: rotations, the norm of the latent, the row into its page.
#pragma once

#include "cuda/attention_kernels.h"
#include "cuda/kv_rows.cuh"

namespace cachalot::cuda {

constexpr int kPrologueThreads = 256;

// The rotation of row t. Positions are written by the host between steps, so this may be made before pdl_wait.
struct Turn {
  const float* table;
  int half, position;
  bool interleaved;
  __device__ __forceinline__ Turn(const PrologueArgs& a, int t)
      : half(a.rope_dim / 2), position(a.positions[t]), interleaved(a.interleaved) {
    table = a.cos_sin + (position < 0 ? 0 : position) * a.cos_sin_stride;
  }
  // Pair j of `from`, rotated and rounded to T, to `to`; padding is not rotated.
  template <typename T, typename Out>
  __device__ __forceinline__ void pair(const T* from, Out* to, int j) const {
    const int first = interleaved ? 2 * j : j, second = interleaved ? 2 * j + 1 : j + half;
    const T x = from[first], y = from[second];
    const float cos = table[j], sin = table[half + j];
    const T u = position < 0 ? x : from_f32<T>(to_f32(x) * cos - to_f32(y) * sin);
    const T v = position < 0 ? y : from_f32<T>(to_f32(x) * sin + to_f32(y) * cos);
    to[first] = from_f32<Out>(to_f32(u)), to[second] = from_f32<Out>(to_f32(v));
  }
};

// The latent's norm and the rotated key, within `row` and into its page. A block of kPrologueThreads; `shared` holds 33 floats.
template <typename T, typename Kv>
__device__ __forceinline__ void prologue_row(const PrologueArgs& a, int t, const Turn& turn, float* shared) {
  const int thread = static_cast<int>(threadIdx.x), half = a.rope_dim / 2, slot = a.slots[t];
  T* row = static_cast<T*>(a.row.data) + t * a.row.stride;
  constexpr bool kFp8 = std::is_same_v<Kv, Fp8Row>;
  using Tail = std::conditional_t<kFp8, bf16, Kv>;  // of the rope key in the page
  const int64_t page_bytes = kFp8 ? fp8_bytes(a.rank, a.rank + a.rope_dim) : static_cast<int64_t>(sizeof(Kv)) * (a.rank + a.rope_dim);
  uint8_t* page = slot < 0 ? nullptr : static_cast<uint8_t*>(a.pages) + slot * page_bytes;
  Tail* tail = reinterpret_cast<Tail*>(page + (kFp8 ? fp8_tail_at(a.rank) : static_cast<int>(sizeof(Kv)) * a.rank));
  float sum = 0.0f;
  for (int i = thread; i < a.rank; i += kPrologueThreads) {
    const float v = to_f32(row[i]);
    sum += v * v;
  }
  for (int i = thread; i < half; i += kPrologueThreads) {
    if (page != nullptr) turn.pair(row + a.rank, tail, i);
    turn.pair(row + a.rank, row + a.rank, i);
  }
  const float factor = rsqrtf(block_sum(sum, shared) / static_cast<float>(a.rank) + a.eps);
  if constexpr (kFp8) {
    for (int group = thread >> 5; group * kKvScaleGroup < a.rank; group += kPrologueThreads / 32) {
      const int at = group * kKvScaleGroup + 4 * (thread & 31);
      float v[4] = {};
      if (at < a.rank)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const T rounded = from_f32<T>(to_f32(row[at + i]) * factor * a.norm[at + i]);
          row[at + i] = rounded;
          v[i] = to_f32(rounded);
        }
      if (page != nullptr) write_fp8_group(page, a.rank, group, v);
    }
  } else {
    for (int i = thread; i < a.rank; i += kPrologueThreads) {
      const T v = from_f32<T>(to_f32(row[i]) * factor * a.norm[i]);
      row[i] = v;
      if (page != nullptr) reinterpret_cast<Kv*>(page)[i] = from_f32<Kv>(to_f32(v));
    }
  }
}

}  // namespace cachalot::cuda
