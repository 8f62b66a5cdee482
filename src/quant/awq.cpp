// The search for channel scales.
#include "quant/awq.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"

namespace cachalot {
namespace {

constexpr double kMaxScale = 64.0;
constexpr int kSampleRows = 256;  // of a matrix: its rows are alike enough to choose by

// A sample of rows, and their output error without any rounding of them.
struct Sample {
  std::vector<float> values;  // [rows, in]
  int rows = 0;
  double factor = 1.0;  // rows of the matrix that one of these stands for, times its weight
  Scheme scheme;
  double size = 0.0;  // trace(W G W^T)
};

Sample sample_of(const AwqMatrix& matrix, int in) {
  Sample s;
  const int step = std::max(1, matrix.out / kSampleRows);
  for (int r = 0; r < matrix.out; r += step) {
    const float* const row = matrix.values.data() + static_cast<size_t>(r) * static_cast<size_t>(in);
    s.values.insert(s.values.end(), row, row + in);
    ++s.rows;
  }
  s.factor = matrix.weight * matrix.out / s.rows;
  s.scheme = matrix.scheme;
  return s;
}

// Mean over rows of |w| relative to the largest of the row's group of 128.
std::vector<double> weight_profile(const std::vector<Sample>& samples, int in) {
  std::vector<double> out(static_cast<size_t>(in));
  double rows = 0.0;
  for (const Sample& s : samples)
    for (int r = 0; r < s.rows; ++r, ++rows) {
      const float* const row = s.values.data() + static_cast<size_t>(r) * static_cast<size_t>(in);
      for (int g = 0; g < in; g += 128) {
        float largest = 1e-12f;
        for (int k = g; k < std::min(g + 128, in); ++k) largest = std::max(largest, std::fabs(row[k]));
        for (int k = g; k < std::min(g + 128, in); ++k) out[static_cast<size_t>(k)] += static_cast<double>(std::fabs(row[k]) / largest);
      }
    }
  for (double& v : out) v = v / rows + 1e-6;
  return out;
}

}  // namespace

double output_error(Ops& ops, const Moments& moments, std::span<const float> difference, int rows) {
  const int n = moments.n;
  const auto R = static_cast<size_t>(rows);
  const View d = View::matrix(const_cast<float*>(difference.data()), DType::f32, rows, n);
  double sum = 0.0;
  if (moments.keeps_rows()) {
    const View x = moments.rows();
    std::vector<float> outputs(static_cast<size_t>(x.n_rows()) * R);
    if (outputs.empty()) return 0.0;
    multiply(ops, x, d, View::matrix(outputs.data(), DType::f32, x.n_rows(), rows), 0.0f);
    for (const float v : outputs) sum += static_cast<double>(v) * v;
    return sum;
  }
  // G D^T, as G is symmetric: so the smaller matrix is the one that is packed.
  std::vector<float> product(difference.size());
  multiply(ops, View::matrix(const_cast<float*>(moments.gram(ops).data()), DType::f32, n, n), d,
           View::matrix(product.data(), DType::f32, n, rows), 0.0f);
  for (size_t r = 0; r < R; ++r)
    for (size_t k = 0; k < static_cast<size_t>(n); ++k)
      sum += static_cast<double>(product[k * R + r]) * difference[r * static_cast<size_t>(n) + k];
  return sum;
}

AwqScale search_awq_scale(Ops& ops, ThreadPool& pool, const Moments& moments, std::span<const AwqMatrix> matrices, RangeSearch search) {
  const int in = moments.n;
  const auto n = static_cast<size_t>(in);
  CACHALOT_CHECK(moments.has_gram() && !matrices.empty());
  std::vector<Sample> samples;
  double size = 0.0;
  for (const AwqMatrix& matrix : matrices) {
    const Sample& s = samples.emplace_back(sample_of(matrix, in));
    size += s.factor * output_error(ops, moments, s.values, s.rows);
  }
  const std::vector<float> importance = moments.importance();
  // Error of rounding W diag(scale), seen from W.
  const auto error_of = [&](const std::vector<float>& scale) {
    std::vector<float> scaled_importance(n);
    for (size_t k = 0; k < n; ++k) scaled_importance[k] = importance[k] / (scale[k] * scale[k]);
    double total = 0.0;
    for (const Sample& s : samples) {
      std::vector<float> scaled(s.values.size());
      pool.run(s.rows, [&](int r, int) {
        const size_t at = static_cast<size_t>(r) * n;
        for (size_t k = 0; k < n; ++k) scaled[at + k] = s.values[at + k] * scale[k];
      });
      QuantizedStack stack("candidate", s.scheme, 1, s.rows, in);
      stack.round_to_nearest(0, scaled, scaled_importance, search, pool);
      pool.run(s.rows, [&](int r, int) {
        const size_t at = static_cast<size_t>(r) * n;
        stack.dequant(0, r, scaled.data() + at);
        for (size_t k = 0; k < n; ++k) scaled[at + k] = s.values[at + k] - scaled[at + k] / scale[k];
      });
      total += s.factor * output_error(ops, moments, scaled, s.rows);
    }
    return total;
  };

  AwqScale best{.scale = std::vector<float>(n, 1.0f)};
  double best_error = error_of(best.scale);
  best.error_without = size > 0.0 ? std::sqrt(std::max(0.0, best_error) / size) : 0.0;
  const std::vector<double> profile = weight_profile(samples, in);
  const auto try_power = [&](double alpha, bool with_weights) {
    std::vector<double> raw(n);
    double sum_of_logs = 0.0;
    int live = 0;
    for (size_t k = 0; k < n; ++k) {
      if (!(importance[k] > 0.0f) || !std::isfinite(importance[k])) continue;
      raw[k] = std::pow(std::sqrt(static_cast<double>(importance[k])), alpha);
      if (with_weights) raw[k] /= std::pow(profile[k], 1.0 - alpha);
      sum_of_logs += std::log(raw[k]);
      ++live;
    }
    // Around 1, so that what is folded into rows or norms keeps its size; and within bounds that an f16 group scale can follow.
    const double middle = live > 0 ? std::exp(sum_of_logs / live) : 1.0;
    std::vector<float> scale(n, 1.0f);
    bool sane = live > 0;
    for (size_t k = 0; k < n; ++k) {
      if (raw[k] > 0.0) scale[k] = static_cast<float>(std::clamp(raw[k] / middle, 1.0 / kMaxScale, kMaxScale));
      sane = sane && std::isfinite(scale[k]);
    }
    const double error = sane ? error_of(scale) : std::numeric_limits<double>::infinity();
    if (std::isfinite(error) && error < best_error) {
      best_error = error;
      best.scale = scale;
    }
    return error;
  };
  // Every fourth of 20 powers, then twice between the best and its neighbours: the error has one valley, nearly always.
  constexpr int kSteps = 20;
  for (const bool with_weights : {false, true}) {
    int best_power = 0;
    double least = with_weights ? std::numeric_limits<double>::infinity() : best_error;
    const auto try_step = [&](int i) {
      if (i < 1 || i > kSteps) return;
      const double error = try_power(static_cast<double>(i) / kSteps, with_weights);
      if (error < least) {
        least = error;
        best_power = i;
      }
    };
    for (int i = 4; i <= kSteps; i += 4) try_step(i);
    for (const int apart : {2, 1}) {
      const int middle = best_power;
      try_step(middle - apart);
      try_step(middle + apart);
    }
  }
  best.error_with = size > 0.0 ? std::sqrt(std::max(0.0, best_error) / size) : 0.0;
  return best;
}

}  // namespace cachalot
