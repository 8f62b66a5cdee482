// Gram matrices by the products of an Ops.
#include "quant/moments.h"

#include <algorithm>

#include "base/check.h"

namespace cachalot {
namespace {

constexpr int kRowsAtOnce = 1024;

LinearSource source_of(const float* data, int out, int in) {
  LinearSource source{.name = "product", .format = Format::f32, .out = out, .in = in};
  source.matrices.push_back({.data = std::as_bytes(std::span(data, static_cast<size_t>(out) * static_cast<size_t>(in)))});
  return source;
}

// Columns of rows [begin, begin + n) of x times weight, as rows: [n_cols, n].
std::vector<float> transposed(const View& x, int begin, int n, const float* weight) {
  const int cols = x.n_cols();
  std::vector<float> out(static_cast<size_t>(cols) * static_cast<size_t>(n));
  constexpr int kTile = 32;
  for (int r0 = 0; r0 < n; r0 += kTile)
    for (int c0 = 0; c0 < cols; c0 += kTile)
      for (int r = r0; r < std::min(r0 + kTile, n); ++r) {
        const float* const row = x.row<float>(begin + r);
        const float w = weight != nullptr ? weight[begin + r] : 1.0f;
        for (int c = c0; c < std::min(c0 + kTile, cols); ++c)
          out[static_cast<size_t>(c) * static_cast<size_t>(n) + static_cast<size_t>(r)] = row[c] * w;
      }
  return out;
}

}  // namespace

void multiply(Ops& ops, View x, View w, View y, float beta) {
  CACHALOT_CHECK(x.n_cols() == w.n_cols() && y.n_rows() == x.n_rows() && y.n_cols() == w.n_rows(), "[{}, {}] x [{}, {}]^T -> [{}, {}]",
                 x.n_rows(), x.n_cols(), w.n_rows(), w.n_cols(), y.n_rows(), y.n_cols());
  std::vector<float> dense;
  const float* data = w.row<float>(0);
  if (w.row_stride() != w.n_cols()) {
    dense.resize(static_cast<size_t>(w.n_rows()) * static_cast<size_t>(w.n_cols()));
    for (int r = 0; r < w.n_rows(); ++r)
      std::copy_n(w.row<float>(r), w.n_cols(), dense.data() + static_cast<size_t>(r) * static_cast<size_t>(w.n_cols()));
    data = dense.data();
  }
  const LinearSource source = source_of(data, w.n_rows(), w.n_cols());
  const Linear packed = ops.pack({&source, 1});
  const Scope scope(ops);
  ops.linear(x, packed, y, beta);
}

Moments::Moments(int n_columns, bool with_gram, bool with_cross) : n(n_columns), square(static_cast<size_t>(n_columns)) {
  const size_t size = static_cast<size_t>(n) * static_cast<size_t>(n);
  if (with_gram) gram.resize(size);
  if (with_cross) cross.resize(size);
}

void Moments::add(Ops& ops, View x, const float* row_weight, View original) {
  CACHALOT_CHECK(x.n_cols() == n && x.dtype == DType::f32, "{} columns of {}", x.n_cols(), n);
  for (int begin = 0; begin < x.n_rows(); begin += kRowsAtOnce) {
    const int rows = std::min(kRowsAtOnce, x.n_rows() - begin);
    for (int r = begin; r < begin + rows; ++r) {
      const double w = row_weight != nullptr ? static_cast<double>(row_weight[r]) : 1.0;
      const float* const row = x.row<float>(r);
      for (int k = 0; k < n; ++k) square[static_cast<size_t>(k)] += w * w * row[k] * row[k];
      weight += w * w;
    }
    tokens += rows;
    if (gram.empty()) continue;
    std::vector<float> columns = transposed(x, begin, rows, row_weight);
    const View view = View::matrix(columns.data(), DType::f32, n, rows);
    multiply(ops, view, view, View::matrix(gram.data(), DType::f32, n, n), 1.0f);
    if (cross.empty()) continue;
    std::vector<float> others = transposed(original, begin, rows, row_weight);
    multiply(ops, View::matrix(others.data(), DType::f32, n, rows), view, View::matrix(cross.data(), DType::f32, n, n), 1.0f);
  }
}

std::vector<float> Moments::importance() const {
  std::vector<float> out(square.size());
  for (size_t k = 0; k < out.size(); ++k) out[k] = weight > 0.0 ? static_cast<float>(square[k] / weight) : 0.0f;
  return out;
}

}  // namespace cachalot
