// The multi-token-prediction layer of the trained tiny-v3: it predicts real text nearly as well as the model itself, from hidden states as
// it was trained on, alike on both backends and in chunks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/mapped_file.h"
#include "cpu/cpu_ops.h"
#include "io/checkpoint.h"
#include "model/decoder.h"
#include "ops/ref_ops.h"
#include "support/support.h"
#include "text/tokenizer.h"

namespace cachalot::test {
namespace {

struct Model {
  std::unique_ptr<Ops> ops;
  Config config;
  Decoder decoder;
  // The file says that the layer takes hidden states from before the final norm; `normed`: from behind it all the same.
  explicit Model(std::unique_ptr<Ops> backend, bool normed = false) : ops(std::move(backend)) {
    const auto file = Checkpoint::open(testdata("tiny-v3"));
    config = read_config(*file);
    EXPECT_FALSE(config.mtp_input_normed);
    config.mtp_input_normed = normed;
    decoder = Decoder::load(*file, config, *ops, {.mtp = true});
  }
};

// One sequence in pages 0, 1, ...: rows [begin, end), all of them with logits.
struct OneSequence {
  std::vector<int> positions, slots, q_start, kv_len, table, rows;
  Batch batch;
  OneSequence(std::span<const int> tokens, int begin, int end, int n_pages) {
    for (int p = begin; p < end; ++p) {
      positions.push_back(p);
      slots.push_back(p);
      rows.push_back(p - begin);
    }
    q_start = {0, end - begin};
    kv_len = {end};
    for (int i = 0; i < n_pages; ++i) table.push_back(i);
    const auto view = [](std::vector<int>& v) { return View::vector(v.data(), DType::i32, static_cast<int>(v.size())); };
    batch.n_tokens = batch.max_q = end - begin;
    batch.n_seqs = 1;
    batch.max_kv = end;
    batch.decode = {0, end - begin, 0, 1};
    batch.tokens = View::vector(const_cast<int*>(tokens.data()) + begin, DType::i32, end - begin);
    batch.positions = view(positions);
    batch.slots = view(slots);
    batch.q_start = view(q_start);
    batch.kv_len = view(kv_len);
    batch.block_table = View::matrix(table.data(), DType::i32, 1, n_pages);
    batch.logit_rows = view(rows);
    batch.host_q_start = q_start;
    batch.host_kv_len = kv_len;
  }
};

struct Predictions {
  std::vector<float> main, mtp;  // logits [n, vocab]
};

Predictions run(Model& model, const std::vector<int>& tokens, int chunk) {
  const int n = static_cast<int>(tokens.size()) - 1, vocab = model.config.vocab, hidden = model.config.hidden, n_pages = (n + 15) / 16;
  const KvLayout layout = model.config.kv_layout(KvFormat::f32, 16);
  std::vector<Buffer> memory;
  std::vector<KvLayer> kv;
  for (int l = 0; l < model.decoder.n_kv_layers(); ++l) {
    memory.push_back(model.ops->alloc(static_cast<size_t>(n_pages) * 16 * layout.k_row_bytes()));
    kv.push_back({layout, memory.back().get()});
  }
  Predictions out;
  out.main.resize(static_cast<size_t>(n) * static_cast<size_t>(vocab));
  out.mtp.resize(out.main.size());
  std::vector<float> states(static_cast<size_t>(chunk) * static_cast<size_t>(hidden));
  const std::span<const int> behind = std::span(tokens).subspan(1);
  for (int begin = 0; begin < n; begin += chunk) {
    const int end = std::min(n, begin + chunk);
    const View h = View::matrix(states.data(), DType::f32, end - begin, hidden);
    const auto logits = [&](std::vector<float>& all) {
      return View::matrix(all.data() + static_cast<size_t>(begin) * static_cast<size_t>(vocab), DType::f32, end - begin, vocab);
    };
    const OneSequence main(tokens, begin, end, n_pages), next(behind, begin, end, n_pages);
    model.decoder.forward(*model.ops, main.batch, kv, logits(out.main), h);
    model.decoder.predict(*model.ops, next.batch, kv.back(), true, h, logits(out.mtp));
  }
  return out;
}

// Mean negative log-likelihood of the tokens `ahead` places on, and the share that is guessed right.
struct Score {
  double nll = 0.0, hits = 0.0;
};
Score score(const std::vector<float>& logits, const std::vector<int>& tokens, int vocab, int ahead) {
  Score out;
  const int n = static_cast<int>(tokens.size()) - 2;
  for (int p = 0; p < n; ++p) {
    const float* row = logits.data() + static_cast<size_t>(p) * static_cast<size_t>(vocab);
    const float highest = *std::max_element(row, row + vocab);
    double sum = 0.0;
    for (int t = 0; t < vocab; ++t) sum += std::exp(static_cast<double>(row[t] - highest));
    const int wanted = tokens[static_cast<size_t>(p + ahead)];
    out.nll += (std::log(sum) - (row[wanted] - highest)) / n;
    out.hits += (row[wanted] == highest ? 1.0 : 0.0) / n;
  }
  return out;
}

std::vector<int> sample_tokens(const char* domain, size_t n) {
  const std::string json = read_text_file(testdata("tiny-v3/tokenizer.json"));
  const Tokenizer tokenizer = Tokenizer::from_json(json, "tokenizer.json");
  std::vector<int> tokens{0};
  const std::vector<int> text = tokenizer.encode(read_text_file(testdata(std::string("text/") + domain + "/eval.txt")).substr(0, 20000));
  tokens.insert(tokens.end(), text.begin(), text.begin() + static_cast<std::ptrdiff_t>(n - 1));
  return tokens;
}

TEST(Mtp, PredictsTheTokenAfterTheNext) {
  Model model(make_cpu_ops({.bf16_prompts = false})), wrong(make_cpu_ops({.bf16_prompts = false}), true);
  for (const char* domain : {"code", "legal"}) {
    const std::vector<int> tokens = sample_tokens(domain, 400);
    const Predictions out = run(model, tokens, 400);
    const Score main = score(out.main, tokens, model.config.vocab, 1), mtp = score(out.mtp, tokens, model.config.vocab, 2),
                normed = score(run(wrong, tokens, 400).mtp, tokens, model.config.vocab, 2);
    EXPECT_LT(mtp.nll, main.nll + 1.5) << domain;
    EXPECT_GT(mtp.hits, 0.5 * main.hits) << domain;
    EXPECT_LT(mtp.nll, normed.nll) << domain;  // this model was trained on hidden states before the final norm
  }
}

TEST(Mtp, IsTheSameInChunksAndOnBothBackends) {
  const std::vector<int> tokens = sample_tokens("code", 40);
  Model cpu(make_cpu_ops({.bf16_prompts = false})), ref(make_ref_ops());
  const Predictions whole = run(ref, tokens, 64), chunks = run(ref, tokens, 7), on_cpu = run(cpu, tokens, 64);
  const auto largest = [](const std::vector<float>& v) {
    return std::abs(*std::max_element(v.begin(), v.end(), [](float a, float b) { return std::abs(a) < std::abs(b); }));
  };
  const auto difference = [&](const std::vector<float>& a, const std::vector<float>& b) {
    float most = 0.0f;
    for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
    return most / largest(a);
  };
  EXPECT_LT(difference(whole.mtp, chunks.mtp), 1e-5f);
  EXPECT_LT(difference(whole.mtp, on_cpu.mtp), 1e-3f);
  EXPECT_LT(difference(whole.main, on_cpu.main), 1e-3f);
}

TEST(Mtp, IsLoadedOnRequestOnly) {
  const auto file = Checkpoint::open(testdata("tiny-v3"));
  const auto ops = make_ref_ops();
  const Decoder without = Decoder::load(*file, read_config(*file), *ops);
  EXPECT_FALSE(without.mtp());
  EXPECT_EQ(without.n_kv_layers(), without.config().n_layers);
}

}  // namespace
}  // namespace cachalot::test
