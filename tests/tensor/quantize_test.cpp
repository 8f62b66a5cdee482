// Encoders: error bounds, values that a cast could not hold, and DeepSeek's FP8 blocks with partial edges.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/float_formats.h"
#include "support/support.h"
#include "tensor/format.h"

namespace cachalot {
namespace {

TEST(Quantize, OnlySomeFormatsCanBeWritten) {
  for (const Format format : {Format::f32, Format::f16, Format::bf16, Format::q4_0, Format::q4_1, Format::q5_0, Format::q5_1, Format::q8_0})
    EXPECT_TRUE(can_quantize(format)) << info(format).name;
  for (const Format format : {Format::q2_k, Format::q3_k, Format::q4_k, Format::q5_k, Format::q6_k, Format::iq4_nl, Format::iq4_xs})
    EXPECT_TRUE(can_quantize(format)) << info(format).name;
  for (const Format format : {Format::mxfp4, Format::fp8_block, Format::int4_planar, Format::int8_planar})
    EXPECT_FALSE(can_quantize(format)) << info(format).name;
}

TEST(QuantizeDeathTest, WritingAnotherFormatIsAnInvariant) {
  const float in[256] = {};
  std::byte out[256];
  EXPECT_DEATH(quantize_row(Format::mxfp4, in, 256, out), "mxfp4 cannot be written");
  EXPECT_DEATH(quantize_row(Format::q8_0, in, 40, out), "40 elements in blocks of 32");
}

TEST(Quantize, ErrorStaysWithinHalfAStep) {
  const auto values = test::random_floats(32 * 64, 7);
  for (const auto& [format, step_of_amax] : {std::pair{Format::q8_0, 1.0f / 127}, {Format::q5_0, 1.0f / 16}, {Format::q4_0, 1.0f / 8}}) {
    std::vector<std::byte> blocks(row_bytes(format, static_cast<int64_t>(values.size())));
    quantize_row(format, values.data(), static_cast<int64_t>(values.size()), blocks.data());
    std::vector<float> back(values.size());
    dequant_row(format, blocks.data(), static_cast<int64_t>(values.size()), back.data());
    for (size_t b = 0; b < values.size(); b += 32) {
      float amax = 0;
      for (size_t e = b; e < b + 32; ++e) amax = std::max(amax, std::fabs(values[e]));
      // The sign opposite to the extreme one lacks a level in the 4 and 5 bit types: its error may reach a whole step.
      const float bound = amax * step_of_amax * (format == Format::q8_0 ? 0.5f : 1.0f) + amax * 0x1p-10f;
      for (size_t e = b; e < b + 32; ++e) EXPECT_LE(std::fabs(back[e] - values[e]), bound) << info(format).name << " " << e;
    }
  }
}

TEST(Quantize, NanBecomesZeroAndSparesItsNeighbours) {
  std::vector<float> values(32, 1.0f);
  values[3] = std::numeric_limits<float>::quiet_NaN();
  std::vector<std::byte> block(34);
  quantize_row(Format::q8_0, values.data(), 32, block.data());
  std::vector<float> back(32);
  dequant_row(Format::q8_0, block.data(), 32, back.data());
  for (size_t e = 0; e < 32; ++e) EXPECT_NEAR(back[e], e == 3 ? 0.0f : 1.0f, 1e-3f) << e;
}

TEST(Quantize, InfinityIsStoredInTheScale) {
  std::vector<float> values(32, 1.0f);
  values[3] = -std::numeric_limits<float>::infinity();
  for (const Format format : {Format::q4_0, Format::q4_1, Format::q5_0, Format::q5_1, Format::q8_0}) {
    std::vector<std::byte> block(row_bytes(format, 32));
    quantize_row(format, values.data(), 32, block.data());
    EXPECT_EQ(block[0], std::byte{0}) << info(format).name;
    EXPECT_EQ(block[1] & std::byte{0x7f}, std::byte{0x7c}) << info(format).name;
  }
}

TEST(Quantize, TheSmallestAndLargestFloatsKeepTheirSign) {
  // The inverse of a subnormal scale overflows; codes must still end up at the ends of their range.
  for (const float extreme : {std::numeric_limits<float>::denorm_min() * 4, std::numeric_limits<float>::max()}) {
    std::vector<float> values(32, extreme);
    values[1] = -extreme;
    std::vector<std::byte> block(34);
    quantize_row(Format::q8_0, values.data(), 32, block.data());
    const auto code = [&](size_t e) { return static_cast<int8_t>(block[2 + e]); };
    if (extreme > 1) {
      EXPECT_EQ(code(0), 127);
      EXPECT_EQ(code(1), -127);
    } else {
      EXPECT_EQ(code(0), 0);  // amax / 127 is zero
      EXPECT_EQ(code(1), 0);
    }
  }
  std::vector<float> values(32, 0x1p-140f);
  values[1] = -0x1p-140f;
  std::vector<std::byte> block(34);
  quantize_row(Format::q8_0, values.data(), 32, block.data());
  EXPECT_EQ(block[2], std::byte{127});
  EXPECT_EQ(block[3], std::byte{0x81});
}

TEST(Quantize, ZerosStayZero) {
  const std::vector<float> values(32, 0.0f);
  for (const Format format : {Format::q4_0, Format::q4_1, Format::q5_0, Format::q5_1, Format::q8_0}) {
    std::vector<std::byte> block(row_bytes(format, 32));
    quantize_row(format, values.data(), 32, block.data());
    std::vector<float> back(32, 1.0f);
    dequant_row(format, block.data(), 32, back.data());
    for (const float value : back) EXPECT_EQ(value, 0.0f) << info(format).name;
  }
}

TEST(Fp8Block, EachBlockHasTheScaleOfItsLargestValue) {
  // 130 x 200: the second row of blocks holds 2 rows, the second column of blocks 72 columns.
  constexpr int kRows = 130, kCols = 200;
  std::vector<float> values(kRows * kCols, 0.5f);
  values[5 * kCols + 7] = -448.0f;    // block (0, 0)
  values[5 * kCols + 150] = 896.0f;   // block (0, 1)
  values[129 * kCols + 199] = 44.8f;  // block (1, 1)
  std::vector<std::byte> codes(values.size());
  std::vector<float> scales(4 + 1, -7.0f);
  quantize_fp8_block(values.data(), kRows, kCols, codes.data(), scales.data());
  EXPECT_EQ(scales[0], 1.0f);
  EXPECT_EQ(scales[1], 2.0f);
  EXPECT_EQ(scales[2], 0.5f / 448.0f);
  EXPECT_EQ(scales[3], 44.8f / 448.0f);
  EXPECT_EQ(scales[4], -7.0f);  // nothing written past the grid
  EXPECT_EQ(codes[5 * kCols + 7], std::byte{0xfe});
  EXPECT_EQ(codes[5 * kCols + 150], std::byte{0x7e});
  EXPECT_EQ(codes[129 * kCols + 0], std::byte{0x7e});
  EXPECT_EQ(codes[0], std::byte{f32_to_e4m3(0.5f)});
  EXPECT_EQ(codes[130], std::byte{f32_to_e4m3(0.25f)});
}

TEST(Fp8Block, ZeroBlocksHaveZeroCodes) {
  std::vector<float> values(128 * 256, 0.0f);
  for (int row = 0; row < 128; ++row) values[static_cast<size_t>(row) * 256 + 128] = 1.0f;
  std::vector<std::byte> codes(values.size(), std::byte{0x55});
  float scales[2] = {-1, -1};
  quantize_fp8_block(values.data(), 128, 256, codes.data(), scales);
  EXPECT_EQ(scales[0], 0.0f);
  EXPECT_EQ(scales[1], 1.0f / 448.0f);
  EXPECT_EQ(codes[0], std::byte{0});
  EXPECT_EQ(codes[127], std::byte{0});
  EXPECT_EQ(codes[128], std::byte{0x7e});
}

}  // namespace
}  // namespace cachalot
