// CpuOps: the Ops of this machine's CPU. Activations f32, host memory, KV pages in f32, f16 or bf16; calls have finished when they return.
// Results do not depend on the number of threads, nor on what else is in the batch: each output has one fixed order of summation.
#pragma once

#include <memory>

#include "base/cpu_topology.h"
#include "ops/ops.h"

namespace cachalot {

class ThreadPool;

struct CpuOptions {
  int n_threads = 0;                 // 0: one per physical core
  bool pin = false;                  // tie the workers to CPUs of their own
  Numa numa = Numa::none;            // where workers and weights go on a machine of several nodes
  std::shared_ptr<ThreadPool> pool;  // use this one and ignore the three above
  // Where the CPU has AVX2, integer weights are multiplied with activations rounded to 16 bits (a scale per 256, error 1.6e-5 of the
  // largest), several times faster than in f32 and the same to the bit on every level. True keeps those products in f32 too. Read at pack.
  bool f32_products = false;
  // With AMX: products of 32 rows or more, of any weights but f32, and attention of sequences with so many new rows in bf16 with sums in
  // f32. The fastest for prompts, but a row's result then depends in its last bits on how many rows it came with.
  bool bf16_prompts = true;
};

// Throws Error when the environment variable CACHALOT_ISA names an instruction set that is unknown or not there.
std::unique_ptr<Ops> make_cpu_ops(const CpuOptions& options = {});

}  // namespace cachalot
