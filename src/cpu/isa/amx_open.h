// Opens weights of the wide layout to tiles of bf16.
//
// A register holds two columns of each of 16 rows. Codes become f16 numbers, and one FMA of 32 of them gives the weights; an f16 shifted
// right by three bits, its sign kept, is the bf16 of 2^-112 times its value. So weights are scaled per row to end near the top of the
// range of f16, activations by 2^64, and the sums of products back by a factor per row.
// The words of a register are columns k and k + 2 of it: tiles keep the even columns of every eight before the odd ones.
#pragma once

#include "cpu/isa/bytes_vnni.h"
#include "cpu/isa/half_vectors.h"
#include "cpu/isa/wide_codecs.h"

namespace cachalot::cpu {
namespace {

constexpr float kActivationFactor = 0x1p64f;
constexpr int kRowBytes = 64;  // of a tile's row

inline I words(int a) { return _mm512_set1_epi16(static_cast<short>(a)); }

// 16 numbers as f16, each in both words of its lane.
inline I half_pairs(F a) {
  const I twice =
      _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  return _mm512_permutexvar_epi16(twice, _mm512_castsi256_si512(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)));
}

// The most that |code - offset| can be, and that a scale is to the f16 of its unit: bounds of |weight| / d, and of |minimum| / dmin.
struct OpenBounds {
  float weight, minimum;
};
template <Codec C>
constexpr OpenBounds open_bounds() {
  switch (C) {
    case Codec::q4_0: return {8, 0};
    case Codec::q4_1: return {15, 1};
    case Codec::q5_0: return {16, 0};
    case Codec::q5_1: return {31, 1};
    case Codec::q8_0: return {128, 0};
    case Codec::q4_k: return {63 * 15, 63};
    case Codec::q5_k: return {63 * 31, 63};
    case Codec::q6_k: return {128 * 32, 0};
    case Codec::iq4_nl: return {127, 0};
    case Codec::iq4_xs: return {128 * 127, 0};
    case Codec::mxfp4: return {12, 0};
    case Codec::int4: return {255, 0};
    default: return {255, 0};
  }
}

// Factors of 16 rows: 2^n that brings their weights under 2^15, and what takes the sums of products back.
struct RowFactors {
  F up, down;
};
inline RowFactors factors_of(I exponent) {  // biased, of the bounds
  // up = 2^(13 - e) for bound < 2^(e + 1), and activations and f16 took 2^(64 - 112).
  return {as_float(shl(isub(iset1(13 + 2 * 127), exponent), 23)), as_float(shl(iadd(exponent, iset1(112 - 64 - 13)), 23))};
}
inline I exponents_of(F bound) { return _mm512_max_epi32(_mm512_srli_epi32(as_int(bound), 23), iset1(40)); }
// Of a group of w.
template <Codec C>
inline I row_exponents(const WideRows& w, const uint8_t* unit) {
  if constexpr (C == Codec::fp8) {
    const auto* const scales = reinterpret_cast<const float*>(unit);
    F bound = zero();
    for (int i = 0; i < w.header_bytes / 4; i += kWidth) bound = vmax(bound, vabs(load(scales + i)));
    return exponents_of(set1(448.0f * reduce_max(bound)));
  } else {
    constexpr OpenBounds kBounds = open_bounds<C>();
    F bound = zero();
    for (int u = 0; u < w.n_units; ++u, unit += w.unit_bytes) {
      const Unit at{unit, 0};
      F here;
      if constexpr (C == Codec::mxfp4) {
        here = mul(WideCodec<C>(at).scale(0), set1(kBounds.weight));
      } else {
        here = mul(vabs(at.half(0)), set1(kBounds.weight));
        if constexpr (kBounds.minimum > 0.0f) here = fma(vabs(at.half(32)), set1(kBounds.minimum), here);
      }
      bound = vmax(bound, here);
    }
    return exponents_of(bound);
  }
}
// Every unit's scale counts, so the exponents are kept where w has room for them: finding them reads a line of every unit long before
// its codes, and short units are little more than that.
template <Codec C>
inline RowFactors row_factors(const WideRows& w, const uint8_t* group, int64_t group_bytes) {
  if constexpr (C == Codec::bf16 || C == Codec::f16) return {set1(1.0f), set1(1.0f / kActivationFactor)};  // not through f16
  if (w.exponents == nullptr) return factors_of(row_exponents<C>(w, group));
  auto* const kept = reinterpret_cast<uint64_t*>(w.exponents + (group - w.data) / group_bytes * kWideRows);
  // Two threads may find them at once, and write the same. None is zero; the second word is written last.
  if (const uint64_t second = __atomic_load_n(kept + 1, __ATOMIC_ACQUIRE); second != 0) {
    const uint64_t first = __atomic_load_n(kept, __ATOMIC_RELAXED);
    return factors_of(_mm512_cvtepu8_epi32(_mm_set_epi64x(static_cast<int64_t>(second), static_cast<int64_t>(first))));
  }
  const I exponents = row_exponents<C>(w, group);
  const __m128i bytes = _mm512_cvtepi32_epi8(exponents);
  __atomic_store_n(kept, static_cast<uint64_t>(_mm_extract_epi64(bytes, 0)), __ATOMIC_RELAXED);
  __atomic_store_n(kept + 1, static_cast<uint64_t>(_mm_extract_epi64(bytes, 1)), __ATOMIC_RELEASE);
  return factors_of(exponents);
}

// Scales and minima of a unit's rows, times `up`, in pairs of f16.
template <Codec C>
struct OpenScales {
  using D = WideCodec<C>;
  const D& codec;
  F up;
  OpenScales(const D& unit, F factor) : codec(unit), up(factor) {}
  void load(int c, I* scale, I& minus) const {
    for (int i = 0; i < kChunk / D::kSub; ++i) scale[i] = half_pairs(mul(codec.scale(c * (kChunk / D::kSub) + i), up));
    if constexpr (D::kMinimum) minus = half_pairs(sub(zero(), mul(codec.minimum(c), up)));
  }
};
// Factors of a chunk lie side by side: 16 scales, 16 minima.
struct OpenSuperScales {
  const WideSuper& codec;
  I factors;
  OpenSuperScales(const WideSuper& unit, F up) : codec(unit) {
    constexpr int kRound = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    factors = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(mul(unit.d, up), kRound)),
                                 _mm512_cvtps_ph(sub(zero(), mul(unit.dmin, up)), kRound), 1);
  }
  void load(const uint8_t* bytes, I* scale, I& minus) const {
    const I low =
        _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    const I both = half_mul(halves_of_words(_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)))), factors);
    scale[0] = _mm512_permutexvar_epi16(low, both);
    minus = _mm512_permutexvar_epi16(_mm512_add_epi16(low, words(16)), both);
  }
};
template <>
struct OpenScales<Codec::q4_k> : OpenSuperScales {
  using OpenSuperScales::OpenSuperScales;
  void load(int c, I* scale, I& minus) const { OpenSuperScales::load(codec.unit.p + 64 + 32 * c, scale, minus); }
};
template <>
struct OpenScales<Codec::q5_k> : OpenScales<Codec::q4_k> {
  using OpenScales<Codec::q4_k>::OpenScales;
};

// f16 numbers of codes, looked up by the five lowest bits of a word.
struct alignas(64) HalfTable {
  uint16_t v[32] = {};
};
constexpr uint16_t half_of_integer(int a) {  // |a| < 2048
  if (a == 0) return 0;
  int magnitude = a < 0 ? -a : a, exponent = 25;
  while (magnitude < 1024) {
    magnitude *= 2;
    --exponent;
  }
  return static_cast<uint16_t>((a < 0 ? 0x8000 : 0) + exponent * 1024 + magnitude - 1024);
}
// Levels of one more bit than f16 has in its upper byte: these are looked up as words. Twice, as the fifth bit is another code's.
template <Codec C>
inline constexpr bool kFineLevels = C == Codec::iq4_nl || C == Codec::iq4_xs;
template <Codec C>
constexpr HalfTable level_table() {
  HalfTable t;
  for (int i = 0; i < 32; ++i) t.v[i] = half_of_integer(kIq4Codes[i % 16] - WideCodec<C>::kOffset);
  return t;
}
// The others, at most 8 in magnitude (FP4: 1.5 * 8), have zero in the lower byte; the upper one is looked up by the six lowest bits of a
// byte, of which two are another code's. Four-bit codes without an offset have kCentre taken off for that.
struct alignas(64) UpperTable {
  uint8_t v[64] = {};
};
template <Codec C>
inline constexpr int kCentre = (C == Codec::q4_1 || C == Codec::q4_k || C == Codec::int4) ? 8 : 0;
// The number of the code in the four lowest bits of i, as f16.
template <Codec C>
constexpr uint16_t half_of_nibble(int i) {
  const int code = C == Codec::mxfp4 ? kFp4Codes[i % 16] : i % 16;
  return half_of_integer(code - WideCodec<C>::kOffset - kCentre<C>);
}
template <Codec C>
constexpr UpperTable upper_table() {
  UpperTable t;
  for (int i = 0; i < 64; ++i) t.v[i] = static_cast<uint8_t>(half_of_nibble<C>(i) >> 8);
  return t;
}
template <int kOffset>
constexpr HalfTable five_bit_table() {
  HalfTable t;
  for (int i = 0; i < 32; ++i) t.v[i] = half_of_integer(i - kOffset);
  return t;
}
inline I look_up_halves(const HalfTable& t, I index) { return _mm512_permutexvar_epi16(index, _mm512_load_si512(t.v)); }

template <Codec C>
inline constexpr bool kFiveBits = C == Codec::q5_0 || C == Codec::q5_1 || C == Codec::q5_k;

// The numbers (code - offset - kCentre) of a chunk as f16 in the order of a tile of pairs, eight columns at a time.
template <Codec C>
class HalfCodes {
 public:
  HalfCodes(const WideCodec<C>& codec, int c) {
    if constexpr (kNibbles) {
      nibbles_ = codec.nibbles(c);
    } else {
      codec.codes(c, codes_);
    }
  }
  template <int kEight>
  void get(I (&numbers)[4]) const {
    if constexpr (kNibbles && !kFineLevels<C>) {
      alignas(64) static constexpr UpperTable kTable = upper_table<C>();
      const I table = _mm512_load_si512(kTable.v);
      const auto look_up = [table](I index) __attribute__((always_inline)) {
        constexpr __mmask64 kUpper = 0xaaaaaaaaaaaaaaaaull;
        return _mm512_maskz_permutexvar_epi8(kUpper, index, table);
      };
      const I r = load_bytes(nibbles_ + kStepBytes * kEight);
      numbers[0] = look_up(shl16(r, 8));
      numbers[1] = look_up(shl16(r, 4));
      numbers[2] = look_up(r);
      numbers[3] = look_up(shr16(r, 4));
    } else if constexpr (kNibbles) {
      alignas(64) static constexpr HalfTable kTable = level_table<C>();
      const I r = load_bytes(nibbles_ + kStepBytes * kEight);
      numbers[0] = look_up_halves(kTable, r);
      numbers[1] = look_up_halves(kTable, shr16(r, 4));
      numbers[2] = look_up_halves(kTable, shr16(r, 8));
      numbers[3] = look_up_halves(kTable, shr16(r, 12));
    } else {
      get_step(codes_[2 * kEight], numbers[0], numbers[2]);
      get_step(codes_[2 * kEight + 1], numbers[1], numbers[3]);
    }
  }

 private:
  static constexpr bool kNibbles = requires(const WideCodec<C>& codec) { codec.nibbles(0); };
  static constexpr int kOffset = WideCodec<C>::kOffset;

  static void get_step(I codes, I& low, I& high) {
    if constexpr (kFiveBits<C>) {
      alignas(64) static constexpr HalfTable kTable = five_bit_table<kOffset>();
      low = look_up_halves(kTable, codes);
      high = look_up_halves(kTable, shr16(codes, 8));
    } else {  // beside the exponent of 1024 a code is the number 1024 + code
      const I base = words(half_of_integer(1024 + kOffset));
      low = half_sub(_mm512_ternarylogic_epi32(codes, words(0xff), words(0x6400), 0xea), base);
      high = half_sub(ior(shr16(codes, 8), words(0x6400)), base);
    }
  }
  const uint8_t* nibbles_ = nullptr;
  I codes_[kSteps];
};

// bf16 of 2^-112 times the f16: the product is a / 8 rounded, its sign spread over the upper bits.
inline I brain_of_half(I a) { return iand(_mm512_mulhrs_epi16(a, words(0x1000)), words(0x8fff)); }

// A store that keeps its place among tile loads, which are volatile assembly too.
inline void store_opened(uint8_t* p, I a) { __asm__ volatile("vmovdqa64 %1, %0" : "=m"(*reinterpret_cast<__m512i*>(p)) : "v"(a)); }

template <int kNumber>
struct Step {
  static constexpr int value = kNumber;
};

constexpr int kOpenSteps = 4;  // of a chunk, eight columns each

// Factors of chunk c: value = scale * number + minus, see HalfCodes.
template <Codec C>
__attribute__((always_inline)) inline void load_factors(const OpenScales<C>& scales, int c, I* scale, I& minus) {
  minus = iset1(0);
  scales.load(c, scale, minus);
  if constexpr (kCentre<C> != 0) minus = half_fma(words(half_of_integer(kCentre<C>)), scale[0], minus);
}

// Chunk c of a unit's 16 rows as a tile of pairs: [16 pairs of columns][16 rows][2]. Calls between(Step<0..3>) on the way, so that tiles
// have work while the vector units do this.
template <Codec C, typename Between>
__attribute__((always_inline)) inline void open_chunk(const WideCodec<C>& codec, const OpenScales<C>& scales, int c, uint8_t* to,
                                                      const Between& between) {
  using D = WideCodec<C>;
  I scale[kChunk / D::kSub], minus;
  load_factors<C>(scales, c, scale, minus);
  const HalfCodes<C> codes(codec, c);
  const auto step = [&](auto eight) __attribute__((always_inline)) {
    I numbers[4];
    codes.template get<eight.value>(numbers);
    between(eight);
    const I factor = scale[eight.value * 8 / D::kSub];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      store_opened(to + kRowBytes * (4 * eight.value + i),
                   brain_of_half(D::kMinimum ? half_fma(numbers[i], factor, minus) : half_mul(numbers[i], factor)));
  };
  step(Step<0>{});
  step(Step<1>{});
  step(Step<2>{});
  step(Step<3>{});
}

// Floats have no codes to open: their unit is all that there is.
template <>
struct WideCodec<Codec::f16> {
  Unit unit;
  explicit WideCodec(const Unit& u) : unit(u) {}
};
template <>
struct WideCodec<Codec::fp8> : WideCodec<Codec::f16> {
  using WideCodec<Codec::f16>::WideCodec;
};

// A unit of 16 rows of w; open() puts chunk c as open_chunk does.
template <Codec C>
struct OpenUnit {
  const WideCodec<C>& codec;
  const OpenScales<C> scales;
  OpenUnit(const WideCodec<C>& unit, const WideRows&, F up) : codec(unit), scales(unit, up) {}
  template <typename Between>
  __attribute__((always_inline)) void open(int c, uint8_t* to, const Between& between) const {
    open_chunk<C>(codec, scales, c, to, between);
  }
};
// [2][16] words as [16][2].
inline I interleave(I a) {
  return _mm512_permutexvar_epi16(_mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                                                   19, 3, 18, 2, 17, 1, 16, 0),
                                  a);
}
template <>
struct OpenUnit<Codec::f16> {
  const uint8_t* numbers;
  OpenUnit(const WideCodec<Codec::f16>& codec, const WideRows&, F) : numbers(codec.unit.p) {}
  template <typename Between>
  __attribute__((always_inline)) void open(int c, uint8_t* to, const Between& between) const {
    const uint8_t* const from = numbers + c * kTileBytes;
#pragma GCC unroll 16
    for (int i = 0; i < kChunk / 2; ++i) {
      if (i == 0) between(Step<0>{});
      if (i == 4) between(Step<1>{});
      if (i == 8) between(Step<2>{});
      if (i == 12) between(Step<3>{});
      const F low = load_f16(from + kRowBytes * i), high = load_f16(from + kRowBytes * i + kRowBytes / 2);
      store_opened(to + kRowBytes * i, interleave(reinterpret_cast<I>(_mm512_cvtne2ps_pbh(high, low))));
    }
  }
};
template <>
struct OpenUnit<Codec::fp8> {
  const float* block_scales;
  const uint8_t* codes;
  F up;
  OpenUnit(const WideCodec<Codec::fp8>& codec, const WideRows& w, F factor)
      : block_scales(reinterpret_cast<const float*>(codec.unit.p)), codes(codec.unit.p + w.header_bytes), up(factor) {}
  template <typename Between>
  __attribute__((always_inline)) void open(int c, uint8_t* to, const Between& between) const {
    constexpr int kScaleColumns = 128;
    constexpr float kHalfTooSmall = 256.0f;  // E4M3 read as f16; see load_e4m3
    const I factor = half_pairs(mul(set1(kHalfTooSmall * block_scales[c * kChunk / kScaleColumns]), up)), mask = words(0xbf80);
#pragma GCC unroll 8
    for (int i = 0; i < kSteps; ++i) {  // four columns
      if (i == 0) between(Step<0>{});
      if (i == 2) between(Step<1>{});
      if (i == 4) between(Step<2>{});
      if (i == 6) between(Step<3>{});
      const I code = load_bytes(codes + (c * kSteps + i) * kRowBytes);
      const I even = iand(_mm512_srai_epi16(shl16(code, 8), 1), mask), odd = iand(_mm512_srai_epi16(code, 1), mask);
      uint8_t* const out = to + kRowBytes * (i / 2 * 4 + i % 2);
      store_opened(out, brain_of_half(half_mul(interleave(even), factor)));
      store_opened(out + 2 * kRowBytes, brain_of_half(half_mul(interleave(odd), factor)));
    }
  }
};

// 32 activations as bf16 in the order of a tile's row.
inline I tile_row(F first, F second) {
  const I order = _mm512_set_epi16(31, 29, 27, 25, 30, 28, 26, 24, 23, 21, 19, 17, 22, 20, 18, 16, 15, 13, 11, 9, 14, 12, 10, 8, 7, 5, 3, 1,
                                   6, 4, 2, 0);
  const F factor = set1(kActivationFactor);
  return _mm512_permutexvar_epi16(order, reinterpret_cast<I>(_mm512_cvtne2ps_pbh(mul(second, factor), mul(first, factor))));
}

}  // namespace
}  // namespace cachalot::cpu
