// The wide layout: weights in the order in which VNNI, AMX tiles (integers) and vectors of rows (floats) consume them (AVX2 in two halves).
// Private to src/cpu.
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
//
// Of floats a unit is the whole of its 16 rows, eight columns after eight, in pieces of 64 bytes:
//   bf16                columns 0 2, 4 6, 1 3, 5 7 as [16 rows][2]: two columns to open per register
//   f16                 the same pairs as [2][16 rows], since f16 is opened from neighbours
//   fp8                 f32 scale of every 128 columns, up to a multiple of 64 bytes; then columns 0 to 3, 4 to 7 as [2][16 rows][2]
#pragma once

#include "cpu/isa/kernels.h"
#include "tensor/linear_source.h"

namespace cachalot::cpu {

inline constexpr int kScaleBlock = 128;  // rows and columns of fp8 that share a scale

constexpr bool is_float(Codec codec) { return codec == Codec::f32 || codec == Codec::f16 || codec == Codec::bf16 || codec == Codec::fp8; }

struct WideUnit {
  int elems = 0, bytes = 0;
  int header_bytes = 0;  // before the codes, where their place depends on the number of columns
};
// The unit of a codec in rows of `in`; of the planar ones by their group. elems is 0 when the codec has no wide layout.
WideUnit wide_unit(Codec codec, int group, int in);

// Whether every block of the source can be stored: not the MXFP4 scales at the ends of their range, not the FP8 codes for NaN, and of
// floats only whole chunks of columns.
bool fits_wide(const LinearSource& source, Codec codec);

// Writes unit `u` of rows [16 group, 16 group + 16) of a matrix; rows past the end stay as they are, zero.
void pack_wide_unit(const LinearSource& source, Codec codec, int matrix, int group, int u, uint8_t* unit);

// Row r (0..15) of a unit as f32 [elems], to the bit what dequant_row gives.
void unpack_wide_row(Codec codec, const WideUnit& unit, const uint8_t* data, int r, float* out);

}  // namespace cachalot::cpu
