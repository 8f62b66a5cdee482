// Lanes: 16 numbers that go through the same arithmetic, one for each of 16 runs of weights, so that sums over a run need no order but
// the run's own and are the same bits on every machine. Compilers turn them into whatever vectors the enclosing function may use.
// Private to src/tensor.
#pragma once

#include <cstdint>

// What runs inside a function made for one instruction set must become part of it.
#define CACHALOT_LANES_INLINE [[gnu::always_inline]] inline

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

}  // namespace cachalot
