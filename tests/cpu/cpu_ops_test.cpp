// Every operation case on CpuOps against RefOps, with the instruction set that CACHALOT_ISA forces (see CMakeLists.txt).
#include <gtest/gtest.h>

#include <cstdlib>

#include "cpu/cpu_ops.h"
#include "cpu/features.h"
#include "ops/op_cases.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

bool attends_in_bf16() { return cpu::select_kernels().attention[static_cast<int>(cpu::Element::bf16)].attend != nullptr; }

class CpuOpCase : public testing::TestWithParam<OpCase> {};

TEST_P(CpuOpCase, AgreesWithReference) {
  static const std::unique_ptr<Ops> cpu = make_cpu_ops({.n_threads = 3, .bf16_prompts = false});
  static const std::unique_ptr<Ops> reference = make_ref_ops();
  const CaseResult result = run_case(GetParam(), *cpu, *reference, {.activations_in_16_bits = true, .bf16_attention = attends_in_bf16()});
  EXPECT_TRUE(result.ok) << result.text;
}

std::string test_name(const testing::TestParamInfo<OpCase>& param) {
  std::string name = param.param.name;
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  return name + "_" + std::to_string(param.index);
}
INSTANTIATE_TEST_SUITE_P(All, CpuOpCase, testing::ValuesIn(op_cases()), test_name);

TEST(CpuOps, ProductsInF32AgreeMoreClosely) {
  const auto ops = make_cpu_ops({.n_threads = 2, .f32_products = true});
  const auto reference = make_ref_ops();
  int n_quantised = 0;
  for (const OpCase& c : op_cases()) {
    if (!c.quantised || n_quantised++ % 3 != 0) continue;
    const CaseResult result = run_case(c, *ops, *reference, {.bf16_attention = attends_in_bf16()});
    EXPECT_TRUE(result.ok) << result.text;
  }
}

TEST(CpuOps, ProductsInBf16StayWithinTheirBound) {
  const auto ops = make_cpu_ops({.n_threads = 2});
  if (cpu::select_kernels().tiles.gemm_bf16 == nullptr) GTEST_SKIP() << ops->name() << " has no such products";
  const auto reference = make_ref_ops();
  int n = 0;
  for (const OpCase& c : op_cases()) {
    const bool takes_many = c.op.starts_with("linear") || c.op == "head_linear" || c.op == "moe" || c.op.starts_with("attend");
    const bool always = c.name.find("prompt") != std::string::npos || c.name.find("ffn") != std::string::npos;
    if (!takes_many || (n++ % 2 != 0 && !always)) continue;
    const CaseResult result =
        run_case(c, *ops, *reference, {.activations_in_16_bits = true, .bf16_products = true, .bf16_attention = attends_in_bf16()});
    EXPECT_TRUE(result.ok) << result.text;
  }
}

TEST(CpuOps, NameSaysWhichTableRuns) {
  const auto ops = make_cpu_ops();
  const char* forced = std::getenv("CACHALOT_ISA");
  EXPECT_EQ(ops->name(), std::string("cpu-") + (forced != nullptr ? forced : cpu::select_kernels().name));
}

TEST(CpuOps, RefusesSegmentsThatDoNotFit) {
  const auto ops = make_cpu_ops({.n_threads = 1});
  const LinearSource a = random_source({.format = Format::f32, .out = 4, .in = 32}, 1, "a");
  const LinearSource b = random_source({.format = Format::f32, .out = 4, .in = 64}, 2, "b");
  const std::vector<LinearSource> both{a, b};
  EXPECT_EQ(error_of([&] { ops->pack(both); }), "b: found an input of 64, expected 32 as in a");
}

}  // namespace
}  // namespace cachalot::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const char* forced = std::getenv("CACHALOT_ISA");
  if (forced != nullptr) {
    for (const cachalot::cpu::IsaLevel& level : cachalot::cpu::isa_levels()) {
      if (std::string(forced) == level.name && (level.needs & ~cachalot::cpu::detect_features()) != 0) {
        std::printf("%s is not there: skipped\n", forced);
        return 77;
      }
    }
  }
  return RUN_ALL_TESTS();
}
