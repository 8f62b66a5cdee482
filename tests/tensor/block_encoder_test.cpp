// The encoders of K-quants, IQ4 and weighted blocks: codes and scales go where the decoders look, errors are bounded and near the best that
// exhaustive search finds on one run, importance moves the error, and odd values do no harm.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "base/float_formats.h"
#include "support/support.h"
#include "tensor/block_codes.h"
#include "tensor/run_fit.h"

namespace cachalot {
namespace {

constexpr Format kBlockFormats[] = {Format::q4_0, Format::q4_1, Format::q5_0, Format::q5_1, Format::q8_0,   Format::q2_k,
                                    Format::q3_k, Format::q4_k, Format::q5_k, Format::q6_k, Format::iq4_nl, Format::iq4_xs};

std::vector<float> encoded(Format format, const std::vector<float>& x, const std::vector<float>* importance = nullptr) {
  std::vector<std::byte> blocks(row_bytes(format, static_cast<int64_t>(x.size())));
  if (importance != nullptr)
    quantize_row(format, x.data(), *importance, blocks.data());
  else
    quantize_row(format, x.data(), static_cast<int64_t>(x.size()), blocks.data());
  std::vector<float> back(x.size());
  dequant_row(format, blocks.data(), static_cast<int64_t>(x.size()), back.data());
  return back;
}

double relative_error(const std::vector<float>& x, const std::vector<float>& back, const std::vector<float>* w = nullptr) {
  double error = 0, size = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double weight = w != nullptr ? static_cast<double>((*w)[i]) : 1.0;
    error += weight * (x[i] - back[i]) * (x[i] - back[i]);
    size += weight * x[i] * x[i];
  }
  return std::sqrt(error / size);
}

// The same run in every lane, and what one lane of a result holds.
Runs<16> runs_of(const std::vector<float>& x, const std::vector<float>& w) {
  Runs<16> runs;
  for (size_t j = 0; j < 16; ++j) {
    runs.x[j] = spread(x[j]);
    runs.w[j] = spread(w[j]);
  }
  return runs;
}

// Random bytes are a valid block of every format once its f16 fields are finite.
TEST(BlockCodes, GridAndCodesAreWhatTheDecoderReads) {
  std::mt19937 random(5);
  for (const Format format : kBlockFormats) {
    const FormatInfo& entry = info(format);
    const CodeInfo codes = code_info(format);
    const auto n = static_cast<size_t>(entry.block_elems);
    for (int trial = 0; trial < 20; ++trial) {
      std::vector<float> x = test::random_floats(n, static_cast<uint64_t>(100 + trial));
      std::vector<std::byte> block(static_cast<size_t>(entry.block_bytes));
      quantize_row(format, x.data(), entry.block_elems, block.data());
      std::vector<uint8_t> q(n);
      for (uint8_t& code : q) code = static_cast<uint8_t>(random() % static_cast<unsigned>(codes.n_codes));
      write_block_codes(format, q.data(), block.data());
      std::vector<float> back(n);
      dequant_row(format, block.data(), entry.block_elems, back.data());
      float scale[kMaxRuns], offset[kMaxRuns];
      read_block_grid(format, block.data(), scale, offset);
      for (size_t e = 0; e < n; ++e) {
        const size_t run = e / static_cast<size_t>(codes.run);
        const float level = codes.levels != nullptr ? codes.levels[q[e]] : static_cast<float>(q[e]);
        EXPECT_NEAR(scale[run] * level + offset[run], back[e], 1e-5f * (std::fabs(offset[run]) + std::fabs(back[e]) + 1e-6f))
            << entry.name << " element " << e;
      }
    }
  }
}

// Root mean square error relative to normally distributed weights. The bounds are measured values plus a tenth.
TEST(BlockEncoder, ErrorOnNormalWeights) {
  const std::vector<float> x = test::random_floats(256 * 64, 11);
  const std::pair<Format, double> bounds[] = {{Format::q2_k, 0.285}, {Format::q3_k, 0.158},   {Format::q4_k, 0.077},  {Format::q5_k, 0.038},
                                              {Format::q6_k, 0.018}, {Format::iq4_nl, 0.083}, {Format::iq4_xs, 0.085}};
  for (const auto& [format, bound] : bounds) {
    const double error = relative_error(x, encoded(format, x));
    EXPECT_LT(error, bound) << info(format).name;
    EXPECT_GT(error, bound * 0.75) << info(format).name << ": the bound is loose";
  }
}

// All pairs of a fine grid of scales and offsets, with codes by rounding.
TEST(BlockEncoder, AffineFitIsNearExhaustiveSearch) {
  for (const int n_codes : {4, 16}) {
    double ours = 0, best_possible = 0;
    for (uint64_t seed = 0; seed < 6; ++seed) {
      const std::vector<float> x = test::random_floats(16, 40 + seed);
      std::vector<float> w = test::random_floats(16, 80 + seed);
      for (float& v : w) v = v * v + 0.05f;
      const auto [low, high] = std::minmax_element(x.begin(), x.end());
      const Runs<16> runs = runs_of(x, w);
      float best = std::numeric_limits<float>::max();
      for (int s = 40; s <= 120; ++s)
        for (int o = 0; o <= 160; ++o) {
          const float scale = (*high - *low) / static_cast<float>(n_codes - 1) * static_cast<float>(s) / 100.0f;
          const float offset = std::min(0.0f, *low + (*high - *low) * 0.4f * static_cast<float>(o - 20) / 140.0f);
          best = std::min(best, affine_error(runs, spread(scale), spread(offset), static_cast<float>(n_codes - 1))[0]);
        }
      ours += fit_affine(runs, n_codes, true).error[5];
      best_possible += best;
    }
    EXPECT_LT(ours, (n_codes == 4 ? 1.10 : 1.15) * best_possible) << n_codes << " codes";
  }
}

TEST(BlockEncoder, ScaleFitIsNearExhaustiveSearch) {
  const UniformLevels three_bits{-4.0f, 3.0f, 9, true};
  double ours = 0, best_possible = 0;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    const std::vector<float> x = test::random_floats(16, 140 + seed), w(16, 1.0f);
    const Runs<16> runs = runs_of(x, w);
    float best = std::numeric_limits<float>::max();
    for (int s = -2000; s <= 2000; ++s) best = std::min(best, scaled_error(runs, spread(static_cast<float>(s) * 1e-3f), three_bits)[0]);
    ours += scaled_error(runs, fit_scale(runs, three_bits), three_bits)[11];
    best_possible += best;
  }
  EXPECT_LT(ours, 1.03 * best_possible);
}

TEST(BlockEncoder, ImportanceMovesTheErrorToWhereItCostsLess) {
  const std::vector<float> x = test::random_floats(256 * 16, 21);
  std::vector<float> w = test::random_floats(x.size(), 22);
  for (float& v : w) v = std::exp(2.0f * v);
  for (const Format format : kBlockFormats) {
    if (format == Format::q8_0) continue;  // its error is far below what the choice of a scale could change
    EXPECT_LT(relative_error(x, encoded(format, x, &w), &w), 0.97 * relative_error(x, encoded(format, x), &w)) << info(format).name;
  }
}

TEST(BlockEncoder, OddValuesAreHarmless) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();
  for (const Format format : kBlockFormats) {
    const auto n = static_cast<size_t>(info(format).block_elems);
    const std::vector<float> zeros(n, 0.0f);
    EXPECT_EQ(encoded(format, zeros, &zeros), zeros) << info(format).name;
    std::vector<float> constant(n, 0.25f);
    for (const float v : encoded(format, constant, &constant)) EXPECT_NEAR(v, 0.25f, 0.01f) << info(format).name;
    std::vector<float> odd = test::random_floats(n, 3);
    odd[1] = kNan;
    odd[2] = kInf;
    std::vector<float> w(n, 1.0f);
    w[3] = kNan;
    w[4] = kInf;
    w[5] = -1.0f;
    for (const float v : encoded(format, odd, &w)) EXPECT_TRUE(std::isfinite(v)) << info(format).name;
    for (const std::vector<float>& bad : {std::vector<float>(n, kNan), std::vector<float>(n, kInf), std::vector<float>(n, -1.0f)}) {
      const std::vector<float> x = test::random_floats(n, 4);
      EXPECT_LT(relative_error(x, encoded(format, x, &bad)), 0.4) << info(format).name;
    }
  }
}

}  // namespace
}  // namespace cachalot
