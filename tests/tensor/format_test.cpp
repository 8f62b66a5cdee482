// The table of formats, sizes, and hand-made blocks that show each layout by itself.
#include "tensor/format.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "base/float_formats.h"

namespace cachalot {
namespace {

std::vector<std::byte> bytes_of(std::initializer_list<int> values) {
  std::vector<std::byte> out;
  for (const int value : values) out.push_back(static_cast<std::byte>(value));
  return out;
}

TEST(FormatTable, NamesAndTypeIdsLeadBack) {
  for (int i = 0; i < kNumFormats; ++i) {
    const auto format = static_cast<Format>(i);
    EXPECT_EQ(info(format).format, format);
    EXPECT_EQ(format_of_name(info(format).name), format);
    if (info(format).gguf_type < 0) continue;
    EXPECT_EQ(format_of_gguf_type(info(format).gguf_type), format);
  }
  EXPECT_EQ(format_of_name("q4_k"), Format::q4_k);
  EXPECT_EQ(format_of_name("Q4_K"), std::nullopt);
  EXPECT_EQ(format_of_name(""), std::nullopt);
}

TEST(FormatTable, UnsupportedTypesHaveANameAndNoFormat) {
  EXPECT_EQ(gguf_type_name(12), "Q4_K");
  EXPECT_EQ(gguf_type_name(16), "IQ2_XXS");
  EXPECT_EQ(gguf_type_name(30), "BF16");
  EXPECT_EQ(gguf_type_name(40), "NVFP4");
  EXPECT_EQ(gguf_type_name(42), "Q2_0");
  for (const int type : {-1, 4, 5, 31, 36, 43, 1 << 30, std::numeric_limits<int>::min()}) {
    EXPECT_EQ(gguf_type_name(type), "unknown") << type;
    EXPECT_EQ(format_of_gguf_type(type), std::nullopt) << type;
  }
  EXPECT_EQ(format_of_gguf_type(9), std::nullopt);   // Q8_1
  EXPECT_EQ(format_of_gguf_type(16), std::nullopt);  // IQ2_XXS
}

TEST(FormatTable, EachSupportedTypeIsCalledWhatGgufCallsIt) {
  for (int i = 0; i < kNumFormats; ++i) {
    const FormatInfo& entry = info(static_cast<Format>(i));
    if (entry.gguf_type < 0) continue;
    std::string upper(entry.name);
    for (char& c : upper) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    EXPECT_EQ(gguf_type_name(entry.gguf_type), upper);
  }
}

TEST(Sizes, RowsAndMatrices) {
  EXPECT_EQ(row_bytes(Format::q4_0, 64), 36u);
  EXPECT_EQ(row_bytes(Format::q4_k, 512), 288u);
  EXPECT_EQ(row_bytes(Format::int4_planar, 128), 64u);
  EXPECT_EQ(row_bytes(Format::f32, 0), 0u);
  EXPECT_EQ(matrix_bytes(Format::q6_k, 3, 256), 630u);
  EXPECT_EQ(matrix_bytes(Format::q6_k, 0, 256), 0u);
}

TEST(Sizes, ImpossibleOnesAreNothing) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(matrix_bytes(Format::q4_0, 1, 33), std::nullopt);
  EXPECT_EQ(matrix_bytes(Format::q4_k, 1, 128), std::nullopt);
  EXPECT_EQ(matrix_bytes(Format::f32, -1, 4), std::nullopt);
  EXPECT_EQ(matrix_bytes(Format::f32, 1, -4), std::nullopt);
  EXPECT_EQ(matrix_bytes(Format::f32, 1, kHuge), std::nullopt);
  EXPECT_EQ(matrix_bytes(Format::f16, kHuge / 4, 3), std::nullopt);
  EXPECT_EQ(matrix_bytes(Format::fp8_block, int64_t{1} << 32, int64_t{1} << 31), std::nullopt);
  EXPECT_EQ(matrix_bytes(Format::fp8_block, int64_t{1} << 31, int64_t{1} << 31), size_t{1} << 62);
}

TEST(SizesDeathTest, BrokenBlocksAreAnInvariant) {
  EXPECT_DEATH(row_bytes(Format::q8_0, 31), "31 elements in blocks of 32");
  EXPECT_DEATH(row_bytes(Format::f32, -1), "check failed");
  float out[32];
  EXPECT_DEATH(dequant_row(Format::q8_0, nullptr, 33, out), "33 elements in blocks of 32");
  EXPECT_DEATH(dequant_row(Format::fp8_block, nullptr, 32, out), "scales elsewhere");
  EXPECT_DEATH(dequant_row(Format::int4_planar, nullptr, 32, out), "scales elsewhere");
}

TEST(Layouts, Q4_0PairsElementsSixteenApart) {
  std::vector<std::byte> block(18, std::byte{0x88});  // every code 8 is zero
  block[0] = std::byte{0x00};
  block[1] = std::byte{0x3c};   // d = 1
  block[2] = std::byte{0xf0};   // elements 0 and 16
  block[17] = std::byte{0x9a};  // elements 15 and 31
  float out[32];
  dequant_row(Format::q4_0, block.data(), 32, out);
  for (int e = 0; e < 32; ++e) {
    const float expected = e == 0 ? -8.0f : e == 16 ? 7.0f : e == 15 ? 2.0f : e == 31 ? 1.0f : 0.0f;
    EXPECT_EQ(out[e], expected) << e;
  }
}

TEST(Layouts, Q5_0TakesTheFifthBitByElement) {
  std::vector<std::byte> block(22, std::byte{0});
  block[1] = std::byte{0x3c};
  block[2] = std::byte{0x02};  // element 1
  block[5] = std::byte{0x80};  // element 31
  float out[32];
  dequant_row(Format::q5_0, block.data(), 32, out);
  for (int e = 0; e < 32; ++e) EXPECT_EQ(out[e], e == 1 || e == 31 ? 0.0f : -16.0f) << e;
}

TEST(Layouts, Q4_KScalesOfAllEightSubBlocks) {
  // Scales 1, 9, 17, 25, 33, 41, 49, 57 and minimums 62, 54, 46, 38, 30, 22, 14, 6, packed by hand.
  constexpr int kScale[8] = {1, 9, 17, 25, 33, 41, 49, 57}, kMin[8] = {62, 54, 46, 38, 30, 22, 14, 6};
  std::vector<std::byte> block(144, std::byte{0});
  block[1] = block[3] = std::byte{0x3c};  // d = dmin = 1
  for (int j = 0; j < 4; ++j) {
    block[static_cast<size_t>(4 + j)] = static_cast<std::byte>(kScale[j] | (kScale[j + 4] >> 4 << 6));
    block[static_cast<size_t>(8 + j)] = static_cast<std::byte>(kMin[j] | (kMin[j + 4] >> 4 << 6));
    block[static_cast<size_t>(12 + j)] = static_cast<std::byte>((kScale[j + 4] & 15) | ((kMin[j + 4] & 15) << 4));
  }
  for (size_t i = 16; i < 144; ++i) block[i] = std::byte{0x21};  // 1 in even sub-blocks, 2 in odd ones
  std::vector<float> out(256);
  dequant_row(Format::q4_k, block.data(), 256, out.data());
  for (size_t e = 0; e < 256; ++e) {
    const size_t j = e / 32;
    EXPECT_EQ(out[e], static_cast<float>(kScale[j] * (j % 2 == 0 ? 1 : 2) - kMin[j])) << e;
  }
}

TEST(Layouts, Mxfp4ExponentIsAPowerOfTwo) {
  auto block = bytes_of({128, 0x21, 0x43, 0x65, 0x87, 0xa9, 0xcb, 0xed, 0x0f, 0, 0, 0, 0, 0, 0, 0, 0});
  float out[32];
  dequant_row(Format::mxfp4, block.data(), 32, out);
  const float low[8] = {1, 3, 6, 12, -1, -3, -6, -12}, high[8] = {2, 4, 8, 0, -2, -4, -8, 0};
  for (int j = 0; j < 8; ++j) {
    EXPECT_EQ(out[j], low[j]) << j;
    EXPECT_EQ(out[16 + j], high[j]) << j;
  }
  block[0] = std::byte{255};
  dequant_row(Format::mxfp4, block.data(), 32, out);
  EXPECT_TRUE(std::isnan(out[0]));
}

TEST(Layouts, BlocksMayStartAtAnyAddress) {
  std::vector<std::byte> shifted(1 + 34 * 2, std::byte{3});
  shifted[1] = shifted[35] = std::byte{0};
  shifted[2] = shifted[36] = std::byte{0x3c};
  std::vector<float> out(64);
  dequant_row(Format::q8_0, shifted.data() + 1, 64, out.data());
  for (const float value : out) EXPECT_EQ(value, 3.0f);
}

}  // namespace
}  // namespace cachalot
