// Packing into, and reading rows back from, the wide layout: once per weight at load, four codes of a row at a time.
#include "cpu/wide_pack.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/check.h"
#include "base/float_formats.h"

namespace cachalot::cpu {
namespace {

constexpr int kCodeBytes4 = 256, kCodeBytes8 = 512;  // of 16 rows x 32 columns

// Where the parts of a unit lie. Absent parts have offset -1; steps are from one chunk of 32 to the next.
struct Layout {
  int block_scales = 0;             // f16 [16], or u8 exponents
  int second = -1;                  // f16 [16]: m or dmin
  int zeros = -1;                   // u8 [16]
  int scales = -1, scale_step = 0;  // per chunk (q6_k: two of 16 numbers): u8 or i8 scale[16], then minimum[16]
  int high = -1, codes = 0, code_step = 0;
  int bits = 4;  // 4, 5, 6 or 8
};
Layout layout_of(Codec codec) {
  switch (codec) {
    case Codec::q4_0:
    case Codec::iq4_nl: return {.codes = 32};
    case Codec::q4_1: return {.second = 32, .codes = 64};
    case Codec::q5_0: return {.high = 32, .codes = 96, .bits = 5};
    case Codec::q5_1: return {.second = 32, .high = 64, .codes = 128, .bits = 5};
    case Codec::q8_0: return {.codes = 32, .bits = 8};
    case Codec::mxfp4: return {.codes = 16};
    case Codec::int4: return {.zeros = 32, .codes = 48, .code_step = kCodeBytes4};
    case Codec::int8: return {.zeros = 32, .codes = 48, .code_step = kCodeBytes8, .bits = 8};
    case Codec::q4_k: return {.second = 32, .scales = 64, .scale_step = 32, .codes = 320, .code_step = kCodeBytes4};
    case Codec::q5_k:
      return {.second = 32, .scales = 64, .scale_step = 32, .high = 320, .codes = 384, .code_step = kCodeBytes4 + 64, .bits = 5};
    case Codec::q6_k: return {.scales = 32, .scale_step = 32, .high = 288, .codes = 416, .code_step = kCodeBytes4 + 128, .bits = 6};
    case Codec::iq4_xs: return {.scales = 32, .scale_step = 16, .codes = 160, .code_step = kCodeBytes4};
    default: CACHALOT_CHECK(false, "codec {}", static_cast<int>(codec));
  }
}

// Four codes of a row are the bytes of a word, as they lie in a step; a chunk is eight such words. Everything below works on words.
using Steps = std::array<uint32_t, kChunk / 4>;
constexpr uint32_t each(uint32_t byte) { return byte * 0x01010101u; }

void put_word(uint8_t* at, uint32_t word) { std::memcpy(at, &word, sizeof word); }
uint32_t word_at(const uint8_t* at) {
  uint32_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

// Chunk `chunk` of row r.
void put_codes(const Layout& l, uint8_t* unit, int chunk, int r, const Steps& q) {
  uint8_t* const codes = unit + l.codes + l.code_step * chunk + 4 * r;
  if (l.bits == 8) {
    for (size_t s = 0; s < q.size(); ++s) put_word(codes + 64 * s, q[s]);
    return;
  }
  for (size_t i = 0; i < q.size() / 2; ++i) put_word(codes + 64 * i, (q[2 * i] & each(15)) | ((q[2 * i + 1] & each(15)) << 4));
  uint8_t* const high = unit + l.high + l.code_step * chunk + 4 * r;
  if (l.bits == 5) {
    uint32_t fifth = 0;
    for (size_t s = 0; s < q.size(); ++s) fifth |= ((q[s] >> 4) & each(1)) << s;
    put_word(high, fifth);
  } else if (l.bits == 6) {
    for (size_t h = 0; h < 2; ++h) {
      uint32_t upper = 0;
      for (size_t s = 0; s < 4; ++s) upper |= ((q[4 * h + s] >> 4) & each(3)) << (2 * s);
      put_word(high + 64 * h, upper);
    }
  }
}
int get_code(const Layout& l, const uint8_t* unit, int chunk, int r, int column) {
  const int step = column / 4, at = r * 4 + column % 4;
  const uint8_t* const codes = unit + l.codes + l.code_step * chunk;
  if (l.bits == 8) return codes[64 * step + at];
  int code = (codes[64 * (step / 2) + at] >> (4 * (step % 2))) & 15;
  const uint8_t* const high = unit + l.high + l.code_step * chunk;
  if (l.bits == 5) code |= ((high[at] >> step) & 1) << 4;
  if (l.bits == 6) code |= ((high[64 * (step / 4) + at] >> (2 * (step % 4))) & 3) << 4;
  return code;
}

// The stored blocks: 32 codes of chunk c as they are multiplied, offsets not taken off. See tensor/format.h.
// Sixteen bytes whose lower nibbles are elements 0..15 and whose upper ones 16..31.
void nibbles(const uint8_t* qs, Steps& q) {
  for (size_t j = 0; j < 4; ++j) {
    const uint32_t both = word_at(qs + 4 * j);
    q[j] = both & each(15);
    q[j + 4] = (both >> 4) & each(15);
  }
}
// Element e's fifth bit is bit e of a word: four bits are spread to the lowest of four bytes by a multiplication.
void add_bits(const uint8_t* qh, Steps& q) {
  const uint32_t bits = word_at(qh);
  for (size_t s = 0; s < q.size(); ++s) q[s] |= ((((bits >> (4 * s)) & 15u) * 0x00204081u) & each(1)) << 4;
}
void read_codes(Codec codec, const uint8_t* b, int c, Steps& q) {
  switch (codec) {
    case Codec::q4_0:
    case Codec::iq4_nl: return nibbles(b + 2, q);
    case Codec::q4_1: return nibbles(b + 4, q);
    case Codec::q5_0: nibbles(b + 6, q); return add_bits(b + 2, q);
    case Codec::q5_1: nibbles(b + 8, q); return add_bits(b + 4, q);
    case Codec::q8_0:
      for (size_t s = 0; s < q.size(); ++s) q[s] = word_at(b + 2 + 4 * s) ^ each(128);
      return;
    case Codec::mxfp4: return nibbles(b + 1, q);
    case Codec::iq4_xs: return nibbles(b + 8 + 16 * c, q);
    case Codec::q4_k:
      for (size_t s = 0; s < q.size(); ++s) q[s] = (word_at(b + 16 + 32 * (c / 2) + 4 * s) >> (4 * (c % 2))) & each(15);
      return;
    case Codec::q5_k:
      for (size_t s = 0; s < q.size(); ++s)
        q[s] = ((word_at(b + 48 + 32 * (c / 2) + 4 * s) >> (4 * (c % 2))) & each(15)) | (((word_at(b + 16 + 4 * s) >> c) & each(1)) << 4);
      return;
    case Codec::q6_k: {
      const int half = c / 4, run = c % 4;
      for (size_t s = 0; s < q.size(); ++s) {
        const uint32_t low = word_at(b + 64 * half + 32 * (run % 2) + 4 * s) >> (run < 2 ? 0 : 4);
        q[s] = (low & each(15)) | (((word_at(b + 128 + 32 * half + 4 * s) >> (2 * run)) & each(3)) << 4);
      }
      return;
    }
    default: CACHALOT_CHECK(false, "codec {}", static_cast<int>(codec));
  }
}

struct ScaleMin {
  int scale, minimum;
};
ScaleMin k_scale_min(const uint8_t* b, int j) {
  if (j < 4) return {b[j] & 63, b[j + 4] & 63};
  return {(b[j + 4] & 15) | ((b[j - 4] >> 6) << 4), (b[j + 4] >> 4) | ((b[j] >> 6) << 4)};
}

// What a stored block says besides its codes, into row r of the unit.
void put_scales(Codec codec, const Layout& l, const uint8_t* b, int r, uint8_t* unit) {
  const auto put_half = [&](int offset, const uint8_t* from) { std::memcpy(unit + offset + 2 * r, from, 2); };
  switch (codec) {
    case Codec::mxfp4: unit[r] = b[0]; return;
    case Codec::q6_k:
      put_half(0, b + 208);
      for (int s = 0; s < 16; ++s) unit[l.scales + 16 * s + r] = b[192 + s];
      return;
    case Codec::iq4_xs: {
      uint16_t high;
      put_half(0, b);
      std::memcpy(&high, b + 2, 2);
      for (int s = 0; s < 8; ++s) {
        const int low = (b[4 + s / 2] >> (4 * (s % 2))) & 15;
        unit[l.scales + 16 * s + r] = static_cast<uint8_t>((low | (((high >> (2 * s)) & 3) << 4)) - 32);
      }
      return;
    }
    case Codec::q4_k:
    case Codec::q5_k:
      put_half(0, b);
      put_half(32, b + 2);
      for (int s = 0; s < 8; ++s) {
        const ScaleMin both = k_scale_min(b + 4, s);
        unit[l.scales + 32 * s + r] = static_cast<uint8_t>(both.scale);
        unit[l.scales + 32 * s + 16 + r] = static_cast<uint8_t>(both.minimum);
      }
      return;
    default:
      put_half(0, b);
      if (l.second >= 0) put_half(l.second, b + 2);
  }
}

// One planar group of one row.
void put_planar(const LinearSource& s, const Layout& l, const WeightBytes& w, int row, int group, int r, uint8_t* unit) {
  const size_t g = static_cast<size_t>(row) * static_cast<size_t>(s.in / s.group) + static_cast<size_t>(group);
  std::memcpy(unit + 2 * r, w.scales.data() + 2 * g, 2);
  unit[l.zeros + r] = static_cast<uint8_t>(w.zeros[g]);
  const size_t first = static_cast<size_t>(row) * static_cast<size_t>(s.in) + static_cast<size_t>(group) * static_cast<size_t>(s.group);
  const auto* const data = reinterpret_cast<const uint8_t*>(w.data.data());
  for (int c = 0; c < s.group / kChunk; ++c) {
    const size_t at = first + static_cast<size_t>(c * kChunk);
    Steps q;
    for (size_t e = 0; e < q.size(); ++e) {
      if (l.bits == 8) {
        q[e] = word_at(data + at + 4 * e);
      } else {  // two bytes, four nibbles in rising order
        uint16_t pair;
        std::memcpy(&pair, data + at / 2 + 2 * e, sizeof pair);
        const uint32_t bytes = (pair | (static_cast<uint32_t>(pair) << 8)) & 0x00ff00ffu;
        q[e] = (bytes | (bytes << 4)) & each(15);
      }
    }
    put_codes(l, unit, c, r, q);
  }
}

constexpr float kIq4Levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr float kFp4Levels[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, 0, -0.5f, -1, -1.5f, -2, -3, -4, -6};

}  // namespace

WideUnit wide_unit(Codec codec, int group, int in) {
  const int scales = (in + kScaleBlock - 1) / kScaleBlock * static_cast<int>(sizeof(float)), header = (scales + 63) / 64 * 64;
  switch (codec) {
    case Codec::f16:
    case Codec::bf16: return {in, in * 2 * kWideRows};
    case Codec::fp8: return {in, header + in * kWideRows, header};
    case Codec::q4_0:
    case Codec::iq4_nl: return {32, 288};
    case Codec::q4_1: return {32, 320};
    case Codec::q5_0: return {32, 352};
    case Codec::q5_1: return {32, 384};
    case Codec::q8_0: return {32, 544};
    case Codec::mxfp4: return {32, 272};
    case Codec::int4: return {group, 48 + group / kChunk * kCodeBytes4};
    case Codec::int8: return {group, 48 + group / kChunk * kCodeBytes8};
    case Codec::q4_k: return {256, 2368};
    case Codec::q5_k: return {256, 2880};
    case Codec::q6_k: return {256, 3360};
    case Codec::iq4_xs: return {256, 2208};
    default: return {};
  }
}

bool fits_wide(const LinearSource& source, Codec codec) {
  if (is_float(codec) && source.in % kChunk != 0) return false;
  if (codec == Codec::fp8) {
    return std::none_of(source.matrices.begin(), source.matrices.end(), [](const WeightBytes& w) {
      bool found = false;
      for (const std::byte code : w.data) found |= (code & std::byte{0x7f}) == std::byte{0x7f};
      return found;
    });
  }
  if (codec != Codec::mxfp4) return true;
  constexpr size_t kBlockBytes = 17;
  for (const WeightBytes& w : source.matrices) {
    for (size_t at = 0; at < w.data.size(); at += kBlockBytes) {
      const auto exponent = static_cast<uint8_t>(w.data[at]);
      if (exponent < 2 || exponent == 255) return false;
    }
  }
  return true;
}

namespace {

// Where a float's bytes lie behind the header.
size_t float_offset(Codec codec, int r, int column) {
  const int eight = column / 8, c = column % 8;
  if (codec == Codec::fp8) return static_cast<size_t>(eight * 128 + c / 4 * 64 + c % 4 / 2 * 32 + 2 * r + c % 2);
  const int piece = c / 4 + 2 * (c % 2), second = c % 4 / 2;  // of the pairs 0 2, 4 6, 1 3, 5 7
  return static_cast<size_t>(eight * 256 + piece * 64 + (codec == Codec::bf16 ? 4 * r + 2 * second : 2 * r + 32 * second));
}
// Row r of a group from its stored numbers.
template <typename Number>
void put_floats(Codec codec, const std::byte* from, int n, int r, uint8_t* codes) {
  std::array<size_t, 8> offset;
  for (size_t c = 0; c < offset.size(); ++c) offset[c] = float_offset(codec, r, static_cast<int>(c));
  const size_t step = float_offset(codec, 0, 8);
  for (int k = 0; k < n; k += 8, codes += step)
    for (const size_t at : offset) {
      std::memcpy(codes + at, from, sizeof(Number));
      from += sizeof(Number);
    }
}
void pack_float_row(const LinearSource& s, Codec codec, const WeightBytes& w, int row, int r, uint8_t* unit) {
  const auto in = static_cast<size_t>(s.in), at = static_cast<size_t>(row) * in;
  if (codec != Codec::fp8) return put_floats<uint16_t>(codec, w.data.data() + 2 * at, s.in, r, unit);
  const size_t n_scales = (in + kScaleBlock - 1) / kScaleBlock;
  if (r == 0)
    std::memcpy(unit, w.scales.data() + static_cast<size_t>(row / kScaleBlock) * n_scales * sizeof(float), n_scales * sizeof(float));
  put_floats<uint8_t>(codec, w.data.data() + at, s.in, r, unit + wide_unit(codec, 0, s.in).header_bytes);
}
void unpack_float_row(Codec codec, const WideUnit& unit, const uint8_t* data, int r, float* out) {
  const uint8_t* const codes = data + unit.header_bytes;
  for (int k = 0; k < unit.elems; ++k) {
    const uint8_t* const at = codes + float_offset(codec, r, k);
    if (codec == Codec::fp8) {
      float scale;
      std::memcpy(&scale, data + sizeof scale * static_cast<size_t>(k / kScaleBlock), sizeof scale);
      out[k] = e4m3_to_f32(*at) * scale;
      continue;
    }
    uint16_t bits;
    std::memcpy(&bits, at, sizeof bits);
    out[k] = codec == Codec::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
  }
}

}  // namespace

void pack_wide_unit(const LinearSource& source, Codec codec, int matrix, int group, int u, uint8_t* unit) {
  const WeightBytes& w = source.matrices[static_cast<size_t>(matrix)];
  if (is_float(codec)) {
    for (int r = 0; r < kWideRows && group * kWideRows + r < source.out; ++r)
      pack_float_row(source, codec, w, group * kWideRows + r, r, unit);
    return;
  }
  const Layout l = layout_of(codec);
  const bool planar = codec == Codec::int4 || codec == Codec::int8;
  for (int r = 0; r < kWideRows && group * kWideRows + r < source.out; ++r) {
    const int row = group * kWideRows + r;
    if (planar) {
      put_planar(source, l, w, row, u, r, unit);
      continue;
    }
    const FormatInfo& format = info(source.format);
    const auto* const block = reinterpret_cast<const uint8_t*>(w.data.data()) +
                              static_cast<size_t>(row) * row_bytes(source.format, source.in) +
                              static_cast<size_t>(u) * static_cast<size_t>(format.block_bytes);
    put_scales(codec, l, block, r, unit);
    for (int c = 0; c < format.block_elems / kChunk; ++c) {
      Steps q;
      read_codes(codec, block, c, q);
      put_codes(l, unit, c, r, q);
    }
  }
}

void unpack_wide_row(Codec codec, const WideUnit& unit, const uint8_t* data, int r, float* out) {
  if (is_float(codec)) return unpack_float_row(codec, unit, data, r, out);
  const Layout l = layout_of(codec);
  const auto half = [&](int offset) {
    uint16_t bits;
    std::memcpy(&bits, data + offset + 2 * r, 2);
    return f16_to_f32(bits);
  };
  const float d = codec == Codec::mxfp4 ? e8m0_to_f32(data[r]) : half(0), second = l.second >= 0 ? half(l.second) : 0.0f;
  for (int e = 0; e < unit.elems; ++e) {
    const int chunk = e / kChunk, code = get_code(l, data, chunk, r, e % kChunk);
    const auto scale_at = [&](int index) { return data[l.scales + 16 * index + r]; };
    const auto q = static_cast<float>(code);
    switch (codec) {
      case Codec::q4_0: out[e] = (q - 8.0f) * d; break;
      case Codec::q5_0: out[e] = (q - 16.0f) * d; break;
      case Codec::q4_1:
      case Codec::q5_1: out[e] = q * d + second; break;
      case Codec::q8_0: out[e] = (q - 128.0f) * d; break;
      case Codec::iq4_nl: out[e] = kIq4Levels[code] * d; break;
      case Codec::iq4_xs: out[e] = kIq4Levels[code] * (d * static_cast<float>(static_cast<int8_t>(scale_at(chunk)))); break;
      case Codec::mxfp4: out[e] = kFp4Levels[code] * d; break;
      case Codec::int4:
      case Codec::int8: out[e] = static_cast<float>(code - data[l.zeros + r]) * d; break;
      case Codec::q4_k:
      case Codec::q5_k:
        out[e] = (d * static_cast<float>(scale_at(2 * chunk))) * q - second * static_cast<float>(scale_at(2 * chunk + 1));
        break;
      case Codec::q6_k: out[e] = (d * static_cast<float>(static_cast<int8_t>(scale_at(e / 16)))) * (q - 32.0f); break;
      default: CACHALOT_CHECK(false, "codec {}", static_cast<int>(codec));
    }
  }
}

}  // namespace cachalot::cpu
