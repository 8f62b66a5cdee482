// BlockPool and KvCache bookkeeping under random use.
#include "runtime/block_pool.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "ops/ops.h"
#include "runtime/kv_cache.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

TEST(BlockPool, RandomTakeShareDropKeepsCounts) {
  BlockPool pool(17, 16);
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
    pool.check_invariants();
  }
}

using Tokens = std::vector<int>;

// Holds a chain of pages below a salt, published.
std::vector<int> publish_chain(BlockPool& pool, const std::string& salt, const std::vector<Tokens>& pages) {
  std::vector<int> blocks;
  for (const Tokens& tokens : pages) {
    const BlockPool::Parent parent = blocks.empty() ? pool.make_root(salt) : blocks.back();
    blocks.push_back(*pool.take());
    EXPECT_EQ(pool.publish(parent, blocks.back(), tokens), blocks.back());
  }
  return blocks;
}
void drop_chain(BlockPool& pool, const std::vector<int>& blocks) {
  for (auto b = blocks.rbegin(); b != blocks.rend(); ++b) pool.drop(*b);
}

TEST(BlockPool, FindsPublishedPrefixesOfTheirSaltOnly) {
  BlockPool pool(8, 4);
  const auto blocks = publish_chain(pool, "a", {{1, 2, 3, 4}, {5, 6, 7, 8}});
  drop_chain(pool, blocks);
  pool.check_invariants();
  EXPECT_EQ(pool.n_free(), 8);
  EXPECT_EQ(pool.n_cached(), 2);
  const auto root = pool.find_root("a");
  EXPECT_EQ(pool.find(root, Tokens{1, 2, 3, 4}), blocks[0]);
  EXPECT_EQ(pool.find(blocks[0], Tokens{5, 6, 7, 8}), blocks[1]);
  EXPECT_EQ(pool.find(root, Tokens{5, 6, 7, 8}), std::nullopt);  // the same tokens elsewhere are other rows
  EXPECT_EQ(pool.find_root("b"), BlockPool::kNoParent);
  EXPECT_EQ(pool.find(pool.find_root("b"), Tokens{1, 2, 3, 4}), std::nullopt);
  const auto other = publish_chain(pool, "b", {{1, 2, 3, 4}});
  EXPECT_EQ(pool.find(pool.find_root("b"), Tokens{1, 2, 3, 4}), other[0]);
  EXPECT_EQ(pool.find(root, Tokens{1, 2, 3, 4}), blocks[0]);
}

TEST(BlockPool, PartialMatchGoesUpToTheFirstDifference) {
  BlockPool pool(8, 4);
  const auto blocks = publish_chain(pool, "", {{1, 2, 3, 4}, {5, 6, 7, 8}});
  const int sibling = *pool.take();
  ASSERT_EQ(pool.publish(blocks[0], sibling, Tokens{5, 6, 9}), sibling);
  const auto best = [&](const Tokens& tokens) { return pool.find_partial(blocks[0], tokens); };
  EXPECT_EQ(best({5, 6, 7, 1}).block, blocks[1]);
  EXPECT_EQ(best({5, 6, 7, 1}).n_same, 3);
  EXPECT_EQ(best({5, 6, 9, 8}).block, sibling);
  EXPECT_EQ(best({5, 6, 9, 8}).n_same, 3);
  EXPECT_EQ(best({5}).n_same, 1);
  EXPECT_EQ(best({7, 6}).n_same, 0);
  EXPECT_EQ(pool.find(blocks[0], Tokens{5, 6, 9, 8}), std::nullopt);  // an incomplete page is no full one
}

TEST(BlockPool, AnEqualPageIsKeptOnce) {
  BlockPool pool(4, 4);
  const auto blocks = publish_chain(pool, "", {{1, 2, 3, 4}});
  const int twin = *pool.take();
  EXPECT_EQ(pool.publish(pool.make_root(""), twin, Tokens{1, 2, 3, 4}), blocks[0]);
  EXPECT_FALSE(pool.published(twin));
  pool.drop(twin);
  pool.check_invariants();
}

TEST(BlockPool, UsesUpUnknownPagesFirstThenTheLeastRecentlyDropped) {
  BlockPool pool(4, 2);
  const auto a = publish_chain(pool, "", {{1, 1}, {2, 2}}), b = publish_chain(pool, "", {{3, 3}});
  const int plain = *pool.take();
  drop_chain(pool, a);
  drop_chain(pool, b);
  pool.drop(plain);
  pool.share(a[0]);  // used again: now the newest
  pool.drop(a[0]);
  EXPECT_EQ(pool.take(), plain);
  EXPECT_EQ(pool.take(), a[1]);
  EXPECT_EQ(pool.take(), b[0]);
  EXPECT_EQ(pool.find(pool.find_root(""), Tokens{1, 1}), a[0]);
  EXPECT_EQ(pool.take(), a[0]);
  EXPECT_EQ(pool.n_evicted(), 3);
  EXPECT_EQ(pool.find_root(""), BlockPool::kNoParent);
  pool.check_invariants();
}

TEST(BlockPool, APageThatSomebodyHoldsIsNeverUsedUp) {
  BlockPool pool(3, 2);
  const auto pinned = publish_chain(pool, "", {{1, 1}});
  for (int i = 0; i < 10; ++i) {
    const int x = *pool.take(), y = *pool.take();
    EXPECT_EQ(pool.take(), std::nullopt);
    pool.drop(x);
    pool.drop(y);
  }
  EXPECT_EQ(pool.find(pool.find_root(""), Tokens{1, 1}), pinned[0]);
}

// With hashes of 3 bits nearly everything collides: what is found must still be right.
TEST(BlockPool, CollidingHashesNeverGiveOtherTokens) {
  BlockPool pool(12, 2, /*hash_bits=*/3);
  std::mt19937 random(5);
  std::map<int, std::pair<std::string, std::vector<Tokens>>> content;  // what each page was published as
  int n_found = 0, n_refused = 0;
  for (int step = 0; step < 5000; ++step) {
    const std::string salt = random() % 2 == 0 ? "x" : "y";
    std::vector<Tokens> path;
    std::vector<int> held;
    BlockPool::Parent parent = pool.find_root(salt);
    for (int depth = 0; depth < 3; ++depth) {
      path.push_back({static_cast<int>(random() % 3), static_cast<int>(random() % 2)});
      if (const auto found = pool.find(parent, path.back())) {
        ASSERT_EQ(content.at(*found), std::make_pair(salt, path));
        pool.share(*found);
        held.push_back(*found);
        ++n_found;
      } else {
        const auto block = pool.take();
        if (!block) break;
        const auto known = pool.publish(held.empty() ? pool.make_root(salt) : held.back(), *block, path.back());
        if (!known) {
          pool.drop(*block);
          ++n_refused;
          break;
        }
        ASSERT_EQ(*known, *block);
        content[*block] = {salt, path};
        held.push_back(*block);
      }
      parent = held.back();
    }
    drop_chain(pool, held);
    pool.check_invariants();
  }
  EXPECT_GT(n_found, 100);
  EXPECT_GT(n_refused, 100);
}

TEST(BlockPoolDeathTest, DroppingAFreeBlockIsABug) {
  BlockPool pool(2, 16);
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
