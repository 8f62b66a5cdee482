// The product by wgmma for weights of the form bf16.
#include "cuda/gemm_wgmma.cuh"

namespace cachalot::cuda {
cudaError_t launch_wgmma_bf16(const GemmArgs& a, int rows, cudaStream_t stream) { return launch_wgmma_format<Tile::bf16>(a, rows, stream); }
}  // namespace cachalot::cuda
