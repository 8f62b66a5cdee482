// Sums over huge pages, asking for memory four kilobytes ahead as the kernels do: on some machines that is worth a quarter.
#include "cpu/bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "cpu/huge_memory.h"

namespace cachalot::cpu {

double read_bandwidth(ThreadPool& pool, size_t bytes) {
  constexpr size_t kPiece = size_t{1} << 20, kAhead = 4096;
  constexpr int kPasses = 5;
  const auto n_pieces = static_cast<int>(std::max<size_t>(bytes / kPiece, 1));
  const auto memory = map_huge(static_cast<size_t>(n_pieces) * kPiece);
  pool.run(n_pieces, [&](int i, int) { std::memset(memory.get() + static_cast<size_t>(i) * kPiece, 1, kPiece); });
  std::atomic<uint64_t> total{0};
  double best = 0.0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    pool.run(n_pieces, [&](int i, int) {
      const auto* p = reinterpret_cast<const uint64_t*>(memory.get() + static_cast<size_t>(i) * kPiece);
      uint64_t sums[8] = {};
      for (size_t k = 0; k < kPiece / sizeof(uint64_t); k += 8) {
        __builtin_prefetch(p + k + kAhead / sizeof(uint64_t));
        for (size_t j = 0; j < 8; ++j) sums[j] += p[k + j];
      }
      uint64_t sum = 0;
      for (const uint64_t part : sums) sum += part;
      total.fetch_add(sum, std::memory_order_relaxed);  // keeps the reads
    });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::max(best, static_cast<double>(n_pieces) * kPiece / seconds);
  }
  return best;
}

}  // namespace cachalot::cpu
