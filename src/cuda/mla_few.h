// Absorbed MLA of few rows in three launches: what comes before attention with W_UK, attention, and the sum over its parts with W_UV. One
// row over a context that is not long takes one launch.
#pragma once

#include "cuda/attention_kernels.h"

namespace cachalot::cuda {

constexpr int kMlaFewRows = 32, kMlaValues = 512, kMlaFewHead = 128;  // rows at most; the latent; nope and values of a head
// One launch: each two heads read the context again, so for few heads, and while the context fits a cluster's shared memory.
constexpr int kMlaOneHeads = 32, kMlaOneKeys = 1024;

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
// One row in one launch; attend's q and parts are not used.
bool mla_one_supports(const MlaFewArgs& args);
cudaError_t launch_mla_one(const MlaFewArgs& args, cudaStream_t stream);

}  // namespace cachalot::cuda
