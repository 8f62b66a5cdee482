// The kernels of each table against plain formulas: decoding to the bit, products, vectorised exp, softmax steps, conversions.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "base/float_formats.h"
#include "cpu/attention_core.h"
#include "cpu/features.h"
#include "cpu/pack.h"
#include "ops/random_weights.h"
#include "support/support.h"

namespace cachalot::cpu {
namespace {

using test::random_floats;
using test::random_source;

// Runs once for each table that this machine can run.
class Kernels : public testing::TestWithParam<const KernelTable*> {
 protected:
  const KernelTable& table() const { return *GetParam(); }
};
std::vector<const KernelTable*> tables() {
  std::vector<const KernelTable*> out;
  for (const IsaLevel& level : isa_levels())
    if ((level.needs & ~detect_features()) == 0) out.push_back(level.table);
  return out;
}
INSTANTIATE_TEST_SUITE_P(Isa, Kernels, testing::ValuesIn(tables()), [](const auto& param) { return std::string(param.param->name); });

struct Packing {
  HugeMemory memory;
  ThreadPool pool{1};
  std::shared_ptr<const CpuPacked> pack(const LinearSource& s) { return pack_weights({&s, 1}, memory, pool); }
};

TEST_P(Kernels, DecodeIsExact) {
  Packing packing;
  for (int f = 0; f < kNumFormats; ++f) {
    for (const int blocks : {1, 3}) {
      const auto format = static_cast<Format>(f);
      const int in = test::rounded_to_blocks(format, blocks == 1 ? 32 : 200);
      const LinearSource s = random_source({.format = format, .out = 131, .in = in, .n_matrices = 2}, 17 + static_cast<uint64_t>(f));
      const auto packed = packing.pack(s);
      const Segment& segment = packed->segments[0];
      std::vector<float> panel(static_cast<size_t>(132 * packed->padded_in)), expected(static_cast<size_t>(in));
      for (int m = 0; m < 2; ++m) {
        table().decode[static_cast<int>(segment.codec)](packed->rows(segment, m, 0, 131), panel.data(), packed->padded_in);
        for (int r = 0; r < 131; ++r) {
          dequant_row(s, m, r, expected.data());
          for (int k = 0; k < in; ++k)
            ASSERT_EQ(panel[static_cast<size_t>(r * packed->padded_in + k)], expected[static_cast<size_t>(k)])
                << info(format).name << " matrix " << m << " row " << r << " column " << k;
        }
      }
    }
  }
}

TEST_P(Kernels, Fp8SpecialCodesDecodeAsTheReference) {
  Packing packing;
  std::vector<std::byte> codes(256);
  for (int i = 0; i < 256; ++i) codes[static_cast<size_t>(i)] = static_cast<std::byte>(i);
  const float scales[2] = {1.0f, 0.5f};
  LinearSource s{.name = "codes", .format = Format::fp8_block, .out = 1, .in = 256};
  s.matrices.push_back({.data = codes, .scales = std::as_bytes(std::span<const float>(scales)), .zeros = {}});
  const auto packed = packing.pack(s);
  std::vector<float> panel(4 * 256);
  table().decode[static_cast<int>(Codec::fp8)](packed->rows(packed->segments[0], 0, 0, 1), panel.data(), 256);
  for (int i = 0; i < 256; ++i) {
    const float expected = e4m3_to_f32(static_cast<uint8_t>(i)) * scales[i / 128];
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(panel[static_cast<size_t>(i)])) << i;
    } else {
      EXPECT_EQ(panel[static_cast<size_t>(i)], expected) << i;
    }
  }
}

TEST_P(Kernels, GemvAndPanelGiveTheSameBits) {
  Packing packing;
  for (int f = 0; f < kNumFormats; ++f) {
    const auto format = static_cast<Format>(f);
    const int in = test::rounded_to_blocks(format, 512), out = 23;
    const LinearSource s = random_source({.format = format, .out = out, .in = in}, 5);
    const auto packed = packing.pack(s);
    const Segment& segment = packed->segments[0];
    const auto codec = static_cast<int>(segment.codec);
    for (const int n_tokens : {1, 2, 3, 4, 7, 9}) {
      const std::vector<float> x = random_floats(static_cast<size_t>(n_tokens * in), 3);
      std::vector<float> once(static_cast<size_t>(n_tokens * out)), twice(once), panel(static_cast<size_t>(24 * in));
      std::vector<const float*> rows;
      std::vector<float*> a, b;
      for (int t = 0; t < n_tokens; ++t) {
        rows.push_back(x.data() + t * in);
        a.push_back(once.data() + t * out);
        b.push_back(twice.data() + t * out);
      }
      table().gemv[codec](packed->rows(segment, 0, 0, out), {.x = rows.data(), .y = a.data(), .n_tokens = n_tokens});
      table().decode[codec](packed->rows(segment, 0, 0, out), panel.data(), in);
      table().gemm[0]({.data = panel.data(), .stride = 4 * in, .n_rows = out, .n_cols = in},
                      {.x = rows.data(), .y = b.data(), .n_tokens = n_tokens});
      ASSERT_EQ(std::memcmp(once.data(), twice.data(), once.size() * sizeof(float)), 0) << info(format).name << " T" << n_tokens;
      for (int t = 0; t < n_tokens; ++t) {
        for (int r = 0; r < out; ++r) {
          double sum = 0.0, size = 0.0;
          for (int k = 0; k < in; ++k) {
            const double term =
                static_cast<double>(panel[static_cast<size_t>(r * in + k)]) * static_cast<double>(x[static_cast<size_t>(t * in + k)]);
            sum += term;
            size += std::abs(term);
          }
          ASSERT_NEAR(once[static_cast<size_t>(t * out + r)], sum, 4e-6 * size) << info(format).name << " T" << n_tokens << " row " << r;
        }
      }
    }
  }
}

TEST_P(Kernels, ProductAddsBiasAndBeta) {
  const std::vector<float> w = random_floats(8 * 32, 1), x = random_floats(32, 2), bias = random_floats(5, 3);
  const float* rows[1] = {x.data()};
  std::vector<float> plain(7), full{9, 1, 2, 3, 4, 5, 9};
  float *a[1] = {plain.data()}, *b[1] = {full.data()};
  const Panel panel{.data = w.data(), .stride = 4 * 32, .n_rows = 5, .n_cols = 32};
  table().gemm[0](panel, {.x = rows, .y = a, .y_col = 1, .n_tokens = 1});
  table().gemm[0](panel, {.x = rows, .y = b, .y_col = 1, .n_tokens = 1, .bias = bias.data(), .beta = 0.5f});
  for (size_t r = 0; r < 5; ++r) EXPECT_EQ(full[r + 1], (plain[r + 1] + bias[r]) + 0.5f * static_cast<float>(r + 1));
  EXPECT_EQ(plain[0], 0.0f);
  EXPECT_EQ(plain[6], 0.0f);
  EXPECT_EQ(full[0], 9.0f);
  EXPECT_EQ(full[6], 9.0f);
}

TEST_P(Kernels, ExpIsWithinTwoUlp) {
  std::vector<float> x;
  for (float v = -87.3f; v < 88.7f; v += 0.00371f) x.push_back(v);
  std::vector<float> y(x.size());
  table().exp(x.data(), static_cast<int>(x.size()), y.data());
  double worst = 0.0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp(static_cast<double>(x[i]));
    const auto rounded = static_cast<float>(exact);
    const double ulp = static_cast<double>(std::nextafter(rounded, std::numeric_limits<float>::infinity())) - static_cast<double>(rounded);
    worst = std::max(worst, std::abs(static_cast<double>(y[i]) - exact) / ulp);
  }
  EXPECT_LE(worst, 2.0);
  const float inf = std::numeric_limits<float>::infinity();
  const float edges[6] = {-inf, -200.0f, 0.0f, 89.0f, inf, std::nanf("")};
  float out[6];
  table().exp(edges, 6, out);
  EXPECT_EQ(out[0], 0.0f);
  EXPECT_EQ(out[1], 0.0f);
  EXPECT_EQ(out[2], 1.0f);
  EXPECT_EQ(out[3], inf);
  EXPECT_EQ(out[4], inf);
  EXPECT_TRUE(std::isnan(out[5]));
}

TEST_P(Kernels, SiluAndSigmoidAtTheEdges) {
  const float gate[5] = {-1000.0f, -1.0f, 0.0f, 1.0f, 1000.0f}, up[5] = {2.0f, 2.0f, 2.0f, 2.0f, 2.0f};
  float y[5], s[5];
  table().silu_mul(gate, up, 5, y);
  table().sigmoid(gate, 5, s);
  EXPECT_EQ(y[0], 0.0f);
  EXPECT_NEAR(y[1], -2.0 / (1.0 + std::exp(1.0)), 1e-6);
  EXPECT_EQ(y[2], 0.0f);
  EXPECT_NEAR(y[3], 2.0 / (1.0 + std::exp(-1.0)), 1e-6);
  EXPECT_EQ(y[4], 2000.0f);
  EXPECT_EQ(s[0], 0.0f);
  EXPECT_EQ(s[2], 0.5f);
  EXPECT_EQ(s[4], 1.0f);
}

TEST_P(Kernels, RowConversionsRoundAsTheReference) {
  std::vector<float> x = random_floats(101, 7, 3.0f);
  const float inf = std::numeric_limits<float>::infinity();
  for (const float special : {0.0f, -0.0f, inf, -inf, 65504.0f, 65519.0f, 65520.0f, 1e30f, 6e-8f, 2.9e-8f, 1e-5f, 3.3e38f})
    x.push_back(special);
  const auto n = static_cast<int>(x.size());
  std::vector<uint16_t> half(x.size()), brain(x.size());
  std::vector<float> back(x.size());
  table().store_row(Element::f16, x.data(), n, half.data());
  table().store_row(Element::bf16, x.data(), n, brain.data());
  for (size_t i = 0; i < x.size(); ++i) {
    EXPECT_EQ(half[i], f32_to_f16(x[i])) << x[i];
    EXPECT_EQ(brain[i], f32_to_bf16(x[i])) << x[i];
  }
  table().load_rows(Element::f16, half.data(), 0, 1, n, back.data(), 0);
  for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(back[i], f16_to_f32(half[i]));
  table().load_rows(Element::bf16, brain.data(), 0, 1, n, back.data(), 0);
  for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(back[i], bf16_to_f32(brain[i]));
  const float nan[1] = {std::nanf("")};
  uint16_t stored = 0;
  table().store_row(Element::bf16, nan, 1, &stored);
  EXPECT_TRUE(std::isnan(bf16_to_f32(stored)));
}

std::shared_ptr<std::byte> scratch_of(const AttentionKernels& kernels, int k_dim, int v_dim) {
  return kernels.scratch_bytes == nullptr ? nullptr : map_huge(kernels.scratch_bytes(k_dim, v_dim));
}

// Two tiles of 64 and 21 rows, for queries that see different numbers of them.
void check_attention(const AttentionKernels& kernels, Element element, int k_dim, int v_dim, int n_queries, double tolerance) {
  constexpr int kRows = 85;
  const auto row_of = [&](const std::vector<float>& values, int row, int dim) {
    std::vector<std::byte> bytes(static_cast<size_t>(dim) * 4);
    kernels.make_row(&values[static_cast<size_t>(row * dim)], dim, bytes.data());
    return bytes;
  };
  const auto number = [&](const std::vector<std::byte>& row, int i) {
    float value = 0.0f;
    uint16_t half = 0;
    if (element == Element::f32) {
      std::memcpy(&value, &row[static_cast<size_t>(4 * i)], 4);
      return static_cast<double>(value);
    }
    std::memcpy(&half, &row[static_cast<size_t>(2 * i)], 2);
    return static_cast<double>(element == Element::f16 ? f16_to_f32(half) : bf16_to_f32(half));
  };
  const std::vector<float> keys = random_floats(static_cast<size_t>(kRows * k_dim), 1),
                           values = random_floats(static_cast<size_t>(kRows * v_dim), 2),
                           queries = random_floats(static_cast<size_t>(n_queries * k_dim), 3);
  std::vector<std::vector<std::byte>> key_rows, value_rows;
  for (int r = 0; r < kRows; ++r) {
    key_rows.push_back(row_of(keys, r, k_dim));
    value_rows.push_back(row_of(values, r, v_dim));
  }
  const auto seen = [](int query) { return 1 + query * 7 % kRows; };
  const auto lanes = static_cast<size_t>((n_queries + kernels.lanes - 1) / kernels.lanes * kernels.lanes);
  std::vector<const float*> query_rows;
  for (int q = 0; q < n_queries; ++q) query_rows.push_back(&queries[static_cast<size_t>(q * k_dim)]);
  std::vector<float> packed(lanes * static_cast<size_t>(k_dim * kernels.query_bytes) / sizeof(float)), scores(lanes * kTileRows),
      largest(lanes), sum(lanes), correction(lanes), out((lanes + 8) * static_cast<size_t>(v_dim)), result(static_cast<size_t>(v_dim));
  const std::shared_ptr<std::byte> scratch = scratch_of(kernels, k_dim, v_dim);
  const float scale = 0.2f;
  kernels.pack_queries(query_rows.data(), n_queries, k_dim, scale, packed.data());
  for (int begin = 0; begin < kRows; begin += kTileRows) {
    const int n = std::min(kTileRows, kRows - begin);
    std::vector<const void*> k, v;
    for (int r = 0; r < kTileRows; ++r) {
      k.push_back(key_rows[static_cast<size_t>(begin + std::min(r, n - 1))].data());
      v.push_back(value_rows[static_cast<size_t>(begin + std::min(r, n - 1))].data());
    }
    std::vector<int> visible(lanes, n);
    for (int q = 0; q < n_queries; ++q) visible[static_cast<size_t>(q)] = std::clamp(seen(q) - begin, 0, n);
    kernels.attend({.keys = k.data(),
                    .values = v.data(),
                    .n_rows = n,
                    .n_queries = n_queries,
                    .k_dim = k_dim,
                    .v_dim = v_dim,
                    .visible = visible.data(),
                    .queries = packed.data(),
                    .scores = scores.data(),
                    .largest = largest.data(),
                    .sum = sum.data(),
                    .correction = correction.data(),
                    .out = out.data(),
                    .scratch = scratch.get(),
                    .first = begin == 0,
                    .ahead = {k.data(), v.data()},
                    .n_ahead = n,
                    .ahead_bytes = {2 * k_dim, 2 * v_dim}});
  }
  for (int q = 0; q < n_queries; ++q) {
    std::vector<double> weights, expected(static_cast<size_t>(v_dim));
    double total = 0.0;
    for (int r = 0; r < seen(q); ++r) {
      double score = 0.0;
      for (int i = 0; i < k_dim; ++i)
        score += static_cast<double>(queries[static_cast<size_t>(q * k_dim + i)]) * number(key_rows[static_cast<size_t>(r)], i);
      weights.push_back(std::exp(score * static_cast<double>(scale)));
      total += weights.back();
    }
    for (int r = 0; r < seen(q); ++r)
      for (int d = 0; d < v_dim; ++d)
        expected[static_cast<size_t>(d)] += weights[static_cast<size_t>(r)] / total * number(value_rows[static_cast<size_t>(r)], d);
    kernels.write_row(&out[static_cast<size_t>(q * v_dim)], 1.0f / sum[static_cast<size_t>(q)], v_dim, result.data());
    for (int d = 0; d < v_dim; ++d)
      ASSERT_NEAR(result[static_cast<size_t>(d)], expected[static_cast<size_t>(d)], tolerance)
          << n_queries << " queries of " << k_dim << ", query " << q << " number " << d;
  }
}
TEST_P(Kernels, AttentionAgreesWithPlainFormulas) {
  for (const Element e : {Element::f32, Element::f16, Element::bf16}) {
    const AttentionKernels& kernels = table().attention[static_cast<int>(e)];
    if (kernels.attend == nullptr) continue;
    const double tolerance = e == Element::f32 ? 1e-5 : 3e-2;
    for (const int n_queries : {1, 3, 8, 16, 21, 40}) {
      check_attention(kernels, e, 64, 64, n_queries, tolerance);
      check_attention(kernels, e, 18, 96, n_queries, tolerance);
    }
    if (kernels.v_multiple <= 16) check_attention(kernels, e, 7, 16, 5, tolerance);
  }
}
// Products of bf16, but of all parts of a number: within the tolerance for f32.
TEST_P(Kernels, ExactTileAttentionAgreesWithPlainFormulas) {
  for (const Element e : {Element::f32, Element::f16, Element::bf16}) {
    const AttentionKernels& kernels = table().exact_tile_attention[static_cast<int>(e)];
    EXPECT_EQ(kernels.attend != nullptr, table().tiles.gemm_bf16 != nullptr && e != Element::bf16);
    if (kernels.attend == nullptr) continue;
    for (const int n_queries : {1, 8, 16, 21, 40}) {
      check_attention(kernels, e, 64, 64, n_queries, 1e-5);
      check_attention(kernels, e, 32, 96, n_queries, 1e-5);
    }
    check_attention(kernels, e, 576, 512, 16, 1e-5);
  }
}

// Tiles take wide rows that many heads share; few heads, narrow rows and odd dimensions keep the kernels of f32.
TEST_P(Kernels, ManyHeadsOfARowAttendOnTiles) {
  const auto attend = [&](Element e, int heads, int k_dim, int v_dim) {
    return attention_shape(table(), e, heads, k_dim, v_dim, 1.0f).kernels.attend;
  };
  void (*const plain)(const AttentionTile&) = table().attention[static_cast<int>(Element::f32)].attend;
  for (const Element e : {Element::f32, Element::f16}) {
    const AttentionKernels& tiles = table().exact_tile_attention[static_cast<int>(e)];
    EXPECT_EQ(attend(e, 16, 576, 512), tiles.attend != nullptr ? tiles.attend : plain);
    EXPECT_EQ(attend(e, 4, 576, 512), plain);
    EXPECT_EQ(attend(e, 16, 128, 128), plain);
    EXPECT_EQ(attend(e, 16, 568, 512), plain);
    EXPECT_EQ(attend(e, 16, 576, 500), plain);
  }
}

TEST_P(Kernels, AttentionPassesOnNotANumber) {
  for (int e = 0; e < 2 * kNumElements; ++e) {
    const AttentionKernels& kernels = e < kNumElements ? table().attention[e] : table().exact_tile_attention[e - kNumElements];
    if (kernels.attend == nullptr) continue;
    const std::vector<float> key(32, std::nanf("")), value(32, 1.0f);
    std::vector<float> row(32), packed(2 * 16 * 32), scores(16 * kTileRows), state(3 * 16), out(16 * 32), result(32);
    const std::shared_ptr<std::byte> scratch = scratch_of(kernels, 32, 32);
    kernels.make_row(key.data(), 32, row.data());
    std::vector<const void*> rows(kTileRows, row.data());
    const float* query[1] = {value.data()};
    kernels.pack_queries(query, 1, 32, 1.0f, packed.data());
    kernels.attend({.keys = rows.data(),
                    .values = rows.data(),
                    .n_rows = 5,
                    .n_queries = 1,
                    .k_dim = 32,
                    .v_dim = 32,
                    .queries = packed.data(),
                    .scores = scores.data(),
                    .largest = state.data(),
                    .sum = state.data() + 16,
                    .correction = state.data() + 32,
                    .out = out.data(),
                    .scratch = scratch.get(),
                    .first = true});
    kernels.write_row(out.data(), 1.0f / state[16], 32, result.data());
    EXPECT_TRUE(std::isnan(result[0])) << "element " << e;
  }
}

}  // namespace
}  // namespace cachalot::cpu
