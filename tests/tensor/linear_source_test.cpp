// LinearSource: reading rows of every kind, making, slicing, and refusing sizes that do not fit.
#include "tensor/linear_source.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "base/float_formats.h"
#include "support/support.h"

namespace cachalot {
namespace {

std::span<const std::byte> as_bytes(const auto& values) { return std::as_bytes(std::span(values)); }

std::vector<float> row_of(const LinearSource& source, int matrix, int row) {
  std::vector<float> out(static_cast<size_t>(source.in));
  dequant_row(source, matrix, row, out.data());
  return out;
}

// P-30: kv_a of DeepSeek-V3 has 576 rows, so the last row of scale blocks is half full; the width is no multiple either.
struct Fp8Case {
  static constexpr int kOut = 576, kIn = 300, kGridRows = 5, kGridCols = 3;
  std::vector<uint8_t> codes;
  std::vector<float> scales;
  LinearSource source;
  Fp8Case() : codes(kOut * kIn), scales(kGridRows * kGridCols) {
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 37 % 251 & 0xf7u);  // never a NaN code
    for (size_t i = 0; i < scales.size(); ++i) scales[i] = 0.001f + 0.37f * static_cast<float>(i);
    source = {.name = "blk.0.attn_kv_a_mqa.weight", .format = Format::fp8_block, .out = kOut, .in = kIn};
    source.matrices.push_back({.data = as_bytes(codes), .scales = as_bytes(scales), .zeros = {}});
  }
};

TEST(DequantRow, Fp8IsCodeTimesTheScaleOfItsBlock) {
  const Fp8Case fp8;
  validate(fp8.source);
  for (const int row : {0, 127, 128, 511, 512, 575}) {
    const auto found = row_of(fp8.source, 0, row);
    for (int k = 0; k < Fp8Case::kIn; ++k) {
      const float code = e4m3_to_f32(fp8.codes[static_cast<size_t>(row * Fp8Case::kIn + k)]);
      const float scale = fp8.scales[static_cast<size_t>(row / 128 * Fp8Case::kGridCols + k / 128)];
      ASSERT_EQ(found[static_cast<size_t>(k)], code * scale) << row << " " << k;
    }
  }
}

TEST(DequantRow, Fp8OfTheRealShape) {
  const auto values = test::random_floats(size_t{576} * 7168, 3, 0.02f);
  const LinearSource source = make_linear_source("kv_a", Format::fp8_block, values, 1, 576, 7168);
  validate(source);
  EXPECT_EQ(source.matrices[0].scales.size(), 5u * 56 * sizeof(float));
  for (const int row : {0, 300, 575}) {
    const auto found = row_of(source, 0, row);
    for (size_t k = 0; k < found.size(); ++k) {
      const float value = values[static_cast<size_t>(row) * 7168 + k];
      // 3 bits of mantissa: half a step is 1/16 of the value, or 2^-10 of the smallest normal's scale.
      ASSERT_NEAR(found[k], value, std::fabs(value) / 16 + 1e-6f) << row << " " << k;
    }
  }
}

TEST(DequantRow, PlanarSubtractsTheZeroPointThenScales) {
  // Two rows of four columns in groups of two; row 1 uses a zero point above the codes' range, as GPTQ v1 may have.
  const uint8_t int4[4] = {0x10, 0xf7, 0x98, 0x3f};
  const uint16_t scales[4] = {f32_to_f16(0.5f), f32_to_f16(2.0f), f32_to_f16(-1.0f), f32_to_f16(0.25f)};
  const uint8_t zeros[4] = {1, 7, 16, 0};
  LinearSource source{.name = "w", .format = Format::int4_planar, .out = 2, .in = 4, .group = 2};
  source.matrices.push_back({.data = as_bytes(int4), .scales = as_bytes(scales), .zeros = as_bytes(zeros)});
  validate(source);
  EXPECT_EQ(row_of(source, 0, 0), (std::vector<float>{-0.5f, 0.0f, 0.0f, 16.0f}));
  EXPECT_EQ(row_of(source, 0, 1), (std::vector<float>{8.0f, 7.0f, 3.75f, 0.75f}));

  const uint8_t int8[4] = {0, 255, 128, 129};
  const uint8_t zeros8[2] = {128, 255};
  LinearSource wide{.name = "w", .format = Format::int8_planar, .out = 1, .in = 4, .group = 2};
  wide.matrices.push_back({.data = as_bytes(int8), .scales = std::span(as_bytes(scales)).first(4), .zeros = as_bytes(zeros8)});
  validate(wide);
  EXPECT_EQ(row_of(wide, 0, 0), (std::vector<float>{-64.0f, 63.5f, -254.0f, -252.0f}));
}

TEST(MakeLinearSource, HoldsEveryMatrix) {
  const auto values = test::random_floats(3 * 5 * 64, 11);
  for (const Format format : {Format::f32, Format::f16, Format::bf16, Format::q8_0, Format::fp8_block}) {
    const LinearSource source = make_linear_source("w", format, values, 3, 5, 64);
    validate(source);
    EXPECT_EQ(source.n_matrices(), 3);
    EXPECT_EQ(source.bytes(), 3 * (5 * row_bytes(format, 64) + (format == Format::fp8_block ? 4 : 0)));
    for (int m = 0; m < 3; ++m) {
      for (int r = 0; r < 5; ++r) {
        const auto found = row_of(source, m, r);
        for (size_t k = 0; k < 64; ++k) {
          const float value = values[static_cast<size_t>(m * 5 + r) * 64 + k];
          const float bound = format == Format::f32    ? 0.0f
                              : format == Format::f16  ? std::fabs(value) * 0x1p-11f + 0x1p-25f
                              : format == Format::bf16 ? std::fabs(value) * 0x1p-8f
                              : format == Format::q8_0 ? 0.02f
                                                       : std::fabs(value) / 16 + 1e-4f;
          ASSERT_LE(std::fabs(found[k] - value), bound) << info(format).name << " " << m << " " << r << " " << k;
        }
      }
    }
  }
}

TEST(MakeLinearSource, OwnsItsBytes) {
  LinearSource part;
  {
    const LinearSource whole = make_linear_source("w", Format::f32, std::vector<float>{1, 2, 3, 4, 5, 6}, 1, 3, 2);
    part = slice_rows(whole, 1, 2);
  }
  EXPECT_EQ(row_of(part, 0, 0), (std::vector<float>{3, 4}));
  EXPECT_EQ(row_of(part, 0, 1), (std::vector<float>{5, 6}));
}

TEST(SliceRows, EqualsTheRowsOfTheWhole) {
  const auto values = test::random_floats(2 * 300 * 128, 5);
  for (const Format format : {Format::f16, Format::q4_0, Format::q8_0, Format::fp8_block}) {
    const LinearSource whole = make_linear_source("w", format, values, 2, 300, 128);
    for (const auto& [begin, n] : {std::pair{0, 300}, {128, 1}, {128, 130}, {256, 44}}) {
      const LinearSource part = slice_rows(whole, begin, n);
      validate(part);
      EXPECT_EQ(part.out, n);
      for (int m = 0; m < 2; ++m)
        for (int r = 0; r < n; r += 7)
          ASSERT_EQ(row_of(part, m, r), row_of(whole, m, begin + r)) << info(format).name << " " << begin << " " << r;
    }
  }
}

TEST(SliceRows, TakesBiasScalesAndZerosAlong) {
  std::vector<uint8_t> codes(6 * 4);
  std::iota(codes.begin(), codes.end(), uint8_t{0});
  const std::vector<uint16_t> scales{0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600};  // 1 to 6
  const std::vector<uint8_t> zeros{0, 1, 2, 3, 4, 5};
  LinearSource whole{.name = "w", .format = Format::int8_planar, .out = 6, .in = 4, .group = 4};
  whole.matrices.push_back({.data = as_bytes(codes), .scales = as_bytes(scales), .zeros = as_bytes(zeros)});
  whole.bias = {10, 11, 12, 13, 14, 15};
  whole.perm = {3, 2, 1, 0};
  const LinearSource part = slice_rows(whole, 2, 3);
  validate(part);
  EXPECT_EQ(part.bias, (std::vector<float>{12, 13, 14}));
  EXPECT_EQ(part.perm, whole.perm);
  EXPECT_EQ(row_of(part, 0, 0), (std::vector<float>{18, 21, 24, 27}));
  EXPECT_EQ(row_of(part, 0, 2), row_of(whole, 0, 4));
}

TEST(SliceRowsDeathTest, OutOfRangeOrUnalignedIsAnInvariant) {
  const Fp8Case fp8;
  EXPECT_DEATH(slice_rows(fp8.source, 64, 10), "not the first of a scale block");
  EXPECT_DEATH(slice_rows(fp8.source, 512, 65), "rows 512\\+65 of 576");
  EXPECT_DEATH(slice_rows(fp8.source, 512, std::numeric_limits<int>::max()), "check failed");
  float out[1];
  EXPECT_DEATH(dequant_row(fp8.source, 1, 0, out), "matrix 1 of 1");
  EXPECT_DEATH(dequant_row(fp8.source, 0, 576, out), "row 576 of 576");
}

TEST(Validate, NamesTheTensorAndBothSizes) {
  Fp8Case fp8;
  const std::vector<float> short_grid(4 * 3);
  fp8.source.matrices[0].scales = as_bytes(short_grid);
  const auto text = test::error_of([&] { validate(fp8.source); });
  EXPECT_EQ(text, "blk.0.attn_kv_a_mqa.weight: matrix 0 of 1: 48 bytes of scales, expected 60");
  fp8.source.matrices[0].scales = {};  // a checkpoint without weight_scale_inv
  EXPECT_EQ(test::error_of([&] { validate(fp8.source); }), "blk.0.attn_kv_a_mqa.weight: matrix 0 of 1: 0 bytes of scales, expected 60");
}

TEST(Validate, RefusesEachBrokenPart) {
  const std::vector<float> values(64);
  const LinearSource good = make_linear_source("w", Format::f32, values, 2, 4, 8);
  validate(good);
  const auto error = [&](const auto& breakage) {
    LinearSource bad = good;
    breakage(bad);
    return test::error_of([&] { validate(bad); });
  };
  EXPECT_EQ(error([](LinearSource& s) { s.out = 0; }), "w: shape [0, 8], expected positive sizes");
  EXPECT_EQ(error([](LinearSource& s) { s.matrices.clear(); }), "w: no matrix, expected at least one");
  EXPECT_EQ(error([](LinearSource& s) { s.format = Format::q8_0; }), "w: rows of 8 elements, expected a multiple of 32 for q8_0");
  EXPECT_EQ(error([](LinearSource& s) { s.matrices[1].data = s.matrices[1].data.first(127); }),
            "w: matrix 1 of 2: 127 bytes of codes, expected 128");
  EXPECT_EQ(error([](LinearSource& s) { s.matrices[0].zeros = s.matrices[0].data; }),
            "w: matrix 0 of 2: 128 bytes of zero points, expected 0");
  EXPECT_EQ(error([](LinearSource& s) { s.bias.resize(4); }),
            "w: a bias of 4 for 2 matrices of 4 rows, expected one per row of a single matrix");
  EXPECT_EQ(error([](LinearSource& s) { s.perm.resize(8); }), "w: a column order with format f32, expected a planar format");
  EXPECT_EQ(error([](LinearSource& s) { s.format = Format::int8_planar, s.group = 0; }),
            "w: groups of 0 in rows of 8 elements, expected a divisor");
  EXPECT_EQ(error([](LinearSource& s) { s.format = Format::int8_planar, s.group = 3; }),
            "w: groups of 3 in rows of 8 elements, expected a divisor");
}

TEST(Validate, RefusesABrokenColumnOrder) {
  const std::vector<uint8_t> codes(8), zeros(2);
  const std::vector<uint16_t> scales(2);
  LinearSource source{.name = "w", .format = Format::int8_planar, .out = 2, .in = 4, .group = 4};
  source.matrices.push_back({.data = as_bytes(codes), .scales = as_bytes(scales), .zeros = as_bytes(zeros)});
  source.perm = {2, 0, 3, 1};
  validate(source);
  source.perm = {2, 0, 3};
  EXPECT_EQ(test::error_of([&] { validate(source); }), "w: a column order of 3 entries, expected 4");
  source.perm = {2, 0, 4, 1};
  EXPECT_EQ(test::error_of([&] { validate(source); }), "w: column 4 in the column order, expected below 4");
  source.perm = {2, 0, -1, 1};
  EXPECT_EQ(test::error_of([&] { validate(source); }), "w: column -1 in the column order, expected below 4");
  source.perm = {2, 0, 2, 1};
  EXPECT_EQ(test::error_of([&] { validate(source); }), "w: column 2 appears twice in the column order");
}

}  // namespace
}  // namespace cachalot
