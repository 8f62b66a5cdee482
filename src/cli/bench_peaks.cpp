// Measures bandwidth and the fastest product.
#include "cli/bench_peaks.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <string_view>
#include <vector>

#include "base/thread_pool.h"
#include "cpu/bandwidth.h"
#include "ops/case_support.h"

namespace cachalot {
namespace {

struct ProductShape {
  int rows, cols, tokens;
};
// Weights of a few megabytes stay in the caches of a CPU; a GPU needs more work than that to fill itself.
constexpr ProductShape kCpuProduct{1024, 2048, 512}, kGpuProduct{4096, 4096, 4096};
constexpr int kRuns = 5;

double product_speed(Ops& ops, Format format, const ProductShape& shape) {
  test::CaseBuilder builder(ops, DType::f32, info(format).name);
  const Linear w = builder.weights({.format = format, .out = shape.rows, .in = shape.cols});
  const View x = builder.activations(shape.tokens, shape.cols)->view();
  const View y = builder.activations(shape.tokens, shape.rows, 0.0f)->view();
  const test::CaseInstance instance = builder.finish({});
  const Finish finish(ops);
  const double seconds = shortest_run(kRuns, [&] {
    const Scope scope(ops);
    ops.linear(x, w, y);
    finish();
  });
  return 2.0 * shape.rows * shape.cols * shape.tokens / seconds;
}

double copy_bandwidth(Ops& ops) {
  constexpr int kCols = 16384, kRows = 4096;  // 256 MiB of f32
  constexpr size_t kBytes = size_t{kCols} * kRows * sizeof(float);
  const Buffer from = ops.alloc(kBytes), to = ops.alloc(kBytes), ids = ops.alloc(kRows * sizeof(int));
  std::vector<int> order(kRows);
  std::iota(order.begin(), order.end(), 0);
  ops.upload(ids.get(), order.data(), kRows * sizeof(int));
  const Finish finish(ops);
  const double seconds = shortest_run(kRuns, [&] {
    ops.gather_rows(View::matrix(from.get(), DType::f32, kRows, kCols), View::vector(ids.get(), DType::i32, kRows),
                    View::matrix(to.get(), DType::f32, kRows, kCols));
    finish();
  });
  return 2.0 * static_cast<double>(kBytes) / seconds;
}

}  // namespace

double shortest_run(int runs, const std::function<void()>& run) {
  using Clock = std::chrono::steady_clock;
  run();  // what the first use has to set up
  double best = 0.0;
  for (int i = 0; i < runs; ++i) {
    const auto start = Clock::now();
    run();
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    best = i == 0 ? seconds : std::min(best, seconds);
  }
  return std::max(best, 1e-9);
}

std::string MachinePeaks::text() const {
  if (!known()) return "peaks of this device are not measured";
  return fmt::format("{:.1f} GB/s read, {:.3f} TFLOP/s ({} weights)", read * 1e-9, flops * 1e-12, product);
}

MachinePeaks measure_peaks(Ops& ops, int n_threads) {
  MachinePeaks peaks;
  if (std::string_view(ops.name()).starts_with("ref")) return peaks;
  if (ops.host_memory()) {
    ThreadPool pool(n_threads);
    peaks.read = cpu::read_bandwidth(pool);
  } else {
    peaks.read = copy_bandwidth(ops);
  }
  for (const Format format : {Format::f32, Format::bf16, Format::q8_0, Format::q4_0, Format::q4_k, Format::fp8_block}) {
    if (!ops.host_memory() && format == Format::f32) continue;
    const double speed = product_speed(ops, format, ops.host_memory() ? kCpuProduct : kGpuProduct);
    if (speed <= peaks.flops) continue;
    peaks.flops = speed;
    peaks.product = info(format).name;
  }
  return peaks;
}

}  // namespace cachalot
