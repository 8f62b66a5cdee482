// Coordinate descent, a block of columns at a time: within it row by row, and what all rows moved there then reaches the other columns in
// one product.
#include "quant/refine.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "base/float_formats.h"
#include "tensor/lanes.h"

namespace cachalot {
namespace {

constexpr int kBlock = 256;  // columns, or one group that is wider

size_t padded(size_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// The columns of a block of one row.
struct BlockWalk {
  const MatrixGrid& grid;  // whose scales and offsets are not looked at
  const float* gram;       // [width, stride] of the block's columns, damping on the diagonal
  const float* values;     // [width] w
  float* error;            // [width] d = w - v
  float* pull;             // [stride] (G + damping) d
  float* level;            // [stride] scratch
  uint8_t* codes;          // [width]
  float *scale, *offset;   // of the runs that begin in the block
  float* shrunk;           // [width] out: how much v shrank
  int width, stride;
  bool scales_move;
  int* moved;  // codes that moved are added
};

// v_k grows by `step`.
CACHALOT_LANES_INLINE void grow(const BlockWalk& w, int k, float step) {
  w.error[k] -= step;
  w.shrunk[k] -= step;
  const float* const row = w.gram + static_cast<ptrdiff_t>(k) * w.stride;
  for (int j = 0; j < w.stride; j += kLanes) store_lanes(load_lanes(w.pull + j) - step * load_lanes(row + j), w.pull + j);
}

// Value and code of the nearest point of a grid.
struct Nearest {
  float value;
  uint8_t code;
};
CACHALOT_LANES_INLINE Nearest nearest_on(const MatrixGrid& grid, float scale, float offset, float value) {
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

// Each code to the level nearest to its best value, the others as they are.
CACHALOT_LANES_INLINE void move_codes(const BlockWalk& w) {
  for (int k = 0; k < w.width; ++k) {
    const float now = w.values[k] - w.error[k], curvature = w.gram[static_cast<ptrdiff_t>(k) * w.stride + k];
    if (!(curvature > 0.0f)) continue;
    const int run = k / w.grid.run;
    const Nearest best = nearest_on(w.grid, w.scale[run], w.offset[run], now + w.pull[k] / curvature);
    if (best.code == w.codes[k]) continue;
    w.codes[k] = best.code;
    grow(w, k, best.value - now);
    ++*w.moved;
  }
}

// The scale s of a group with codes c (zero point taken off) is best where its derivative c^T G d is zero: s + c^T G d / (c^T G c).
CACHALOT_LANES_INLINE void move_scales(const BlockWalk& w) {
  const int run = w.grid.run;
  for (int group = 0; group * run < w.width; ++group) {
    const float scale = w.scale[group];
    if (!(scale > 0.0f)) continue;
    const float zero = std::nearbyint(-w.offset[group] / scale);
    const int first = group * run, last = first + run;
    // From whole lanes to whole lanes, zeros beside the group.
    const int begin = first / kLanes * kLanes, end = std::min((last + kLanes - 1) / kLanes * kLanes, w.stride);
    for (int k = begin; k < end; ++k) w.level[k] = k >= first && k < last ? static_cast<float>(w.codes[k]) - zero : 0.0f;
    double slope = 0.0, curvature = 0.0;
    for (int k = first; k < last; ++k) {
      const float* const row = w.gram + static_cast<ptrdiff_t>(k) * w.stride;
      Lanes sums = spread(0.0f);
      for (int j = begin; j < end; j += kLanes) sums += load_lanes(row + j) * load_lanes(w.level + j);
      float sum = 0.0f;
      for (int l = 0; l < kLanes; ++l) sum += sums[l];
      curvature += static_cast<double>(w.level[k] * sum);
      slope += static_cast<double>(w.level[k] * w.pull[k]);
    }
    if (!(curvature > 0.0)) continue;
    const float better = f16_to_f32(f32_to_f16(scale + static_cast<float>(slope / curvature)));
    if (!(better > 0.0f) || !std::isfinite(better) || better == scale) continue;
    for (int k = first; k < last; ++k)
      if (w.level[k] != 0.0f) grow(w, k, (better - scale) * w.level[k]);
    w.scale[group] = better;
    w.offset[group] = -zero * better;
  }
}

CACHALOT_LANES_INLINE void walk_block(const BlockWalk& w) {
  move_codes(w);
  if (w.scales_move) move_scales(w);
}
CACHALOT_LANES_FUNCTION(run_block_walk, BlockWalk, walk_block)

// Rows of a matrix on their way. Each is left alone once a round has moved none of its codes.
class Descent {
 public:
  Descent(Ops& ops, ThreadPool& pool, const std::vector<float>& gram, float damping, QuantizedStack& stack, int m, const MatrixGrid& grid,
          int first, int rows, std::span<const float> values)
      : ops_(ops),
        pool_(pool),
        gram_(gram),
        damping_(damping),
        stack_(stack),
        m_(m),
        grid_(grid),
        first_(first),
        rows_(rows),
        n_(static_cast<size_t>(grid.in)),
        values_(values),
        error_(static_cast<size_t>(rows) * n_),
        pull_(error_.size()),
        codes_(error_.size()),
        moves_(static_cast<size_t>(rows), 1) {
    const auto from = static_cast<ptrdiff_t>(static_cast<size_t>(first) * grid.n_runs()), count = static_cast<ptrdiff_t>(runs_of(rows));
    scale_.assign(grid.scale.begin() + from, grid.scale.begin() + from + count);
    offset_.assign(grid.offset.begin() + from, grid.offset.begin() + from + count);
    pool_.run(rows_, [&](int r, int) {
      const float* const wanted = values_.data() + at(r);
      float* const error = error_.data() + at(r);
      stack_.dequant(m_, first_ + r, error);
      for (size_t k = 0; k < n_; ++k) {
        const size_t run = runs_of(r) + k / static_cast<size_t>(grid_.run);
        codes_[at(r) + k] = nearest_on(grid_, scale_[run], offset_[run], error[k]).code;
        error[k] = wanted[k] - error[k];
      }
    });
    const int n = grid.in;
    multiply(ops_, View::matrix(error_.data(), DType::f32, rows, n), View::matrix(const_cast<float*>(gram_.data()), DType::f32, n, n),
             View::matrix(pull_.data(), DType::f32, rows, n), 0.0f);
    pool_.run(rows_, [&](int r, int) {
      float* const pull = pull_.data() + at(r);
      for (size_t k = 0; k < n_; ++k) pull[k] += damping_ * error_[at(r) + k];
      moves_[static_cast<size_t>(r)] = std::all_of(pull, pull + n_, [](float v) { return std::isfinite(v); }) ? 1 : 0;
    });
  }

  void go(int rounds) {
    const bool scales_move = is_planar(stack_.scheme().format);
    // Whole groups, whose scales move with their codes.
    const int block = grid_.run > kBlock ? grid_.run : kBlock / grid_.run * grid_.run;
    for (int round = 0; round < rounds && std::any_of(moves_.begin(), moves_.end(), [](int n) { return n > 0; }); ++round) {
      std::vector<int> moved(moves_.size());
      for (int begin = 0; begin < grid_.in; begin += block) move_block(begin, std::min(block, grid_.in - begin), scales_move, moved);
      moves_ = std::move(moved);
    }
    pool_.run(rows_, [&](int r, int) {
      stack_.write_codes(m_, first_ + r, codes_.data() + at(r));
      if (scales_move) stack_.write_scales(m_, first_ + r, scale_.data() + runs_of(r));
    });
  }

 private:
  [[nodiscard]] size_t at(int row) const { return static_cast<size_t>(row) * n_; }
  [[nodiscard]] size_t runs_of(int rows) const { return static_cast<size_t>(rows) * grid_.n_runs(); }

  // One walk over columns [begin, begin + width) of the rows that still move; moved: codes of each row are added.
  void move_block(int begin, int width, bool scales_move, std::vector<int>& moved) {
    const auto W = static_cast<size_t>(width), stride = padded(W), first = static_cast<size_t>(begin);
    std::vector<float> gram(W * stride);
    for (size_t k = 0; k < W; ++k) {
      std::copy_n(gram_.data() + (first + k) * n_ + first, W, gram.data() + k * stride);
      gram[k * stride + k] += damping_;
    }
    std::vector<float> shrunk(static_cast<size_t>(rows_) * W);
    std::atomic<bool> any = false;
    pool_.run(rows_, [&](int r, int) {
      if (moves_[static_cast<size_t>(r)] == 0) return;
      std::vector<float> pull(stride), level(stride);
      std::copy_n(pull_.data() + at(r) + first, W, pull.data());
      float* const by = shrunk.data() + static_cast<size_t>(r) * W;
      const size_t run = runs_of(r) + first / static_cast<size_t>(grid_.run);
      run_block_walk({.grid = grid_,
                      .gram = gram.data(),
                      .values = values_.data() + at(r) + first,
                      .error = error_.data() + at(r) + first,
                      .pull = pull.data(),
                      .level = level.data(),
                      .codes = codes_.data() + at(r) + first,
                      .scale = scale_.data() + run,
                      .offset = offset_.data() + run,
                      .shrunk = by,
                      .width = width,
                      .stride = static_cast<int>(stride),
                      .scales_move = scales_move,
                      .moved = &moved[static_cast<size_t>(r)]});
      for (size_t k = 0; k < W; ++k) pull_[at(r) + first + k] += damping_ * by[k];
      if (std::any_of(by, by + W, [](float v) { return v != 0.0f; })) any = true;
    });
    if (any)
      multiply(ops_, View::matrix(shrunk.data(), DType::f32, rows_, width), strided(gram_.data() + first, grid_.in, width, n_),
               View::matrix(pull_.data(), DType::f32, rows_, grid_.in), 1.0f);
  }

  Ops& ops_;
  ThreadPool& pool_;
  const std::vector<float>& gram_;
  float damping_;
  QuantizedStack& stack_;
  int m_;
  const MatrixGrid& grid_;
  int first_, rows_;
  size_t n_;
  std::span<const float> values_;  // [rows, n] as all below
  std::vector<float> error_, pull_;
  std::vector<uint8_t> codes_;
  std::vector<float> scale_, offset_;
  std::vector<int> moves_;  // [rows] codes that the last round moved
};

}  // namespace

void refine_codes(Ops& ops, const Moments& moments, float damping, QuantizedStack& stack, int m, std::span<const float> values,
                  ThreadPool& pool) {
  constexpr int kRounds = 6, kRowsAtOnce = 2048;
  const std::vector<float>& gram = moments.gram(ops);
  const MatrixGrid grid = stack.grid(m);
  for (int first = 0; first < grid.out; first += kRowsAtOnce) {
    const int rows = std::min(kRowsAtOnce, grid.out - first);
    const size_t n = static_cast<size_t>(grid.in), begin = static_cast<size_t>(first) * n;
    Descent(ops, pool, gram, damping, stack, m, grid, first, rows, values.subspan(begin, static_cast<size_t>(rows) * n)).go(kRounds);
  }
}

}  // namespace cachalot
