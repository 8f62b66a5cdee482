// StagedOps: a device behind host memory. Every call uploads the arrays that it reads, runs on the device, and downloads those that it
// writes, so that code which looks at activations on the host (calibration) can have its products done by a GPU. Weights, constants and the
// KV cache, which alloc() gives, stay on the device. The traffic is small beside products of thousands of rows, and not beside a decode
// step.
#pragma once

#include <memory>

#include "ops/ops.h"

namespace cachalot {

// `inner` must outlive it.
std::unique_ptr<Ops> make_staged_ops(Ops& inner);

}  // namespace cachalot
