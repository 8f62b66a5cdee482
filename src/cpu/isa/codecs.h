// How each packed block decodes to f32: exactly the numbers of tensor's dequant_row, chunk by chunk of 32, in registers.
//
// Decoder<C>::open reads what a block's elements share (scales as floats); Decoder<C>::chunk decodes elements [32 c, 32 c + 32).
// Block layouts are those of tensor/format.h, except int4 and int8: f16 scale, u8 zero, a spare byte, then the group's codes.
#pragma once

#include "cpu/isa/kernels.h"

namespace cachalot::cpu {
namespace {

inline constexpr int kVecs = kChunk / kWidth;  // vectors of a chunk

inline uint16_t read_u16(const uint8_t* p) {
  uint16_t out;
  __builtin_memcpy(&out, p, sizeof out);
  return out;
}
inline uint32_t read_u32(const uint8_t* p) {
  uint32_t out;
  __builtin_memcpy(&out, p, sizeof out);
  return out;
}
inline float read_half(const uint8_t* p) { return half_to_float(read_u16(p)); }

// (code - zero) * d + m for 4-bit codes, rounded after each operation.
struct Levels {
  Table16 table;
  F d, m;
  I zero;
};
alignas(64) constexpr float kCodes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
inline Levels make_levels(int zero, float d, float m) {
  Levels out;
  if constexpr (kTableLevels) {
    out.table = offset_table(scale_table(offset_table(load_table(kCodes), static_cast<float>(-zero)), d), m);
  } else {
    out.d = set1(d);
    out.m = set1(m);
    out.zero = iset1(zero);
  }
  return out;
}
// The level of the low 4 bits of each lane.
inline F level(const Levels& levels, I code) {
  if constexpr (kTableLevels) {
    return look_up(levels.table, code);
  } else {
    return add(mul(to_float(isub(iand(code, iset1(15)), levels.zero)), levels.d), levels.m);
  }
}
// 16 bytes to 32 levels: byte j holds element j in its low and element j + 16 in its high nibble.
inline void nibble_levels(const uint8_t* qs, const Levels& levels, F* w) {
  for (int v = 0; v < kVecs / 2; ++v) {
    const I pair = load_u8(qs + v * kWidth);
    w[v] = level(levels, pair);
    w[v + kVecs / 2] = level(levels, shr(pair, 4));
  }
}
inline void nibble_look_up(const uint8_t* qs, const Table16& table, F* w) {
  for (int v = 0; v < kVecs / 2; ++v) {
    const I pair = load_u8(qs + v * kWidth);
    w[v] = look_up(table, pair);
    w[v + kVecs / 2] = look_up(table, shr(pair, 4));
  }
}
// As nibble_levels with a fifth bit for each element in the 32 bits of `high`; codes minus `zero`, as floats.
inline void five_bit_codes(const uint8_t* qs, uint32_t high, int zero, F* w) {
  for (int v = 0; v < kVecs / 2; ++v) {
    const I pair = load_u8(qs + v * kWidth);
    const I low = ior(iand(pair, iset1(15)), lanes_of_bits(high >> (v * kWidth), 16));
    const I up = ior(shr(pair, 4), lanes_of_bits(high >> (16 + v * kWidth), 16));
    w[v] = to_float(isub(low, iset1(zero)));
    w[v + kVecs / 2] = to_float(isub(up, iset1(zero)));
  }
}

template <Codec C>
struct Decoder;

// ---- plain floats and FP8 ----

struct BytesBlock {
  const uint8_t* p;
};
template <>
struct Decoder<Codec::f32> {
  static constexpr int kChunks = 1;
  using Block = BytesBlock;
  static void open(const uint8_t* p, float, Block& b) { b.p = p; }
  static void chunk(const Block& b, int, F* w) {
    for (int v = 0; v < kVecs; ++v) w[v] = load(reinterpret_cast<const float*>(b.p) + v * kWidth);
  }
};
template <>
struct Decoder<Codec::f16> {
  static constexpr int kChunks = 1;
  using Block = BytesBlock;
  static void open(const uint8_t* p, float, Block& b) { b.p = p; }
  static void chunk(const Block& b, int, F* w) {
    for (int v = 0; v < kVecs; ++v) w[v] = load_f16(b.p + 2 * v * kWidth);
  }
};
template <>
struct Decoder<Codec::bf16> {
  static constexpr int kChunks = 1;
  using Block = BytesBlock;
  static void open(const uint8_t* p, float, Block& b) { b.p = p; }
  static void chunk(const Block& b, int, F* w) {
    for (int v = 0; v < kVecs; ++v) w[v] = as_float(shl(load_u16(b.p + 2 * v * kWidth), 16));
  }
};
// E4M3 is a binary16 with two exponent bits and seven mantissa bits less: shifted into place it reads 2^8 times too small. The code for NaN
// would read 480.
template <>
struct Decoder<Codec::fp8> {
  static constexpr int kChunks = 1;
  struct Block {
    const uint8_t* p;
    float scale;
  };
  static void open(const uint8_t* p, float scale, Block& b) { b = {p, scale}; }
  static void chunk(const Block& b, int, F* w) {
    for (int v = 0; v < kVecs; ++v) {
      const F small = load_e4m3(b.p + v * kWidth);
      w[v] = mul(if_magnitude(small, 480.0f / 256.0f, set1(__builtin_nanf(""))), set1(256.0f * b.scale));
    }
  }
};

// ---- blocks of 32 ----

template <>
struct Decoder<Codec::q4_0> {
  static constexpr int kChunks = 1;
  struct Block {
    const uint8_t* qs;
    Levels levels;
  };
  static void open(const uint8_t* p, float, Block& b) { b = {p + 2, make_levels(8, read_half(p), 0.0f)}; }
  static void chunk(const Block& b, int, F* w) { nibble_levels(b.qs, b.levels, w); }
};
template <>
struct Decoder<Codec::q4_1> {
  static constexpr int kChunks = 1;
  struct Block {
    const uint8_t* qs;
    Levels levels;
  };
  static void open(const uint8_t* p, float, Block& b) { b = {p + 4, make_levels(0, read_half(p), read_half(p + 2))}; }
  static void chunk(const Block& b, int, F* w) { nibble_levels(b.qs, b.levels, w); }
};
template <>
struct Decoder<Codec::q5_0> {
  static constexpr int kChunks = 1;
  struct Block {
    const uint8_t* p;
    float d;
  };
  static void open(const uint8_t* p, float, Block& b) { b = {p, read_half(p)}; }
  static void chunk(const Block& b, int, F* w) {
    five_bit_codes(b.p + 6, read_u32(b.p + 2), 16, w);
    for (int v = 0; v < kVecs; ++v) w[v] = mul(w[v], set1(b.d));
  }
};
template <>
struct Decoder<Codec::q5_1> {
  static constexpr int kChunks = 1;
  struct Block {
    const uint8_t* p;
    float d, m;
  };
  static void open(const uint8_t* p, float, Block& b) { b = {p, read_half(p), read_half(p + 2)}; }
  static void chunk(const Block& b, int, F* w) {
    five_bit_codes(b.p + 8, read_u32(b.p + 4), 0, w);
    for (int v = 0; v < kVecs; ++v) w[v] = add(mul(w[v], set1(b.d)), set1(b.m));
  }
};
template <>
struct Decoder<Codec::q8_0> {
  static constexpr int kChunks = 1;
  struct Block {
    const uint8_t* qs;
    float d;
  };
  static void open(const uint8_t* p, float, Block& b) { b = {p + 2, read_half(p)}; }
  static void chunk(const Block& b, int, F* w) {
    for (int v = 0; v < kVecs; ++v) w[v] = mul(to_float(load_i8(b.qs + v * kWidth)), set1(b.d));
  }
};
alignas(64) constexpr float kIq4Levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
alignas(64) constexpr float kFp4Levels[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, 0, -0.5f, -1, -1.5f, -2, -3, -4, -6};
template <>
struct Decoder<Codec::iq4_nl> {
  static constexpr int kChunks = 1;
  struct Block {
    const uint8_t* qs;
    Table16 table;
  };
  static void open(const uint8_t* p, float, Block& b) { b = {p + 2, scale_table(load_table(kIq4Levels), read_half(p))}; }
  static void chunk(const Block& b, int, F* w) { nibble_look_up(b.qs, b.table, w); }
};
inline float e8m0(uint8_t e) {
  const uint32_t bits = e == 255 ? 0x7fc00000u : e == 0 ? 0x00400000u : static_cast<uint32_t>(e) << 23;
  float out;
  __builtin_memcpy(&out, &bits, sizeof out);
  return out;
}
template <>
struct Decoder<Codec::mxfp4> {
  static constexpr int kChunks = 1;
  struct Block {
    const uint8_t* qs;
    Table16 table;
  };
  static void open(const uint8_t* p, float, Block& b) { b = {p + 1, scale_table(load_table(kFp4Levels), e8m0(*p))}; }
  static void chunk(const Block& b, int, F* w) { nibble_look_up(b.qs, b.table, w); }
};

// ---- groups of a length known at run time ----

template <>
struct Decoder<Codec::int4> {
  static constexpr int kChunks = 0;
  struct Block {
    const uint8_t* qs;
    Levels levels;
  };
  static void open(const uint8_t* p, float, Block& b) { b = {p + 4, make_levels(p[2], read_half(p), 0.0f)}; }
  static void chunk(const Block& b, int c, F* w) { nibble_levels(b.qs + 16 * c, b.levels, w); }
};
template <>
struct Decoder<Codec::int8> {
  static constexpr int kChunks = 0;
  struct Block {
    const uint8_t* qs;
    float d;
    int zero;
  };
  static void open(const uint8_t* p, float, Block& b) { b = {p + 4, read_half(p), p[2]}; }
  static void chunk(const Block& b, int c, F* w) {
    for (int v = 0; v < kVecs; ++v) w[v] = mul(to_float(isub(load_u8(b.qs + 32 * c + v * kWidth), iset1(b.zero))), set1(b.d));
  }
};

// ---- super-blocks of 256 ----

// 16 small integers, less an offset, times d.
inline void scale16(const uint8_t* in, int offset, float d, float* out) {
  for (int i = 0; i < 16; i += kWidth) store(out + i, mul(to_float(isub(load_i8(in + i), iset1(offset))), set1(d)));
}
template <>
struct Decoder<Codec::q2_k> {
  static constexpr int kChunks = 8;
  struct Block {
    const uint8_t* qs;
    float d[16], m[16];
  };
  static void open(const uint8_t* p, float, Block& b) {
    const F d = set1(read_half(p + 80)), m = set1(read_half(p + 82));
    b.qs = p + 16;
    for (int i = 0; i < 16; i += kWidth) {
      const I both = load_u8(p + i);
      store(b.d + i, mul(d, to_float(iand(both, iset1(15)))));
      store(b.m + i, mul(m, to_float(shr(both, 4))));
    }
  }
  static void chunk(const Block& b, int c, F* w) {
    for (int v = 0; v < kVecs; ++v) {
      const I q = iand(shr(load_u8(b.qs + 32 * (c / 4) + v * kWidth), 2 * (c % 4)), iset1(3));
      const int s = 2 * c + v * kWidth / 16;
      w[v] = sub(mul(set1(b.d[s]), to_float(q)), set1(b.m[s]));
    }
  }
};
template <>
struct Decoder<Codec::q3_k> {
  static constexpr int kChunks = 8;
  struct Block {
    const uint8_t* p;
    float d[16];
  };
  static void open(const uint8_t* p, float, Block& b) {
    const uint8_t* packed = p + 96;
    const uint32_t a = read_u32(packed), c = read_u32(packed + 4), high = read_u32(packed + 8);
    const auto join = [](uint32_t low, uint32_t up) { return (low & 0x0f0f0f0fu) | ((up & 0x03030303u) << 4); };
    const uint32_t words[4] = {join(a, high), join(c, high >> 2), join(a >> 4, high >> 4), join(c >> 4, high >> 6)};
    b.p = p;
    scale16(reinterpret_cast<const uint8_t*>(words), 32, read_half(p + 108), b.d);
  }
  static void chunk(const Block& b, int c, F* w) {
    for (int v = 0; v < kVecs; ++v) {
      const I low = iand(shr(load_u8(b.p + 32 + 32 * (c / 4) + v * kWidth), 2 * (c % 4)), iset1(3));
      const I high = iand(shr(load_u8(b.p + v * kWidth), c), iset1(1));
      w[v] = mul(set1(b.d[2 * c + v * kWidth / 16]), to_float(isub(ior(low, shl(high, 2)), iset1(4))));
    }
  }
};

// The 8 scales and 8 minimums of Q4_K and Q5_K, times d and dmin. Six bits each, the last four split over the bytes; unpacked four
// at a time in 32-bit words.
struct SubScales {
  float d[8], m[8];
};
inline void open_sub_scales(const uint8_t* p, SubScales& out) {
  const uint32_t a = read_u32(p + 4), b = read_u32(p + 8), c = read_u32(p + 12);
  const uint32_t words[4] = {a & 0x3f3f3f3fu, (c & 0x0f0f0f0fu) | ((a >> 2) & 0x30303030u),          // scales
                             b & 0x3f3f3f3fu, ((c >> 4) & 0x0f0f0f0fu) | ((b >> 2) & 0x30303030u)};  // minimums
  int8_t bytes[16];
  __builtin_memcpy(bytes, words, sizeof bytes);
  float both[16];
  const float d = read_half(p), m = read_half(p + 2);
  for (int i = 0; i < 16; i += kWidth) store(both + i, to_float(load_i8(reinterpret_cast<const uint8_t*>(bytes) + i)));
  for (int i = 0; i < 8; ++i) {
    out.d[i] = d * both[i];
    out.m[i] = m * both[8 + i];
  }
}
template <>
struct Decoder<Codec::q4_k> {
  static constexpr int kChunks = 8;
  struct Block {
    const uint8_t* qs;
    SubScales s;
  };
  static void open(const uint8_t* p, float, Block& b) {
    b.qs = p + 16;
    open_sub_scales(p, b.s);
  }
  static void chunk(const Block& b, int c, F* w) {
    const Levels levels = make_levels(0, b.s.d[c], -b.s.m[c]);
    for (int v = 0; v < kVecs; ++v) w[v] = level(levels, shr(load_u8(b.qs + 32 * (c / 2) + v * kWidth), 4 * (c % 2)));
  }
};
template <>
struct Decoder<Codec::q5_k> {
  static constexpr int kChunks = 8;
  struct Block {
    const uint8_t* p;
    SubScales s;
  };
  static void open(const uint8_t* p, float, Block& b) {
    b.p = p;
    open_sub_scales(p, b.s);
  }
  static void chunk(const Block& b, int c, F* w) {
    for (int v = 0; v < kVecs; ++v) {
      const I low = iand(shr(load_u8(b.p + 48 + 32 * (c / 2) + v * kWidth), 4 * (c % 2)), iset1(15));
      const I high = iand(shr(load_u8(b.p + 16 + v * kWidth), c), iset1(1));
      w[v] = sub(mul(set1(b.s.d[c]), to_float(ior(low, shl(high, 4)))), set1(b.s.m[c]));
    }
  }
};
template <>
struct Decoder<Codec::q6_k> {
  static constexpr int kChunks = 8;
  struct Block {
    const uint8_t* p;
    float d[16];
  };
  static void open(const uint8_t* p, float, Block& b) {
    b.p = p;
    scale16(p + 192, 0, read_half(p + 208), b.d);
  }
  static void chunk(const Block& b, int c, F* w) {
    const int half = c / 4, run = c % 4;
    for (int v = 0; v < kVecs; ++v) {
      const I pair = load_u8(b.p + 64 * half + 32 * (run % 2) + v * kWidth);
      const I low = run < 2 ? iand(pair, iset1(15)) : shr(pair, 4);
      const I high = iand(shr(load_u8(b.p + 128 + 32 * half + v * kWidth), 2 * run), iset1(3));
      w[v] = mul(set1(b.d[2 * c + v * kWidth / 16]), to_float(isub(ior(low, shl(high, 4)), iset1(32))));
    }
  }
};
template <>
struct Decoder<Codec::iq4_xs> {
  static constexpr int kChunks = 8;
  struct Block {
    const uint8_t* p;
    float d;
  };
  static void open(const uint8_t* p, float, Block& b) { b = {p, read_half(p)}; }
  static void chunk(const Block& b, int c, F* w) {
    const int low = (b.p[4 + c / 2] >> (4 * (c % 2))) & 15, high = (read_u16(b.p + 2) >> (2 * c)) & 3;
    const float scale = b.d * static_cast<float>((low | (high << 4)) - 32);
    nibble_look_up(b.p + 8 + 16 * c, scale_table(load_table(kIq4Levels), scale), w);
  }
};

}  // namespace
}  // namespace cachalot::cpu
