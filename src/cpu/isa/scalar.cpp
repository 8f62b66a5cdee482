// The kernels in plain C++, built with the baseline's flags.
#include "cpu/isa/simd_scalar.h"
//
#include "cpu/isa/fill_table.h"

namespace cachalot::cpu {

constinit const KernelTable kScalarTable = make_table("scalar");

}  // namespace cachalot::cpu
