// Divergence: statistics against their definitions, the file of log-probabilities byte by byte, and both ways to compare two models.
#include "eval/divergence.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <numeric>

#include "cpu/cpu_ops.h"
#include "eval/kl.h"
#include "support/golden.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr size_t kVocab = 37;

std::vector<double> softmax(std::span<const float> logits) {
  std::vector<double> p(logits.begin(), logits.end());
  double sum = 0;
  for (double& v : p) sum += v = std::exp(v);
  for (double& v : p) v /= sum;
  return p;
}

struct Pairs {
  std::vector<std::vector<float>> base, model;
  std::vector<int> tokens;
};
Pairs pairs(size_t n) {
  Pairs out;
  for (size_t i = 0; i < n; ++i) {
    out.base.push_back(random_floats(kVocab, 2 * i + 1, 2.0f));
    out.model.push_back(out.base.back());
    const std::vector<float> noise = random_floats(kVocab, 2 * i + 2, 0.3f);
    for (size_t k = 0; k < kVocab; ++k) out.model.back()[k] += noise[k];
    out.tokens.push_back(static_cast<int>(i % kVocab));
  }
  return out;
}

TEST(Divergence, StatisticsAreTheirDefinitions) {
  const size_t n = 201;
  const Pairs text = pairs(n);
  DivergenceMeter meter, second;
  std::vector<double> kl, a, b, dp;
  int agreed = 0;
  for (size_t i = 0; i < n; ++i) {
    (i < 100 ? meter : second).add(text.base[i], text.model[i], text.tokens[i]);
    const auto p = softmax(text.base[i]), q = softmax(text.model[i]);
    double sum = 0;
    for (size_t k = 0; k < kVocab; ++k) sum += p[k] * std::log(p[k] / q[k]);
    kl.push_back(sum);
    const auto t = static_cast<size_t>(text.tokens[i]);
    a.push_back(-std::log(p[t]));
    b.push_back(-std::log(q[t]));
    dp.push_back(q[t] - p[t]);
    agreed += std::max_element(p.begin(), p.end()) - p.begin() == std::max_element(q.begin(), q.end()) - q.begin() ? 1 : 0;
  }
  meter.merge(second);
  const auto mean = [](const std::vector<double>& v) { return std::accumulate(v.begin(), v.end(), 0.0) / static_cast<double>(v.size()); };
  const auto covariance = [&](const std::vector<double>& x, const std::vector<double>& y) {
    double sum = 0;
    for (size_t i = 0; i < x.size(); ++i) sum += (x[i] - mean(x)) * (y[i] - mean(y));
    return sum / static_cast<double>(n) / static_cast<double>(n - 1);
  };
  const Divergence d = meter.result();
  EXPECT_EQ(d.tokens, static_cast<int64_t>(n));
  EXPECT_NEAR(d.base_ppl, std::exp(mean(a)), 1e-4);
  EXPECT_NEAR(d.ppl, std::exp(mean(b)), 1e-4);
  EXPECT_NEAR(d.ppl_error, d.ppl * std::sqrt(covariance(b, b)), 1e-4);
  EXPECT_NEAR(d.correlation, covariance(a, b) / std::sqrt(covariance(a, a) * covariance(b, b)), 1e-6);
  EXPECT_NEAR(d.log_ratio.value, mean(b) - mean(a), 1e-6);
  EXPECT_NEAR(d.log_ratio.error, std::sqrt(covariance(a, a) + covariance(b, b) - 2 * covariance(a, b)), 1e-6);
  EXPECT_NEAR(d.ppl_ratio_error, d.ppl_ratio * d.log_ratio.error, 1e-9);
  EXPECT_NEAR(d.ppl_difference.value, d.ppl - d.base_ppl, 1e-9);
  const double variance = std::pow(d.ppl_error, 2) + std::pow(d.base_ppl_error, 2) - 2 * d.ppl * d.base_ppl * covariance(a, b);
  EXPECT_NEAR(d.ppl_difference.error, std::sqrt(variance), 1e-4);
  EXPECT_NEAR(d.kl, mean(kl), 1e-6);
  EXPECT_NEAR(d.kl_error, std::sqrt(covariance(kl, kl)), 1e-6);
  EXPECT_NEAR(d.delta_p.value, mean(dp), 1e-6);
  double squares = 0;
  for (const double v : dp) squares += v * v / static_cast<double>(n);
  EXPECT_NEAR(d.delta_p_rms.value, std::sqrt(squares), 1e-6);
  EXPECT_NEAR(d.top1, static_cast<double>(agreed) / static_cast<double>(n), 1e-12);
  std::sort(kl.begin(), kl.end());
  EXPECT_NEAR(d.kl_median, kl[100], 1e-6);
  EXPECT_NEAR(d.kl_quantiles.at[3], kl[20], 1e-6);  // 10% of 200 gaps
  EXPECT_NEAR(d.kl_p99, kl[198], 1e-6);
  EXPECT_NEAR(d.kl_quantiles.at[8], kl[190], 1e-6);
  EXPECT_NEAR(d.kl_max, kl[200], 1e-6);
  std::sort(dp.begin(), dp.end());
  EXPECT_NEAR(d.delta_p_quantiles.least, dp[0], 1e-6);
  EXPECT_NEAR(d.delta_p_quantiles.at[4], dp[50], 1e-6);
}

TEST(Divergence, OfAModelFromItselfIsNothing) {
  const Pairs text = pairs(20);
  DivergenceMeter meter;
  for (size_t i = 0; i < 20; ++i) meter.add(text.base[i], text.base[i], 1);
  const Divergence d = meter.result();
  EXPECT_LT(d.kl_max, 1e-6);
  EXPECT_EQ(d.top1, 1.0);
  EXPECT_EQ(d.ppl_ratio, 1.0);
  EXPECT_EQ(d.delta_p_rms.value, 0.0);
  EXPECT_EQ(DivergenceMeter().result().tokens, 0);
}

TEST(LogitFile, LaysOutARowAsDescribed) {
  // Largest 4, so codes span -12 to 4; -20 lies below.
  const std::vector<float> logits{4.0f, -20.0f, -12.0f, 0.0f, 3.0f};
  std::vector<uint16_t> codes;
  append_stored_logits(logits, codes);
  ASSERT_EQ(codes.size(), 4u + 6u);
  float header[2];
  std::memcpy(header, codes.data(), sizeof header);
  EXPECT_FLOAT_EQ(header[0], 16.0f / 65535.0f);
  double sum = 0;
  for (const float l : logits) sum += std::exp(static_cast<double>(l) - 4.0);
  EXPECT_NEAR(header[1], -16.0 - std::log(sum), 1e-6);
  EXPECT_THAT(std::vector<uint16_t>(codes.begin() + 4, codes.end()), ElementsAre(65535, 0, 0, 49151, 61439, 0));
  codes.clear();
  append_stored_logits(std::vector<float>{1.5f, 1.5f}, codes);
  EXPECT_THAT(std::vector<uint16_t>(codes.begin() + 4, codes.end()), ElementsAre(0, 0));
}

TEST(LogitFile, ThereAndBack) {
  const TempDir folder;
  const auto path = folder.path() / "base";
  const Pairs text = pairs(6);
  const std::vector<int> tokens{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  LogitFileWriter writer(path, 8, kVocab, tokens);  // rows of positions 4, 5 and 6 of two windows
  for (const auto& row : text.base) writer.add(row);
  EXPECT_FALSE(std::filesystem::exists(path));
  writer.commit();
  EXPECT_EQ(std::filesystem::file_size(path), 20u + 16 * 4 + 6 * (8 + 2 * 38));
  const LogitFile file(path);
  EXPECT_EQ(file.window(), 8);
  EXPECT_EQ(file.n_windows(), 2);
  EXPECT_EQ(file.rows_per_window(), 3);
  EXPECT_EQ(std::vector<int>(file.tokens().begin(), file.tokens().end()), tokens);
  for (int r = 0; r < 6; ++r) {
    const StoredLogits row = file.row(r / 3, r % 3);
    const auto p = softmax(text.base[static_cast<size_t>(r)]);
    for (size_t k = 0; k < kVocab; ++k) EXPECT_NEAR(row.log_p(k), std::log(p[k]), row.scale);
  }
  // Statistics of stored rows are those of the logits, up to 16 bits.
  DivergenceMeter stored, direct;
  for (size_t i = 0; i < 6; ++i) {
    stored.add(file.row(static_cast<int>(i) / 3, static_cast<int>(i) % 3), text.model[i], text.tokens[i]);
    direct.add(text.base[i], text.model[i], text.tokens[i]);
  }
  EXPECT_NEAR(stored.result().kl, direct.result().kl, 1e-4);
  EXPECT_NEAR(stored.result().base_ppl, direct.result().base_ppl, 1e-2);
  EXPECT_EQ(stored.result().top1, direct.result().top1);
}

TEST(LogitFile, RefusesBadFilesByName) {
  const TempDir folder;
  const auto error = [&](const std::string& magic, std::initializer_list<int32_t> numbers) {
    std::string bytes = magic;
    for (const int32_t n : numbers) bytes.append(reinterpret_cast<const char*>(&n), 4);
    const auto path = folder.write("bad.kld", bytes);
    return error_of([&] { const LogitFile file(path); });
  };
  EXPECT_THAT(error("_logits", {}), HasSubstr("bad.kld: found no file of log-probabilities"));
  EXPECT_THAT(error("_logitz_", {8, 10, 1}), HasSubstr("found no file of log-probabilities"));
  EXPECT_THAT(error("_logits_", {1, 10, 1}), HasSubstr("window: found 1, expected 3"));
  EXPECT_THAT(error("_logits_", {8, -10, 1}), HasSubstr("vocabulary: found -10"));
  EXPECT_THAT(error("_logits_", {8, 10, 0}), HasSubstr("windows: found 0"));
  EXPECT_THAT(error("_logits_", {1 << 28, 1 << 28, 1 << 28}), HasSubstr("found 20 bytes, too few for 268435456 windows"));
  EXPECT_THAT(error("_logits_", {4, 10, 1, 3, 4, 5, 6}), HasSubstr("found 36 bytes, too few"));
  EXPECT_THAT(error("_logits_", {3, 1, 1, 0, 0, 3, 0, 0, 0}), HasSubstr("token 2: found 3, expected 0 to 0"));
}

TEST(Kl, FileAndDirectComparisonAgree) {
  for (const char* name : {"llama-gqa", "deepseek-v2"}) {
    TestModel base = load_model(testdata(std::string("golden/") + name), make_cpu_ops({.n_threads = 2, .bf16_prompts = false}));
    const auto ids = read_golden(testdata(std::string("golden/") + name)).input_ids;
    const TempDir folder;
    const PerplexityOptions options{.method = PerplexityMethod::llama, .window = 32, .bos_id = 0};
    PerplexityOptions writing = options;
    LogitFileWriter writer(folder.path() / "base", 32, base.config.vocab, std::span(ids).first(96));
    writing.on_scored = [&](std::span<const float> logits) { writer.add(logits); };
    const PerplexityResult ppl = perplexity(*base.ops, base.decoder, ids, writing);
    writer.commit();
    const LogitFile file(folder.path() / "base");
    // Of itself: nothing but the 16 bits.
    const Divergence same = divergence_from_file(*base.ops, base.decoder, file, options).result();
    EXPECT_EQ(same.tokens, 3 * 15);
    EXPECT_NEAR(same.kl, 0.0, 1e-5) << name;
    EXPECT_NEAR(same.nll, ppl.mean_nll, 1e-6);
    EXPECT_LE(same.base_nll, ppl.mean_nll + 1e-3);  // the file ends 16 nats below the largest

    TestModel rounded = load_model(testdata(std::string("golden/") + name), make_cpu_ops({.n_threads = 2, .bf16_prompts = false}));
    const ModelOnOps a{*base.ops, base.decoder}, b{*rounded.ops, rounded.decoder};
    const Divergence direct = divergence_between(a, b, ids, options).result();
    EXPECT_EQ(direct.tokens, same.tokens);
    EXPECT_LT(direct.kl, 1e-9);
    const Divergence windows = divergence_between(a, b, ids, {.window = 32, .max_windows = 2, .bos_id = 0}).result();
    EXPECT_EQ(windows.tokens, 64);
  }
}

TEST(Kl, RefusesAnotherVocabulary) {
  TestModel model = load_model(testdata("golden/llama-gqa"), make_cpu_ops({.n_threads = 2, .bf16_prompts = false}));
  const TempDir folder;
  const std::vector<int> tokens{0, 1, 2, 3};
  LogitFileWriter writer(folder.path() / "base", 4, 9, tokens);
  writer.add(std::vector<float>(9));
  writer.commit();
  const LogitFile file(folder.path() / "base");
  EXPECT_THAT(error_of([&] { (void)divergence_from_file(*model.ops, model.decoder, file, {}); }),
              HasSubstr("base: a vocabulary of 9, but the model's has " + std::to_string(model.config.vocab)));
}

TEST(SequenceRunner, KeepsACommonBeginningAndContinuesGreedily) {
  for (const char* name : {"llama-gqa", "deepseek-v3"}) {
    TestModel model = load_model(testdata(std::string("golden/") + name), make_cpu_ops({.n_threads = 2, .bf16_prompts = false}));
    const Golden golden = read_golden(testdata(std::string("golden/") + name));
    const std::vector<int> ids(golden.input_ids.begin(), golden.input_ids.begin() + 48);
    std::vector<int> other(ids.begin(), ids.end() - 8);
    other.insert(other.end(), {1, 2, 3});
    const std::vector<float> want = run_logits(model, other);
    SequenceRunner runner(*model.ops, model.decoder, 48);
    runner.run(ids, 47, [](int position, std::span<const float>) { EXPECT_EQ(position, 47); });
    std::vector<float> got;
    runner.run(other, 40, [&](int, std::span<const float> logits) { got.insert(got.end(), logits.begin(), logits.end()); });
    ASSERT_EQ(got.size(), 3 * static_cast<size_t>(golden.vocab));
    EXPECT_LT(max_abs_difference(got, {want.end() - static_cast<ptrdiff_t>(got.size()), want.end()}), 1e-3f) << name;

    const std::vector<int> prompt(golden.greedy.begin(), golden.greedy.begin() + 16), rest(golden.greedy.begin() + 16, golden.greedy.end());
    EXPECT_EQ(runner.greedy(prompt, 24, {}), rest) << name;
    EXPECT_EQ(runner.greedy(prompt, 24, std::span(rest).subspan(5, 1)).size(),
              static_cast<size_t>(std::find(rest.begin(), rest.end(), rest[5]) - rest.begin()));
    EXPECT_THAT(error_of([&] { runner.start(std::vector<int>(49)); }), HasSubstr("49 tokens were given, but at most 48"));
    EXPECT_THAT(error_of([&] { runner.start(std::vector<int>{0, golden.vocab}); }), HasSubstr("token 1 of the input is id"));
  }
}

}  // namespace
}  // namespace cachalot::test
