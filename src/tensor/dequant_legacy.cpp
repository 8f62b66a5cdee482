// Decoders of the plain float formats and of the 32-element blocks with one scale (and perhaps one minimum) each.
#include "base/check.h"
#include "tensor/dequant.h"

namespace cachalot {
namespace {

// Elements j and j + 16 share byte j: the low nibble is the former.
void unpack_nibbles(const uint8_t* qs, int (&q)[kBlock]) {
  for (int j = 0; j < kBlock / 2; ++j) {
    q[j] = qs[j] & 15;
    q[j + kBlock / 2] = qs[j] >> 4;
  }
}

void add_fifth_bits(const uint8_t* stored, int (&q)[kBlock]) {
  const auto bits = load<uint32_t>(stored);
  for (int e = 0; e < kBlock; ++e) q[e] |= static_cast<int>((bits >> e) & 1u) << 4;
}

void q4_0(const uint8_t* block, float* out) {
  const float d = load_f16(block);
  int q[kBlock];
  unpack_nibbles(block + 2, q);
  for (int e = 0; e < kBlock; ++e) out[e] = static_cast<float>(q[e] - 8) * d;
}

void q4_1(const uint8_t* block, float* out) {
  const float d = load_f16(block), minimum = load_f16(block + 2);
  int q[kBlock];
  unpack_nibbles(block + 4, q);
  for (int e = 0; e < kBlock; ++e) out[e] = static_cast<float>(q[e]) * d + minimum;
}

void q5_0(const uint8_t* block, float* out) {
  const float d = load_f16(block);
  int q[kBlock];
  unpack_nibbles(block + 6, q);
  add_fifth_bits(block + 2, q);
  for (int e = 0; e < kBlock; ++e) out[e] = static_cast<float>(q[e] - 16) * d;
}

void q5_1(const uint8_t* block, float* out) {
  const float d = load_f16(block), minimum = load_f16(block + 2);
  int q[kBlock];
  unpack_nibbles(block + 8, q);
  add_fifth_bits(block + 4, q);
  for (int e = 0; e < kBlock; ++e) out[e] = static_cast<float>(q[e]) * d + minimum;
}

void q8_0(const uint8_t* block, float* out) {
  const float d = load_f16(block);
  for (int e = 0; e < kBlock; ++e) out[e] = static_cast<float>(static_cast<int8_t>(block[2 + e])) * d;
}

}  // namespace

void dequant_float(Format format, const uint8_t* data, int64_t n, float* out) {
  if (format == Format::f32) {
    for (int64_t i = 0; i < n; ++i) out[i] = load<float>(data + 4 * i);
  } else if (format == Format::f16) {
    for (int64_t i = 0; i < n; ++i) out[i] = load_f16(data + 2 * i);
  } else {
    CACHALOT_CHECK(format == Format::bf16, "{}", info(format).name);
    for (int64_t i = 0; i < n; ++i) out[i] = bf16_to_f32(load<uint16_t>(data + 2 * i));
  }
}

void dequant_legacy(Format format, const uint8_t* data, int64_t n, float* out) {
  const int bytes = info(format).block_bytes;
  for (int64_t i = 0; i < n; i += kBlock, data += bytes, out += kBlock) {
    switch (format) {
      case Format::q4_0: q4_0(data, out); break;
      case Format::q4_1: q4_1(data, out); break;
      case Format::q5_0: q5_0(data, out); break;
      case Format::q5_1: q5_1(data, out); break;
      case Format::q8_0: q8_0(data, out); break;
      default: CACHALOT_CHECK(false, "{}", info(format).name);
    }
  }
}

}  // namespace cachalot
