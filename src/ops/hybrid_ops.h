// HybridOps: a device, most of whose model lies with the host. The routed experts of some layers are packed, and computed, by a host
// backend; all else, the shared expert among it, is the device's. Of a step's rows only the inputs of those layers, their routing and the
// results cross the bus. Such layers are what a mixture of experts mostly consists of, and each token reads a small part of them.
#pragma once

#include <memory>

#include "ops/ops.h"

namespace cachalot {

class HybridOps : public Ops {
 public:
  // As pack(), of experts that stay with the host: for Experts::gate_up and Experts::down, both or none. Load time.
  virtual Linear pack_on_host(std::span<const LinearSource> row_segments) = 0;
};

// `host` must have host_memory(). Where experts lie with the host, calls wait for the device in the middle of a step, which it must allow
// (CudaOptions::check does not), and nothing can be recorded.
std::unique_ptr<HybridOps> make_hybrid_ops(std::unique_ptr<Ops> device, std::unique_ptr<Ops> host);

}  // namespace cachalot
