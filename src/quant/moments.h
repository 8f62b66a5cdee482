// Moments: second moments of the inputs of a linear over calibration tokens. The squared error that quantizing W to V adds to W x, summed
// over tokens, is trace((W - V) G (W - V)^T) with G = X^T X, so G is all that GPTQ and AWQ need of the tokens.
#pragma once

#include <vector>

#include "base/thread_pool.h"
#include "ops/ops.h"

namespace cachalot {

// A dense product on the Ops: y[t] = sum_k x[t, k] w[n, k] + beta * y[t], all f32 in host memory. w is copied.
void multiply(Ops& ops, View x, View w, View y, float beta);

struct Moments {
  int n = 0;  // columns of x
  int64_t tokens = 0;
  double weight = 0.0;         // sum of the squared row weights
  std::vector<double> square;  // [n] sum of w^2 x_k^2
  std::vector<float> gram;     // [n, n] sum of w^2 x x^T; empty when only squares are wanted
  std::vector<float> cross;    // [n, n] sum of w^2 x' x^T with x' what the unquantized model has in place of x; may be empty

  explicit Moments(int n_columns = 0, bool with_gram = false, bool with_cross = false);
  // Rows x [rows, n], each weighted by row_weight[row] (null: 1); original: the same tokens' x' (needed with `cross`).
  void add(Ops& ops, View x, const float* row_weight, View original = {});
  // Mean square of each column: what importance matrices hold.
  [[nodiscard]] std::vector<float> importance() const;
};

}  // namespace cachalot
