// Large hostile files: tables at their limits are refused in little time and less than 100 MB of memory beside the mapping. Each
// case runs in a child process whose data segment may not grow by more than that.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "byte_builder.h"
#include "io/checkpoint.h"
#include "io/gguf.h"
#include "io/safetensors.h"
#include "io/shard_index.h"

namespace cachalot {
namespace {

using namespace test;

constexpr size_t kAllowed = 100'000'000;
constexpr double kSeconds = 1.0;

size_t data_segment() {  // bytes of private writable memory of this process
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word != "VmData:") continue;
    size_t kib = 0;
    status >> kib;
    return kib * 1024;
  }
  return 0;
}

enum Outcome : int { kRefused, kTooSlow, kOtherMessage, kOpened, kOutOfMemory };

// What happens in the child. Exit codes carry the outcome; the message goes to stderr when it is not the expected one.
[[noreturn]] void try_open(const std::function<void()>& open, const std::string& fragment) {
  const rlimit limit{data_segment() + kAllowed, data_segment() + kAllowed};
  if (kCountMemory) setrlimit(RLIMIT_DATA, &limit);
  const auto cpu_seconds = [] {  // of this process: other load on the machine does not count
    timespec now{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  };
  const double start = cpu_seconds();
  try {
    open();
    _exit(kOpened);
  } catch (const Error& error) {
    const double seconds = cpu_seconds() - start;
    if (std::string(error.what()).find(fragment) == std::string::npos) {
      std::fprintf(stderr, "%s\n", error.what());
      _exit(kOtherMessage);
    }
    std::fprintf(stderr, "%.3f s\n", seconds);
    _exit(kCountMemory && seconds > kSeconds ? kTooSlow : kRefused);
  } catch (const std::bad_alloc&) {
    _exit(kOutOfMemory);
  }
}

void expect_cheap_refusal(const std::function<void()>& open, const std::string& fragment) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) try_open(open, fragment);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "killed by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), kRefused) << "refused, too slow, other message, opened, out of memory are 0 to 4";
}

// Writes pieces until `make` gives an empty one, then `tail`.
template <typename Make>
std::filesystem::path write_pieces(const TempDir& dir, const std::string& name, Make&& make, const std::string& tail) {
  const auto path = dir.path() / name;
  std::ofstream out(path, std::ios::binary);
  for (size_t i = 0;; ++i) {
    const std::string piece = make(i);
    if (piece.empty()) break;
    out << piece;
  }
  out << tail;
  return path;
}

// A safetensors file whose header is "{" + n entries + end.
std::filesystem::path many_tensors(const TempDir& dir, size_t n, const std::string& last, const std::string& data) {
  const auto path = write_pieces(
      dir, "many.safetensors",
      [n](size_t i) {
        if (i == 0) return packed(uint64_t{0}) + "{";
        if (i > n) return std::string();
        return fmt::format(R"("{}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}},)", i);
      },
      last + "}");
  const uint64_t header = std::filesystem::file_size(path) - 8;
  std::fstream out(path, std::ios::binary | std::ios::in | std::ios::out);
  out << packed(header);
  out.seekp(0, std::ios::end);
  out << data;
  return path;
}

TEST(HostileSize, SafetensorsHeaderWithAMillionTensors) {
  const TempDir dir;
  const std::string twice = R"("1":{"dtype":"F32","shape":[0],"data_offsets":[0,0]})";
  const auto path = many_tensors(dir, 999'999, twice, "");
  expect_cheap_refusal([&] { static_cast<void>(SafetensorsFile::open(path)); }, "tensor \"1\" appears twice");
}

TEST(HostileSize, SafetensorsHeaderWithMoreTensors) {
  const TempDir dir;
  const auto path = many_tensors(dir, 1'300'000, R"("w":{})", "");
  expect_cheap_refusal([&] { static_cast<void>(SafetensorsFile::open(path)); }, "more than 1000000 tensors");
}

TEST(HostileSize, SafetensorsTrailingByteAfterAMillionTensors) {
  const TempDir dir;
  const auto path = many_tensors(dir, 999'999, R"("w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})", "x");
  expect_cheap_refusal([&] { static_cast<void>(SafetensorsFile::open(path)); }, "1 bytes after the last tensor");
}

TEST(HostileSize, SafetensorsHeadersOf99MB) {
  const TempDir dir;
  constexpr size_t kHeader = 99'000'000;
  const auto open = [&](std::string_view begin, const char* repeated, std::string_view end) {
    const auto path = write_pieces(
        dir, "long.safetensors",
        [&](size_t i) {
          if (i == 0) return packed(uint64_t{kHeader}) + std::string(begin);
          const size_t left = kHeader - begin.size() - end.size() - std::min(kHeader, (i - 1) << 20);
          return i > (kHeader >> 20) + 1 || left > kHeader ? std::string() : std::string(std::min<size_t>(left, 1 << 20), repeated[0]);
        },
        std::string(end));
    std::filesystem::resize_file(path, kHeader + 8);
    return [path] { static_cast<void>(SafetensorsFile::open(path)); };
  };
  expect_cheap_refusal(open(R"({"__metadata__":{"a":")", "x", R"("},"w":1})"), "expected '{'");
  expect_cheap_refusal(open(R"({"w":)", "[", ""), "expected '{'");
  expect_cheap_refusal(open(R"({"w":{"shape":[)", "1", ""), "expected a whole number");
  expect_cheap_refusal(open("{\"", "n", ""), "the end of a string");
  expect_cheap_refusal(open("{", " ", ""), "the JSON text ends");
}

TEST(HostileSize, ShardIndexWithAMillionTensors) {
  const TempDir dir;
  const auto path = write_pieces(
      dir, "model.safetensors.index.json",
      [](size_t i) {
        if (i == 0) return std::string(R"({"weight_map":{)");
        return i > 999'999 ? std::string() : fmt::format(R"("model.layers.{}.weight":"model-00001-of-00100.safetensors",)", i);
      },
      R"("model.layers.1.weight":"model-00001-of-00100.safetensors"}})");
  expect_cheap_refusal([&] { static_cast<void>(Checkpoint::open(dir.path())); }, "\"model.layers.1.weight\" appears twice");
}

TEST(HostileSize, GgufWithAMillionTensors) {
  const TempDir dir;
  constexpr size_t kTensors = 1 << 20;
  const auto path = write_pieces(
      dir, "many.gguf",
      [](size_t i) {
        if (i == 0) return Bytes().raw("GGUF").number(3u).number(uint64_t{kTensors}).number(uint64_t{0}).str();
        if (i >= kTensors) return std::string();
        return Bytes().text(fmt::format("{:07}", i)).number(1u).number(int64_t{8}).number(0).number(uint64_t{32} * (i - 1)).str();
      },
      Bytes().text("0000001").number(1u).number(int64_t{8}).number(0).number(uint64_t{0}).str());
  expect_cheap_refusal([&] { static_cast<void>(GgufFile::open(path)); }, "tensor \"0000001\" appears twice");
}

// 800 MB of zeros read as 10^8 empty strings; the file has no blocks on the disk.
TEST(HostileSize, GgufWithEmptyTokens) {
  const TempDir dir;
  const std::string head = Bytes()
                               .raw("GGUF")
                               .number(3u)
                               .number(uint64_t{0})
                               .number(uint64_t{1})
                               .text("tokenizer.ggml.tokens")
                               .number(kArray)
                               .number(kString)
                               .number(uint64_t{100'000'000})
                               .str();
  const auto path = dir.write("tokens.gguf", head);
  std::filesystem::resize_file(path, head.size() + 800'000'000);
  expect_cheap_refusal([&] { static_cast<void>(GgufFile::open(path)); }, "tokenizer.ggml.tokens: an array of 100000000 strings");
}

TEST(HostileSize, GgufWithManyLongKeys) {
  const TempDir dir;
  const auto path = write_pieces(
      dir, "keys.gguf",
      [](size_t i) {
        if (i == 0) return Bytes().raw("GGUF").number(3u).number(uint64_t{0}).number(uint64_t{1 << 16}).str();
        if (i >= 1 << 16) return std::string();
        return Bytes().text(fmt::format("{:05}", i) + std::string(2'000, 'k')).number(kU8).number(uint8_t{1}).str();
      },
      Bytes().text("00001" + std::string(2'000, 'k')).number(kU8).number(uint8_t{1}).str());
  expect_cheap_refusal([&] { static_cast<void>(GgufFile::open(path)); }, "appears twice");
}

}  // namespace
}  // namespace cachalot
