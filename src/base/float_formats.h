// The small floating-point formats that weights and activations are stored in, converted in plain integer arithmetic:
// IEEE binary16 (f16), bfloat16, FP8 E4M3 (OCP "FN" form: no infinity, 0x7f and 0xff are NaN, largest 448), E8M0 scales, FP4 E2M1.
// Conversions from f32 round to nearest, ties to even. SIMD versions live in cpu/isa and are tested against these.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace cachalot {

inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // subnormal: exact in f32
  return sign != 0 ? -magnitude : magnitude;
}

inline uint16_t f32_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));  // NaN keeps its top payload
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);                                // rounds past 65504
  if (magnitude < 0x38800000u) {                                                                             // below 2^-14: subnormal
    const float scaled = std::bit_cast<float>(magnitude) * 0x1p24f;                                          // exact: a power of two
    const auto whole = static_cast<uint32_t>(scaled);
    const float rest = scaled - static_cast<float>(whole);
    return static_cast<uint16_t>(sign | (whole + (rest > 0.5f || (rest == 0.5f && (whole & 1u) != 0) ? 1u : 0u)));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

inline float bf16_to_f32(uint16_t b) { return std::bit_cast<float>(static_cast<uint32_t>(b) << 16); }

inline uint16_t f32_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float e4m3_to_f32(uint8_t v) {
  const uint32_t sign = static_cast<uint32_t>(v & 0x80u) << 24, exponent = (v >> 3) & 15u, mantissa = v & 7u;
  if (exponent == 15 && mantissa == 7) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 120) << 23) | (mantissa << 20));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
  return sign != 0 ? -magnitude : magnitude;
}

// Saturates to +-448; NaN stays NaN.
inline uint8_t f32_to_e4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffffu;
  const auto sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  if (magnitude >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);  // 448 and above
  if (magnitude < 0x3c800000u) {                                            // below 2^-6: subnormal in steps of 2^-9
    const float scaled = std::bit_cast<float>(magnitude) * 512.0f;
    const auto whole = static_cast<uint32_t>(scaled);
    const float rest = scaled - static_cast<float>(whole);
    return static_cast<uint8_t>(sign | (whole + (rest > 0.5f || (rest == 0.5f && (whole & 1u) != 0) ? 1u : 0u)));
  }
  const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  const uint32_t code = (rounded - 0x3c000000u) >> 20;
  return static_cast<uint8_t>(sign | (code > 0x7eu ? 0x7eu : code));
}

// 2^(e - 127); 255 is NaN (OCP microscaling formats).
inline float e8m0_to_f32(uint8_t e) {
  if (e == 255) return std::bit_cast<float>(0x7fc00000u);
  return e == 0 ? 0x1p-127f : std::bit_cast<float>(static_cast<uint32_t>(e) << 23);
}

// FP4 E2M1 code 0..15: sign in bit 3, magnitudes 0 .5 1 1.5 2 3 4 6.
inline float e2m1_to_f32(uint8_t code) {
  constexpr float kMagnitude[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const float m = kMagnitude[code & 7u];
  return (code & 8u) != 0 ? -m : m;
}

}  // namespace cachalot
