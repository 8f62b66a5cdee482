// AtomicFile: a file appears whole or not at all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>

#include "base/mapped_file.h"
#include "io/atomic_file.h"
#include "support/support.h"

namespace cachalot {
namespace {

namespace fs = std::filesystem;

TEST(AtomicFile, ReplacesTheOldFileOnCommitOnly) {
  const test::TempDir dir;
  const auto path = dir.write("a.bin", "a much longer old content");
  {
    AtomicFile file(path);
    file.write(std::string_view("new"));
    EXPECT_EQ(read_text_file(path), "a much longer old content");
    file.pad_to(4);
    file.commit();
  }
  EXPECT_EQ(read_text_file(path), std::string("new\0", 4));
  EXPECT_EQ(std::distance(fs::directory_iterator(dir.path()), {}), 1);
}

TEST(AtomicFile, AbandonedLeavesNothingBehind) {
  const test::TempDir dir;
  {
    AtomicFile file(dir.path() / "a.bin");
    file.write(std::string_view("half"));
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(dir.path()), {}), 0);
}

TEST(AtomicFile, FailuresNameThePath) {
  const test::TempDir dir;
  const auto missing = dir.path() / "no" / "a.bin";
  EXPECT_THAT(test::error_of([&] { const AtomicFile file(missing); }), testing::HasSubstr(missing.string()));
  const auto folder = dir.path() / "folder";
  fs::create_directory(folder);
  std::ignore = dir.write("folder/kept", "x");
  EXPECT_THAT(test::error_of([&] {
                AtomicFile file(folder);
                file.write(std::string_view("x"));
                file.commit();
              }),
              testing::HasSubstr(folder.string()));
  EXPECT_TRUE(fs::exists(folder / "kept"));
  EXPECT_EQ(std::distance(fs::directory_iterator(dir.path()), {}), 1);
}

TEST(AtomicFile, ReadsBackWhatItWrote) {
  const test::TempDir dir;
  AtomicFile file(dir.path() / "a.bin");
  file.write(std::string_view("0123456789"));
  std::vector<std::byte> part(3);
  file.read_back(4, part);
  EXPECT_EQ(static_cast<char>(part[0]), '4');
  EXPECT_THAT(test::error_of([&] { file.read_back(8, part); }), testing::HasSubstr("cannot read back the file: 2 bytes at 8, expected 3"));
}

// A file that may not grow stands for a disk that is full.
TEST(AtomicFile, AFullDiskIsAnErrorThatLeavesNothing) {
  const test::TempDir dir;
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{.rlim_cur = 1 << 16, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string error = test::error_of([&] {
    AtomicFile file(dir.path() / "a.bin");
    file.write(std::string(1 << 20, 'x'));
    file.commit();
  });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(error, testing::AllOf(testing::HasSubstr("a.bin: cannot write the file"), testing::HasSubstr("File too large")));
  EXPECT_EQ(std::distance(fs::directory_iterator(dir.path()), {}), 0);
}

}  // namespace
}  // namespace cachalot
