// AtomicFile: a file appears whole or not at all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace cachalot
