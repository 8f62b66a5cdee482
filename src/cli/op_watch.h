// Watching a model run, operation by operation: --trace prints each with its time, --check-finite finds the first bad number.
#pragma once

#include <memory>
#include <string>

#include "ops/ops.h"

namespace cachalot {

// Prints a line per call to stderr.
std::unique_ptr<Ops> make_printing_ops(Ops& inner);

// Throws Error at the first call whose output holds a NaN or an infinity, naming operation, call number and layer.
std::unique_ptr<Ops> make_finite_ops(Ops& inner);

}  // namespace cachalot
