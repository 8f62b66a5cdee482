// Experts of few rows each, codes of 4 bits in groups of 128. What limits gemm_stream.cuh there is instructions, half of which open the
// codes; here x comes as whole numbers and the codes go to the integer tensor cores as they are. A block takes two row tiles of an expert
// (a gate tile and its up tile, or two neighbours) for up to 8 rows of x; its warps take steps of 128 columns, two records, in turn.
#include "cuda/formats.cuh"
#include "cuda/moe_few.h"
#include "cuda/whole_numbers.cuh"

namespace cachalot::cuda {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32, kStepCols = kWholeGroup, kBlocks = 5, kRowsThreads = 256;

// What a lane holds of two neighbouring records: codes, and scale and minimum of rows g and g + 8.
struct Step {
  static constexpr TileInfo kInfo = tile_info(Tile::q4g128);
  static constexpr int kBytes = 2 * kInfo.bytes;
  uint4 codes[2];
  uint32_t scales[2];

  __device__ __forceinline__ void load(bool there, const uint8_t* from, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      load_stream(codes[r], from + r * kInfo.bytes + lane * 16, there);
      load_word(scales[r], from + r * kInfo.bytes + kInfo.scale_at + (lane >> 2) * 4, there);
    }
  }
};

// acc += 128 columns of rows g and g + 8 times those of up to 8 rows of x, four of which are a set: lane 4g + c gives bytes of row g / 2 of
// each set, the high ones where g is even, and gets the sums of row c.
__device__ __forceinline__ void multiply_step(const Step& w, const uint4 (&x)[2][2], const float2 (&group)[2], bool two,
                                              float (&acc)[2][2]) {
  constexpr uint32_t kLow = 0x0f0f0f0fu, kHigh = 0xf0f0f0f0u;
  int low[2][4] = {}, high[2][4] = {};  // codes in the upper half of a byte count 16-fold
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint4 v = w.codes[r];
    const uint32_t a[4] = {v.x & kLow, v.y & kLow, v.z & kLow, v.w & kLow}, b[4] = {v.x & kHigh, v.y & kHigh, v.z & kHigh, v.w & kHigh};
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if (s == 1 && !two) break;
      mma_k32(low[s], a, x[s][r].x, x[s][r].y);
      mma_k32(high[s], b, x[s][r].z, x[s][r].w);
      if (r == 0) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 scale = half2_of(w.scales[h]);
        const int sum = (low[s][2 * h] * 256 + low[s][2 * h + 1]) * 16 + (high[s][2 * h] * 256 + high[s][2 * h + 1]);
        acc[s][h] = fmaf(scale.x * group[s].y, static_cast<float>(sum), acc[s][h]);
        acc[s][h] = fmaf(-scale.y, group[s].x, acc[s][h]);
      }
    }
  }
}

// Every kFewRows-th pair of an expert leads as many: if pair `self` does, their number and `list`, by a warp; otherwise 0.
__device__ __forceinline__ int inline_pairs(const MoePlan& plan, int self, int lane, int* list, int& expert) {
  constexpr int kWords = kInlinePairs / 32;
  int id[kWords], n = 0, rank = 0;
  uint32_t same[kWords];
#pragma unroll
  for (int w = 0; w < kWords; ++w) id[w] = 32 * w + lane < plan.n_pairs ? __ldcg(plan.ids + 32 * w + lane) : -1;
  expert = __shfl_sync(~0u, self < 32 ? id[0] : id[1], self & 31);
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const uint32_t earlier = self >= 32 * (w + 1) ? ~0u : self >= 32 * w ? (1u << (self - 32 * w)) - 1u : 0u;
    same[w] = __ballot_sync(~0u, id[w] == expert);
    rank += __popc(same[w] & earlier);
  }
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const int place = n + __popc(same[w] & ((1u << lane) - 1u)) - rank;
    if (id[w] == expert && place >= 0 && place < kFewRows) list[place] = 32 * w + lane;
    n += __popc(same[w]);
  }
  __syncwarp();
  return expert >= 0 && rank % kFewRows == 0 ? min(n - rank, kFewRows) : 0;
}

template <bool kGate>
__global__ __launch_bounds__(kThreads, kBlocks) void few_kernel(const __grid_constant__ FewArgs a) {
  constexpr int kRows = kGate ? 16 : 32;  // of y
  __shared__ float sums[kWarps][kFewRows][33];
  __shared__ int lists[kWarps][kFewRows], pairs_of_block[kFewRows];
  pdl_trigger();
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31, g = lane >> 2, c = lane & 3;
  int block = static_cast<int>(blockIdx.x), slot = static_cast<int>(blockIdx.y), matrix = 0, begin = 0, count = 0;
  const bool shared = slot < a.shared_slots;
  const FewProduct p = shared ? a.shared : a.routed;
  if (shared) {
    begin = slot / a.shared_parts * kFewRows, block += slot % a.shared_parts * static_cast<int>(gridDim.x);
    count = min(a.n_tokens - begin, kFewRows);
  } else if (slot -= a.shared_slots; a.moe.tile > 0) {
    const int* tile = reinterpret_cast<const int*>(a.moe.tiles + slot);
    matrix = a.first_matrix + __ldcg(tile), begin = __ldcg(tile + 1), count = __ldcg(tile + 2);
  } else {
    count = inline_pairs(a.moe, slot, lane, lists[warp], matrix);
    matrix += a.first_matrix;
  }
  if (count <= 0 || block * kRows >= p.w.out) return;

  const int n_steps = p.w.cols / kStepCols;
  const int64_t row_tile = static_cast<int64_t>(n_steps) * Step::kBytes;
  const int64_t at = matrix * p.w.matrix_bytes + (kGate ? block : 2 * block) * row_tile + warp * Step::kBytes;
  const uint8_t* from[2] = {p.w.data + at, kGate ? p.up + at : p.w.data + at + row_tile};
  Step w[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) w[r].load(warp < n_steps, from[r], lane);
  int pair = begin + min(lane & 7, count - 1);
  if (!shared) pair = a.moe.tile > 0 ? __ldcg(a.moe.order + pair) : lists[warp][pair];
  const bool by_token = a.by_token && !shared;
  const int row = by_token ? static_cast<int>((static_cast<float>(pair) + 0.5f) * a.tokens_per_pair) : pair;
  const bool two = count > 4;
  const uint8_t* x_at[2];
  const float2* group_at[2];
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const int mine = __shfl_sync(~0u, row, 4 * s + (g >> 1)), result = __shfl_sync(~0u, row, 4 * s + c);
    x_at[s] = p.x.codes + (mine * 2 * p.w.cols + warp * 2 * kStepCols + (g & 1) * 64 + c * 16);
    group_at[s] = p.x.groups + (result * n_steps + warp);
  }
  if (a.n_tokens > 0) pdl_wait();  // always; within a branch, because the assembler would put it before the loads above
  float acc[2][2][2] = {};
  for (int step = warp; step < n_steps; step += kWarps) {
    uint4 x[2][2];
    float2 group[2];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if (s == 1 && !two) break;
      x[s][0] = load16(x_at[s]), x[s][1] = load16(x_at[s] + 128);
      group[s] = *group_at[s];
      x_at[s] += kWarps * 2 * kStepCols, group_at[s] += kWarps;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      multiply_step(w[r], x, group, two, acc[r]);
      from[r] += kWarps * Step::kBytes;
      w[r].load(step + kWarps < n_steps, from[r], lane);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
      for (int h = 0; h < 2; ++h) sums[warp][4 * s + c][16 * r + g + 8 * h] = acc[r][s][h];
  if (thread < kFewRows) pairs_of_block[thread] = pair;
  __syncthreads();
  for (int i = thread; i < count * kRows; i += kThreads) {
    const int r = i % kRows, col = i / kRows;
    float v = 0.0f, up = 0.0f;
#pragma unroll
    for (int k = 0; k < kWarps; ++k) {
      v += sums[k][col][r];
      if constexpr (kGate) up += sums[k][col][16 + r];
    }
    const int to = pairs_of_block[col] * p.w.out + block * kRows + r;
    if constexpr (kGate)
      static_cast<bf16*>(p.y)[to] = from_f32<bf16>(__fdividef(v, 1.0f + __expf(-v)) * up);
    else
      static_cast<float*>(p.y)[to] = v;
  }
}

// A block per row. Others may start once the kernels before this one have ended: theirs is the routing.
__global__ __launch_bounds__(kRowsThreads) void whole_rows_kernel(Mat x, WholeRows to, Mat more, WholeRows to_more) {
  pdl_wait();
  pdl_trigger();
  int row = static_cast<int>(blockIdx.x);
  if (row >= x.rows) row -= x.rows, x = more, to = to_more;
  const uint4* from = reinterpret_cast<const uint4*>(static_cast<const bf16*>(x.data) + row * x.stride);
  uint8_t* codes = to.codes + static_cast<int64_t>(row) * 2 * x.cols;
  float2* groups = to.groups + row * (x.cols / kStepCols);
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, n = x.cols / 8, each = kStepCols / 8;
  for (int base = thread - lane; base < n; base += kRowsThreads) {
    const int i = base + lane;
    const WholePart part = whole_part<kStepCols>(i < n ? load16(from + i) : make_uint4(0, 0, 0, 0));
    if (i < n) store_whole(codes, i, part);
    if (i < n && i % each == 0) groups[i / each] = part.group;
  }
}

template <bool kGate>
cudaError_t launch_few(FewArgs a, cudaStream_t stream) {
  constexpr int kRows = kGate ? 16 : 32;
  const int blocks = a.routed.w.out / kRows;
  dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(a.moe.tile > 0 ? a.moe.max_tiles : a.moe.n_pairs));
  a.tokens_per_pair = 1.0f / static_cast<float>(a.moe.top_k);
  // The shared expert's blocks come first: its weights do not hang on the routing.
  if (a.shared.w.data != nullptr) {
    a.shared_parts = ceil_div(a.shared.w.out / kRows, blocks);
    a.shared_slots = ceil_div(a.n_tokens, kFewRows) * a.shared_parts;
    grid.y += static_cast<unsigned>(a.shared_slots);
  }
  return launch(few_kernel<kGate>, grid, kThreads, 0, stream, a);
}

}  // namespace

bool few_supports(const FewProduct& p) { return p.w.tile == Tile::q4g128 && p.w.in == p.w.cols && p.w.out % (2 * kRecordRows) == 0; }

cudaError_t launch_whole_rows(Mat x, WholeRows to, Mat more, WholeRows to_more, cudaStream_t stream) {
  return launch(whole_rows_kernel, dim3(static_cast<unsigned>(x.rows + more.rows)), kRowsThreads, 0, stream, x, to, more, to_more);
}
cudaError_t launch_few_gate_up(const FewArgs& args, cudaStream_t stream) { return launch_few<true>(args, stream); }
cudaError_t launch_few_down(const FewArgs& args, cudaStream_t stream) { return launch_few<false>(args, stream); }

}  // namespace cachalot::cuda
