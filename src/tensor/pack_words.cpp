// Planar codes to words: eight or four unsigned fields of 32 bits, the first in the lowest bits except in AWQ's order.
#include "tensor/pack_words.h"

#include <cstring>

#include "base/check.h"
#include "base/error.h"
#include "tensor/dequant.h"

namespace cachalot {
namespace {

// Nibble i of an AWQ word is output kAwqOutput[i].
constexpr int kAwqOutput[8] = {0, 2, 4, 6, 1, 3, 5, 7};

class Planar {
 public:
  Planar(const LinearSource& source, int matrix)
      : source_(source), weight_(source.matrices.at(static_cast<size_t>(matrix))), n_groups_(source.in / source.group) {
    CACHALOT_CHECK(fits_words(source), "{}: {} [{}, {}]", source.name, info(source.format).name, source.out, source.in);
  }
  [[nodiscard]] int bits() const { return source_.format == Format::int4_planar ? 4 : 8; }
  [[nodiscard]] int per_word() const { return 32 / bits(); }
  [[nodiscard]] int n_groups() const { return n_groups_; }
  [[nodiscard]] uint32_t code(int o, int k) const {
    const size_t at = static_cast<size_t>(o) * static_cast<size_t>(source_.in) + static_cast<size_t>(k);
    if (bits() == 8) return std::to_integer<uint32_t>(weight_.data[at]);
    return std::to_integer<uint32_t>(weight_.data[at / 2] >> (4 * (at % 2))) & 15;
  }
  [[nodiscard]] int zero(int o, int g) const { return std::to_integer<int>(weight_.zeros[group(o, g)]); }
  [[nodiscard]] const std::byte* scale(int o, int g) const { return &weight_.scales[group(o, g) * sizeof(uint16_t)]; }
  [[nodiscard]] std::span<const std::byte> codes() const { return weight_.data; }
  [[nodiscard]] std::span<const std::byte> scales() const { return weight_.scales; }

  // The zero point less `offset`, which `low` to `high` hold.
  [[nodiscard]] uint32_t stored_zero(int o, int g, int offset, const char* what) const {
    const int stored = zero(o, g) - offset, high = (1 << bits()) - 1;
    if (stored < 0 || stored > high)
      fail("{}: found the zero point {} in group {} of output {}, expected {} to {} for {}", source_.name, zero(o, g), g, o, offset,
           high + offset, what);
    return static_cast<uint32_t>(stored);
  }
  // f16 [n_groups, out].
  [[nodiscard]] std::vector<std::byte> transposed_scales() const {
    std::vector<std::byte> out(weight_.scales.size());
    std::byte* to = out.data();
    for (int g = 0; g < n_groups_; ++g)
      for (int o = 0; o < source_.out; ++o, to += sizeof(uint16_t)) std::memcpy(to, scale(o, g), sizeof(uint16_t));
    return out;
  }

 private:
  [[nodiscard]] size_t group(int o, int g) const {
    return static_cast<size_t>(o) * static_cast<size_t>(n_groups_) + static_cast<size_t>(g);
  }

  const LinearSource& source_;
  const WeightBytes& weight_;
  int n_groups_;
};

// i32 [rows, cols] whose field j (of n fields of `bits`) of word (r, c) is value(r, c, j).
template <typename F>
std::vector<std::byte> words(int rows, int cols, int n, int bits, F&& value) {
  std::vector<std::byte> out(static_cast<size_t>(rows) * static_cast<size_t>(cols) * sizeof(uint32_t));
  std::byte* to = out.data();
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < cols; ++c, to += sizeof(uint32_t)) {
      uint32_t word = 0;
      for (int j = 0; j < n; ++j) word |= value(r, c, j) << (j * bits);
      store(to, word);
    }
  return out;
}

}  // namespace

bool fits_words(const LinearSource& source) {
  if (source.format != Format::int4_planar && source.format != Format::int8_planar) return false;
  const int per_word = source.format == Format::int4_planar ? 8 : 4;
  return source.out % per_word == 0 && source.in % per_word == 0 && source.perm.empty();
}

AwqWords pack_awq(const LinearSource& source, int matrix) {
  const Planar planar(source, matrix);
  if (planar.bits() != 4) fail("{}: found codes of 8 bits, expected 4 for AWQ", source.name);
  const int n_words = source.out / 8;
  return {.qweight = words(source.in, n_words, 8, 4, [&](int k, int c, int j) { return planar.code(8 * c + kAwqOutput[j], k); }),
          .qzeros = words(planar.n_groups(), n_words, 8, 4,
                          [&](int g, int c, int j) { return planar.stored_zero(8 * c + kAwqOutput[j], g, 0, "AWQ"); }),
          .scales = planar.transposed_scales()};
}

GptqWords pack_gptq(const LinearSource& source, int matrix, GptqVersion version) {
  const Planar planar(source, matrix);
  const int n = planar.per_word(), bits = planar.bits(), offset = version == GptqVersion::v1 ? 1 : 0;
  const char* const what = version == GptqVersion::v1 ? "GPTQ v1" : "GPTQ v2";
  std::vector<std::byte> g_idx(static_cast<size_t>(source.in) * sizeof(int32_t));
  for (int k = 0; k < source.in; ++k) store(&g_idx[static_cast<size_t>(k) * sizeof(int32_t)], static_cast<uint32_t>(k / source.group));
  return {.qweight = words(source.in / n, source.out, n, bits, [&](int r, int o, int j) { return planar.code(o, r * n + j); }),
          .qzeros = words(planar.n_groups(), source.out / n, n, bits,
                          [&](int g, int c, int j) { return planar.stored_zero(c * n + j, g, offset, what); }),
          .scales = planar.transposed_scales(),
          .g_idx = std::move(g_idx)};
}

PackQuantizedWords pack_quantized(const LinearSource& source, int matrix, bool symmetric) {
  const Planar planar(source, matrix);
  const int n = planar.per_word(), bits = planar.bits(), middle = 1 << (bits - 1);
  PackQuantizedWords out;
  out.weight_packed.assign(planar.codes().begin(), planar.codes().end());  // words along `in`, lowest bits first: as they are
  out.weight_scale.assign(planar.scales().begin(), planar.scales().end());
  if (!symmetric) {
    out.weight_zero_point = words(source.out / n, planar.n_groups(), n, bits,
                                  [&](int r, int g, int j) { return planar.stored_zero(r * n + j, g, 0, "compressed-tensors"); });
    return out;
  }
  for (int o = 0; o < source.out; ++o)
    for (int g = 0; g < planar.n_groups(); ++g)
      if (planar.zero(o, g) != middle)
        fail("{}: found the zero point {} in group {} of output {}, expected {} of symmetric weights", source.name, planar.zero(o, g), g, o,
             middle);
  return out;
}

}  // namespace cachalot
