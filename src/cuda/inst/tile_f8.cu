// The tiled product for weights of the form f8.
#include "cuda/gemm_tile.cuh"

namespace cachalot::cuda {
cudaError_t launch_tile_f8(const GemmArgs& a, int rows, cudaStream_t stream) { return launch_tile_format<Tile::f8>(a, rows, stream); }
}  // namespace cachalot::cuda
