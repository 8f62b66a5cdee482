// The products of the wide layout in AVX2. Built with flags of its own: see CMakeLists.txt.
#include "cpu/isa/bytes_avx2.h"
//
#include "cpu/isa/wide_floats.h"
#include "cpu/isa/wide_opened.h"

namespace cachalot::cpu {

constinit const WideKernels kAvx2WideKernels = with_floats(make_wide_kernels<OpensForMany>());

}  // namespace cachalot::cpu
