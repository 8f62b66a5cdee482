// One test of `cachalot bench`: random tokens through a model, timed.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cli/bench_cost.h"
#include "cli/bench_peaks.h"
#include "ops/kv_layout.h"

namespace cachalot {

// n_seqs sequences of n_depth cached tokens each read n_prompt tokens, then generate n_gen; the cached ones are not timed.
struct BenchTest {
  int n_prompt = 0, n_gen = 0, n_depth = 0, n_seqs = 1;
  int n_batch = 2048, n_ubatch = 512;  // rows of a step: the smaller of the two

  [[nodiscard]] std::string name() const;  // "pp512", "tg128 @ d4096", "pp512+tg128", "tg128 x 8"
  [[nodiscard]] int chunk() const { return n_batch < n_ubatch ? n_batch : n_ubatch; }
  [[nodiscard]] int positions() const { return n_depth + n_prompt + n_gen; }  // that a sequence takes
  [[nodiscard]] int tokens() const { return (n_prompt + n_gen) * n_seqs; }    // that are timed
};

struct BenchSettings {
  KvFormat kv_format = KvFormat::f32;
  int block_tokens = 16;
  int repetitions = 5;
  bool warm_up = true;
  uint64_t seed = 42;
};

struct BenchResult {
  BenchTest test;
  std::vector<int64_t> samples_ns;
  StepCost cost;               // of one repetition
  double bound_seconds = 0.0;  // of one repetition, each step at the slower of both peaks; 0 when they are not known

  [[nodiscard]] std::vector<double> samples_ts() const;  // tokens per second
};

// Throws Error when the cache does not fit the device's memory.
BenchResult run_bench_test(Ops& ops, const Decoder& decoder, const ModelCost& cost, const MachinePeaks& peaks, const BenchTest& test,
                           const BenchSettings& settings);

// Of samples; all 0 without any.
struct Spread {
  double mean = 0.0, deviation = 0.0, median = 0.0, least = 0.0, most = 0.0;
};
Spread spread_of(std::vector<double> samples);

}  // namespace cachalot
