// Layout: the device forms of weight matrices. Quantized ones are cut into records of 16 rows x 64 columns whose bytes lie in the order
// in which the 32 lanes of a warp feed them to mma.m16n8k16, so that a warp reads one contiguous run and shuffles nothing.
//
// Lane 4g + c of a record holds rows g and g + 8. Of each step of 32 columns it holds columns 8c .. 8c + 7 (q6: 4c .. 4c + 3 and
// 16 + 4c .. 16 + 4c + 3, so that a group of 16 is one mma). The activations are read with the same column order, so that the sums agree.
//   bytes [0, 512)      4-bit codes: word 2s + h of lane l at 16 l (s: step, h: row g or g + 8); nibble i is code 2i, nibble i + 4 code
//                       2i + 1, so that its lower halves of bytes are codes 0, 4, 1, 5 and the upper ones 2, 6, 3, 7
//                       (8 bit: step 0; step 1 follows at 512; word 2h + half, bytes 0, 2, 1, 3 are codes 0, 1, 2, 3)
//   high bits           each in the byte that its code has above. q5: a word per lane, in each byte bit 2 (2s + h), and the next for
//                       the upper halves; q6: word s of two per lane, in each byte the two bits from 4h, and the next two
//   scales              f16, for each g: row g then row g + 8, per group the scale (and the minimum where the format has one); f8: one f32
// In the form q4g128 records 2i and 2i + 1 of a row tile, an even number, share their scales: the first holds those of rows 0 .. 7,
// the second those of rows 8 .. 15.
// A weight is scale * (code - zero) - minimum.
#pragma once

#include <cstdint>

namespace cachalot::cuda {

enum class Tile : uint8_t { f32, bf16, q4g32, q4g64, q4g128, q5g32, q6g16, q8g32, f8 };

struct TileInfo {
  int code_bits;  // 4, 5, 6, 8; 0: dense rows
  int group;      // columns of a record that share a scale
  bool has_min;
  int zero;
  int high_at;   // byte offset of the high bits
  int scale_at;  // byte offset of the scales
  int bytes;     // of one record
};
constexpr TileInfo tile_info(Tile tile) {
  switch (tile) {
    case Tile::q4g32: return {4, 32, true, 0, 512, 512, 640};
    case Tile::q4g64: return {4, 64, true, 0, 512, 512, 576};
    case Tile::q4g128: return {4, 64, true, 0, 512, 512, 544};
    case Tile::q5g32: return {5, 32, false, 16, 512, 640, 704};
    case Tile::q6g16: return {6, 16, false, 32, 512, 768, 896};
    case Tile::q8g32: return {8, 32, false, 0, 1024, 1024, 1088};
    case Tile::f8: return {8, 64, false, 0, 1024, 1024, 1040};
    case Tile::f32:
    case Tile::bf16: break;
  }
  return {0, 0, false, 0, 0, 0, 0};
}
// Bytes from record `chunk` of a row tile to the one that holds the scales of its rows 0 .. 7.
constexpr int scales_from(Tile tile, int chunk) { return tile == Tile::q4g128 && chunk % 2 != 0 ? -tile_info(tile).bytes : 0; }
constexpr bool is_record(Tile tile) { return tile != Tile::f32 && tile != Tile::bf16; }

constexpr int kRecordRows = 16, kRecordCols = 64;

// One row segment of a packed Linear: `n_matrices` matrices of `out` rows, each [out, cols] with cols = `in` padded to 64.
struct Segment {
  const uint8_t* data = nullptr;
  Tile tile = Tile::bf16;
  int out = 0;
  int in = 0;  // columns that count; those from here to `cols` are zero
  int cols = 0;
  int64_t matrix_bytes = 0;
};
constexpr int64_t segment_matrix_bytes(Tile tile, int out, int cols) {
  if (tile == Tile::f32) return int64_t{4} * out * cols;
  if (tile == Tile::bf16) return int64_t{2} * out * cols;
  return int64_t{(out + kRecordRows - 1) / kRecordRows} * (cols / kRecordCols) * tile_info(tile).bytes;
}

}  // namespace cachalot::cuda
