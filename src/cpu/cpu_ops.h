// CpuOps: the Ops of this machine's CPU. Activations f32, host memory, KV pages in f32, f16 or bf16; calls have finished when they return.
// Results do not depend on the number of threads, nor on what else is in the batch: each output has one fixed order of summation.
#pragma once

#include <memory>

#include "ops/ops.h"

namespace cachalot {

class ThreadPool;

struct CpuOptions {
  int n_threads = 0;                 // 0: one per physical core
  bool pin = false;                  // tie the workers to CPUs of their own
  std::shared_ptr<ThreadPool> pool;  // use this one and ignore the two above
  // Where the CPU has AVX2: multiply integer weights with activations rounded to int8, a scale per 32. Several times faster, with
  // an error of about 0.4% of the largest activation of each 32. Chosen at pack; elsewhere without effect.
  bool int8_activations = false;
};

// Throws Error when the environment variable CACHALOT_ISA names an instruction set that is unknown or not there.
std::unique_ptr<Ops> make_cpu_ops(const CpuOptions& options = {});

}  // namespace cachalot
