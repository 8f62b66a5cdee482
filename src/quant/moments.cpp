// Gram matrices by the products of an Ops.
#include "quant/moments.h"

#include <cmath>
#include <numeric>

#include "base/check.h"

namespace cachalot {
namespace {

constexpr int kRowsAtOnce = 1024, kColumnsAtOnce = 512, kTile = 32;

LinearSource source_of(const float* data, int out, int in) {
  LinearSource source{.name = "product", .format = Format::f32, .out = out, .in = in};
  source.matrices.push_back({.data = std::as_bytes(std::span(data, static_cast<size_t>(out) * static_cast<size_t>(in)))});
  return source;
}

// Copies what is below the diagonal above it.
void mirror(std::vector<float>& a, int n) {
  const auto N = static_cast<size_t>(n);
  for (int i0 = 0; i0 < n; i0 += kTile)
    for (int j0 = 0; j0 <= i0; j0 += kTile)
      for (int i = i0; i < std::min(i0 + kTile, n); ++i)
        for (int j = j0; j < std::min(j0 + kTile, i); ++j)
          a[static_cast<size_t>(j) * N + static_cast<size_t>(i)] = a[static_cast<size_t>(i) * N + static_cast<size_t>(j)];
}

// The weights, those of rows that are far larger than most so small that they count like a row of median size: models make attention sinks
// of single tokens, whose inner rows are a thousand times those of others. Their squared errors would count for more than all others'.
std::vector<float> limited_weights(const View& x, const float* row_weight) {
  constexpr double kFarLarger = 64.0;  // squared size over the median's
  std::vector<double> sizes;
  for (int r = 0; r < x.n_rows(); ++r) {
    const float* const row = x.row<float>(r);
    sizes.push_back(std::inner_product(row, row + x.n_cols(), row, 0.0));
  }
  std::vector<double> sorted = sizes;
  const auto middle = sorted.begin() + static_cast<ptrdiff_t>(sorted.size() / 2);
  if (!sorted.empty()) std::nth_element(sorted.begin(), middle, sorted.end());
  std::vector<float> out(sizes.size(), 1.0f);
  for (size_t r = 0; r < sizes.size(); ++r) {
    if (row_weight != nullptr) out[r] = row_weight[r];
    if (*middle > 0.0 && sizes[r] > kFarLarger * *middle) out[r] *= static_cast<float>(std::sqrt(*middle / sizes[r]));
  }
  return out;
}

}  // namespace

std::vector<float> transposed(const View& x) {
  const int rows = x.n_rows(), cols = x.n_cols();
  std::vector<float> out(static_cast<size_t>(cols) * static_cast<size_t>(rows));
  for (int r0 = 0; r0 < rows; r0 += kTile)
    for (int c0 = 0; c0 < cols; c0 += kTile)
      for (int r = r0; r < std::min(r0 + kTile, rows); ++r) {
        const float* const row = x.row<float>(r);
        for (int c = c0; c < std::min(c0 + kTile, cols); ++c)
          out[static_cast<size_t>(c) * static_cast<size_t>(rows) + static_cast<size_t>(r)] = row[c];
      }
  return out;
}

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

Moments::Moments(int n_columns, bool with_gram, bool with_original)
    : n(n_columns), square(static_cast<size_t>(n_columns)), with_gram_(with_gram), with_original_(with_original) {}

// To gram_, whose upper triangle stays behind, and cross_.
void Moments::add_products(Ops& ops, View rows, View changes) const {
  const size_t size = static_cast<size_t>(n) * static_cast<size_t>(n);
  gram_.resize(size);
  if (changes) cross_.resize(size);
  for (int begin = 0; begin < rows.n_rows(); begin += kRowsAtOnce) {
    const int count = std::min(kRowsAtOnce, rows.n_rows() - begin);
    std::vector<float> columns = transposed(rows.rows(begin, count));
    const View view = View::matrix(columns.data(), DType::f32, n, count);
    // The lower triangle, with whole blocks on the diagonal.
    for (int c = 0; c < n; c += kColumnsAtOnce) {
      const int cols = std::min(kColumnsAtOnce, n - c);
      multiply(ops, view.rows(c, n - c), view.rows(c, cols), View::matrix(gram_.data(), DType::f32, n, n).rows(c, n - c).cols(c, cols),
               1.0f);
    }
    if (!changes) continue;
    std::vector<float> others = transposed(changes.rows(begin, count));
    multiply(ops, view, View::matrix(others.data(), DType::f32, n, count), View::matrix(cross_.data(), DType::f32, n, n), 1.0f);
  }
}

void Moments::add(Ops& ops, View x, const float* row_weight, View original, const uint8_t* held_out) {
  CACHALOT_CHECK(x.n_cols() == n && x.dtype == DType::f32, "{} columns of {}", x.n_cols(), n);
  const std::vector<float> weights = limited_weights(x, row_weight);
  const auto weight_of = [&](int r) { return weights[static_cast<size_t>(r)]; };
  for (int r = 0; r < x.n_rows(); ++r) {
    const auto w = static_cast<double>(weight_of(r));
    const float* const row = x.row<float>(r);
    for (int k = 0; k < n; ++k) square[static_cast<size_t>(k)] += w * w * row[k] * row[k];
    weight += w * w;
  }
  tokens += x.n_rows();
  if (!with_gram_) return;
  CACHALOT_CHECK(!with_original_ || original.n_rows() == x.n_rows(), "{} rows, {} of the original", x.n_rows(), original.n_rows());
  const size_t first = rows_.size(), more = static_cast<size_t>(x.n_rows()) * static_cast<size_t>(n);
  rows_.resize(first + more);
  if (with_original_) changes_.resize(first + more);
  for (int r = 0; r < x.n_rows(); ++r) {
    const float w = weight_of(r);
    const float* const row = x.row<float>(r);
    const size_t at = first + static_cast<size_t>(r) * static_cast<size_t>(n);
    for (int k = 0; k < n; ++k) rows_[at + static_cast<size_t>(k)] = w * row[k];
    if (!with_original_) continue;
    const float* const other = original.row<float>(r);
    for (int k = 0; k < n; ++k) changes_[at + static_cast<size_t>(k)] = w * (other[k] - row[k]);
    held_out_.push_back(held_out != nullptr ? held_out[r] : 0);
    if (held_out_.back() == 0) continue;
    const auto begin = static_cast<ptrdiff_t>(at);
    held_out_rows_.insert(held_out_rows_.end(), rows_.begin() + begin, rows_.begin() + begin + n);
    held_out_changes_.insert(held_out_changes_.end(), changes_.begin() + begin, changes_.begin() + begin + n);
  }
  if (!summed_ && 2 * tokens <= n) {
    gram_.clear();
    return;
  }
  if (!summed_) gram_.clear();
  summed_ = true;
  add_products(ops, rows(), with_original_ ? changes() : View{});
  mirror(gram_, n);
  rows_.clear();
  changes_.clear();
  held_out_.clear();
}

const std::vector<float>& Moments::gram(Ops& ops) const {
  CACHALOT_CHECK(with_gram_, "only squares of {} columns were asked for", n);
  if (gram_.empty()) {
    if (rows_.empty()) {
      gram_.resize(static_cast<size_t>(n) * static_cast<size_t>(n));
    } else {
      add_products(ops, rows(), {});
      mirror(gram_, n);
    }
  }
  return gram_;
}

std::vector<float> Moments::importance() const {
  std::vector<float> out(square.size());
  for (size_t k = 0; k < out.size(); ++k) out[k] = weight > 0.0 ? static_cast<float>(square[k] / weight) : 0.0f;
  return out;
}

}  // namespace cachalot
