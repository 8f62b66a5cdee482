// TensorMap: the driver's encoder, found at run time so that nothing links to the driver.
#include "cuda/tensor_map.h"

namespace cachalot::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode find_encoder() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  constexpr unsigned kSince = 12000;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, kSince, cudaEnableDefault, &result) != cudaSuccess ||
      result != cudaDriverEntryPointSuccess)
    return nullptr;
  return reinterpret_cast<Encode>(found);
}

}  // namespace

cudaError_t make_tensor_map(const TensorRows& rows, int box_rows, CUtensorMap& map) {
  static const Encode encode = find_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t shape[2] = {static_cast<cuuint64_t>(rows.cols), static_cast<cuuint64_t>(rows.n_rows)};
  const cuuint64_t row_bytes[1] = {static_cast<cuuint64_t>(rows.stride) * 2};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(box_rows)}, step[2] = {1, 1};
  const CUresult made = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(rows.data), shape, row_bytes, box, step,
                               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return made == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace cachalot::cuda
