// The fp8 product of many rows: both operands E4M3 with scales per block, so that sums of 128 products are scaled before they are added up
// in f32 (DeepSeek-V3 section 3.3.2). Activations are rounded to 4 significant bits: an error of about 2.6% of each, 7e-4 in NMSE.
#pragma once

#include "cuda/kernels.h"

namespace cachalot::cuda {

struct Fp8Rows {
  uint8_t* codes = nullptr;  // [rows, cols] E4M3; cols a multiple of 128
  float* scales = nullptr;   // x: [cols / 128, scale_stride], per row and 128 columns; w: [ceil(rows / 128), scale_stride], per 128 x 128
  int cols = 0, scale_stride = 0;
};
// x bf16, rows aligned to 16 bytes.
cudaError_t launch_quantize_rows(Mat x, const Fp8Rows& to, cudaStream_t stream);
cudaError_t launch_unpack_f8(const Segment& w, int matrix, const Fp8Rows& to, cudaStream_t stream);

}  // namespace cachalot::cuda
