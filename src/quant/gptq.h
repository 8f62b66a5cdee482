// GPTQ (Frantar et al. 2023): codes chosen column by column, each column's error carried into the columns that are still to come, so that
// the error of the outputs, not of the weights, is least. In the form of LDLQ (Chee et al. 2023), which gives the same codes without an
// inverse: with G = R R^T, R upper triangular, and d_j = w_j - v_j the error of column j,
//   v_k = nearest(w_k + sum over j < k of d_j R_jk / R_kk).
// Columns go in order of falling diag(G) ("act order") on scales that were fixed before ("static groups"), so files need no g_idx.
#pragma once

#include <span>

#include "quant/matrix_quantizer.h"
#include "quant/moments.h"

namespace cachalot {

struct GptqOptions {
  float damping = 0.01f;  // added to the diagonal, as a share of its mean; grows tenfold while G is not positive definite
  bool act_order = true;
};

// The factor of one G, shared by all matrices with the same input.
class ErrorFeedback {
 public:
  ErrorFeedback(Ops& ops, const Moments& moments, const GptqOptions& options);

  // Chooses the codes of matrix m of `stack` for values [out, in], on the scales that the stack holds already.
  void choose_codes(QuantizedStack& stack, int m, std::span<const float> values, ThreadPool& pool) const;
  // The weights that would give on the quantized model's inputs x what W gives on the original ones x', W + W (C - G) G^-1 (C the cross
  // moments, G damped): errors of earlier layers are met here too. values [out, in] are changed in place.
  void meet_earlier_errors(Ops& ops, const Moments& moments, std::span<float> values, int out, ThreadPool& pool) const;

  [[nodiscard]] float damping() const { return damping_; }  // that was needed, absolute

 private:
  int n_ = 0;
  float damping_ = 0.0f;
  std::vector<int> order_;     // order_[i]: the column that goes i-th
  std::vector<float> factor_;  // [n, n] row k: R_jk for j <= k, in processing order
};

// Lower triangular L with a = L L^T for symmetric positive definite a [n, n], in place (the upper part becomes zero). False when a is not
// positive definite. Large matrices are updated by products of `ops`.
bool cholesky(Ops& ops, std::span<float> a, int n);

}  // namespace cachalot
