// Factorisation, and the walk over columns: 16 rows of W at a time, one per lane, so that the inner loops vectorise.
#include "quant/gptq.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "base/float_formats.h"

namespace cachalot {
namespace {

constexpr int kLanes = 16;

// value and code of the nearest point of a grid.
struct Nearest {
  float value;
  uint8_t code;
};
Nearest nearest_on(const MatrixGrid& grid, size_t at, float value) {
  const float scale = grid.scale[at], offset = grid.offset[at];
  if (scale == 0.0f) {
    // All codes stand for the offset, or for 0 where levels are signed: the code of level 0, or the one whose value is nearest.
    return {offset, 0};
  }
  const float v = (value - offset) / scale;
  int code = 0;
  float level = 0.0f;
  if (grid.e4m3) {
    code = f32_to_e4m3(v);
    level = e4m3_to_f32(static_cast<uint8_t>(code));
  } else if (grid.levels == nullptr) {
    level = std::nearbyint(std::clamp(v, 0.0f, static_cast<float>(grid.n_codes - 1)));
    code = static_cast<int>(level);
  } else {
    for (int i = 1; i < grid.n_codes; ++i) code += v > 0.5f * (grid.levels[i - 1] + grid.levels[i]) ? 1 : 0;
    level = grid.levels[code];
  }
  return {scale * level + offset, static_cast<uint8_t>(code)};
}

// The block [begin, end) of the diagonal, already updated; plain Cholesky in double.
bool factor_block(std::span<float> a, int n, int begin, int end) {
  const auto N = static_cast<size_t>(n);
  for (int k = begin; k < end; ++k) {
    float* const row_k = a.data() + static_cast<size_t>(k) * N;
    double d = row_k[k];
    for (int j = begin; j < k; ++j) d -= static_cast<double>(row_k[j]) * row_k[j];
    if (!(d > 0.0) || !std::isfinite(d)) return false;
    const double root = std::sqrt(d);
    row_k[k] = static_cast<float>(root);
    for (int i = k + 1; i < end; ++i) {
      float* const row_i = a.data() + static_cast<size_t>(i) * N;
      double s = row_i[k];
      for (int j = begin; j < k; ++j) s -= static_cast<double>(row_i[j]) * row_k[j];
      row_i[k] = static_cast<float>(s / root);
    }
  }
  return true;
}

}  // namespace

bool cholesky(Ops& ops, std::span<float> a, int n) {
  CACHALOT_CHECK(a.size() == static_cast<size_t>(n) * static_cast<size_t>(n), "{} values for [{}, {}]", a.size(), n, n);
  constexpr int kBlock = 64;
  const auto N = static_cast<size_t>(n);
  const auto at = [&](int row, int col, int rows, int cols) {
    View view = View::matrix(a.data() + static_cast<size_t>(row) * N + static_cast<size_t>(col), DType::f32, rows, cols);
    view.stride[0] = n;
    return view;
  };
  for (int begin = 0; begin < n; begin += kBlock) {
    const int end = std::min(begin + kBlock, n), width = end - begin;
    if (!factor_block(a, n, begin, end)) return false;
    if (end == n) break;
    // Rows below: L_i = A_i L_kk^-T, then what is right of them loses L_i L_j^T.
    for (int i = end; i < n; ++i) {
      float* const row = a.data() + static_cast<size_t>(i) * N;
      for (int k = begin; k < end; ++k) {
        const float* const row_k = a.data() + static_cast<size_t>(k) * N;
        double s = row[k];
        for (int j = begin; j < k; ++j) s -= static_cast<double>(row[j]) * row_k[j];
        row[k] = static_cast<float>(s / row_k[k]);
      }
    }
    std::vector<float> negated(static_cast<size_t>(n - end) * static_cast<size_t>(width));
    for (int i = end; i < n; ++i)
      for (int k = 0; k < width; ++k)
        negated[static_cast<size_t>(i - end) * static_cast<size_t>(width) + static_cast<size_t>(k)] =
            -a[static_cast<size_t>(i) * N + static_cast<size_t>(begin + k)];
    multiply(ops, View::matrix(negated.data(), DType::f32, n - end, width), at(end, begin, n - end, width), at(end, end, n - end, n - end),
             1.0f);
  }
  for (size_t i = 0; i < N; ++i)
    std::fill(a.begin() + static_cast<ptrdiff_t>(i * N + i + 1), a.begin() + static_cast<ptrdiff_t>((i + 1) * N), 0.0f);
  return true;
}

ErrorFeedback::ErrorFeedback(Ops& ops, const Moments& moments, const GptqOptions& options) : n_(moments.n) {
  const auto N = static_cast<size_t>(n_);
  CACHALOT_CHECK(moments.gram.size() == N * N, "no Gram matrix of {} columns", n_);
  order_.resize(N);
  std::iota(order_.begin(), order_.end(), 0);
  const auto diagonal = [&](int k) { return moments.gram[static_cast<size_t>(k) * N + static_cast<size_t>(k)]; };
  if (options.act_order) std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) { return diagonal(a) > diagonal(b); });
  double mean = 0.0;
  for (int k = 0; k < n_; ++k) mean += static_cast<double>(diagonal(k)) / n_;
  if (!(mean > 0.0) || !std::isfinite(mean)) mean = 1.0;  // no token, or an overflow: plain rounding
  // R is the Cholesky factor of G with rows and columns reversed, reversed again. Row k of factor_ is column k of R.
  std::vector<float> reversed(N * N);
  for (float share = options.damping;; share *= 10.0f) {
    damping_ = static_cast<float>(share * mean);
    for (size_t i = 0; i < N; ++i)
      for (size_t j = 0; j < N; ++j) {
        const auto row = static_cast<size_t>(order_[N - 1 - i]), column = static_cast<size_t>(order_[N - 1 - j]);
        const float g = moments.gram[row * N + column];
        reversed[i * N + j] = (std::isfinite(g) ? g : 0.0f) + (i == j ? damping_ : 0.0f);
      }
    if (cholesky(ops, reversed, n_)) break;
    CACHALOT_CHECK(share < 1e6f, "a Gram matrix with a negative diagonal");
  }
  factor_.resize(N * N);
  for (size_t k = 0; k < N; ++k)
    for (size_t j = 0; j <= k; ++j) factor_[k * N + j] = reversed[(N - 1 - j) * N + (N - 1 - k)];
}

void ErrorFeedback::choose_codes(QuantizedStack& stack, int m, std::span<const float> values, ThreadPool& pool) const {
  const MatrixGrid grid = stack.grid(m);
  CACHALOT_CHECK(grid.in == n_ && values.size() == static_cast<size_t>(grid.out) * static_cast<size_t>(n_), "[{}, {}] for {} inputs",
                 grid.out, grid.in, n_);
  const auto N = static_cast<size_t>(n_);
  const size_t n_runs = grid.n_runs();
  pool.run((grid.out + kLanes - 1) / kLanes, [&](int task, int) {
    const int first = task * kLanes, rows = std::min(kLanes, grid.out - first);
    std::vector<float> error(N * kLanes);  // d_j of each row, in processing order
    std::vector<uint8_t> codes(N * kLanes);
    for (size_t k = 0; k < N; ++k) {
      const float* const r = factor_.data() + k * N;
      float carried[kLanes] = {};
      for (size_t j = 0; j < k; ++j) {
        const float factor = r[j];
        const float* const d = error.data() + j * kLanes;
        for (int l = 0; l < kLanes; ++l) carried[l] += factor * d[l];
      }
      const float inverse = 1.0f / r[k];
      const auto column = static_cast<size_t>(order_[k]);
      for (int l = 0; l < rows; ++l) {
        const auto row = static_cast<size_t>(first + l);
        const float value = values[row * N + column];
        const Nearest nearest = nearest_on(grid, row * n_runs + column / static_cast<size_t>(grid.run), value + carried[l] * inverse);
        error[k * kLanes + static_cast<size_t>(l)] = value - nearest.value;
        codes[static_cast<size_t>(l) * N + column] = nearest.code;
      }
    }
    for (int l = 0; l < rows; ++l) stack.write_codes(m, first + l, codes.data() + static_cast<size_t>(l) * N);
  });
}

void ErrorFeedback::meet_earlier_errors(Ops& ops, const Moments& moments, std::span<float> values, int out, ThreadPool& pool) const {
  const auto N = static_cast<size_t>(n_);
  CACHALOT_CHECK(moments.cross.size() == N * N && values.size() == static_cast<size_t>(out) * N);
  // (C - G)^T, so that the product W (C - G) has it as a weight.
  std::vector<float> difference(N * N), change(values.size());
  for (size_t i = 0; i < N; ++i)
    for (size_t j = 0; j < N; ++j) difference[j * N + i] = moments.cross[i * N + j] - moments.gram[i * N + j];
  multiply(ops, View::matrix(values.data(), DType::f32, out, n_), View::matrix(difference.data(), DType::f32, n_, n_),
           View::matrix(change.data(), DType::f32, out, n_), 0.0f);
  pool.run((out + kLanes - 1) / kLanes, [&](int task, int) {
    const int first = task * kLanes, rows = std::min(kLanes, out - first);
    std::vector<float> z(N * kLanes);  // in processing order
    for (size_t k = 0; k < N; ++k)
      for (int l = 0; l < rows; ++l)
        z[k * kLanes + static_cast<size_t>(l)] = change[static_cast<size_t>(first + l) * N + static_cast<size_t>(order_[k])];
    // x R R^T = m: first y R^T = m from the last column back, then x R = y from the first on. factor_ row k holds R_jk, j <= k.
    for (size_t k = N; k-- > 0;) {
      const float* const r = factor_.data() + k * N;
      float* const zk = z.data() + k * kLanes;
      for (int l = 0; l < kLanes; ++l) zk[l] /= r[k];
      for (size_t j = 0; j < k; ++j)
        for (int l = 0; l < kLanes; ++l) z[j * kLanes + static_cast<size_t>(l)] -= r[j] * zk[l];
    }
    for (size_t k = 0; k < N; ++k) {
      const float* const r = factor_.data() + k * N;
      float* const zk = z.data() + k * kLanes;
      for (size_t j = 0; j < k; ++j)
        for (int l = 0; l < kLanes; ++l) zk[l] -= r[j] * z[j * kLanes + static_cast<size_t>(l)];
      for (int l = 0; l < kLanes; ++l) zk[l] /= r[k];
    }
    for (size_t k = 0; k < N; ++k)
      for (int l = 0; l < rows; ++l) {
        const float moved = z[k * kLanes + static_cast<size_t>(l)];
        if (std::isfinite(moved)) values[static_cast<size_t>(first + l) * N + static_cast<size_t>(order_[k])] += moved;
      }
  });
}

}  // namespace cachalot
