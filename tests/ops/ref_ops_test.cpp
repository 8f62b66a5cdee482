// Known answers of the reference operations, and that padding does no harm.
#include "ops/ref_ops.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <limits>

#include "ops/case_support.h"
#include "ops/kv_codec.h"
#include "ops/paged_batch.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

View matrix(std::vector<float>& values, int rows, int cols) { return View::matrix(values.data(), DType::f32, rows, cols); }
View vector(std::vector<float>& values) { return View::vector(values.data(), DType::f32, static_cast<int>(values.size())); }
View vector(std::vector<int>& values) { return View::vector(values.data(), DType::i32, static_cast<int>(values.size())); }
Linear pack(Ops& ops, std::vector<float> values, int n_matrices, int out, int in) {
  const LinearSource source = make_linear_source("w", Format::f32, values, n_matrices, out, in);
  return ops.pack({&source, 1});
}

struct Chosen {
  std::vector<int> ids;
  std::vector<float> weights;
};
Chosen route(std::vector<float> logits, std::vector<float> bias, Router router) {
  RefOps ops;
  router.n_experts = static_cast<int>(logits.size());
  Chosen out{std::vector<int>(static_cast<size_t>(router.top_k)), std::vector<float>(static_cast<size_t>(router.top_k))};
  ops.route(vector(logits), bias.empty() ? View{} : vector(bias), router, {vector(out.ids), vector(out.weights)});
  return out;
}
float logit_of(double score) { return static_cast<float>(std::log(score / (1.0 - score))); }

TEST(Route, BiasSteersTheChoiceAndNotTheWeights) {  // P-31
  const Router router{.top_k = 1, .scoring = Scoring::sigmoid, .normalise = true, .scale = 2.5f};
  const std::vector<float> logits{logit_of(0.2), logit_of(0.9)};
  const Chosen one = route(logits, {1.0f, 0.0f}, router);
  EXPECT_EQ(one.ids, std::vector<int>{0});
  EXPECT_NEAR(one.weights[0], 2.5f, 1e-6);
  Router two_experts = router;
  two_experts.top_k = 2;
  const Chosen two = route(logits, {1.0f, 0.0f}, two_experts);
  EXPECT_EQ(two.ids, (std::vector<int>{0, 1}));
  EXPECT_NEAR(two.weights[0], 0.454545, 1e-6);
  EXPECT_NEAR(two.weights[1], 2.045455, 1e-6);
}

TEST(Route, TinyScoresSurviveALargeBias) {  // P-69
  const Chosen chosen =
      route({-17.0f, -18.0f}, {12.0f, 12.0f}, {.top_k = 2, .scoring = Scoring::sigmoid, .normalise = true, .scale = 2.5f});
  EXPECT_EQ(chosen.ids, (std::vector<int>{0, 1}));
  EXPECT_NEAR(chosen.weights[0], 1.827646, 1e-6);
  EXPECT_NEAR(chosen.weights[1], 0.672354, 1e-6);
}

TEST(Route, WithoutNormalisingTheScoresAreTheWeights) {
  const Chosen chosen = route({0.0f, std::log(3.0f), std::log(4.0f)}, {}, {.top_k = 2});
  EXPECT_EQ(chosen.ids, (std::vector<int>{2, 1}));
  EXPECT_NEAR(chosen.weights[0], 0.5, 1e-6);
  EXPECT_NEAR(chosen.weights[1], 0.375, 1e-6);
}

TEST(Route, GroupsOfV2AreRankedByTheirBestAndTheRestCountsAsZero) {
  // Groups {0, 1}, {2, 3}, {4, 5}; the best expert of all is in the last, the two next best are in the first.
  const std::vector<float> logits{2.0f, 1.9f, 0.5f, -1.0f, 3.0f, -4.0f};
  const Chosen one_group = route(logits, {}, {.top_k = 2, .group_score = GroupScore::max, .n_group = 3, .topk_group = 1});
  EXPECT_EQ(one_group.ids, (std::vector<int>{4, 5}));
  const Chosen beyond = route(logits, {}, {.top_k = 3, .group_score = GroupScore::max, .n_group = 3, .topk_group = 1});
  EXPECT_EQ(beyond.ids, (std::vector<int>{4, 5, 0}));  // all others are 0: the lowest id
  double sum = 0.0;
  for (const float l : logits) sum += std::exp(static_cast<double>(l));
  EXPECT_NEAR(beyond.weights[2], std::exp(2.0) / sum, 1e-6);  // with its own weight
}

TEST(Route, GroupsOfV3AreRankedByTheirTwoBestWithBias) {
  // Sums of two with bias: group 0: .5 + .5, group 1: .9 + .05.
  const std::vector<float> logits{logit_of(0.5), logit_of(0.5), logit_of(0.9), logit_of(0.05)};
  const Router router{.top_k = 2, .scoring = Scoring::sigmoid, .group_score = GroupScore::top2_sum, .n_group = 2, .topk_group = 1};
  EXPECT_EQ(route(logits, {}, router).ids, (std::vector<int>{0, 1}));
  EXPECT_EQ(route(logits, {0.0f, 0.0f, 0.0f, 0.1f}, router).ids, (std::vector<int>{2, 3}));
}

TEST(Route, EqualScoresGoToTheLowerId) {
  EXPECT_EQ(route(std::vector<float>(16, 0.25f), {}, {.top_k = 3}).ids, (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(route(std::vector<float>(16, 0.25f), {}, {.top_k = 3, .group_score = GroupScore::max, .n_group = 4, .topk_group = 2}).ids,
            (std::vector<int>{0, 1, 2}));
}

TEST(Route, NansGiveValidIds) {
  const Chosen chosen = route({kNan, 1.0f, kNan, 0.5f}, {}, {.top_k = 3, .scoring = Scoring::sigmoid});
  EXPECT_EQ(chosen.ids, (std::vector<int>{1, 3, 0}));
  EXPECT_TRUE(std::isnan(chosen.weights[2]));
}

std::vector<float> rotated(std::vector<float> x, int position, bool interleaved) {  // frequencies 1 and 0.01, as base 10000 gives for dim 4
  RefOps ops;
  std::vector<float> table;
  for (int p = 0; p < 8; ++p)
    for (const bool sine : {false, true})
      for (const double f : {1.0, 0.01}) table.push_back(static_cast<float>(sine ? std::sin(p * f) : std::cos(p * f)));
  std::vector<int> pos{position};
  ops.rope(matrix(x, 1, static_cast<int>(x.size())), vector(pos), {.dim = 4, .interleaved = interleaved, .cos_sin = matrix(table, 8, 4)});
  return x;
}

TEST(RopeOp, PairsAreNeighboursOrHalves) {  // P-34
  const float c = std::cos(3.0f), s = std::sin(3.0f);
  EXPECT_THAT(rotated({1, 0, 0, 0}, 3, true), testing::Pointwise(testing::FloatNear(1e-6f), {c, s, 0.0f, 0.0f}));
  EXPECT_THAT(rotated({1, 0, 0, 0}, 3, false), testing::Pointwise(testing::FloatNear(1e-6f), {c, 0.0f, s, 0.0f}));
}

TEST(RopeOp, ScoresAreThoseOfTheComplexForm) {
  const std::vector<float> q{0.3f, -1.2f, 0.7f, 2.0f}, k{1.5f, 0.4f, -0.6f, 0.9f};
  for (const bool interleaved : {true, false}) {
    const auto pair = [&](const std::vector<float>& x, size_t i) {
      return interleaved ? std::complex<double>(x[2 * i], x[2 * i + 1]) : std::complex<double>(x[i], x[i + 2]);
    };
    std::complex<double> expected = 0.0;
    for (const size_t i : {0u, 1u}) expected += pair(q, i) * std::conj(pair(k, i)) * std::polar(1.0, (7 - 2) * (i == 0 ? 1.0 : 0.01));
    const auto a = rotated(q, 7, interleaved), b = rotated(k, 2, interleaved);
    double score = 0.0;
    for (size_t i = 0; i < 4; ++i) score += static_cast<double>(a[i]) * static_cast<double>(b[i]);
    EXPECT_NEAR(score, expected.real(), 1e-5) << interleaved;
  }
}

TEST(RopeOp, OnlyTheTailTurnsAndPaddingNever) {
  EXPECT_EQ(rotated({9, 8, 7, 1, 0, 0, 0}, -1, true), (std::vector<float>{9, 8, 7, 1, 0, 0, 0}));
  const auto x = rotated({9, 8, 7, 1, 0, 0, 0}, 3, true);
  EXPECT_EQ(std::vector<float>(x.begin(), x.begin() + 3), (std::vector<float>{9, 8, 7}));
  EXPECT_NEAR(x[4], std::sin(3.0), 1e-6);
}

TEST(RmsNorm, KnownValue) {
  RefOps ops;
  std::vector<float> x{3, 4}, w{2, 1}, y(2);  // mean of squares 12.5
  ops.rmsnorm(matrix(x, 1, 2), vector(w), 0.5f, matrix(y, 1, 2));
  EXPECT_THAT(y, testing::Pointwise(testing::FloatNear(1e-6f), {6.0f / std::sqrt(13.0f), 4.0f / std::sqrt(13.0f)}));
}

TEST(LinearOp, BiasBetaAndUnsetOutput) {
  RefOps ops;
  LinearSource source = make_linear_source("w", Format::f32, std::vector<float>{1, 2, 3, 4}, 1, 2, 2);
  source.bias = {10, 20};
  const Linear w = ops.pack({&source, 1});
  std::vector<float> x{1, -1}, y{kNan, kNan};
  ops.linear(matrix(x, 1, 2), w, matrix(y, 1, 2));
  EXPECT_EQ(y, (std::vector<float>{9, 19}));
  ops.linear(matrix(x, 1, 2), w, matrix(y, 1, 2), 2.0f);
  EXPECT_EQ(y, (std::vector<float>{27, 57}));
}

TEST(LinearOp, SegmentsAndStackedMatrices) {
  RefOps ops;
  const LinearSource parts[2] = {make_linear_source("a", Format::f32, std::vector<float>{1, 0, 0, 1, 5, 6, 7, 8}, 2, 2, 2),
                                 make_linear_source("b", Format::bf16, std::vector<float>{2, 2, 3, 3}, 2, 1, 2)};
  const Linear w = ops.pack(parts);
  EXPECT_EQ(w.out, 3);
  EXPECT_EQ(w.n_matrices, 2);
  std::vector<float> x{1, 10}, y(3);
  ops.linear(matrix(x, 1, 2), w.matrix(0), matrix(y, 1, 3));
  EXPECT_EQ(y, (std::vector<float>{1, 10, 22}));
  ops.linear(matrix(x, 1, 2), w.matrix(1), matrix(y, 1, 3));
  EXPECT_EQ(y, (std::vector<float>{65, 87, 33}));
}

TEST(LinearOp, PermutedColumnsMultiplyTheInputsTheyName) {
  RefOps ops;
  const WeightShape shape{.format = Format::int8_planar, .out = 1, .in = 32, .group = 32};
  LinearSource source = random_source(shape, 1);
  std::vector<float> stored(32), x(32), y(1);
  dequant_row(source, 0, 0, stored.data());
  for (int k = 0; k < 32; ++k) source.perm.push_back((k * 5 + 3) % 32);
  const Linear w = ops.pack({&source, 1});
  for (size_t k = 0; k < 32; ++k) {
    std::fill(x.begin(), x.end(), 0.0f);
    x[static_cast<size_t>(source.perm[k])] = 1.0f;
    ops.linear(matrix(x, 1, 32), w, matrix(y, 1, 1));
    EXPECT_EQ(y[0], stored[k]) << k;
  }
}

TEST(LinearOp, PackRefusesSegmentsThatDoNotFit) {
  RefOps ops;
  const std::vector<float> values(12, 1.0f);
  const auto source = [&](const char* name, int n, int out, int in) { return make_linear_source(name, Format::f32, values, n, out, in); };
  const LinearSource widths[2] = {source("q", 1, 3, 4), source("k", 1, 4, 3)}, counts[2] = {source("gate", 2, 2, 3), source("up", 1, 4, 3)};
  EXPECT_EQ(error_of([&] { ops.pack(widths); }), "k: found an input of 3, expected 4 as in q");
  EXPECT_EQ(error_of([&] { ops.pack(counts); }), "up: found 1 matrices, expected 2 as in gate");
  LinearSource biased = source("b", 1, 3, 4);
  biased.bias = {1, 2};
  EXPECT_NE(error_of([&] { ops.pack({&biased, 1}); }), "");
}

TEST(HeadLinear, EachHeadHasItsMatrixAndKeepsItsTail) {
  RefOps ops;
  const Linear w = pack(ops, {1, 2, 3, 4}, 2, 1, 2);  // heads [1 2] and [3 4]
  std::vector<float> x{1, 1, 70, 2, 1, 80}, y(4);
  ops.head_linear(matrix(x, 1, 6), w, matrix(y, 1, 4));
  EXPECT_EQ(y, (std::vector<float>{3, 70, 10, 80}));
}

TEST(Swiglu, KnownValue) {
  RefOps ops;
  const Linear w = pack(ops, {1, 0, 0, 1}, 1, 2, 2);  // gate = x0, up = x1
  std::vector<float> x{2, 3}, h(1);
  ops.linear_swiglu(matrix(x, 1, 2), w, matrix(h, 1, 1));
  EXPECT_NEAR(h[0], 2.0 / (1.0 + std::exp(-2.0)) * 3.0, 1e-6);
}

TEST(Padding, EmbedGivesZerosAndGatherToo) {
  RefOps ops;
  const Linear table = pack(ops, {1, 2, 3, 4}, 1, 2, 2);
  std::vector<int> ids{1, -1, 0};
  std::vector<float> x(6, kNan), y(6, kNan);
  ops.embed(table, vector(ids), matrix(x, 3, 2));
  EXPECT_EQ(x, (std::vector<float>{3, 4, 0, 0, 1, 2}));
  ids = {-1, 2, 2};
  ops.gather_rows(matrix(x, 3, 2), vector(ids), matrix(y, 3, 2));
  EXPECT_EQ(y, (std::vector<float>{0, 0, 1, 2, 1, 2}));
}

TEST(Padding, ExpertsIgnoreIdMinusOne) {
  RefOps ops;
  const Experts experts{.gate_up = pack(ops, {1, 1, 1, 1}, 2, 2, 1), .down = pack(ops, {1, 5}, 2, 1, 1)};
  std::vector<float> x{2, 2}, weights{1.0f, kNan, kNan, kNan}, y(2, kNan);
  std::vector<int> ids{1, -1, -1, -1};
  ops.moe(matrix(x, 2, 1), experts, {View::matrix(ids.data(), DType::i32, 2, 2), matrix(weights, 2, 2)}, matrix(y, 2, 1));
  EXPECT_NEAR(y[0], 5.0 * 4.0 / (1.0 + std::exp(-2.0)), 1e-5);
  EXPECT_EQ(y[1], 0.0f);
}

// One sequence with cache rows `values` (one number per row, K = V), one query head of width 1.
std::vector<float> attend_small(std::vector<SequenceShape> sequences, float q_value, float k_scale = 1.0f) {
  RefOps ops;
  CaseBuilder b(ops, DType::f32, "small");
  const KvLayout layout{.heads = 1, .k_dim = 1, .v_dim = 1, .v_is_k_prefix = true, .block_tokens = 8};
  const auto paged = make_paged_batch(b, layout, sequences, k_scale);
  std::vector<float> q(static_cast<size_t>(paged->batch.n_tokens), q_value), out(q.size(), kNan);
  const auto rows = static_cast<int>(q.size());
  ops.attend({.kv = paged->kv, .batch = &paged->batch, .rows = paged->rows(0, static_cast<int>(sequences.size()))}, matrix(q, rows, 1),
             matrix(out, rows, 1));
  return out;
}

TEST(Attend, EachRowSeesWhatLiesBeforeIt) {
  RefOps ops;
  CaseBuilder b(ops, DType::f32, "causal");
  const KvLayout layout{.heads = 1, .k_dim = 1, .v_dim = 1, .block_tokens = 8};
  const SequenceShape sequences[] = {{3, 5}};
  const auto paged = make_paged_batch(b, layout, sequences);
  std::vector<float> k(static_cast<size_t>(paged->k->view().n_rows()), 0.0f), v(k.size(), 1e9f);
  const int first = paged->batch.block_table.row<int>(0)[0] * 8;
  for (int i = 0; i < 5; ++i) v[static_cast<size_t>(first + i)] = static_cast<float>(i);  // equal scores: the mean of 0 .. position
  paged->k->set(k);
  paged->v->set(v);
  std::vector<float> q(3, 1.0f), out(3, kNan);
  ops.attend({.kv = paged->kv, .batch = &paged->batch, .rows = paged->rows(0, 1)}, matrix(q, 3, 1), matrix(out, 3, 1));
  EXPECT_EQ(out, (std::vector<float>{1.0f, 1.5f, 2.0f}));
}

TEST(Attend, EmptySequencesGiveZeros) {
  const auto out = attend_small({{1, 4}, {1, 0}, {2, 9}, {1, 0}}, 1.0f);
  EXPECT_EQ(out[1], 0.0f);
  EXPECT_EQ(out[4], 0.0f);
  for (const size_t i : {0u, 2u, 3u}) EXPECT_TRUE(std::isfinite(out[i]) && out[i] != 0.0f);
}

TEST(Attend, ScoresOfAHundredThousandStayFinite) {  // P-20
  for (const float out : attend_small({{1, 40}, {3, 9}}, 1e5f)) EXPECT_TRUE(std::isfinite(out));
}

TEST(Experts, OutputsBeyondHalfPrecisionStayFinite) {  // P-20
  RefOps ops;
  const Experts experts{.gate_up = pack(ops, {30, 30}, 1, 2, 1), .down = pack(ops, {78}, 1, 1, 1)};
  std::vector<float> x{1}, weights{1}, y(1);
  std::vector<int> ids{0};
  ops.moe(matrix(x, 1, 1), experts, {vector(ids), vector(weights)}, matrix(y, 1, 1));
  EXPECT_NEAR(y[0], 78.0f * 900.0f, 1.0f);
}

TEST(KvWrite, PaddingRowsWriteNothing) {
  RefOps ops;
  CaseBuilder b(ops, DType::f32, "write");
  const KvLayout layout{.heads = 1, .k_dim = 2, .v_dim = 1, .v_is_k_prefix = true, .format = KvFormat::f16, .block_tokens = 8};
  const SequenceShape sequences[] = {{2, 2}, {1, 0}};
  const auto paged = make_paged_batch(b, layout, sequences);
  auto expected = paged->k->values();
  std::vector<float> k{1.0f, 0.1f, 3.0f, 65504.0f, kNan, kNan};
  ops.kv_write(paged->kv, paged->batch, matrix(k, 3, 2), {});
  const auto first = static_cast<size_t>(paged->batch.block_table.row<int>(0)[0]) * 16;
  const float stored[] = {1.0f, 0.0999755859375f, 3.0f, 65504.0f};  // 0.1 in binary16
  std::copy(std::begin(stored), std::end(stored), expected.begin() + static_cast<std::ptrdiff_t>(first));
  EXPECT_EQ(paged->k->values(), expected);
}

// 132 latent numbers: a group of 128 and one of 4; codes, scales, then the rope key in bf16.
TEST(KvCodec, BytesOfAnFp8Row) {
  const KvLayout layout{.heads = 1, .k_dim = 134, .v_dim = 132, .v_is_k_prefix = true, .format = KvFormat::fp8, .block_tokens = 16};
  ASSERT_EQ(layout.k_row_bytes(), 132u + 8 + 4);
  std::vector<float> values(134), back(134);
  values[0] = -896.0f, values[1] = 2.0f, values[127] = 224.0f;  // scale 2
  values[128] = 0.0f, values[133] = 1.5f;                       // a group of zeros
  std::vector<std::byte> row(layout.k_row_bytes());
  encode_kv_row(layout, values, row.data());
  EXPECT_EQ(row[0], std::byte{0xfe});    // -448
  EXPECT_EQ(row[1], std::byte{0x38});    // 1
  EXPECT_EQ(row[127], std::byte{0x6e});  // 112
  float scale = 0.0f;
  std::memcpy(&scale, &row[132], 4);
  EXPECT_EQ(scale, 2.0f);
  EXPECT_EQ(row[143], std::byte{0x3f});  // bf16 of 1.5 is 0x3fc0
  EXPECT_EQ(row[142], std::byte{0xc0});
  decode_kv_row(layout, row.data(), back);
  EXPECT_EQ(back, values);
}

}  // namespace
}  // namespace cachalot::test
