// The wide layout and its products: codes survive packing to the bit, products of integers are those of the rounded activations, those of
// floats exact but for f32 sums, the same on every level and beside any others, and rounding keeps its bound.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/features.h"
#include "cpu/pack.h"
#include "cpu/wide_pack.h"
#include "ops/random_weights.h"
#include "support/support.h"

namespace cachalot::cpu {
namespace {

using test::random_floats;
using test::random_source;

// Every format whose codec has a wide layout: integers, and floats.
std::vector<Format> float_formats() { return {Format::f16, Format::bf16, Format::fp8_block}; }
std::vector<Format> wide_formats() {
  return {Format::q4_0, Format::q4_1,   Format::q5_0,   Format::q5_1,  Format::q8_0,        Format::q4_k,       Format::q5_k,
          Format::q6_k, Format::iq4_nl, Format::iq4_xs, Format::mxfp4, Format::int4_planar, Format::int8_planar};
}

// Pretends that there is a product for every codec, so that packing can be tested on any machine.
WideKernels all_kernels() {
  WideKernels k;
  for (auto& product : k.product) product = [](const WideRows&, const WideProduct&) {};
  for (const Codec c : {Codec::f32, Codec::q2_k, Codec::q3_k}) k.product[static_cast<int>(c)] = nullptr;
  return k;
}

TEST(Wide, RowsComeBackExactly) {
  HugeMemory memory;
  ThreadPool pool(2);
  const WideKernels kernels = all_kernels();
  std::vector<Format> formats = wide_formats();
  for (const Format format : float_formats()) formats.push_back(format);
  for (const Format format : formats) {
    const int in = test::rounded_to_blocks(format, 300), out = 133;
    const LinearSource s = random_source({.format = format, .out = out, .in = in / 32 * 32, .n_matrices = 2}, 3);
    const auto packed = pack_weights({&s, 1}, memory, pool, &kernels);
    const Segment& segment = packed->segments[0];
    ASSERT_TRUE(segment.wide) << info(format).name;
    std::vector<float> expected(static_cast<size_t>(s.in)), found(static_cast<size_t>(s.in));
    for (int m = 0; m < 2; ++m) {
      for (int r = 0; r < out; ++r) {
        dequant_row(s, m, r, expected.data());
        const WideRows group = packed->wide_rows(segment, m, r / kWideRows * kWideRows, kWideRows);
        for (int u = 0; u < group.n_units; ++u)
          unpack_wide_row(segment.codec, {group.unit_elems, group.unit_bytes, group.header_bytes},
                          group.data + static_cast<size_t>(u * group.unit_bytes), r % kWideRows, found.data() + u * group.unit_elems);
        for (size_t k = 0; k < found.size(); ++k) ASSERT_EQ(found[k], expected[k]) << info(format).name << " row " << r << " column " << k;
      }
    }
  }
}

TEST(Wide, ScalesAtTheEndsOfTheirRangeKeepTheOtherLayout) {
  std::vector<std::byte> block(17, std::byte{1});
  LinearSource s{.name = "tiny", .format = Format::mxfp4, .out = 1, .in = 32};
  s.matrices.push_back({.data = block, .scales = {}, .zeros = {}});
  EXPECT_FALSE(fits_wide(s, Codec::mxfp4));
  block[0] = std::byte{120};
  EXPECT_TRUE(fits_wide(s, Codec::mxfp4));
  block[0] = std::byte{255};
  EXPECT_FALSE(fits_wide(s, Codec::mxfp4));
}

TEST(Wide, FloatsOutOfItsReachKeepTheOtherLayout) {
  const LinearSource odd = random_source({.format = Format::bf16, .out = 3, .in = 40}, 1),
                     even = random_source({.format = Format::bf16, .out = 3, .in = 64}, 1);
  EXPECT_FALSE(fits_wide(odd, Codec::bf16));
  EXPECT_TRUE(fits_wide(even, Codec::bf16));
  std::vector<std::byte> codes(64, std::byte{0x7e});
  const float scale = 1.0f;
  LinearSource s{.name = "codes", .format = Format::fp8_block, .out = 1, .in = 64};
  s.matrices.push_back({.data = codes, .scales = std::as_bytes(std::span(&scale, 1)), .zeros = {}});
  EXPECT_TRUE(fits_wide(s, Codec::fp8));
  codes[40] = std::byte{0xff};  // not a number
  EXPECT_FALSE(fits_wide(s, Codec::fp8));
}

// Runs for each level that this machine can run and that has integer products.
class WideProducts : public testing::TestWithParam<const IsaLevel*> {
 protected:
  const WideKernels& kernels() const { return GetParam()->table->wide; }
};
std::vector<const IsaLevel*> wide_levels() {
  std::vector<const IsaLevel*> out;
  for (const IsaLevel& level : isa_levels())
    if ((level.needs & ~detect_features()) == 0 && level.table->wide.quantise != nullptr) out.push_back(&level);
  return out;
}
INSTANTIATE_TEST_SUITE_P(Isa, WideProducts, testing::ValuesIn(wide_levels()),
                         [](const auto& param) { return std::string(param.param->name); });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(WideProducts);

struct Rounded {
  std::vector<ActivationChunk> chunks;
  std::vector<float> scale;
  QuantisedRow row;
  Rounded(const WideKernels& kernels, const float* x, int n)
      : chunks(static_cast<size_t>(n / 32)), scale(static_cast<size_t>(n + 255) / 256) {
    kernels.quantise(x, n, chunks.data(), scale.data());
    row = {.chunks = chunks.data(), .scale = scale.data()};
  }
  // The integer that stands for x[k], whichever form the level keeps it in: its product with a weight of 1 in column k alone.
  [[nodiscard]] int code(const WideKernels& kernels, size_t k) const {
    alignas(64) uint8_t unit[544] = {};  // q8_0: d = 1 in row 0, codes of 0 but for that column
    const uint16_t one = 0x3c00;
    std::memcpy(unit, &one, 2);
    for (int s = 0; s < 8; ++s) std::memset(unit + 32 + 64 * s, 128, 4);
    unit[32 + 64 * (k % 32 / 4) + k % 4] = 129;
    const float unscaled = 1.0f;
    const QuantisedRow chunk{.chunks = &chunks[k / 32], .scale = &unscaled};
    float y = 0.0f;
    float* out = &y;
    kernels.product[static_cast<int>(Codec::q8_0)]({.data = unit, .n_rows = 1, .n_units = 1, .unit_bytes = 544, .unit_elems = 32},
                                                   {.x = &chunk, .y = &out, .n_tokens = 1});
    return static_cast<int>(y);
  }
};

TEST_P(WideProducts, RoundingKeepsItsBound) {
  constexpr int kN = 576, kTop = 127 * 257;  // the last group is not full
  std::vector<float> x = random_floats(kN, 1);
  for (size_t k = 0; k < 256; ++k) x[k] *= 1e6f;
  x[300] = -40.0f;
  const Rounded r(kernels(), x.data(), kN);
  for (size_t g = 0; g < 3; ++g) {
    float largest = 0.0f;
    for (size_t k = 256 * g; k < std::min<size_t>(256 * (g + 1), kN); ++k) largest = std::max(largest, std::abs(x[k]));
    EXPECT_FLOAT_EQ(r.scale[g], largest / kTop);
  }
  for (size_t c = 0; c < kN / 32; ++c) {
    int half[2] = {0, 0};
    for (size_t k = 32 * c; k < 32 * (c + 1); ++k) {
      const int code = r.code(kernels(), k);
      half[k % 32 / 16] += code;
      EXPECT_LE(std::abs(code), kTop);
      EXPECT_NEAR(static_cast<float>(code) * r.scale[k / 256], x[k], 0.502f * r.scale[k / 256]) << k;
    }
    EXPECT_EQ(r.chunks[c].minus_8_half_sum[0], -8 * half[0]);
    EXPECT_EQ(r.chunks[c].minus_8_half_sum[1], -8 * half[1]);
    EXPECT_EQ(r.chunks[c].minus_8_sum, -8 * (half[0] + half[1]));
    EXPECT_EQ(r.chunks[c].float_sum, static_cast<float>(half[0] + half[1]));
  }
  EXPECT_EQ(r.code(kernels(), 300), -kTop);
}
TEST_P(WideProducts, RoundingOfZerosTinyAndBadNumbers) {
  std::vector<float> x(256, 0.0f);
  EXPECT_EQ(Rounded(kernels(), x.data(), 256).scale[0], 0.0f);
  x[3] = 1e-41f;
  EXPECT_EQ(Rounded(kernels(), x.data(), 256).code(kernels(), 3), 0);
  x[5] = std::numeric_limits<float>::infinity();
  EXPECT_FALSE(std::isfinite(Rounded(kernels(), x.data(), 256).scale[0]));
  x[5] = std::nanf("");
  EXPECT_TRUE(std::isnan(Rounded(kernels(), x.data(), 256).scale[0]));
}

// y = W x for tokens of the same seed, with kernels of one level.
std::vector<float> product_of(const WideKernels& kernels, const CpuPacked& packed, int n_tokens) {
  const Segment& segment = packed.segments[0];
  const std::vector<float> x = random_floats(static_cast<size_t>(n_tokens * packed.in), 4);
  std::vector<Rounded> rounded;
  std::vector<QuantisedRow> rows;
  std::vector<float> y(static_cast<size_t>(n_tokens * packed.out));
  std::vector<float*> out;
  for (int t = 0; t < n_tokens; ++t) {
    rounded.emplace_back(kernels, x.data() + t * packed.in, packed.in);
    out.push_back(y.data() + t * packed.out);
  }
  for (const Rounded& r : rounded) rows.push_back(r.row);
  kernels.product[static_cast<int>(segment.codec)](packed.wide_rows(segment, 0, 0, packed.out),
                                                   {.x = rows.data(), .y = out.data(), .n_tokens = n_tokens});
  return y;
}
// Of every number of tokens that a level treats in its own way, and so many that they pass in blocks; 800 columns end within a group that
// shares a scale.
TEST_P(WideProducts, AreTheSameOnEveryLevel) {
  HugeMemory memory;
  ThreadPool pool(1);
  for (const Format format : wide_formats()) {
    const LinearSource s = random_source({.format = format, .out = 75, .in = test::rounded_to_blocks(format, 800)}, 3);
    const auto packed = pack_weights({&s, 1}, memory, pool, &kernels());
    for (const int n_tokens : {1, 3, 4, 5, 17, 70, 150}) {
      const std::vector<float> found = product_of(kernels(), *packed, n_tokens);
      const std::vector<float> plainest = product_of(wide_levels().back()->table->wide, *packed, n_tokens);
      ASSERT_EQ(std::memcmp(found.data(), plainest.data(), sizeof(float) * found.size()), 0) << info(format).name << " T" << n_tokens;
    }
  }
}

TEST_P(WideProducts, AreThoseOfTheRoundedActivations) {
  HugeMemory memory;
  ThreadPool pool(1);
  for (const Format format : wide_formats()) {
    constexpr int kOut = 37;
    const int in = test::rounded_to_blocks(format, 512);
    const LinearSource s = random_source({.format = format, .out = kOut, .in = in}, 3);
    const auto packed = pack_weights({&s, 1}, memory, pool, &kernels());
    const Segment& segment = packed->segments[0];
    ASSERT_TRUE(segment.wide);
    const std::vector<float> bias = random_floats(kOut, 8);
    std::vector<std::vector<float>> alone;
    std::vector<std::vector<double>> known;  // the rounded activations
    for (const int n_tokens : {1, 2, 5, 8, 15}) {
      const std::vector<float> x = random_floats(static_cast<size_t>(15 * in), 4);
      std::vector<Rounded> rounded;
      std::vector<QuantisedRow> rows;
      std::vector<float> y(static_cast<size_t>(n_tokens * (kOut + 2)), 0.25f);
      std::vector<float*> out;
      for (int t = 0; t < n_tokens; ++t) {
        rounded.emplace_back(kernels(), x.data() + t * in, in);
        out.push_back(y.data() + t * (kOut + 2));
      }
      for (const Rounded& r : rounded) rows.push_back(r.row);
      while (known.size() < rounded.size()) {
        const Rounded& r = rounded[known.size()];
        known.emplace_back();
        for (size_t k = 0; k < static_cast<size_t>(in); ++k)
          known.back().push_back(static_cast<double>(r.scale[k / 256]) * r.code(kernels(), k));
      }
      kernels().product[static_cast<int>(segment.codec)](
          packed->wide_rows(segment, 0, 0, kOut),
          {.x = rows.data(), .y = out.data(), .y_col = 1, .n_tokens = n_tokens, .bias = bias.data(), .beta = 2.0f});
      std::vector<float> w(static_cast<size_t>(in));
      for (int r = 0; r < kOut; ++r) {
        dequant_row(s, 0, r, w.data());
        for (int t = 0; t < n_tokens; ++t) {
          double sum = 0.0, size = 0.0;
          for (size_t k = 0; k < w.size(); ++k) {
            const double term = static_cast<double>(w[k]) * known[static_cast<size_t>(t)][k];
            sum += term;
            size += std::abs(term);
          }
          sum += static_cast<double>(bias[static_cast<size_t>(r)]) + 0.5;
          ASSERT_NEAR(out[static_cast<size_t>(t)][r + 1], sum, 3e-6 * (size + 1.0)) << info(format).name << " row " << r << " token " << t;
        }
      }
      for (int t = 0; t < n_tokens; ++t) {
        EXPECT_EQ(out[static_cast<size_t>(t)][0], 0.25f);
        EXPECT_EQ(out[static_cast<size_t>(t)][kOut + 1], 0.25f);
        std::vector<float> row(out[static_cast<size_t>(t)] + 1, out[static_cast<size_t>(t)] + 1 + kOut);
        if (static_cast<size_t>(t) == alone.size()) alone.push_back(row);
        ASSERT_TRUE(std::equal(row.begin(), row.begin() + kOut, alone[static_cast<size_t>(t)].begin()))
            << info(format).name << ": token " << t << " of " << n_tokens;
      }
    }
  }
}

// y = W x + bias + 2 y of floats, for the first tokens of x.
std::vector<float> float_product_of(const WideKernels& kernels, const CpuPacked& packed, const std::vector<float>& x, int n_tokens,
                                    const std::vector<float>& bias) {
  const Segment& segment = packed.segments[0];
  std::vector<float> y(static_cast<size_t>(n_tokens * packed.out), 0.25f), laid_out(static_cast<size_t>(n_tokens * packed.in));
  std::vector<float> scratch(kernels.scratch_bytes / sizeof(float) + 16);
  std::vector<const float*> rows;
  std::vector<float*> out;
  for (int t = 0; t < n_tokens; ++t) {
    rows.push_back(x.data() + t * packed.in);
    out.push_back(y.data() + t * packed.out);
  }
  for (int t = 0; t < n_tokens; t += kernels.block_tokens)
    kernels.pack_tokens(rows.data() + t, std::min(kernels.block_tokens, n_tokens - t), packed.in, laid_out.data() + t * packed.in);
  WideProduct product{.rows = rows.data(), .packed = n_tokens > kernels.few_tokens ? laid_out.data() : nullptr};
  product.y = out.data();
  product.n_tokens = n_tokens;
  product.bias = bias.data();
  product.beta = 2.0f;
  product.scratch = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
  kernels.product[static_cast<int>(segment.codec)](packed.wide_rows(segment, 0, 0, packed.out), product);
  return y;
}
TEST_P(WideProducts, OfFloatsAreExactAndTheSameOnEveryLevelBesideAnyOthers) {
  if (kernels().product[static_cast<int>(Codec::bf16)] == nullptr) GTEST_SKIP() << "floats keep panels for tiles here";
  HugeMemory memory;
  ThreadPool pool(1);
  constexpr int kMost = 520;  // more than pass at a time
  for (const Format format : float_formats()) {
    for (const int in : {32, 416}) {
      constexpr int kOut = 155;  // odd numbers of groups and rows, and of FP8 a second row of scales
      const LinearSource s = random_source({.format = format, .out = kOut, .in = in}, 3);
      const auto packed = pack_weights({&s, 1}, memory, pool, &kernels());
      ASSERT_TRUE(packed->segments[0].wide) << info(format).name;
      const std::vector<float> x = random_floats(static_cast<size_t>(kMost * in), 4), bias = random_floats(kOut, 8);
      const std::vector<float> all = float_product_of(wide_levels().back()->table->wide, *packed, x, kMost, bias);
      for (const int n_tokens : {1, 2, 3, 4, 5, 7, 11, 12, 13, 30, kMost}) {
        const std::vector<float> found = float_product_of(kernels(), *packed, x, n_tokens, bias);
        ASSERT_EQ(std::memcmp(found.data(), all.data(), sizeof(float) * found.size()), 0) << info(format).name << " T" << n_tokens;
      }
      std::vector<float> w(static_cast<size_t>(in));
      for (int r = 0; r < kOut; ++r) {
        dequant_row(s, 0, r, w.data());
        for (int t = 0; t < 20; ++t) {
          double sum = 0.0, size = 0.0;
          for (int k = 0; k < in; ++k) {
            const double term = static_cast<double>(w[static_cast<size_t>(k)]) * static_cast<double>(x[static_cast<size_t>(t * in + k)]);
            sum += term;
            size += std::abs(term);
          }
          sum += static_cast<double>(bias[static_cast<size_t>(r)]) + 0.5;
          ASSERT_NEAR(all[static_cast<size_t>(t * kOut + r)], sum, 2e-6 * (size + 1.0))
              << info(format).name << " row " << r << " token " << t;
        }
      }
    }
  }
}

}  // namespace
}  // namespace cachalot::cpu
