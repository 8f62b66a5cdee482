// The products on AMX tiles. Built with flags of its own: see CMakeLists.txt.
#include "cpu/isa/amx.h"

#include "cpu/isa/amx_attention.h"

namespace cachalot::cpu {

constinit const TileKernels kAmxKernels = make_tile_kernels();
constinit const AttentionKernels kAmxAttention = make_tile_attention();

}  // namespace cachalot::cpu
