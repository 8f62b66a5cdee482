// Importance matrices: sums that agree with what the layers' inputs are, both files there and back, and every kind of bad file.
#include "quant/imatrix.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>

#include "cpu/cpu_ops.h"
#include "io/gguf.h"
#include "io/gguf_writer.h"
#include "quant/imatrix_gather.h"
#include "quant/layer_quantizer.h"
#include "support/golden.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

struct Gathered {
  std::unique_ptr<Checkpoint> checkpoint;
  Config config;
  ImportanceMatrix imatrix;

  explicit Gathered(const std::string& name, GatherOptions options = {.window = 32, .head = true})
      : checkpoint(Checkpoint::open(testdata("golden/" + name))), config(read_config(*checkpoint)) {
    const auto ops = make_cpu_ops({.n_threads = 2, .bf16_prompts = false});
    imatrix = gather_importance(*checkpoint, config, *ops, read_golden(testdata("golden/" + name)).input_ids, options);
    imatrix.file = "imatrix.gguf";
  }
  [[nodiscard]] std::vector<PlannedMatrix> planned(bool split_kv_b) const {
    Recipe recipe;
    recipe.scheme = {Format::q4_0};
    recipe.split_kv_b = split_kv_b;
    return plan(recipe, config);
  }
};

TEST(Imatrix, FirstLayerSeesTheNormedEmbedding) {
  for (const char* name : {"llama-gqa", "deepseek-v2"}) {
    const Gathered run(name);
    const Config& c = run.config;
    const auto ids = read_golden(testdata(std::string("golden/") + name)).input_ids;
    const std::vector<float> norm = run.checkpoint->vector("blk.0.attn_norm.weight", c.hidden);
    const LinearSource table = run.checkpoint->linear("token_embd.weight", 1, c.vocab, c.hidden);
    const size_t n = ids.size() / 32 * 32, hidden = static_cast<size_t>(c.hidden);
    std::vector<double> want(hidden);
    std::vector<float> row(hidden);
    for (size_t t = 0; t < n; ++t) {
      dequant_row(table, 0, ids[t], row.data());
      double mean = 0;
      for (const float v : row) mean += static_cast<double>(v) * v / static_cast<double>(hidden);
      for (size_t k = 0; k < hidden; ++k) want[k] += std::pow(row[k] * norm[k], 2) / (mean + static_cast<double>(c.rms_eps));
    }
    const auto& entry = run.imatrix.entries.at(c.mla ? "blk.0.attn_kv_a_mqa.weight" : "blk.0.attn_q.weight");
    EXPECT_THAT(entry.counts, ElementsAre(static_cast<int64_t>(n)));
    ASSERT_EQ(entry.sums.size(), hidden);
    for (size_t k = 0; k < hidden; ++k) EXPECT_NEAR(entry.sums[k], want[k], 1e-3 * want[k] + 1e-6) << name << " " << k;
  }
}

// Every token goes to top_k experts, which read what the shared expert and the router read.
TEST(Imatrix, ExpertsShareTheTokens) {
  const Gathered run("deepseek-v3");
  const int n_experts = run.config.n_experts, top_k = run.config.router.top_k;
  const std::string prefix = "blk." + std::to_string(run.config.n_layers - 1) + ".";
  const auto& shared = run.imatrix.entries.at(prefix + "ffn_up_shexp.weight");
  const auto& router = run.imatrix.entries.at(prefix + "ffn_gate_inp.weight");
  const auto& experts = run.imatrix.entries.at(prefix + "ffn_up_exps.weight");
  EXPECT_EQ(shared.sums, router.sums);
  ASSERT_THAT(experts.counts, SizeIs(n_experts));
  int64_t tokens = 0;
  for (const int64_t count : experts.counts) tokens += count;
  EXPECT_EQ(tokens, top_k * shared.counts[0]);
  EXPECT_EQ(experts.counts, run.imatrix.entries.at(prefix + "ffn_down_exps.weight").counts);
  const size_t hidden = shared.sums.size();
  for (size_t k = 0; k < hidden; ++k) {
    double sum = 0;
    for (size_t e = 0; e < static_cast<size_t>(n_experts); ++e) sum += static_cast<double>(experts.sums[e * hidden + k]);
    EXPECT_NEAR(sum, top_k * static_cast<double>(shared.sums[k]), 1e-4 * sum + 1e-6);
  }
}

TEST(Imatrix, LatentAttentionHasEntriesOfEveryHead) {
  const Gathered run("deepseek-v2");
  const Config& c = run.config;
  EXPECT_THAT(run.imatrix.entries.at("blk.1.attn_k_b.weight").sums, SizeIs(c.n_heads * c.nope));
  EXPECT_THAT(run.imatrix.entries.at("blk.1.attn_v_b.weight").sums, SizeIs(c.n_heads * c.kv_rank));
  EXPECT_THAT(run.imatrix.entries.at("blk.1.attn_kv_b.weight").sums, SizeIs(c.kv_rank));
  EXPECT_THAT(run.imatrix.entries.at("output.weight").sums, SizeIs(c.hidden));
  for (const bool split : {false, true}) {
    const ImatrixFit fit = fit_of(run.imatrix, run.planned(split));
    EXPECT_THAT(fit.missing, IsEmpty());
    EXPECT_THAT(fit.unknown, IsEmpty());
  }
}

TEST(Imatrix, TheBeginningOfAWindowIsBosAndTheRestIsDropped) {
  const Gathered with("llama-gqa", {.window = 40, .max_windows = 1, .bos_id = 0}), without("llama-gqa", {.window = 40, .max_windows = 1});
  EXPECT_EQ(with.imatrix.chunk_count, 1);
  EXPECT_EQ(with.imatrix.chunk_size, 40);
  EXPECT_FALSE(with.imatrix.entries.contains("output.weight"));
  EXPECT_NE(with.imatrix.entries.at("blk.0.attn_q.weight").sums, without.imatrix.entries.at("blk.0.attn_q.weight").sums);
  EXPECT_THAT(error_of([] { Gathered("llama-gqa", {.window = 97}); }), HasSubstr("the text has 96 tokens, fewer than one window of 97"));
  EXPECT_THAT(error_of([] { Gathered("llama-gqa", {.window = 1 << 24}); }),
              HasSubstr("the window is 16777216 tokens, but the model runs at most"));
}

TEST(Imatrix, BothFilesThereAndBack) {
  const Gathered run("deepseek-v3");
  const TempDir folder;
  ImportanceMatrix written = run.imatrix;
  written.datasets = {"a.txt", "b.txt"};
  // An expert that no token reached.
  ImportanceMatrix::Entry& experts = written.entries.at("blk.1.ffn_down_exps.weight");
  const size_t width = experts.sums.size() / experts.counts.size();
  experts.counts[2] = 0;
  std::fill_n(experts.sums.begin() + static_cast<ptrdiff_t>(2 * width), width, 0.0f);
  written.write(folder.path() / "i.gguf", ImatrixFormat::gguf);
  written.write(folder.path() / "i.dat", ImatrixFormat::dat);

  const ImportanceMatrix gguf = ImportanceMatrix::read(folder.path() / "i.gguf"), dat = ImportanceMatrix::read(folder.path() / "i.dat");
  EXPECT_EQ(gguf.datasets, written.datasets);
  EXPECT_EQ(gguf.chunk_count, written.chunk_count);
  EXPECT_EQ(gguf.chunk_size, 32);
  ASSERT_THAT(gguf.entries, SizeIs(written.entries.size()));
  for (const auto& [name, entry] : written.entries) {
    EXPECT_EQ(gguf.entries.at(name).sums, entry.sums) << name;
    EXPECT_EQ(gguf.entries.at(name).counts, entry.counts) << name;
  }
  EXPECT_THAT(dat.datasets, ElementsAre("b.txt"));
  EXPECT_EQ(dat.chunk_count, written.chunk_count);
  EXPECT_EQ(dat.chunk_size, 0);
  ASSERT_THAT(dat.entries, SizeIs(written.entries.size()));
  for (const PlannedMatrix& p : run.planned(true))
    for (int m = 0; m < p.matrix.n_matrices; ++m) {
      const auto a = gguf.importance(p.matrix, m), b = dat.importance(p.matrix, m);
      if (p.matrix.name == "blk.1.ffn_down_exps.weight" && m == 2) {
        EXPECT_THAT(a, IsEmpty());
        EXPECT_THAT(b, testing::Each(1.0f));
        continue;
      }
      ASSERT_EQ(a.size(), b.size()) << p.matrix.name;
      for (size_t k = 0; k < a.size(); ++k) EXPECT_NEAR(a[k], b[k], 1e-5f * a[k]) << p.matrix.name;
    }
  const ImatrixFit fit = fit_of(gguf, run.planned(true));
  EXPECT_THAT(fit.neutral, ElementsAre("blk.1.ffn_down_exps.weight: matrices 2: saw no token"));
}

TEST(Imatrix, MergesByCounts) {
  ImportanceMatrix sum;
  sum.chunk_size = 100;
  ImportanceMatrix a, b, old;
  a.chunk_size = b.chunk_size = 100;
  a.chunk_count = 1;
  b.chunk_count = 3;
  a.entries["w"] = {{1, 2}, {100}};
  b.entries["w"] = {{30, 60}, {300}};
  old.entries["w"] = {{2, 4}, {2}};  // two windows with means 1 and 2
  sum.add(a);
  sum.add(b);
  EXPECT_EQ(sum.chunk_count, 4);
  EXPECT_THAT(sum.entries["w"].sums, ElementsAre(31, 62));
  EXPECT_THAT(sum.entries["w"].counts, ElementsAre(400));
  sum.add(old);
  EXPECT_THAT(sum.entries["w"].sums, ElementsAre(231, 462));
  EXPECT_THAT(sum.entries["w"].counts, ElementsAre(600));
  b.entries["w"] = {{1}, {1}};
  b.file = "b.gguf";
  EXPECT_THAT(error_of([&] { sum.add(b); }), HasSubstr("b.gguf: w: found 1 sums, expected 2"));
}

TEST(Imatrix, LatentDataStandInForEachOther) {
  ImportanceMatrix imatrix;
  imatrix.entries["blk.0.attn_v_b.weight"] = {{1, 2, 3, 6}, {2}};  // two heads of 2
  EXPECT_THAT(imatrix.importance({"blk.0.attn_kv_b.weight", 1, 8, 2}, 0), ElementsAre(1, 2));
  EXPECT_THAT(imatrix.importance({"blk.0.attn_v_b.weight", 2, 4, 2}, 1), ElementsAre(1.5f, 3));
  imatrix.entries = {{"blk.0.attn_kv_b.weight", {{4, 8}, {4}}}};
  EXPECT_THAT(imatrix.importance({"blk.0.attn_v_b.weight", 2, 4, 2}, 1), ElementsAre(1, 2));
  EXPECT_THAT(imatrix.importance({"blk.0.attn_k_b.weight", 2, 4, 2}, 1), IsEmpty());
}

TEST(Imatrix, BadNumbersWeighNothing) {
  Gathered run("llama-gqa");
  const float nan = std::numeric_limits<float>::quiet_NaN();
  run.imatrix.entries.at("blk.0.attn_q.weight").sums[3] = nan;
  run.imatrix.entries.at("blk.0.attn_k.weight").sums[5] = -1.0f;
  for (float& v : run.imatrix.entries.at("blk.0.attn_v.weight").sums) v = 0.0f;
  run.imatrix.entries.erase("blk.1.ffn_down.weight");
  run.imatrix.entries["blk.77.ffn_down.weight"] = {{1}, {1}};
  const ImatrixFit fit = fit_of(run.imatrix, run.planned(false));
  EXPECT_THAT(fit.neutral,
              ElementsAre("blk.0.attn_q.weight: not finite", "blk.0.attn_k.weight: negative", "blk.0.attn_v.weight: zero all over"));
  EXPECT_THAT(fit.missing, ElementsAre("blk.1.ffn_down.weight"));
  EXPECT_THAT(fit.unknown, ElementsAre("blk.77.ffn_down.weight"));
  EXPECT_THAT(run.imatrix.importance({"blk.0.attn_q.weight", 1, 64, run.config.hidden}, 0), IsEmpty());
}

TEST(Imatrix, RefusesAnotherModels) {
  Gathered run("llama-gqa");
  const auto planned = run.planned(false);
  run.imatrix.entries.at("blk.0.attn_q.weight").sums.pop_back();
  EXPECT_THAT(error_of([&] { (void)fit_of(run.imatrix, planned); }),
              HasSubstr("imatrix.gguf: blk.0.attn_q.weight: found " + std::to_string(run.config.hidden - 1) + " numbers, expected"));
  ImportanceMatrix other;
  other.file = "other.gguf";
  other.entries["blk.0.ssm_in.weight"] = {{1}, {1}};
  EXPECT_THAT(error_of([&] { (void)fit_of(other, planned); }), HasSubstr("other.gguf: none of its 1 entries is of this model"));
  other.entries["blk.0.attn_q.weight"] = {std::vector<float>(static_cast<size_t>(run.config.hidden)), {1, 1}};
  EXPECT_THAT(error_of([&] { (void)fit_of(other, planned); }), HasSubstr("found 2 counts, expected 1"));
}

// A GGUF file of tensors of f32 ones.
void write_gguf(const std::filesystem::path& path, const std::vector<std::pair<std::string, std::vector<int64_t>>>& tensors,
                const char* type = "imatrix", bool size = true) {
  GgufWriter out(path);
  out.set_string("general.type", type);
  out.set_u32("imatrix.chunk_count", 1);
  if (size) out.set_u32("imatrix.chunk_size", 512);
  for (const auto& [name, shape] : tensors) out.declare(name, Format::f32, shape);
  for (const auto& [name, shape] : tensors) {
    int64_t n = 1;
    for (const int64_t d : shape) n *= d;
    const std::vector<float> ones(static_cast<size_t>(n), 1.0f);
    out.write(std::as_bytes(std::span(ones)));
  }
  out.commit();
}

TEST(Imatrix, RefusesBadFilesByName) {
  const TempDir folder;
  const auto file = folder.path() / "bad";
  const auto error = [&] { return error_of([&] { (void)ImportanceMatrix::read(file); }); };
  write_gguf(file, {{"w.in_sum2", {1, 8}}, {"w.counts", {1, 1}}}, "model");
  EXPECT_THAT(error(), HasSubstr("general.type: found \"model\", expected \"imatrix\""));
  write_gguf(file, {{"w.in_sum2", {1, 8}}, {"w.counts", {1, 1}}}, "imatrix", false);
  EXPECT_THAT(error(), HasSubstr("imatrix.chunk_size is missing"));
  write_gguf(file, {{"w.in_sum2", {1, 8}}});
  EXPECT_THAT(error(), HasSubstr("w.in_sum2 has no w.counts"));
  write_gguf(file, {{"w.counts", {1, 1}}});
  EXPECT_THAT(error(), HasSubstr("w.counts has no .in_sum2"));
  write_gguf(file, {{"w.in_sum2", {1, 8}}, {"w.counts", {3, 1}}});
  EXPECT_THAT(error(), HasSubstr("w: found 8 sums for 3 counts"));
  write_gguf(file, {{"w", {1, 8}}});
  EXPECT_THAT(error(), HasSubstr("found no tensor NAME.in_sum2"));

  const auto dat = [&](std::initializer_list<std::variant<int, const char*, float>> parts) {
    std::ofstream out(file, std::ios::binary);
    for (const auto& part : parts)
      if (const char* const* text = std::get_if<const char*>(&part))
        out << *text;
      else
        out.write(reinterpret_cast<const char*>(&part), 4);
  };
  dat({0});
  EXPECT_THAT(error(), HasSubstr("number of entries: found 0, expected at least 1"));
  dat({1, 1, "w", 2, 1, 8.0f});
  EXPECT_THAT(ImportanceMatrix::read(file).importance({"w", 1, 1, 1}, 0), ElementsAre(4.0f));
  dat({1, 1, "w", 2, 1000000000, 1.0f});
  EXPECT_THAT(error(), HasSubstr("w: expected 4000000000 bytes, found 4 to the end of the file"));
  dat({1, 1, "w", 2, -3});
  EXPECT_THAT(error(), HasSubstr("w: numbers: found -3, expected at least 1"));
  dat({1, 2000000000, "w"});
  EXPECT_THAT(error(), HasSubstr("name of entry 0: found 2000000000 bytes, expected at most 1024"));
  dat({2, 1, "w", 2, 1, 1.0f, 1, "w", 2, 1, 1.0f});
  EXPECT_THAT(error(), HasSubstr("w appears twice"));
}

// Rounding weighted by a matrix leaves less of the error that the matrix counts.
TEST(Imatrix, WeighsRoundingErrors) {
  const Gathered run("deepseek-v3");
  const auto ops = make_cpu_ops({.n_threads = 2, .bf16_prompts = false});
  ThreadPool pool(2);
  auto imatrix = std::make_shared<ImportanceMatrix>(run.imatrix);
  // A column that counts a thousandfold.
  for (auto& [name, entry] : imatrix->entries)
    for (size_t k = 0; k < entry.sums.size(); k += 16) entry.sums[k] *= 1000.0f;
  const auto weighted = [&](const Recipe& recipe) {
    LayerQuantizer quantizer(*run.checkpoint, run.config, *ops, pool, recipe, 32);
    EXPECT_FALSE(quantizer.needs_calibration());
    LayerResult result;
    for (int l = 0; l < run.config.n_layers; ++l) {
      quantizer.attention(l, nullptr, nullptr, result);
      quantizer.ffn(l, nullptr, nullptr, result);
    }
    double sum = 0;
    for (const PlannedMatrix& p : quantizer.planned()) {
      if (!p.matrix.name.starts_with("blk.")) continue;
      const LinearSource now = quantizer.quantized().linear(p.matrix.name, p.matrix.n_matrices, p.matrix.out, p.matrix.in);
      for (int m = 0; m < p.matrix.n_matrices; ++m) {
        const std::vector<float> importance = imatrix->importance(p.matrix, m);
        LinearSource before;
        if (!run.checkpoint->has(p.matrix.name)) continue;  // kv_b's parts
        before = run.checkpoint->linear(p.matrix.name, p.matrix.n_matrices, p.matrix.out, p.matrix.in);
        const std::vector<float> a = dequant_matrix(before, m, pool), b = dequant_matrix(now, m, pool);
        for (size_t i = 0; i < a.size() && !importance.empty(); ++i)
          sum += static_cast<double>(importance[i % importance.size()]) * std::pow(a[i] - b[i], 2);
      }
    }
    return sum;
  };
  Recipe recipe;
  recipe.scheme = {Format::q4_0};
  recipe.split_kv_b = true;
  recipe.importance = false;
  const double plain = weighted(recipe);
  recipe.importance = true;
  recipe.imatrix = imatrix;
  EXPECT_LT(weighted(recipe), 0.7 * plain);
}

}  // namespace
}  // namespace cachalot::test
