// GPTQ (Frantar et al. 2023): codes chosen column by column, each column's error carried into the columns that are still to come, so that
// the error of the outputs, not of the weights, is least. In the form of LDLQ (Chee et al. 2023), which gives the same codes without an
// inverse: with G = R R^T, R upper triangular, and d_j = w_j - v_j the error of column j,
//   v_k = nearest(w_k + sum over j < k of d_j R_jk / R_kk).
// Columns go in order of falling diag(G) ("act order") on scales that were fixed before ("static groups"), so files need no g_idx. A block
// of columns is walked through alone; what it leaves to all later ones is one product.
#pragma once

#include <span>

#include "quant/matrix_quantizer.h"
#include "quant/moments.h"

namespace cachalot {

struct GptqOptions {
  // Added to the diagonal, as a share of its mean; grows tenfold while G is not positive definite. 0: what held-out tokens show to be best.
  float damping = 0.0f;
  bool act_order = true;
};

// The factor of one G, shared by all matrices with the same input. All that it is made with must outlive it.
class ErrorFeedback {
 public:
  // With options.damping of 0: 0.01.
  ErrorFeedback(Ops& ops, ThreadPool& pool, const Moments& moments, const GptqOptions& options)
      : ErrorFeedback(ops, pool, moments.gram(ops), moments.n, options) {}
  ErrorFeedback(Ops& ops, ThreadPool& pool, const std::vector<float>& gram, int n, const GptqOptions& options);

  // Chooses the codes of matrix m of `stack` for values [out, in], on the scales that the stack holds already.
  void choose_codes(QuantizedStack& stack, int m, std::span<const float> values) const;

  [[nodiscard]] float damping() const { return damping_; }  // that was needed, absolute

 private:
  [[nodiscard]] View factor(int row, int column, int rows, int columns) const;

  Ops& ops_;
  ThreadPool& pool_;
  int n_ = 0;
  float damping_ = 0.0f;
  std::vector<int> order_;     // order_[i]: the column that goes i-th
  std::vector<float> factor_;  // [n, n] row k: R_jk for j <= k, in processing order
};

// Where tokens are few beside columns, codes learn them by heart unless G is damped more. The damping with which codes that were chosen for
// the other tokens leave the least error in the outputs of those that were held out; 0.01 when none was. values [out, moments.n];
// importance and search: as they will be rounded.
float best_damping(Ops& ops, ThreadPool& pool, const Moments& moments, const Scheme& scheme, std::span<const float> values, int out,
                   std::span<const float> importance, RangeSearch search);

}  // namespace cachalot
