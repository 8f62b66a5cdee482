// CublasLt: the dense bf16 product of many rows by NVIDIA's library, loaded at run time, so that its absence only costs speed.
#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "cuda/fp8_product.h"
#include "cuda/kernels.h"

namespace cachalot::cuda {

class CublasLt {
 public:
  // Null when the library is not there.
  static std::unique_ptr<CublasLt> load();
  virtual ~CublasLt() = default;
  // y[t, o] = sum_k w[o, k] x[t, k] + beta y[t, o]: w bf16 [out, cols], x bf16 [T, cols], y bf16 or f32. False: not for this shape.
  virtual bool multiply(const GemmArgs& args, cudaStream_t stream) = 0;
  // The same of w and x in fp8 (sm_90). scale_stride: of w, ceil(cols / 128) rounded up to 4; of x, its rows.
  virtual bool multiply_fp8(const GemmArgs& args, const Fp8Rows& w, const Fp8Rows& x, cudaStream_t stream) = 0;
};

}  // namespace cachalot::cuda
