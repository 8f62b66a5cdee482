// LinearSource: reading a row, checking what a loader found, making one from values, and taking rows of one.
#include "tensor/linear_source.h"

#include "base/check.h"
#include "base/error.h"
#include "tensor/dequant.h"

namespace cachalot {
namespace {

bool is_planar(Format format) { return format == Format::int4_planar || format == Format::int8_planar; }
size_t n_scale_blocks(int n) { return (static_cast<size_t>(n) + kFp8Block - 1) / kFp8Block; }

// Bytes of each part of one row; of fp8_block's scales, one row of the grid, which serves 128 rows.
struct RowSizes {
  size_t data = 0, scales = 0, zeros = 0;
};
RowSizes row_sizes(const LinearSource& source) {
  RowSizes sizes{.data = row_bytes(source.format, source.in)};
  if (source.format == Format::fp8_block) sizes.scales = n_scale_blocks(source.in) * sizeof(float);
  if (is_planar(source.format)) {
    const auto n_groups = static_cast<size_t>(source.in / source.group);
    sizes.scales = n_groups * sizeof(uint16_t);
    sizes.zeros = n_groups;
  }
  return sizes;
}

size_t n_scale_rows(Format format, int out) { return format == Format::fp8_block ? n_scale_blocks(out) : static_cast<size_t>(out); }

void dequant_fp8_row(const WeightBytes& weight, int row, int in, float* out) {
  const auto* codes = reinterpret_cast<const uint8_t*>(weight.data.data()) + static_cast<size_t>(row) * static_cast<size_t>(in);
  const auto* scales = weight.scales.data() + static_cast<size_t>(row / kFp8Block) * n_scale_blocks(in) * sizeof(float);
  for (int k = 0; k < in; ++k) out[k] = e4m3_to_f32(codes[k]) * load<float>(scales + static_cast<size_t>(k / kFp8Block) * sizeof(float));
}

void dequant_planar_row(const LinearSource& source, const WeightBytes& weight, int row, float* out) {
  const RowSizes sizes = row_sizes(source);
  const auto r = static_cast<size_t>(row);
  const auto* codes = reinterpret_cast<const uint8_t*>(weight.data.data()) + r * sizes.data;
  const auto* scales = weight.scales.data() + r * sizes.scales;
  const auto* zeros = reinterpret_cast<const uint8_t*>(weight.zeros.data()) + r * sizes.zeros;
  for (int k = 0; k < source.in; ++k) {
    const int code = source.format == Format::int8_planar ? codes[k] : (codes[k / 2] >> (4 * (k % 2))) & 15;
    const int g = k / source.group;
    out[k] = static_cast<float>(code - zeros[g]) * load_f16(scales + static_cast<size_t>(g) * sizeof(uint16_t));
  }
}

void validate_perm(const LinearSource& source) {
  if (source.perm.empty()) return;
  if (!is_planar(source.format)) fail("{}: a column order with format {}, expected a planar format", source.name, info(source.format).name);
  if (source.perm.size() != static_cast<size_t>(source.in))
    fail("{}: a column order of {} entries, expected {}", source.name, source.perm.size(), source.in);
  std::vector<bool> seen(source.perm.size());
  for (const int32_t column : source.perm) {
    if (column < 0 || column >= source.in) fail("{}: column {} in the column order, expected below {}", source.name, column, source.in);
    if (seen[static_cast<size_t>(column)]) fail("{}: column {} appears twice in the column order", source.name, column);
    seen[static_cast<size_t>(column)] = true;
  }
}

}  // namespace

size_t LinearSource::bytes() const {
  size_t total = 0;
  for (const WeightBytes& matrix : matrices) total += matrix.data.size() + matrix.scales.size() + matrix.zeros.size();
  return total;
}

void validate(const LinearSource& source) {
  const FormatInfo& format = info(source.format);
  const auto& name = source.name;
  if (source.out <= 0 || source.in <= 0) fail("{}: shape [{}, {}], expected positive sizes", name, source.out, source.in);
  if (source.matrices.empty()) fail("{}: no matrix, expected at least one", name);
  if (source.in % format.block_elems != 0)
    fail("{}: rows of {} elements, expected a multiple of {} for {}", name, source.in, format.block_elems, format.name);
  if (is_planar(source.format) && (source.group <= 0 || source.in % source.group != 0))
    fail("{}: groups of {} in rows of {} elements, expected a divisor", name, source.group, source.in);
  const RowSizes sizes = row_sizes(source);
  const auto expect = [&](size_t i, const char* part, size_t found, size_t expected) {
    if (found != expected) fail("{}: matrix {} of {}: {} bytes of {}, expected {}", name, i, source.matrices.size(), found, part, expected);
  };
  for (size_t i = 0; i < source.matrices.size(); ++i) {  // out, in < 2^31 and at most 8 bytes each: no product overflows
    expect(i, "codes", source.matrices[i].data.size(), static_cast<size_t>(source.out) * sizes.data);
    expect(i, "scales", source.matrices[i].scales.size(), n_scale_rows(source.format, source.out) * sizes.scales);
    expect(i, "zero points", source.matrices[i].zeros.size(), static_cast<size_t>(source.out) * sizes.zeros);
  }
  if (!source.bias.empty() && (source.matrices.size() != 1 || source.bias.size() != static_cast<size_t>(source.out)))
    fail("{}: a bias of {} for {} matrices of {} rows, expected one per row of a single matrix", name, source.bias.size(),
         source.matrices.size(), source.out);
  validate_perm(source);
}

void dequant_row(const LinearSource& source, int matrix, int row, float* out) {
  CACHALOT_CHECK(matrix >= 0 && matrix < source.n_matrices() && row >= 0 && row < source.out, "{}: matrix {} of {}, row {} of {}",
                 source.name, matrix, source.n_matrices(), row, source.out);
  const WeightBytes& weight = source.matrices[static_cast<size_t>(matrix)];
  if (source.format == Format::fp8_block) return dequant_fp8_row(weight, row, source.in, out);
  if (is_planar(source.format)) return dequant_planar_row(source, weight, row, out);
  dequant_row(source.format, weight.data.data() + static_cast<size_t>(row) * row_bytes(source.format, source.in), source.in, out);
}

void dequant_row_by_input(const LinearSource& source, int matrix, int row, float* out) {
  if (source.perm.empty()) return dequant_row(source, matrix, row, out);
  std::vector<float> stored(static_cast<size_t>(source.in));
  dequant_row(source, matrix, row, stored.data());
  for (size_t k = 0; k < stored.size(); ++k) out[source.perm[k]] = stored[k];
}

LinearSource make_linear_source(std::string name, Format format, std::span<const float> values, int n_matrices, int out, int in) {
  CACHALOT_CHECK(n_matrices > 0 && out > 0 && in > 0, "{}: {} of [{}, {}]", name, n_matrices, out, in);
  const size_t n_elems = static_cast<size_t>(out) * static_cast<size_t>(in);
  CACHALOT_CHECK(values.size() % n_elems == 0 && values.size() / n_elems == static_cast<size_t>(n_matrices),
                 "{}: {} values for {} of [{}, {}]", name, values.size(), n_matrices, out, in);
  LinearSource source{.name = std::move(name), .format = format, .out = out, .in = in};
  const RowSizes sizes = row_sizes(source);
  const size_t data_bytes = static_cast<size_t>(out) * sizes.data, scale_bytes = n_scale_rows(format, out) * sizes.scales;
  // Scales first: they are floats, and the allocation is aligned for them.
  const auto bytes = std::make_shared<std::vector<std::byte>>(static_cast<size_t>(n_matrices) * (data_bytes + scale_bytes));
  std::byte* scales = bytes->data();
  std::byte* data = scales + static_cast<size_t>(n_matrices) * scale_bytes;
  for (size_t m = 0; m < static_cast<size_t>(n_matrices); ++m, scales += scale_bytes, data += data_bytes) {
    const float* in_values = values.data() + m * n_elems;
    if (format == Format::fp8_block) {
      quantize_fp8_block(in_values, out, in, data, reinterpret_cast<float*>(scales));
    } else {
      for (size_t r = 0; r < static_cast<size_t>(out); ++r)
        quantize_row(format, in_values + r * static_cast<size_t>(in), in, data + r * sizes.data);
    }
    source.matrices.push_back({.data = {data, data_bytes}, .scales = {scales, scale_bytes}, .zeros = {}});
  }
  source.keep_alive.push_back(bytes);
  return source;
}

LinearSource slice_rows(const LinearSource& source, int begin, int n) {
  CACHALOT_CHECK(begin >= 0 && n > 0 && n <= source.out - begin, "{}: rows {}+{} of {}", source.name, begin, n, source.out);
  const bool fp8 = source.format == Format::fp8_block;
  CACHALOT_CHECK(!fp8 || begin % kFp8Block == 0, "{}: row {} is not the first of a scale block", source.name, begin);
  const RowSizes sizes = row_sizes(source);
  const auto first = static_cast<size_t>(begin), count = static_cast<size_t>(n);
  const size_t first_scale = fp8 ? first / kFp8Block : first;
  LinearSource part = source;
  part.out = n;
  for (WeightBytes& matrix : part.matrices) {
    matrix.data = matrix.data.subspan(first * sizes.data, count * sizes.data);
    matrix.scales = matrix.scales.subspan(first_scale * sizes.scales, n_scale_rows(source.format, n) * sizes.scales);
    matrix.zeros = matrix.zeros.subspan(first * sizes.zeros, count * sizes.zeros);
  }
  if (!source.bias.empty()) part.bias.assign(source.bias.begin() + begin, source.bias.begin() + begin + n);
  return part;
}

}  // namespace cachalot
