// MappedFile, read_text_file and write_file_atomically.
#include "base/mapped_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "support/support.h"

namespace cachalot {
namespace {
namespace fs = std::filesystem;

using testing::HasSubstr;

TEST(MappedFile, ShowsTheBytes) {
  const test::TempDir dir;
  const auto path = dir.write("a.bin", std::string_view("ab\0c", 4));
  const auto file = MappedFile::open(path);
  ASSERT_EQ(file->bytes().size(), 4u);
  EXPECT_EQ(file->bytes()[2], std::byte{0});
  EXPECT_EQ(file->bytes()[3], std::byte{'c'});
  EXPECT_EQ(file->path(), path.string());
}

TEST(MappedFile, AnEmptyFileHasNoBytes) {
  const test::TempDir dir;
  EXPECT_TRUE(MappedFile::open(dir.write("empty", ""))->bytes().empty());
}

TEST(MappedFile, RefusesAGitLfsPointer) {
  const test::TempDir dir;
  const auto path = dir.write("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n");
  EXPECT_THAT(test::error_of([&] { MappedFile::open(path); }), HasSubstr("model.safetensors: a Git LFS pointer"));
}

TEST(MappedFile, StaysReadableAfterTheFileIsUnlinked) {
  const test::TempDir dir;
  const auto path = dir.write("a.bin", "whale");
  const auto file = MappedFile::open(path);
  fs::remove(path);
  EXPECT_EQ(file->bytes()[4], std::byte{'e'});
}

TEST(MappedFile, ForgottenPagesReadTheSameAgain) {
  const test::TempDir dir;
  const std::string content(3 * 4096 + 17, 'w');
  const auto file = MappedFile::open(dir.write("a.bin", content));
  file->forget(file->bytes());
  file->forget(file->bytes().subspan(100, 50));  // within one page: nothing to drop
  file->forget(file->bytes().subspan(4096, 4096));
  file->forget({});
  std::vector<std::byte> elsewhere(4 * 4096, std::byte{'e'});  // memory that a wrong call would clear
  file->forget(elsewhere);
  for (const std::byte b : elsewhere) ASSERT_EQ(b, std::byte{'e'});
  for (const std::byte b : file->bytes()) ASSERT_EQ(b, std::byte{'w'});
}

TEST(MappedFile, RefusesWhatIsNoFile) {
  const test::TempDir dir;
  const auto missing = dir.path() / "missing.gguf";
  EXPECT_EQ(test::error_of([&] { MappedFile::open(missing); }), missing.string() + ": cannot open: No such file or directory");
  EXPECT_EQ(test::error_of([&] { MappedFile::open(dir.path()); }), dir.path().string() + ": not a regular file");
  const auto fifo = dir.path() / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_EQ(test::error_of([&] { MappedFile::open(fifo); }), fifo.string() + ": not a regular file");  // and does not wait for a writer
  EXPECT_THAT(test::error_of([] { MappedFile::open("/dev/zero"); }), HasSubstr("not a regular file"));
  EXPECT_THAT(test::error_of([] { MappedFile::open(""); }), HasSubstr("cannot open"));
}

TEST(ReadTextFile, WholeContentUpToTheLimit) {
  const test::TempDir dir;
  EXPECT_EQ(read_text_file(dir.write("a", "line\nline\n")), "line\nline\n");
  EXPECT_EQ(read_text_file(dir.write("b", "")), "");
  const auto path = dir.write("c", "12345");
  EXPECT_EQ(read_text_file(path, 5), "12345");
  EXPECT_EQ(test::error_of([&] { read_text_file(path, 4); }), path.string() + ": 5 bytes, expected at most 4");
}

}  // namespace
}  // namespace cachalot
