// TraceOps: a decorator that reports every call with its time and outputs, and finds the first output that is not finite.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "ops/ops.h"

namespace cachalot {

struct TraceRecord {
  int index;  // call number since the last embed, which is the first call (0) of a forward pass
  const char* op;
  View out;        // the main output (the residual for add_rmsnorm)
  double seconds;  // host time of the call; the work itself only where host_memory()
};
// Called after each op has run.
using TraceSink = std::function<void(const TraceRecord&)>;

std::unique_ptr<Ops> make_trace_ops(Ops& inner, TraceSink sink);

// A sink helper: number of values of `out` that are NaN or infinite, read from the device.
int64_t count_not_finite(Ops& ops, View out);

}  // namespace cachalot
