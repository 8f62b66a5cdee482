// The small float formats, over all their codes: values by the defining formula, rounding at every midpoint, and the special values.
#include "base/float_formats.h"

#include <gtest/gtest.h>

#include <limits>

namespace cachalot {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }

// The value that sign, exponent and mantissa fields mean; the top exponent is not treated apart.
double formula(bool negative, int exponent, int mantissa, int mantissa_bits, int bias) {
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                         : std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
  return negative ? -magnitude : magnitude;
}

TEST(F16, EveryCodeHasItsValue) {
  for (uint32_t code = 0; code < 65536; ++code) {
    const float value = f16_to_f32(static_cast<uint16_t>(code));
    const bool negative = code >> 15 != 0;
    const int exponent = static_cast<int>(code >> 10 & 31), mantissa = static_cast<int>(code & 1023);
    ASSERT_EQ(std::signbit(value), negative) << code;
    if (exponent < 31)
      ASSERT_EQ(value, formula(negative, exponent, mantissa, 10, 15)) << code;
    else if (mantissa == 0)
      ASSERT_TRUE(std::isinf(value)) << code;
    else
      ASSERT_TRUE(std::isnan(value)) << code;
  }
}

TEST(F16, EveryCodeSurvivesTheRoundTrip) {
  for (uint32_t code = 0; code < 65536; ++code) {
    const uint16_t back = f32_to_f16(f16_to_f32(static_cast<uint16_t>(code)));
    const bool nan = (code & 0x7fffu) > 0x7c00u;
    ASSERT_EQ(back, nan ? code | 0x200u : code) << code;  // a NaN becomes quiet and keeps its payload
  }
}

// Checks rounding between two neighbouring values of a format (given by their codes): the midpoint goes to the even code, and the f32
// values on either side of the midpoint go to the nearer one.
template <typename Encode, typename Decode>
void expect_nearest_even(uint32_t low, Encode encode, Decode decode) {
  const double a = decode(low), b = decode(low + 1);
  const auto middle = static_cast<float>((a + b) / 2);
  ASSERT_EQ(static_cast<double>(middle), (a + b) / 2) << "the midpoint is an f32";
  const uint32_t even = low % 2 == 0 ? low : low + 1;
  ASSERT_EQ(encode(middle), even) << low;
  ASSERT_EQ(encode(std::nextafter(middle, -kInf)), low) << low;
  ASSERT_EQ(encode(std::nextafter(middle, kInf)), low + 1) << low;
}

TEST(F16, MidpointsRoundToEven) {
  const auto encode = [](float value) { return static_cast<uint32_t>(f32_to_f16(value)); };
  const auto decode = [](uint32_t code) { return static_cast<double>(f16_to_f32(static_cast<uint16_t>(code))); };
  for (uint32_t code = 0; code < 0x7bff; ++code) {
    expect_nearest_even(code, encode, decode);
    if (HasFatalFailure()) return;
    const auto middle = static_cast<float>((decode(code) + decode(code + 1)) / 2);
    ASSERT_EQ(encode(-middle), 0x8000u | (code % 2 == 0 ? code : code + 1)) << code;
  }
}

TEST(F16, EdgesOfTheRange) {
  EXPECT_EQ(f32_to_f16(65504.0f), 0x7bff);
  EXPECT_EQ(f32_to_f16(std::nextafter(65520.0f, 0.0f)), 0x7bff);
  EXPECT_EQ(f32_to_f16(65520.0f), 0x7c00);
  EXPECT_EQ(f32_to_f16(-1e30f), 0xfc00);
  EXPECT_EQ(f32_to_f16(kInf), 0x7c00);
  EXPECT_EQ(f32_to_f16(0x1p-24f), 0x0001);
  EXPECT_EQ(f32_to_f16(0x1p-25f), 0x0000);
  EXPECT_EQ(f32_to_f16(std::nextafter(0x1p-25f, 1.0f)), 0x0001);
  EXPECT_EQ(f32_to_f16(std::numeric_limits<float>::denorm_min()), 0x0000);
  EXPECT_EQ(f32_to_f16(-0.0f), 0x8000);
  EXPECT_GT(f32_to_f16(kNan) & 0x7fff, 0x7c00);
}

TEST(Bf16, EveryCodeIsTheTopHalfOfAnF32) {
  for (uint32_t code = 0; code < 65536; ++code) {
    ASSERT_EQ(bits_of(bf16_to_f32(static_cast<uint16_t>(code))), code << 16);
    const bool nan = (code & 0x7fffu) > 0x7f80u;
    ASSERT_EQ(f32_to_bf16(bf16_to_f32(static_cast<uint16_t>(code))), nan ? code | 0x40u : code) << code;
  }
}

TEST(Bf16, MidpointsRoundToEven) {
  for (uint32_t code = 0; code < 65535; ++code) {
    if ((code & 0x7fffu) >= 0x7f80u) continue;  // infinity and NaN
    const auto at = [&](uint32_t low) { return f32_to_bf16(std::bit_cast<float>(code << 16 | low)); };
    ASSERT_EQ(at(0x7fff), code);
    ASSERT_EQ(at(0x8000), code % 2 == 0 ? code : code + 1);
    ASSERT_EQ(at(0x8001), code + 1);
  }
  EXPECT_EQ(f32_to_bf16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(f32_to_bf16(kInf), 0x7f80);
  EXPECT_EQ(f32_to_bf16(-kInf), 0xff80);
  EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(std::bit_cast<float>(0x7f800001u)))));  // payload only in the half that is cut
}

TEST(E4m3, EveryCodeHasItsValueAndSurvivesTheRoundTrip) {
  for (int code = 0; code < 256; ++code) {
    const float value = e4m3_to_f32(static_cast<uint8_t>(code));
    if ((code & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value)) << code;
      EXPECT_EQ(f32_to_e4m3(value), code);
      continue;
    }
    EXPECT_EQ(value, formula(code >= 128, code >> 3 & 15, code & 7, 3, 7)) << code;
    EXPECT_EQ(std::signbit(value), code >= 128) << code;
    EXPECT_EQ(f32_to_e4m3(value), code);
  }
  EXPECT_EQ(e4m3_to_f32(0x7e), 448.0f);
  EXPECT_EQ(e4m3_to_f32(0x08), 0x1p-6f);
  EXPECT_EQ(e4m3_to_f32(0x01), 0x1p-9f);
}

TEST(E4m3, MidpointsRoundToEven) {
  const auto encode = [](float value) { return static_cast<uint32_t>(f32_to_e4m3(value)); };
  const auto decode = [](uint32_t code) { return static_cast<double>(e4m3_to_f32(static_cast<uint8_t>(code))); };
  for (uint32_t code = 0; code < 0x7e; ++code) {
    expect_nearest_even(code, encode, decode);
    if (HasFatalFailure()) return;
    const auto middle = static_cast<float>((decode(code) + decode(code + 1)) / 2);
    EXPECT_EQ(encode(-middle), 0x80u | (code % 2 == 0 ? code : code + 1));
  }
}

TEST(E4m3, LargeValuesSaturate) {
  for (const float value : {448.0f, 449.0f, 464.0f, 480.0f, 1e10f, kInf}) {
    EXPECT_EQ(f32_to_e4m3(value), 0x7e) << value;
    EXPECT_EQ(f32_to_e4m3(-value), 0xfe) << value;
  }
  EXPECT_EQ(f32_to_e4m3(kNan) & 0x7f, 0x7f);
  EXPECT_EQ(f32_to_e4m3(-0.0f), 0x80);
  EXPECT_EQ(f32_to_e4m3(std::numeric_limits<float>::denorm_min()), 0x00);
}

TEST(E8m0, EveryCodeIsAPowerOfTwo) {
  for (int code = 0; code < 255; ++code) EXPECT_EQ(e8m0_to_f32(static_cast<uint8_t>(code)), std::ldexp(1.0, code - 127)) << code;
  EXPECT_TRUE(std::isnan(e8m0_to_f32(255)));
}

TEST(E2m1, AllSixteenCodes) {
  for (int code = 0; code < 16; ++code) {
    EXPECT_EQ(e2m1_to_f32(static_cast<uint8_t>(code)), formula(code >= 8, code >> 1 & 3, code & 1, 1, 1)) << code;
    EXPECT_EQ(std::signbit(e2m1_to_f32(static_cast<uint8_t>(code))), code >= 8) << code;
  }
}

}  // namespace
}  // namespace cachalot
