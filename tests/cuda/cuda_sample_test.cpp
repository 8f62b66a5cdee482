// Sampling on the GPU against the host's, on equal logits: the same token, the same log probabilities to the last bit.
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <thread>

#include "cuda/gpu_support.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// One row's logits and settings, drawn so that every filter, ties, near ties and extreme values come up.
struct Row {
  std::vector<float> logits;
  SampleParams params;
  std::vector<TokenCount> history;
  std::vector<TokenBias> bias;
  std::vector<uint32_t> allowed;
};

class RowMaker {
 public:
  explicit RowMaker(uint64_t seed) : random_(seed) {}

  Row make(int vocab) {
    Row row;
    row.logits.resize(static_cast<size_t>(vocab));
    const int kind = pick(8);
    std::normal_distribution<float> normal(0.0f, kind == 0 ? 0.01f : kind == 1 ? 12.0f : 3.0f);
    const float step = kind == 2 ? 0.5f : kind == 3 ? 4.0f : 0.0f;  // many equals
    for (float& l : row.logits) {
      l = normal(random_);
      if (step > 0.0f) l = std::round(l / step) * step;
    }
    if (kind == 4) std::fill(row.logits.begin(), row.logits.end(), 1.25f);
    if (kind == 5)  // all within a few units in the last place
      for (float& l : row.logits) l = 8.0f + static_cast<float>(pick(3)) * 0x1p-20f;
    if (kind == 6)
      for (float& l : row.logits) l = pick(3) == 0 ? -kInf : pick(50) == 0 ? l * 1e30f : pick(50) == 0 ? l * 1e-38f : -0.0f;
    if (pick(40) == 0) row.logits[static_cast<size_t>(pick(vocab))] = std::vector<float>{NAN, kInf, -kInf}[static_cast<size_t>(pick(3))];
    if (pick(60) == 0) std::fill(row.logits.begin(), row.logits.end(), -kInf);

    SampleParams& p = row.params;
    p.temperature = std::vector<float>{0.0f, 1.0f, 0.6f, 1.7f, 1e-6f, 40.0f, 0.25f, uniform()}[static_cast<size_t>(pick(8))];
    if (pick(2) == 0) p.top_k = std::vector<int>{1, 2, 7, 40, 300, vocab, vocab + 5, 1 + pick(vocab)}[static_cast<size_t>(pick(8))];
    if (pick(2) == 0)
      p.top_p = std::vector<float>{0.0f, 0.5f, 0.9f, 0.95f, 0.999999f, uniform(), 1.0f, 1e-9f}[static_cast<size_t>(pick(8))];
    if (pick(3) == 0) p.min_p = std::vector<float>{0.05f, 0.5f, 1.0f, 2.0f, uniform() * 1e-3f}[static_cast<size_t>(pick(5))];
    p.seed = random_();
    p.step = static_cast<uint64_t>(pick(5000));
    if (pick(3) == 0) {
      p.repetition = pick(2) == 0 ? 1.2f : 0.7f;
      p.presence = uniform();
      p.frequency = uniform() - 0.5f;
      const int n = pick(std::min(vocab, 400)), stride = 1 + pick(3);
      for (int i = 0; i < n; ++i) row.history.push_back({i * stride - 2, pick(3), pick(3)});
      if (pick(50) == 0 && n > 3) row.history.push_back(row.history[3]);  // twice
    }
    if (pick(4) == 0)
      for (int i = pick(12); i >= 0; --i) row.bias.push_back({(i * 37 + 3) % (vocab + 3), pick(5) == 0 ? -kInf : 6.0f * uniform() - 3.0f});
    if (pick(4) == 0) {
      row.allowed.resize(static_cast<size_t>(std::max(1, (vocab + 31) / 32 - pick(3))));
      const int mask = pick(4);
      for (uint32_t& word : row.allowed)
        word = mask == 0 ? 0u : mask == 1 ? ~0u : static_cast<uint32_t>(random_()) & (mask == 2 ? static_cast<uint32_t>(random_()) : ~0u);
    }
    if (pick(3) == 0) p.n_logprobs = std::vector<int>{0, 1, 5, 20, 100, 1500}[static_cast<size_t>(pick(6))];
    return row;
  }
  int pick(int n) { return static_cast<int>(random_() % static_cast<uint64_t>(n)); }
  float uniform() { return static_cast<float>(random_() >> 40) * 0x1p-24f; }

 private:
  std::mt19937_64 random_;
};

bool same(const Sampled& a, const Sampled& b) {
  if (a.token != b.token || a.finite != b.finite || a.top.size() != b.top.size() || a.logprob != b.logprob) return false;
  for (size_t i = 0; i < a.top.size(); ++i)
    if (a.top[i].token != b.top[i].token || a.top[i].logprob != b.top[i].logprob) return false;
  return true;
}

// Two draws on their way together give what sample() gave, on the host and on the device, where tokens can be placed among others.
void compare_draws(Ops& ops, const View& logits, std::span<const SampleParams> params, std::span<const Sampled> expected) {
  const int n = logits.n_rows();
  const Buffer memory = ops.alloc(3 * params.size() * sizeof(int));
  int* const ids = static_cast<int*>(memory.get());
  const View first = View::vector(ids, DType::i32, n), second = View::vector(ids + n, DType::i32, n),
             placed = View::vector(ids + 2 * n, DType::i32, n);
  const auto one = ops.draw(logits, params, first), two = ops.draw(logits, params, second);
  std::vector<int> tokens(params.size());
  for (int i = 0; i < n; ++i) tokens[static_cast<size_t>(i)] = i % 3 == 0 ? i - 1 : -2 - (n - 1 - i);
  ops.upload_drawn(static_cast<int*>(placed.data), tokens, second);
  std::vector<Sampled> drawn(params.size());
  int n_wrong = 0;
  for (const auto& draw : {one.get(), two.get()}) {
    draw->wait(drawn);
    for (size_t i = 0; i < drawn.size(); ++i) n_wrong += !same(drawn[i], expected[i]);
  }
  for (const View& view : {first, second, placed}) {
    ops.download(tokens.data(), view.data, tokens.size() * sizeof(int));
    for (int i = 0; i < n; ++i) {
      const bool is_placed = view.data == placed.data;
      const int wanted = !is_placed   ? expected[static_cast<size_t>(i)].token
                         : i % 3 == 0 ? i - 1
                                      : expected[static_cast<size_t>(n - 1 - i)].token;
      n_wrong += tokens[static_cast<size_t>(i)] != wanted;
    }
  }
  EXPECT_EQ(n_wrong, 0) << n << " rows of " << logits.n_cols();
}

// n_rows rows per call, `calls` of them; the number of rows that differ.
int compare(Ops& ops, int vocab, int n_rows, int calls, uint64_t seed) {
  std::atomic<int> wrong = 0;
  CaseTensor tensor(ops, DType::f32, n_rows, vocab);
  const int n_threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const auto in_parallel = [&](const auto& f) {
    std::vector<std::thread> threads;
    for (int t = 0; t < n_threads; ++t)
      threads.emplace_back([&, t] {
        for (int r = t; r < n_rows; r += n_threads) f(static_cast<size_t>(r));
      });
    for (std::thread& thread : threads) thread.join();
  };
  for (int call = 0; call < calls; ++call) {
    std::vector<Row> rows(static_cast<size_t>(n_rows));
    std::vector<float> all(static_cast<size_t>(n_rows) * static_cast<size_t>(vocab));
    std::vector<SampleParams> params(rows.size());
    std::vector<Sampled> host(rows.size()), device(rows.size());
    in_parallel([&](size_t r) {
      rows[r] = RowMaker(seed + static_cast<uint64_t>(call) * 100003 + r).make(vocab);
      std::copy(rows[r].logits.begin(), rows[r].logits.end(), all.begin() + static_cast<ptrdiff_t>(r * static_cast<size_t>(vocab)));
      rows[r].params.history = rows[r].history;
      rows[r].params.bias = rows[r].bias;
      rows[r].params.allowed = rows[r].allowed;
      params[r] = rows[r].params;
      host[r] = sample_token(rows[r].logits, params[r]);
    });
    ops.upload(tensor.view().data, all.data(), all.size() * sizeof(float));
    ops.sample(tensor.view(), params, device);
    for (size_t r = 0; r < rows.size(); ++r) {
      if (same(host[r], device[r])) continue;
      const SampleParams& p = params[r];
      if (wrong++ < 5)
        ADD_FAILURE() << "vocabulary " << vocab << " call " << call << " row " << r << ": host " << host[r].token << " " << host[r].logprob
                      << " of " << host[r].top.size() << ", device " << device[r].token << " " << device[r].logprob << " of "
                      << device[r].top.size() << "; temperature " << p.temperature << " top_k " << p.top_k << " top_p " << p.top_p
                      << " min_p " << p.min_p << " logprobs " << p.n_logprobs << " history " << p.history.size() << " bias "
                      << p.bias.size() << " allowed " << p.allowed.size();
    }
    compare_draws(ops, tensor.view(), params, device);
    std::vector<float> after(all.size());
    ops.download(after.data(), tensor.view().data, after.size() * sizeof(float));
    EXPECT_EQ(std::memcmp(after.data(), all.data(), all.size() * sizeof(float)), 0) << "the logits were changed";
  }
  return wrong;
}

TEST(CudaSample, ChoosesWhatTheHostChooses) {
  SKIP_WITHOUT_GPU();
  Ops& ops = gpu(DType::bf16);
  const bool many = std::getenv("CACHALOT_FULL_TESTS") != nullptr;  // over a million rows
  struct Size {
    int vocab, rows, calls;
  };
  for (const Size s : {Size{1, 64, 2}, Size{3, 64, 4}, Size{31, 256, 4}, Size{257, 256, 8}, Size{1000, 300, 6}, Size{5003, 140, 4},
                       Size{3001, 12, 8}, Size{9000, 50, 4}, Size{32000, 64, 2}, Size{129280, 20, 1}}) {
    const int calls = s.calls * (many ? s.vocab <= 257 ? 400 : s.vocab <= 5003 ? 100 : 8 : 1);
    EXPECT_EQ(compare(ops, s.vocab, s.rows, calls, static_cast<uint64_t>(s.vocab) * 7919), 0);
  }
}

// Few enough for compute-sanitizer: one call for each number of blocks per row.
TEST(CudaSample, EachKernelOnce) {
  SKIP_WITHOUT_GPU();
  for (const int rows : {4, 40, 100, 140}) EXPECT_EQ(compare(gpu(DType::bf16), 2500, rows, 1, 17), 0) << rows;
}

TEST(CudaSample, GoesWithoutRows) {
  SKIP_WITHOUT_GPU();
  Ops& ops = gpu(DType::bf16);
  CaseTensor logits(ops, DType::f32, 1, 8);
  ops.sample(logits.view().rows(0, 0), {}, {});
}

}  // namespace
}  // namespace cachalot::test
