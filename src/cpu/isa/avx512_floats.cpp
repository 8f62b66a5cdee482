// The products of floats in the wide layout in AVX-512 (F, BW, DQ, VL). Built with flags of its own: see CMakeLists.txt.
#include "cpu/isa/simd_avx512.h"
//
#include "cpu/isa/wide_floats.h"

namespace cachalot::cpu {

constinit const WideKernels kAvx512FloatKernels = with_floats({});

}  // namespace cachalot::cpu
