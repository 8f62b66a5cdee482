// CublasLt: the dense bf16 product of many rows by NVIDIA's library, loaded at run time, so that its absence only costs speed.
#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "cuda/kernels.h"

namespace cachalot::cuda {

class CublasLt {
 public:
  // Null when the library is not there.
  static std::unique_ptr<CublasLt> load();
  virtual ~CublasLt() = default;
  // y[t, o] = sum_k w[o, k] x[t, k] + beta y[t, o]: w bf16 [out, cols], x bf16 [T, cols], y bf16 or f32. False: not for this shape.
  virtual bool multiply(const GemmArgs& args, cudaStream_t stream) = 0;
};

}  // namespace cachalot::cuda
