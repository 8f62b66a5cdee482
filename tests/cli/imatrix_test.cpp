// cachalot imatrix, and quantize with what it wrote.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cli/program.h"
#include "io/gguf.h"
#include "quant/imatrix.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const std::string kModel = testdata("tiny-v2"), kText = testdata("text/docs/calib.txt");

TEST(ImatrixCommand, GathersMergesAndQuantizes) {
  const TempDir folder;
  const std::string one = folder.path() / "one.gguf", two = folder.path() / "two.dat", out = folder.path() / "q.gguf";
  const ProgramResult first = run_program({"imatrix", "-m", kModel, "-f", kText, "-o", one, "--window", "64", "--windows", "4"});
  EXPECT_EQ(first.code, 0) << first.err;
  EXPECT_THAT(first.out, HasSubstr("4 windows of 64 tokens"));
  const ImportanceMatrix read = ImportanceMatrix::read(one);
  EXPECT_THAT(read.datasets, ElementsAre(kText));
  EXPECT_THAT(read.entries.at("blk.0.attn_output.weight").counts, ElementsAre(256));

  const ProgramResult merged = run_program({"imatrix", "--in-file", one, "--in-file", one, "-o", two, "--window", "64"});
  EXPECT_EQ(merged.code, 0) << merged.err;
  EXPECT_EQ(ImportanceMatrix::read(two).chunk_count, 8);
  EXPECT_EQ(ImportanceMatrix::read(two).entries.at("blk.0.attn_output.weight").counts[0], 8);  // windows

  const ProgramResult quantized = run_program({"quantize", "-m", kModel, "-o", out, "--type", "q4_0", "--imatrix", two});
  EXPECT_EQ(quantized.code, 0) << quantized.err;
  EXPECT_EQ(GgufFile::open(out)->string("quantize.imatrix.file"), two);
  EXPECT_EQ(GgufFile::open(out)->string("quantize.imatrix.dataset"), kText);
}

// Where the CPU has tiles for bf16, too: nothing is rounded to bf16 for this.
TEST(ImatrixCommand, TheCpuGathersWhatTheReferenceDoes) {
  const TempDir folder;
  const auto gather = [&](const std::string& device) {
    const std::string out = folder.path() / (device + ".gguf");
    const ProgramResult result =
        run_program({"imatrix", "-m", kModel, "-f", kText, "-o", out, "--window", "64", "--windows", "2", "--device", device});
    EXPECT_EQ(result.code, 0) << result.err;
    return ImportanceMatrix::read(out);
  };
  const ImportanceMatrix cpu = gather("cpu"), ref = gather("ref");
  ASSERT_EQ(cpu.entries.size(), ref.entries.size());
  for (const auto& [name, entry] : ref.entries) {
    const std::vector<float>&sums = entry.sums, &others = cpu.entries.at(name).sums;
    ASSERT_EQ(sums.size(), others.size()) << name;
    double difference = 0.0, total = 0.0;
    for (size_t i = 0; i < sums.size(); ++i) difference += std::abs(sums[i] - others[i]), total += sums[i];
    EXPECT_LE(difference, 1e-5 * total) << name;
  }
}

TEST(ImatrixCommand, TellsWhatIsMissing) {
  const TempDir folder;
  const std::string file = folder.path() / "part.gguf", out = folder.path() / "q.gguf";
  ImportanceMatrix part;
  part.chunk_size = 64;
  part.entries["blk.0.attn_kv_a_mqa.weight"] = {std::vector<float>(256, 1.0f), {64}};
  part.write(file, ImatrixFormat::gguf);
  const std::vector<std::string> command{"quantize",        "-m",        kModel, "-o", out, "--type", "q4_0", "--rule",
                                         "*attn_k_b*=q4_0", "--imatrix", file};
  const ProgramResult result = run_program(command);
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("no entry for blk.0.attn_output.weight: its errors are not weighted"));
  EXPECT_THAT(result.err, HasSubstr("no entry for blk.0.attn_k_b.weight: kept as q8_0"));
  const auto gguf = GgufFile::open(out);
  const auto k_b = std::find_if(gguf->tensors().begin(), gguf->tensors().end(),
                                [](const TensorInfo& tensor) { return tensor.name == "blk.0.attn_k_b.weight"; });
  ASSERT_NE(k_b, gguf->tensors().end());
  EXPECT_EQ(k_b->format, Format::q8_0);
  part.entries["blk.0.attn_kv_a_mqa.weight"].sums.pop_back();
  part.write(file, ImatrixFormat::gguf);
  const ProgramResult wrong = run_program(command);
  EXPECT_EQ(wrong.code, 1);
  EXPECT_THAT(wrong.err, HasSubstr("blk.0.attn_kv_a_mqa.weight: found 255 numbers, expected 256"));
}

TEST(ImatrixCommand, RefusesBadInput) {
  const TempDir folder;
  const std::string out = folder.path() / "i.gguf";
  EXPECT_THAT(run_program({"imatrix", "-o", out}).err, HasSubstr("expected text (-f) or importance matrices to merge"));
  EXPECT_THAT(run_program({"imatrix", "-f", kText, "-o", out}).err, HasSubstr("-m: expected a model"));
  EXPECT_THAT(run_program({"imatrix", "-m", kModel, "-f", folder.write("short.txt", "few words"), "-o", out}).err,
              HasSubstr("fewer than one window of 512"));
  EXPECT_THAT(run_program({"imatrix", "--in-file", folder.write("no.dat", "abc"), "-o", out}).err, HasSubstr("no.dat: number of entries"));
  EXPECT_THAT(run_program({"imatrix", "--in-file", out, "-o", folder.write("there.gguf", "")}).err, HasSubstr("is there already"));
  EXPECT_THAT(run_program({"quantize", "-m", kModel, "-o", folder.path() / "q.gguf", "--method", "awq", "--imatrix", out}).err,
              HasSubstr("--imatrix: awq scales columns"));
  EXPECT_FALSE(std::filesystem::exists(out));
}

}  // namespace
}  // namespace cachalot::test
