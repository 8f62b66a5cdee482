// bench_ops [PART OF A NAME] [THREADS] [int8]: microseconds, GB/s and GFLOP/s of operations on the CPU, and what share of the machine they
// use.
//
// The peaks are measured first: reading 512 MiB in huge pages with all workers, and the f32 product of operands that stay in the first
// cache. Weights are held in as many copies as it takes to be larger than any cache, so that GB/s means memory.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/thread_pool.h"
#include "cpu/cpu_ops.h"
#include "cpu/features.h"
#include "cpu/huge_memory.h"
#include "ops/op_cases.h"

namespace cachalot {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// The shortest of several runs.
template <typename Function>
double best_of(int runs, const Function& f) {
  double best = 1e30;
  for (int i = 0; i < runs; ++i) {
    const auto start = Clock::now();
    f();
    best = std::min(best, seconds_since(start));
  }
  return best;
}

double read_bandwidth(ThreadPool& pool) {
  constexpr size_t kBytes = size_t{512} << 20, kPiece = size_t{1} << 20;
  const auto memory = cpu::map_huge(kBytes);
  std::memset(memory.get(), 1, kBytes);
  std::vector<uint64_t> sums(kBytes / kPiece);
  const double seconds = best_of(5, [&] {
    pool.run(static_cast<int>(sums.size()), [&](int i, int) {
      const auto* p = reinterpret_cast<const uint64_t*>(memory.get() + static_cast<size_t>(i) * kPiece);
      uint64_t s[8] = {};
      for (size_t k = 0; k < kPiece / 8; k += 8)
        for (size_t j = 0; j < 8; ++j) s[j] += p[k + j];
      for (const uint64_t part : s) sums[static_cast<size_t>(i)] += part;
    });
  });
  return static_cast<double>(kBytes) / seconds;
}

double product_peak(ThreadPool& pool) {
  constexpr int kRows = 8, kCols = 256, kTokens = 8, kRepeats = 2000;
  const cpu::KernelTable& kernels = cpu::select_kernels();
  const double seconds = best_of(5, [&] {
    pool.run(pool.size(), [&](int, int) {
      alignas(64) static thread_local float w[kRows * kCols], x[kTokens * kCols], y[kTokens * kRows];
      const float* rows[kTokens];
      float* out[kTokens];
      for (int t = 0; t < kTokens; ++t) {
        rows[t] = x + t * kCols;
        out[t] = y + t * kRows;
      }
      for (int i = 0; i < kRepeats; ++i)
        kernels.gemm[0]({.data = w, .stride = 4 * kCols, .n_rows = kRows, .n_cols = kCols}, {.x = rows, .y = out, .n_tokens = kTokens});
    });
  });
  return 2.0 * kRows * kCols * kTokens * kRepeats * pool.size() / seconds;
}

std::vector<test::OpCase> bench_cases() {
  using namespace test;
  std::vector<OpCase> cases;
  for (const Format format : {Format::f32, Format::bf16, Format::f16, Format::q8_0, Format::q4_0, Format::q4_1, Format::q5_0, Format::q5_1,
                              Format::q2_k, Format::q3_k, Format::q4_k, Format::q5_k, Format::q6_k, Format::iq4_nl, Format::iq4_xs,
                              Format::mxfp4, Format::fp8_block, Format::int4_planar, Format::int8_planar})
    for (const int rows : {1, 4, 128})
      cases.push_back(linear_case({.segments = {{.format = format, .out = 2048, .in = 2048}}, .rows = rows}));
  cases.push_back(swiglu_case({.format = Format::q4_1, .out = 3072, .in = 576}, 1));
  const KvLayout grouped{.heads = 8, .k_dim = 128, .v_dim = 128, .format = KvFormat::f16, .block_tokens = 32};
  const KvLayout latent{.heads = 1, .k_dim = 576, .v_dim = 512, .v_is_k_prefix = true, .format = KvFormat::bf16, .block_tokens = 32};
  cases.push_back(attend_case({.label = "gqa/decode4096", .heads = 32, .layout = grouped, .sequences = {{1, 4096}}}));
  cases.push_back(attend_case({.label = "gqa/prefill512", .heads = 32, .layout = grouped, .sequences = {{512, 512}}}));
  cases.push_back(attend_case({.label = "mla/decode4096", .heads = 16, .layout = latent, .sequences = {{1, 4096}}}));
  cases.push_back(attend_expanded_case({.label = "mla/prefill512", .heads = 16, .layout = latent, .sequences = {{512, 512}}},
                                       {.n_heads = 16, .nope = 128, .rope_dim = 64, .v_dim = 128, .kv_rank = 512}, Format::q8_0));
  for (const int rows : {1, 128})
    cases.push_back(moe_case({.label = "v2lite",
                              .gate_up = Format::q4_k,
                              .down = Format::q8_0,
                              .shared = Format::q4_k,
                              .n_experts = 64,
                              .top_k = 6,
                              .hidden = 2048,
                              .inner = 1408,
                              .shared_inner = 2816,
                              .rows = rows}));
  return cases;
}

void run(const char* part, int n_threads, bool int8) {
  const auto pool = std::make_shared<ThreadPool>(n_threads);
  const auto ops = make_cpu_ops({.pool = pool, .int8_activations = int8});
  const double bandwidth = read_bandwidth(*pool), flops = product_peak(*pool);
  fmt::print("{}, {} threads: {:.1f} GB/s read, {:.0f} GFLOP/s f32\n", ops->name(), pool->size(), bandwidth * 1e-9, flops * 1e-9);
  fmt::print("{:<44} {:>10} {:>8} {:>6} {:>9} {:>6}\n", "", "us", "GB/s", "%peak", "GFLOP/s", "%peak");
  for (const test::OpCase& c : bench_cases()) {
    if (c.name.find(part) == std::string::npos) continue;
    constexpr double kBeyondCaches = 192e6;
    const int copies = static_cast<int>(std::clamp(kBeyondCaches / std::max(c.bytes, 1.0), 1.0, 64.0));
    std::vector<test::CaseInstance> instances;
    for (int i = 0; i < copies; ++i) instances.push_back(c.prepare(*ops, DType::f32));
    const double once = best_of(1, [&] { instances[0].call(); });
    const int runs = static_cast<int>(std::clamp(0.3 / std::max(once, 1e-7) / copies, 1.0, 10.0));
    const double seconds = best_of(runs,
                                   [&] {
                                     for (const test::CaseInstance& instance : instances) instance.call();
                                   }) /
                           copies;
    fmt::print("{:<44} {:>10.1f} {:>8.2f} {:>5.0f}% {:>9.1f} {:>5.0f}%\n", c.name, seconds * 1e6, c.bytes / seconds * 1e-9,
               100.0 * c.bytes / seconds / bandwidth, c.flops / seconds * 1e-9, 100.0 * c.flops / seconds / flops);
  }
}

}  // namespace
}  // namespace cachalot

int main(int argc, char** argv) {
  try {
    cachalot::run(argc > 1 ? argv[1] : "", argc > 2 ? std::atoi(argv[2]) : 0, argc > 3 && std::strcmp(argv[3], "int8") == 0);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_ops: %s\n", error.what());
    return 1;
  }
  return 0;
}
