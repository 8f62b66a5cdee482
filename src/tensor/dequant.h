// The exact decoders of the block formats, one function per family; each takes whole blocks and writes f32 [n].
// Private to src/tensor: callers use dequant_row of format.h, which has checked that n is a number of whole blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/float_formats.h"
#include "tensor/format.h"

namespace cachalot {

inline constexpr int kBlock = 32;        // elements of a small block
inline constexpr int kSuperBlock = 256;  // elements of a K-quant or IQ4_XS block

// Stored fields have no alignment of their own, so they are copied out.
template <typename T>
T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <typename T>
void store(void* to, T value) {
  std::memcpy(to, &value, sizeof value);
}
inline float load_f16(const void* from) { return f16_to_f32(load<uint16_t>(from)); }

// The 16 levels of IQ4: dense around zero, as weights are.
inline constexpr int kIq4Levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Scale j (0..15) of Q3_K: 4 low bits in the nibbles of bytes 0..7, 2 high bits in bytes 8..11; stored with 32 added.
inline int q3_k_scale(const uint8_t* scales, int j) {
  const int low = j < 8 ? scales[j] & 15 : scales[j - 8] >> 4;
  const int high = (scales[8 + j % 4] >> (2 * (j / 4))) & 3;
  return (low | (high << 4)) - 32;
}

struct ScaleMin {
  int scale, minimum;  // 0..63
};
// Scale and minimum of sub-block j (0..7) of Q4_K and Q5_K. The first four have 6 bits in one byte each; the last four keep their
// low 4 bits in bytes 8..11 and their high 2 bits in the spare bits of the first eight bytes.
inline ScaleMin k_scale_min(const uint8_t* b, int j) {
  if (j < 4) return {b[j] & 63, b[j + 4] & 63};
  return {(b[j + 4] & 15) | ((b[j - 4] >> 6) << 4), (b[j + 4] >> 4) | ((b[j] >> 6) << 4)};
}

// Scale j (0..7) of an IQ4_XS block: 4 low bits in bytes 4..7, 2 high bits in the u16 at byte 2, stored with 32 added.
inline int iq4_xs_scale(const uint8_t* block, int j) {
  const int low = (block[4 + j / 2] >> (4 * (j % 2))) & 15, high = (load<uint16_t>(block + 2) >> (2 * j)) & 3;
  return (low | (high << 4)) - 32;
}

void dequant_float(Format format, const uint8_t* data, int64_t n, float* out);   // f32, f16, bf16
void dequant_legacy(Format format, const uint8_t* data, int64_t n, float* out);  // q4_0, q4_1, q5_0, q5_1, q8_0
void dequant_k(Format format, const uint8_t* data, int64_t n, float* out);       // q2_k .. q6_k
void dequant_table(Format format, const uint8_t* data, int64_t n, float* out);   // iq4_nl, iq4_xs, mxfp4

// Encodes whole blocks of a format that has_block_codes, errors weighted by importance [n] (null: evenly). In quantize_k.cpp.
void quantize_weighted(Format format, const float* in, const float* importance, int64_t n, uint8_t* out);

}  // namespace cachalot
