// The streaming product for weights of the form f8.
#include "cuda/gemm_stream.cuh"

namespace cachalot::cuda {
cudaError_t launch_stream_f8(const GemmArgs& a, int col_tiles, cudaStream_t stream) {
  return launch_stream_format<Tile::f8>(a, col_tiles, stream);
}
}  // namespace cachalot::cuda
