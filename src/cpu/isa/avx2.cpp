// The kernels in AVX2, FMA and F16C. Built with flags of its own: see CMakeLists.txt.
#include "cpu/isa/simd_avx2.h"
//
#include "cpu/isa/fill_table.h"

namespace cachalot::cpu {

constinit const KernelTable kAvx2Table = make_table("avx2");

}  // namespace cachalot::cpu
