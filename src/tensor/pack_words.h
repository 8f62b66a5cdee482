// The reverse of canonicalise: one matrix of a planar LinearSource in the words of AWQ, GPTQ and compressed-tensors files.
// Layouts: docs/formats.md.
#pragma once

#include <cstddef>
#include <vector>

#include "tensor/canonicalise.h"

namespace cachalot {

// Whether the words of these files can hold a planar matrix of this shape: [out, in] are whole words, and its columns are in order.
bool fits_words(const LinearSource& source);

// Zero points above 15 (which only GPTQ v1 files have) and 8-bit codes are refused with an Error naming the source.
struct AwqWords {
  std::vector<std::byte> qweight;  // i32 [in, out/8]
  std::vector<std::byte> qzeros;   // i32 [in/group, out/8]
  std::vector<std::byte> scales;   // f16 [in/group, out]
};
AwqWords pack_awq(const LinearSource& source, int matrix);

// Zero points that the version cannot hold are refused: 0 for v1, 16 of 4 bits for v2.
struct GptqWords {
  std::vector<std::byte> qweight;  // i32 [in*bits/32, out]
  std::vector<std::byte> qzeros;   // i32 [in/group, out*bits/32]
  std::vector<std::byte> scales;   // f16 [in/group, out]
  std::vector<std::byte> g_idx;    // i32 [in]: k / group
};
GptqWords pack_gptq(const LinearSource& source, int matrix, GptqVersion version);

// With `symmetric` all zero points must be the middle code, and none are written.
struct PackQuantizedWords {
  std::vector<std::byte> weight_packed;      // i32 [out, in*bits/32]
  std::vector<std::byte> weight_scale;       // f16 [out, in/group]
  std::vector<std::byte> weight_zero_point;  // i32 [out*bits/32, in/group], or empty
};
PackQuantizedWords pack_quantized(const LinearSource& source, int matrix, bool symmetric);

}  // namespace cachalot
