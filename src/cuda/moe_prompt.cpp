// CudaOps: the mixture of experts of prompts, where the experts' weights have codes of 4 bits.
#include "cuda/cuda_ops_impl.h"
#include "cuda/moe_many.h"

namespace cachalot::cuda {
namespace {

constexpr int kLeastPairs = 53;  // per expert; measured

}  // namespace

bool CudaOps::moe_many(View x, const Experts& experts, const Routing& routing, View y, const AddNorm* then) {
  ExpertSegments s;
  const int n_tokens = x.n_rows(), n_pairs = n_tokens * routing.ids.n_cols(), n_experts = experts.gate_up.n_matrices;
  if (n_pairs <= kInlinePairs || n_pairs / n_experts < kLeastPairs || !expert_segments(x, experts, y, s) || !many_supports(s.gate) ||
      !many_supports(s.down))
    return false;
  const size_t mark = temp_mark();
  MoePlan plan;
  plan.ids = static_cast<const int*>(routing.ids.data);
  plan.n_pairs = n_pairs;
  plan.top_k = routing.ids.n_cols();
  plan.n_experts = n_experts;
  plan.streamed = false;
  plan.drawn = static_cast<unsigned*>(temp(DType::i32, 1, 2).data);
  plan_moe(plan, kManyRows);

  // Rows of x in tiles: those of the pairs, or all in order.
  const auto blocked = [&](int n_tiles, int cols) { return temp(DType::bf16, n_tiles * kManyRows, cols).data; };
  const auto rows_of = [&](const Segment& w, Rowing rowing, int n_tiles) {
    GemmArgs rows;
    rows.rowing = rowing;
    rows.w = w;
    rows.x = x.data;
    rows.x_stride = x.stride[0];
    rows.n_rows = n_tokens;
    rows.tile_rows = kManyRows;
    rows.moe = plan;
    rows.x_by_token = rowing == Rowing::moe_tiles;
    void* const to = blocked(n_tiles, w.cols);
    done(launch_block_rows(rows, to, stream_), "moe");
    return to;
  };
  ManyArgs first, second;
  first.plan = second.plan = plan;
  first.n_tokens = second.n_tokens = n_tokens;
  first.n_multiprocessors = second.n_multiprocessors = n_multiprocessors_;
  first.first_matrix = experts.gate_up.first, second.first_matrix = experts.down.first;
  first.drawn = plan.drawn, second.drawn = plan.drawn + 1;
  first.routed = {
      .w = s.gate, .up = s.up, .x = rows_of(s.gate, Rowing::moe_tiles, plan.max_tiles), .y = blocked(plan.max_tiles, s.down.cols)};
  const View pairs = temp(DType::bf16, n_pairs, y.n_cols());
  second.routed = {.w = s.down, .x = first.routed.y, .y = pairs.data};
  View shared;
  if (experts.shared_gate_up) {
    shared = temp(DType::f32, n_tokens, y.n_cols());
    swiglu_ffn(x, experts.shared_gate_up, experts.shared_down, shared);
  }
  done(launch_many_gate_up(first, stream_), "moe");
  done(launch_many_down(second, stream_), "moe");
  sum_pairs(pairs, shared, routing, y, then, true);
  temp_release(mark);
  return true;
}

}  // namespace cachalot::cuda
