// Products of packed integer weights with int8 activations, over the operations of bytes_vnni.h or bytes_avx2.h, of which one was included
// before. For the layout see cpu/wide_pack.h.
//
// A step multiplies 4 columns of kWidth rows (unsigned codes) with 4 activations, the same for all rows. After 32 columns, or 16 where
// scales change that often, the exact integer sums become floats: sum += (acc * activation scale) * d, and the codes' offset is made good
// by sum += (activation scale * sum of q) * m. An output's operations do not depend on the tokens beside it.
#pragma once

#include "cpu/isa/kernels.h"

namespace cachalot::cpu {
namespace {

inline constexpr int kSteps = kChunk / 4;  // of a chunk
inline constexpr int kStepBytes = 64;      // 16 rows x 4 columns, of which a register holds kWidth rows

// Shifts bytes right by n; `mask` clears what came from the neighbour.
inline I shift_bytes(I a, int n, I mask) { return iand(shr16(a, n), mask); }

// 256 bytes: codes of two steps in the nibbles of each 64. `p` points at the first of the register's rows, here and below.
inline void nibble_codes(const uint8_t* p, I* w) {
  const I mask = bset1(15);
#pragma GCC unroll 8
  for (int i = 0; i < kSteps / 2; ++i) {
    const I pair = load_bytes(p + kStepBytes * i);
    w[2 * i] = iand(pair, mask);
    w[2 * i + 1] = shift_bytes(pair, 4, mask);
  }
}
// 64 bytes: bit s of a byte belongs to step s.
inline void add_fifth_bits(const uint8_t* p, I* w) {
  const I bits = load_bytes(p), mask = bset1(16);
#pragma GCC unroll 8
  for (int s = 0; s < kSteps; ++s) w[s] = ior(w[s], iand(s <= 4 ? shl16(bits, 4 - s) : shr16(bits, s - 4), mask));
}
inline void byte_codes(const uint8_t* p, I* w) {
#pragma GCC unroll 8
  for (int s = 0; s < kSteps; ++s) w[s] = load_bytes(p + kStepBytes * s);
}
// Codes looked up in a table of 16 unsigned bytes.
inline void table_codes(const uint8_t* p, const uint8_t* table, I* w) {
  nibble_codes(p, w);
#pragma GCC unroll 8
  for (int s = 0; s < kSteps; ++s) w[s] = look_up_bytes(table, w[s]);
}

// Scale and offset of the rows for a sub-block: value = d * code + m.
struct Affine {
  F d, m;
};

// Where a unit's numbers for the register's rows begin: f16 and u8 scales of 16 rows, and codes.
struct Unit {
  const uint8_t* p;
  int lane;  // first row of the register: 0, or 8 in its second half
  [[nodiscard]] F half(int offset) const { return load_f16(p + offset + 2 * lane); }
  [[nodiscard]] F u8(int offset) const { return to_float(load_u8(p + offset + lane)); }
  [[nodiscard]] F i8(int offset) const { return to_float(load_i8(p + offset + lane)); }
  [[nodiscard]] const uint8_t* codes(int offset) const { return p + offset + 4 * lane; }
};

// WideCodec<C>: kSub columns share an Affine; a unit has unit_elems / 32 chunks; kBytes says that codes use all 8 bits.
template <Codec C>
struct WideCodec;

template <>
struct WideCodec<Codec::q4_0> {
  static constexpr int kSub = 32;
  static constexpr bool kBytes = false;
  Unit unit;
  explicit WideCodec(const Unit& u) : unit(u) {}
  void codes(int, I* w) const { nibble_codes(unit.codes(32), w); }
  [[nodiscard]] Affine scales(int) const {
    const F d = unit.half(0);
    return {d, mul(d, set1(-8.0f))};
  }
};
template <>
struct WideCodec<Codec::q4_1> {
  static constexpr int kSub = 32;
  static constexpr bool kBytes = false;
  Unit unit;
  explicit WideCodec(const Unit& u) : unit(u) {}
  void codes(int, I* w) const { nibble_codes(unit.codes(64), w); }
  [[nodiscard]] Affine scales(int) const { return {unit.half(0), unit.half(32)}; }
};
template <>
struct WideCodec<Codec::q5_0> {
  static constexpr int kSub = 32;
  static constexpr bool kBytes = false;
  Unit unit;
  explicit WideCodec(const Unit& u) : unit(u) {}
  void codes(int, I* w) const {
    nibble_codes(unit.codes(96), w);
    add_fifth_bits(unit.codes(32), w);
  }
  [[nodiscard]] Affine scales(int) const {
    const F d = unit.half(0);
    return {d, mul(d, set1(-16.0f))};
  }
};
template <>
struct WideCodec<Codec::q5_1> {
  static constexpr int kSub = 32;
  static constexpr bool kBytes = false;
  Unit unit;
  explicit WideCodec(const Unit& u) : unit(u) {}
  void codes(int, I* w) const {
    nibble_codes(unit.codes(128), w);
    add_fifth_bits(unit.codes(64), w);
  }
  [[nodiscard]] Affine scales(int) const { return {unit.half(0), unit.half(32)}; }
};
template <>
struct WideCodec<Codec::q8_0> {
  static constexpr int kSub = 32;
  static constexpr bool kBytes = true;
  Unit unit;
  explicit WideCodec(const Unit& u) : unit(u) {}
  void codes(int, I* w) const { byte_codes(unit.codes(32), w); }
  [[nodiscard]] Affine scales(int) const {
    const F d = unit.half(0);
    return {d, mul(d, set1(-kByteOffset))};
  }
};
alignas(16) constexpr uint8_t kIq4Codes[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};  // levels + 128
alignas(16) constexpr uint8_t kFp4Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};                // 2 levels + 12
template <>
struct WideCodec<Codec::iq4_nl> {
  static constexpr int kSub = 32;
  static constexpr bool kBytes = true;
  Unit unit;
  explicit WideCodec(const Unit& u) : unit(u) {}
  void codes(int, I* w) const { table_codes(unit.codes(32), kIq4Codes, w); }
  [[nodiscard]] Affine scales(int) const {
    const F d = unit.half(0);
    return {d, mul(d, set1(-kByteOffset))};
  }
};
template <>
struct WideCodec<Codec::iq4_xs> {
  static constexpr int kSub = 32;
  static constexpr bool kBytes = true;
  Unit unit;
  F d;
  explicit WideCodec(const Unit& u) : unit(u), d(u.half(0)) {}
  void codes(int c, I* w) const { table_codes(unit.codes(160 + 256 * c), kIq4Codes, w); }
  [[nodiscard]] Affine scales(int c) const {
    const F scale = mul(d, unit.i8(32 + 16 * c));
    return {scale, mul(scale, set1(-kByteOffset))};
  }
};
template <>
struct WideCodec<Codec::mxfp4> {
  static constexpr int kSub = 32;
  static constexpr bool kBytes = false;
  Unit unit;
  explicit WideCodec(const Unit& u) : unit(u) {}
  void codes(int, I* w) const { table_codes(unit.codes(16), kFp4Codes, w); }
  [[nodiscard]] Affine scales(int) const {  // half the scale, as the table's levels are doubled
    const F d = as_float(shl(isub(load_u8(unit.p + unit.lane), iset1(1)), 23));
    return {d, mul(d, set1(-12.0f))};
  }
};
template <>
struct WideCodec<Codec::int4> {
  static constexpr int kSub = 32;
  static constexpr bool kBytes = false;
  Unit unit;
  Affine affine;
  explicit WideCodec(const Unit& u) : unit(u) {
    affine.d = unit.half(0);
    affine.m = sub(zero(), mul(affine.d, unit.u8(32)));
  }
  void codes(int c, I* w) const { nibble_codes(unit.codes(48 + 256 * c), w); }
  [[nodiscard]] Affine scales(int) const { return affine; }
};
template <>
struct WideCodec<Codec::int8> {
  static constexpr int kSub = 32;
  static constexpr bool kBytes = true;
  Unit unit;
  Affine affine;
  explicit WideCodec(const Unit& u) : unit(u) {
    affine.d = unit.half(0);
    affine.m = mul(affine.d, sub(set1(128 - kByteOffset), unit.u8(32)));
  }
  void codes(int c, I* w) const { byte_codes(unit.codes(48 + 512 * c), w); }
  [[nodiscard]] Affine scales(int) const { return affine; }
};
template <>
struct WideCodec<Codec::q4_k> {
  static constexpr int kSub = 32;
  static constexpr bool kBytes = false;
  Unit unit;
  F d, minimum;
  explicit WideCodec(const Unit& u) : unit(u), d(u.half(0)), minimum(u.half(32)) {}
  void codes(int c, I* w) const { nibble_codes(unit.codes(320 + 256 * c), w); }
  [[nodiscard]] Affine scales(int c) const { return {mul(d, unit.u8(64 + 32 * c)), sub(zero(), mul(minimum, unit.u8(80 + 32 * c)))}; }
};
template <>
struct WideCodec<Codec::q5_k> {
  static constexpr int kSub = 32;
  static constexpr bool kBytes = false;
  Unit unit;
  F d, minimum;
  explicit WideCodec(const Unit& u) : unit(u), d(u.half(0)), minimum(u.half(32)) {}
  void codes(int c, I* w) const {
    nibble_codes(unit.codes(320 + 320 * c + 64), w);
    add_fifth_bits(unit.codes(320 + 320 * c), w);
  }
  [[nodiscard]] Affine scales(int c) const { return {mul(d, unit.u8(64 + 32 * c)), sub(zero(), mul(minimum, unit.u8(80 + 32 * c)))}; }
};
template <>
struct WideCodec<Codec::q6_k> {
  static constexpr int kSub = 16;
  static constexpr bool kBytes = false;
  Unit unit;
  F d;
  explicit WideCodec(const Unit& u) : unit(u), d(u.half(0)) {}
  void codes(int c, I* w) const {
    const int chunk = 288 + 384 * c;
    nibble_codes(unit.codes(chunk + 128), w);
    const I mask = bset1(48);
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {  // 64 bytes: bits 2 s and 2 s + 1 belong to step 4 h + s
      const I bits = load_bytes(unit.codes(chunk + kStepBytes * h));
      w[4 * h] = ior(w[4 * h], iand(shl16(bits, 4), mask));
      w[4 * h + 1] = ior(w[4 * h + 1], iand(shl16(bits, 2), mask));
      w[4 * h + 2] = ior(w[4 * h + 2], iand(bits, mask));
      w[4 * h + 3] = ior(w[4 * h + 3], iand(shr16(bits, 2), mask));
    }
  }
  [[nodiscard]] Affine scales(int sub_block) const {
    const F scale = mul(d, unit.i8(32 + 16 * sub_block));
    return {scale, mul(scale, set1(-32.0f))};
  }
};

inline I four_activations(const int8_t* q) {
  int32_t four;
  __builtin_memcpy(&four, q, sizeof four);
  return iset1(four);
}
// Integer sums of N steps in two chains.
template <int N, bool kBytes>
inline I dot_steps(const I* w, const int8_t* q) {
  I even = iset1(0), odd = iset1(0);
#pragma GCC unroll 8
  for (int s = 0; s < N; s += 2) {
    const I first = four_activations(q + 4 * s), second = four_activations(q + 4 * s + 4);
    even = kBytes ? dot_bytes(even, w[s], first) : dot_small(even, w[s], first);
    odd = kBytes ? dot_bytes(odd, w[s + 1], second) : dot_small(odd, w[s + 1], second);
  }
  return iadd(even, odd);
}

// Rows [row, row + kWidth) of token t.
inline void finish_wide(const WideProduct& p, int row, int n_rows, int t, F sum) {
  float* const y = p.y[t] + p.y_col + row;
  const int n = n_rows - row < kWidth ? n_rows - row : kWidth;
  if (n == kWidth && p.bias == nullptr && p.beta == 0.0f) {
    store(y, sum);
    return;
  }
  float values[kWidth];
  store(values, sum);
  for (int r = 0; r < n; ++r) {
    float value = values[r];
    if (p.bias != nullptr) value += p.bias[row + r];
    if (p.beta != 0.0f) value += p.beta * y[r];
    y[r] = value;
  }
}

template <Codec C, int T>
inline void wide_tile(const WideRows& w, const WideProduct& p, int row, int t0) {
  using D = WideCodec<C>;
  const int n_chunks = w.unit_elems / kChunk, lane = row % kWideRows;
  const uint8_t* unit = w.data + static_cast<int64_t>(row / kWideRows) * w.n_units * w.unit_bytes;
  const QuantisedRow* const x = p.x + t0;
  F sum[T];
  for (int t = 0; t < T; ++t) sum[t] = zero();
  int64_t chunk = 0;
  for (int u = 0; u < w.n_units; ++u, unit += w.unit_bytes) {
    const D codec(Unit{unit, lane});
    for (int c = 0; c < n_chunks; ++c, ++chunk) {
      I codes[kSteps];
      codec.codes(c, codes);
      if constexpr (D::kSub == 32) {
        const Affine a = codec.scales(c);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
          const F dot = to_float(dot_steps<8, D::kBytes>(codes, x[t].q + chunk * kChunk));
          sum[t] = fma(mul(dot, set1(x[t].scale[chunk])), a.d, sum[t]);
          sum[t] = fma(set1(x[t].sum32[chunk]), a.m, sum[t]);
        }
      } else {
        const Affine a = codec.scales(2 * c), b = codec.scales(2 * c + 1);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
          const F scale = set1(x[t].scale[chunk]);
          const F first = to_float(dot_steps<4, D::kBytes>(codes, x[t].q + chunk * kChunk));
          const F second = to_float(dot_steps<4, D::kBytes>(codes + 4, x[t].q + chunk * kChunk + 16));
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
  for (int row = 0; row < w.n_rows; row += kWidth) {
    int t = 0;
    if constexpr (kWidth == 16)
      for (; t + 8 <= p.n_tokens; t += 8) wide_tile<C, 8>(w, p, row, t);
    for (; t + 4 <= p.n_tokens; t += 4) wide_tile<C, 4>(w, p, row, t);
    for (; t < p.n_tokens; ++t) wide_tile<C, 1>(w, p, row, t);
  }
}

inline void quantise_row(const float* x, int n, int8_t* q, float* scale, float* sum32, float* sum16) {
  for (int k = 0, g = 0; k < n; k += kChunk, ++g) {
    F largest = zero(), marked = zero();  // marked: NaN where an x is, which must not vanish
    for (int i = 0; i < kChunk; i += kWidth) {
      const F a = load(x + k + i);
      largest = vmax(largest, vabs(a));
      marked = if_nan(a, marked, a);
    }
    const float top = reduce_max(largest), d = top / 127.0f + 0.0f * reduce_add(marked);
    const F inverse = set1(top > 0.0f ? 127.0f / top : 0.0f);
    F half[2] = {zero(), zero()};  // sums of codes: small integers, exact
    for (int i = 0; i < kChunk; i += kWidth) {
      const I code = round_to_int(mul(load(x + k + i), inverse));
      store_i8(q + k + i, code);
      half[i / 16] = add(half[i / 16], to_float(code));
    }
    const float first = reduce_add(half[0]), second = reduce_add(half[1]);
    scale[g] = d;
    sum16[2 * g] = d * first;
    sum16[2 * g + 1] = d * second;
    sum32[g] = d * (first + second);
  }
}

template <Codec C>
constexpr void fill_wide(WideKernels& k) {
  k.product[static_cast<int>(C)] = wide_product<C>;
}
constexpr WideKernels make_wide_kernels() {
  WideKernels k;
  k.quantise = quantise_row;
  fill_wide<Codec::q4_0>(k);
  fill_wide<Codec::q4_1>(k);
  fill_wide<Codec::q5_0>(k);
  fill_wide<Codec::q5_1>(k);
  fill_wide<Codec::q8_0>(k);
  fill_wide<Codec::q4_k>(k);
  fill_wide<Codec::q5_k>(k);
  fill_wide<Codec::q6_k>(k);
  fill_wide<Codec::iq4_nl>(k);
  fill_wide<Codec::iq4_xs>(k);
  fill_wide<Codec::mxfp4>(k);
  fill_wide<Codec::int4>(k);
  fill_wide<Codec::int8>(k);
  return k;
}

}  // namespace
}  // namespace cachalot::cpu
