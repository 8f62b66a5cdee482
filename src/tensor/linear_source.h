// LinearSource: what a loader found of one weight matrix, or of a stack of equally shaped ones (experts, heads). Ops::pack
// turns it into the device's own layout. The bytes stay where they are (a mapped file) and `keep_alive` holds that place.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tensor/format.h"

namespace cachalot {

// The stored bytes of one matrix [out, in].
struct WeightBytes {
  std::span<const std::byte> data;    // out rows of row_bytes(format, in); fp8_block: E4M3 codes [out, in]
  std::span<const std::byte> scales;  // fp8_block: f32 [ceil(out/128), ceil(in/128)]; planar: f16 [out, in/group]; otherwise empty
  std::span<const std::byte> zeros;   // planar: u8 [out, in/group]; otherwise empty
};

struct LinearSource {
  std::string name;  // for messages: the tensor's name in its file
  Format format = Format::f32;
  int out = 0, in = 0;
  int group = 0;                      // planar formats: elements of `in` that share a scale
  std::vector<WeightBytes> matrices;  // one, or one per expert or head
  std::vector<float> bias;            // [out], or empty; only for a single matrix
  std::vector<int32_t> perm;          // planar, act-order: column k of the stored codes multiplies x[perm[k]]; or empty
  std::vector<std::shared_ptr<const void>> keep_alive;

  [[nodiscard]] int n_matrices() const { return static_cast<int>(matrices.size()); }
  [[nodiscard]] size_t bytes() const;  // stored bytes of all matrices, scales and zeros included
};

// Throws Error naming the tensor when the spans, bias or perm do not have the sizes that format, out, in and group ask for.
// Loaders call it once per source; everything else may then rely on it.
void validate(const LinearSource& source);

// Row `row` of matrix `matrix` as f32 [in]: the oracle for every kernel. (With `perm`, in the order of the stored columns.)
void dequant_row(const LinearSource& source, int matrix, int row, float* out);
// The same in the order of the inputs, whatever `perm` says: out[k] multiplies x[k].
void dequant_row_by_input(const LinearSource& source, int matrix, int row, float* out);

// A LinearSource that owns f32 [n_matrices, out, in] values stored as `format` (fp8_block, or one that
// quantize_row writes).
LinearSource make_linear_source(std::string name, Format format, std::span<const float> values, int n_matrices, int out, int in);

// Rows [begin, begin + n) of every matrix, sharing the bytes. With fp8_block, begin must be a multiple of 128.
LinearSource slice_rows(const LinearSource& source, int begin, int n);

}  // namespace cachalot
