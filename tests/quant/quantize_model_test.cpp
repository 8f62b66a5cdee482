// Whole models: AWQ's folding keeps the function of every family, what is written is what was measured, methods beat rounding on a trained
// model, and plans, texts and reports say what they should.
#include "quant/quantize_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "base/mapped_file.h"
#include "cpu/cpu_ops.h"
#include "io/gguf.h"
#include "quant/gguf_sink.h"
#include "quant/report.h"
#include "support/golden.h"
#include "support/support.h"
#include "text/tokenizer.h"

namespace cachalot::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TokenStream stream_of(const std::vector<int>& ids, int window, int domain = 0) {
  TokenStream stream{.window = window};
  append_windows(stream, ids, domain, 0, 0);
  return stream;
}

struct Quantized {
  std::unique_ptr<Checkpoint> checkpoint;
  Config config;
  std::unique_ptr<Ops> ops = make_cpu_ops({.n_threads = 2, .bf16_prompts = false});
  ThreadPool pool{2};
  std::unique_ptr<LayerQuantizer> quantizer;
  QuantizeReport report;

  Quantized(const std::filesystem::path& model, const Recipe& recipe, TokenStream calibration, TokenStream held_out,
            const std::vector<QuantizeSink*>& sinks = {})
      : checkpoint(Checkpoint::open(model)), config(read_config(*checkpoint)) {
    quantizer = std::make_unique<LayerQuantizer>(*checkpoint, config, *ops, pool, recipe, held_out.window);
    report = quantize_model(*quantizer, *checkpoint, config, *ops, recipe, calibration, held_out, {"text"}, sinks, {.keep = true});
  }
};

class EveryFamily : public testing::TestWithParam<std::string> {};

TEST_P(EveryFamily, ChannelScalesKeepTheFunction) {
  const auto model = testdata("golden/" + GetParam());
  const Golden golden = read_golden(model);
  Recipe recipe;
  recipe.method = Method::awq;
  recipe.meet_earlier_errors = false;
  recipe.scheme = {Format::int8_planar, 32, false};
  const TokenStream text = stream_of(golden.input_ids, 48);
  const Quantized run(model, recipe, text, text);
  EXPECT_LT(run.report.domains.back().divergence.kl, 2e-3);
  Recipe rtn = recipe;
  rtn.method = Method::rtn;
  const Quantized plain(model, rtn, text, text);
  EXPECT_LT(run.report.domains.back().divergence.kl, 3.0 * plain.report.domains.back().divergence.kl + 1e-6);
}

INSTANTIATE_TEST_SUITE_P(Golden, EveryFamily,
                         testing::Values("deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "llama-gqa", "llama-mha", "qwen2", "qwen3"),
                         [](const auto& family) {
                           std::string name = family.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// The model with keys and values of a head for each query head of a group: the same function, whose values can take the factors of the
// attention's output.
void give_each_head_its_own_values(Overlay& model, Config& config) {
  const int group = config.n_heads / config.n_kv_heads, head = config.head_dim, out = config.n_heads * head;
  ThreadPool pool(1);
  // Rows of `width`, those of each head `group` times.
  const auto repeated = [&](const std::vector<float>& rows, int width) {
    const auto size = static_cast<ptrdiff_t>(head) * width;
    std::vector<float> all;
    for (int h = 0; h < config.n_heads; ++h) {
      const auto from = rows.begin() + h / group * size;
      all.insert(all.end(), from, from + size);
    }
    return all;
  };
  for (int l = 0; l < config.n_layers; ++l)
    for (const char* kind : {"attn_k", "attn_v"}) {
      const std::string name = "blk." + std::to_string(l) + "." + kind, weight = name + ".weight", bias = name + ".bias";
      const int rows = config.n_kv_heads * head;
      const std::vector<float> values = dequant_matrix(model.linear(weight, 1, rows, config.hidden), 0, pool);
      model.put(weight, make_linear_source(weight, Format::f32, repeated(values, config.hidden), 1, out, config.hidden));
      if (config.qkv_bias) model.put(bias, repeated(model.vector(bias, rows), 1));
    }
  config.n_kv_heads = config.n_heads;
}

class EveryDenseFamily : public testing::TestWithParam<std::tuple<std::string, bool>> {};

TEST_P(EveryDenseFamily, ChannelScalesChangeNoLogit) {
  const auto& [name, own_values] = GetParam();
  const auto path = testdata("golden/" + name);
  const Golden golden = read_golden(path);
  const auto checkpoint = Checkpoint::open(path);
  Config config = read_config(*checkpoint);
  Overlay model(*checkpoint);
  if (own_values) give_each_head_its_own_values(model, config);
  Recipe recipe;
  recipe.method = Method::awq;
  recipe.scheme = {Format::int4_planar, 32, false};
  const auto ops = make_cpu_ops({.n_threads = 2, .bf16_prompts = false});
  ThreadPool pool(2);
  LayerQuantizer quantizer(model, config, *ops, pool, recipe, 48);
  TokenStream text = stream_of(golden.input_ids, 48), none{.window = 48};
  quantize_model(quantizer, model, config, *ops, recipe, text, none, {"text"}, {}, {.keep = true});

  const auto logits_of = [&](const Checkpoint& weights) {
    TestModel loaded{make_ref_ops(), config, {}};
    loaded.decoder = Decoder::load(weights, config, *loaded.ops);
    return run_logits(loaded, golden.input_ids);
  };
  const std::vector<float> before = logits_of(model), after = logits_of(quantizer.smooth());
  EXPECT_LT(max_abs_difference(before, golden.logits), 1e-3f * max_abs(golden.logits));
  EXPECT_LT(max_abs_difference(before, after), 1e-5f * max_abs(before));
  // The scales are not all ones, and reach the biases of values just where values take them.
  EXPECT_TRUE(quantizer.smooth().vectors().contains("blk.0.attn_norm.weight"));
  EXPECT_GT(max_abs_difference(quantizer.smooth().vector("blk.0.attn_norm.weight", config.hidden),
                               model.vector("blk.0.attn_norm.weight", config.hidden)),
            0.01f);
  EXPECT_EQ(quantizer.smooth().vectors().contains("blk.0.attn_v.bias"), config.qkv_bias && own_values);
  EXPECT_FALSE(quantizer.smooth().vectors().contains("blk.0.attn_q.bias"));
}

INSTANTIATE_TEST_SUITE_P(Golden, EveryDenseFamily,
                         testing::Combine(testing::Values("llama-gqa", "llama-mha", "qwen2", "qwen3"), testing::Bool()),
                         [](const auto& param) {
                           std::string name = std::get<0>(param.param);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name + (std::get<1>(param.param) ? "_with_values_of_each_head" : "");
                         });

TEST(QuantizeModel, TheFileHoldsWhatWasMeasured) {
  for (const char* name : {"deepseek-v3", "llama-gqa", "qwen2"}) {
    const auto model = testdata(std::string("golden/") + name);
    const Golden golden = read_golden(model);
    const TempDir folder;
    const auto file = folder.path() / "q.gguf";
    Recipe recipe;
    recipe.scheme = {Format::q4_0};
    recipe.importance = false;
    recipe.split_kv_b = std::string(name).starts_with("deepseek");
    const auto original = Checkpoint::open(model);
    GgufSink sink(*original, file, gguf_file_type("q4_0"), {{"cachalot.quantize.method", "rtn"}});
    const TokenStream text = stream_of(golden.input_ids, 48);
    Quantized run(model, recipe, TokenStream{.window = 48}, text, {&sink});

    TestModel written = load_model(file, make_cpu_ops({.n_threads = 2, .bf16_prompts = false}));
    std::vector<int> ids(golden.input_ids.begin(), golden.input_ids.begin() + 40);
    TestModel memory{make_cpu_ops({.n_threads = 2, .bf16_prompts = false}), run.config,
                     Decoder::load(run.quantizer->quantized(), run.config, *run.ops, {.max_positions = 96})};
    memory.ops = std::move(run.ops);
    EXPECT_LE(max_abs_difference(run_logits(written, ids), run_logits(memory, ids)), 2e-3f) << name;
    EXPECT_EQ(Checkpoint::open(file)->gguf()->integer("general.file_type"), 2);
  }
}

std::string text_of(const char* domain, const char* file) {
  const auto mapped = MappedFile::open(testdata(std::string("text/") + domain + "/" + file));
  return {reinterpret_cast<const char*>(mapped->bytes().data()), std::min<size_t>(mapped->bytes().size(), 120000)};
}

// One domain, few tokens: enough to tell the methods apart.
TEST(QuantizeModel, MethodsBeatRoundingOnATrainedModel) {
  const auto model = testdata("tiny-v2");
  const auto checkpoint = Checkpoint::open(model);
  const Tokenizer tokenizer = Tokenizer::from_json(checkpoint->tokenizer_json(), "tokenizer.json", {});
  TokenStream calibration = stream_of(tokenizer.encode(text_of("docs", "calib.txt")), 256);
  TokenStream held_out{.window = 256};
  append_windows(held_out, tokenizer.encode(text_of("docs", "eval.txt")), 0, 0, 8);
  const bool full = std::getenv("CACHALOT_FULL_TESTS") != nullptr;
  const int windows = full ? 128 : 32;
  calibration.domain.resize(static_cast<size_t>(std::min(windows, calibration.n_windows())));
  calibration.inputs.resize(static_cast<size_t>(calibration.n_tokens()));
  calibration.targets.resize(static_cast<size_t>(calibration.n_tokens()));
  const auto kl = [&](Method method, RangeSearch search) {
    Recipe recipe;
    recipe.method = method;
    recipe.search = search;
    recipe.scheme = {Format::int4_planar, 128, false};
    const Quantized run(model, recipe, calibration, held_out);
    return run.report.domains.back().divergence.kl;
  };
  const double rtn = kl(Method::rtn, RangeSearch::span);
  EXPECT_GT(rtn, 0.05);
  EXPECT_LT(rtn, 0.2);
  EXPECT_LT(kl(Method::gptq, RangeSearch::fit), 0.5 * rtn);
  if (full) {
    EXPECT_LT(kl(Method::awq, RangeSearch::fit), 0.75 * rtn);
    EXPECT_LT(kl(Method::awq_gptq, RangeSearch::fit), 0.5 * rtn);
  }
}

TEST(Plan, FallsBackWhereWidthsDoNotDivide) {
  EXPECT_EQ(fallback({Format::int4_planar, 128}, 10944), (Scheme{Format::int4_planar, 64}));
  EXPECT_EQ(fallback({Format::int4_planar, 128}, 1408), (Scheme{Format::int4_planar, 128}));
  EXPECT_EQ(fallback({Format::int4_planar, 128}, 576), (Scheme{Format::int4_planar, 64}));
  EXPECT_EQ(fallback({Format::q4_k}, 1408), (Scheme{Format::q5_0}));
  EXPECT_EQ(fallback({Format::q6_k}, 576), (Scheme{Format::q8_0}));
  EXPECT_EQ(fallback({Format::q4_k}, 40), (Scheme{Format::f16}));
  EXPECT_EQ(scheme_of_name("int4-g64-sym"), (Scheme{Format::int4_planar, 64, true}));
  EXPECT_EQ(scheme_of_name("int8 row"), (Scheme{Format::int8_planar, 0, false}));
  EXPECT_FALSE(scheme_of_name("int4-g48").has_value());
  EXPECT_NEAR(bits_per_weight({Format::int4_planar, 128, false}, 2048), 4.15625, 1e-9);
  EXPECT_TRUE(glob_matches("blk.*.attn_?_b.weight", "blk.12.attn_v_b.weight"));
  EXPECT_FALSE(glob_matches("blk.*.attn_?_b.weight", "blk.12.attn_kv_b.weight"));
}

TEST(Plan, RouterAndNormsAreNeverInIt) {
  const auto checkpoint = Checkpoint::open(testdata("golden/deepseek-v3"));
  Recipe recipe;
  recipe.scheme = {Format::q4_0};
  recipe.rules.push_back({"*ffn_gate_inp*", {Format::q4_0}});
  for (const PlannedMatrix& p : plan(recipe, read_config(*checkpoint))) {
    EXPECT_EQ(p.matrix.name.find("norm"), std::string::npos);
    EXPECT_EQ(p.matrix.name.find("ffn_gate_inp"), std::string::npos);
  }
}

TEST(Calibration, ReadsDomainsAndDropsRepeats) {
  const auto checkpoint = Checkpoint::open(testdata("tiny-v2"));
  const Tokenizer tokenizer = Tokenizer::from_json(checkpoint->tokenizer_json(), "tokenizer.json", {});
  const std::string text = text_of("docs", "calib.txt");
  const auto set =
      make_calibration_set(tokenizer, {{"docs", "docs.txt", {text, text}}, {"code", "code.txt", {text_of("code", "calib.txt")}}},
                           {.window = 128, .tokens = 16384, .held_out_windows = 3, .bos_id = 0});
  EXPECT_GT(set.domains[0].duplicates, 100);
  EXPECT_EQ(set.domains[0].used, 8192);
  EXPECT_EQ(set.domains[1].used, 8192);
  EXPECT_EQ(set.held_out.n_windows(), 6);
  EXPECT_EQ(set.calibration.n_tokens(), 16384);
  EXPECT_EQ(set.calibration.inputs[0], 0);
  EXPECT_EQ(set.calibration.inputs[1], set.calibration.targets[0]);
}

TEST(Calibration, RefusesNoiseAndTooLittle) {
  const auto checkpoint = Checkpoint::open(testdata("tiny-v2"));
  const Tokenizer tokenizer = Tokenizer::from_json(checkpoint->tokenizer_json(), "tokenizer.json", {});
  std::mt19937 random(1);
  std::string noise;
  for (int i = 0; i < 60000; ++i) noise.push_back(static_cast<char>(33 + random() % 90));
  EXPECT_THAT(error_of([&] {
                (void)make_calibration_set(tokenizer, {{"noise", "noise.txt", {noise}}}, {.window = 64, .bos_id = 0});
              }),
              HasSubstr("noise.txt: looks random"));
  EXPECT_THAT(error_of([&] {
                (void)make_calibration_set(tokenizer, {{"few", "few.txt", {"a few words"}}}, {.window = 64, .bos_id = 0});
              }),
              HasSubstr("few.txt: 0 tokens to calibrate on in whole windows of 64, expected at least 8192"));
  // A text that only repeats itself is too small, and the message says why.
  const std::string paragraph = text_of("docs", "calib.txt").substr(0, 3000) + "\n\n";
  std::string repeated;
  for (int i = 0; i < 40; ++i) repeated += paragraph;
  EXPECT_THAT(error_of([&] {
                (void)make_calibration_set(tokenizer, {{"again", "again.txt", {repeated}}}, {.window = 64, .bos_id = 0});
              }),
              AllOf(HasSubstr("again.txt: "), HasSubstr("repeated paragraphs were dropped")));
  // One text of several that gives nothing is an error of its own, not a domain silently left out.
  EXPECT_THAT(error_of([&] {
                (void)make_calibration_set(tokenizer, {{"docs", "docs.txt", {text_of("docs", "calib.txt")}}, {"none", "none.txt", {""}}},
                                           {.window = 64, .bos_id = 0});
              }),
              HasSubstr("none.txt: "));
}

TEST(Calibration, ReadsJsonLines) {
  const std::string lines =
      "{\"text\": \"one\"}\n\n{\"prompt\": \"two \", \"completion\": \"three\"}\n{\"messages\": [{\"role\": \"user\", \"content\": "
      "\"four\"}]}\n";
  EXPECT_EQ(documents_of("a.jsonl", lines, nullptr), (std::vector<std::string>{"one", "two three", "four\n"}));
  EXPECT_EQ(documents_of("a.jsonl", lines, [](const std::string&) { return "rendered"; })[2], "rendered");
  EXPECT_THAT(error_of([] { (void)documents_of("a.jsonl", "{\"text\": \"x\"}\n{\"txt\": 1}", nullptr); }),
              HasSubstr("a.jsonl: line 2: found none of"));
  EXPECT_THAT(error_of([] { (void)documents_of("a.jsonl", "nonsense", nullptr); }), HasSubstr("line 1: expected a JSON object"));
}

TEST(Report, NamesTheDomainThatWasNotCalibratedOn) {
  QuantizeReport report;
  report.domains = {
      {"english", {.tokens = 100, .kl = 0.034}}, {"legal", {.tokens = 100, .kl = 0.041}}, {"all", {.tokens = 200, .kl = 0.0375}}};
  report.experts = {{1, 0, 500, false}, {1, 1, 3, true}};
  ReportContext context;
  DomainStats english;
  english.domain = "english";
  english.used = 1000;
  context.calibration.push_back(english);
  const std::vector<std::string> lines = advice(report, context);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_THAT(lines[0], HasSubstr("add --domain legal=FILE"));
  EXPECT_THAT(lines[1], HasSubstr("1 of 2 experts"));
  EXPECT_THAT(report_markdown(report, context), HasSubstr("| 1 | 3 | 500 | 1 (3) |"));
  EXPECT_EQ(report_json(report, context)["advice"].size(), 2u);
}

}  // namespace
}  // namespace cachalot::test
