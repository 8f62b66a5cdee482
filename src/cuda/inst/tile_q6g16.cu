// The tiled product for weights of the form q6g16.
#include "cuda/gemm_tile.cuh"

namespace cachalot::cuda {
cudaError_t launch_tile_q6g16(const GemmArgs& a, int rows, cudaStream_t stream) { return launch_tile_format<Tile::q6g16>(a, rows, stream); }
}  // namespace cachalot::cuda
