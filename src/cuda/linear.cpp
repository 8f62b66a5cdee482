// CudaOps: the linear maps. By number of rows: few stream the weights once, many take tensor-core tiles (dense bf16: cuBLASLt).
#include "base/check.h"
#include "cuda/cuda_ops_impl.h"
#include "cuda/linear_few.h"

namespace cachalot::cuda {
namespace {

// Rows up to which the weights are streamed, once per 32 rows. A large output is enough blocks for tensor-core tiles from fewer rows on.
bool streams(const Segment& w, int rows) {
  if (w.tile == Tile::bf16) return rows <= 32;
  return rows <= (w.out >= 16384 ? 32 : 64);
}

// Rows from which unpacking the weights (2 bytes each) and the library's product beat the fused kernel, and the largest matrix for it. A
// small output, of which the fused kernel makes too few blocks, is unpacked as soon as it is not streamed.
constexpr int kUnpackRows = 192, kFewBlocks = 8192;
constexpr int64_t kUnpackWeights = int64_t{64} << 20;

// Rows from which rounding both operands to fp8 pays.
constexpr int kFp8Rows = 192;
constexpr int kBlock = 128;  // of scales

bool unpacks(const Segment& w, int rows) {
  if (!is_record(w.tile) || streams(w, rows) || int64_t{w.out} * w.cols > kUnpackWeights) return false;
  return rows >= kUnpackRows || w.out <= kFewBlocks;
}

}  // namespace

void CudaOps::set_output(GemmArgs& args, View y, int col) {
  args.y = static_cast<std::byte*>(y.data) + static_cast<size_t>(col) * size_of(y.dtype);
  args.y_is_f32 = y.dtype == DType::f32;
  args.y_stride = y.stride[0];
}
GemmArgs CudaOps::output_of(View y, int col) {
  GemmArgs args;
  set_output(args, y, col);
  args.n_rows = y.n_rows();
  return args;
}

CudaOps::Input CudaOps::input_for(const Segment& segment, View x, int heads, int head_cols) {
  const bool plain = segment.tile == Tile::f32;
  const bool fits = plain || (x.dtype == DType::bf16 && segment.in == segment.cols && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 &&
                              x.stride[0] % 8 == 0 && head_cols % 8 == 0);
  if (fits) return {x.data, x.stride[0], head_cols};
  const View copy = temp(DType::bf16, x.n_rows(), heads * segment.cols);
  done(launch_copy_heads(mat_of(x), head_cols, mat_of(copy), segment.cols, heads, segment.in, segment.cols, stream_), "copy");
  return {copy.data, copy.stride[0], segment.cols};
}

void CudaOps::multiply(GemmArgs& args, const Segment& segment, const Linear& w, View x) {
  args.w = segment;
  args.first_matrix = w.first;
  args.x_is_f32 = x.dtype == DType::f32 && segment.tile == Tile::f32;
  if (segment.tile == Tile::f32) return done(launch_gemm_simt(args, stream_), "linear");
  if (multiply_few(args)) return;
  if (streams(segment, args.n_rows)) return done(launch_gemm_stream(args, stream_), "linear");
  if (segment.tile == Tile::bf16 && args.rowing == Rowing::dense && !args.swiglu && cublas_ != nullptr && cublas_->multiply(args, stream_))
    return;
  if (multiply_fp8(args, x)) return;
  if (cublas_ != nullptr && args.rowing == Rowing::dense && !args.swiglu && args.bias == nullptr && unpacks(segment, args.n_rows)) {
    const View rows = temp(DType::bf16, segment.out, segment.cols);
    done(launch_unpack(segment, w.first, rows.data, stream_), "linear");
    GemmArgs dense = args;
    dense.w = {static_cast<const uint8_t*>(rows.data), Tile::bf16, segment.out, segment.in, segment.cols, 0};
    dense.first_matrix = 0;
    if (cublas_->multiply(dense, stream_)) return;
  }
  if (!hopper_) return done(launch_gemm_tile(args, stream_), "linear");
  launch_blocked(args, "linear");
}

bool CudaOps::multiply_few(const GemmArgs& args) {
  if (!hopper_ || args.rowing != Rowing::dense || args.swiglu || args.bias != nullptr || args.beta != 0.0f || !args.y_is_f32) return false;
  LinearFewArgs few{.w = args.w,
                    .x = args.x,
                    .x_stride = args.x_stride,
                    .y = static_cast<float*>(args.y),
                    .y_stride = args.y_stride,
                    .n_rows = args.n_rows,
                    .n_blocks = n_multiprocessors_,
                    .most_shared = most_shared_};
  few.w.data += args.first_matrix * args.w.matrix_bytes;
  if (!linear_few_supports(few)) return false;
  done(launch_linear_few(few, stream_), "linear");
  return true;
}

bool CudaOps::multiply_fp8(const GemmArgs& args, View x) {
  const Segment& s = args.w;
  if (!options_.fp8_activations || !hopper_ || cublas_ == nullptr || s.tile != Tile::f8 || args.rowing != Rowing::dense || args.swiglu ||
      args.bias != nullptr || args.n_rows < kFp8Rows || args.n_rows % 4 != 0 || s.in != s.cols || s.cols % kBlock != 0 || s.out % 16 != 0 ||
      x.data != args.x)
    return false;
  const int groups = s.cols / kBlock;
  Fp8Rows w{.cols = s.cols, .scale_stride = (groups + 3) / 4 * 4}, rows{.cols = s.cols, .scale_stride = args.n_rows};
  w.codes = static_cast<uint8_t*>(temp(DType::u8, s.out, s.cols).data);
  w.scales = static_cast<float*>(temp(DType::f32, (s.out + kBlock - 1) / kBlock, w.scale_stride).data);
  rows.codes = static_cast<uint8_t*>(temp(DType::u8, args.n_rows, s.cols).data);
  rows.scales = static_cast<float*>(temp(DType::f32, groups, rows.scale_stride).data);
  done(launch_quantize_rows(mat_of(x), rows, stream_), "linear");
  done(launch_unpack_f8(s, args.first_matrix, w, stream_), "linear");
  GemmArgs dense = args;
  dense.x_stride = s.cols;
  return cublas_->multiply_fp8(dense, w, rows, stream_);
}

void CudaOps::launch_blocked(GemmArgs args, const char* op) {
  args.tile_rows = wgmma_rows(args);
  const View x = temp(DType::bf16, wgmma_tiles(args, args.tile_rows) * args.tile_rows, args.w.cols);
  done(launch_block_rows(args, x.data, stream_), op);
  args.x = x.data;
  launch_wgmma(args, op);
}

void CudaOps::launch_wgmma(const GemmArgs& args, const char* op) {
  done(goes_wide(args) ? launch_moe_wide(args, n_multiprocessors_, stream_) : launch_gemm_wgmma(args, stream_), op);
}

void CudaOps::multiply_halves(const GemmArgs& common, const CudaPacked& packed, View x) {
  for (size_t i = 0; i < packed.halves.size(); ++i) {
    GemmArgs args = common;
    const Input in = input_for(packed.halves[i], x, 1, x.n_cols());
    args.x = in.data;
    args.x_stride = in.stride;
    if (i > 0) args.beta = 1.0f, args.bias = nullptr;
    multiply(args, packed.halves[i], Linear{}, x);
  }
}

void CudaOps::linear(View x, const Linear& w, View y, float beta) {
  const CudaPacked& packed = packed_of(w);
  CACHALOT_CHECK(w.n_matrices == 1 && x.n_cols() == w.in && y.n_cols() == w.out && x.n_rows() == y.n_rows(),
                 "[{}, {}] x [{}, {}] -> [{}, {}]", x.n_rows(), x.n_cols(), w.out, w.in, y.n_rows(), y.n_cols());
  if (x.n_rows() == 0) return;
  const size_t mark = temp_mark();
  int col = 0;
  for (const Segment& segment : packed.segments) {
    GemmArgs args = output_of(y, col);
    const Input in = input_for(segment, x, 1, x.n_cols());
    args.x = in.data;
    args.x_stride = in.stride;
    args.beta = beta;
    args.bias = packed.bias ? static_cast<const float*>(packed.bias.get()) + col : nullptr;
    if (!packed.halves.empty() && args.n_rows > 64 && args.y_is_f32 && x.dtype == DType::bf16)
      multiply_halves(args, packed, x);
    else
      multiply(args, segment, w, x);
    col += segment.out;
  }
  temp_release(mark);
}

bool CudaOps::halves(const CudaPacked& packed, int out, Segment& gate, const uint8_t*& up) {
  if (packed.bias || out % 2 != 0) return false;
  gate = packed.segments[0];
  gate.out = out / 2;
  if (packed.segments.size() == 1) {
    up = gate.data + segment_matrix_bytes(gate.tile, gate.out, gate.cols);
    return !is_record(gate.tile) || gate.out % kRecordRows == 0;
  }
  if (packed.segments.size() != 2) return false;
  const Segment& second = packed.segments[1];
  up = second.data;
  return packed.segments[0].out == second.out && gate.tile == second.tile;
}

void CudaOps::linear_swiglu(View x, const Linear& gate_up, View h) {
  const CudaPacked& packed = packed_of(gate_up);
  const int inner = gate_up.out / 2;
  CACHALOT_CHECK(gate_up.n_matrices == 1 && x.n_cols() == gate_up.in && h.n_cols() == inner && x.n_rows() == h.n_rows());
  if (x.n_rows() == 0) return;
  const size_t mark = temp_mark();
  Segment gate;
  const uint8_t* up = nullptr;
  const bool fused = halves(packed, gate_up.out, gate, up);
  const bool apart = !is_record(gate.tile) || (options_.fp8_activations && gate.tile == Tile::f8 && x.n_rows() >= kFp8Rows) ||
                     (cublas_ != nullptr && unpacks(packed.segments[0], x.n_rows()));
  if (fused && (streams(gate, x.n_rows()) || !apart)) {
    GemmArgs args = output_of(h, 0);
    const Input in = input_for(gate, x, 1, x.n_cols());
    args.x = in.data;
    args.x_stride = in.stride;
    args.swiglu = true;
    args.w_up = up;
    multiply(args, gate, gate_up, x);
  } else {
    const View both = temp(h.dtype, x.n_rows(), gate_up.out);
    linear(x, gate_up, both, 0.0f);
    done(launch_swiglu(mat_of(both), mat_of(h), stream_), "linear_swiglu");
  }
  temp_release(mark);
}

void CudaOps::head_linear(View x, const Linear& w, View y) {
  const CudaPacked& packed = packed_of(w);
  const int heads = w.n_matrices, width = x.n_cols() / heads, tail = width - w.in;
  CACHALOT_CHECK(packed.segments.size() == 1 && !packed.bias);
  CACHALOT_CHECK(tail >= 0 && x.n_cols() == heads * width && y.n_cols() == heads * (w.out + tail) && x.n_rows() == y.n_rows(),
                 "{} heads of {} -> {} from rows of {} to rows of {}", heads, w.in, w.out, x.n_cols(), y.n_cols());
  if (x.n_rows() == 0) return;
  const size_t mark = temp_mark();
  const Segment& segment = packed.segments[0];
  GemmArgs args = output_of(y, 0);
  const Input in = input_for(segment, x, heads, width);
  args.x = in.data;
  args.x_stride = in.stride;
  args.x_head = in.head;
  args.y_head = w.out + tail;
  args.rowing = Rowing::heads;
  args.n_heads = heads;
  const bool tail_inside =
      tail > 0 && in.data == x.data && segment.tile != Tile::f32 && y.dtype == DType::bf16 && streams(segment, args.n_rows);
  if (tail_inside) args.tail = tail;
  multiply(args, segment, w, x);
  if (tail > 0 && !tail_inside) done(launch_copy_tails(mat_of(x), mat_of(y), heads, w.in, w.out, tail, stream_), "head_linear");
  temp_release(mark);
}

}  // namespace cachalot::cuda
