// Arena: alignment, scopes, and that a step repeated allocates only until its size is known.
#include "ops/arena.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>

#include "ops/ref_ops.h"

namespace cachalot::test {
namespace {

// Counts allocations and the bytes alive.
struct Heap {
  int n_allocations = 0;
  size_t alive = 0;
  Arena::Alloc alloc() {
    return [this](size_t bytes) {
      ++n_allocations;
      alive += bytes;
      return std::shared_ptr<void>(std::aligned_alloc(256, bytes), [this, bytes](void* p) {
        alive -= bytes;
        std::free(p);
      });
    };
  }
};
constexpr size_t kMiB = size_t{1} << 20;

TEST(ArenaTest, PiecesAreAlignedAndApart) {
  Heap heap;
  Arena arena(heap.alloc());
  auto* a = static_cast<char*>(arena.take(1));
  auto* b = static_cast<char*>(arena.take(257));
  auto* c = static_cast<char*>(arena.take(0));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a) % 256, 0u);
  EXPECT_EQ(b - a, 256);
  EXPECT_EQ(c - b, 512);
}

TEST(ArenaTest, ReleasedMemoryIsTakenAgain) {
  Heap heap;
  Arena arena(heap.alloc());
  void* kept = arena.take(100);
  const size_t mark = arena.mark();
  void* first = arena.take(1000);
  arena.release(mark);
  EXPECT_EQ(arena.take(1000), first);
  EXPECT_NE(first, kept);
  EXPECT_EQ(heap.n_allocations, 1);
}

// A step with a nested scope that takes `inner` bytes.
void step(Arena& arena, size_t outer, size_t inner) {
  const size_t begin = arena.mark();
  std::memset(arena.take(outer), 1, outer);
  for (int layer = 0; layer < 3; ++layer) {
    const size_t mark = arena.mark();
    std::memset(arena.take(inner), 2, inner);
    arena.release(mark);
  }
  arena.release(begin);
}

TEST(ArenaTest, ARepeatedStepStopsAllocating) {
  Heap heap;
  Arena arena(heap.alloc());
  for (const size_t inner : {kMiB / 4, 3 * kMiB}) {
    step(arena, kMiB - 1000, inner);
    step(arena, kMiB - 1000, inner);
    const int after_two = heap.n_allocations;
    for (int i = 0; i < 5; ++i) step(arena, kMiB - 1000, inner);
    EXPECT_EQ(heap.n_allocations, after_two);
    EXPECT_EQ(heap.alive, arena.capacity());
  }
  step(arena, 10, 10);
  EXPECT_LE(heap.alive, 8 * kMiB);
}

TEST(ArenaTest, GrowthKeepsWhatWasTaken) {
  Heap heap;
  Arena arena(heap.alloc());
  auto* first = static_cast<char*>(arena.take(1000));
  std::strcpy(first, "kept");
  for (int i = 1; i < 6; ++i) std::memset(arena.take(static_cast<size_t>(i) * kMiB), 0xFF, static_cast<size_t>(i) * kMiB);
  EXPECT_STREQ(first, "kept");
  arena.release(0);
  EXPECT_GE(arena.capacity(), 15 * kMiB);
}

TEST(ScopeTest, ReleasesAtItsEnd) {
  RefOps ops;
  const size_t before = ops.temp_mark();
  {
    const Scope scope(ops);
    const View v = ops.temp(DType::bf16, 3, 100);
    EXPECT_EQ(v.row_bytes(), 200u);
    EXPECT_GT(ops.temp_mark(), before);
  }
  EXPECT_EQ(ops.temp_mark(), before);
}

}  // namespace
}  // namespace cachalot::test
