// The packed form of weights: rows in groups of four whose blocks are interleaved, [matrices][groups][blocks][4][block bytes], so that the
// kernel that multiplies four rows at a time reads one stream. Rows are padded with zeros to whole groups and to 32 columns.
// Formats that have products over rows in lanes take the layout of wide_pack.h instead.
// Private to src/cpu: kernels see WeightRows or WideRows, everything else a Linear.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "cpu/huge_memory.h"
#include "cpu/isa/kernels.h"
#include "cpu/wide_pack.h"
#include "ops/ops.h"

namespace cachalot::cpu {

// Packed files hold these bytes: a change of any layout, here or in wide_pack.h, takes a new number.
inline constexpr int kPackedLayout = 1;

// Rows of one format within a Linear.
struct Segment {
  Codec codec = Codec::f32;
  int first_row = 0;  // of the Linear
  int n_rows = 0;
  int n_groups = 0;   // of 16 rows, by which work is handed out
  bool wide = false;  // a block is a unit of 16 rows; otherwise blocks of 4 rows are interleaved
  int n_blocks = 0, block_elems = 0, block_bytes = 0;
  size_t matrix_bytes = 0;  // from one matrix of the stack to the next
  std::shared_ptr<std::byte> data;
  int header_bytes = 0;  // of a wide unit
  // Of a wide segment, see WideRows: [matrices][rows in whole groups], zero at first, written by the kernels.
  std::shared_ptr<uint8_t[]> exponents;
  std::vector<float> scales;  // fp8 that is not wide: [matrices][ceil(rows / 128)][scale_stride]
  int64_t scale_stride = 0;
  std::vector<float> bias;    // [n_rows] or empty
  std::vector<int32_t> perm;  // column k multiplies x[perm[k]]; or empty

  [[nodiscard]] bool rounds_activations() const { return wide && !is_float(codec); }
};

class CpuPacked : public Packed {
 public:
  [[nodiscard]] size_t bytes() const override;
  // Rows [row, row + n) of segment `s` in matrix `matrix`; row must be a multiple of 4.
  [[nodiscard]] WeightRows rows(const Segment& s, int matrix, int row, int n) const;
  // The same of a wide segment; row must be a multiple of 16.
  [[nodiscard]] WideRows wide_rows(const Segment& s, int matrix, int row, int n) const;

  int out = 0, in = 0, padded_in = 0, n_matrices = 0;
  int n_groups = 0;              // over all segments
  bool needs_own_input = false;  // rows of x must be copied first: padding or a permutation
  bool any_wide = false, any_rounds = false;
  std::vector<Segment> segments;
};

// Whether rows of `in` elements can have this form: whole blocks.
bool can_lay_out(Codec codec, bool wide, int in);
// Sets rows, groups, blocks, matrix_bytes and scale_stride of a segment whose codec and form are set.
void lay_out(Segment& s, int n_rows, int in, int group);
// Joins a segment to a Linear whose `in` and `n_matrices` are set.
void add_segment(CpuPacked& packed, Segment segment);

// Throws Error when the segments do not fit together. `wide` takes the wide layout wherever these kernels have a product for it.
std::shared_ptr<const CpuPacked> pack_weights(std::span<const LinearSource> sources, HugeMemory& memory, ThreadPool& pool,
                                              const WideKernels* wide = nullptr);

}  // namespace cachalot::cpu
