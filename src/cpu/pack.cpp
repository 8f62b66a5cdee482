// Packing: each format's blocks are copied as they are, except the planar formats, whose scale, zero and codes become one block per group.
#include "cpu/pack.h"

#include <cstring>
#include <functional>

#include "base/check.h"
#include "base/error.h"
#include "cpu/wide_pack.h"

namespace cachalot::cpu {
namespace {

constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }

Codec codec_of(Format format) {
  switch (format) {
    case Format::f32: return Codec::f32;
    case Format::f16: return Codec::f16;
    case Format::bf16: return Codec::bf16;
    case Format::q4_0: return Codec::q4_0;
    case Format::q4_1: return Codec::q4_1;
    case Format::q5_0: return Codec::q5_0;
    case Format::q5_1: return Codec::q5_1;
    case Format::q8_0: return Codec::q8_0;
    case Format::q2_k: return Codec::q2_k;
    case Format::q3_k: return Codec::q3_k;
    case Format::q4_k: return Codec::q4_k;
    case Format::q5_k: return Codec::q5_k;
    case Format::q6_k: return Codec::q6_k;
    case Format::iq4_nl: return Codec::iq4_nl;
    case Format::iq4_xs: return Codec::iq4_xs;
    case Format::mxfp4: return Codec::mxfp4;
    case Format::fp8_block: return Codec::fp8;
    case Format::int4_planar: return Codec::int4;
    case Format::int8_planar: return Codec::int8;
  }
  CACHALOT_CHECK(false, "format {}", static_cast<int>(format));
}

bool is_planar(Format format) { return format == Format::int4_planar || format == Format::int8_planar; }

// A source is decoded to f32 when its groups do not fill whole chunks of 32: rare, and then small.
bool decodes_at_pack(const LinearSource& s) { return is_planar(s.format) && s.group % kChunk != 0; }

// One planar group as a block: f16 scale, u8 zero, a spare byte, codes. 4-bit codes are put in the order of the other formats: byte j of
// 16 holds elements j and j + 16 of a run of 32.
void planar_block(const LinearSource& s, const WeightBytes& w, int row, int group, std::byte* out) {
  const size_t g = static_cast<size_t>(row) * static_cast<size_t>(s.in / s.group) + static_cast<size_t>(group);
  std::memcpy(out, w.scales.data() + 2 * g, 2);
  out[2] = w.zeros[g];
  const size_t first = static_cast<size_t>(row) * static_cast<size_t>(s.in) + static_cast<size_t>(group) * static_cast<size_t>(s.group);
  if (s.format == Format::int8_planar) {
    std::memcpy(out + 4, w.data.data() + first, static_cast<size_t>(s.group));
    return;
  }
  const std::byte* codes = w.data.data() + first / 2;
  const auto code = [&](int e) { return (codes[e / 2] >> (4 * (e % 2))) & std::byte{15}; };
  for (int e = 0; e < s.group; e += kChunk)
    for (int j = 0; j < kChunk / 2; ++j) out[4 + e / 2 + j] = code(e + j) | (code(e + j + kChunk / 2) << 4);
}

// Copies block `b` of a row; `row_data` is where the stored row begins, or its decoded values.
void copy_block(const LinearSource& s, const Segment& to, const WeightBytes& w, const std::byte* row_data, int row, int b, std::byte* out) {
  if (to.codec == Codec::int4 || to.codec == Codec::int8) {
    planar_block(s, w, row, b, out);
    return;
  }
  const int elems = std::min(to.block_elems, s.in - b * to.block_elems);
  const size_t bytes = static_cast<size_t>(to.block_bytes) / static_cast<size_t>(to.block_elems) * static_cast<size_t>(elems);
  const bool whole = elems == to.block_elems;
  std::memcpy(out, row_data + static_cast<size_t>(b) * static_cast<size_t>(to.block_bytes),
              whole ? static_cast<size_t>(to.block_bytes) : bytes);
}

// Rows [4 group, 4 group + 4).
void pack_group(const LinearSource& s, Segment& to, int matrix, int group) {
  const WeightBytes& w = s.matrices[static_cast<size_t>(matrix)];
  const size_t group_bytes = static_cast<size_t>(to.n_blocks) * kGroupRows * static_cast<size_t>(to.block_bytes);
  std::byte* const out = to.data.get() + static_cast<size_t>(matrix) * to.matrix_bytes + static_cast<size_t>(group) * group_bytes;
  std::vector<float> decoded(decodes_at_pack(s) ? static_cast<size_t>(s.in) : 0);
  for (int r = 0; r < kGroupRows && group * kGroupRows + r < s.out; ++r) {
    const int row = group * kGroupRows + r;
    const std::byte* stored = nullptr;
    if (decodes_at_pack(s)) {
      dequant_row(s, matrix, row, decoded.data());
      stored = reinterpret_cast<const std::byte*>(decoded.data());
    } else if (!is_planar(s.format)) {
      stored = w.data.data() + static_cast<size_t>(row) * row_bytes(s.format, s.in);
    }
    for (int b = 0; b < to.n_blocks; ++b)
      copy_block(s, to, w, stored, row, b, out + static_cast<size_t>(b * kGroupRows + r) * static_cast<size_t>(to.block_bytes));
  }
}

void check_fit(const LinearSource& first, const LinearSource& s) {
  validate(s);
  if (s.in != first.in) fail("{}: found an input of {}, expected {} as in {}", s.name, s.in, first.in, first.name);
  if (s.n_matrices() != first.n_matrices())
    fail("{}: found {} matrices, expected {} as in {}", s.name, s.n_matrices(), first.n_matrices(), first.name);
}

// Rows [16 group, 16 group + 16) in the layout of the segment.
void pack_rows(const LinearSource& s, Segment& to, int matrix, int group) {
  if (!to.wide) {
    for (int g = group * (kWideRows / kGroupRows); g < (group + 1) * (kWideRows / kGroupRows) && g * kGroupRows < s.out; ++g)
      pack_group(s, to, matrix, g);
    return;
  }
  auto* unit = reinterpret_cast<uint8_t*>(to.data.get()) + static_cast<size_t>(matrix) * to.matrix_bytes +
               static_cast<size_t>(group) * static_cast<size_t>(to.n_blocks) * static_cast<size_t>(to.block_bytes);
  for (int u = 0; u < to.n_blocks; ++u, unit += to.block_bytes) pack_wide_unit(s, to.codec, matrix, group, u, unit);
}

Segment pack_segment(const LinearSource& s, int first_row, HugeMemory& memory, ThreadPool& pool, const WideKernels* wide) {
  Segment out;
  out.codec = decodes_at_pack(s) ? Codec::f32 : codec_of(s.format);
  out.first_row = first_row;
  out.wide = wide != nullptr && wide->product[static_cast<int>(out.codec)] != nullptr && fits_wide(s, out.codec);
  lay_out(out, s.out, s.in, s.group);
  out.data = memory.take(out.matrix_bytes * static_cast<size_t>(s.n_matrices()));
  out.bias = s.bias;
  out.perm = s.perm;
  if (out.codec == Codec::fp8 && !out.wide) {
    for (const WeightBytes& w : s.matrices) {
      const size_t at = out.scales.size();
      out.scales.resize(at + w.scales.size() / sizeof(float));
      std::memcpy(out.scales.data() + at, w.scales.data(), w.scales.size());
    }
  }
  constexpr int kGroupsPerTask = 4;
  const int tasks_per_matrix = (out.n_groups + kGroupsPerTask - 1) / kGroupsPerTask;
  const auto task = [&](int index, int) {
    const int matrix = index / tasks_per_matrix, begin = index % tasks_per_matrix * kGroupsPerTask;
    for (int g = begin; g < std::min(begin + kGroupsPerTask, out.n_groups); ++g) pack_rows(s, out, matrix, g);
  };
  pool.run(tasks_per_matrix * s.n_matrices(), std::ref(task));
  return out;
}

}  // namespace

bool can_lay_out(Codec codec, bool wide, int in) {
  const int whole = wide ? wide_unit(codec, kChunk, in).elems : info(static_cast<Format>(codec)).block_elems;
  return whole > 0 && in % whole == 0 && (!wide || in % kChunk == 0);
}

void lay_out(Segment& s, int n_rows, int in, int group) {
  const FormatInfo& format = info(static_cast<Format>(s.codec));
  size_t blocks = static_cast<size_t>(round_up(n_rows, kGroupRows));
  s.n_rows = n_rows;
  s.n_groups = (n_rows + kWideRows - 1) / kWideRows;
  switch (s.codec) {
    case Codec::f32:
    case Codec::f16:
    case Codec::bf16:
    case Codec::fp8:  // no blocks: a chunk of elements takes the place of one
      s.block_elems = kChunk;
      s.block_bytes = kChunk * (s.codec == Codec::f32 ? 4 : format.block_bytes);
      break;
    case Codec::int4:
    case Codec::int8:
      s.block_elems = group;
      s.block_bytes = 4 + (s.codec == Codec::int4 ? group / 2 : group);
      break;
    default: s.block_elems = format.block_elems; s.block_bytes = format.block_bytes;
  }
  if (s.wide) {
    const WideUnit unit = wide_unit(s.codec, group, in);
    s.block_elems = unit.elems;
    s.block_bytes = unit.bytes;
    s.header_bytes = unit.header_bytes;
    blocks = static_cast<size_t>(s.n_groups);
  }
  s.n_blocks = (in + s.block_elems - 1) / s.block_elems;
  s.matrix_bytes = (blocks * static_cast<size_t>(s.n_blocks) * static_cast<size_t>(s.block_bytes) + 63) / 64 * 64;
  if (s.codec == Codec::fp8 && !s.wide) s.scale_stride = (in + kScaleBlock - 1) / kScaleBlock;
}

namespace {

size_t wide_row_count(const Segment& s) { return static_cast<size_t>(s.n_groups) * kWideRows; }

}  // namespace

void add_segment(CpuPacked& packed, Segment segment) {
  packed.padded_in = round_up(packed.in, kChunk);
  packed.out += segment.n_rows;
  packed.n_groups += segment.n_groups;
  packed.needs_own_input = packed.needs_own_input || packed.padded_in != packed.in || !segment.perm.empty();
  packed.any_wide = packed.any_wide || segment.wide;
  packed.any_rounds = packed.any_rounds || segment.rounds_activations();
  if (segment.wide) segment.exponents = std::make_shared<uint8_t[]>(static_cast<size_t>(packed.n_matrices) * wide_row_count(segment));
  packed.segments.push_back(std::move(segment));
}

size_t CpuPacked::bytes() const {
  size_t total = 0;
  for (const Segment& s : segments) {
    const size_t matrices = s.matrix_bytes == 0 ? 0 : static_cast<size_t>(n_matrices);
    total += (s.matrix_bytes + (s.wide ? wide_row_count(s) : 0)) * matrices + (s.scales.size() + s.bias.size()) * sizeof(float) +
             s.perm.size() * sizeof(int32_t);
  }
  return total;
}

WeightRows CpuPacked::rows(const Segment& s, int matrix, int row, int n) const {
  WeightRows found;
  const size_t group_bytes = static_cast<size_t>(s.n_blocks) * kGroupRows * static_cast<size_t>(s.block_bytes);
  found.data = reinterpret_cast<const uint8_t*>(s.data.get()) + static_cast<size_t>(matrix) * s.matrix_bytes +
               static_cast<size_t>(row / kGroupRows) * group_bytes;
  if (s.codec == Codec::fp8)
    found.scales = s.scales.data() + static_cast<int64_t>(matrix) * ((s.n_rows + kScaleBlock - 1) / kScaleBlock) * s.scale_stride;
  found.scale_stride = s.scale_stride;
  found.first_row = row;
  found.n_rows = n;
  found.n_cols = padded_in;
  found.n_blocks = s.n_blocks;
  found.block_bytes = s.block_bytes;
  found.block_elems = s.block_elems;
  return found;
}

WideRows CpuPacked::wide_rows(const Segment& s, int matrix, int row, int n) const {
  const size_t group_bytes = static_cast<size_t>(s.n_blocks) * static_cast<size_t>(s.block_bytes);
  return {.data = reinterpret_cast<const uint8_t*>(s.data.get()) + static_cast<size_t>(matrix) * s.matrix_bytes +
                  static_cast<size_t>(row / kWideRows) * group_bytes,
          .n_rows = n,
          .n_units = s.n_blocks,
          .unit_bytes = s.block_bytes,
          .unit_elems = s.block_elems,
          .header_bytes = s.header_bytes,
          .exponents = s.exponents.get() + static_cast<size_t>(matrix) * wide_row_count(s) + row};
}

std::shared_ptr<const CpuPacked> pack_weights(std::span<const LinearSource> sources, HugeMemory& memory, ThreadPool& pool,
                                              const WideKernels* wide) {
  CACHALOT_CHECK(!sources.empty());
  auto packed = std::make_shared<CpuPacked>();
  packed->in = sources[0].in;
  packed->n_matrices = sources[0].n_matrices();
  for (const LinearSource& s : sources) {
    check_fit(sources[0], s);
    if (s.out > (1 << 30) - packed->out)
      fail("{}: found {} rows on top of {}, expected less than 2^30 together", s.name, s.out, packed->out);
    add_segment(*packed, pack_segment(s, packed->out, memory, pool, wide));
  }
  return packed;
}

}  // namespace cachalot::cpu
