// Kernels on rows of numbers: exponential, norms, SiLU, rope, and conversion to and from the cache's formats.
#pragma once

#include "cpu/isa/kernels.h"

namespace cachalot::cpu {
namespace {

// exp within 2 ulp: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial of degree 7 in r (the coefficients of the Cephes library), and 2^n in
// two factors so that results below the smallest normal number and above the largest come out as they should.
inline F vexp(F x) {
  const F bounded = vmax(vmin(x, set1(89.0f)), set1(-110.0f));
  const I n = round_to_int(mul(bounded, set1(1.44269504f)));
  const F whole = to_float(n);
  F r = fma(whole, set1(-0.693359375f), bounded);
  r = fma(whole, set1(2.12194440e-4f), r);
  F y = set1(1.9875691500e-4f);
  y = fma(y, r, set1(1.3981999507e-3f));
  y = fma(y, r, set1(8.3334519073e-3f));
  y = fma(y, r, set1(4.1665795894e-2f));
  y = fma(y, r, set1(1.6666665459e-1f));
  y = fma(y, r, set1(5.0000001201e-1f));
  y = add(fma(y, mul(r, r), r), set1(1.0f));
  // n + 256 is positive, so that a logical shift halves it.
  const I half = isub(shr(iadd(n, iset1(256)), 1), iset1(128)), rest = isub(n, half);
  const F first = as_float(shl(iadd(half, iset1(127)), 23)), second = as_float(shl(iadd(rest, iset1(127)), 23));
  return if_nan(x, mul(mul(y, first), second), x);
}

// y[i] = f(x[i]) in whole vectors; the rest goes through a vector of its own.
template <typename Function>
inline void map(const float* x, int n, float* y, Function f) {
  int i = 0;
  for (; i + kWidth <= n; i += kWidth) store(y + i, f(load(x + i)));
  if (i == n) return;
  float rest[kWidth] = {};
  for (int j = i; j < n; ++j) rest[j - i] = x[j];
  store(rest, f(load(rest)));
  for (int j = i; j < n; ++j) y[j] = rest[j - i];
}
template <typename Function>
inline void map2(const float* a, const float* b, int n, float* y, Function f) {
  int i = 0;
  for (; i + kWidth <= n; i += kWidth) store(y + i, f(load(a + i), load(b + i)));
  if (i == n) return;
  float rest_a[kWidth] = {}, rest_b[kWidth] = {};
  for (int j = i; j < n; ++j) {
    rest_a[j - i] = a[j];
    rest_b[j - i] = b[j];
  }
  store(rest_a, f(load(rest_a), load(rest_b)));
  for (int j = i; j < n; ++j) y[j] = rest_a[j - i];
}

inline void exp_row(const float* x, int n, float* y) {
  map(x, n, y, [](F a) { return vexp(a); });
}
inline F vsigmoid(F a) { return div(set1(1.0f), add(set1(1.0f), vexp(sub(zero(), a)))); }
inline void sigmoid_row(const float* x, int n, float* y) {
  map(x, n, y, [](F a) { return vsigmoid(a); });
}
inline void silu_mul_row(const float* gate, const float* up, int n, float* y) {
  map2(gate, up, n, y, [](F g, F u) { return mul(div(g, add(set1(1.0f), vexp(sub(zero(), g)))), u); });
}
inline void axpy_row(float a, const float* x, int n, float* y) {
  const F factor = set1(a);
  map2(x, y, n, y, [factor](F from, F to) { return fma(factor, from, to); });
}

inline float mean_square(const float* x, int n) {
  F sum = zero(), other = zero();
  int i = 0;
  for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
    const F a = load(x + i), b = load(x + i + kWidth);
    sum = fma(a, a, sum);
    other = fma(b, b, other);
  }
  float rest[2 * kWidth] = {};
  for (int j = i; j < n; ++j) rest[j - i] = x[j];
  const F a = load(rest), b = load(rest + kWidth);
  return reduce_add(add(fma(a, a, sum), fma(b, b, other))) / static_cast<float>(n);
}
inline void rmsnorm_row(const float* x, const float* w, float eps, int n, float* y) {
  const F scale = set1(1.0f / __builtin_sqrtf(mean_square(x, n) + eps));
  map2(x, w, n, y, [scale](F a, F b) { return mul(mul(a, scale), b); });
}
inline void add_rmsnorm_row(float* residual, const float* delta, const float* w, float eps, int n, float* y) {
  map2(residual, delta, n, residual, [](F a, F b) { return add(a, b); });
  rmsnorm_row(residual, w, eps, n, y);
}

inline void rope_row(float* x, const float* table, int dim, bool interleaved) {
  const int half = dim / 2;
  const float *cosine = table, *sine = table + half;
  int i = 0;
  if (interleaved) {  // (a, b) -> (a c - b s, b c + a s)
    for (; i + kWidth / 2 <= half; i += kWidth / 2) {
      const F pairs = load(x + 2 * i);
      store(x + 2 * i, fma(pairs, load_twice(cosine + i), mul(swap_pairs(pairs), negate_even(load_twice(sine + i)))));
    }
  } else {
    for (; i + kWidth <= half; i += kWidth) {
      const F a = load(x + i), b = load(x + half + i), c = load(cosine + i), s = load(sine + i);
      store(x + i, sub(mul(a, c), mul(b, s)));
      store(x + half + i, fma(b, c, mul(a, s)));
    }
  }
  for (; i < half; ++i) {
    float &a = x[interleaved ? 2 * i : i], &b = x[interleaved ? 2 * i + 1 : half + i];
    const float re = a, im = b;
    a = re * cosine[i] - im * sine[i];
    b = im * cosine[i] + re * sine[i];
  }
}

template <Element E>
inline constexpr int kElementBytes = E == Element::f32 ? 4 : 2;
template <Element E>
inline F load_element(const uint8_t* p) {
  if constexpr (E == Element::f32) return load(reinterpret_cast<const float*>(p));
  if constexpr (E == Element::f16) return load_f16(p);
  return as_float(shl(load_u16(p), 16));
}
// Round to nearest, ties to even; NaN stays NaN.
inline void store_bf16(uint8_t* p, F a) {
  const I bits = as_int(a), upper = shr(bits, 16);
  const I rounded = shr(iadd(iadd(bits, iset1(0x7fff)), iand(upper, iset1(1))), 16);
  store_u16(p, as_int(if_nan(a, as_float(rounded), as_float(ior(upper, iset1(0x40))))));
}
template <Element E>
inline void load_rows_of(const uint8_t* src, size_t src_stride, int n_rows, int n, float* dst, int64_t dst_stride) {
  constexpr int kBytes = kElementBytes<E>;
  for (int r = 0; r < n_rows; ++r, src += src_stride, dst += dst_stride) {
    int i = 0;
    for (; i + kWidth <= n; i += kWidth) store(dst + i, load_element<E>(src + i * kBytes));
    if (i == n) continue;
    uint8_t rest[4 * kWidth] = {};
    float values[kWidth];
    for (int j = 0; j < (n - i) * kBytes; ++j) rest[j] = src[i * kBytes + j];
    store(values, load_element<E>(rest));
    for (int j = i; j < n; ++j) dst[j] = values[j - i];
  }
}
inline void load_rows(Element from, const void* src, size_t src_stride, int n_rows, int n, float* dst, int64_t dst_stride) {
  const auto* bytes = static_cast<const uint8_t*>(src);
  switch (from) {
    case Element::f32: return load_rows_of<Element::f32>(bytes, src_stride, n_rows, n, dst, dst_stride);
    case Element::f16: return load_rows_of<Element::f16>(bytes, src_stride, n_rows, n, dst, dst_stride);
    case Element::bf16: return load_rows_of<Element::bf16>(bytes, src_stride, n_rows, n, dst, dst_stride);
  }
}
inline void load_fp8_rows(const void* src, size_t src_stride, int n_rows, int rank, int n, float* dst, int64_t dst_stride) {
  constexpr int kGroup = 128;
  const F nan = set1(__builtin_nanf(""));
  const auto* bytes = static_cast<const uint8_t*>(src);
  for (int r = 0; r < n_rows; ++r, bytes += src_stride, dst += dst_stride) {
    const uint8_t* scales = bytes + rank;
    for (int begin = 0; begin < rank; begin += kGroup, scales += sizeof(float)) {
      float scale;
      __builtin_memcpy(&scale, scales, sizeof scale);
      const int end = begin + kGroup < rank ? begin + kGroup : rank;
      const auto put = [&](const uint8_t* codes, float* to) {
        store(to, mul(if_magnitude(load_e4m3(codes), 480.0f / 256.0f, nan), set1(256.0f * scale)));
      };
      int i = begin;
      for (; i + kWidth <= end; i += kWidth) put(bytes + i, dst + i);
      if (i == end) continue;
      uint8_t rest[kWidth] = {};
      float values[kWidth];
      for (int j = i; j < end; ++j) rest[j - i] = bytes[j];
      put(rest, values);
      for (int j = i; j < end; ++j) dst[j] = values[j - i];
    }
    load_rows_of<Element::bf16>(scales, 0, 1, n - rank, dst + rank, 0);
  }
}
inline void store_row(Element to, const float* src, int n, void* dst) {
  if (to == Element::f32) {
    __builtin_memcpy(dst, src, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  auto* out = static_cast<uint8_t*>(dst);
  const auto put = [to](uint8_t* p, F a) { to == Element::f16 ? store_f16(p, a) : store_bf16(p, a); };
  int i = 0;
  for (; i + kWidth <= n; i += kWidth) put(out + 2 * i, load(src + i));
  if (i == n) return;
  float values[kWidth] = {};
  uint8_t rest[2 * kWidth];
  for (int j = i; j < n; ++j) values[j - i] = src[j];
  put(rest, load(values));
  for (int j = 0; j < 2 * (n - i); ++j) out[2 * i + j] = rest[j];
}

}  // namespace
}  // namespace cachalot::cpu
