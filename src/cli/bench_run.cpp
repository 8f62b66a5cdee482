// Steps of the runner on sequences of random tokens.
#include "cli/bench_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <random>

#include "base/check.h"
#include "base/error.h"
#include "runtime/runner.h"

namespace cachalot {
namespace {

using Clock = std::chrono::steady_clock;

class BenchRun {
 public:
  BenchRun(Ops& ops, const Decoder& decoder, const BenchTest& test, const BenchSettings& settings)
      : test_(test),
        vocab_(decoder.config().vocab),
        engine_(settings.seed),
        cache_(ops, decoder.config(), settings.kv_format, settings.block_tokens, blocks(test, settings.block_tokens)),
        runner_(ops, decoder, cache_,
                {.max_tokens = std::max(test.chunk(), test.n_seqs),
                 .max_seqs = test.n_seqs,
                 .max_logits = test.n_seqs,
                 .max_sequence = test.positions()}),
        finish_(ops),
        sequences_(static_cast<size_t>(test.n_seqs)) {}

  // Brings every sequence to n_depth cached tokens. What a repetition added behind them is dropped.
  void go_to_depth() {
    for (Sequence& s : sequences_) {
      cache_.truncate(s, test_.n_depth);
      s.tokens.resize(static_cast<size_t>(std::min(s.n_tokens(), test_.n_depth)));
      s.n_computed = std::min(s.n_computed, test_.n_depth);
    }
    read(test_.n_depth - sequences_[0].n_computed, WantLogits::none);
    finish_();
  }

  // Each sequence reads n more tokens, in chunks.
  void read(int n, WantLogits want) {
    for (Sequence& s : sequences_) {
      add_tokens(s, n);
      while (s.n_computed < s.n_tokens()) {
        const int n_new = std::min(test_.chunk(), s.n_tokens() - s.n_computed);
        const bool last = s.n_computed + n_new == s.n_tokens();
        step({{&s, n_new, last ? want : WantLogits::none}});
      }
    }
  }

  // n times a token of each sequence, all in one step. The device is waited for after each, as the choice of a token would.
  void generate(int n) {
    for (int i = 0; i < n; ++i) {
      std::vector<StepItem> items;
      for (Sequence& s : sequences_) {
        add_tokens(s, 1);
        items.push_back({&s, 1, WantLogits::last});
      }
      step(items);
      finish_();
    }
  }

  int64_t timed_repetition() {
    go_to_depth();
    steps_.clear();
    const auto start = Clock::now();
    if (test_.n_prompt > 0) read(test_.n_prompt, WantLogits::last);
    finish_();
    generate(test_.n_gen);
    return std::max<int64_t>(1, std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count());
  }

  // What the steps since the last repetition's start were.
  struct StepShape {
    std::vector<SequenceStep> sequences;
    int n_logits = 0;
  };
  [[nodiscard]] const std::vector<StepShape>& steps() const { return steps_; }

 private:
  static int blocks(const BenchTest& test, int block_tokens) {
    return test.n_seqs * ((test.positions() + block_tokens - 1) / block_tokens);
  }

  void add_tokens(Sequence& s, int n) {
    for (int i = 0; i < n; ++i) s.tokens.push_back(static_cast<int>(engine_() % static_cast<uint64_t>(vocab_)));
    CACHALOT_CHECK(cache_.reserve(s, s.n_tokens()), "the pool holds every sequence's whole context");
  }

  void step(const std::vector<StepItem>& items) {
    StepShape shape;
    for (const StepItem& item : items) {
      shape.sequences.push_back({item.n_new, item.sequence->n_computed});
      shape.n_logits += item.want == WantLogits::last ? 1 : 0;
    }
    steps_.push_back(std::move(shape));
    runner_.step(items);
  }

  BenchTest test_;
  int vocab_;
  std::mt19937_64 engine_;
  KvCache cache_;
  Runner runner_;
  Finish finish_;
  std::vector<Sequence> sequences_;
  std::vector<StepShape> steps_;
};

}  // namespace

std::string BenchTest::name() const {
  std::string text;
  if (n_prompt > 0) text = fmt::format("pp{}", n_prompt);
  if (n_gen > 0) text += fmt::format("{}tg{}", text.empty() ? "" : "+", n_gen);
  if (n_seqs > 1) text += fmt::format(" x {}", n_seqs);
  if (n_depth > 0) text += fmt::format(" @ d{}", n_depth);
  return text;
}

std::vector<double> BenchResult::samples_ts() const {
  std::vector<double> out;
  for (const int64_t ns : samples_ns) out.push_back(1e9 * test.tokens() / static_cast<double>(ns));
  return out;
}

BenchResult run_bench_test(Ops& ops, const Decoder& decoder, const ModelCost& cost, const MachinePeaks& peaks, const BenchTest& test,
                           const BenchSettings& settings) {
  CACHALOT_CHECK(test.tokens() > 0 && test.chunk() > 0 && settings.repetitions > 0);
  BenchRun run(ops, decoder, test, settings);
  run.go_to_depth();
  if (settings.warm_up) {
    if (test.n_prompt > 0) run.read(std::min(test.n_prompt, test.chunk()), WantLogits::last);
    if (test.n_gen > 0) run.generate(1);
  }
  BenchResult result{test, {}, {}, 0.0};
  for (int i = 0; i < settings.repetitions; ++i) result.samples_ns.push_back(run.timed_repetition());
  for (const auto& step : run.steps()) {
    const StepCost part = cost.step(step.sequences, step.n_logits);
    result.cost += part;
    if (peaks.known()) result.bound_seconds += std::max(part.bytes() / peaks.read, part.flops / peaks.flops);
  }
  return result;
}

Spread spread_of(std::vector<double> samples) {
  Spread s;
  if (samples.empty()) return s;
  std::sort(samples.begin(), samples.end());
  const size_t n = samples.size();
  s.least = samples.front();
  s.most = samples.back();
  s.median = n % 2 == 1 ? samples[n / 2] : (samples[n / 2 - 1] + samples[n / 2]) / 2.0;
  s.mean = std::accumulate(samples.begin(), samples.end(), 0.0) / static_cast<double>(n);
  double squares = 0.0;
  for (const double v : samples) squares += (v - s.mean) * (v - s.mean);
  if (n > 1) s.deviation = std::sqrt(squares / static_cast<double>(n - 1));
  return s;
}

}  // namespace cachalot
