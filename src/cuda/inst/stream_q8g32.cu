// The streaming product for weights of the form q8g32.
#include "cuda/gemm_stream.cuh"

namespace cachalot::cuda {
cudaError_t launch_stream_q8g32(const GemmArgs& a, int col_tiles, cudaStream_t stream) {
  return launch_stream_format<Tile::q8g32>(a, col_tiles, stream);
}
}  // namespace cachalot::cuda
