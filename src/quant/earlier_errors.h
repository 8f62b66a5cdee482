// EarlierErrors: what layers before have lost, met by the weights that come next. On the quantized model's inputs x they shall give what W
// gives on the original ones x', which by least squares are
//   W + a W D (G + d)^-1, with G = X^T X and D = (X' - X)^T X over the calibration tokens.
// Where tokens are few beside columns, that learns them by heart, and other text loses by it. So the damping d and the share a are those
// that leave the least error on tokens that were held out of the fit; where nothing helps, a is 0 and W stays.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "quant/moments.h"

namespace cachalot {

class EarlierErrors {
 public:
  // All must outlive this. moments: with the original's.
  EarlierErrors(Ops& ops, ThreadPool& pool, const Moments& moments);
  ~EarlierErrors();

  // Moves values [out, columns]. The first matrix decides on d and a for all that have this input.
  void meet(std::span<float> values, int out);

  // What was decided: d as a share of G's mean diagonal, a, and the squared error on the tokens that were held out, relative to that of W.
  struct Choice {
    float damping = 0.0f, share = 0.0f;
    double error = 1.0;
  };
  [[nodiscard]] const Choice& choice() const { return choice_; }

 private:
  class LeastSquares;
  [[nodiscard]] Choice choose(std::span<const float> values, int out) const;

  Ops& ops_;
  ThreadPool& pool_;
  const Moments& moments_;
  Choice choice_;
  bool chosen_ = false;
  std::unique_ptr<LeastSquares> of_all_;
};

}  // namespace cachalot
