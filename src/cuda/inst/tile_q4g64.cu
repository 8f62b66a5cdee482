// The tiled product for weights of the form q4g64.
#include "cuda/gemm_tile.cuh"

namespace cachalot::cuda {
cudaError_t launch_tile_q4g64(const GemmArgs& a, int rows, cudaStream_t stream) { return launch_tile_format<Tile::q4g64>(a, rows, stream); }
}  // namespace cachalot::cuda
