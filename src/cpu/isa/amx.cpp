// The products on AMX tiles. Built with flags of its own: see CMakeLists.txt.
#include "cpu/isa/amx.h"

namespace cachalot::cpu {

constinit const TileKernels kAmxKernels = make_tile_kernels();

}  // namespace cachalot::cpu
