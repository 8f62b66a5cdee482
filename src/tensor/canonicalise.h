// AWQ, GPTQ and compressed-tensors checkpoints brought to the planar form of LinearSource: codes along `in` row by row, scale and zero
// point per group. Sources: the AutoAWQ "GEMM", GPTQ v1/v2 and compressed-tensors "pack-quantized" layouts, restated in docs/formats.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tensor/linear_source.h"

namespace cachalot {

// One linear layer in planar form. Value of (o, k) = (code - zero) * scale, with group k / group of row o.
struct PlanarWeights {
  int out = 0, in = 0, bits = 0, group = 0;
  std::vector<std::byte> codes;   // int4_planar [out, in/2] or int8_planar [out, in]
  std::vector<std::byte> scales;  // f16 [out, in/group]
  std::vector<std::byte> zeros;   // u8 [out, in/group]
  std::vector<int32_t> perm;      // as in LinearSource: empty unless the columns had to be reordered
};

// The tensors of one AWQ layer as stored: little-endian i32 words that hold eight 4-bit codes of consecutive outputs.
struct AwqTensors {
  std::string name;  // of the layer, for messages
  int out = 0, in = 0;
  int group = 0;                       // elements of `in` per scale; -1 means all of them
  std::span<const std::byte> qweight;  // i32 [in, out/8]
  std::span<const std::byte> qzeros;   // i32 [in/group, out/8]
  std::span<const std::byte> scales;   // f16 [in/group, out]
};

// What `checkpoint_format` says about the stored zero points: v1 holds z - 1, v2 holds z.
enum class GptqVersion : uint8_t { v1, v2 };

// The tensors of one GPTQ layer as stored.
struct GptqTensors {
  std::string name;  // of the layer, for messages
  int out = 0, in = 0;
  int bits = 0;   // 4 or 8
  int group = 0;  // elements of `in` per scale, the last group may have fewer; -1 means all of them
  GptqVersion version = GptqVersion::v1;
  std::span<const std::byte> qweight;  // i32 [in*bits/32, out], codes packed along `in`
  std::span<const std::byte> qzeros;   // i32 [ceil(in/group), out*bits/32], packed along `out`
  std::span<const std::byte> scales;   // f16 [ceil(in/group), out]
  std::span<const std::byte> g_idx;    // i32 [in], group of each column; or empty: k / group
};

// The tensors of one compressed-tensors layer in the format "pack-quantized", as stored. Codes and zero points are there as unsigned
// numbers, 2^(bits-1) above their values.
struct PackQuantizedTensors {
  std::string name;  // of the layer, for messages
  int out = 0, in = 0;
  int bits = 0;                                  // 4 or 8
  int group = 0;                                 // as in GptqTensors
  std::span<const std::byte> weight_packed;      // i32 [out, in*bits/32], codes packed along `in`
  std::span<const std::byte> weight_scale;       // f16 [out, ceil(in/group)]
  std::span<const std::byte> weight_zero_point;  // i32 [out*bits/32, ceil(in/group)], packed along `out`; or empty: symmetric
  std::span<const std::byte> weight_g_idx;       // i32 [in], group of each column; or empty: k / group
};

// All throw Error naming the layer and the tensor when a size or an index does not fit, among them zero points stored one per word
// ("unpacked", whose offset no file declares). Zero points of v1 become 1 .. 2^bits without wrapping; 256 is refused, as zeros are u8.
// Columns of an act-order layer (g_idx not k / group) are sorted by group; every group must own `group` columns. Where the last group has
// fewer columns, all are cut into equal smaller ones, which changes no value.
PlanarWeights canonicalise(const AwqTensors& tensors);
PlanarWeights canonicalise(const GptqTensors& tensors);
PlanarWeights canonicalise(const PackQuantizedTensors& tensors);

// A LinearSource that owns the layers, which must agree in shape, group and bits (throws Error otherwise). Act-order layers whose column
// orders differ cannot share one: they become f16, (code - zero) * scale rounded once, in the order of the inputs.
LinearSource planar_source(std::string name, std::vector<PlanarWeights> layers);

}  // namespace cachalot
