// Lanes: 16 numbers that go through the same arithmetic, one for each of 16 runs of weights, so that sums over a run need no order but
// the run's own and are the same bits on every machine. Compilers turn them into whatever vectors the enclosing function may use.
// Private to src/tensor and src/quant; files that include it are compiled with -Wno-psabi.
#pragma once

#include <cstdint>

// What runs inside a function made for one instruction set must become part of it.
#define CACHALOT_LANES_INLINE [[gnu::always_inline]] inline

// Defines NAME(const JOB&), which runs BODY(job), one of those functions, made for the best instruction set that this machine has.
#if defined(__x86_64__)
#define CACHALOT_LANES_FUNCTION(NAME, JOB, BODY)                                              \
  void NAME##_plain(const JOB& job) { BODY(job); }                                            \
  [[gnu::target("avx2")]] void NAME##_avx2(const JOB& job) { BODY(job); }                     \
  [[gnu::target("avx512f")]] void NAME##_avx512(const JOB& job) { BODY(job); }                \
  void NAME(const JOB& job) {                                                                 \
    static void (*const best)(const JOB&) = __builtin_cpu_supports("avx512f") ? NAME##_avx512 \
                                            : __builtin_cpu_supports("avx2")  ? NAME##_avx2   \
                                                                              : NAME##_plain;  \
    best(job);                                                                                \
  }
#else
#define CACHALOT_LANES_FUNCTION(NAME, JOB, BODY) \
  void NAME(const JOB& job) { BODY(job); }
#endif

namespace cachalot {

inline constexpr int kLanes = 16;
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));  // NOLINT(modernize-use-using): the attribute wants a typedef

CACHALOT_LANES_INLINE Lanes spread(float value) {
  return Lanes{value, value, value, value, value, value, value, value, value, value, value, value, value, value, value, value};
}
CACHALOT_LANES_INLINE Lanes smaller(Lanes a, Lanes b) { return a < b ? a : b; }
CACHALOT_LANES_INLINE Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }
CACHALOT_LANES_INLINE Lanes clamped(Lanes v, Lanes low, Lanes high) { return smaller(larger(v, low), high); }
CACHALOT_LANES_INLINE Lanes absolute(Lanes v) { return v < 0.0f ? -v : v; }
// To the nearest integer, ties to even, for |value| < 2^22: adding 1.5 * 2^23 leaves no bits for a fraction.
CACHALOT_LANES_INLINE Lanes round_even(Lanes v) {
  constexpr float kMagic = 12582912.0f;
  return (v + kMagic) - kMagic;
}
// 1 / v, and 0 where that would be too large to multiply with.
CACHALOT_LANES_INLINE Lanes inverse_or_zero(Lanes v) {
  const Lanes tiny = spread(1e-30f), size = absolute(v);
  return size > tiny ? 1.0f / (size > tiny ? v : tiny) : spread(0.0f);
}

CACHALOT_LANES_INLINE Lanes load_lanes(const float* from) {
  Lanes v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}
CACHALOT_LANES_INLINE void store_lanes(Lanes v, float* to) { __builtin_memcpy(to, &v, sizeof v); }
// Sum of factor[j] * v[j] for j < n, in four sums that do not wait for each other.
CACHALOT_LANES_INLINE Lanes lanes_product(const float* factor, const Lanes* v, int n) {
  Lanes sum[4] = {spread(0.0f), spread(0.0f), spread(0.0f), spread(0.0f)};
  int j = 0;
  for (; j + 4 <= n; j += 4)
    for (int s = 0; s < 4; ++s) sum[s] += factor[j + s] * v[j + s];
  for (; j < n; ++j) sum[0] += factor[j] * v[j];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

}  // namespace cachalot
