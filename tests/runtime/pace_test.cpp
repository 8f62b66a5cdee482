// Pace: what it learns from steps whose cost is known.
#include "runtime/pace.h"

#include <gtest/gtest.h>

#include <random>

namespace cachalot::test {
namespace {

constexpr double kDecode = 0.003, kFixed = 0.008, kRow = 1.5e-5;  // seconds: a GPU and a mixture of experts

double step_seconds(int n_prompt_rows) { return kDecode + (n_prompt_rows > 0 ? kFixed + kRow * n_prompt_rows : 0.0); }

TEST(Pace, KnowsNothingAtFirst) {
  const Pace pace;
  EXPECT_EQ(pace.prompt_rows_within(1.0), 64);
  EXPECT_EQ(pace.prompt_rows_at_half_speed(), 0);
}

TEST(Pace, TellsWhatManyRowsShareFromWhatEachCosts) {
  Pace pace;
  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) {
    pace.record(8, 0, step_seconds(0));
    const int rows = 64 + static_cast<int>(random() % 2000);
    pace.record(8, rows, step_seconds(rows));
  }
  EXPECT_NEAR(pace.decode_seconds(), kDecode, 1e-9);
  EXPECT_NEAR(pace.row_seconds(), kRow, 0.01 * kRow);
  EXPECT_NEAR(pace.fixed_seconds(), kFixed, 0.02 * kFixed);
  EXPECT_NEAR(pace.prompt_rows_within(step_seconds(500)), 500, 15);
  EXPECT_NEAR(pace.prompt_rows_at_half_speed(), (kDecode + kFixed) / kRow, 20);
}

TEST(Pace, GivesRowsAllTheTimeWhileTheirNumberNeverChanges) {
  Pace pace;
  pace.record(8, 0, step_seconds(0));
  for (int i = 0; i < 50; ++i) pace.record(8, 256, step_seconds(256));
  EXPECT_NEAR(pace.row_seconds(), (kFixed + 256 * kRow) / 256, 1e-9);
  EXPECT_NEAR(pace.fixed_seconds(), 0.0, 1e-9);
  EXPECT_NEAR(pace.prompt_rows_within(step_seconds(256)), 256, 1);
}

TEST(Pace, AsksForADecodingStepWhenItsCostIsUnknownOrOld) {
  Pace pace;
  EXPECT_TRUE(pace.wants_decode_step());
  pace.record(0, 512, 0.02);
  EXPECT_TRUE(pace.wants_decode_step());
  pace.record(8, 0, kDecode);
  for (int i = 0; i < 127; ++i) {
    pace.record(8, 256, step_seconds(256));
    EXPECT_FALSE(pace.wants_decode_step()) << i;
  }
  pace.record(64, 256, step_seconds(256));
  EXPECT_TRUE(pace.wants_decode_step());
  pace.record(64, 0, 2.0 * kDecode);  // what was known is too old to be averaged with
  EXPECT_FALSE(pace.wants_decode_step());
  EXPECT_EQ(pace.decode_seconds(), 2.0 * kDecode);
}

TEST(Pace, TakesNoiseForNoLine) {
  Pace pace;
  pace.record(8, 0, 0.003);
  // More rows, less time: the slope would be negative.
  for (int i = 0; i < 50; ++i) {
    pace.record(8, 100, 0.013);
    pace.record(8, 200, 0.009);
  }
  EXPECT_GT(pace.row_seconds(), 0.0);
  EXPECT_GE(pace.fixed_seconds(), 0.0);
  EXPECT_GE(pace.prompt_rows_within(0.011), 0);
}

}  // namespace
}  // namespace cachalot::test
