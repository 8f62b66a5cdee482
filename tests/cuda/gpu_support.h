// What the tests of the CUDA backend share: the skip on machines without a GPU, and backends that are made once.
#pragma once

#include <gtest/gtest.h>

#include "cuda/cuda_ops.h"
#include "ops/op_cases.h"

#define SKIP_WITHOUT_GPU() \
  if (!cuda_available()) GTEST_SKIP() << "no CUDA device, or a build without CUDA"

namespace cachalot::test {

inline Ops& gpu(DType activation) {
  static const std::unique_ptr<Ops> bf16 = make_cuda_ops({.activation = DType::bf16}), f32 = make_cuda_ops({.activation = DType::f32});
  return activation == DType::bf16 ? *bf16 : *f32;
}
inline Ops& reference() {
  static const std::unique_ptr<Ops> ops = make_ref_ops();
  return *ops;
}

}  // namespace cachalot::test
