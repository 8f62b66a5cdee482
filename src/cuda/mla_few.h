// Absorbed MLA of few rows in three launches: what comes before attention with W_UK, attention, and the sum over its parts with W_UV.
#pragma once

#include "cuda/attention_kernels.h"

namespace cachalot::cuda {

constexpr int kMlaFewRows = 32, kMlaValues = 512, kMlaFewHead = 128;  // rows at most; the latent; nope and values of a head

struct MlaFewArgs {
  PrologueArgs prologue;
  AttendArgs attend;         // its q is what the first launch writes; `out` is not used
  const void* uk = nullptr;  // bf16 [heads, 512, 128]
  const void* uv = nullptr;  // bf16 [heads, 128, 512]
  Mat context;               // bf16 [rows, heads * 128]
};
// False where the kernels cannot take them, or where the context is not cut into parts.
bool mla_few_supports(const MlaFewArgs& args);
cudaError_t launch_mla_few(const MlaFewArgs& args, MlaKernel kernel, cudaStream_t stream);

}  // namespace cachalot::cuda
