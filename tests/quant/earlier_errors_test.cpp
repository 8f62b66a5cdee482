// Weights that meet the errors of layers before, where the text tells them how, and stay where it does not.
#include "quant/earlier_errors.h"

#include <gtest/gtest.h>

#include <vector>

#include "cpu/cpu_ops.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

constexpr int kColumns = 300, kOut = 24;

View view(std::vector<float>& values) {
  return View::matrix(values.data(), DType::f32, static_cast<int>(values.size()) / kColumns, kColumns);
}

// Original inputs, of which few directions make up most, and what earlier layers made of them: they shrank, as `shrink` says, and took on
// noise that nothing in them tells of.
struct Tokens {
  std::vector<float> original, spoiled;
  std::vector<uint8_t> held_out;
  Tokens(int rows, uint64_t seed, float shrink, float noise) {
    constexpr int kDirections = 40;
    const std::vector<float> directions = random_floats(size_t{kDirections} * kColumns, 1),
                             noises = random_floats(size_t(rows) * kColumns, seed + 1, noise),
                             along = random_floats(size_t(rows) * kDirections, seed);
    for (int t = 0; t < rows; ++t) {
      for (int k = 0; k < kColumns; ++k) {
        float x = 0.0f;
        for (int d = 0; d < kDirections; ++d)
          x += along[static_cast<size_t>(t * kDirections + d)] * directions[static_cast<size_t>(d * kColumns + k)];
        original.push_back(x);
        spoiled.push_back(shrink * x + noises[original.size() - 1]);
      }
      held_out.push_back(t % 4 == 3 ? 1 : 0);
    }
  }
  [[nodiscard]] int rows() const { return static_cast<int>(held_out.size()); }
};

struct Fixture {
  std::unique_ptr<Ops> ops = make_cpu_ops({.n_threads = 2, .bf16_prompts = false});
  ThreadPool pool{2};
  std::vector<float> w = random_floats(size_t{kOut} * kColumns, 2, 0.05f);

  // Squared distance of the outputs of `weights` on spoiled inputs from those of w on the original ones.
  [[nodiscard]] double distance(const Tokens& tokens, const std::vector<float>& weights) const {
    double sum = 0.0;
    for (int o = 0; o < kOut; ++o)
      for (int t = 0; t < tokens.rows(); ++t) {
        double d = 0.0;
        for (int k = 0; k < kColumns; ++k) {
          const auto at = static_cast<size_t>(t * kColumns + k), to = static_cast<size_t>(o * kColumns + k);
          d += static_cast<double>(tokens.original[at]) * w[to] - static_cast<double>(tokens.spoiled[at]) * weights[to];
        }
        sum += d * d;
      }
    return sum;
  }
  EarlierErrors::Choice meet(Tokens& tokens, std::vector<float>& weights) {
    Moments moments(kColumns, true, true);
    moments.add(*ops, view(tokens.spoiled), nullptr, view(tokens.original), tokens.held_out.data());
    EarlierErrors earlier(*ops, pool, moments);
    earlier.meet(weights, kOut);
    return earlier.choice();
  }
};

TEST(EarlierErrors, AreMetWhereTextTellsHow) {
  Fixture f;
  for (const int rows : {100, 600}) {  // kept as rows, and summed
    Tokens seen(rows, 10, 0.8f, 0.3f), fresh(200, 20, 0.8f, 0.3f);
    std::vector<float> moved = f.w;
    const EarlierErrors::Choice choice = f.meet(seen, moved);
    EXPECT_LT(f.distance(fresh, moved), 0.5 * f.distance(fresh, f.w)) << rows;
    EXPECT_LT(choice.error, 0.5) << rows;
  }
}

// Least squares would give the seen tokens their outputs, and others anything.
TEST(EarlierErrors, GiveWayWhereTheyCannotBeLearnt) {
  Fixture f;
  for (const int rows : {100, 400}) {
    Tokens seen(rows, 10, 1.0f, 0.3f), fresh(200, 20, 1.0f, 0.3f);
    std::vector<float> moved = f.w;
    f.meet(seen, moved);
    EXPECT_LT(f.distance(fresh, moved), 1.01 * f.distance(fresh, f.w)) << rows;
  }
}

TEST(EarlierErrors, NothingSpoiledMovesNothing) {
  Fixture f;
  Tokens tokens(400, 10, 1.0f, 0.0f);
  std::vector<float> still = f.w;
  f.meet(tokens, still);
  EXPECT_EQ(still, f.w);
}

TEST(EarlierErrors, NoTokenToCheckByMovesNothing) {
  Fixture f;
  Tokens tokens(400, 10, 0.8f, 0.3f);
  tokens.held_out.assign(tokens.held_out.size(), 0);
  std::vector<float> still = f.w;
  f.meet(tokens, still);
  EXPECT_EQ(still, f.w);
}

// Rows of zeros say nothing, but there are enough of them that G is summed: both ways to solve agree.
TEST(EarlierErrors, FewRowsAndManyMoveWeightsAlike) {
  Fixture f;
  Tokens few(90, 10, 0.8f, 0.3f), many = few;
  many.original.resize(size_t{400} * kColumns);
  many.spoiled.resize(many.original.size());
  many.held_out.resize(400);
  std::vector<float> by_few = f.w, by_many = f.w;
  EXPECT_EQ(f.meet(few, by_few).damping, f.meet(many, by_many).damping);
  double change = 0.0, difference = 0.0;
  for (size_t i = 0; i < by_few.size(); ++i) {
    change += static_cast<double>(by_few[i] - f.w[i]) * (by_few[i] - f.w[i]);
    difference += static_cast<double>(by_few[i] - by_many[i]) * (by_few[i] - by_many[i]);
  }
  EXPECT_GT(change, 0.0);
  EXPECT_LT(difference, 1e-6 * change);
}

}  // namespace
}  // namespace cachalot::test
