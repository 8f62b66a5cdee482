// What MLA does with a row between its first projection and attention: rotations, the norm of the latent, the row into its page.
#pragma once

#include "cuda/attention_kernels.h"
#include "cuda/kv_rows.cuh"

namespace cachalot::cuda {

// The rotation of row t. Positions are written by the host between steps, so this may be made before pdl_wait.
struct Turn {
  const float* table;
  int half, position;
  bool interleaved;
  __device__ __forceinline__ Turn(const PrologueArgs& a, int t)
      : half(a.rope_dim / 2), position(a.positions[t]), interleaved(a.interleaved) {
    table = a.cos_sin + (position < 0 ? 0 : position) * a.cos_sin_stride;
  }
  // Where the numbers of pair j lie.
  __device__ __forceinline__ int first(int j) const { return interleaved ? 2 * j : j; }
  __device__ __forceinline__ int second(int j) const { return interleaved ? 2 * j + 1 : j + half; }
  __device__ __forceinline__ float2 cos_sin(int j) const { return make_float2(table[j], table[half + j]); }
  // A pair, rotated and rounded to T; padding is not rotated.
  template <typename T>
  __device__ __forceinline__ void rotate(T& x, T& y, float2 cos_sin) const {
    if (position < 0) return;
    const float u = to_f32(x), v = to_f32(y);
    x = from_f32<T>(u * cos_sin.x - v * cos_sin.y), y = from_f32<T>(u * cos_sin.y + v * cos_sin.x);
  }
  // Pair j of `from`, rotated, to `to`, where number i of a row lies at place(i).
  template <typename T, typename Place>
  __device__ __forceinline__ void pair(const T* from, T* to, int j, Place&& place) const {
    T x = from[first(j)], y = from[second(j)];
    rotate(x, y, cos_sin(j));
    to[place(first(j))] = x, to[place(second(j))] = y;
  }
};

// What prologue_row() needs of row t besides the row itself: this may be made before pdl_wait. A thread's numbers of the latent are
// `thread`, `thread` + kPrologueThreads, ..., of which the weights of the first kHeld are held; and it turns pair `thread`.
struct RowPlace {
  static constexpr int kHeld = 2;
  Turn turn;
  int slot;
  float norm[kHeld];
  float2 cos_sin = {};
  __device__ __forceinline__ RowPlace(const PrologueArgs& a, int t) : turn(a, t), slot(a.slots[t]) {
    if (static_cast<int>(threadIdx.x) < turn.half) cos_sin = turn.cos_sin(static_cast<int>(threadIdx.x));
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int i = static_cast<int>(threadIdx.x) + j * kPrologueThreads;
      norm[j] = i < a.rank ? a.norm[i] : 0.0f;
    }
  }
};

// The latent's norm and the rotated key, within `row` and into its page. A block of kPrologueThreads; `shared` holds 33 floats.
template <typename T, typename Kv>
__device__ __forceinline__ void prologue_row(const PrologueArgs& a, int t, const RowPlace& place, float* shared) {
  constexpr int kHeld = RowPlace::kHeld;
  const int thread = static_cast<int>(threadIdx.x), half = a.rope_dim / 2, slot = place.slot;
  T* row = static_cast<T*>(a.row.data) + t * a.row.stride;
  constexpr bool kFp8 = std::is_same_v<Kv, Fp8Row>;
  using Tail = std::conditional_t<kFp8, bf16, Kv>;  // of the rope key in the page
  const int64_t page_bytes = kFp8 ? fp8_bytes(a.rank, a.rank + a.rope_dim) : static_cast<int64_t>(sizeof(Kv)) * (a.rank + a.rope_dim);
  uint8_t* page = slot < 0 ? nullptr : static_cast<uint8_t*>(a.pages) + slot * page_bytes;
  Tail* tail = reinterpret_cast<Tail*>(page + (kFp8 ? fp8_tail_at(a.rank) : static_cast<int>(sizeof(Kv)) * a.rank));
  const int first = place.turn.first(thread), second = place.turn.second(thread);
  T x = from_f32<T>(0.0f), y = x;
  if (thread < half) x = row[a.rank + first], y = row[a.rank + second];
  float sum = 0.0f, held[kHeld];
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int i = thread + j * kPrologueThreads;
    held[j] = i < a.rank ? to_f32(row[i]) : 0.0f;
    sum += held[j] * held[j];
  }
  for (int i = thread + kHeld * kPrologueThreads; i < a.rank; i += kPrologueThreads) {
    const float v = to_f32(row[i]);
    sum += v * v;
  }
  if (thread < half) {
    place.turn.rotate(x, y, place.cos_sin);
    row[a.rank + first] = x, row[a.rank + second] = y;
    if (page != nullptr) tail[first] = from_f32<Tail>(to_f32(x)), tail[second] = from_f32<Tail>(to_f32(y));
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
    const auto put = [&](int i, float x, float norm) {
      const T v = from_f32<T>(x * factor * norm);
      row[i] = v;
      if (page != nullptr) reinterpret_cast<Kv*>(page)[i] = from_f32<Kv>(to_f32(v));
    };
#pragma unroll
    for (int j = 0; j < kHeld; ++j)
      if (const int i = thread + j * kPrologueThreads; i < a.rank) put(i, held[j], place.norm[j]);
    for (int i = thread + kHeld * kPrologueThreads; i < a.rank; i += kPrologueThreads) put(i, to_f32(row[i]), a.norm[i]);
  }
}

}  // namespace cachalot::cuda
