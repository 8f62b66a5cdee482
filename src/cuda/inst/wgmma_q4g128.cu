// The product by wgmma for weights of the form q4g128.
#include "cuda/gemm_wgmma.cuh"

namespace cachalot::cuda {
cudaError_t launch_wgmma_q4g128(const GemmArgs& a, int rows, cudaStream_t stream) {
  return launch_wgmma_format<Tile::q4g128>(a, rows, stream);
}
}  // namespace cachalot::cuda
