// CPU lists, a machine of two nodes as /sys describes it, and the places of workers.
#include "base/cpu_topology.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>

#include "base/thread_pool.h"

namespace cachalot {
namespace {

using Places = std::vector<std::vector<int>>;

TEST(CpuTopology, ReadsListsOfCpus) {
  EXPECT_EQ(parse_cpu_list("0-3,8\n"), (std::vector{0, 1, 2, 3, 8}));
  EXPECT_EQ(parse_cpu_list("5"), std::vector{5});
  for (const char* bad : {"", "a", "3-", "3-1", "1,", "-1", "0-99999999999", "1;2"}) EXPECT_TRUE(parse_cpu_list(bad).empty()) << bad;
}

// Two nodes of two cores with two hyper-threads each; the second threads have the numbers 4 to 7.
std::vector<Cpu> two_nodes() {
  std::vector<Cpu> cpus;
  for (int cpu = 0; cpu < 8; ++cpu) cpus.push_back({.id = cpu, .node = cpu % 4 / 2, .core = cpu % 4});
  return cpus;
}

TEST(CpuTopology, ReadsNodesAndCores) {
  const std::filesystem::path root = std::filesystem::path(testing::TempDir()) / "cachalot_sys";
  const auto write = [&](const std::string& name, const std::string& text) {
    const std::filesystem::path path = root / "devices/system" / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text << '\n';
  };
  write("node/online", "0-1");
  write("node/node0/cpulist", "0-1,4-5");
  write("node/node1/cpulist", "2-3,6-7");
  for (int cpu = 0; cpu < 8; ++cpu)
    write("cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list", std::to_string(cpu % 4) + "," + std::to_string(cpu % 4 + 4));
  const std::vector<int> all{0, 1, 2, 3, 4, 5, 6, 7}, some{6, 9};
  EXPECT_EQ(cpu_topology(all, root.string()), two_nodes());
  EXPECT_EQ(cpu_topology(some, root.string()), (std::vector<Cpu>{{6, 1, 2}, {9, 0, 9}}));  // of 9 the system says nothing
  std::filesystem::remove_all(root);
}

TEST(CpuTopology, PlacesWorkers) {
  const auto cpus = two_nodes();
  EXPECT_EQ(place_workers(cpus, 2, false, Numa::none, 0), Places(2));
  EXPECT_EQ(place_workers(cpus, 6, true, Numa::none, 0), (Places{{0}, {1}, {2}, {3}, {4}, {5}}));
  EXPECT_EQ(place_workers(cpus, 4, true, Numa::distribute, 0), (Places{{0}, {2}, {1}, {3}}));
  EXPECT_EQ(place_workers(cpus, 3, false, Numa::distribute, 0), (Places{{0, 1, 4, 5}, {2, 3, 6, 7}, {0, 1, 4, 5}}));
  EXPECT_EQ(place_workers(cpus, 2, false, Numa::isolate, 1), (Places{{2, 3, 6, 7}, {2, 3, 6, 7}}));
  EXPECT_EQ(place_workers(cpus, 3, true, Numa::isolate, 1), (Places{{2}, {3}, {6}}));
  EXPECT_EQ(place_workers({}, 2, true, Numa::isolate, 1), Places(2));
}

TEST(CpuTopology, OneNodeLeavesWorkersFree) {
  const std::vector<Cpu> cpus{{0, 0, 0}, {1, 0, 1}};
  EXPECT_EQ(place_workers(cpus, 2, false, Numa::distribute, 0), Places(2));
  EXPECT_EQ(place_workers(cpus, 2, false, Numa::isolate, 0), Places(2));
}

TEST(CpuTopology, PoolsRunWhereverTheirWorkersAre) {
  EXPECT_GE(numa_nodes(), 1);
  for (const Numa numa : {Numa::none, Numa::distribute}) {
    for (const bool pin : {false, true}) {
      ThreadPool pool(ThreadPoolOptions{.n_threads = 3, .pin = pin, .numa = numa});
      std::atomic<int> sum{0};
      for (int round = 0; round < 100; ++round) pool.run(10, [&](int index, int) { sum += index; });
      EXPECT_EQ(sum.load(), 4500);
    }
  }
}

}  // namespace
}  // namespace cachalot
