// Linear algebra of the quantizers, GPTQ's codes against the plain definition, and what the methods promise on one matrix.
#include "quant/gptq.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/float_formats.h"
#include "cpu/cpu_ops.h"
#include "quant/awq.h"
#include "quant/cholesky.h"
#include "quant/refine.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

// Correlated inputs [rows, n], some channels larger than others.
std::vector<float> inputs(int rows, int n, uint64_t seed) {
  const std::vector<float> base = random_floats(static_cast<size_t>(rows) * static_cast<size_t>(n), seed);
  std::vector<float> x(base.size());
  for (int r = 0; r < rows; ++r) {
    const float* const row = base.data() + static_cast<size_t>(r) * static_cast<size_t>(n);
    for (int k = 0; k < n; ++k) {
      const float size = k % 7 == 0 ? 4.0f : 1.0f;
      x[static_cast<size_t>(r) * static_cast<size_t>(n) + static_cast<size_t>(k)] =
          size * (row[k] + 0.8f * row[(k + 1) % n] + 0.5f * row[0]);
    }
  }
  return x;
}

View view(std::vector<float>& values, int rows, int cols) { return View::matrix(values.data(), DType::f32, rows, cols); }

struct Fixture {
  std::unique_ptr<Ops> ops = make_cpu_ops({.n_threads = 2, .bf16_prompts = false});
  ThreadPool pool{2};
  int n, out = 24, rows = 600;
  std::vector<float> x, w;
  Moments moments;
  explicit Fixture(int columns = 128)
      : n(columns),
        x(inputs(rows, n, 1)),
        w(random_floats(static_cast<size_t>(out) * static_cast<size_t>(n), 2, 0.05f)),
        moments(n, true, true) {
    moments.add(*ops, view(x, rows, n), nullptr, view(x, rows, n));
  }

  // Squared error of the outputs.
  double error(const QuantizedStack& stack) {
    std::vector<float> row(static_cast<size_t>(n));
    double sum = 0.0;
    for (int o = 0; o < out; ++o) {
      stack.dequant(0, o, row.data());
      for (int t = 0; t < rows; ++t) {
        double d = 0.0;
        for (int k = 0; k < n; ++k)
          d += static_cast<double>(x[static_cast<size_t>(t * n + k)]) * (w[static_cast<size_t>(o * n + k)] - row[static_cast<size_t>(k)]);
        sum += d * d;
      }
    }
    return sum;
  }
};

TEST(Moments, AreSumsOverWeightedRows) {
  Fixture f;
  std::vector<float> x = random_floats(50 * 12, 7), weight = random_floats(50, 8);
  Moments m(12, true, false);
  m.add(*f.ops, view(x, 30, 12), weight.data());
  m.add(*f.ops, view(x, 50, 12).rows(30, 20), weight.data() + 30);
  for (int i = 0; i < 12; ++i)
    for (int j = 0; j < 12; ++j) {
      double want = 0.0;
      for (int t = 0; t < 50; ++t) {
        const auto at = static_cast<size_t>(t);
        want += static_cast<double>(weight[at]) * weight[at] * x[at * 12 + static_cast<size_t>(i)] * x[at * 12 + static_cast<size_t>(j)];
      }
      EXPECT_NEAR(m.gram(*f.ops)[static_cast<size_t>(i * 12 + j)], want, 1e-3);
      if (i == j) {
        EXPECT_NEAR(m.square[static_cast<size_t>(i)], want, 1e-3);
      }
    }
  EXPECT_EQ(m.tokens, 50);
}

// The inner row of an attention sink must not count for more than all others.
TEST(Moments, LimitRowsThatAreFarLargerThanMost) {
  constexpr int kRows = 41, kColumns = 12, kSink = 3;
  Fixture f;
  std::vector<float> x = random_floats(kRows * kColumns, 9);
  for (int k = 0; k < kColumns; ++k) x[static_cast<size_t>(kSink * kColumns + k)] *= 1000.0f;
  std::vector<double> sizes;
  for (int r = 0; r < kRows; ++r) {
    const auto row = x.begin() + r * kColumns;
    sizes.push_back(std::inner_product(row, row + kColumns, row, 0.0));
  }
  const double others = std::accumulate(sizes.begin(), sizes.end(), 0.0) - sizes[kSink];
  std::nth_element(sizes.begin(), sizes.begin() + kRows / 2, sizes.end());
  Moments m(kColumns, true, false);
  m.add(*f.ops, view(x, kRows, kColumns), nullptr);
  double trace = 0.0, squares = 0.0;
  for (int k = 0; k < kColumns; ++k) {
    trace += static_cast<double>(m.gram(*f.ops)[static_cast<size_t>(k * kColumns + k)]);
    squares += m.square[static_cast<size_t>(k)];
  }
  EXPECT_NEAR(trace, others + sizes[kRows / 2], 1e-3 * trace);
  EXPECT_NEAR(squares, trace, 1e-3 * trace);
}

// More columns than the blocks that the work is cut into; first with few rows, which are kept, then with many.
TEST(Moments, OfManyColumns) {
  constexpr int kColumns = 700, kFew = 60, kRows = 400;
  Fixture f;
  std::vector<float> x = inputs(kRows, kColumns, 5), other = inputs(kRows, kColumns, 6);
  Moments m(kColumns, true, true);
  const auto sum = [&](int rows, int i, auto&& second) {
    double out = 0.0;
    for (int t = 0; t < rows; ++t)
      out += static_cast<double>(x[static_cast<size_t>(t * kColumns + i)]) * second(static_cast<size_t>(t * kColumns));
    return out;
  };
  const auto expect_gram = [&](int rows) {
    const std::vector<float>& gram = m.gram(*f.ops);
    for (int i = 0; i < kColumns; i += 37)
      for (int j = 0; j < kColumns; j += 41) {
        EXPECT_NEAR(gram[static_cast<size_t>(i * kColumns + j)], sum(rows, i, [&](size_t row) { return x[row + static_cast<size_t>(j)]; }),
                    2e-2);
        EXPECT_EQ(gram[static_cast<size_t>(i * kColumns + j)], gram[static_cast<size_t>(j * kColumns + i)]);
      }
  };
  m.add(*f.ops, view(x, kRows, kColumns).rows(0, kFew), nullptr, view(other, kRows, kColumns).rows(0, kFew));
  EXPECT_TRUE(m.keeps_rows());
  expect_gram(kFew);
  m.add(*f.ops, view(x, kRows, kColumns).rows(kFew, kRows - kFew), nullptr, view(other, kRows, kColumns).rows(kFew, kRows - kFew));
  EXPECT_FALSE(m.keeps_rows());
  expect_gram(kRows);
  for (int i = 0; i < kColumns; i += 37)
    for (int j = 0; j < kColumns; j += 41) {
      const auto change = [&](size_t row) { return other[row + static_cast<size_t>(j)] - x[row + static_cast<size_t>(j)]; };
      EXPECT_NEAR(m.cross()[static_cast<size_t>(i * kColumns + j)], sum(kRows, i, change), 2e-2);
    }
}

TEST(Cholesky, FactorsAndRefuses) {
  Fixture f(740);
  std::vector<float> a = f.moments.gram(*f.ops);
  for (int k = 0; k < f.n; ++k) a[static_cast<size_t>(k * f.n + k)] *= 1.01f;
  const std::vector<float> before = a;
  ASSERT_TRUE(cholesky(*f.ops, a, f.n));
  for (int i = 0; i < f.n; i += 13)
    for (int j = 0; j < f.n; j += 11) {
      double sum = 0.0;
      for (int k = 0; k < f.n; ++k) sum += static_cast<double>(a[static_cast<size_t>(i * f.n + k)]) * a[static_cast<size_t>(j * f.n + k)];
      EXPECT_NEAR(sum, before[static_cast<size_t>(i * f.n + j)], 1e-3 * before[0]);
    }
  std::vector<float> negative = before;
  negative[static_cast<size_t>(70 * f.n + 70)] = -1.0f;
  EXPECT_FALSE(cholesky(*f.ops, negative, f.n));
}

// The original formulation: after each column the rest of the weights moves by the inverse of what is left of the Gram matrix.
TEST(Gptq, ChoosesTheCodesOfTheOriginalFormulation) {
  Fixture f;
  const int n = 160, out = 6;
  std::vector<float> x = inputs(400, n, 3), w = random_floats(static_cast<size_t>(out * n), 4, 0.05f);
  Moments m(n, true, false);
  m.add(*f.ops, view(x, 400, n), nullptr);
  QuantizedStack stack("w", {Format::int4_planar, 32, false}, 1, out, n);
  stack.round_to_nearest(0, w, {}, RangeSearch::span, f.pool);
  const MatrixGrid grid = stack.grid(0);
  ErrorFeedback(*f.ops, f.pool, m, {.damping = 0.01f, .act_order = false}).choose_codes(stack, 0, w);

  double mean = 0.0;
  for (int k = 0; k < n; ++k) mean += m.gram(*f.ops)[static_cast<size_t>(k * n + k)] / n;
  std::vector<double> rows(w.begin(), w.end()), left(m.gram(*f.ops).begin(), m.gram(*f.ops).end());
  for (int k = 0; k < n; ++k) left[static_cast<size_t>(k * n + k)] += 0.01 * mean;
  std::vector<float> got(w.size());
  for (int o = 0; o < out; ++o) stack.dequant(0, o, got.data() + o * n);
  int differing = 0;
  for (int k = 0; k < n; ++k) {
    // Inverse of the Gram matrix of columns k.. by Gauss-Jordan.
    const int size = n - k;
    std::vector<double> a(static_cast<size_t>(size * 2 * size));
    for (int i = 0; i < size; ++i) {
      for (int j = 0; j < size; ++j) a[static_cast<size_t>(i * 2 * size + j)] = left[static_cast<size_t>((k + i) * n + k + j)];
      a[static_cast<size_t>(i * 2 * size + size + i)] = 1.0;
    }
    for (int p = 0; p < size; ++p) {
      const double pivot = a[static_cast<size_t>(p * 2 * size + p)];
      for (int j = 0; j < 2 * size; ++j) a[static_cast<size_t>(p * 2 * size + j)] /= pivot;
      for (int i = 0; i < size; ++i) {
        const double factor = a[static_cast<size_t>(i * 2 * size + p)];
        if (i == p) continue;
        for (int j = 0; j < 2 * size; ++j) a[static_cast<size_t>(i * 2 * size + j)] -= factor * a[static_cast<size_t>(p * 2 * size + j)];
      }
    }
    const auto inverse = [&](int i, int j) { return a[static_cast<size_t>(i * 2 * size + size + j)]; };
    for (int o = 0; o < out; ++o) {
      double* const row = rows.data() + o * n;
      const auto at = static_cast<size_t>(o) * grid.n_runs() + static_cast<size_t>(k / grid.run);
      const double scale = grid.scale[at], offset = grid.offset[at];
      const double code = std::clamp(std::nearbyint((row[k] - offset) / scale), 0.0, 15.0), value = code * scale + offset;
      differing += std::fabs(value - got[static_cast<size_t>(o * n + k)]) > 0.5 * scale ? 1 : 0;
      const double step = (row[k] - value) / inverse(0, 0);
      for (int j = 0; j < size; ++j) row[k + j] -= step * inverse(0, j);
    }
  }
  EXPECT_LE(differing, 2) << "of " << out * n << " codes; one tie in f32 may change what follows it";
}

TEST(Gptq, LeavesFarLessOutputErrorThanRounding) {
  Fixture f;
  for (const Scheme& scheme :
       {Scheme{Format::int4_planar, 128, false}, Scheme{Format::int4_planar, 32, true}, Scheme{Format::q4_0}, Scheme{Format::iq4_nl},
        Scheme{Format::q5_1}, Scheme{Format::int8_planar, 0, false}, Scheme{Format::fp8_block}}) {
    QuantizedStack rounded("w", scheme, 1, f.out, f.n), fed("w", scheme, 1, f.out, f.n);
    rounded.round_to_nearest(0, f.w, {}, RangeSearch::fit, f.pool);
    fed.round_to_nearest(0, f.w, {}, RangeSearch::fit, f.pool);
    ErrorFeedback(*f.ops, f.pool, f.moments, {}).choose_codes(fed, 0, f.w);
    EXPECT_LT(f.error(fed), 0.5 * f.error(rounded)) << name_of(scheme);
  }
}

// Codes that learn few tokens by heart lose on others; more damping helps there, and is found.
TEST(Gptq, FewTokensAreDampedMore) {
  constexpr int kColumns = 256, kRows = 200, kFresh = 400, kOut = 32;
  Fixture f;
  std::vector<float> x = random_floats(size_t{kRows} * kColumns, 3), fresh = random_floats(size_t{kFresh} * kColumns, 4),
                     w = random_floats(size_t{kOut} * kColumns, 5, 0.05f);
  std::vector<uint8_t> held_out(kRows);
  for (int t = 0; t < kRows; t += 4) held_out[static_cast<size_t>(t)] = 1;
  Moments m(kColumns, true, true), unchecked(kColumns, true, true);
  m.add(*f.ops, view(x, kRows, kColumns), nullptr, view(x, kRows, kColumns), held_out.data());
  unchecked.add(*f.ops, view(x, kRows, kColumns), nullptr, view(x, kRows, kColumns));
  const Scheme scheme{Format::int4_planar, 128, false};
  const auto damping_by = [&](const Moments& moments) {
    return best_damping(*f.ops, f.pool, moments, scheme, w, kOut, {}, RangeSearch::fit);
  };
  const auto error_on_fresh = [&](float damping) {
    QuantizedStack stack("w", scheme, 1, kOut, kColumns);
    stack.round_to_nearest(0, w, {}, RangeSearch::fit, f.pool);
    ErrorFeedback(*f.ops, f.pool, m, {.damping = damping}).choose_codes(stack, 0, w);
    std::vector<float> row(kColumns);
    double sum = 0.0;
    for (int o = 0; o < kOut; ++o) {
      stack.dequant(0, o, row.data());
      for (int t = 0; t < kFresh; ++t) {
        double d = 0.0;
        for (int k = 0; k < kColumns; ++k)
          d += static_cast<double>(fresh[static_cast<size_t>(t * kColumns + k)]) *
               (w[static_cast<size_t>(o * kColumns + k)] - row[static_cast<size_t>(k)]);
        sum += d * d;
      }
    }
    return sum;
  };
  const float found = damping_by(m);
  EXPECT_GT(found, 0.1f);
  EXPECT_LT(error_on_fresh(found), 0.9 * error_on_fresh(0.01f));
  EXPECT_EQ(damping_by(unchecked), 0.01f);
}

TEST(Gptq, RefiningLowersTheErrorFurther) {
  Fixture f(640);  // more columns than are refined at once, and not a multiple
  for (const Scheme& scheme :
       {Scheme{Format::int4_planar, 128, false}, Scheme{Format::int4_planar, 32, true}, Scheme{Format::int4_planar, 0, false},
        Scheme{Format::q4_0}, Scheme{Format::iq4_nl}, Scheme{Format::q5_1}, Scheme{Format::fp8_block}}) {
    QuantizedStack fed("w", scheme, 1, f.out, f.n);
    fed.round_to_nearest(0, f.w, {}, RangeSearch::fit, f.pool);
    const ErrorFeedback feedback(*f.ops, f.pool, f.moments, {});
    feedback.choose_codes(fed, 0, f.w);
    const double before = f.error(fed);
    refine_codes(*f.ops, f.moments, feedback.damping(), fed, 0, f.w, f.pool);
    EXPECT_LT(f.error(fed), (is_planar(scheme.format) ? 0.95 : 1.0) * before) << name_of(scheme);
    // No single code can be better elsewhere, unless the rounds were over first; and doing it again changes next to nothing.
    const double after = f.error(fed);
    refine_codes(*f.ops, f.moments, feedback.damping(), fed, 0, f.w, f.pool);
    EXPECT_NEAR(f.error(fed), after, 0.02 * after) << name_of(scheme);
  }
}

// Blocks of 128 that the matrix does not fill, on both sides.
TEST(Fp8, SpanIsTheReferenceAndFitIsNoWorse) {
  constexpr int kOut = 150, kIn = 200;
  ThreadPool pool{2};
  const std::vector<float> w = random_floats(size_t{kOut} * kIn, 5, 0.05f);
  QuantizedStack plain("w", {Format::fp8_block}, 1, kOut, kIn), fitted("w", {Format::fp8_block}, 1, kOut, kIn);
  plain.round_to_nearest(0, w, {}, RangeSearch::span, pool);
  const std::vector<float> even(kIn, 1.0f);
  fitted.round_to_nearest(0, w, even, RangeSearch::fit, pool);
  const LinearSource reference = make_linear_source("w", Format::fp8_block, w, 1, kOut, kIn);
  EXPECT_TRUE(std::ranges::equal(plain.source().matrices[0].data, reference.matrices[0].data));
  EXPECT_TRUE(std::ranges::equal(plain.source().matrices[0].scales, reference.matrices[0].scales));
  EXPECT_LT(weighted_error(fitted, 0, w, {}).error, weighted_error(plain, 0, w, {}).error);
  // The grid is what is read back.
  const MatrixGrid grid = fitted.grid(0);
  ASSERT_EQ(grid.n_runs(), 2u);
  std::vector<uint8_t> codes(kIn);
  for (size_t k = 0; k < kIn; ++k) codes[k] = static_cast<uint8_t>(k % 127);
  fitted.write_codes(0, 140, codes.data());
  std::vector<float> row(kIn);
  fitted.dequant(0, 140, row.data());
  for (size_t k = 0; k < kIn; ++k) EXPECT_FLOAT_EQ(row[k], grid.scale[140 * 2 + k / 128] * e4m3_to_f32(codes[k]));
}

TEST(Awq, ScalesAreSaneWithDeadAndHugeChannels) {
  Fixture f;
  std::vector<float> x = f.x;
  for (int t = 0; t < f.rows; ++t) {
    x[static_cast<size_t>(t * f.n + 3)] = 0.0f;
    x[static_cast<size_t>(t * f.n + 5)] *= 6e4f;
  }
  Moments m(f.n, true, false);
  m.add(*f.ops, view(x, f.rows, f.n), nullptr);
  const AwqMatrix matrix{.values = f.w, .out = f.out, .scheme = {Format::int4_planar, 128, false}};
  const AwqScale scale = search_awq_scale(*f.ops, f.pool, m, {&matrix, 1}, RangeSearch::fit);
  EXPECT_EQ(scale.scale[3], 1.0f);
  for (const float s : scale.scale) EXPECT_TRUE(std::isfinite(s) && s > 0.0f);
  EXPECT_LT(scale.error_with, 0.5 * scale.error_without);
}

// Groups that do not fill the 16 lanes of the search, against the search of one group as it is written down.
TEST(RangeSearch, IsTheBestOfTheNarrowedSpans) {
  constexpr int kGroup = 40, kIn = 120, kRows = 7;
  const std::vector<float> w = random_floats(size_t{kRows} * kIn, 11, 0.05f), importance = random_floats(kIn, 12);
  std::vector<float> weight(importance.size());
  std::transform(importance.begin(), importance.end(), weight.begin(), [](float v) { return v * v; });
  const auto half = [](float v) { return f16_to_f32(f32_to_f16(v)); };
  for (const bool symmetric : {false, true}) {
    const GroupKind kind{.group = kGroup, .top = 15, .symmetric = symmetric};
    std::vector<GroupRange> found(size_t{kRows} * (kIn / kGroup)), spans = found;
    search_ranges(w.data(), weight.data(), kRows, kIn, kind, RangeSearch::fit, found.data());
    search_ranges(w.data(), nullptr, kRows, kIn, kind, RangeSearch::span, spans.data());
    for (size_t g = 0; g < found.size(); ++g) {
      const float* const x = w.data() + g * kGroup;
      const float* const importance_of = weight.data() + g * kGroup % kIn;
      const auto [low, high] = std::minmax_element(x, x + kGroup);
      float least = std::numeric_limits<float>::infinity();
      GroupRange best;
      for (int i = 0; i <= 20; ++i)
        for (int side = 0; side < (symmetric ? 1 : 3); ++side) {
          const float shrink = 1.0f - 0.025f * static_cast<float>(i), a = std::min(0.0f, side == 1 ? *low : *low * shrink),
                      b = std::max(0.0f, side == 2 ? *high : *high * shrink);
          GroupRange range{.scale = symmetric ? half(2.0f * std::max(-a, b) / 15.0f) : half((b - a) / 15.0f), .zero = 8};
          if (!symmetric) range.zero = static_cast<int>(std::clamp(std::nearbyint(-a / range.scale), 0.0f, 15.0f));
          float error = 0.0f;
          for (int k = 0; k < kGroup; ++k) {
            const float zero = static_cast<float>(range.zero),
                        code = std::clamp(std::nearbyint(x[k] * (1.0f / range.scale)), -zero, 15.0f - zero);
            const float d = x[k] - code * range.scale;
            error += importance_of[k] * d * d;
          }
          if (i == 0) {
            EXPECT_EQ(spans[g].scale, range.scale);
            EXPECT_EQ(spans[g].zero, range.zero);
          }
          if (error < least) {
            least = error;
            best = range;
          }
        }
      EXPECT_EQ(found[g].scale, best.scale) << g;
      EXPECT_EQ(found[g].zero, best.zero) << g;
    }
  }
}

}  // namespace
}  // namespace cachalot::test
