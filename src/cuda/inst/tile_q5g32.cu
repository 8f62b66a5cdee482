// The tiled product for weights of the form q5g32.
#include "cuda/gemm_tile.cuh"

namespace cachalot::cuda {
cudaError_t launch_tile_q5g32(const GemmArgs& a, int rows, cudaStream_t stream) { return launch_tile_format<Tile::q5g32>(a, rows, stream); }
}  // namespace cachalot::cuda
