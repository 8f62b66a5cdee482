// Scales and codes of whole matrices.
#include "quant/matrix_quantizer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/float_formats.h"
#include "tensor/block_codes.h"

namespace cachalot {
namespace {

// To the nearest E4M3 value, ties to even: adding 1.5 * 2^23 steps leaves no bits for a fraction of a step.
float nearest_e4m3(float v) {
  const float magnitude = std::min(std::fabs(v), 448.0f);
  const float octave = std::max(std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) & 0x7f800000u), 0x1p-6f);
  const float magic = octave * (0x1p-3f * 12582912.0f);
  return std::copysign((magnitude + magic) - magic, v);
}

// Squared error of rows of `cols` (`in` apart) in units of `scale`, each column weighted.
double fp8_error(const float* values, int rows, int cols, int in, const float* importance, float scale) {
  const float inverse = 1.0f / scale;
  double sum = 0.0;
  for (int r = 0; r < rows; ++r, values += in) {
    float error[kFp8Block];
    for (int k = 0; k < cols; ++k) {
      const float d = values[k] - scale * nearest_e4m3(values[k] * inverse);
      error[k] = (importance != nullptr ? importance[k] : 1.0f) * d * d;
    }
    for (int k = 0; k < cols; ++k) sum += static_cast<double>(error[k]);
  }
  return sum;
}

// The scale of one FP8 block; without importance the plain one of every writer. A float's grid looks the same an octave on, so an octave of
// scales is all there is to try; shorter ones clip.
float fp8_scale(const float* values, int rows, int cols, int in, const float* importance, RangeSearch search) {
  float largest = 0.0f;
  for (int r = 0; r < rows; ++r)
    for (int k = 0; k < cols; ++k) largest = std::max(largest, std::fabs(values[static_cast<ptrdiff_t>(r) * in + k]));
  const float span = largest / 448.0f;
  if (!(span > 0.0f) || !std::isfinite(span) || search == RangeSearch::span || importance == nullptr) return span;
  constexpr int kSteps = 12, kShorter = 2;
  float best = span;
  double best_error = fp8_error(values, rows, cols, in, importance, span);
  for (int i = -kShorter; i < kSteps; ++i) {
    const float scale = span * std::exp2(static_cast<float>(i) / kSteps);
    const double error = i == 0 ? best_error : fp8_error(values, rows, cols, in, importance, scale);
    if (error < best_error) {
      best_error = error;
      best = scale;
    }
  }
  return best;
}

}  // namespace

QuantizedStack::QuantizedStack(std::string name, const Scheme& scheme, int n_matrices, int out, int in) : scheme_(scheme) {
  CACHALOT_CHECK(fits(scheme, in) && n_matrices > 0 && out > 0, "{}: {} for {} of [{}, {}]", name, name_of(scheme), n_matrices, out, in);
  const bool planar = is_planar(scheme.format), fp8 = scheme.format == Format::fp8_block;
  if (has_block_codes(scheme.format)) n_codes_ = code_info(scheme.format).n_codes;
  source_ = {.name = std::move(name), .format = scheme.format, .out = out, .in = in, .group = planar ? group_of(scheme, in) : 0};
  const auto rows = static_cast<size_t>(out);
  const size_t data = rows * row_bytes(scheme.format, in), n_groups = planar ? rows * static_cast<size_t>(in / source_.group) : 0;
  const auto blocks = [](int n) { return static_cast<size_t>((n + kFp8Block - 1) / kFp8Block); };
  const size_t scales = planar ? n_groups * sizeof(uint16_t) : fp8 ? blocks(out) * blocks(in) * sizeof(float) : 0;
  const auto n = static_cast<size_t>(n_matrices);
  memory_ = std::make_shared<std::vector<std::byte>>(n * (data + scales + n_groups));
  std::byte* at = memory_->data();  // scales first, as they are aligned
  std::byte* const data_at = at + n * scales;
  std::byte* const zeros_at = data_at + n * data;
  for (size_t m = 0; m < n; ++m)
    source_.matrices.push_back({{data_at + m * data, data}, {at + m * scales, scales}, {zeros_at + m * n_groups, n_groups}});
  source_.keep_alive.push_back(memory_);
}

// A few rows, so that groups fill the lanes of the search.
void QuantizedStack::round_planar_rows(int m, int first, int rows, const float* values, std::span<const float> importance,
                                       RangeSearch search) {
  const WeightBytes& matrix = source_.matrices[static_cast<size_t>(m)];
  const GroupKind kind{.group = source_.group, .top = (1 << planar_bits(scheme_.format)) - 1, .symmetric = scheme_.symmetric};
  const auto in = static_cast<size_t>(source_.in), per_row = in / static_cast<size_t>(kind.group);
  std::vector<GroupRange> ranges(static_cast<size_t>(rows) * per_row);
  search_ranges(values, importance.empty() ? nullptr : importance.data(), rows, source_.in, kind, search, ranges.data());
  std::vector<uint8_t> codes(in);
  for (size_t r = 0; r < static_cast<size_t>(rows); ++r) {
    const size_t at = (static_cast<size_t>(first) + r) * per_row;
    auto* const scales = const_cast<std::byte*>(matrix.scales.data()) + at * sizeof(uint16_t);
    auto* const zeros = const_cast<std::byte*>(matrix.zeros.data()) + at;
    for (size_t g = 0; g < per_row; ++g) {
      const GroupRange& range = ranges[r * per_row + g];
      const uint16_t half = f32_to_f16(range.scale);
      std::memcpy(scales + g * sizeof half, &half, sizeof half);
      zeros[g] = static_cast<std::byte>(range.zero);
      const size_t begin = g * static_cast<size_t>(kind.group);
      choose_nearest(values + r * in + begin, kind, range, codes.data() + begin);
    }
    write_codes(m, first + static_cast<int>(r), codes.data());
  }
}

// 128 rows, the last band perhaps fewer.
void QuantizedStack::round_fp8_band(int m, int band, const float* values, std::span<const float> importance, RangeSearch search) {
  const WeightBytes& matrix = source_.matrices[static_cast<size_t>(m)];
  const int first = band * kFp8Block, rows = std::min(kFp8Block, source_.out - first), in = source_.in;
  const int n_blocks = (in + kFp8Block - 1) / kFp8Block;
  auto* const scales = reinterpret_cast<float*>(const_cast<std::byte*>(matrix.scales.data())) + static_cast<ptrdiff_t>(band) * n_blocks;
  auto* const codes = const_cast<std::byte*>(matrix.data.data());
  for (int b = 0; b < n_blocks; ++b) {
    const int column = b * kFp8Block, cols = std::min(kFp8Block, in - column);
    const float* const from = values + static_cast<ptrdiff_t>(first) * in + column;
    const float scale = fp8_scale(from, rows, cols, in, importance.empty() ? nullptr : importance.data() + column, search);
    scales[b] = scale;
    for (int r = 0; r < rows; ++r)
      for (int k = 0; k < cols; ++k)
        codes[static_cast<ptrdiff_t>(first + r) * in + column + k] =
            std::byte{scale > 0.0f ? f32_to_e4m3(from[static_cast<ptrdiff_t>(r) * in + k] / scale) : uint8_t{0}};
  }
}

void QuantizedStack::round_to_nearest(int m, std::span<const float> values, std::span<const float> importance, RangeSearch search,
                                      ThreadPool& pool) {
  const auto in = static_cast<size_t>(source_.in);
  CACHALOT_CHECK(values.size() == static_cast<size_t>(source_.out) * in && (importance.empty() || importance.size() == in));
  const WeightBytes& matrix = source_.matrices[static_cast<size_t>(m)];
  auto* const data = const_cast<std::byte*>(matrix.data.data());
  if (scheme_.format == Format::fp8_block)
    return pool.run((source_.out + kFp8Block - 1) / kFp8Block,
                    [&](int band, int) { round_fp8_band(m, band, values.data(), importance, search); });
  constexpr int kRowsPerTask = 16;
  const size_t bytes = row_bytes(scheme_.format, source_.in);
  pool.run((source_.out + kRowsPerTask - 1) / kRowsPerTask, [&](int task, int) {
    const int first = task * kRowsPerTask, rows = std::min(kRowsPerTask, source_.out - first);
    if (is_planar(scheme_.format))
      return round_planar_rows(m, first, rows, values.data() + static_cast<size_t>(first) * in, importance, search);
    for (int r = first; r < first + rows; ++r) {
      const float* const row = values.data() + static_cast<size_t>(r) * in;
      std::byte* const to = data + static_cast<size_t>(r) * bytes;
      if (importance.empty())
        quantize_row(scheme_.format, row, source_.in, to);
      else
        quantize_row(scheme_.format, row, importance, to);
    }
  });
}

MatrixGrid QuantizedStack::grid(int m) const {
  CACHALOT_CHECK(has_grid(), "{}", name_of(scheme_));
  const WeightBytes& matrix = source_.matrices[static_cast<size_t>(m)];
  MatrixGrid grid{.out = source_.out, .in = source_.in};
  if (is_planar(scheme_.format)) {
    grid.run = source_.group;
    grid.n_codes = 1 << planar_bits(scheme_.format);
    const size_t n = matrix.zeros.size();
    grid.scale.resize(n);
    grid.offset.resize(n);
    for (size_t i = 0; i < n; ++i) {
      uint16_t half = 0;
      std::memcpy(&half, matrix.scales.data() + i * sizeof half, sizeof half);
      grid.scale[i] = f16_to_f32(half);
      grid.offset[i] = -static_cast<float>(std::to_integer<int>(matrix.zeros[i])) * grid.scale[i];
    }
    return grid;
  }
  if (scheme_.format == Format::fp8_block) {
    grid.run = kFp8Block;
    grid.n_codes = 256;
    grid.e4m3 = true;
    const size_t n = grid.n_runs();
    grid.offset.resize(static_cast<size_t>(source_.out) * n);
    grid.scale.resize(grid.offset.size());
    for (size_t o = 0; o < static_cast<size_t>(source_.out); ++o)
      std::memcpy(&grid.scale[o * n], matrix.scales.data() + o / kFp8Block * n * sizeof(float), n * sizeof(float));
    return grid;
  }
  const CodeInfo codes = code_info(scheme_.format);
  const FormatInfo& block = info(scheme_.format);
  grid.run = codes.run;
  grid.n_codes = codes.n_codes;
  grid.levels = codes.levels;
  const size_t n_blocks = matrix.data.size() / static_cast<size_t>(block.block_bytes),
               runs = static_cast<size_t>(block.block_elems / codes.run);
  grid.scale.resize(n_blocks * runs);
  grid.offset.resize(n_blocks * runs);
  for (size_t b = 0; b < n_blocks; ++b)
    read_block_grid(scheme_.format, matrix.data.data() + b * static_cast<size_t>(block.block_bytes), &grid.scale[b * runs],
                    &grid.offset[b * runs]);
  return grid;
}

void QuantizedStack::write_codes(int m, int row, const uint8_t* codes) {
  const size_t bytes = row_bytes(scheme_.format, source_.in);
  auto* to = const_cast<std::byte*>(source_.matrices[static_cast<size_t>(m)].data.data()) + static_cast<size_t>(row) * bytes;
  if (scheme_.format == Format::int8_planar || scheme_.format == Format::fp8_block) {
    std::memcpy(to, codes, bytes);
  } else if (scheme_.format == Format::int4_planar) {
    for (size_t i = 0; i < bytes; ++i) to[i] = static_cast<std::byte>(codes[2 * i] | (codes[2 * i + 1] << 4));
  } else {
    const FormatInfo& block = info(scheme_.format);
    for (int k = 0; k < source_.in; k += block.block_elems, to += block.block_bytes) write_block_codes(scheme_.format, codes + k, to);
  }
}

void QuantizedStack::write_scales(int m, int row, const float* scales) {
  CACHALOT_CHECK(is_planar(scheme_.format), "{}", name_of(scheme_));
  const int n_groups = source_.in / source_.group;
  auto* to = const_cast<std::byte*>(source_.matrices[static_cast<size_t>(m)].scales.data()) +
             static_cast<size_t>(row) * static_cast<size_t>(n_groups) * sizeof(uint16_t);
  for (int g = 0; g < n_groups; ++g, to += sizeof(uint16_t)) {
    const uint16_t half = f32_to_f16(scales[g]);
    std::memcpy(to, &half, sizeof half);
  }
}

ErrorSums weighted_error(const QuantizedStack& stack, int m, std::span<const float> values, std::span<const float> importance) {
  const LinearSource& source = stack.source();
  std::vector<float> row(static_cast<size_t>(source.in));
  ErrorSums sums;
  for (int r = 0; r < source.out; ++r) {
    stack.dequant(m, r, row.data());
    const float* const want = values.data() + static_cast<size_t>(r) * row.size();
    for (size_t k = 0; k < row.size(); ++k) {
      const double weight = importance.empty() ? 1.0 : static_cast<double>(importance[k]), error = want[k] - row[k];
      sums.error += weight * error * error;
      sums.size += weight * want[k] * want[k];
    }
  }
  return sums;
}

std::vector<float> dequant_matrix(const LinearSource& source, int m, ThreadPool& pool) {
  const auto in = static_cast<size_t>(source.in);
  std::vector<float> out(static_cast<size_t>(source.out) * in);
  constexpr int kRowsPerTask = 64;
  pool.run((source.out + kRowsPerTask - 1) / kRowsPerTask, [&](int task, int) {
    for (int r = task * kRowsPerTask; r < std::min((task + 1) * kRowsPerTask, source.out); ++r)
      dequant_row_by_input(source, m, r, out.data() + static_cast<size_t>(r) * in);
  });
  return out;
}

}  // namespace cachalot
