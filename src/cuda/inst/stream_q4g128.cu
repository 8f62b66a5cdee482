// The streaming product for weights of the form q4g128.
#include "cuda/gemm_stream.cuh"

namespace cachalot::cuda {
cudaError_t launch_stream_q4g128(const GemmArgs& a, int col_tiles, cudaStream_t stream) {
  return launch_stream_format<Tile::q4g128>(a, col_tiles, stream);
}
}  // namespace cachalot::cuda
