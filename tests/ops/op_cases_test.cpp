// The case list must be able to fail: backends with one fault each are told apart from RefOps.
#include "ops/op_cases.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "ops/ref_ops.h"

namespace cachalot::test {
namespace {

int failures(Ops& candidate, const char* contains) {
  const auto reference = make_ref_ops();
  int failed = 0;
  for (const OpCase& c : op_cases({.contains = contains})) failed += run_case(c, candidate, *reference).ok ? 0 : 1;
  return failed;
}
size_t n_cases(const char* contains) { return op_cases({.contains = contains}).size(); }

TEST(OpCasesFault, ASmallErrorInOneElement) {
  class Faulty final : public RefOps {
    void linear(View x, const Linear& w, View y, float beta) override {
      RefOps::linear(x, w, y, beta);
      y.row<float>(y.n_rows() - 1)[y.n_cols() - 1] += 1e-3f;
    }
  } faulty;
  EXPECT_EQ(failures(faulty, "linear/q4_k/"), static_cast<int>(n_cases("linear/q4_k/")));
}
TEST(OpCasesFault, AWriteBehindARow) {
  class Faulty final : public RefOps {
    void rmsnorm(View x, View w, float eps, View y) override {
      RefOps::rmsnorm(x, w, eps, y);
      y.row<float>(0)[y.n_cols()] = 0.0f;
    }
  } faulty;
  EXPECT_GT(failures(faulty, "rmsnorm/7/"), 0);
  EXPECT_GT(failures(faulty, "strided"), 0);
}
TEST(OpCasesFault, ARowLeftUnset) {
  class Faulty final : public RefOps {
    void linear(View x, const Linear& w, View y, float beta) override {
      RefOps::linear(x.rows(0, x.n_rows() - 1), w, y.rows(0, y.n_rows() - 1), beta);
    }
  } faulty;
  EXPECT_EQ(failures(faulty, "linear/bf16/96x512"), 7);
}
TEST(OpCasesFault, OneContextRowTooManyOrTooFew) {
  class Faulty final : public RefOps {
   public:
    int change = 1;
    void attend(const Attn& attn, View q, View out) override {
      Batch batch = *attn.batch;
      std::vector<int> kv_len(batch.host_kv_len.begin(), batch.host_kv_len.end());
      for (int& n : kv_len) n += n == 65 ? change : 0;
      batch.kv_len = View::vector(kv_len.data(), DType::i32, batch.n_seqs);
      Attn changed = attn;
      changed.batch = &batch;
      RefOps::attend(changed, q, out);
    }
  } faulty;
  for (const int change : {1, -1}) {
    faulty.change = change;
    EXPECT_EQ(failures(faulty, "attend/decode/4x64of2x64/f32"), 4) << change;
  }
}
TEST(OpCasesFault, ThePrefixOfKTakenForV) {
  class Faulty final : public RefOps {
    void attend(const Attn& attn, View q, View out) override {
      Attn changed = attn;
      if (attn.kv.v != nullptr && attn.kv.layout.k_dim == attn.kv.layout.v_dim) changed.kv.v = attn.kv.k;
      RefOps::attend(changed, q, out);
    }
  } faulty;
  EXPECT_GT(failures(faulty, "attend/decode/4x64of2x64/f16"), 0);
}
TEST(OpCasesFault, AnExpertLeftOut) {
  class Faulty final : public RefOps {
    void moe(View x, const Experts& experts, const Routing& routing, View y) override {
      Routing changed = routing;
      changed.ids.shape[1] = changed.weights.shape[1] = routing.ids.n_cols() - 1;
      RefOps::moe(x, experts, changed, y);
    }
  } faulty;
  EXPECT_EQ(failures(faulty, "moe/"), static_cast<int>(n_cases("moe/")));
}
TEST(OpCasesFault, TheBiasInTheWeights) {  // P-31
  class Faulty final : public RefOps {
    void route(View logits, View bias, const Router& router, const Routing& out) override {
      RefOps::route(logits, bias, router, out);
      if (!bias) return;
      for (int t = 0; t < logits.n_rows(); ++t) out.weights.row<float>(t)[0] += 0.01f * bias.row<float>(0)[out.ids.row<int>(t)[0]];
    }
  } faulty;
  EXPECT_GT(failures(faulty, "route/sigmoid_bias"), 10);
}
TEST(OpCasesFault, TheWrongPairsOfRope) {  // P-34
  class Faulty final : public RefOps {
    void rope(View qk, View pos, const Rope& rope) override {
      Rope changed = rope;
      changed.interleaved = false;
      RefOps::rope(qk, pos, changed);
    }
  } faulty;
  EXPECT_EQ(failures(faulty, "rope/halves"), 0);
  EXPECT_GE(failures(faulty, "rope/neighbours"), static_cast<int>(n_cases("rope/neighbours")) - 1);
}

TEST(OpCasesTest, NamesAreUniqueAndSizesSet) {
  std::set<std::string> names;
  for (const OpCase& c : op_cases()) {
    EXPECT_TRUE(names.insert(c.name).second) << c.name;
    EXPECT_TRUE(c.name.starts_with(c.op + "/")) << c.name;
    EXPECT_GE(c.bytes, 0.0);
  }
}
TEST(OpCasesTest, OperationsCanBeLeftOut) {
  for (const OpCase& c : op_cases({.contains = "", .without_ops = {"kv_gather", "moe"}})) EXPECT_TRUE(c.op != "kv_gather" && c.op != "moe");
}

}  // namespace
}  // namespace cachalot::test
