// The codes of GGUF blocks apart from their scales: what an encoder needs that chooses codes itself (error feedback) on scales found
// before. A block is runs of equally scaled elements: value(e) = scale[e / run] * level(code) + offset[e / run], where level(code) is the
// code itself, or IQ4's table. dequant_row stays the exact definition; these values agree with it to the last bits of an f32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/format.h"

namespace cachalot {

inline constexpr int kMaxRuns = 16;  // runs of a block

struct CodeInfo {
  int run = 0;                    // elements that share a scale
  int n_codes = 0;                // codes are 0 .. n_codes - 1
  const float* levels = nullptr;  // [n_codes], ascending; null: the code itself
};
// Whether the format is made of blocks with codes: q4_0 to iq4_xs, without mxfp4.
bool has_block_codes(Format format);
CodeInfo code_info(Format format);

// Scales and offsets of one block, block_elems / run of each. Signed formats count codes from the lowest level: q4_0 has offset -8 * scale.
void read_block_grid(Format format, const std::byte* block, float* scale, float* offset);
// Puts block_elems codes into a block and leaves its scales as they are.
void write_block_codes(Format format, const uint8_t* codes, std::byte* block);

}  // namespace cachalot
