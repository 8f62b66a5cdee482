// Packed models: the same logits to the bit, and every fault refused by name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <fstream>
#include <sstream>

#include "base/hash.h"
#include "cli/load_model.h"
#include "cli/program.h"
#include "eval/perplexity.h"
#include "io/pack_format.h"
#include "io/packed_checkpoint.h"
#include "model/packed_model.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AnyOf;
using ::testing::HasSubstr;

std::string bytes_of(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}
void write_bytes(const fs::path& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

void pack(const fs::path& model, const fs::path& directory, bool replace = false) {
  const auto ops = make_ops("cpu", {.n_threads = 2});
  static_cast<void>(write_packed_model(*Checkpoint::open(model), *ops, directory, {.replace = replace}));
}

std::vector<float> logits_of(const fs::path& model, const char* device = "cpu") {
  const LoadedModel loaded =
      load_model({.path = model, .device = device, .n_threads = 2, .max_context = 40, .needs_tokenizer = false, .show_progress = false});
  std::vector<int> ids;
  for (int i = 0; i < 40; ++i) ids.push_back((i * 37 + 11) % loaded.config.vocab);
  return sequence_logits(*loaded.ops, loaded.decoder, ids);
}

void expect_same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0);
}

// A pack whose header a test may change: the text is edited and sealed again.
void edit_header(const fs::path& file, const std::function<void(std::string& header)>& edit) {
  std::string all = bytes_of(file);
  PackTrailer last;
  std::memcpy(&last, all.data() + all.size() - sizeof last, sizeof last);
  std::string header = all.substr(last.header_at, last.header_bytes);
  edit(header);
  last.header_bytes = header.size();
  last.header_hash = xxh3(std::as_bytes(std::span(header)));
  last.file_bytes = last.header_at + header.size() + sizeof last;
  write_bytes(file, all.substr(0, last.header_at) + header + std::string(reinterpret_cast<const char*>(&last), sizeof last));
}
void replace_in_header(const fs::path& file, const std::string& from, const std::string& to) {
  edit_header(file, [&](std::string& header) {
    const size_t at = header.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    header.replace(at, from.size(), to);
  });
}

// A packed small model, fresh for each test.
class Pack : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::copy(testdata("golden/deepseek-v2-lite"), model_, fs::copy_options::recursive);
    pack(model_, packed_);
  }
  std::string error() {
    return error_of([&] { static_cast<void>(logits_of(packed_)); });
  }
  void change(uint64_t at, const std::function<char(char)>& to) {
    std::string all = bytes_of(file_);
    all[at] = to(all[at]);
    write_bytes(file_, all);
  }

  TempDir folder_;
  fs::path model_ = folder_.path() / "model", packed_ = folder_.path() / "packed", file_ = packed_ / kPackName;
};

TEST(PackedModel, GivesTheSameBits) {
  for (const char* name : {"tiny-v2", "tiny-v3", "golden/llama-gqa", "golden/qwen2", "golden/qwen3", "golden/deepseek-v2-lite"}) {
    SCOPED_TRACE(name);
    if (!fs::exists(testdata(name))) {
      ADD_FAILURE() << "no such model";
      continue;
    }
    const TempDir folder;
    pack(testdata(name), folder.path() / "p");
    expect_same_bits(logits_of(testdata(name)), logits_of(folder.path() / "p"));
  }
}

TEST(PackedModel, OfGgufRunsWithItsTokenizerAndTemplate) {
  const TempDir folder;
  const std::string gguf = folder.path() / "m.gguf", packed = folder.path() / "p";
  ASSERT_EQ(run_program({"convert", "-m", testdata("tiny-v2"), "-o", gguf, "--type", "q8_0", "-q"}).code, 0);
  const ProgramResult result = run_program({"pack", gguf, "-o", packed});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("cpu layout"));
  expect_same_bits(logits_of(gguf), logits_of(packed));
  const auto answer = [&](const std::string& model) {
    const auto json = run_program({"run", "-m", model, "-p", "The history of", "-n", "8", "--temp", "0", "--json"}).json();
    return json["text"].get<std::string>() + json["prompt_token_ids"].dump();
  };
  EXPECT_EQ(answer(gguf), answer(packed));
  // The original may go.
  const std::string before = answer(packed);
  fs::remove(gguf);
  EXPECT_EQ(answer(packed), before);
  // What is counted does not depend on the container.
  const auto bench = run_program({"bench", "-m", packed, "-p", "0", "-n", "2", "-r", "1", "-o", "json", "-q"}).json();
  EXPECT_EQ(bench[0]["model_n_params"], 10546560);
  EXPECT_THAT(bench[0]["model_type"].get<std::string>(), HasSubstr("Q8_0"));
}

TEST(PackedModel, CountsItsBytesAsTheOriginalDoes) {
  const TempDir folder;
  pack(testdata("tiny-v3"), folder.path() / "p");
  const auto bytes = [](const std::string& model) {
    const auto json = run_program({"bench", "-m", model, "-p", "4", "-n", "0", "-r", "1", "-o", "json", "-q"}).json();
    return std::pair(json[0]["weight_bytes"].get<double>(), json[0]["model_size"].get<double>());
  };
  EXPECT_EQ(bytes(testdata("tiny-v3")), bytes(folder.path() / "p"));
}

TEST_F(Pack, NeedsAPlaceOfItsOwn) {
  EXPECT_THAT(error_of([&] { pack(model_, packed_); }), HasSubstr("--force"));
  pack(model_, packed_, true);
  EXPECT_THAT(error_of([&] { pack(model_, model_); }), HasSubstr("holds a model"));
  EXPECT_THAT(error_of([&] { pack(packed_, folder_.path() / "other"); }), HasSubstr("can only be run"));
  EXPECT_THAT(error_of([&] { static_cast<void>(logits_of(packed_, "ref")); }), HasSubstr("ref cannot read"));
  const auto ref = make_ops("ref", {});
  EXPECT_THAT(error_of([&] { static_cast<void>(write_packed_model(*Checkpoint::open(model_), *ref, folder_.path() / "r")); }),
              HasSubstr("--device cpu"));
}

TEST_F(Pack, AFullDiskLeavesNothingBehind) {
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{100'000, old.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const fs::path target = folder_.path() / "full";
  const std::string text = error_of([&] { pack(model_, target); });
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(text, HasSubstr("cannot write"));
  for (const auto& entry : fs::directory_iterator(target)) EXPECT_NE(entry.path().extension(), ".cachalot") << entry.path();
  for (const auto& entry : fs::directory_iterator(target)) EXPECT_EQ(entry.path().string().find(".tmp"), std::string::npos);
  EXPECT_THAT(error_of([&] { static_cast<void>(logits_of(target)); }), HasSubstr("full"));
}

TEST_F(Pack, OfAChangedModelIsStale) {
  const fs::path weights = model_ / "model.safetensors";
  const auto touched = fs::last_write_time(weights) + std::chrono::hours(1);
  fs::last_write_time(weights, touched);
  static_cast<void>(logits_of(packed_));  // touched, but the same
  std::string bytes = bytes_of(weights);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_bytes(weights, bytes);
  fs::last_write_time(weights, touched + std::chrono::hours(1));
  EXPECT_THAT(error(), HasSubstr("stale"));
  write_bytes(weights, bytes + "more");
  EXPECT_THAT(error(), HasSubstr("stale"));
  fs::remove(weights);
  static_cast<void>(logits_of(packed_));  // gone is no change
}

TEST_F(Pack, CompanionsBelongToIt) {
  const std::string config = bytes_of(packed_ / "config.json");
  write_bytes(packed_ / "config.json", config + " ");
  EXPECT_THAT(error(), HasSubstr("config.json has changed"));
  fs::remove(packed_ / "config.json");
  EXPECT_THAT(error(), HasSubstr("config.json is missing"));
}

TEST_F(Pack, ForeignOnesAreRefused) {
  change(0, [](char c) { return static_cast<char>(c + 1); });
  EXPECT_THAT(error(), HasSubstr("not a packed model"));
  change(0, [](char c) { return static_cast<char>(c - 1); });
  change(8, [](char) { return '\x07'; });
  EXPECT_THAT(error(), HasSubstr("packed in version 7"));
  change(8, [](char) { return '\x01'; });
  std::string all = bytes_of(file_);
  std::reverse(all.begin() + 12, all.begin() + 16);
  write_bytes(file_, all);
  EXPECT_THAT(error(), HasSubstr("another byte order"));
  std::reverse(all.begin() + 12, all.begin() + 16);
  write_bytes(file_, all);
  replace_in_header(file_, "cpu layout", "gpu layout");
  EXPECT_THAT(error(), AllOf(HasSubstr("packed for \"gpu layout"), HasSubstr("expected \"cpu layout")));
  replace_in_header(file_, "gpu layout", "cpu layout");
  replace_in_header(file_, "\"ranks\":1", "\"ranks\":2");
  EXPECT_THAT(error(), HasSubstr("rank 0 of 2"));
}

TEST_F(Pack, CutShortAtAnyLengthItIsRefused) {
  const std::string all = bytes_of(file_);
  for (const size_t keep : {size_t{0}, size_t{5}, size_t{20}, size_t{64}, size_t{127}, size_t{128}, size_t{4096}, all.size() / 2,
                            all.size() - 64, all.size() - 1}) {
    write_bytes(file_, std::string_view(all).substr(0, keep));
    EXPECT_THAT(error(), HasSubstr(kPackName)) << keep;
  }
}

TEST_F(Pack, ChangedBitsAreFound) {
  const std::string all = bytes_of(file_);
  const std::vector<float> expected = logits_of(packed_);
  const auto check = [&](size_t at, bool must_fail) {
    change(at, [](char c) { return static_cast<char>(c ^ 0x10); });
    try {
      const std::vector<float> got = logits_of(packed_);
      EXPECT_FALSE(must_fail) << at;
      expect_same_bits(got, expected);  // a byte between two parts
    } catch (const Error& e) {
      EXPECT_THAT(e.what(), HasSubstr(kPackName)) << at;
    }
    write_bytes(file_, all);
  };
  const auto pack = PackFile::open(file_);
  for (const PackLinear& linear : pack->header().linears) {
    if (linear.sources[0].name.find("blk.1.") == std::string::npos) continue;
    check(linear.description.at, true);
    check(linear.buffers[0].at + linear.buffers[0].bytes / 2, true);
  }
  check(pack->header().vectors[0].second.at, true);
  check(all.size() - 200, true);  // header
  check(all.size() - 60, true);   // its place
  std::mt19937 engine(7);
  for (int i = 0; i < 20; ++i) check(64 + engine() % (all.size() - 64), false);
}

TEST_F(Pack, HeadersThatLieAreRefused) {
  const std::string all = bytes_of(file_);
  const std::pair<const char*, const char*> lies[] = {{"\"at\":4096", "\"at\":99999999999"},
                                                      {"\"at\":4096", "\"at\":-1"},
                                                      {"\"at\":4096", "\"at\":8192"},
                                                      {"\"matrices\":1", "\"matrices\":0"},
                                                      {"\"out\":", "\"out\":9"},
                                                      {"\"format\":\"", "\"format\":\"x"},
                                                      {"\"xxh3\":\"", "\"xxh3\":\"0"},
                                                      {"token_embd.weight", "token_embd.weighs"},
                                                      {"\"file\":\"config.json\"", "\"file\":\"../config.json\""},
                                                      {"\"vectors\":[", "\"vectors\":[7,"},
                                                      {"{\"layout\"", "[{\"layout\""},
                                                      {"\"container\":\"safetensors\"", "\"container\":\"gguf\""}};
  for (const auto& [from, to] : lies) {
    replace_in_header(file_, from, to);
    EXPECT_THAT(error(), AnyOf(HasSubstr(kPackName), HasSubstr("packed"))) << to;
    write_bytes(file_, all);
  }
}

TEST_F(Pack, OtherCommandsAskForTheOriginal) {
  const ProgramResult inspect = run_program({"inspect", packed_});
  EXPECT_EQ(inspect.code, 1);
  EXPECT_THAT(inspect.err, HasSubstr("can only be run"));
  fs::rename(file_, packed_ / "rank-0-of-4.cachalot");
  EXPECT_EQ(run_program({"run", "-m", packed_ / "rank-0-of-4.cachalot", "-p", "a"}).code, 1);
}

}  // namespace
}  // namespace cachalot::test
