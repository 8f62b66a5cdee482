// For few rows: the sum and norm before the experts, the router's product and its choice. These are three times a launch and nothing else;
// here a cluster of 8 blocks takes a row. Every block sums and norms the whole row, its 8 warps hold an expert's router row each before the
// kernels before have ended, and the first block chooses.
#include "cuda/moe_prologue.h"

#include <cooperative_groups.h>

#include "cuda/route_choice.cuh"

namespace cachalot::cuda {
namespace {

constexpr int kThreads = 256, kBlocks = 8, kEach = 8, kMostHidden = kThreads * kEach, kMostExperts = kBlocks * kThreads / 32;
static_assert(kThreads == kChoiceThreads && kMostExperts == kChoiceExperts && sizeof(ChoiceShared) <= kMostHidden * sizeof(float));

__global__ __launch_bounds__(kThreads) void moe_prologue_kernel(const __grid_constant__ MoePrologueArgs a) {
#if __CUDA_ARCH__ >= 900
  __shared__ float reduce[33], logits[kMostExperts];
  __shared__ __align__(16) float normed[kMostHidden];
  pdl_trigger();
  const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  const int rank = static_cast<int>(cluster.block_rank()), t = static_cast<int>(blockIdx.x) / kBlocks;
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, n = a.residual.cols, at = thread * kEach;
  const int expert = rank * (kThreads / 32) + (thread >> 5);
  const bool mine = at < n;
  float4 router[kMostHidden / 128];
#pragma unroll
  for (int i = 0; i < kMostHidden / 128; ++i)
    router[i] = i * 128 < n && expert < a.route.n_experts
                    ? __ldg(reinterpret_cast<const float4*>(a.router + static_cast<int64_t>(expert) * n + i * 128 + lane * 4))
                    : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float weight[kEach], bias[2];
#pragma unroll
  for (int i = 0; i < kEach; ++i) weight[i] = mine ? a.norm[at + i] : 0.0f;
#pragma unroll
  for (int i = 0; i < 2; ++i) bias[i] = a.route.bias != nullptr && i * 32 + lane < a.route.n_experts ? a.route.bias[i * 32 + lane] : 0.0f;
  pdl_wait();
  float* residual = static_cast<float*>(a.residual.data) + t * a.residual.stride + at;
  float v[kEach] = {}, sum = 0.0f;
  if (mine) {
    const uint4 d = load16(static_cast<const bf16*>(a.delta.data) + t * a.delta.stride + at);
    const float4 r0 = *reinterpret_cast<const float4*>(residual), r1 = *reinterpret_cast<const float4*>(residual + 4);
    const uint32_t pairs[4] = {d.x, d.y, d.z, d.w};
    const float r[kEach] = {r0.x, r0.y, r0.z, r0.w, r1.x, r1.y, r1.z, r1.w};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      v[i] = r[i] + __uint_as_float((i & 1) == 0 ? pairs[i / 2] << 16 : pairs[i / 2] & 0xffff0000u);
      sum += v[i] * v[i];
    }
  }
  const float factor = rsqrtf(block_sum(sum, reduce) / static_cast<float>(n) + a.eps);
  uint32_t y[kEach / 2];
#pragma unroll
  for (int i = 0; i < kEach / 2; ++i) y[i] = pack_bf16(v[2 * i] * factor * weight[2 * i], v[2 * i + 1] * factor * weight[2 * i + 1]);
  if (mine)  // the router reads what the experts read
#pragma unroll
    for (int i = 0; i < kEach / 2; i += 2)
      *reinterpret_cast<float4*>(normed + at + 2 * i) =
          make_float4(__uint_as_float(y[i] << 16), __uint_as_float(y[i] & 0xffff0000u), __uint_as_float(y[i + 1] << 16),
                      __uint_as_float(y[i + 1] & 0xffff0000u));
  __syncthreads();
  float logit = 0.0f;
#pragma unroll
  for (int i = 0; i < kMostHidden / 128; ++i) {
    if (i * 128 >= n) break;
    const float4 x = *reinterpret_cast<const float4*>(normed + i * 128 + lane * 4);
    logit = fmaf(router[i].x, x.x, logit), logit = fmaf(router[i].y, x.y, logit);
    logit = fmaf(router[i].z, x.z, logit), logit = fmaf(router[i].w, x.w, logit);
  }
  logit = warp_sum(logit);
  if (lane == 0) cluster.map_shared_rank(logits, 0)[expert] = logit;
  cluster.sync();
  if (rank == 1 && mine) {  // all blocks have read the residual
    *reinterpret_cast<float4*>(residual) = make_float4(v[0], v[1], v[2], v[3]);
    *reinterpret_cast<float4*>(residual + 4) = make_float4(v[4], v[5], v[6], v[7]);
    *reinterpret_cast<uint4*>(static_cast<bf16*>(a.y.data) + t * a.y.stride + at) = make_uint4(y[0], y[1], y[2], y[3]);
  }
  if (rank == 0) {
    const float all[2] = {logits[lane], logits[lane + 32]};
    // Where the normed row was: the less shared memory, the sooner other kernels' blocks have room beside.
    choose_by_place(a.route, t, all, bias, *reinterpret_cast<ChoiceShared*>(normed));
  }
#endif
}

}  // namespace

bool moe_prologue_supports(const MoePrologueArgs& a) {
  const auto aligned = [](const Mat& m, DType type, int multiple) {
    return m.type == type && reinterpret_cast<uintptr_t>(m.data) % 16 == 0 && m.stride % multiple == 0;
  };
  return a.residual.cols <= kMostHidden && a.residual.cols % 128 == 0 && a.route.n_experts <= kMostExperts && a.route.group_score == 0 &&
         a.route.top_k <= 32 && aligned(a.residual, DType::f32, 4) && aligned(a.delta, DType::bf16, 8) && aligned(a.y, DType::bf16, 8);
}

cudaError_t launch_moe_prologue(const MoePrologueArgs& args, cudaStream_t stream) {
  return launch_clusters(moe_prologue_kernel, kBlocks, dim3(static_cast<unsigned>(kBlocks * args.residual.rows)), kThreads, 0, stream,
                         args);
}

}  // namespace cachalot::cuda
