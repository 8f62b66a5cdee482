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

void dequant_float(Format format, const uint8_t* data, int64_t n, float* out);   // f32, f16, bf16
void dequant_legacy(Format format, const uint8_t* data, int64_t n, float* out);  // q4_0, q4_1, q5_0, q5_1, q8_0
void dequant_k(Format format, const uint8_t* data, int64_t n, float* out);       // q2_k .. q6_k
void dequant_table(Format format, const uint8_t* data, int64_t n, float* out);   // iq4_nl, iq4_xs, mxfp4

}  // namespace cachalot
