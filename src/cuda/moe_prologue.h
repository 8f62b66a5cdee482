// What a layer does between attention and its experts, in one launch.
#pragma once

#include <cuda_runtime.h>

#include "cuda/kernels.h"

namespace cachalot::cuda {

constexpr int kMoePrologueRows = 16;

struct MoePrologueArgs {
  Mat residual, delta, y;  // f32, bf16, bf16: residual += delta; y = rmsnorm(residual)
  const float* norm = nullptr;
  float eps = 0.0f;
  const float* router = nullptr;  // [n_experts, hidden]
  RouteArgs route;                // `logits` is not used: they stay inside
};
bool moe_prologue_supports(const MoePrologueArgs& args);
cudaError_t launch_moe_prologue(const MoePrologueArgs& args, cudaStream_t stream);

}  // namespace cachalot::cuda
