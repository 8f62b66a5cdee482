// CudaOps: routing and the mixture of experts. Which expert gets how many rows stays on the device: grids are sized by bounds.
#include <algorithm>

#include "base/check.h"
#include "cuda/cuda_ops_impl.h"
#include "cuda/moe_few.h"
#include "cuda/moe_mid.h"
#include "cuda/moe_one.h"
#include "cuda/moe_prologue.h"
#include "cuda/moe_tokens.h"

namespace cachalot::cuda {
namespace {

constexpr int kLeastTokens = 3;  // of moe_tokens.cu; its tasks are too large for fewer
constexpr int kF32Pairs = 4096;  // up to here the experts' results are held in f32

// Rows of x per block of the three kernels, by pairs per expert; measured. Streamed codes of 4 to 6 bits are short of instructions, so that
// reading them twice costs less than a tile with idle columns; wider weights are short of bytes.
int tile_rows(int n_pairs, int n_experts, Tile weights, bool hopper, bool& stream) {
  const int each = n_pairs / n_experts, bits = tile_info(weights).code_bits;
  const bool narrow = bits >= 4 && bits <= 6;
  stream = each <= (!hopper ? 24 : narrow ? 16 : weights == Tile::bf16 ? 8 : 10);
  if (stream && narrow) return each <= 7 ? 8 : each <= 13 ? 16 : each <= 16 ? 24 : 32;
  if (stream) return each <= 4 ? 8 : each <= 10 ? 16 : 32;
  if (hopper && each <= 24) return 32;
  return each <= 64 ? 64 : 128;
}

// Rows of x per block of the kernels of few rows, by the form of the gate and up rows; measured. 0: too many rows for them. Codes of 8 bits
// are short of bytes in the streaming kernel too, which is as fast where there are few rows of many experts.
int few_rows(int n_pairs, int n_experts, Tile weights) {
  const int each = n_pairs / n_experts, bits = tile_info(weights).code_bits;
  if (weights == Tile::q4g128) return each <= 3 ? 8 : each <= 13 ? 16 : each <= 22 ? 32 : 0;
  if (each > (bits == 6 ? 9 : 16) || (bits == 8 && each <= 3 && n_pairs > kInlinePairs)) return 0;
  return each <= 3 ? 8 : 16;
}

// Rows of x per tile of the kernels of some rows, measured; 0: too few or too many rows for them.
int mid_rows(int n_pairs, int n_experts) {
  const int each = n_pairs / n_experts;
  if (each < 4 || each > 52) return 0;
  return each <= 11 ? 16 : each <= 19 ? 24 : each <= 32 ? 32 : each <= 40 ? 48 : 64;
}

RouteArgs route_args(View logits, View bias, const Router& router, const Routing& out) {
  RouteArgs args;
  args.logits = static_cast<const float*>(logits.data);
  args.logits_stride = logits.stride[0];
  args.bias = static_cast<const float*>(bias.data);
  args.ids = static_cast<int*>(out.ids.data);
  args.ids_stride = out.ids.stride[0];
  args.weights = static_cast<float*>(out.weights.data);
  args.weights_stride = out.weights.stride[0];
  args.n_tokens = out.ids.n_rows();
  args.n_experts = router.n_experts;
  args.top_k = router.top_k;
  args.n_group = router.n_group;
  args.topk_group = router.topk_group;
  args.group_score = static_cast<int>(router.group_score);
  args.sigmoid = router.scoring == Scoring::sigmoid;
  args.normalise = router.normalise;
  args.scale = router.scale;
  return args;
}

}  // namespace

// Few rows in one launch.
void CudaOps::moe_prologue(const MoePrologue& p) {
  const CudaPacked& router = packed_of(*p.router);
  const Segment& w = router.segments[0];
  if (hopper_ && p.y.n_rows() > 0 && p.y.n_rows() <= kMoePrologueRows && router.segments.size() == 1 && w.tile == Tile::f32 &&
      w.in == w.cols && !router.bias && p.router->first == 0) {
    MoePrologueArgs args;
    args.residual = mat_of(p.residual);
    args.delta = mat_of(p.delta);
    args.y = mat_of(p.y);
    args.norm = static_cast<const float*>(p.norm.data);
    args.eps = p.eps;
    args.router = reinterpret_cast<const float*>(w.data);
    args.route = route_args({}, p.bias, p.how, p.out);
    if (moe_prologue_supports(args)) return done(launch_moe_prologue(args, stream_), "moe_prologue");
  }
  Ops::moe_prologue(p);
}

void CudaOps::route(View logits, View bias, const Router& router, const Routing& out) {
  CACHALOT_CHECK(logits.dtype == DType::f32 && logits.n_cols() == router.n_experts && router.top_k > 0 && router.top_k <= router.n_experts);
  CACHALOT_CHECK(out.ids.dtype == DType::i32 && out.ids.n_cols() == router.top_k && out.weights.dtype == DType::f32);
  if (logits.n_rows() == 0) return;
  const RouteArgs args = route_args(logits, bias, router, out);
  done(launch_route(args, stream_), "route");
}

// One grouped product by the kernel that suits its weights and rows. x is put into the weights' column order where the kernel wants it.
void CudaOps::launch_grouped(GemmArgs args) {
  if (args.w.tile == Tile::f32) return done(launch_gemm_simt(args, stream_), "moe");
  if (args.moe.streamed) return done(launch_gemm_stream(args, stream_), "moe");
  if (!hopper_) return done(launch_gemm_tile(args, stream_), "moe");
  if (args.tile_rows == 0) return launch_blocked(args, "moe");
  launch_wgmma(args, "moe");  // the product before has left x in its blocked form
}

// All segments of a stack, for the pairs of `common`.
void CudaOps::grouped(const Linear& w, const GemmArgs& common, View y) {
  const CudaPacked& packed = packed_of(w);
  CACHALOT_CHECK(!packed.bias);
  int col = 0;
  for (const Segment& segment : packed.segments) {
    GemmArgs args = common;
    set_output(args, y, col);
    args.w = segment;
    args.first_matrix = w.first;
    launch_grouped(args);
    col += segment.out;
  }
}

// The tiles of the pairs, at most `rows` each, made on the device; few pairs need none.
void CudaOps::plan_moe(MoePlan& plan, int rows) {
  if (plan.n_pairs <= kInlinePairs) return;
  plan.clusters = hopper_;
  plan.tile = rows;
  plan.max_tiles = std::min(plan.n_experts, plan.n_pairs) + plan.n_pairs / plan.tile;
  plan.order = static_cast<int*>(temp(DType::i32, 1, plan.n_pairs).data);
  plan.tiles = static_cast<int3*>(temp(DType::i32, plan.max_tiles, 3).data);
  done(launch_moe_plan(plan, stream_), "moe");
}

// Puts the shared expert's first product into the launch of the experts' when its weights have the same form; its second likewise. With few
// rows launches are dear.
bool CudaOps::join_shared_up(const Experts& experts, View hs, GemmArgs& args) {
  const CudaPacked& packed = packed_of(experts.shared_gate_up);
  Segment gate;
  const uint8_t* up = nullptr;
  if (!args.moe.streamed || !halves(packed, experts.shared_gate_up.out, gate, up) || gate.tile != args.w.tile || gate.tile == Tile::f32 ||
      gate.cols != args.w.cols || experts.shared_gate_up.first != 0)
    return false;
  args.shared_w = gate;
  args.shared_up = up;
  args.shared_x = args.x;
  args.shared_x_stride = args.x_stride;
  args.shared_y = hs.data;
  args.shared_y_stride = hs.stride[0];
  args.n_rows = hs.n_rows();
  return true;
}
bool CudaOps::join_shared_down(const Experts& experts, View hs, View shared, View pairs, GemmArgs& args) {
  const CudaPacked &packed = packed_of(experts.shared_down), &down = packed_of(experts.down);
  const Segment& w = packed.segments[0];
  if (!args.moe.streamed || packed.segments.size() != 1 || down.segments.size() != 1 || w.tile != down.segments[0].tile ||
      w.tile == Tile::f32 || w.in != w.cols || packed.bias || experts.shared_down.first != 0 || pairs.dtype != DType::f32)
    return false;
  args.shared_w = w;
  args.shared_x = hs.data;
  args.shared_x_stride = hs.stride[0];
  args.shared_y = shared.data;
  args.shared_y_stride = shared.stride[0];
  args.n_rows = hs.n_rows();
  return true;
}

// The experts' weights where single segments make them up, and x and y are as the kernels of few rows want them.
bool CudaOps::expert_segments(View x, const Experts& experts, View y, ExpertSegments& s) const {
  const CudaPacked &up = packed_of(experts.gate_up), &down = packed_of(experts.down);
  if (!hopper_ || x.dtype != DType::bf16 || y.dtype != DType::bf16 || reinterpret_cast<uintptr_t>(x.data) % 16 != 0 ||
      down.segments.size() != 1 || down.bias || !halves(up, experts.gate_up.out, s.gate, s.up))
    return false;
  s.down = down.segments[0];
  if (!experts.shared_gate_up) return true;
  const CudaPacked &shared_up = packed_of(experts.shared_gate_up), &shared_down = packed_of(experts.shared_down);
  if (experts.shared_gate_up.first != 0 || experts.shared_down.first != 0 || shared_down.segments.size() != 1 || shared_down.bias ||
      !halves(shared_up, experts.shared_gate_up.out, s.shared_gate, s.shared_up))
    return false;
  s.shared_down = shared_down.segments[0];
  return true;
}

// One row by its own kernel, where the weights have one form throughout.
bool CudaOps::moe_one(View x, const Experts& experts, const Routing& routing, View y) {
  ExpertSegments s;
  if (!expert_segments(x, experts, y, s)) return false;
  MoeOneArgs a;
  a.gate = s.gate, a.up = s.up, a.down = s.down;
  a.shared_gate = s.shared_gate, a.shared_up = s.shared_up, a.shared_down = s.shared_down;
  a.first_gate = experts.gate_up.first;
  a.first_down = experts.down.first;
  a.ids = static_cast<const int*>(routing.ids.data);
  a.weights = static_cast<const float*>(routing.weights.data);
  a.top_k = routing.ids.n_cols();
  a.x = x.data;
  a.y = y.data;
  a.barrier = static_cast<unsigned long long*>(moe_barrier_.get());
  a.drawn = reinterpret_cast<unsigned*>(a.barrier + 1);
  a.n_blocks = n_multiprocessors_;
  a.most_shared = most_shared_;
  if (!moe_one_supports(a)) return false;
  const size_t mark = temp_mark();
  a.h = temp(DType::bf16, 1, a.top_k * a.gate.out + a.shared_gate.out).data;
  done(launch_moe_one(a, stream_), "moe");
  temp_release(mark);
  return true;
}

// Up to 16 rows by one launch for both products, where all weights have codes of 4 bits in groups of 128.
bool CudaOps::moe_tokens(View x, const Experts& experts, const Routing& routing, View y, const AddNorm* then) {
  ExpertSegments s;
  if (x.stride[0] % 8 != 0 || experts.gate_up.n_matrices > kMostListedExperts || !expert_segments(x, experts, y, s)) return false;
  MoeTokensArgs a;
  a.gate = s.gate, a.up = s.up, a.down = s.down;
  a.shared_gate = s.shared_gate, a.shared_up = s.shared_up, a.shared_down = s.shared_down;
  a.first_gate = experts.gate_up.first;
  a.first_down = experts.down.first;
  a.ids = static_cast<const int*>(routing.ids.data);
  a.top_k = routing.ids.n_cols();
  a.n_tokens = x.n_rows();
  a.x = x.data;
  a.x_stride = x.stride[0];
  a.state = reinterpret_cast<unsigned*>(static_cast<unsigned long long*>(moe_barrier_.get()) + 2);
  a.n_blocks = n_multiprocessors_;
  a.most_shared = most_shared_;
  if (!moe_tokens_supports(a)) return false;
  const size_t mark = temp_mark();
  const bool has_shared = a.shared_gate.data != nullptr;
  const View pairs = temp(DType::f32, a.n_tokens * a.top_k, y.n_cols()),
             shared = has_shared ? temp(DType::f32, a.n_tokens, y.n_cols()) : View{};
  a.h = whole_rows(pairs.n_rows(), a.down.cols, false);
  if (has_shared) a.shared_h = whole_rows(a.n_tokens, a.shared_down.cols, false);
  a.y = static_cast<float*>(pairs.data), a.shared_y = static_cast<float*>(shared.data);
  done(launch_moe_tokens(a, stream_), "moe");
  sum_pairs(pairs, shared, routing, y, then, true);
  temp_release(mark);
  return true;
}

WholeRows CudaOps::whole_rows(int rows, int cols, bool fine) {
  return {static_cast<uint8_t*>(temp(DType::u8, rows, 2 * cols).data),
          static_cast<float2*>(temp(DType::f32, rows, 2 * whole_groups(cols, fine)).data)};
}

// Few rows per expert by kernels of their own, where the weights have forms that they take.
bool CudaOps::moe_few(View x, const Experts& experts, const Routing& routing, View y, const AddNorm* then) {
  ExpertSegments s;
  if (x.stride[0] % 8 != 0 || !expert_segments(x, experts, y, s)) return false;
  FewArgs first, second;
  first.routed.w = s.gate, first.routed.up = s.up, second.routed.w = s.down;
  first.shared.w = s.shared_gate, first.shared.up = s.shared_up, second.shared.w = s.shared_down;
  const bool has_shared = static_cast<bool>(experts.shared_gate_up);
  const bool fine = first.fine = second.fine = s.gate.tile != Tile::q4g128;
  if (!few_supports(first, second)) return false;

  const int n_tokens = x.n_rows(), n_pairs = n_tokens * routing.ids.n_cols();
  MoePlan plan;
  plan.ids = static_cast<const int*>(routing.ids.data);
  plan.n_pairs = n_pairs;
  plan.top_k = routing.ids.n_cols();
  plan.n_experts = experts.gate_up.n_matrices;
  const int tile = few_rows(n_pairs, plan.n_experts, s.gate.tile);
  if (tile == 0) return false;
  const size_t mark = temp_mark();
  plan_moe(plan, tile);
  first.moe = second.moe = plan;
  first.n_tokens = second.n_tokens = n_tokens;
  first.first_matrix = experts.gate_up.first, second.first_matrix = experts.down.first;
  first.by_token = true;
  const View pairs = temp(DType::f32, n_pairs, y.n_cols()), shared = has_shared ? temp(DType::f32, n_tokens, y.n_cols()) : View{};
  first.routed.x = first.shared.x = whole_rows(n_tokens, x.n_cols(), fine);
  first.routed.h = second.routed.x = whole_rows(n_pairs, second.routed.w.cols, fine);
  if (has_shared) first.shared.h = second.shared.x = whole_rows(n_tokens, second.shared.w.cols, fine);
  second.routed.y = static_cast<float*>(pairs.data), second.shared.y = static_cast<float*>(shared.data);
  done(launch_whole_rows(mat_of(x), first.routed.x, fine, stream_), "moe");
  done(launch_few_gate_up(first, stream_), "moe");
  done(launch_few_down(second, stream_), "moe");
  sum_pairs(pairs, shared, routing, y, then, true);
  temp_release(mark);
  return true;
}

// More rows, and the same weights, on the tensor cores.
bool CudaOps::moe_mid(View x, const Experts& experts, const Routing& routing, View y, const AddNorm* then) {
  ExpertSegments s;
  if (x.stride[0] % 8 != 0 || !expert_segments(x, experts, y, s)) return false;
  MidArgs first, second;
  first.routed.w = s.gate, first.routed.up = s.up, second.routed.w = s.down;
  first.shared.w = s.shared_gate, first.shared.up = s.shared_up, second.shared.w = s.shared_down;
  const bool has_shared = static_cast<bool>(experts.shared_gate_up);
  for (const MidArgs* args : {&first, &second})
    if (!mid_supports(args->routed) || (has_shared && !mid_supports(args->shared))) return false;

  const int n_tokens = x.n_rows(), n_pairs = n_tokens * routing.ids.n_cols();
  MidPlan plan;
  plan.ids = static_cast<const int*>(routing.ids.data);
  plan.n_pairs = n_pairs;
  plan.top_k = routing.ids.n_cols();
  plan.n_experts = experts.gate_up.n_matrices;
  const int tile = plan.tile = mid_rows(n_pairs, plan.n_experts);
  if (tile == 0 || !mid_supports(plan)) return false;
  const size_t mark = temp_mark();
  plan.max_tiles = plan.n_experts + n_pairs / tile;
  plan.tiles = static_cast<int2*>(temp(DType::i32, plan.max_tiles, 2).data);
  plan.pairs = static_cast<int*>(temp(DType::i32, plan.max_tiles, tile).data);
  if (mid_in_parts(tile)) {
    plan.n_states = 2 + plan.max_tiles + (n_tokens + tile - 1) / tile;
    plan.state = static_cast<int*>(temp(DType::i32, 1, plan.n_states).data);
  }
  const int shared_rows = has_shared ? (n_tokens + tile - 1) / tile * tile : 0;
  const auto rows = [&](int n_rows, int cols) {
    if (n_rows == 0) return MidRows{};
    return MidRows{static_cast<uint8_t*>(temp(DType::bf16, n_rows, cols).data),
                   static_cast<float*>(temp(DType::f32, n_rows / tile * mid_scales(tile), cols / kMidGroup).data)};
  };
  first.plan = second.plan = plan;
  first.n_tokens = second.n_tokens = n_tokens;
  first.n_multiprocessors = second.n_multiprocessors = n_multiprocessors_;
  first.first_matrix = experts.gate_up.first, second.first_matrix = experts.down.first;
  const View pairs = temp(DType::bf16, n_pairs, y.n_cols()), shared = has_shared ? temp(DType::f32, n_tokens, y.n_cols()) : View{};
  first.routed.x = rows(plan.max_tiles * tile, x.n_cols());
  first.shared.x = rows(shared_rows, x.n_cols());
  first.routed.h = second.routed.x = rows(plan.max_tiles * tile, second.routed.w.cols);
  first.shared.h = second.shared.x = rows(shared_rows, second.shared.w.cols);
  second.routed.y = pairs.data, second.shared.y = shared.data;
  done(launch_mid_rows(mat_of(x), plan, first.routed.x, first.shared.x, stream_), "moe");
  if (mid_in_parts(tile)) {
    done(launch_mid_both(first, second, stream_), "moe");
  } else {
    done(launch_mid_gate_up(first, stream_), "moe");
    done(launch_mid_down(second, stream_), "moe");
  }
  sum_pairs(pairs, shared, routing, y, then, true);
  temp_release(mark);
  return true;
}

// The end of either: y[t] = sum of the pairs of row t by their weights, and of its row of `shared` when there is one.
void CudaOps::sum_pairs(View pairs, View shared, const Routing& routing, View y, const AddNorm* then, bool alone) {
  CombineArgs args;
  args.alone = alone;
  args.pairs = mat_of(pairs);
  if (shared) args.shared = mat_of(shared);
  args.ids = static_cast<const int*>(routing.ids.data);
  args.weights = mat_of(routing.weights);
  args.y = mat_of(y);
  if (then != nullptr) {
    args.residual = mat_of(then->residual);
    args.norm = static_cast<const float*>(then->norm.data);
    args.eps = then->eps;
    args.clusters = hopper_;
  }
  done(then != nullptr ? launch_moe_combine_norm(args, stream_) : launch_moe_combine(args, stream_), "moe");
}

void CudaOps::moe_add_rmsnorm(View x, const Experts& experts, const Routing& routing, const AddNorm& then) {
  if (x.n_rows() > 1 && x.dtype == DType::bf16 && then.y.dtype == DType::bf16 &&
      combine_norm_supports(mat_of(then.residual), mat_of(then.y), hopper_))
    return moe_rows(x, experts, routing, then.y, &then);
  Ops::moe_add_rmsnorm(x, experts, routing, then);
}

void CudaOps::moe(View x, const Experts& experts, const Routing& routing, View y) {
  // The f32 mode has one block row per pair; a long prompt goes through in parts.
  const int n_tokens = x.n_rows(), most = options_.activation == DType::f32 ? std::max(1, 65535 / routing.ids.n_cols()) : n_tokens;
  for (int t = 0; t < n_tokens; t += most) {
    const int n = std::min(most, n_tokens - t);
    moe_rows(x.rows(t, n), experts, {routing.ids.rows(t, n), routing.weights.rows(t, n)}, y.rows(t, n), nullptr);
  }
}

void CudaOps::moe_rows(View x, const Experts& experts, const Routing& routing, View y, const AddNorm* then) {
  const int n_tokens = x.n_rows(), top_k = routing.ids.n_cols(), inner = experts.down.in;
  CACHALOT_CHECK(experts.gate_up.out == 2 * inner && experts.down.out == y.n_cols() && x.n_cols() == experts.gate_up.in);
  CACHALOT_CHECK(routing.ids.n_rows() == n_tokens && y.n_rows() == n_tokens && routing.ids.dtype == DType::i32);
  CACHALOT_CHECK(routing.ids.stride[0] == top_k, "routing ids lie {} apart, not {}", routing.ids.stride[0], top_k);
  if (n_tokens == 1 && then == nullptr && moe_one(x, experts, routing, y)) return;
  if (n_tokens >= kLeastTokens && moe_tokens(x, experts, routing, y, then)) return;
  if (moe_many(x, experts, routing, y, then) || moe_mid(x, experts, routing, y, then) || moe_few(x, experts, routing, y, then)) return;
  const size_t mark = temp_mark();
  const int n_pairs = n_tokens * top_k;
  GemmArgs common;
  common.moe.ids = static_cast<const int*>(routing.ids.data);
  common.moe.n_pairs = n_pairs;
  common.moe.top_k = top_k;
  common.moe.n_experts = experts.gate_up.n_matrices;
  const CudaPacked &up_packed = packed_of(experts.gate_up), &down_packed = packed_of(experts.down);
  if (options_.activation != DType::f32 && n_pairs > kInlinePairs) {
    plan_moe(common.moe, tile_rows(n_pairs, common.moe.n_experts, up_packed.segments[0].tile, hopper_, common.moe.streamed));
  }
  common.rowing = common.moe.tile > 0 ? Rowing::moe_tiles : Rowing::moe_inline;

  GemmArgs up = common, down = common;
  const Segment& down_form = down_packed.segments[0];
  const bool has_shared = static_cast<bool>(experts.shared_gate_up);
  const View hs = has_shared ? temp(activation(), n_tokens, experts.shared_down.in) : View{};
  const View shared = has_shared ? temp(DType::f32, n_tokens, y.n_cols()) : View{};
  // With the kernels on wgmma the first product leaves its rows as the second wants them.
  const bool fusable = halves(up_packed, experts.gate_up.out, up.w, up.w_up);
  const bool blocked = hopper_ && fusable && !common.moe.streamed && up.w.tile != Tile::f32 && down_packed.segments.size() == 1;
  const View h = temp(activation(), blocked ? common.moe.max_tiles * common.moe.tile : n_pairs, down_form.cols);
  if (down_form.cols != inner) check_cuda(cudaMemsetAsync(h.data, 0, static_cast<size_t>(h.n_rows()) * h.row_bytes(), stream_), "moe");

  const Input in = input_for(up_packed.segments[0], x, 1, x.n_cols());
  up.x = in.data;
  up.x_stride = in.stride;
  up.x_is_f32 = down.x_is_f32 = x.dtype == DType::f32;
  up.x_by_token = true;
  bool joined = false;
  if (fusable) {
    set_output(up, h, 0);
    up.swiglu = true;
    up.first_matrix = experts.gate_up.first;
    joined = has_shared && join_shared_up(experts, hs, up);
    if (blocked) {
      up.y_order = column_order(down_form.tile, is_wide(down_form.tile, common.moe.tile));
      up.y_chunks = down_form.cols / kRecordCols;
      down.tile_rows = common.moe.tile;
    }
    launch_grouped(up);
  } else {
    const View both = temp(activation(), n_pairs, 2 * inner);
    grouped(experts.gate_up, up, both);
    done(launch_swiglu(mat_of(both), mat_of(h.cols(0, inner)), stream_), "moe");
  }
  if (has_shared && !joined) linear_swiglu(x, experts.shared_gate_up, hs);

  const View pairs = temp(activation() == DType::f32 || n_pairs <= kF32Pairs ? DType::f32 : DType::bf16, n_pairs, y.n_cols());
  down.x = h.data;
  down.x_stride = h.stride[0];
  if (has_shared && !join_shared_down(experts, hs, shared, pairs, down)) linear(hs, experts.shared_down, shared, 0.0f);
  grouped(experts.down, down, pairs);
  sum_pairs(pairs, shared, routing, y, then, false);
  temp_release(mark);
}

}  // namespace cachalot::cuda
