// Choice of the kernel table: the best that fits, or the one that is forced; refusals say what was found and expected.
#include "cpu/features.h"

#include <gtest/gtest.h>

#include "support/support.h"

namespace cachalot::cpu {
namespace {

using test::error_of;

constexpr uint32_t kAllAvx2 = kAvx2 | kFma | kF16c, kAllAvx512 = kAllAvx2 | kAvx512f | kAvx512bw | kAvx512dq | kAvx512vl;

TEST(Features, TakesTheBestLevelWhoseNeedsAreMet) {
  EXPECT_STREQ(select_kernels(0u).name, "scalar");
  EXPECT_STREQ(select_kernels(kAvx2 | kFma).name, "scalar");  // no F16C
  EXPECT_STREQ(select_kernels(kAllAvx2).name, "avx2");
  EXPECT_STREQ(select_kernels(kAllAvx2 | kAvx512f | kAvx512bw).name, "avx2");  // AVX-512 of the first generation
  EXPECT_STREQ(select_kernels(kAllAvx512).name, "avx512");
  EXPECT_STREQ(select_kernels(kAllAvx512 | kAmxTile).name, "avx512");
  EXPECT_STREQ(select_kernels(kAllAvx512 | kAvx512vnni).name, "avx512vnni");
  EXPECT_STREQ(select_kernels(kAllAvx512 | kAvx512vnni | kAvx512bf16).name, "avx512bf16");
  EXPECT_STREQ(select_kernels(kAllAvx512 | kAvx512vnni | kAvx512bf16 | kAmxTile | kAmxInt8).name, "avx512bf16");
  EXPECT_STREQ(select_kernels(kAllAvx512 | kAvx512vnni | kAvx512bf16 | kAmxTile | kAmxInt8 | kAmxBf16).name, "avx512bf16");
  EXPECT_STREQ(
      select_kernels(kAllAvx512 | kAvx512vnni | kAvx512bf16 | kAvx512fp16 | kAvx512vbmi | kAvx512vbmi2 | kAmxTile | kAmxInt8 | kAmxBf16)
          .name,
      "amx");
}

TEST(Features, ForcedLevelIsTakenOrRefused) {
  EXPECT_STREQ(select_kernels(kAllAvx512, "scalar").name, "scalar");
  EXPECT_STREQ(select_kernels(kAllAvx512, "avx2").name, "avx2");
  EXPECT_EQ(error_of([] { select_kernels(kAllAvx2 | kAvx512f, "avx512"); }),
            "CACHALOT_ISA: found \"avx512\", but this machine lacks avx512bw avx512dq avx512vl");
  EXPECT_EQ(error_of([] { select_kernels(kAllAvx512, "neon"); }),
            "CACHALOT_ISA: found \"neon\", expected one of amx, avx512bf16, avx512vnni, avx512, avx2, scalar");
}

TEST(Features, LevelsFallInOrderAndEachTableIsComplete) {
  const auto levels = isa_levels();
  ASSERT_FALSE(levels.empty());
  EXPECT_EQ(levels.back().needs, 0u);
  for (size_t i = 0; i < levels.size(); ++i) {
    const KernelTable& t = *levels[i].table;
    EXPECT_STREQ(t.name, levels[i].name);
    const uint32_t above = i > 0 ? levels[i - 1].needs : ~0u;
    EXPECT_EQ(levels[i].needs & ~above, 0u) << t.name << " needs more than the level above";
    for (int c = 0; c < kNumCodecs; ++c) {
      EXPECT_NE(t.gemv[c], nullptr) << t.name << " codec " << c;
      EXPECT_NE(t.decode[c], nullptr) << t.name << " codec " << c;
    }
    EXPECT_TRUE(t.gemm[0] && t.gemm[1] && t.gemm[2] && t.rmsnorm && t.add_rmsnorm && t.silu_mul && t.exp && t.sigmoid && t.axpy && t.rope &&
                t.load_rows && t.store_row && t.attention[0].attend)
        << t.name;
  }
}

TEST(Features, DetectionAgreesWithTheCompilersBuiltin) {
  const uint32_t found = detect_features();
  EXPECT_EQ((found & kAvx2) != 0, __builtin_cpu_supports("avx2") != 0);
  EXPECT_EQ((found & kFma) != 0, __builtin_cpu_supports("fma") != 0);
  EXPECT_EQ((found & kAvx512f) != 0, __builtin_cpu_supports("avx512f") != 0);
  EXPECT_EQ((found & kAvx512vl) != 0, __builtin_cpu_supports("avx512vl") != 0);
  EXPECT_EQ((found & kAvx512vnni) != 0, __builtin_cpu_supports("avx512vnni") != 0);
  EXPECT_EQ((found & kAvx512bf16) != 0, __builtin_cpu_supports("avx512bf16") != 0);
}

}  // namespace
}  // namespace cachalot::cpu
