// The tiled product for weights of the form q4g32.
#include "cuda/gemm_tile.cuh"

namespace cachalot::cuda {
cudaError_t launch_tile_q4g32(const GemmArgs& a, int rows, cudaStream_t stream) { return launch_tile_format<Tile::q4g32>(a, rows, stream); }
}  // namespace cachalot::cuda
