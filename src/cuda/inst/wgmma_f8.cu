// The product by wgmma for weights of the form f8.
#include "cuda/gemm_wgmma.cuh"

namespace cachalot::cuda {
cudaError_t launch_wgmma_f8(const GemmArgs& a, int rows, cudaStream_t stream) { return launch_wgmma_format<Tile::f8>(a, rows, stream); }
}  // namespace cachalot::cuda
