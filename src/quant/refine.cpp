// Coordinate descent, a row at a time.
#include "quant/refine.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/float_formats.h"

namespace cachalot {
namespace {

// Value and code of the nearest point of a grid.
struct Nearest {
  float value;
  uint8_t code;
};
Nearest nearest_on(const MatrixGrid& grid, size_t at, float value) {
  const float scale = grid.scale[at], offset = grid.offset[at];
  if (scale == 0.0f) return {offset, 0};  // all codes stand for the offset
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

// One row on its way through refine_codes().
class RowDescent {
 public:
  // grid: of this row alone; error d = w - v and pull G d, both [n], are kept up to date.
  RowDescent(const std::vector<float>& gram, float damping, MatrixGrid grid, std::span<const float> values, float* error, float* pull)
      : gram_(gram), damping_(damping), n_(values.size()), grid_(std::move(grid)), values_(values), error_(error), pull_(pull), codes_(n_) {
    for (size_t k = 0; k < n_; ++k) codes_[k] = nearest_on(grid_, k / run(), values_[k] - error_[k]).code;
  }

  // Each code to the level nearest to its best value, the others as they are. Returns how many moved.
  int move_codes() {
    int moved = 0;
    for (size_t k = 0; k < n_; ++k) {
      const float now = values_[k] - error_[k], curvature = gram_[k * n_ + k] + damping_;
      if (!(curvature > 0.0f)) continue;
      const Nearest best = nearest_on(grid_, k / run(), now + pull_[k] / curvature);
      if (best.code == codes_[k]) continue;
      codes_[k] = best.code;
      grow(k, best.value - now);
      ++moved;
    }
    return moved;
  }

  // The scale s of a group with codes c (zero point taken off) is best where its derivative c^T G d is zero: s + c^T G d / (c^T G c).
  void move_scales() {
    std::vector<float> level(run());
    for (size_t group = 0; group < grid_.scale.size(); ++group) {
      const float scale = grid_.scale[group];
      if (!(scale > 0.0f)) continue;
      const float zero = std::nearbyint(-grid_.offset[group] / scale);
      const size_t first = group * run();
      double slope = 0.0, curvature = 0.0;
      for (size_t i = 0; i < run(); ++i) level[i] = static_cast<float>(codes_[first + i]) - zero;
      for (size_t i = 0; i < run(); ++i) {
        const float* const row = gram_.data() + (first + i) * n_ + first;
        float sum = damping_ * level[i];
        for (size_t j = 0; j < run(); ++j) sum += row[j] * level[j];
        curvature += static_cast<double>(level[i] * sum);
        slope += static_cast<double>(level[i] * pull_[first + i]);
      }
      if (!(curvature > 0.0)) continue;
      const float better = f16_to_f32(f32_to_f16(scale + static_cast<float>(slope / curvature)));
      if (!(better > 0.0f) || !std::isfinite(better) || better == scale) continue;
      for (size_t i = 0; i < run(); ++i)
        if (level[i] != 0.0f) grow(first + i, (better - scale) * level[i]);
      grid_.scale[group] = better;
      grid_.offset[group] = -zero * better;
    }
  }

  [[nodiscard]] const MatrixGrid& grid() const { return grid_; }
  [[nodiscard]] const uint8_t* codes() const { return codes_.data(); }

 private:
  [[nodiscard]] size_t run() const { return static_cast<size_t>(grid_.run); }
  // v_k grows by `step`.
  void grow(size_t k, float step) {
    error_[k] -= step;
    const float* const row = gram_.data() + k * n_;
    for (size_t j = 0; j < n_; ++j) pull_[j] -= step * row[j];
    pull_[k] -= step * damping_;
  }

  const std::vector<float>& gram_;
  float damping_;
  size_t n_;
  MatrixGrid grid_;
  std::span<const float> values_;
  float *error_, *pull_;
  std::vector<uint8_t> codes_;
};

}  // namespace

void refine_codes(Ops& ops, const Moments& moments, float damping, QuantizedStack& stack, int m, std::span<const float> values,
                  ThreadPool& pool) {
  constexpr int kRounds = 6, kRowsAtOnce = 2048;
  const int n = moments.n;
  const auto N = static_cast<size_t>(n);
  const std::vector<float>& gram = moments.gram(ops);
  const MatrixGrid grid = stack.grid(m);
  const size_t n_runs = grid.n_runs();
  const bool scales_move = is_planar(stack.scheme().format);
  for (int begin = 0; begin < grid.out; begin += kRowsAtOnce) {
    const int rows = std::min(kRowsAtOnce, grid.out - begin);
    std::vector<float> error(static_cast<size_t>(rows) * N), pull(error.size());
    for (int r = 0; r < rows; ++r) {
      float* const row = error.data() + static_cast<size_t>(r) * N;
      stack.dequant(m, begin + r, row);
      for (size_t k = 0; k < N; ++k) row[k] = values[static_cast<size_t>(begin + r) * N + k] - row[k];
    }
    multiply(ops, strided(error.data(), rows, n, N), strided(gram.data(), n, n, N), strided(pull.data(), rows, n, N), 0.0f);
    pool.run(rows, [&](int r, int) {
      float *const d = error.data() + static_cast<size_t>(r) * N, *const g = pull.data() + static_cast<size_t>(r) * N;
      for (size_t k = 0; k < N; ++k) g[k] += damping * d[k];
      if (!std::all_of(g, g + N, [](float v) { return std::isfinite(v); })) return;
      MatrixGrid own{.out = 1, .in = n, .run = grid.run, .n_codes = grid.n_codes, .levels = grid.levels, .e4m3 = grid.e4m3};
      const auto first = static_cast<ptrdiff_t>(static_cast<size_t>(begin + r) * n_runs), last = first + static_cast<ptrdiff_t>(n_runs);
      own.scale.assign(grid.scale.begin() + first, grid.scale.begin() + last);
      own.offset.assign(grid.offset.begin() + first, grid.offset.begin() + last);
      RowDescent row(gram, damping, std::move(own), values.subspan(static_cast<size_t>(begin + r) * N, N), d, g);
      for (int round = 0; round < kRounds; ++round) {
        const bool still = row.move_codes() == 0;
        if (scales_move) row.move_scales();
        if (still) break;
      }
      stack.write_codes(m, begin + r, row.codes());
      if (scales_move) stack.write_scales(m, begin + r, row.grid().scale.data());
    });
  }
}

}  // namespace cachalot
