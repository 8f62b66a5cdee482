// Products of packed integer weights with int8 activations, in AVX-512 VNNI. For the layout see cpu/wide_pack.h.
//
// One VPDPBUSD multiplies 4 columns of 16 rows (unsigned codes, 64 bytes) with 4 activations, the same for all rows. After 32 columns, or
// 16 where scales change that often, the exact integer sums become floats: sum += (acc * activation scale) * d, and the codes' offset is
// made good by sum += (activation scale * sum of q) * m. An output's operations do not depend on the tokens beside it.
#pragma once

#include "cpu/isa/simd_avx512.h"

namespace cachalot::cpu {
namespace {

inline constexpr int kSteps = kChunk / 4;  // VPDPBUSD steps of a chunk

inline I load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline I byte_mask(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
// Shifts bytes right by n; `mask` clears what came from the neighbour.
inline I shift_bytes(I a, int n, I mask) { return _mm512_and_si512(_mm512_srli_epi16(a, static_cast<unsigned>(n)), mask); }
inline F halves16(const uint8_t* p) { return load_f16(p); }

// 256 bytes: codes of two steps in the nibbles of each 64.
inline void nibble_codes(const uint8_t* p, I* w) {
  const I mask = byte_mask(15);
  for (int i = 0; i < kSteps / 2; ++i) {
    const I pair = load_bytes(p + 64 * i);
    w[2 * i] = _mm512_and_si512(pair, mask);
    w[2 * i + 1] = shift_bytes(pair, 4, mask);
  }
}
// 64 bytes: bit s of a byte belongs to step s.
inline void add_fifth_bits(const uint8_t* p, I* w) {
  const I bits = load_bytes(p), mask = byte_mask(16);
#pragma GCC unroll 8
  for (int s = 0; s < kSteps; ++s) {
    const I moved = s <= 4 ? _mm512_slli_epi16(bits, static_cast<unsigned>(4 - s)) : _mm512_srli_epi16(bits, static_cast<unsigned>(s - 4));
    w[s] = _mm512_or_si512(w[s], _mm512_and_si512(moved, mask));
  }
}
inline void byte_codes(const uint8_t* p, I* w) {
  for (int s = 0; s < kSteps; ++s) w[s] = load_bytes(p + 64 * s);
}
// Codes looked up in a table of 16 unsigned bytes.
inline void table_codes(const uint8_t* p, const uint8_t* table, I* w) {
  nibble_codes(p, w);
  const I levels = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  for (int s = 0; s < kSteps; ++s) w[s] = _mm512_shuffle_epi8(levels, w[s]);
}

// Scale and offset of the 16 rows for a sub-block: value = d * code + m.
struct Affine {
  F d, m;
};

// WideCodec<C>: kSub columns share an Affine; a unit has unit_elems / 32 chunks.
template <Codec C>
struct WideCodec;

template <>
struct WideCodec<Codec::q4_0> {
  static constexpr int kSub = 32;
  const uint8_t* p;
  explicit WideCodec(const WideRows&, const uint8_t* unit) : p(unit) {}
  void codes(int, I* w) const { nibble_codes(p + 32, w); }
  [[nodiscard]] Affine scales(int) const {
    const F d = halves16(p);
    return {d, mul(d, set1(-8.0f))};
  }
};
template <>
struct WideCodec<Codec::q4_1> {
  static constexpr int kSub = 32;
  const uint8_t* p;
  explicit WideCodec(const WideRows&, const uint8_t* unit) : p(unit) {}
  void codes(int, I* w) const { nibble_codes(p + 64, w); }
  [[nodiscard]] Affine scales(int) const { return {halves16(p), halves16(p + 32)}; }
};
template <>
struct WideCodec<Codec::q5_0> {
  static constexpr int kSub = 32;
  const uint8_t* p;
  explicit WideCodec(const WideRows&, const uint8_t* unit) : p(unit) {}
  void codes(int, I* w) const {
    nibble_codes(p + 96, w);
    add_fifth_bits(p + 32, w);
  }
  [[nodiscard]] Affine scales(int) const {
    const F d = halves16(p);
    return {d, mul(d, set1(-16.0f))};
  }
};
template <>
struct WideCodec<Codec::q5_1> {
  static constexpr int kSub = 32;
  const uint8_t* p;
  explicit WideCodec(const WideRows&, const uint8_t* unit) : p(unit) {}
  void codes(int, I* w) const {
    nibble_codes(p + 128, w);
    add_fifth_bits(p + 64, w);
  }
  [[nodiscard]] Affine scales(int) const { return {halves16(p), halves16(p + 32)}; }
};
template <>
struct WideCodec<Codec::q8_0> {
  static constexpr int kSub = 32;
  const uint8_t* p;
  explicit WideCodec(const WideRows&, const uint8_t* unit) : p(unit) {}
  void codes(int, I* w) const { byte_codes(p + 32, w); }
  [[nodiscard]] Affine scales(int) const {
    const F d = halves16(p);
    return {d, mul(d, set1(-128.0f))};
  }
};
alignas(16) constexpr uint8_t kIq4Codes[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};  // levels + 128
alignas(16) constexpr uint8_t kFp4Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};                // 2 levels + 12
template <>
struct WideCodec<Codec::iq4_nl> {
  static constexpr int kSub = 32;
  const uint8_t* p;
  explicit WideCodec(const WideRows&, const uint8_t* unit) : p(unit) {}
  void codes(int, I* w) const { table_codes(p + 32, kIq4Codes, w); }
  [[nodiscard]] Affine scales(int) const {
    const F d = halves16(p);
    return {d, mul(d, set1(-128.0f))};
  }
};
template <>
struct WideCodec<Codec::iq4_xs> {
  static constexpr int kSub = 32;
  const uint8_t* p;
  F d;
  explicit WideCodec(const WideRows&, const uint8_t* unit) : p(unit), d(halves16(unit)) {}
  void codes(int c, I* w) const { table_codes(p + 160 + 256 * c, kIq4Codes, w); }
  [[nodiscard]] Affine scales(int c) const {
    const F scale = mul(d, to_float(load_i8(p + 32 + 16 * c)));
    return {scale, mul(scale, set1(-128.0f))};
  }
};
template <>
struct WideCodec<Codec::mxfp4> {
  static constexpr int kSub = 32;
  const uint8_t* p;
  explicit WideCodec(const WideRows&, const uint8_t* unit) : p(unit) {}
  void codes(int, I* w) const { table_codes(p + 16, kFp4Codes, w); }
  [[nodiscard]] Affine scales(int) const {  // half the scale, as the table's levels are doubled
    const F d = as_float(shl(isub(load_u8(p), iset1(1)), 23));
    return {d, mul(d, set1(-12.0f))};
  }
};
template <>
struct WideCodec<Codec::int4> {
  static constexpr int kSub = 32;
  const uint8_t* p;
  Affine affine;
  explicit WideCodec(const WideRows&, const uint8_t* unit) : p(unit) {
    affine.d = halves16(p);
    affine.m = sub(zero(), mul(affine.d, to_float(load_u8(p + 32))));
  }
  void codes(int c, I* w) const { nibble_codes(p + 48 + 256 * c, w); }
  [[nodiscard]] Affine scales(int) const { return affine; }
};
template <>
struct WideCodec<Codec::int8> {
  static constexpr int kSub = 32;
  const uint8_t* p;
  Affine affine;
  explicit WideCodec(const WideRows&, const uint8_t* unit) : p(unit) {
    affine.d = halves16(p);
    affine.m = sub(zero(), mul(affine.d, to_float(load_u8(p + 32))));
  }
  void codes(int c, I* w) const { byte_codes(p + 48 + 512 * c, w); }
  [[nodiscard]] Affine scales(int) const { return affine; }
};
template <>
struct WideCodec<Codec::q4_k> {
  static constexpr int kSub = 32;
  const uint8_t* p;
  F d, minimum;
  explicit WideCodec(const WideRows&, const uint8_t* unit) : p(unit), d(halves16(unit)), minimum(halves16(unit + 32)) {}
  void codes(int c, I* w) const { nibble_codes(p + 320 + 256 * c, w); }
  [[nodiscard]] Affine scales(int c) const {
    return {mul(d, to_float(load_u8(p + 64 + 32 * c))), sub(zero(), mul(minimum, to_float(load_u8(p + 80 + 32 * c))))};
  }
};
template <>
struct WideCodec<Codec::q5_k> {
  static constexpr int kSub = 32;
  const uint8_t* p;
  F d, minimum;
  explicit WideCodec(const WideRows&, const uint8_t* unit) : p(unit), d(halves16(unit)), minimum(halves16(unit + 32)) {}
  void codes(int c, I* w) const {
    nibble_codes(p + 320 + 320 * c + 64, w);
    add_fifth_bits(p + 320 + 320 * c, w);
  }
  [[nodiscard]] Affine scales(int c) const {
    return {mul(d, to_float(load_u8(p + 64 + 32 * c))), sub(zero(), mul(minimum, to_float(load_u8(p + 80 + 32 * c))))};
  }
};
template <>
struct WideCodec<Codec::q6_k> {
  static constexpr int kSub = 16;
  const uint8_t* p;
  F d;
  explicit WideCodec(const WideRows&, const uint8_t* unit) : p(unit), d(halves16(unit)) {}
  void codes(int c, I* w) const {
    const uint8_t* chunk = p + 288 + 384 * c;
    nibble_codes(chunk + 128, w);
    const I mask = byte_mask(48);
    for (int h = 0; h < 2; ++h) {  // 64 bytes: bits 2 s and 2 s + 1 belong to step 4 h + s
      const I bits = load_bytes(chunk + 64 * h);
      w[4 * h] = _mm512_or_si512(w[4 * h], _mm512_and_si512(_mm512_slli_epi16(bits, 4), mask));
      w[4 * h + 1] = _mm512_or_si512(w[4 * h + 1], _mm512_and_si512(_mm512_slli_epi16(bits, 2), mask));
      w[4 * h + 2] = _mm512_or_si512(w[4 * h + 2], _mm512_and_si512(bits, mask));
      w[4 * h + 3] = _mm512_or_si512(w[4 * h + 3], _mm512_and_si512(_mm512_srli_epi16(bits, 2), mask));
    }
  }
  [[nodiscard]] Affine scales(int sub_block) const {
    const F scale = mul(d, to_float(load_i8(p + 32 + 16 * sub_block)));
    return {scale, mul(scale, set1(-32.0f))};
  }
};

inline I four_activations(const int8_t* q) {
  int32_t four;
  __builtin_memcpy(&four, q, sizeof four);
  return _mm512_set1_epi32(four);
}
// Integer sums of n steps from two chains.
template <int N>
inline I dot_steps(const I* w, const int8_t* q) {
  I even = _mm512_setzero_si512(), odd = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int s = 0; s < N; s += 2) {
    even = _mm512_dpbusd_epi32(even, w[s], four_activations(q + 4 * s));
    odd = _mm512_dpbusd_epi32(odd, w[s + 1], four_activations(q + 4 * s + 4));
  }
  return _mm512_add_epi32(even, odd);
}

inline void finish_wide(const WideProduct& p, int row, int n_rows, int t, F sum) {
  const int n = n_rows - row < kWideRows ? n_rows - row : kWideRows;
  const auto lanes = static_cast<__mmask16>((1u << n) - 1u);
  float* const y = p.y[t] + p.y_col + row;
  if (p.bias != nullptr) sum = add(sum, _mm512_maskz_loadu_ps(lanes, p.bias + row));
  if (p.beta != 0.0f) sum = add(sum, mul(set1(p.beta), _mm512_maskz_loadu_ps(lanes, y)));
  _mm512_mask_storeu_ps(y, lanes, sum);
}

template <Codec C, int T>
inline void wide_tile(const WideRows& w, const WideProduct& p, int row, int t0) {
  using D = WideCodec<C>;
  const int n_chunks = w.unit_elems / kChunk;
  const uint8_t* unit = w.data + static_cast<int64_t>(row / kWideRows) * w.n_units * w.unit_bytes;
  const QuantisedRow* const x = p.x + t0;
  F sum[T];
  for (int t = 0; t < T; ++t) sum[t] = zero();
  int64_t chunk = 0;
  for (int u = 0; u < w.n_units; ++u, unit += w.unit_bytes) {
    const D codec(w, unit);
    for (int c = 0; c < n_chunks; ++c, ++chunk) {
      I codes[kSteps];
      codec.codes(c, codes);
      if constexpr (D::kSub == 32) {
        const Affine a = codec.scales(c);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
          const F dot = to_float(dot_steps<8>(codes, x[t].q + chunk * kChunk));
          sum[t] = fma(mul(dot, set1(x[t].scale[chunk])), a.d, sum[t]);
          sum[t] = fma(set1(x[t].sum32[chunk]), a.m, sum[t]);
        }
      } else {
        const Affine a = codec.scales(2 * c), b = codec.scales(2 * c + 1);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
          const F scale = set1(x[t].scale[chunk]);
          const F first = to_float(dot_steps<4>(codes, x[t].q + chunk * kChunk));
          const F second = to_float(dot_steps<4>(codes + 4, x[t].q + chunk * kChunk + 16));
          sum[t] = fma(mul(first, scale), a.d, sum[t]);
          sum[t] = fma(set1(x[t].sum16[2 * chunk]), a.m, sum[t]);
          sum[t] = fma(mul(second, scale), b.d, sum[t]);
          sum[t] = fma(set1(x[t].sum16[2 * chunk + 1]), b.m, sum[t]);
        }
      }
    }
  }
  for (int t = 0; t < T; ++t) finish_wide(p, row, w.n_rows, t0 + t, sum[t]);
}

// Rows outside: a group of rows stays in the first cache while all tokens pass.
template <Codec C>
void wide_product(const WideRows& w, const WideProduct& p) {
  for (int row = 0; row < w.n_rows; row += kWideRows) {
    int t = 0;
    for (; t + 8 <= p.n_tokens; t += 8) wide_tile<C, 8>(w, p, row, t);
    for (; t + 4 <= p.n_tokens; t += 4) wide_tile<C, 4>(w, p, row, t);
    for (; t < p.n_tokens; ++t) wide_tile<C, 1>(w, p, row, t);
  }
}

inline void quantise_row(const float* x, int n, int8_t* q, float* scale, float* sum32, float* sum16) {
  for (int k = 0, g = 0; k < n; k += kChunk, ++g) {
    const F a = load(x + k), b = load(x + k + 16);
    const float largest = _mm512_reduce_max_ps(vmax(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    const bool is_nan = (_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) | _mm512_cmp_ps_mask(b, b, _CMP_UNORD_Q)) != 0;
    const float d = is_nan ? __builtin_nanf("") : largest / 127.0f;  // a number that is none must not vanish
    const F inverse = set1(largest > 0.0f ? 127.0f / largest : 0.0f);
    const I qa = _mm512_cvtps_epi32(mul(a, inverse)), qb = _mm512_cvtps_epi32(mul(b, inverse));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + k), _mm512_cvtepi32_epi8(qa));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + k + 16), _mm512_cvtepi32_epi8(qb));
    const int sum_a = _mm512_reduce_add_epi32(qa), sum_b = _mm512_reduce_add_epi32(qb);
    scale[g] = d;
    sum16[2 * g] = d * static_cast<float>(sum_a);
    sum16[2 * g + 1] = d * static_cast<float>(sum_b);
    sum32[g] = d * static_cast<float>(sum_a + sum_b);
  }
}

}  // namespace
}  // namespace cachalot::cpu
