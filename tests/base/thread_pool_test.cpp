// ThreadPool: every index once, any number of workers, exceptions, many short runs in a row.
#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

namespace cachalot {
namespace {

TEST(ThreadPool, RunsEveryIndexOnce) {
  for (const int n_threads : {1, 2, 3, 8}) {
    ThreadPool pool(n_threads);
    EXPECT_EQ(pool.size(), n_threads);
    for (const int n : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> count(static_cast<size_t>(n));
      std::atomic<int> bad_workers{0};
      pool.run(n, [&](int index, int worker) {
        ++count[static_cast<size_t>(index)];
        if (worker < 0 || worker >= n_threads) ++bad_workers;
      });
      for (const auto& c : count) EXPECT_EQ(c.load(), 1);
      EXPECT_EQ(bad_workers.load(), 0);
    }
  }
}

TEST(ThreadPool, WritesOfTasksAreSeenByTheCaller) {
  ThreadPool pool(3);
  std::vector<int> values(64);
  for (int round = 1; round <= 3000; ++round) {
    pool.run(64, [&](int index, int) { values[static_cast<size_t>(index)] = round * index; });
    ASSERT_EQ(std::accumulate(values.begin(), values.end(), 0), round * 63 * 32);
  }
}

TEST(ThreadPool, WakesWorkersThatSleep) {
  ThreadPool pool(2);
  std::atomic<int> sum{0};
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    pool.run(10, [&](int index, int) { sum += index; });
  }
  EXPECT_EQ(sum.load(), 5 * 45);
}

TEST(ThreadPool, SeveralWorkersTakePart) {
  ThreadPool pool(2);
  std::atomic<int> arrived{0};
  // Each of the two tasks waits for the other: this ends only when two workers run at the same time.
  pool.run(2, [&](int, int) {
    ++arrived;
    while (arrived.load() < 2) std::this_thread::yield();
  });
  EXPECT_EQ(arrived.load(), 2);
}

TEST(ThreadPool, ThrowsWhatATaskThrewAndStaysUsable) {
  for (const int n_threads : {1, 2}) {
    ThreadPool pool(n_threads);
    EXPECT_THROW(pool.run(8,
                          [](int index, int) {
                            if (index == 3) throw std::runtime_error("three");
                          }),
                 std::runtime_error);
    std::atomic<int> sum{0};
    pool.run(8, [&](int index, int) { sum += index; });
    EXPECT_EQ(sum.load(), 28);
  }
}

TEST(ThreadPool, DefaultTakesPhysicalCores) {
  EXPECT_GE(physical_cores(), 1);
  EXPECT_LE(physical_cores(), static_cast<int>(std::thread::hardware_concurrency()));
  EXPECT_EQ(ThreadPool().size(), physical_cores());
}

}  // namespace
}  // namespace cachalot
