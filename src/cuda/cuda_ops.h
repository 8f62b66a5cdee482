// CudaOps: the backend for NVIDIA GPUs (compute capability 8.0 and up). This header needs no CUDA: a build without it has the same
// functions, which then throw. Activations are bf16 with sums in f32, or f32 throughout; the residual stream is f32. Work goes to one
// stream.
#pragma once

#include <functional>
#include <memory>

#include "ops/ops.h"

namespace cachalot {

struct CudaOptions {
  int device = 0;
  // bf16 is the fast form, with quantized weights kept in their bits. f32 turns every weight into f32 and uses plain kernels: for checks.
  DType activation = DType::bf16;
  // Fails on allocation, upload or download while temporary memory is held, that is inside a forward pass, and checks every launch.
  // Also set by the environment variable CACHALOT_CUDA_CHECK=1.
  bool check = false;
  // Rounds activations to fp8 (E4M3, a scale per 128) in products of many rows with fp8_block weights, on sm_90: 1.3 to 1.44 times as fast
  // at 4,096 cubed as bf16, with an error of 7e-4 in NMSE instead of 1e-5. Also set by CACHALOT_CUDA_FP8=1.
  bool fp8_activations = false;
};

// Whether this build has the backend and this machine a device for it.
bool cuda_available();
// Throws Error when there is no such device, or the build has no CUDA.
std::unique_ptr<Ops> make_cuda_ops(const CudaOptions& options = {});

// ---- beyond Ops; `ops` must come from make_cuda_ops ----

void cuda_synchronize(Ops& ops);
// Seconds between the start and the end of what `work` enqueues, by events on the stream.
double cuda_seconds(Ops& ops, const std::function<void()>& work);

}  // namespace cachalot
