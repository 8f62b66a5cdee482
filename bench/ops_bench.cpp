// bench_ops [PART OF A NAME] [THREADS] [f32]: `cachalot bench ops` for CpuOptions that the command line does not offer.
#include <fmt/format.h>

#include <cstdlib>
#include <cstring>

#include "base/thread_pool.h"
#include "cli/bench_ops.h"
#include "cpu/cpu_ops.h"

int main(int argc, char** argv) {
  using namespace cachalot;
  try {
    const auto pool = std::make_shared<ThreadPool>(argc > 2 ? std::atoi(argv[2]) : 0);
    const auto ops = make_cpu_ops({.pool = pool, .f32_products = argc > 3 && std::strcmp(argv[3], "f32") == 0});
    const MachinePeaks peaks = measure_peaks(*ops, pool->size());
    fmt::print("{}, {} threads: {}\n", ops->name(), pool->size(), peaks.text());
    print_op_table(*ops, peaks, chosen_cases(bench_cases(), argc > 1 ? argv[1] : ""));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_ops: %s\n", error.what());
    return 1;
  }
  return 0;
}
