// The wide layout: integer weights in the order in which VNNI, and AMX tiles, consume them (AVX2 in two halves). Private to src/cpu.
//
// A group is 16 rows, a unit one block of each of its rows (32 or 256 columns, or one planar group). A unit begins with what its rows share
// per block, 16 entries each, row by row; then for every 32 columns the codes as 8 steps of [16 rows][4 columns] bytes: a step is one
// 64-byte register. Eight-bit codes take a register per step (stored with 128 added where they are signed); of four-bit codes two steps
// share one, in its nibbles; fifth bits take one register for all 8 steps (bit s of a byte: step s); the two upper bits of Q6_K two.
//   q4_0, iq4_nl        f16 d[16]; codes
//   q4_1                f16 d[16], m[16]; codes
//   q5_0 / q5_1         f16 d[16] (m[16]); fifth bits; codes
//   q8_0                f16 d[16]; codes
//   mxfp4               u8 e[16]; codes
//   int4, int8          f16 d[16], u8 zero[16]; per 32: codes
//   q4_k, q5_k          f16 d[16], dmin[16]; per 32: u8 scale[16], minimum[16]; per 32: (fifth bits) codes
//   q6_k                f16 d[16]; per 16: i8 scale[16]; per 32: upper bits, codes
//   iq4_xs              f16 d[16]; per 32: i8 scale[16]; per 32: codes
#pragma once

#include "cpu/isa/kernels.h"
#include "tensor/linear_source.h"

namespace cachalot::cpu {

struct WideUnit {
  int elems = 0, bytes = 0;
};
// The unit of a codec; of the planar ones by their group. elems is 0 when the codec has no wide layout.
WideUnit wide_unit(Codec codec, int group);

// Whether every block of the source can be stored: not the MXFP4 scales at the ends of their range.
bool fits_wide(const LinearSource& source, Codec codec);

// Writes unit `u` of rows [16 group, 16 group + 16) of a matrix; rows past the end stay as they are, zero.
void pack_wide_unit(const LinearSource& source, Codec codec, int matrix, int group, int u, uint8_t* unit);

// Row r (0..15) of a unit as f32 [elems], to the bit what dequant_row gives.
void unpack_wide_row(Codec codec, const WideUnit& unit, const uint8_t* data, int r, float* out);

}  // namespace cachalot::cpu
