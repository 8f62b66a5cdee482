// QuantizedStack: the memory of a stack of matrices being quantized to one scheme, and the two steps of every method: scales first (a grid
// for each row), then codes on that grid. The result is a LinearSource, which Ops::pack, Checkpoint overlays and writers take.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "quant/range_search.h"
#include "quant/scheme.h"
#include "tensor/linear_source.h"

namespace cachalot {

// The values that a matrix's codes can take: value(o, k) = scale[o, k / run] * level(code) + offset[o, k / run].
struct MatrixGrid {
  int out = 0, in = 0, run = 0, n_codes = 0;
  const float* levels = nullptr;     // [n_codes] ascending, or null: the code itself
  bool e4m3 = false;                 // the level is the code read as E4M3
  std::vector<float> scale, offset;  // [out, n_runs]
  [[nodiscard]] size_t n_runs() const { return static_cast<size_t>((in + run - 1) / run); }
};

class QuantizedStack {
 public:
  // The scheme must fit `in`.
  QuantizedStack(std::string name, const Scheme& scheme, int n_matrices, int out, int in);

  // Rounds matrix m, values [out, in], to nearest: scales and codes. importance [in], or empty; see quantize_row.
  void round_to_nearest(int m, std::span<const float> values, std::span<const float> importance, RangeSearch search, ThreadPool& pool);
  // Whether codes can be chosen apart from scales: not with plain floats.
  [[nodiscard]] bool has_grid() const { return is_planar(scheme_.format) || scheme_.format == Format::fp8_block || n_codes_ > 0; }
  // The grid of matrix m as stored by now.
  [[nodiscard]] MatrixGrid grid(int m) const;
  // Replaces the codes of one row of matrix m, [in].
  void write_codes(int m, int row, const uint8_t* codes);
  // The same with the scales of a planar format, [n_groups], which f16 must hold.
  void write_scales(int m, int row, const float* scales);

  // Row `row` of matrix m as it will be read.
  void dequant(int m, int row, float* out) const { dequant_row(source_, m, row, out); }
  [[nodiscard]] const LinearSource& source() const { return source_; }
  [[nodiscard]] const Scheme& scheme() const { return scheme_; }

 private:
  void round_planar_rows(int m, int first, int rows, const float* values, std::span<const float> importance, RangeSearch search);
  void round_fp8_band(int m, int band, const float* values, std::span<const float> importance, RangeSearch search);

  Scheme scheme_;
  int n_codes_ = 0;
  std::shared_ptr<std::vector<std::byte>> memory_;
  LinearSource source_;
};

// Sum over all rows of weight[k] * (values - stored)^2, and of weight[k] * values^2, with weights of 1 when importance is empty.
struct ErrorSums {
  double error = 0.0, size = 0.0;
};
ErrorSums weighted_error(const QuantizedStack& stack, int m, std::span<const float> values, std::span<const float> importance);

// All values of one matrix of a source, [out, in], columns in the order of the inputs.
std::vector<float> dequant_matrix(const LinearSource& source, int m, ThreadPool& pool);

}  // namespace cachalot
