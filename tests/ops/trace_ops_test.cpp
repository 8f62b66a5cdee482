// TraceOps: what is reported, and that the first output that is not finite is found.
#include "ops/trace_ops.h"

#include <gtest/gtest.h>

#include <limits>

#include "base/float_formats.h"
#include "ops/ref_ops.h"

namespace cachalot::test {
namespace {

TEST(TraceOpsTest, FindsTheFirstOutputThatIsNotFinite) {
  RefOps inner;
  struct Entry {
    int index;
    std::string op;
    int64_t not_finite;
  };
  std::vector<Entry> entries;
  const auto ops = make_trace_ops(inner, [&](const TraceRecord& r) {
    entries.push_back({r.index, r.op, count_not_finite(inner, r.out)});
    EXPECT_GE(r.seconds, 0.0);
  });
  const LinearSource sources[2] = {make_linear_source("table", Format::f32, std::vector<float>{1, 2, 3, 4}, 1, 2, 2),
                                   make_linear_source("w", Format::f32, std::vector<float>{3e38f, 3e38f, 1, 0}, 1, 2, 2)};
  const Linear table = ops->pack({&sources[0], 1}), w = ops->pack({&sources[1], 1});
  const Constant norm = ops->constant(std::vector<float>{1, 1}, 1, 2);
  int ids[2] = {1, 0};
  for (int pass = 0; pass < 2; ++pass) {
    const Scope scope(*ops);
    const View x = ops->temp(DType::f32, 2, 2), y = ops->temp(DType::f32, 2, 2), z = ops->temp(DType::f32, 2, 2);
    ops->embed(table, View::vector(ids, DType::i32, 2), x);
    ops->rmsnorm(x, norm.view, 1e-6f, y);
    ops->linear(y, w, z);
    ops->add_rmsnorm(x, z, norm.view, 1e-6f, y);
  }
  ASSERT_EQ(entries.size(), 8u);
  const char* names[] = {"embed", "rmsnorm", "linear", "add_rmsnorm"};
  const int64_t bad[] = {0, 0, 2, 2};  // the overflowing row of W, for both tokens; then the residual
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(entries[i].op, names[i % 4]);
    EXPECT_EQ(entries[i].index, static_cast<int>(i % 4));
    EXPECT_EQ(entries[i].not_finite, bad[i % 4]) << i;
  }
}

TEST(CountNotFinite, ReadsEachFloatTypeAndItsOwnColumnsOnly) {
  RefOps ops;
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  float values[6] = {1, nan, inf, -inf, 0, nan};
  const View all = View::matrix(values, DType::f32, 2, 3);
  EXPECT_EQ(count_not_finite(ops, all), 4);
  EXPECT_EQ(count_not_finite(ops, all.cols(0, 2)), 2);
  uint16_t halves[3] = {f32_to_f16(inf), f32_to_f16(65504.0f), f32_to_f16(nan)};
  EXPECT_EQ(count_not_finite(ops, View::vector(halves, DType::f16, 3)), 2);
  for (uint16_t& h : halves) h = f32_to_bf16(3e38f);
  EXPECT_EQ(count_not_finite(ops, View::vector(halves, DType::bf16, 3)), 0);
}

TEST(OpsCopy, PassesThroughATrace) {
  RefOps inner;
  const auto ops = make_trace_ops(inner, [](const TraceRecord&) {});
  const Buffer memory = ops->alloc(64);
  const float from[4] = {1, 2, 3, 4};
  ops->upload(memory.get(), from, sizeof from);
  ops->copy(static_cast<float*>(memory.get()) + 8, memory.get(), sizeof from);
  float to[4] = {};
  ops->download(to, static_cast<float*>(memory.get()) + 8, sizeof to);
  EXPECT_EQ(std::vector<float>(to, to + 4), std::vector<float>(from, from + 4));
}

}  // namespace
}  // namespace cachalot::test
