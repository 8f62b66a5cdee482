// The integer products of the wide layout in AVX-512 VNNI. Built with flags of its own: see CMakeLists.txt.
#include "cpu/isa/bytes_vnni.h"
//
#include "cpu/isa/wide.h"

namespace cachalot::cpu {

constinit const WideKernels kAvx512VnniKernels = make_wide_kernels<OpensInRegisters>();

}  // namespace cachalot::cpu
