// libFuzzer target for importance matrices, GGUF and .dat: any bytes are read or refused with an Error, and what is read can be added to
// itself, compared with a model and asked for weights.
#include <cmath>

#include "base/error.h"
#include "fuzz/memory_path.h"
#include "quant/imatrix.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cachalot;
  const MemoryPath file(data, size);
  try {
    ImportanceMatrix matrix = ImportanceMatrix::read(file.path());
    if (matrix.entries.empty()) std::abort();
    for (const auto& [name, entry] : matrix.entries)
      if (entry.counts.empty() || entry.sums.size() % entry.counts.size() != 0) std::abort();
    matrix.add(ImportanceMatrix::read(file.path()));
    std::vector<PlannedMatrix> plan;
    for (const auto& [name, entry] : matrix.entries) {
      const auto n = static_cast<int>(entry.counts.size()), in = static_cast<int>(entry.sums.size()) / n;
      plan.push_back({{.name = name, .n_matrices = n, .out = 8, .in = in}, {}, {}});
    }
    static_cast<void>(fit_of(matrix, plan));
    for (const PlannedMatrix& p : plan)
      for (int m = 0; m < p.matrix.n_matrices; ++m)
        for (const float v : matrix.importance(p.matrix, m))
          if (!(v >= 0.0f)) std::abort();
  } catch (const Error&) {
  }
  return 0;
}
