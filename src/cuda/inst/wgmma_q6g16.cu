// The product by wgmma for weights of the form q6g16.
#include "cuda/gemm_wgmma.cuh"

namespace cachalot::cuda {
cudaError_t launch_wgmma_q6g16(const GemmArgs& a, int rows, cudaStream_t stream) {
  return launch_wgmma_format<Tile::q6g16>(a, rows, stream);
}
}  // namespace cachalot::cuda
