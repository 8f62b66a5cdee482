// The one place where concrete backends are named: from a --device text to an Ops.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/cpu_topology.h"
#include "ops/hybrid_ops.h"

namespace cachalot {

struct BackendOptions {
  // Of the CPU backend:
  int n_threads = 0;  // 0: one per physical core
  bool pin = false;   // a CPU of its own for each worker
  Numa numa = Numa::none;
  // Of all: only kernels that give a row the same bits whatever rows come with it; Error where there are none.
  bool batch_invariant = false;
  // Of all: activations are not rounded to bf16 (CUDA; prompts on AMX). Slower; for work that is not inference.
  bool f32 = false;
};

// device: "ref" (the slow reference), "cpu", "cuda" or "cuda:N". Throws Error for another text, and for a device that this build or this
// machine does not have.
std::unique_ptr<Ops> make_ops(std::string_view device, const BackendOptions& options);

// The GPU that `device` names, with a CPU backend beside it for experts that stay in the host's memory. Throws Error for another device.
std::unique_ptr<HybridOps> make_gpu_and_cpu(std::string_view device, const BackendOptions& options);

// What this build can run on, for `version`: "ref cpu cuda".
std::string backends_built();

}  // namespace cachalot
