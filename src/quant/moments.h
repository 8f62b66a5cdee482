// Moments: second moments of the inputs of a linear over calibration tokens. The squared error that quantizing W to V adds to W x, summed
// over tokens, is trace((W - V) G (W - V)^T) with G = X^T X, so G is all that GPTQ and AWQ need of the tokens. Where tokens are few beside
// columns, as those of one expert among many are, the rows of X themselves are smaller than G, and products with them cheaper.
#pragma once

#include <algorithm>
#include <vector>

#include "base/thread_pool.h"
#include "ops/ops.h"

namespace cachalot {

// [rows, cols] of f32 whose rows lie `stride` apart, for products.
inline View strided(const float* data, int rows, int cols, size_t stride) {
  View view = View::matrix(const_cast<float*>(data), DType::f32, rows, cols);
  view.stride[0] = static_cast<int64_t>(stride);
  return view;
}
// A dense product on the Ops: y[t] = sum_k x[t, k] w[n, k] + beta * y[t], all f32 in host memory. w is copied.
void multiply(Ops& ops, View x, View w, View y, float beta);
// Columns of x, f32, as rows: [n_cols, n_rows].
std::vector<float> transposed(const View& x);

class Moments {
 public:
  int n = 0;  // columns of x
  int64_t tokens = 0;
  double weight = 0.0;         // sum of the squared row weights
  std::vector<double> square;  // [n] sum of w^2 x_k^2

  // with_gram: more than squares. with_original: also how x differs from x', what the unquantized model has in its place.
  explicit Moments(int n_columns = 0, bool with_gram = false, bool with_original = false);
  // Rows x [rows, n], each weighted by row_weight[row] (null: 1); original: the same tokens' x' (needed with_original). Rows whose squared
  // size is more than 64 times the median count as if it were the median. held_out[row] (null: none): rows that are kept besides, so that
  // what was learnt from the others can be checked by them (with_original only).
  void add(Ops& ops, View x, const float* row_weight, View original = {}, const uint8_t* held_out = nullptr);
  // Mean square of each column: what importance matrices hold.
  [[nodiscard]] std::vector<float> importance() const;

  [[nodiscard]] bool has_gram() const { return with_gram_; }
  [[nodiscard]] bool has_original() const { return with_original_; }
  // [n, n] sum of w^2 x x^T; made when first asked for.
  [[nodiscard]] const std::vector<float>& gram(Ops& ops) const;
  // Whether the rows are kept: as long as there are at most half as many as columns.
  [[nodiscard]] bool keeps_rows() const { return with_gram_ && !summed_; }
  // Then: [tokens, n] w x, and w (x' - x).
  [[nodiscard]] View rows() const { return view_of(rows_); }
  [[nodiscard]] View changes() const { return view_of(changes_); }
  [[nodiscard]] bool is_held_out(int row) const { return held_out_[static_cast<size_t>(row)] != 0; }
  // Otherwise: [n, n] sum of w^2 x (x' - x)^T.
  [[nodiscard]] const std::vector<float>& cross() const { return cross_; }
  // rows() and changes() of the rows that were held out; they count in all sums as well.
  [[nodiscard]] View held_out_rows() const { return view_of(held_out_rows_); }
  [[nodiscard]] View held_out_changes() const { return view_of(held_out_changes_); }

 private:
  [[nodiscard]] View view_of(const std::vector<float>& rows) const {
    return View::matrix(const_cast<float*>(rows.data()), DType::f32, static_cast<int>(rows.size()) / std::max(1, n), n);
  }
  void add_products(Ops& ops, View rows, View changes) const;

  bool with_gram_ = false, with_original_ = false;
  bool summed_ = false;  // rows became too many, and are in gram_ and cross_ since
  std::vector<float> rows_, changes_, held_out_rows_, held_out_changes_;
  std::vector<uint8_t> held_out_;  // of rows_
  mutable std::vector<float> gram_, cross_;
};

}  // namespace cachalot
