// Unpacking of AWQ, GPTQ and compressed-tensors words into planar form.
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

// Groups as a file has them, and the equal ones that they are cut into: `unit` divides `in`, and every stored group but for its end.
struct Groups {
  int stored = 0, n_stored = 0, unit = 0;
  [[nodiscard]] int stored_of(int planar_group) const { return static_cast<int>(static_cast<int64_t>(planar_group) * unit / stored); }
};

// The checks that all kinds share. per_word codes are in a word.
Groups checked_groups(const std::string& name, int out, int in, int group, int per_word) {
  if (out <= 0 || in <= 0 || out % per_word != 0 || in % per_word != 0)
    fail("{}: shape [{}, {}], expected positive multiples of {}", name, out, in, per_word);
  if (group == -1) group = in;
  if (group <= 0 || group > in) fail("{}: group size {}, expected -1 or at most {} input columns", name, group, in);
  return {.stored = group, .n_stored = (in + group - 1) / group, .unit = in % group == 0 ? group : std::gcd(group, in % group)};
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

// f16 [stored groups, out] to [out, groups].
void transpose_scales(std::span<const std::byte> scales, const Groups& groups, PlanarWeights& planar) {
  const auto out = static_cast<size_t>(planar.out), n_groups = static_cast<size_t>(planar.in / planar.group);
  for (size_t o = 0; o < out; ++o)
    for (size_t g = 0; g < n_groups; ++g) {
      const auto from = static_cast<size_t>(groups.stored_of(static_cast<int>(g)));
      std::memcpy(&planar.scales[(o * n_groups + g) * sizeof(uint16_t)], &scales[(from * out + o) * sizeof(uint16_t)], sizeof(uint16_t));
    }
}

// f16 [out, stored groups] to [out, groups].
void spread_scales(std::span<const std::byte> scales, const Groups& groups, PlanarWeights& planar) {
  const auto n_groups = static_cast<size_t>(planar.in / planar.group), n_stored = static_cast<size_t>(groups.n_stored);
  for (size_t o = 0; o < static_cast<size_t>(planar.out); ++o)
    for (size_t g = 0; g < n_groups; ++g) {
      const auto from = static_cast<size_t>(groups.stored_of(static_cast<int>(g)));
      std::memcpy(&planar.scales[(o * n_groups + g) * sizeof(uint16_t)], &scales[(o * n_stored + from) * sizeof(uint16_t)],
                  sizeof(uint16_t));
    }
}

// Columns sorted by group, or nothing when they are in that order already. `name` is the tensor's.
std::vector<int32_t> column_order(const std::string& name, std::span<const std::byte> g_idx, int in, const Groups& groups) {
  if (g_idx.empty()) return {};
  const auto n_columns = static_cast<size_t>(in);
  if (g_idx.size() != n_columns * sizeof(int32_t))
    fail("{}: found {} bytes, expected {} of i32 [{}]", name, g_idx.size(), n_columns * sizeof(int32_t), in);
  std::vector<int32_t> group_of(n_columns), count(static_cast<size_t>(groups.n_stored));
  std::memcpy(group_of.data(), g_idx.data(), g_idx.size());
  for (const int32_t g : group_of) {
    if (g < 0 || g >= groups.n_stored) fail("{}: found group {}, expected 0 to {}", name, g, groups.n_stored - 1);
    ++count[static_cast<size_t>(g)];
  }
  for (int g = 0; g < groups.n_stored; ++g) {
    const int expected = std::min(groups.stored, in - g * groups.stored);
    if (count[static_cast<size_t>(g)] != expected)
      fail("{}: found {} columns in group {}, expected {}", name, count[static_cast<size_t>(g)], g, expected);
  }
  if (std::is_sorted(group_of.begin(), group_of.end())) return {};
  std::vector<int32_t> order(n_columns);
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

// Layers as f16 in the order of their inputs.
LinearSource decoded(std::string name, const std::vector<PlanarWeights>& layers) {
  const PlanarWeights& first = layers.front();
  const size_t row = row_bytes(Format::f16, first.in), matrix = row * static_cast<size_t>(first.out);
  const auto memory = std::make_shared<std::vector<std::byte>>(matrix * layers.size());
  LinearSource source{.name = std::move(name), .format = Format::f16, .out = first.out, .in = first.in};
  std::vector<float> values(static_cast<size_t>(first.in));
  for (size_t m = 0; m < layers.size(); ++m) {
    const PlanarWeights& layer = layers[m];
    const LinearSource one{.name = source.name,
                           .format = layer.bits == 4 ? Format::int4_planar : Format::int8_planar,
                           .out = layer.out,
                           .in = layer.in,
                           .group = layer.group,
                           .matrices = {{.data = layer.codes, .scales = layer.scales, .zeros = layer.zeros}},
                           .perm = layer.perm};
    std::byte* const to = memory->data() + m * matrix;
    for (int r = 0; r < layer.out; ++r) {
      dequant_row_by_input(one, 0, r, values.data());
      quantize_row(Format::f16, values.data(), layer.in, to + static_cast<size_t>(r) * row);
    }
    source.matrices.push_back({.data = {to, matrix}, .scales = {}, .zeros = {}});
  }
  source.keep_alive.push_back(memory);
  validate(source);
  return source;
}

}  // namespace

PlanarWeights canonicalise(const AwqTensors& t) {
  constexpr int kPerWord = 8;
  const Groups groups = checked_groups(t.name, t.out, t.in, t.group, kPerWord);
  const int n_words = t.out / kPerWord;
  if (groups.unit != groups.stored) fail("{}: group size {}, expected -1 or a divisor of {} input columns", t.name, t.group, t.in);
  expect_bytes(t.name, "qweight", t.qweight.size(), "i32", t.in, n_words, sizeof(uint32_t));
  expect_packed_zeros(t.name, t.qzeros, groups.n_stored, t.out, kPerWord);
  expect_bytes(t.name, "scales", t.scales.size(), "f16", groups.n_stored, t.out, sizeof(uint16_t));

  PlanarWeights planar = allocate(t.out, t.in, 4, groups.unit);
  unpack_awq_codes(Words(t.qweight, n_words), planar);
  const Words zeros(t.qzeros, n_words);
  for (int o = 0; o < t.out; ++o)
    for (int g = 0; g < groups.n_stored; ++g) put_zero(planar, o, g, field(zeros.at(g, o / kPerWord), kAwqNibble[o % kPerWord], 4));
  transpose_scales(t.scales, groups, planar);
  return planar;
}

PlanarWeights canonicalise(const GptqTensors& t) {
  if (t.bits != 4 && t.bits != 8) fail("{}: found {} bits, expected 4 or 8", t.name, t.bits);
  const int per_word = 32 / t.bits;
  const Groups groups = checked_groups(t.name, t.out, t.in, t.group, per_word);
  expect_bytes(t.name, "qweight", t.qweight.size(), "i32", t.in / per_word, t.out, sizeof(uint32_t));
  expect_packed_zeros(t.name, t.qzeros, groups.n_stored, t.out, per_word);
  expect_bytes(t.name, "scales", t.scales.size(), "f16", groups.n_stored, t.out, sizeof(uint16_t));
  std::vector<int32_t> order = column_order(t.name + ".g_idx", t.g_idx, t.in, groups);

  PlanarWeights planar = allocate(t.out, t.in, t.bits, groups.unit);
  unpack_gptq_codes(Words(t.qweight, t.out), planar);
  const Words zeros(t.qzeros, t.out / per_word);
  for (int o = 0; o < t.out; ++o) {
    for (int g = 0; g < t.in / groups.unit; ++g) {
      const int from = groups.stored_of(g);
      const int zero = field(zeros.at(from, o / per_word), o % per_word, t.bits) + (t.version == GptqVersion::v1 ? 1 : 0);
      if (zero > 255) fail("{}.qzeros: found zero point {} in group {} of output {}, expected at most 255", t.name, zero, from, o);
      put_zero(planar, o, g, zero);
    }
  }
  transpose_scales(t.scales, groups, planar);
  if (!order.empty()) reorder_columns(planar, order);
  planar.perm = std::move(order);
  return planar;
}

PlanarWeights canonicalise(const PackQuantizedTensors& t) {
  if (t.bits != 4 && t.bits != 8) fail("{}: found {} bits, expected 4 or 8", t.name, t.bits);
  const int per_word = 32 / t.bits;
  // Rows need not fill whole words where there are no zero points, which are packed along them.
  const Groups groups =
      checked_groups(t.name, t.weight_zero_point.empty() ? std::max(t.out, 0) * per_word : t.out, t.in, t.group, per_word);
  expect_bytes(t.name, "weight_packed", t.weight_packed.size(), "i32", t.out, t.in / per_word, sizeof(uint32_t));
  expect_bytes(t.name, "weight_scale", t.weight_scale.size(), "f16", t.out, groups.n_stored, sizeof(uint16_t));
  if (!t.weight_zero_point.empty())
    expect_bytes(t.name, "weight_zero_point", t.weight_zero_point.size(), "i32", t.out / per_word, groups.n_stored, sizeof(uint32_t));
  std::vector<int32_t> order = column_order(t.name + ".weight_g_idx", t.weight_g_idx, t.in, groups);

  PlanarWeights planar = allocate(t.out, t.in, t.bits, groups.unit);
  std::memcpy(planar.codes.data(), t.weight_packed.data(), planar.codes.size());  // words along `in`, lowest bits first
  const int middle = 1 << (t.bits - 1);
  const Words zeros(t.weight_zero_point, groups.n_stored);
  for (int o = 0; o < t.out; ++o)
    for (int g = 0; g < t.in / groups.unit; ++g)
      put_zero(planar, o, g,
               t.weight_zero_point.empty() ? middle : field(zeros.at(o / per_word, groups.stored_of(g)), o % per_word, t.bits));
  spread_scales(t.weight_scale, groups, planar);
  if (!order.empty()) reorder_columns(planar, order);
  planar.perm = std::move(order);
  return planar;
}

LinearSource planar_source(std::string name, std::vector<PlanarWeights> layers) {
  if (layers.empty()) fail("{}: no layer, expected at least one", name);
  const PlanarWeights& first = layers.front();
  bool one_order = true;
  for (const PlanarWeights& layer : layers) {
    if (layer.out != first.out || layer.in != first.in || layer.bits != first.bits || layer.group != first.group)
      fail("{}: found [{}, {}] of {} bits in groups of {} beside [{}, {}] of {} bits in groups of {}, expected equal layers", name,
           layer.out, layer.in, layer.bits, layer.group, first.out, first.in, first.bits, first.group);
    one_order = one_order && layer.perm == first.perm;
  }
  if (!one_order) return decoded(std::move(name), layers);
  const auto owned = std::make_shared<const std::vector<PlanarWeights>>(std::move(layers));
  LinearSource source{.name = std::move(name),
                      .format = owned->front().bits == 4 ? Format::int4_planar : Format::int8_planar,
                      .out = owned->front().out,
                      .in = owned->front().in,
                      .group = owned->front().group,
                      .perm = owned->front().perm};
  for (const PlanarWeights& layer : *owned) source.matrices.push_back({.data = layer.codes, .scales = layer.scales, .zeros = layer.zeros});
  source.keep_alive.push_back(owned);
  validate(source);
  return source;
}

}  // namespace cachalot
