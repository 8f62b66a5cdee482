// The default bodies of Ops and the decorator, run on the whole case list against the naive forms of RefOps.
#include <gtest/gtest.h>

#include <set>

#include "ops/op_cases.h"
#include "ops/ref_ops.h"
#include "ops/trace_ops.h"

namespace cachalot::test {
namespace {

// RefOps as a backend that overrides nothing it need not.
class DefaultOps final : public RefOps {
 public:
  void attend_expanded(const Attn& attn, const MlaDims& dims, View q, const Linear& kv_b, View out) override {
    Ops::attend_expanded(attn, dims, q, kv_b, out);
  }
  void moe(View x, const Experts& experts, const Routing& routing, View y) override { Ops::moe(x, experts, routing, y); }
};

void run_all(Ops& candidate, const std::vector<OpCase>& cases, size_t at_least) {
  const auto reference = make_ref_ops();
  EXPECT_GE(cases.size(), at_least);
  for (const OpCase& c : cases) {
    const CaseResult r = run_case(c, candidate, *reference);
    EXPECT_TRUE(r.ok) << r.text;
  }
}

TEST(DefaultBodies, ExpandedAttentionInChunksEqualsTheWhole) {
  DefaultOps ops;
  run_all(ops, op_cases({.contains = "attend_expanded/"}), 20);
}
TEST(DefaultBodies, ExpertByExpertEqualsTokenByToken) {
  DefaultOps ops;
  run_all(ops, op_cases({.contains = "moe/"}), 90);
}
TEST(TraceOpsTest, ChangesNothingAndSeesEachOperation) {
  RefOps inner;
  std::set<std::string> seen, expected;
  const auto traced = make_trace_ops(inner, [&](const TraceRecord& r) { seen.insert(r.op); });
  std::vector<OpCase> some;
  size_t i = 0;
  for (const OpCase& c : op_cases())
    if (expected.insert(c.op).second || i++ % 7 == 0) some.push_back(c);
  run_all(*traced, some, expected.size());
  EXPECT_EQ(seen, expected);
}
}  // namespace
}  // namespace cachalot::test
