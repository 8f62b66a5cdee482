// BlockPool and KvCache bookkeeping under random use.
#include "runtime/block_pool.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "ops/ops.h"
#include "runtime/kv_cache.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

TEST(BlockPool, RandomTakeShareDropKeepsCounts) {
  BlockPool pool(17);
  std::vector<int> held(17, 0);
  std::mt19937 random(3);
  for (int step = 0; step < 20000; ++step) {
    const int block = static_cast<int>(random() % 17);
    switch (random() % 3) {
      case 0:
        if (const auto taken = pool.take()) {
          ASSERT_EQ(held[static_cast<size_t>(*taken)], 0) << "a held block was given out";
          held[static_cast<size_t>(*taken)] = 1;
        } else {
          ASSERT_EQ(pool.n_free(), 0);
        }
        break;
      case 1:
        if (held[static_cast<size_t>(block)] > 0) pool.share(block), ++held[static_cast<size_t>(block)];
        break;
      default:
        if (held[static_cast<size_t>(block)] > 0) pool.drop(block), --held[static_cast<size_t>(block)];
    }
    int n_free = 0;
    for (int b = 0; b < 17; ++b) {
      ASSERT_EQ(pool.holders(b), held[static_cast<size_t>(b)]);
      n_free += held[static_cast<size_t>(b)] == 0;
    }
    ASSERT_EQ(pool.n_free(), n_free);
  }
}

TEST(BlockPoolDeathTest, DroppingAFreeBlockIsABug) {
  BlockPool pool(2);
  EXPECT_DEATH(pool.drop(0), "check failed");
}

Config small_config() {
  Config c;
  c.n_layers = 2;
  c.n_heads = c.n_kv_heads = 2;
  c.head_dim = 4;
  return c;
}

TEST(KvCache, ReserveAndTruncate) {
  const auto ops = make_ref_ops();
  KvCache cache(*ops, small_config(), KvFormat::f32, 8, 5);
  EXPECT_EQ(cache.bytes(), 2u * 5 * 8 * (2 * 4 * 2) * 4);
  Sequence a, b;
  ASSERT_TRUE(cache.reserve(a, 17));
  EXPECT_EQ(a.blocks.size(), 3u);
  EXPECT_FALSE(cache.reserve(b, 17));  // two blocks are left
  EXPECT_TRUE(b.blocks.empty());
  ASSERT_TRUE(cache.reserve(b, 16));
  EXPECT_FALSE(cache.reserve(a, 25));
  EXPECT_EQ(a.blocks.size(), 3u);
  std::set<int> distinct(a.blocks.begin(), a.blocks.end());
  distinct.insert(b.blocks.begin(), b.blocks.end());
  EXPECT_EQ(distinct.size(), 5u);
  a.n_computed = 17;
  cache.truncate(a, 9);
  EXPECT_EQ(a.blocks.size(), 2u);
  EXPECT_EQ(a.n_computed, 9);
  cache.release(a);
  cache.release(b);
  EXPECT_EQ(cache.pool().n_free(), 5);
}

TEST(KvCache, RefusesOtherBlockSizes) {
  const auto ops = make_ref_ops();
  EXPECT_NE(error_of([&] { KvCache(*ops, small_config(), KvFormat::f32, 12, 5); }).find("12"), std::string::npos);
}

TEST(KvCache, BytesPerTokenOfTheLatentCache) {
  Config v3;
  v3.mla = true;
  v3.kv_rank = 512;
  v3.rope.dim = 64;
  EXPECT_EQ(v3.kv_layout(KvFormat::bf16, 16).token_bytes() * 61, 70272u);  // DeepSeek-V3
  EXPECT_EQ(v3.kv_layout(KvFormat::f16, 16).token_bytes() * 27, 31104u);   // V2-Lite
  EXPECT_EQ(v3.kv_layout(KvFormat::fp8, 16).token_bytes(), 656u);
}

TEST(KvCache, RefusesFp8RowsOfOtherAttention) {
  EXPECT_NE(error_of([] { (void)small_config().kv_layout(KvFormat::fp8, 16); }).find("latent attention"), std::string::npos);
}

}  // namespace
}  // namespace cachalot::test
