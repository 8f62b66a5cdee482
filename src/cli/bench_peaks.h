// What the machine can do at most, measured when a benchmark begins: the yardstick beside every speed.
#pragma once

#include <functional>
#include <string>

#include "ops/ops.h"

namespace cachalot {

struct MachinePeaks {
  double read = 0.0;    // bytes per second: CPU reading huge pages with all threads, or a GPU copying (reads and writes counted)
  double flops = 0.0;   // FLOP per second of the fastest matrix product of this device, operands near the cores
  std::string product;  // the weights of that product: "q8_0"

  [[nodiscard]] bool known() const { return read > 0.0 && flops > 0.0; }
  [[nodiscard]] std::string text() const;  // "31.8 GB/s read, 0.42 TFLOP/s (q8_0 weights)", or that they are not known
};

// Not for the reference device, which answers with unknown peaks.
MachinePeaks measure_peaks(Ops& ops, int n_threads);

// The shortest of `runs` runs in seconds; `wait` must return when the device has finished.
double shortest_run(int runs, const std::function<void()>& run);

// Waits for everything that was enqueued.
class Finish {
 public:
  explicit Finish(Ops& ops) : ops_(ops), memory_(ops.alloc(sizeof(float))) {}
  void operator()() const {
    float ignored = 0.0f;
    ops_.download(&ignored, memory_.get(), sizeof ignored);
  }

 private:
  Ops& ops_;
  Buffer memory_;
};

}  // namespace cachalot
