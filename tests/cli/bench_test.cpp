// cachalot bench: its output in every form, its figures against each other and against the model's file, and refusals.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "cli/bench_run.h"
#include "cli/load_model.h"
#include "cli/program.h"
#include "io/checkpoint.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

using ::testing::HasSubstr;

std::vector<std::string> bench_arguments(std::vector<std::string> more) {
  std::vector<std::string> all{"bench", "-m", testdata("tiny-v2"), "-t", "2", "-r", "3"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::stringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

TEST(Bench, FiguresOfATestAgree) {
  const auto all =
      run_program(bench_arguments({"-p", "24", "-n", "4", "-pg", "8,4", "-d", "0,40", "-npl", "1,3", "-o", "json", "-q"})).json();
  // At each depth: the prompt, generation by one and by three sequences, and the pair.
  ASSERT_EQ(all.size(), 8u);
  for (const auto& r : all) {
    const int tokens = (r["n_prompt"].get<int>() + r["n_gen"].get<int>()) * r["n_seqs"].get<int>();
    ASSERT_EQ(r["samples_ns"].size(), 3u);
    ASSERT_EQ(r["samples_ts"].size(), 3u);
    for (size_t i = 0; i < 3; ++i) EXPECT_DOUBLE_EQ(r["samples_ts"][i].get<double>(), 1e9 * tokens / r["samples_ns"][i].get<double>());
    EXPECT_LE(r["min_ts"], r["median_ts"]);
    EXPECT_LE(r["median_ts"], r["max_ts"]);
    EXPECT_GE(r["avg_ts"], r["min_ts"]);
    EXPECT_GE(r["stddev_ts"], 0.0);
    const double seconds = tokens / r["median_ts"].get<double>();
    const double bytes = r["weight_bytes"].get<double>() + r["kv_bytes"].get<double>();
    EXPECT_NEAR(r["bw_gbs"].get<double>(), bytes / seconds * 1e-9, 1e-9 + 1e-6 * r["bw_gbs"].get<double>());
    EXPECT_NEAR(r["bw_pct_peak"].get<double>(), 100.0 * r["bw_gbs"].get<double>() / r["peak_bw_gbs"].get<double>(), 1e-6);
    EXPECT_NEAR(r["flops_pct_peak"].get<double>(), 100.0 * r["tflops"].get<double>() / r["peak_tflops"].get<double>(), 1e-6);
    EXPECT_NEAR(r["bound_pct"].get<double>(), 100.0 * r["median_ts"].get<double>() / r["bound_ts"].get<double>(), 1e-6);
    for (const char* key : {"build_commit", "build_number", "model_filename", "model_type", "model_size", "model_n_params", "n_threads",
                            "n_batch", "n_ubatch", "type_k", "avg_ns", "stddev_ns", "test_time"})
      EXPECT_TRUE(r.contains(key)) << key;
    EXPECT_EQ(r["n_threads"], 2);
  }
  const auto find = [&](int prompt, int gen, int depth, int seqs) {
    for (const auto& r : all)
      if (r["n_prompt"] == prompt && r["n_gen"] == gen && r["n_depth"] == depth && r["n_seqs"] == seqs) return r;
    ADD_FAILURE() << "no such test";
    return nlohmann::json();
  };
  // Three sequences read the weights together, but each its own cache; a depth is read by every token.
  const auto one = find(0, 4, 0, 1), three = find(0, 4, 0, 3), deep = find(0, 4, 40, 1);
  EXPECT_LT(three["weight_bytes"].get<double>(), 3 * one["weight_bytes"].get<double>());
  EXPECT_GT(three["weight_bytes"].get<double>(), one["weight_bytes"].get<double>());
  EXPECT_DOUBLE_EQ(three["kv_bytes"].get<double>(), 3 * one["kv_bytes"].get<double>());
  EXPECT_DOUBLE_EQ(deep["kv_bytes"].get<double>() / one["kv_bytes"].get<double>(), (4 * 40 + 10) / 10.0);
  EXPECT_DOUBLE_EQ(deep["weight_bytes"].get<double>(), one["weight_bytes"].get<double>());
}

TEST(Bench, TableAndLinesParse) {
  const auto table = run_program(bench_arguments({"-p", "8", "-n", "2", "-d", "0,8"}));
  ASSERT_EQ(table.code, 0) << table.err;
  EXPECT_THAT(table.err, HasSubstr("GB/s read"));
  const auto lines = lines_of(table.out);
  ASSERT_EQ(lines.size(), 2u + 4u + 2u) << table.out;
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(std::count(lines[i].begin(), lines[i].end(), '|'), 17) << lines[i];
  EXPECT_THAT(lines[0], HasSubstr("t/s"));
  EXPECT_THAT(lines[2], HasSubstr(" pp8 "));
  EXPECT_THAT(lines[5], HasSubstr(" tg2 @ d8 "));
  EXPECT_THAT(lines[7], ::testing::StartsWith("build: "));

  const auto json_lines = lines_of(run_program(bench_arguments({"-p", "8", "-n", "2", "-o", "jsonl", "-q"})).out);
  ASSERT_EQ(json_lines.size(), 2u);
  for (const std::string& line : json_lines) EXPECT_TRUE(nlohmann::json::parse(line)["avg_ts"].is_number()) << line;

  const auto csv = lines_of(run_program(bench_arguments({"-p", "8", "-n", "2", "-o", "csv", "-q", "--device", "ref"})).out);
  ASSERT_EQ(csv.size(), 3u);
  const auto commas = std::count(csv[0].begin(), csv[0].end(), ',');
  for (const std::string& line : csv) EXPECT_EQ(std::count(line.begin(), line.end(), ','), commas) << line;
}

TEST(Bench, RefusesWhatItCannotTest) {
  const auto refuse = [](const std::vector<std::string>& more, int code, const std::string& part) {
    const ProgramResult r = run_program(bench_arguments(more));
    EXPECT_EQ(r.code, code) << r.err;
    EXPECT_THAT(r.err, HasSubstr(part));
    EXPECT_EQ(r.out, "");
    EXPECT_EQ(r.error_lines(), 1u) << r.err;
  };
  refuse({"-p", "x"}, 2, "-p: found \"x\"");
  refuse({"-p", "1,"}, 2, "-p");
  refuse({"-p", "0", "-n", "0"}, 2, "nothing to test");
  refuse({"-pg", "4"}, 2, "PROMPT,GENERATED");
  refuse({"-npl", "0"}, 2, "-npl");
  refuse({"-ub", "0"}, 2, "-ub");
  refuse({"-o", "yaml"}, 2, "yaml");
  refuse({"-p", "3000"}, 1, "3000 positions, expected at most 2048");
  refuse({"--device", "tpu"}, 1, "tpu");
  const ProgramResult no_model = run_program({"bench"});
  EXPECT_EQ(no_model.code, 2);
  EXPECT_THAT(no_model.err, HasSubstr("--model"));
  EXPECT_EQ(run_program({"bench", "ops", "no-such-operation"}).code, 1);
}

TEST(Bench, OperationsAreTimed) {
  const ProgramResult r = run_program({"bench", "ops", "route/", "-t", "1", "--test-sizes"});
  ASSERT_EQ(r.code, 0) << r.err;
  const auto lines = lines_of(r.out);
  ASSERT_GT(lines.size(), 3u);
  EXPECT_THAT(lines[0], HasSubstr("TFLOP/s"));
  for (size_t i = 1; i < lines.size(); ++i) EXPECT_THAT(lines[i], ::testing::StartsWith("route/"));
}

// The count by the loaded model against one by the tensors of its file.
TEST(BenchCost, DecodeReadsTheFileOnceButForExpertsNotChosen) {
  StoredWeights stored;
  const auto path = testdata("tiny-v2");
  const LoadedModel model = load_model(
      {.path = path, .device = "ref", .show_progress = false, .on_linear = [&](std::span<const LinearSource> sources, const Linear& w) {
         stored.add(sources, w);
       }});
  const Config& c = model.config;
  const ModelCost cost(model.decoder, stored, 100.0);

  double rest = 0.0, experts = 0.0, params = 0.0;
  const auto checkpoint = Checkpoint::open(path);
  for (const TensorInfo& tensor : checkpoint->tensors()) {
    double n = 1.0;
    for (const int64_t dim : tensor.shape) n *= static_cast<double>(dim);
    const bool expert = tensor.name.find(".experts.") != std::string::npos;
    const bool in_f32 = tensor.shape.size() == 1 || tensor.name.find("mlp.gate.weight") != std::string::npos;  // kept so on the device
    (expert ? experts : rest) += n * (in_f32 ? 4.0 : 2.0);
    params += n;
  }
  ASSERT_TRUE(c.tied_head);
  EXPECT_EQ(stored.main_format(), "BF16");
  EXPECT_DOUBLE_EQ(cost.params(), params);
  EXPECT_DOUBLE_EQ(cost.stored_bytes(), rest + experts);
  const double chosen = static_cast<double>(c.router.top_k) / c.n_experts, embed_row = 2.0 * c.hidden;
  const SequenceStep first{1, 0};
  const StepCost alone = cost.step({&first, 1}, 1);
  EXPECT_DOUBLE_EQ(alone.weight_bytes, rest + embed_row + experts * chosen);
  EXPECT_DOUBLE_EQ(alone.kv_bytes, 100.0);

  // Two tokens: an expert is missed by both with probability (1 - chosen)^2. Without logits the head is not read.
  const std::vector<SequenceStep> two{{1, 0}, {1, 9}};
  const StepCost pair = cost.step(two, 0);
  const double head = 2.0 * c.vocab * c.hidden;
  EXPECT_NEAR(pair.weight_bytes, rest - head + 2 * embed_row + experts * (1 - (1 - chosen) * (1 - chosen)), 1.0);
  EXPECT_DOUBLE_EQ(pair.kv_bytes, 100.0 * (1 + 10));

  // One more row of context costs 2 (2R + S) per head and layer in the absorbed form.
  const SequenceStep later{1, 50}, next{1, 51};
  EXPECT_DOUBLE_EQ(cost.step({&next, 1}, 1).flops - cost.step({&later, 1}, 1).flops,
                   2.0 * c.n_layers * c.n_heads * (2 * c.kv_rank + c.rope.dim));
}

TEST(BenchSpread, OfSamples) {
  const Spread s = spread_of({4.0, 1.0, 7.0});
  EXPECT_DOUBLE_EQ(s.mean, 4.0);
  EXPECT_DOUBLE_EQ(s.deviation, 3.0);
  EXPECT_DOUBLE_EQ(s.median, 4.0);
  EXPECT_DOUBLE_EQ(s.least, 1.0);
  EXPECT_DOUBLE_EQ(s.most, 7.0);
  EXPECT_DOUBLE_EQ(spread_of({1.0, 2.0}).median, 1.5);
  EXPECT_DOUBLE_EQ(spread_of({5.0}).deviation, 0.0);
  EXPECT_DOUBLE_EQ(spread_of({}).mean, 0.0);
}

}  // namespace
}  // namespace cachalot::test
