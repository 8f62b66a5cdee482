// The tiled product for weights of the form q4g128.
#include "cuda/gemm_tile.cuh"

namespace cachalot::cuda {
cudaError_t launch_tile_q4g128(const GemmArgs& a, int rows, cudaStream_t stream) {
  return launch_tile_format<Tile::q4g128>(a, rows, stream);
}
}  // namespace cachalot::cuda
