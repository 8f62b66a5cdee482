// Least squares with a damping that is found by cross-validation.
#include "quant/earlier_errors.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "quant/cholesky.h"

namespace cachalot {

// W D (G + d)^-1 over all tokens, or over those that were not held out. Where the rows of X are kept, it is computed as
// W (X' - X)^T (X X^T + d)^-1 X, whose inverse is one of tokens, not of columns.
class EarlierErrors::LeastSquares {
 public:
  LeastSquares(Ops& ops, ThreadPool& pool, const Moments& moments, bool held_out_too)
      : ops_(ops), pool_(pool), moments_(moments), held_out_too_(held_out_too), by_rows_(moments.keeps_rows()) {
    if (by_rows_) {
      take_rows(moments.rows(), rows_);
      take_rows(moments.changes(), changes_);
      size_ = static_cast<int>(rows_.size() / static_cast<size_t>(moments.n));
      own_.resize(static_cast<size_t>(size_) * static_cast<size_t>(size_));
      if (size_ > 0) multiply(ops_, x(), x(), View::matrix(own_.data(), DType::f32, size_, size_), 0.0f);
    } else {
      size_ = moments.n;
      if (!held_out_too) {
        own_ = moments.gram(ops);
        std::vector<float> columns = transposed(moments.held_out_rows()), negated = columns;
        for (float& v : negated) v = -v;
        const int tokens = moments.held_out_rows().n_rows();
        multiply(ops_, View::matrix(columns.data(), DType::f32, size_, tokens), View::matrix(negated.data(), DType::f32, size_, tokens),
                 View::matrix(own_.data(), DType::f32, size_, size_), 1.0f);
      }
    }
    const auto N = static_cast<size_t>(size_);
    for (size_t i = 0; i < N; ++i) mean_ += static_cast<double>(matrix()[i * N + i]) / moments.n;
  }

  // False when no damping makes the matrix positive definite, as with an overflow.
  bool damp(float share) {
    const auto N = static_cast<size_t>(size_);
    for (; std::isfinite(share) && mean_ > 0.0 && std::isfinite(mean_); share *= 10.0f) {
      factor_ = matrix();
      for (size_t i = 0; i < N; ++i) factor_[i * N + i] += static_cast<float>(static_cast<double>(share) * mean_);
      if (cholesky(ops_, factor_, size_)) return true;
    }
    return false;
  }

  // By how much values [out, columns] move; [out, columns].
  [[nodiscard]] std::vector<float> change(std::span<const float> values, int out) const {
    const auto stride = padded_to_lanes(out);
    const View w = View::matrix(const_cast<float*>(values.data()), DType::f32, out, moments_.n);
    std::vector<float> z(static_cast<size_t>(size_) * stride);
    const View right = strided(z.data(), size_, out, stride);
    if (by_rows_) {
      multiply(ops_, View::matrix(const_cast<float*>(changes_.data()), DType::f32, size_, moments_.n), w, right, 0.0f);
    } else {
      multiply(ops_, View::matrix(const_cast<float*>(moments_.cross().data()), DType::f32, size_, size_), w, right, 0.0f);
      if (!held_out_too_) take_held_out(w, right);
    }
    solve(ops_, pool_, factor_, size_, Triangle::lower, z, out);
    solve(ops_, pool_, factor_, size_, Triangle::transposed, z, out);
    std::vector<float> moved = transposed(right);
    if (!by_rows_) return moved;
    std::vector<float> columns = transposed(x()), by_column(values.size());
    multiply(ops_, View::matrix(moved.data(), DType::f32, out, size_), View::matrix(columns.data(), DType::f32, moments_.n, size_),
             View::matrix(by_column.data(), DType::f32, out, moments_.n), 0.0f);
    return by_column;
  }

 private:
  void take_rows(const View& from, std::vector<float>& to) const {
    for (int r = 0; r < from.n_rows(); ++r)
      if (held_out_too_ || !moments_.is_held_out(r)) to.insert(to.end(), from.row<float>(r), from.row<float>(r) + from.n_cols());
  }
  [[nodiscard]] const std::vector<float>& matrix() const { return by_rows_ || !held_out_too_ ? own_ : moments_.gram(ops_); }
  [[nodiscard]] View x() const { return View::matrix(const_cast<float*>(rows_.data()), DType::f32, size_, moments_.n); }

  // right -= X_h^T (X'_h - X_h) W^T over the tokens that were held out.
  void take_held_out(View w, View right) const {
    const View rows = moments_.held_out_rows();
    std::vector<float> outputs(static_cast<size_t>(rows.n_rows()) * static_cast<size_t>(w.n_rows()));
    const View wanted = View::matrix(outputs.data(), DType::f32, rows.n_rows(), w.n_rows());
    multiply(ops_, moments_.held_out_changes(), w, wanted, 0.0f);
    std::vector<float> by_output = transposed(wanted), columns = transposed(rows);
    for (float& v : by_output) v = -v;
    multiply(ops_, View::matrix(columns.data(), DType::f32, size_, rows.n_rows()),
             View::matrix(by_output.data(), DType::f32, w.n_rows(), rows.n_rows()), right, 1.0f);
  }

  Ops& ops_;
  ThreadPool& pool_;
  const Moments& moments_;
  bool held_out_too_, by_rows_;
  int size_ = 0;
  double mean_ = 0.0;                  // of G's diagonal
  std::vector<float> rows_, changes_;  // by rows: [size, columns]
  std::vector<float> own_, factor_;    // [size, size]; own: where it is not the moments' own Gram matrix
};

EarlierErrors::EarlierErrors(Ops& ops, ThreadPool& pool, const Moments& moments) : ops_(ops), pool_(pool), moments_(moments) {
  CACHALOT_CHECK(moments.has_original());
}

EarlierErrors::~EarlierErrors() = default;

EarlierErrors::Choice EarlierErrors::choose(std::span<const float> values, int out) const {
  const View held_out = moments_.held_out_rows();
  const auto n = static_cast<size_t>(moments_.n);
  if (held_out.n_rows() == 0) return {};
  constexpr int kSampleRows = 256;  // rows of W are alike enough to choose by
  std::vector<float> sample;
  int rows = 0;
  for (int r = 0; r < out; r += std::max(1, out / kSampleRows), ++rows) {
    const auto from = values.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(r) * n);
    sample.insert(sample.end(), from, from + moments_.n);
  }
  const View w = View::matrix(sample.data(), DType::f32, rows, moments_.n);
  std::vector<float> wanted(static_cast<size_t>(held_out.n_rows()) * static_cast<size_t>(rows)), given(wanted.size());
  multiply(ops_, moments_.held_out_changes(), w, View::matrix(wanted.data(), DType::f32, held_out.n_rows(), rows), 0.0f);
  double size = 0.0;
  for (const float v : wanted) size += static_cast<double>(v) * v;
  if (!(size > 0.0) || !std::isfinite(size)) return {};

  LeastSquares of_others(ops_, pool_, moments_, false);
  const auto try_damping = [&](float damping) {
    Choice c{.damping = damping};
    if (!of_others.damp(damping)) return c;
    std::vector<float> change = of_others.change(sample, rows);
    multiply(ops_, held_out, View::matrix(change.data(), DType::f32, rows, moments_.n),
             View::matrix(given.data(), DType::f32, held_out.n_rows(), rows), 0.0f);
    double along = 0.0, square = 0.0;
    for (size_t i = 0; i < given.size(); ++i) {
      along += static_cast<double>(wanted[i]) * given[i];
      square += static_cast<double>(given[i]) * given[i];
    }
    if (!(square > 0.0) || !std::isfinite(square)) return c;
    const double share = std::clamp(along / square, 0.0, 1.0);
    c.share = static_cast<float>(share);
    c.error = 1.0 + (share * square - 2.0 * along) * share / size;
    return c;
  };
  // From the middle to the better side, as far as it goes on getting better: the error has one valley.
  constexpr float kFirst = 0.1f, kStep = 3.1622777f, kLeast = 1e-3f, kMost = 1e3f;
  Choice best = try_damping(kFirst);
  const auto walk = [&](float step) {
    bool better = false;
    for (float damping = best.damping * step; damping > kLeast && damping < kMost; damping *= step) {
      const Choice next = try_damping(damping);
      if (!(next.error < best.error)) break;
      best = next;
      better = true;
    }
    return better;
  };
  if (!walk(kStep)) walk(1.0f / kStep);
  return best;
}

void EarlierErrors::meet(std::span<float> values, int out) {
  CACHALOT_CHECK(values.size() == static_cast<size_t>(out) * static_cast<size_t>(moments_.n), "{} values", values.size());
  if (!chosen_) {
    chosen_ = true;
    choice_ = choose(values, out);
    if (choice_.share > 0.0f) {
      of_all_ = std::make_unique<LeastSquares>(ops_, pool_, moments_, true);
      if (!of_all_->damp(choice_.damping)) choice_ = {};
    }
  }
  if (!(choice_.share > 0.0f)) return;
  const std::vector<float> change = of_all_->change(values, out);
  for (size_t i = 0; i < values.size(); ++i)
    if (std::isfinite(change[i])) values[i] += choice_.share * change[i];
}

}  // namespace cachalot
