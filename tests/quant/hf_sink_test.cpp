// Directories (and files) of quantized models: what is written is read back bit for bit in every format and family, runs like the model in
// memory, can go on after an interruption, and leaves nothing half made when the disk is full.
#include "quant/hf_sink.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <fstream>

#include "convert/gguf_convert.h"
#include "convert/hf_config.h"
#include "convert/hf_view.h"
#include "quant/quantized_model.h"

namespace cachalot::test {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

void expect_equal(const LinearSource& a, const LinearSource& b) {
  ASSERT_EQ(a.n_matrices(), b.n_matrices());
  std::vector<float> x(static_cast<size_t>(a.in)), y(x.size());
  for (int m = 0; m < a.n_matrices(); ++m)
    for (int r = 0; r < a.out; ++r) {
      dequant_row_by_input(a, m, r, x.data());
      dequant_row_by_input(b, m, r, y.data());
      ASSERT_EQ(x, y) << a.name << " " << m << " " << r;
    }
}

std::map<std::string, std::string> files_in(const fs::path& folder) {
  std::map<std::string, std::string> out;
  for (const auto& entry : fs::directory_iterator(folder)) {
    std::ifstream file(entry.path(), std::ios::binary);
    out[entry.path().filename().string()] = std::string(std::istreambuf_iterator<char>(file), {});
  }
  return out;
}

struct Case {
  FileFormat format;
  const char* type;
  Method method = Method::rtn;
};
class EveryFormat : public testing::TestWithParam<Case> {};

TEST_P(EveryFormat, IsReadBackBitForBitAndRunsAlike) {
  for (const char* model : {"deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "llama-gqa", "llama3-rope", "qwen2", "qwen3"}) {
    SCOPED_TRACE(model);
    Writing run(model, GetParam().format, GetParam().type, GetParam().method);
    const TempDir folder;
    const fs::path out = folder.path() / "model";
    run.go(out);
    EXPECT_FALSE(fs::exists(folder.path() / "model.partial"));
    EXPECT_FALSE(fs::exists(out / "cachalot-quantize.json"));
    const auto written = Checkpoint::open(out);
    EXPECT_THAT(written->unmapped(), testing::IsEmpty());
    int quantized = 0;
    for (const PlannedMatrix& p : run.quantizer->planned()) {
      const ModelMatrix& m = p.matrix;
      const LinearSource found = written->linear(m.name, m.n_matrices, m.out, m.in);
      expect_equal(run.quantizer->quantized().linear(m.name, m.n_matrices, m.out, m.in), found);
      quantized += is_float(p.scheme.format) ? 0 : 1;
      EXPECT_EQ(found.format, p.scheme.format) << m.name;
    }
    EXPECT_GT(quantized, 6);
    const std::vector<int> ids(30, 7);
    TestModel file = load_model(out, make_cpu_ops({.n_threads = 2, .bf16_prompts = false}));
    TestModel memory{make_cpu_ops({.n_threads = 2, .bf16_prompts = false}), run.config, {}};
    memory.decoder = Decoder::load(run.quantizer->quantized(), run.config, *memory.ops, {.max_positions = 64});
    EXPECT_EQ(run_logits(file, ids), run_logits(memory, ids));
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, EveryFormat,
                         testing::Values(Case{FileFormat::awq, "int4-g32-zp"}, Case{FileFormat::awq, "int4-g32-zp", Method::awq},
                                         Case{FileFormat::gptq, "int4-g32-sym"}, Case{FileFormat::gptq, "int8-g32-sym", Method::gptq},
                                         Case{FileFormat::gptq_v2, "int4-g32-zp"}, Case{FileFormat::gptq_v2, "int8-row-zp"},
                                         Case{FileFormat::compressed_tensors, "int4-g32-sym"},
                                         Case{FileFormat::compressed_tensors, "int4-g32-zp"},
                                         Case{FileFormat::compressed_tensors, "int8-row-sym"}, Case{FileFormat::fp8, "fp8"}),
                         [](const auto& test) {
                           std::string name =
                               std::string(name_of(test.param.format)) + "_" + test.param.type + "_" + name_of(test.param.method);
                           std::replace_if(
                               name.begin(), name.end(), [](char c) { return std::isalnum(c) == 0; }, '_');
                           return name;
                         });

TEST(HfSink, SplitsIntoShards) {
  Writing run("deepseek-v3", FileFormat::awq, "int4-g32-zp");
  run.shard_bytes = 60000;
  const TempDir folder;
  run.go(folder.path() / "m");
  EXPECT_TRUE(fs::exists(folder.path() / "m/model.safetensors.index.json"));
  int shards = 0;
  for (const auto& [name, text] : files_in(folder.path() / "m")) shards += name.ends_with(".safetensors") ? 1 : 0;
  EXPECT_GT(shards, 3);
  EXPECT_THAT(Checkpoint::open(folder.path() / "m")->unmapped(), testing::IsEmpty());
}

TEST(GgufSink, GoesOnWhereItWasInterrupted) {
  for (const char* model : {"deepseek-v3", "llama-gqa"}) {
    const TempDir folder;
    Writing whole(model, FileFormat::gguf, "q4_0", Method::gptq), broken(model, FileFormat::gguf, "q4_0", Method::gptq),
        again(model, FileFormat::gguf, "q4_0", Method::gptq);
    whole.go(folder.path() / "whole.gguf");
    EXPECT_THAT(error_of([&] { broken.go(folder.path() / "m.gguf", PartialRun::Start::fresh, 2); }), HasSubstr("broken off"));
    EXPECT_FALSE(fs::exists(folder.path() / "m.gguf"));
    again.go(folder.path() / "m.gguf", PartialRun::Start::resume);
    EXPECT_FALSE(fs::exists(folder.path() / "m.gguf.partial"));
    const auto files = files_in(folder.path());
    EXPECT_TRUE(files.at("m.gguf") == files.at("whole.gguf")) << model;
    EXPECT_EQ(again.report.domains.back().divergence.kl, whole.report.domains.back().divergence.kl);
  }
}

// What was begun and not got as far as one piece is no reason to ask.
TEST(PartialRun, BeginsAnewWhereNothingIsFinished) {
  const TempDir folder;
  const fs::path out = folder.path() / "m";
  { const PartialRun first(out, {{"a", 1}}, PartialRun::Start::fresh); }
  PartialRun second(out, {{"a", 2}}, PartialRun::Start::fresh);
  second.save(0, {});
  EXPECT_THAT(error_of([&] { const PartialRun third(out, {{"a", 2}}, PartialRun::Start::fresh); }), HasSubstr("--resume goes on with it"));
  const PartialRun fourth(out, {{"a", 2}}, PartialRun::Start::resume);
  EXPECT_EQ(fourth.layers_done(), 0);
  std::ofstream(folder.path() / "m.partial/cachalot-quantize.json") << "{";
  EXPECT_THAT(error_of([&] {
                const PartialRun fifth(out, {{"a", 2}}, PartialRun::Start::resume);
              }),
              HasSubstr("not the state of an interrupted run"));
}

TEST(HfSink, GoesOnWhereItWasInterrupted) {
  for (const Method method : {Method::rtn, Method::awq_gptq}) {
    const TempDir folder;
    Writing whole("deepseek-v3", FileFormat::awq, "int4-g32-zp", method);
    whole.shard_bytes = 60000;
    whole.go(folder.path() / "whole");
    Writing broken("deepseek-v3", FileFormat::awq, "int4-g32-zp", method);
    broken.shard_bytes = 60000;
    const fs::path out = folder.path() / "m";
    EXPECT_THAT(error_of([&] { broken.go(out, PartialRun::Start::fresh, 1); }), HasSubstr("broken off"));
    EXPECT_FALSE(fs::exists(out));
    EXPECT_TRUE(fs::exists(folder.path() / "m.partial"));

    Writing again("deepseek-v3", FileFormat::awq, "int4-g32-zp", method);
    again.shard_bytes = 60000;
    EXPECT_THAT(error_of([&] { again.go(out); }), HasSubstr("--resume goes on with it, --force begins anew"));
    Writing other("deepseek-v3", FileFormat::awq, "int4-g32-zp", Method::gptq);
    EXPECT_THAT(error_of([&] { other.go(out, PartialRun::Start::resume); }),
                testing::AllOf(HasSubstr("--method: found"), HasSubstr("expected \"gptq\""), HasSubstr("would make another model")));
    again.go(out, PartialRun::Start::resume);
    EXPECT_EQ(files_in(out), files_in(folder.path() / "whole"));
    ASSERT_EQ(again.report.matrices.size(), whole.report.matrices.size());
    for (size_t i = 0; i < whole.report.matrices.size(); ++i) EXPECT_EQ(again.report.matrices[i].error, whole.report.matrices[i].error);
    EXPECT_EQ(again.report.domains.back().divergence.kl, whole.report.domains.back().divergence.kl);
    EXPECT_THAT(error_of([&] { again.go(folder.path() / "none", PartialRun::Start::resume); }), HasSubstr("no run was interrupted"));
  }
}

// A file that may not grow stands for a disk that is full.
TEST(HfSink, SaysThatTheDiskIsFullAndLeavesNothingUnderTheName) {
  const TempDir folder;
  const fs::path out = folder.path() / "m";
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{.rlim_cur = 50000, .rlim_max = before.rlim_max};
  Writing run("deepseek-v3", FileFormat::awq, "int4-g32-zp");
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string error = error_of([&] { run.go(out); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(error, testing::AllOf(HasSubstr("model.safetensors"), HasSubstr("File too large")));
  EXPECT_FALSE(fs::exists(out));
  run.go(out, PartialRun::Start::anew);
  EXPECT_TRUE(fs::exists(out / "model.safetensors"));
}

TEST(HfSink, ReplacesADirectoryOnlyWhenAllIsThere) {
  const TempDir folder;
  const fs::path out = folder.path() / "m";
  fs::create_directories(out);
  std::ofstream(out / "old") << "old";
  Writing run("qwen2", FileFormat::gptq, "int4-g32-sym");
  EXPECT_THAT(error_of([&] { run.go(out, PartialRun::Start::anew, 1); }), HasSubstr("broken off"));
  EXPECT_TRUE(fs::exists(out / "old"));
  run.go(out, PartialRun::Start::anew);
  EXPECT_FALSE(fs::exists(out / "old"));
  EXPECT_TRUE(fs::exists(out / "quantize_config.json"));
}

// Through a GGUF file and back: the same tensors, and a config.json with the same facts.
TEST(HfView, AGgufFileGivesWhatItsOriginalGives) {
  for (const char* model : {"deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "llama-gqa", "llama3-rope", "qwen2", "qwen3"}) {
    SCOPED_TRACE(model);
    const TempDir folder;
    Writing direct(model, FileFormat::gptq, "int4-g32-sym");
    convert_to_gguf(*direct.original, folder.path() / "m.gguf", {.format = Format::bf16, .progress = {}});
    direct.go(folder.path() / "direct");
    Writing through(model, FileFormat::gptq, "int4-g32-sym");
    const auto file = Checkpoint::open(folder.path() / "m.gguf");
    through.config = read_config(*file);
    through.original = make_hf_view(*file, through.config);
    through.go(folder.path() / "through");
    const auto a = Checkpoint::open(folder.path() / "direct"), b = Checkpoint::open(folder.path() / "through");
    ASSERT_EQ(a->tensors().size(), b->tensors().size());
    for (const PlannedMatrix& p : direct.quantizer->planned()) {
      const ModelMatrix& m = p.matrix;
      expect_equal(a->linear(m.name, m.n_matrices, m.out, m.in), b->linear(m.name, m.n_matrices, m.out, m.in));
    }
    const std::vector<int> ids(20, 9);
    TestModel one = load_model(folder.path() / "direct", make_cpu_ops({.n_threads = 2, .bf16_prompts = false})),
              two = load_model(folder.path() / "through", make_cpu_ops({.n_threads = 2, .bf16_prompts = false}));
    EXPECT_LE(max_abs_difference(run_logits(one, ids), run_logits(two, ids)), 1e-4f);
    EXPECT_EQ(one.config.rope.scaling, two.config.rope.scaling);
    EXPECT_EQ(one.config.tied_head, two.config.tied_head);
  }
}

TEST(HfConfig, RefusesFrequencyFactorsWithoutAName) {
  Config config;
  config.rope.dim = 4;
  config.rope.freq_factors = {1.0f, 7.0f};
  EXPECT_THAT(error_of([&] { make_hf_config(config); }), HasSubstr("rope_freqs.weight: found frequency factors of the file's own"));
}

TEST(FitRecipe, RefusesWhatAFormatCannotHold) {
  const auto refusal = [](FileFormat format, const char* type) {
    Writing run("deepseek-v3", format, type);
    return error_of([&] { fit_recipe(format, run.config, *run.original, run.recipe); });
  };
  EXPECT_THAT(refusal(FileFormat::awq, "int8-g32-zp"), HasSubstr("int8 g32 zp has no place in awq files: expected int4"));
  EXPECT_THAT(refusal(FileFormat::awq, "q4_k"), HasSubstr("q4_k has no place in awq files"));
  EXPECT_THAT(refusal(FileFormat::gptq, "int4-g32-zp"), HasSubstr("expected a symmetric type"));
  EXPECT_THAT(refusal(FileFormat::fp8, "int4-g32-zp"), HasSubstr("expected fp8"));
  EXPECT_THAT(refusal(FileFormat::compressed_tensors, "fp8"), HasSubstr("expected int4 or int8"));
}

TEST(FitRecipe, KeepsWhatDoesNotDivideAndSaysSo) {
  Writing run("deepseek-v3", FileFormat::awq, "int4-g32-zp");
  const std::vector<std::string> notes = fit_recipe(run.format, run.config, *run.original, run.recipe);
  EXPECT_THAT(notes, testing::Contains(testing::AllOf(HasSubstr("blk.1.ffn_down_exps.weight"), HasSubstr("kept as bf16"))));
  const auto json = quantization_config(FileFormat::awq, run.config, plan(run.recipe, run.config), {});
  EXPECT_THAT(json["modules_to_not_convert"].get<std::vector<std::string>>(),
              testing::IsSupersetOf({"lm_head", "model.layers.1.mlp.experts.7.down_proj", "model.layers.0.self_attn.q_b_proj"}));
}

}  // namespace
}  // namespace cachalot::test
