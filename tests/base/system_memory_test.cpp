// Memory limits, from made-up files of the kernel.
#include "base/system_memory.h"

#include "support/support.h"

namespace cachalot::test {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

class SystemMemory : public testing::Test {
 protected:
  void write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories((root.path() / name).parent_path());
    (void)root.write(name, text);
  }
  TempDir root;
};

TEST_F(SystemMemory, WithoutGroupsTheMachineCounts) {
  write("proc/meminfo", "MemTotal:       1048576 kB\nMemFree:          1024 kB\nMemAvailable:    524288 kB\n");
  const MemorySize m = system_memory(root.path());
  EXPECT_EQ(m.total, 1024 * kMiB);
  EXPECT_EQ(m.free, 512 * kMiB);
}

TEST_F(SystemMemory, TheTightestGroupCountsAndItsFileCacheIsFree) {
  write("proc/meminfo", "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n");
  write("proc/self/cgroup", "0::/a/b\n");
  write("sys/fs/cgroup/a/memory.max", "209715200\n");  // 200 MiB
  write("sys/fs/cgroup/a/memory.current", "104857600\n");
  write("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 41943040\n");
  write("sys/fs/cgroup/a/b/memory.max", "max\n");
  write("sys/fs/cgroup/a/b/memory.current", "104857600\n");
  const MemorySize m = system_memory(root.path());
  EXPECT_EQ(m.total, 200 * kMiB);
  EXPECT_EQ(m.free, 140 * kMiB);
}

TEST_F(SystemMemory, TheFirstVersionOfGroups) {
  write("proc/meminfo", "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n");
  write("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/x\n");
  write("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "104857600\n");
  write("sys/fs/cgroup/memory/x/memory.usage_in_bytes", "104857600\n");
  const MemorySize m = system_memory(root.path());
  EXPECT_EQ(m.total, 100 * kMiB);
  EXPECT_EQ(m.free, 0u);
}

TEST_F(SystemMemory, NothingKnownIsZero) {
  const MemorySize m = system_memory(root.path());
  EXPECT_EQ(m.total, 0u);
  EXPECT_EQ(m.free, 0u);
}

TEST(SystemMemoryHere, SaysSomething) {
  const MemorySize m = system_memory();
  EXPECT_GT(m.free, 0u);
  EXPECT_LE(m.free, m.total);
}

}  // namespace
}  // namespace cachalot::test
