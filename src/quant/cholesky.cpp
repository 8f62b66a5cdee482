// Blocks of the diagonal in double; what is below and right of them by products.
#include "quant/cholesky.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/check.h"
#include "quant/moments.h"
#include "tensor/lanes.h"

namespace cachalot {
namespace {

constexpr int kBlock = 128, kPanel = 512;

// A block of the diagonal, column after column, so that the inner loops run along columns: l[j * kBlock + i] is row i of column j.
struct Block {
  std::vector<double> l = std::vector<double>(size_t{kBlock} * kBlock);
  int n = 0;

  [[nodiscard]] double* column(int j) { return l.data() + static_cast<ptrdiff_t>(j) * kBlock; }

  // In place; false when it is not positive definite.
  bool factor() {
    for (int k = 0; k < n; ++k) {
      double* const c = column(k);
      if (!(c[k] > 0.0) || !std::isfinite(c[k])) return false;
      const double root = std::sqrt(c[k]);
      for (int i = k; i < n; ++i) c[i] /= root;
      for (int j = k + 1; j < n; ++j) {
        double* const to = column(j);
        const double f = c[j];
        for (int i = j; i < n; ++i) to[i] -= f * c[i];
      }
    }
    return true;
  }
  // The inverse of the factor, row-major [n, n].
  [[nodiscard]] std::vector<float> inverse() {
    std::vector<float> out(static_cast<size_t>(n) * static_cast<size_t>(n));
    std::vector<double> x(static_cast<size_t>(n));
    for (int j = 0; j < n; ++j) {
      std::fill(x.begin(), x.end(), 0.0);
      x[static_cast<size_t>(j)] = 1.0;
      for (int k = j; k < n; ++k) {
        const double* const c = column(k);
        const double value = x[static_cast<size_t>(k)] /= c[k];
        for (int i = k + 1; i < n; ++i) x[static_cast<size_t>(i)] -= value * c[i];
        out[static_cast<size_t>(k) * static_cast<size_t>(n) + static_cast<size_t>(j)] = static_cast<float>(value);
      }
    }
    return out;
  }
};

// Rows [begin, end) of L y = z or L^T y = z in place, one right-hand side in each lane.
struct SolveWalk {
  const float* lower;  // [n, n]
  float* z;            // [n, stride]
  float* negated;      // [kLanes, end - begin] out: what was found, for the product with the rest
  size_t n, stride;
  int begin, end;
  Triangle triangle;
};

CACHALOT_LANES_INLINE void walk_solve(const SolveWalk& w) {
  Lanes z[kBlock];
  const int width = w.end - w.begin;
  const auto row = [&](int i) { return w.lower + static_cast<size_t>(w.begin + i) * w.n + w.begin; };
  const auto at = [&](int i) { return w.z + static_cast<size_t>(w.begin + i) * w.stride; };
  for (int i = 0; i < width; ++i) z[i] = load_lanes(at(i));
  if (w.triangle == Triangle::transposed) {
    for (int k = width - 1; k >= 0; --k) {
      const float* const r = row(k);
      z[k] /= r[k];
      for (int j = 0; j < k; ++j) z[j] -= r[j] * z[k];
    }
  } else {
    for (int k = 0; k < width; ++k) {
      const float* const r = row(k);
      z[k] = (z[k] - lanes_product(r, z, k)) / r[k];
    }
  }
  for (int i = 0; i < width; ++i) {
    store_lanes(z[i], at(i));
    for (int l = 0; l < kLanes; ++l) w.negated[l * width + i] = -z[i][l];
  }
}
CACHALOT_LANES_FUNCTION(run_solve_walk, SolveWalk, walk_solve)

}  // namespace

bool cholesky(Ops& ops, std::span<float> a, int n) {
  CACHALOT_CHECK(a.size() == static_cast<size_t>(n) * static_cast<size_t>(n), "{} values for [{}, {}]", a.size(), n, n);
  const auto N = static_cast<size_t>(n);
  const auto row = [&](int i) { return a.data() + static_cast<size_t>(i) * N; };
  const auto at = [&](int i, int col, int rows, int cols) { return strided(row(i) + col, rows, cols, N); };
  Block block;
  for (int begin = 0; begin < n; begin += kBlock) {
    const int end = std::min(begin + kBlock, n), width = end - begin, below = n - end;
    block.n = width;
    for (int i = 0; i < width; ++i)
      for (int j = 0; j <= i; ++j) block.column(j)[i] = row(begin + i)[begin + j];
    if (!block.factor()) return false;
    for (int i = 0; i < width; ++i)
      for (int j = 0; j <= i; ++j) row(begin + i)[begin + j] = static_cast<float>(block.column(j)[i]);
    if (below == 0) break;
    // Rows below: L_i = A_i L_kk^-T.
    std::vector<float> inverse = block.inverse(), rows(static_cast<size_t>(below) * static_cast<size_t>(width));
    for (int i = 0; i < below; ++i) std::copy_n(row(end + i) + begin, width, rows.data() + static_cast<ptrdiff_t>(i) * width);
    multiply(ops, View::matrix(rows.data(), DType::f32, below, width), View::matrix(inverse.data(), DType::f32, width, width),
             at(end, begin, below, width), 0.0f);
    // What is right of them loses L_i L_j^T, in panels that leave out most of what is above the diagonal.
    for (int i = 0; i < below; ++i)
      for (int k = 0; k < width; ++k)
        rows[static_cast<size_t>(i) * static_cast<size_t>(width) + static_cast<size_t>(k)] = -row(end + i)[begin + k];
    for (int c = end; c < n; c += kPanel) {
      const int cols = std::min(kPanel, n - c);
      multiply(ops, at(c, begin, n - c, width),
               View::matrix(rows.data() + static_cast<ptrdiff_t>(c - end) * width, DType::f32, cols, width), at(c, c, n - c, cols), 1.0f);
    }
  }
  for (int i = 0; i < n; ++i) std::fill(row(i) + i + 1, row(i) + n, 0.0f);
  return true;
}

size_t padded_to_lanes(int columns) { return (static_cast<size_t>(columns) + kLanes - 1) / kLanes * kLanes; }

void solve(Ops& ops, ThreadPool& pool, std::span<const float> lower, int n, Triangle triangle, std::span<float> z, int columns) {
  const auto N = static_cast<size_t>(n), stride = padded_to_lanes(columns);
  CACHALOT_CHECK(lower.size() == N * N && z.size() == N * stride, "[{}, {}] for {} numbers", n, n, z.size());
  std::vector<float> negated(stride * kBlock), turned;
  const auto walk = [&](int begin, int end) {
    pool.run(static_cast<int>(stride / kLanes), [&](int group, int) {
      const auto first = static_cast<size_t>(group) * kLanes;
      run_solve_walk({.lower = lower.data(),
                      .z = z.data() + first,
                      .negated = negated.data() + first * static_cast<size_t>(end - begin),
                      .n = N,
                      .stride = stride,
                      .begin = begin,
                      .end = end,
                      .triangle = triangle});
    });
  };
  const auto values = [&](int width) { return View::matrix(negated.data(), DType::f32, columns, width); };
  if (triangle == Triangle::lower) {
    for (int begin = 0; begin < n; begin += kBlock) {
      const int end = std::min(begin + kBlock, n), width = end - begin;
      walk(begin, end);
      if (end < n)
        multiply(ops, strided(lower.data() + static_cast<size_t>(end) * N + static_cast<size_t>(begin), n - end, width, N), values(width),
                 strided(z.data() + static_cast<size_t>(end) * stride, n - end, columns, stride), 1.0f);
    }
    return;
  }
  for (int begin = (n - 1) / kBlock * kBlock; begin >= 0; begin -= kBlock) {
    const int end = std::min(begin + kBlock, n), width = end - begin;
    walk(begin, end);
    if (begin == 0) break;
    turned.resize(static_cast<size_t>(begin) * static_cast<size_t>(width));
    for (int k = begin; k < end; ++k)
      for (int j = 0; j < begin; ++j)
        turned[static_cast<size_t>(j) * static_cast<size_t>(width) + static_cast<size_t>(k - begin)] =
            lower[static_cast<size_t>(k) * N + static_cast<size_t>(j)];
    multiply(ops, View::matrix(turned.data(), DType::f32, begin, width), values(width), strided(z.data(), begin, columns, stride), 1.0f);
  }
}

}  // namespace cachalot
