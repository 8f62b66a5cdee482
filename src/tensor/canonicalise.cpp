// Unpacking of AWQ and GPTQ words into planar form.
#include "tensor/canonicalise.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>

#include "base/error.h"
#include "tensor/dequant.h"

namespace cachalot {
namespace {

// Output j of an AWQ word is nibble kAwqNibble[j].
constexpr int kAwqNibble[8] = {0, 4, 1, 5, 2, 6, 3, 7};

class Words {  // a row-major i32 matrix in unaligned bytes
 public:
  Words(std::span<const std::byte> bytes, int n_cols) : data_(bytes.data()), n_cols_(static_cast<size_t>(n_cols)) {}
  [[nodiscard]] uint32_t at(int row, int col) const {
    return load<uint32_t>(data_ + (static_cast<size_t>(row) * n_cols_ + static_cast<size_t>(col)) * sizeof(uint32_t));
  }

 private:
  const std::byte* data_;
  size_t n_cols_;
};

int field(uint32_t word, int index, int bits) { return static_cast<int>((word >> (index * bits)) & ((1u << bits) - 1u)); }

// The checks that both kinds share; returns the group size with -1 resolved.
int checked_group(const std::string& name, int out, int in, int group, int per_word) {
  if (out <= 0 || in <= 0 || out % per_word != 0 || in % per_word != 0)
    fail("{}: shape [{}, {}], expected positive multiples of {}", name, out, in, per_word);
  if (group == -1) group = in;
  if (group <= 0 || in % group != 0) fail("{}: group size {}, expected -1 or a divisor of {} input columns", name, group, in);
  return group;
}

void expect_bytes(const std::string& name, const char* tensor, size_t found, const char* type, int rows, int cols, size_t elem_bytes) {
  const size_t expected = static_cast<size_t>(rows) * static_cast<size_t>(cols) * elem_bytes;
  if (found != expected) fail("{}.{}: found {} bytes, expected {} of {} [{}, {}]", name, tensor, found, expected, type, rows, cols);
}

void expect_packed_zeros(const std::string& name, std::span<const std::byte> zeros, int n_groups, int out, int per_word) {
  const size_t unpacked = static_cast<size_t>(n_groups) * static_cast<size_t>(out);
  if (zeros.size() == unpacked * sizeof(uint32_t) || (per_word != 4 && zeros.size() == unpacked))
    fail("{}.qzeros: found {} bytes, one element per zero point [{}, {}]: unpacked zero points are not supported, expected i32 [{}, {}]",
         name, zeros.size(), n_groups, out, n_groups, out / per_word);
  expect_bytes(name, "qzeros", zeros.size(), "i32", n_groups, out / per_word, sizeof(uint32_t));
}

PlanarWeights allocate(int out, int in, int bits, int group) {
  PlanarWeights planar{.out = out, .in = in, .bits = bits, .group = group};
  const size_t n_scales = static_cast<size_t>(out) * static_cast<size_t>(in / group);
  planar.codes.resize(static_cast<size_t>(out) * static_cast<size_t>(in) * static_cast<size_t>(bits) / 8);
  planar.scales.resize(n_scales * sizeof(uint16_t));
  planar.zeros.resize(n_scales);
  return planar;
}

size_t code_row_bytes(const PlanarWeights& planar) { return static_cast<size_t>(planar.in) * static_cast<size_t>(planar.bits) / 8; }

void put_zero(PlanarWeights& planar, int o, int g, int zero) {
  planar.zeros[static_cast<size_t>(o) * static_cast<size_t>(planar.in / planar.group) + static_cast<size_t>(g)] =
      static_cast<std::byte>(zero);
}

// f16 [n_groups, out] to [out, n_groups].
void transpose_scales(std::span<const std::byte> scales, PlanarWeights& planar) {
  const auto out = static_cast<size_t>(planar.out), n_groups = static_cast<size_t>(planar.in / planar.group);
  for (size_t o = 0; o < out; ++o)
    for (size_t g = 0; g < n_groups; ++g)
      std::memcpy(&planar.scales[(o * n_groups + g) * sizeof(uint16_t)], &scales[(g * out + o) * sizeof(uint16_t)], sizeof(uint16_t));
}

// Columns sorted by group, or nothing when they are in that order already.
std::vector<int32_t> column_order(const GptqTensors& t, int group) {
  if (t.g_idx.empty()) return {};
  expect_bytes(t.name, "g_idx", t.g_idx.size(), "i32", 1, t.in, sizeof(int32_t));
  const int n_groups = t.in / group;
  std::vector<int32_t> group_of(static_cast<size_t>(t.in)), count(static_cast<size_t>(n_groups));
  std::memcpy(group_of.data(), t.g_idx.data(), t.g_idx.size());
  for (const int32_t g : group_of) {
    if (g < 0 || g >= n_groups) fail("{}.g_idx: found group {}, expected 0 to {}", t.name, g, n_groups - 1);
    ++count[static_cast<size_t>(g)];
  }
  for (int g = 0; g < n_groups; ++g)
    if (count[static_cast<size_t>(g)] != group)
      fail("{}.g_idx: found {} columns in group {}, expected {}", t.name, count[static_cast<size_t>(g)], g, group);
  if (std::is_sorted(group_of.begin(), group_of.end())) return {};
  std::vector<int32_t> order(static_cast<size_t>(t.in));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return group_of[static_cast<size_t>(a)] < group_of[static_cast<size_t>(b)]; });
  return order;
}

// Moves column order[k] of every row to place k.
void reorder_columns(PlanarWeights& planar, const std::vector<int32_t>& order) {
  const size_t row_bytes = code_row_bytes(planar);
  std::vector<std::byte> old(row_bytes);
  for (size_t o = 0; o < static_cast<size_t>(planar.out); ++o) {
    std::byte* row = &planar.codes[o * row_bytes];
    std::memcpy(old.data(), row, row_bytes);
    for (size_t k = 0; k < order.size(); ++k) {
      const auto from = static_cast<size_t>(order[k]);
      if (planar.bits == 8) {
        row[k] = old[from];
      } else {
        const std::byte q = (old[from / 2] >> (4 * (from % 2))) & std::byte{15};
        row[k / 2] = k % 2 == 0 ? q : row[k / 2] | (q << 4);
      }
    }
  }
}

// The unpacking loops below walk along `in` inside a few words' worth of outputs, so that each line of the source is read few times
// and few rows of the target are open at once.
void unpack_awq_codes(const Words& codes, PlanarWeights& planar) {
  constexpr int kTile = 4;
  const size_t row_bytes = code_row_bytes(planar);
  const int n_words = planar.out / 8;
  for (int c0 = 0; c0 < n_words; c0 += kTile) {
    for (int k = 0; k < planar.in; k += 2) {
      for (int c = c0; c < std::min(c0 + kTile, n_words); ++c) {
        const uint32_t even = codes.at(k, c), odd = codes.at(k + 1, c);
        std::byte* column = &planar.codes[static_cast<size_t>(8 * c) * row_bytes + static_cast<size_t>(k / 2)];
        for (size_t j = 0; j < 8; ++j)
          column[j * row_bytes] = static_cast<std::byte>(field(even, kAwqNibble[j], 4) | (field(odd, kAwqNibble[j], 4) << 4));
      }
    }
  }
}

// A GPTQ word holds consecutive inputs of one output, lowest bits first: in memory it is already a piece of the planar row.
void unpack_gptq_codes(const Words& codes, PlanarWeights& planar) {
  constexpr int kTile = 8;
  const size_t row_bytes = code_row_bytes(planar);
  const int n_word_rows = static_cast<int>(row_bytes / sizeof(uint32_t));
  for (int o0 = 0; o0 < planar.out; o0 += kTile)
    for (int r = 0; r < n_word_rows; ++r)
      for (int o = o0; o < std::min(o0 + kTile, planar.out); ++o)
        store(&planar.codes[static_cast<size_t>(o) * row_bytes + static_cast<size_t>(r) * sizeof(uint32_t)], codes.at(r, o));
}

}  // namespace

PlanarWeights canonicalise(const AwqTensors& t) {
  constexpr int kPerWord = 8;
  const int group = checked_group(t.name, t.out, t.in, t.group, kPerWord), n_groups = t.in / group, n_words = t.out / kPerWord;
  expect_bytes(t.name, "qweight", t.qweight.size(), "i32", t.in, n_words, sizeof(uint32_t));
  expect_packed_zeros(t.name, t.qzeros, n_groups, t.out, kPerWord);
  expect_bytes(t.name, "scales", t.scales.size(), "f16", n_groups, t.out, sizeof(uint16_t));

  PlanarWeights planar = allocate(t.out, t.in, 4, group);
  unpack_awq_codes(Words(t.qweight, n_words), planar);
  const Words zeros(t.qzeros, n_words);
  for (int o = 0; o < t.out; ++o)
    for (int g = 0; g < n_groups; ++g) put_zero(planar, o, g, field(zeros.at(g, o / kPerWord), kAwqNibble[o % kPerWord], 4));
  transpose_scales(t.scales, planar);
  return planar;
}

PlanarWeights canonicalise(const GptqTensors& t) {
  if (t.bits != 4 && t.bits != 8) fail("{}: found {} bits, expected 4 or 8", t.name, t.bits);
  const int per_word = 32 / t.bits, group = checked_group(t.name, t.out, t.in, t.group, per_word), n_groups = t.in / group;
  expect_bytes(t.name, "qweight", t.qweight.size(), "i32", t.in / per_word, t.out, sizeof(uint32_t));
  expect_packed_zeros(t.name, t.qzeros, n_groups, t.out, per_word);
  expect_bytes(t.name, "scales", t.scales.size(), "f16", n_groups, t.out, sizeof(uint16_t));
  std::vector<int32_t> order = column_order(t, group);

  PlanarWeights planar = allocate(t.out, t.in, t.bits, group);
  unpack_gptq_codes(Words(t.qweight, t.out), planar);
  const Words zeros(t.qzeros, t.out / per_word);
  for (int o = 0; o < t.out; ++o) {
    for (int g = 0; g < n_groups; ++g) {
      const int zero = field(zeros.at(g, o / per_word), o % per_word, t.bits) + (t.version == GptqVersion::v1 ? 1 : 0);
      if (zero > 255) fail("{}.qzeros: found zero point {} in group {} of output {}, expected at most 255", t.name, zero, g, o);
      put_zero(planar, o, g, zero);
    }
  }
  transpose_scales(t.scales, planar);
  if (!order.empty()) reorder_columns(planar, order);
  planar.perm = std::move(order);
  return planar;
}

LinearSource planar_source(std::string name, std::vector<PlanarWeights> layers) {
  if (layers.empty()) fail("{}: no layer, expected at least one", name);
  const auto owned = std::make_shared<const std::vector<PlanarWeights>>(std::move(layers));
  const PlanarWeights& first = owned->front();
  LinearSource source{.name = std::move(name),
                      .format = first.bits == 4 ? Format::int4_planar : Format::int8_planar,
                      .out = first.out,
                      .in = first.in,
                      .group = first.group,
                      .perm = first.perm};
  for (const PlanarWeights& layer : *owned) {
    if (layer.out != first.out || layer.in != first.in || layer.bits != first.bits || layer.group != first.group)
      fail("{}: found [{}, {}] of {} bits in groups of {} beside [{}, {}] of {} bits in groups of {}, expected equal layers", source.name,
           layer.out, layer.in, layer.bits, layer.group, first.out, first.in, first.bits, first.group);
    if (layer.perm != first.perm) fail("{}: stacked act-order layers differ in column order, expected one order for all", source.name);
    source.matrices.push_back({.data = layer.codes, .scales = layer.scales, .zeros = layer.zeros});
  }
  source.keep_alive.push_back(owned);
  validate(source);
  return source;
}

}  // namespace cachalot
