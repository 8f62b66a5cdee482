// What all products of integers in the wide layout share: how its units give codes and scales. Over the operations of bytes_vnni.h
// or bytes_avx2.h, of which one was included before. For the layout see cpu/wide_pack.h.
#pragma once

#include "cpu/isa/wide_finish.h"

namespace cachalot::cpu {
namespace {

inline constexpr int kSteps = kChunk / 4;  // of a chunk
inline constexpr int kStepBytes = 64;      // 16 rows x 4 columns, of which a register holds kWidth rows

// Memory is asked for what comes three kilobytes later, so that it works while a tile of several tokens is computed: first to the second
// cache, as so many lines would take the places of what is being read in the first one, then, shortly before it is read, to that.
inline void ask_ahead(const uint8_t* p, int64_t bytes) {
  constexpr int64_t kFar = 3072, kNear = 512, kLine = 64;
  for (int64_t i = 0; i < bytes; i += kLine) {
    __builtin_prefetch(p + kFar + i, 0, 2);
    __builtin_prefetch(p + kNear + i);
  }
}

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

// Where a unit's numbers for the register's rows begin: f16 and u8 scales of 16 rows, and codes.
struct Unit {
  const uint8_t* p;
  int lane;  // first row of the register: 0, or 8 in its second half
  [[nodiscard]] F half(int offset) const { return load_f16(p + offset + 2 * lane); }
  [[nodiscard]] F u8(int offset) const { return to_float(load_u8(p + offset + lane)); }
  [[nodiscard]] F i8(int offset) const { return to_float(load_i8(p + offset + lane)); }
  [[nodiscard]] const uint8_t* codes(int offset) const { return p + offset + 4 * lane; }
};

// WideCodec<C>, a unit opened for a register of rows: value = scale * (code - kOffset) - minimum.
//   codes(c, w)   the codes of chunk c, a register per step
//   nibbles(c)    where the codes of chunk c lie, in codecs that store four bits of them in one place
//   scale(i)      of sub-block i, kSub columns each; all products of the stored factors are exact in f32
//   kChunks       of a unit; 0 where it depends on the matrix
//   minimum(c)    of chunk c, where kMinimum says that there is one
template <Codec C>
struct WideCodec;

template <int kSubColumns, int kCodeOffset, bool kHasMinimum>
struct WideBase {
  static constexpr int kSub = kSubColumns, kOffset = kCodeOffset;
  static constexpr bool kMinimum = kHasMinimum;
  Unit unit;
};
// A block of 32: one f16 scale, and a second f16 that is added.
template <int kCodeOffset, bool kHasMinimum>
struct WideBlock : WideBase<32, kCodeOffset, kHasMinimum> {
  static constexpr int kChunks = 1;
  explicit WideBlock(const Unit& u) : WideBase<32, kCodeOffset, kHasMinimum>{u} {}
  [[nodiscard]] F scale(int) const { return this->unit.half(0); }
  [[nodiscard]] F minimum(int) const { return sub(zero(), this->unit.half(32)); }
};
template <>
struct WideCodec<Codec::q4_0> : WideBlock<8, false> {
  using WideBlock::WideBlock;
  [[nodiscard]] const uint8_t* nibbles(int) const { return unit.codes(32); }
  void codes(int c, I* w) const { nibble_codes(nibbles(c), w); }
};
template <>
struct WideCodec<Codec::q4_1> : WideBlock<0, true> {
  using WideBlock::WideBlock;
  [[nodiscard]] const uint8_t* nibbles(int) const { return unit.codes(64); }
  void codes(int c, I* w) const { nibble_codes(nibbles(c), w); }
};
template <>
struct WideCodec<Codec::q5_0> : WideBlock<16, false> {
  using WideBlock::WideBlock;
  void codes(int, I* w) const {
    nibble_codes(unit.codes(96), w);
    add_fifth_bits(unit.codes(32), w);
  }
};
template <>
struct WideCodec<Codec::q5_1> : WideBlock<0, true> {
  using WideBlock::WideBlock;
  void codes(int, I* w) const {
    nibble_codes(unit.codes(128), w);
    add_fifth_bits(unit.codes(64), w);
  }
};
template <>
struct WideCodec<Codec::q8_0> : WideBlock<128, false> {
  using WideBlock::WideBlock;
  void codes(int, I* w) const { byte_codes(unit.codes(32), w); }
};
alignas(16) constexpr uint8_t kIq4Codes[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};  // levels + 128
alignas(16) constexpr uint8_t kFp4Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};                // 2 levels + 12
template <>
struct WideCodec<Codec::iq4_nl> : WideBlock<128, false> {
  using WideBlock::WideBlock;
  [[nodiscard]] const uint8_t* nibbles(int) const { return unit.codes(32); }
  void codes(int c, I* w) const { table_codes(nibbles(c), kIq4Codes, w); }
};
template <>
struct WideCodec<Codec::iq4_xs> : WideBase<32, 128, false> {
  static constexpr int kChunks = kScaleChunks;
  F d;
  explicit WideCodec(const Unit& u) : WideBase{u}, d(u.half(0)) {}
  [[nodiscard]] const uint8_t* nibbles(int c) const { return unit.codes(160 + 256 * c); }
  void codes(int c, I* w) const { table_codes(nibbles(c), kIq4Codes, w); }
  [[nodiscard]] F scale(int c) const { return mul(d, unit.i8(32 + 16 * c)); }
};
template <>
struct WideCodec<Codec::mxfp4> : WideBase<32, 12, false> {
  static constexpr int kChunks = 1;
  explicit WideCodec(const Unit& u) : WideBase{u} {}
  [[nodiscard]] const uint8_t* nibbles(int) const { return unit.codes(16); }
  void codes(int c, I* w) const { table_codes(nibbles(c), kFp4Codes, w); }
  // Half the scale, as the table's levels are doubled.
  [[nodiscard]] F scale(int) const { return as_float(shl(isub(load_u8(unit.p + unit.lane), iset1(1)), 23)); }
};
// The planar formats: a unit is one group of the source.
struct WidePlanar : WideBase<32, 0, true> {
  static constexpr int kChunks = 0;
  F d, m;
  explicit WidePlanar(const Unit& u) : WideBase{u}, d(u.half(0)), m(mul(d, u.u8(32))) {}
  [[nodiscard]] F scale(int) const { return d; }
  [[nodiscard]] F minimum(int) const { return m; }
};
template <>
struct WideCodec<Codec::int4> : WidePlanar {
  using WidePlanar::WidePlanar;
  [[nodiscard]] const uint8_t* nibbles(int c) const { return unit.codes(48 + 256 * c); }
  void codes(int c, I* w) const { nibble_codes(nibbles(c), w); }
};
template <>
struct WideCodec<Codec::int8> : WidePlanar {
  using WidePlanar::WidePlanar;
  void codes(int c, I* w) const { byte_codes(unit.codes(48 + 512 * c), w); }
};
struct WideSuper : WideBase<32, 0, true> {
  static constexpr int kChunks = kScaleChunks;
  F d, dmin;
  explicit WideSuper(const Unit& u) : WideBase{u}, d(u.half(0)), dmin(u.half(32)) {}
  [[nodiscard]] F scale(int c) const { return mul(d, unit.u8(64 + 32 * c)); }
  [[nodiscard]] F minimum(int c) const { return mul(dmin, unit.u8(80 + 32 * c)); }
};
template <>
struct WideCodec<Codec::q4_k> : WideSuper {
  using WideSuper::WideSuper;
  [[nodiscard]] const uint8_t* nibbles(int c) const { return unit.codes(320 + 256 * c); }
  void codes(int c, I* w) const { nibble_codes(nibbles(c), w); }
};
template <>
struct WideCodec<Codec::q5_k> : WideSuper {
  using WideSuper::WideSuper;
  void codes(int c, I* w) const {
    nibble_codes(unit.codes(320 + 320 * c + 64), w);
    add_fifth_bits(unit.codes(320 + 320 * c), w);
  }
};
template <>
struct WideCodec<Codec::q6_k> : WideBase<16, 32, false> {
  static constexpr int kChunks = kScaleChunks;
  F d;
  explicit WideCodec(const Unit& u) : WideBase{u}, d(u.half(0)) {}
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
  [[nodiscard]] F scale(int i) const { return mul(d, unit.i8(32 + 16 * i)); }
};

}  // namespace
}  // namespace cachalot::cpu
