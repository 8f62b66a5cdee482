// CudaOps: routing and the mixture of experts. Which expert gets how many rows stays on the device: grids are sized by bounds.
#include <algorithm>

#include "base/check.h"
#include "cuda/cuda_ops_impl.h"

namespace cachalot::cuda {
namespace {

constexpr int kInlinePairs = 64;      // up to here each block finds its expert's pairs itself
constexpr int kStreamPerExpert = 24;  // pairs per expert up to which the weights are streamed
constexpr int kF32Pairs = 4096;       // up to here the experts' results are held in f32

// Rows per tile, and whether tiles go to the streaming kernel.
int tile_rows(int n_pairs, int n_experts, bool& stream) {
  const int each = n_pairs / n_experts;
  stream = each <= kStreamPerExpert;
  if (stream) return each <= 4 ? 8 : each <= 10 ? 16 : 32;
  return each <= 48 ? 64 : 128;
}

}  // namespace

void CudaOps::route(View logits, View bias, const Router& router, const Routing& out) {
  CACHALOT_CHECK(logits.dtype == DType::f32 && logits.n_cols() == router.n_experts && router.top_k > 0 && router.top_k <= router.n_experts);
  CACHALOT_CHECK(out.ids.dtype == DType::i32 && out.ids.n_cols() == router.top_k && out.weights.dtype == DType::f32);
  if (logits.n_rows() == 0) return;
  RouteArgs args;
  args.logits = static_cast<const float*>(logits.data);
  args.logits_stride = logits.stride[0];
  args.bias = static_cast<const float*>(bias.data);
  args.ids = static_cast<int*>(out.ids.data);
  args.ids_stride = out.ids.stride[0];
  args.weights = static_cast<float*>(out.weights.data);
  args.weights_stride = out.weights.stride[0];
  args.n_tokens = logits.n_rows();
  args.n_experts = router.n_experts;
  args.top_k = router.top_k;
  args.n_group = router.n_group;
  args.topk_group = router.topk_group;
  args.group_score = static_cast<int>(router.group_score);
  args.sigmoid = router.scoring == Scoring::sigmoid;
  args.normalise = router.normalise;
  args.scale = router.scale;
  done(launch_route(args, stream_), "route");
}

// All segments of a stack, for the pairs of `common`.
void CudaOps::grouped(const Linear& w, const GemmArgs& common, View y) {
  const CudaPacked& packed = packed_of(w);
  CACHALOT_CHECK(!packed.bias);
  int col = 0;
  for (const Segment& segment : packed.segments) {
    GemmArgs args = common;
    const GemmArgs to = output_of(y, col);
    args.y = to.y;
    args.y_is_f32 = to.y_is_f32;
    args.y_stride = to.y_stride;
    args.w = segment;
    args.first_matrix = w.first;
    const bool stream = args.rowing == Rowing::moe_inline || args.moe.tile <= 32;
    done(segment.tile == Tile::f32 ? launch_gemm_simt(args, stream_)
         : stream                  ? launch_gemm_stream(args, stream_)
                                   : launch_gemm_tile(args, stream_),
         "moe");
    col += segment.out;
  }
}

void CudaOps::moe(View x, const Experts& experts, const Routing& routing, View y) {
  const int n_tokens = x.n_rows(), top_k = routing.ids.n_cols(), n_experts = experts.gate_up.n_matrices, inner = experts.down.in;
  CACHALOT_CHECK(experts.gate_up.out == 2 * inner && experts.down.out == y.n_cols() && x.n_cols() == experts.gate_up.in);
  CACHALOT_CHECK(routing.ids.n_rows() == n_tokens && y.n_rows() == n_tokens && routing.ids.dtype == DType::i32);
  if (n_tokens == 0) return;
  const size_t mark = temp_mark();

  // The f32 mode has one block row per pair; a long prompt goes through in parts.
  const int most = options_.activation == DType::f32 ? std::max(1, 65535 / top_k) : n_tokens;
  if (n_tokens > most) {
    for (int t = 0; t < n_tokens; t += most) {
      const int n = std::min(most, n_tokens - t);
      moe(x.rows(t, n), experts, {routing.ids.rows(t, n), routing.weights.rows(t, n)}, y.rows(t, n));
    }
    return;
  }
  CACHALOT_CHECK(routing.ids.stride[0] == top_k, "routing ids lie {} apart, not {}", routing.ids.stride[0], top_k);

  const int n_pairs = n_tokens * top_k;
  GemmArgs common;
  common.moe.ids = static_cast<const int*>(routing.ids.data);
  common.moe.n_pairs = n_pairs;
  common.moe.top_k = top_k;
  common.moe.n_experts = n_experts;
  common.rowing = Rowing::moe_inline;
  common.x_by_token = true;
  if (options_.activation == DType::bf16 && n_pairs > kInlinePairs) {
    bool stream = false;
    MoePlan& plan = common.moe;
    plan.tile = tile_rows(n_pairs, n_experts, stream);
    plan.max_tiles = std::min(n_experts, n_pairs) + n_pairs / plan.tile;
    plan.order = static_cast<int*>(temp(DType::i32, 1, n_pairs).data);
    plan.tiles = static_cast<int3*>(temp(DType::i32, plan.max_tiles, 3).data);
    common.rowing = Rowing::moe_tiles;
    done(launch_moe_plan(plan, stream_), "moe");
  }

  const CudaPacked &up_packed = packed_of(experts.gate_up), &down_packed = packed_of(experts.down);
  const Segment &up_form = up_packed.segments[0], &down_form = down_packed.segments[0];
  const Input in = input_for(up_form, x, 1, x.n_cols());
  common.x = in.data;
  common.x_stride = in.stride;
  common.x_is_f32 = x.dtype == DType::f32;

  // The shared expert: in the same launches where its weights have the same form and few rows make launches dear.
  View hs, shared;
  Segment shared_gate, shared_down;
  const uint8_t* shared_up = nullptr;
  bool up_together = false, down_together = false;
  if (experts.shared_gate_up) {
    const CudaPacked &su = packed_of(experts.shared_gate_up), &sd = packed_of(experts.shared_down);
    hs = temp(activation(), n_tokens, experts.shared_down.in);
    shared = temp(DType::f32, n_tokens, y.n_cols());
    const bool streamed = activation() == DType::bf16 && (common.rowing == Rowing::moe_inline || common.moe.tile <= 32);
    Segment gate;
    const uint8_t* up = nullptr;
    up_together = streamed && halves(up_packed, experts.gate_up.out, gate, up) &&
                  halves(su, experts.shared_gate_up.out, shared_gate, shared_up) && shared_gate.tile == gate.tile &&
                  shared_gate.cols == gate.cols && experts.shared_gate_up.first == 0;
    shared_down = sd.segments[0];
    down_together = streamed && up_together && sd.segments.size() == 1 && down_packed.segments.size() == 1 &&
                    shared_down.tile == down_form.tile && shared_down.in == shared_down.cols && !sd.bias && experts.shared_down.first == 0;
  }
  const View h = temp(activation(), n_pairs, down_form.cols);
  if (down_form.cols != inner) check_cuda(cudaMemsetAsync(h.data, 0, static_cast<size_t>(n_pairs) * h.row_bytes(), stream_), "moe");
  Segment gate;
  const uint8_t* up = nullptr;
  if (halves(up_packed, experts.gate_up.out, gate, up)) {
    GemmArgs args = common;
    const GemmArgs to = output_of(h, 0);
    args.y = to.y;
    args.y_is_f32 = to.y_is_f32;
    args.y_stride = to.y_stride;
    args.w = gate;
    args.w_up = up;
    args.swiglu = true;
    args.first_matrix = experts.gate_up.first;
    if (up_together) {
      args.shared_w = shared_gate;
      args.shared_up = shared_up;
      args.shared_x = args.x;
      args.shared_x_stride = args.x_stride;
      args.shared_y = hs.data;
      args.shared_y_stride = hs.stride[0];
      args.n_rows = n_tokens;
    }
    const bool stream = args.rowing == Rowing::moe_inline || args.moe.tile <= 32;
    done(gate.tile == Tile::f32 ? launch_gemm_simt(args, stream_)
         : stream               ? launch_gemm_stream(args, stream_)
                                : launch_gemm_tile(args, stream_),
         "moe");
  } else {
    const View both = temp(activation(), n_pairs, 2 * inner);
    grouped(experts.gate_up, common, both);
    done(launch_swiglu(mat_of(both), mat_of(h.cols(0, inner)), stream_), "moe");
  }

  const View pairs = temp(activation() == DType::f32 || n_pairs <= kF32Pairs ? DType::f32 : DType::bf16, n_pairs, y.n_cols());
  common.x = h.data;
  common.x_stride = h.stride[0];
  common.x_by_token = false;
  if (shared && !up_together) linear_swiglu(x, experts.shared_gate_up, hs);
  if (down_together && pairs.dtype == DType::f32) {
    common.shared_w = shared_down;
    common.shared_x = hs.data;
    common.shared_x_stride = hs.stride[0];
    common.shared_y = shared.data;
    common.shared_y_stride = shared.stride[0];
    common.n_rows = n_tokens;
  } else if (shared) {
    linear(hs, experts.shared_down, shared, 0.0f);
  }
  grouped(experts.down, common, pairs);
  done(launch_moe_combine(mat_of(pairs), common.moe.ids, mat_of(routing.weights), shared ? mat_of(shared) : Mat{}, mat_of(y), stream_),
       "moe");
  temp_release(mark);
}

}  // namespace cachalot::cuda
