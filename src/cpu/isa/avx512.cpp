// The kernels in AVX-512 (F, BW, DQ, VL). Built with flags of its own: see CMakeLists.txt.
#include "cpu/isa/simd_avx512.h"
//
#include "cpu/isa/fill_table.h"

namespace cachalot::cpu {

constinit const KernelTable kAvx512Table = make_table("avx512");

}  // namespace cachalot::cpu
