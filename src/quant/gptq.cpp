// Factorisation, and the walks over columns: 16 rows of W at a time, one in each lane.
#include "quant/gptq.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "base/float_formats.h"
#include "quant/cholesky.h"
#include "tensor/lanes.h"

namespace cachalot {
namespace {

constexpr int kBlock = 128;  // columns
constexpr float kUsualDamping = 0.01f;

// The grid with the rows of a group of 16 in lanes: [groups, runs] of them.
struct LaneGrid {
  int run = 0, n_codes = 0;
  const float* levels = nullptr;
  bool e4m3 = false;
  size_t n_runs = 0;
  std::vector<float> scale, offset;

  explicit LaneGrid(const MatrixGrid& grid)
      : run(grid.run), n_codes(grid.n_codes), levels(grid.levels), e4m3(grid.e4m3), n_runs(grid.n_runs()) {
    const size_t rows = padded_to_lanes(grid.out);
    scale.resize(rows * n_runs);
    offset.resize(rows * n_runs);
    for (size_t r = 0; r < static_cast<size_t>(grid.out); ++r)
      for (size_t i = 0; i < n_runs; ++i) {
        const size_t at = (r / kLanes * n_runs + i) * kLanes + r % kLanes;
        scale[at] = grid.scale[r * n_runs + i];
        offset[at] = grid.offset[r * n_runs + i];
      }
  }
};

// To the nearest E4M3 value, ties to even, for |v| <= 448: adding 1.5 * 2^23 steps leaves no bits for a fraction of a step.
CACHALOT_LANES_INLINE Lanes nearest_e4m3(Lanes v) {
  typedef uint32_t BitLanes __attribute__((vector_size(sizeof(Lanes))));  // NOLINT(modernize-use-using): as Lanes
  const Lanes octave = larger((Lanes)((BitLanes)v & 0x7f800000u), spread(0x1p-6f)), magic = octave * (0x1p-3f * 12582912.0f);
  return (v + magic) - magic;
}

// Codes (as floats; an E4M3 code as its value) and values of the nearest points of the grid.
struct Nearest {
  Lanes value, code;
};
CACHALOT_LANES_INLINE Nearest nearest_on(const LaneGrid& grid, size_t at, Lanes value) {
  const Lanes scale = load_lanes(grid.scale.data() + at), offset = load_lanes(grid.offset.data() + at), none = spread(0.0f);
  const auto flat = scale == none;  // all codes stand for the offset
  const Lanes v = (value - offset) / (flat ? spread(1.0f) : scale);
  Lanes code, level;
  if (grid.e4m3) {
    code = level = nearest_e4m3(clamped(v, spread(-448.0f), spread(448.0f)));
  } else if (grid.levels == nullptr) {
    code = level = round_even(clamped(v, none, spread(static_cast<float>(grid.n_codes - 1))));
  } else {
    code = none;
    level = spread(grid.levels[0]);
    for (int i = 1; i < grid.n_codes; ++i) {
      const auto above = v > 0.5f * (grid.levels[i - 1] + grid.levels[i]);
      code = above ? spread(static_cast<float>(i)) : code;
      level = above ? spread(grid.levels[i]) : level;
    }
  }
  return {flat ? offset : scale * level + offset, flat ? none : code};
}

// Columns [begin, end) of the rows of one group of lanes.
struct CodeWalk {
  const LaneGrid& grid;
  const float* factor;   // [n, n]
  const int* order;      // [n]
  const float* values;   // [rows, n] of the group
  const float* carried;  // [n, stride]: of the columns before `begin`
  float* error;          // [kLanes, end - begin] out
  uint8_t* codes;        // [rows, n] of the group, out
  size_t n, stride, group;
  int rows, begin, end;
};

CACHALOT_LANES_INLINE void walk_codes(const CodeWalk& w) {
  Lanes d[kBlock];
  const int width = w.end - w.begin;
  for (int i = 0; i < width; ++i) {
    const auto k = static_cast<size_t>(w.begin + i);
    const float* const r = w.factor + k * w.n + w.begin;
    const auto column = static_cast<size_t>(w.order[k]);
    Lanes value;
    for (int l = 0; l < kLanes; ++l) value[l] = w.values[static_cast<size_t>(std::min(l, w.rows - 1)) * w.n + column];
    const Lanes wanted = value + (load_lanes(w.carried + k * w.stride) + lanes_product(r, d, i)) / r[i];
    const Nearest nearest = nearest_on(w.grid, (w.group * w.grid.n_runs + column / static_cast<size_t>(w.grid.run)) * kLanes, wanted);
    d[i] = value - nearest.value;
    for (int l = 0; l < w.rows; ++l) {
      const float code = nearest.code[l];
      w.codes[static_cast<size_t>(l) * w.n + column] = w.grid.e4m3 ? f32_to_e4m3(code) : static_cast<uint8_t>(code);
    }
  }
  for (int l = 0; l < kLanes; ++l)
    for (int i = 0; i < width; ++i) w.error[l * width + i] = d[i][l];
}
CACHALOT_LANES_FUNCTION(run_code_walk, CodeWalk, walk_codes)

}  // namespace

ErrorFeedback::ErrorFeedback(Ops& ops, ThreadPool& pool, const std::vector<float>& gram, int n, const GptqOptions& options)
    : ops_(ops), pool_(pool), n_(n) {
  const auto N = static_cast<size_t>(n_);
  double mean = 0.0;
  for (size_t k = 0; k < N; ++k) mean += static_cast<double>(gram[k * N + k]) / n_;
  if (!(mean > 0.0) || !std::isfinite(static_cast<float>(mean))) mean = 1.0;  // no token, or an overflow: plain rounding
  order_.resize(N);
  std::iota(order_.begin(), order_.end(), 0);
  const auto diagonal = [&](int k) { return gram[static_cast<size_t>(k) * N + static_cast<size_t>(k)]; };
  if (options.act_order) std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) { return diagonal(a) > diagonal(b); });
  // R is the Cholesky factor of G with rows and columns reversed, reversed again. Row k of factor_ is column k of R.
  std::vector<float> reversed(N * N);
  for (float share = options.damping > 0.0f ? options.damping : kUsualDamping;; share *= 10.0f) {
    damping_ = static_cast<float>(static_cast<double>(share) * mean);
    pool.run(n_, [&](int task, int) {
      const auto i = static_cast<size_t>(task);
      const float* const row = gram.data() + static_cast<size_t>(order_[N - 1 - i]) * N;
      for (size_t j = 0; j <= i; ++j) {
        const float g = row[order_[N - 1 - j]];
        reversed[i * N + j] = (std::isfinite(g) ? g : 0.0f) + (i == j ? damping_ : 0.0f);
      }
    });
    if (cholesky(ops, reversed, n_)) break;
    CACHALOT_CHECK(share < 1e6f, "a Gram matrix with a negative diagonal");
  }
  factor_.resize(N * N);
  constexpr size_t kTile = 32;
  pool.run(static_cast<int>((N + kTile - 1) / kTile), [&](int task, int) {
    const size_t first = static_cast<size_t>(task) * kTile, last = std::min(first + kTile, N);
    for (size_t j0 = 0; j0 < last; j0 += kTile)
      for (size_t k = first; k < last; ++k)
        for (size_t j = j0; j < std::min(j0 + kTile, k + 1); ++j) factor_[k * N + j] = reversed[(N - 1 - j) * N + (N - 1 - k)];
  });
}

View ErrorFeedback::factor(int row, int column, int rows, int columns) const {
  const auto N = static_cast<size_t>(n_);
  return strided(factor_.data() + static_cast<size_t>(row) * N + static_cast<size_t>(column), rows, columns, N);
}

void ErrorFeedback::choose_codes(QuantizedStack& stack, int m, std::span<const float> values) const {
  const MatrixGrid plain = stack.grid(m);
  const int out = plain.out;
  CACHALOT_CHECK(plain.in == n_ && values.size() == static_cast<size_t>(out) * static_cast<size_t>(n_), "[{}, {}] for {} inputs", out,
                 plain.in, n_);
  const LaneGrid grid(plain);
  const auto N = static_cast<size_t>(n_), stride = padded_to_lanes(out);
  std::vector<float> carried(N * stride), error(stride * kBlock);
  std::vector<uint8_t> codes(static_cast<size_t>(out) * N);
  for (int begin = 0; begin < n_; begin += kBlock) {
    const int end = std::min(begin + kBlock, n_), width = end - begin;
    pool_.run(static_cast<int>(stride / kLanes), [&](int group, int) {
      const auto first = static_cast<size_t>(group) * kLanes;
      run_code_walk({.grid = grid,
                     .factor = factor_.data(),
                     .order = order_.data(),
                     .values = values.data() + first * N,
                     .carried = carried.data() + first,
                     .error = error.data() + first * static_cast<size_t>(width),
                     .codes = codes.data() + first * N,
                     .n = N,
                     .stride = stride,
                     .group = static_cast<size_t>(group),
                     .rows = static_cast<int>(std::min<size_t>(kLanes, static_cast<size_t>(out) - first)),
                     .begin = begin,
                     .end = end});
    });
    if (end < n_)
      multiply(ops_, factor(end, begin, n_ - end, width), View::matrix(error.data(), DType::f32, out, width),
               strided(carried.data() + static_cast<size_t>(end) * stride, n_ - end, out, stride), 1.0f);
  }
  pool_.run(out, [&](int row, int) { stack.write_codes(m, row, codes.data() + static_cast<size_t>(row) * N); });
}

float best_damping(Ops& ops, ThreadPool& pool, const Moments& moments, const Scheme& scheme, std::span<const float> values, int out,
                   std::span<const float> importance, RangeSearch search) {
  const View held_out = moments.held_out_rows();
  if (held_out.n_rows() == 0) return kUsualDamping;
  const int n = moments.n, tokens = held_out.n_rows();
  const auto N = static_cast<size_t>(n);
  constexpr int kSampleRows = 64;  // rows are alike enough to choose by
  std::vector<float> sample;
  int rows = 0;
  for (int r = 0; r < out; r += std::max(1, out / kSampleRows), ++rows) {
    const auto from = values.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(r) * N);
    sample.insert(sample.end(), from, from + n);
  }
  std::vector<float> of_others = moments.gram(ops), columns = transposed(held_out), negated = columns;
  for (float& v : negated) v = -v;
  multiply(ops, View::matrix(columns.data(), DType::f32, n, tokens), View::matrix(negated.data(), DType::f32, n, tokens),
           View::matrix(of_others.data(), DType::f32, n, n), 1.0f);
  QuantizedStack stack("sample", scheme, 1, rows, n);
  stack.round_to_nearest(0, sample, importance, search, pool);
  std::vector<float> difference(sample.size()), error(static_cast<size_t>(tokens) * static_cast<size_t>(rows));
  const auto error_with = [&](float damping) {
    ErrorFeedback(ops, pool, of_others, n, {.damping = damping}).choose_codes(stack, 0, sample);
    for (int r = 0; r < rows; ++r) stack.dequant(0, r, difference.data() + static_cast<size_t>(r) * N);
    for (size_t i = 0; i < sample.size(); ++i) difference[i] -= sample[i];
    multiply(ops, held_out, View::matrix(difference.data(), DType::f32, rows, n), View::matrix(error.data(), DType::f32, tokens, rows),
             0.0f);
    double sum = 0.0;
    for (const float v : error) sum += static_cast<double>(v) * v;
    return sum;
  };
  // From the usual one to the better side, as far as it goes on getting better.
  constexpr float kStep = 3.1622777f, kLeast = 1e-3f, kMost = 10.0f;
  float best = kUsualDamping;
  double least = error_with(best);
  const auto walk = [&](float step) {
    const float first = best;
    for (float damping = best * step; damping > kLeast && damping < kMost; damping *= step) {
      const double sum = error_with(damping);
      if (!(sum < least)) break;
      least = sum;
      best = damping;
    }
    return best != first;
  };
  if (!walk(kStep)) walk(1.0f / kStep);
  return best;
}

}  // namespace cachalot
