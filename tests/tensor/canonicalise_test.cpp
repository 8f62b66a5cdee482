// AWQ and GPTQ words to planar form: hand-made words, random layers packed by the formats' own rules, and refusals.
#include "tensor/canonicalise.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "base/float_formats.h"
#include "support/support.h"
#include "tensor/pack_words.h"

namespace cachalot {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::span<const std::byte> as_bytes(const auto& values) { return std::as_bytes(std::span(values)); }
std::vector<int> ints(const std::vector<std::byte>& bytes) {
  std::vector<int> out;
  for (const std::byte b : bytes) out.push_back(static_cast<int>(b));
  return out;
}

// A layer by its meaning, which the packers below write in each format's words.
struct Layer {
  int out, in, bits, group;
  std::vector<int> codes;        // [out, in]
  std::vector<int> zeros;        // [in/group, out]
  std::vector<uint16_t> scales;  // f16 [in/group, out]
  std::vector<int32_t> g_idx;    // [in]

  Layer(int out_, int in_, int bits_, int group_, uint64_t seed) : out(out_), in(in_), bits(bits_), group(group_) {
    std::mt19937_64 engine(seed);
    codes.resize(static_cast<size_t>(out * in));
    zeros.resize(static_cast<size_t>(out * in / group));
    scales.resize(zeros.size());
    for (int& q : codes) q = static_cast<int>(engine() % (1u << bits));
    for (int& z : zeros) z = static_cast<int>(engine() % (1u << bits));
    for (uint16_t& s : scales) s = f32_to_f16(0.001f + 0.01f * static_cast<float>(engine() % 100));
    for (int k = 0; k < in; ++k) g_idx.push_back(k / group);
  }
  [[nodiscard]] int code(int o, int k) const { return codes[static_cast<size_t>(o * in + k)]; }
  [[nodiscard]] float value(int o, int k) const {
    const auto index = static_cast<size_t>(g_idx[static_cast<size_t>(k)] * out + o);
    return static_cast<float>(code(o, k) - zeros[index]) * f16_to_f32(scales[index]);
  }
};

constexpr int kAwqOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // nibble i holds this output

std::vector<uint32_t> awq_words(int rows, int out, const auto& value) {  // value(row, output)
  std::vector<uint32_t> words;
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < out / 8; ++c) {
      uint32_t word = 0;
      for (int i = 0; i < 8; ++i) word |= static_cast<uint32_t>(value(r, 8 * c + kAwqOrder[i])) << (4 * i);
      words.push_back(word);
    }
  return words;
}

struct GptqWords {
  std::vector<uint32_t> qweight, qzeros;
};
GptqWords gptq_words(const Layer& layer, int stored_zero_offset) {
  const int per_word = 32 / layer.bits;
  const uint32_t mask = (1u << layer.bits) - 1;
  GptqWords words;
  for (int r = 0; r < layer.in / per_word; ++r)
    for (int o = 0; o < layer.out; ++o) {
      uint32_t word = 0;
      for (int j = 0; j < per_word; ++j) word |= static_cast<uint32_t>(layer.code(o, r * per_word + j)) << (j * layer.bits);
      words.qweight.push_back(word);
    }
  for (int g = 0; g < layer.in / layer.group; ++g)
    for (int c = 0; c < layer.out / per_word; ++c) {
      uint32_t word = 0;
      for (int j = 0; j < per_word; ++j) {
        const int zero = layer.zeros[static_cast<size_t>(g * layer.out + c * per_word + j)] + stored_zero_offset;
        word |= (static_cast<uint32_t>(zero) & mask) << (j * layer.bits);
      }
      words.qzeros.push_back(word);
    }
  return words;
}
GptqTensors gptq_tensors(const Layer& layer, const GptqWords& words, GptqVersion version = GptqVersion::v2) {
  return {.name = "l",
          .out = layer.out,
          .in = layer.in,
          .bits = layer.bits,
          .group = layer.group,
          .version = version,
          .qweight = as_bytes(words.qweight),
          .qzeros = as_bytes(words.qzeros),
          .scales = as_bytes(layer.scales),
          .g_idx = as_bytes(layer.g_idx)};
}

void expect_values(const Layer& layer, PlanarWeights planar) {
  const auto perm = planar.perm;
  std::vector<PlanarWeights> layers;
  layers.push_back(std::move(planar));
  const LinearSource source = planar_source("layer", std::move(layers));
  std::vector<float> row(static_cast<size_t>(layer.in));
  for (int o = 0; o < layer.out; ++o) {
    dequant_row(source, 0, o, row.data());
    for (int k = 0; k < layer.in; ++k) {
      const int column = perm.empty() ? k : perm[static_cast<size_t>(k)];
      ASSERT_EQ(row[static_cast<size_t>(k)], layer.value(o, column)) << o << " " << k;
    }
  }
}

TEST(Awq, HandMadeWords) {
  // Eight inputs, eight outputs, two groups. Codes of input 0: output o has o + 1; of input 7: output o has 15 - o; zero elsewhere.
  const std::vector<uint32_t> qweight{0x86427531, 0, 0, 0, 0, 0, 0, 0x8ace9bdf};
  const std::vector<uint32_t> qzeros{0x75316420, 0x11111111};  // group 0: zero point o; group 1: all 1
  std::vector<uint16_t> scales(16, 0x3c00);
  scales[3] = 0x4000;   // group 0, output 3
  scales[15] = 0x3800;  // group 1, output 7
  const PlanarWeights planar = canonicalise(AwqTensors{
      .name = "l", .out = 8, .in = 8, .group = 4, .qweight = as_bytes(qweight), .qzeros = as_bytes(qzeros), .scales = as_bytes(scales)});
  ASSERT_EQ(planar.codes.size(), 32u);
  for (size_t o = 0; o < 8; ++o) {
    EXPECT_EQ(static_cast<size_t>(planar.codes[o * 4]), o + 1) << o;              // input 0 in the low nibble
    EXPECT_EQ(static_cast<size_t>(planar.codes[o * 4 + 3]), (15 - o) << 4) << o;  // input 7 in the high nibble
    EXPECT_EQ(static_cast<size_t>(planar.zeros[o * 2]), o);
    EXPECT_EQ(static_cast<size_t>(planar.zeros[o * 2 + 1]), 1u);
  }
  const auto* stored = reinterpret_cast<const uint16_t*>(planar.scales.data());
  EXPECT_EQ(stored[3 * 2], 0x4000);
  EXPECT_EQ(stored[7 * 2 + 1], 0x3800);
  EXPECT_TRUE(planar.perm.empty());
}

TEST(Awq, RandomLayersReadBack) {
  for (const auto& [out, in, group] : {std::tuple{16, 64, 32}, {8, 128, -1}, {24, 8, 8}}) {
    const Layer layer(out, in, 4, group == -1 ? in : group, 99);
    const auto qweight = awq_words(in, out, [&](int k, int o) { return layer.code(o, k); });
    const auto qzeros = awq_words(in / layer.group, out, [&](int g, int o) { return layer.zeros[static_cast<size_t>(g * layer.out + o)]; });
    expect_values(layer, canonicalise(AwqTensors{.name = "l",
                                                 .out = out,
                                                 .in = in,
                                                 .group = group,
                                                 .qweight = as_bytes(qweight),
                                                 .qzeros = as_bytes(qzeros),
                                                 .scales = as_bytes(layer.scales)}));
  }
}

TEST(Awq, RefusesWhatDoesNotFit) {
  const std::vector<uint32_t> qweight(8 * 2), qzeros(2 * 2);
  const std::vector<uint16_t> scales(2 * 16);
  const AwqTensors good{.name = "mlp.up",
                        .out = 16,
                        .in = 8,
                        .group = 4,
                        .qweight = as_bytes(qweight),
                        .qzeros = as_bytes(qzeros),
                        .scales = as_bytes(scales)};
  EXPECT_EQ(canonicalise(good).codes.size(), 64u);
  const auto error = [&](const auto& breakage) {
    AwqTensors bad = good;
    breakage(bad);
    return test::error_of([&] { canonicalise(bad); });
  };
  EXPECT_EQ(error([](AwqTensors& t) { t.qweight = t.qweight.first(60); }), "mlp.up.qweight: found 60 bytes, expected 64 of i32 [8, 2]");
  EXPECT_EQ(error([](AwqTensors& t) { t.scales = {}; }), "mlp.up.scales: found 0 bytes, expected 64 of f16 [2, 16]");
  EXPECT_EQ(error([](AwqTensors& t) { t.qzeros = t.qzeros.first(8); }), "mlp.up.qzeros: found 8 bytes, expected 16 of i32 [2, 2]");
  EXPECT_EQ(error([](AwqTensors& t) { t.group = 3; }), "mlp.up: group size 3, expected -1 or a divisor of 8 input columns");
  EXPECT_EQ(error([](AwqTensors& t) { t.group = 0; }), "mlp.up: group size 0, expected -1 or at most 8 input columns");
  EXPECT_EQ(error([](AwqTensors& t) { t.out = 12; }), "mlp.up: shape [12, 8], expected positive multiples of 8");
  EXPECT_EQ(error([](AwqTensors& t) { t.in = -8; }), "mlp.up: shape [16, -8], expected positive multiples of 8");
}

TEST(Awq, RefusesUnpackedZeroPoints) {  // P-74
  const std::vector<uint32_t> qweight(8 * 2), unpacked(2 * 16);
  const std::vector<uint16_t> scales(2 * 16);
  const AwqTensors tensors{
      .name = "l", .out = 16, .in = 8, .group = 4, .qweight = as_bytes(qweight), .qzeros = as_bytes(unpacked), .scales = as_bytes(scales)};
  EXPECT_EQ(test::error_of([&] { canonicalise(tensors); }),
            "l.qzeros: found 128 bytes, one element per zero point [2, 16]: unpacked zero points are not supported, expected i32 [2, 2]");
}

TEST(Gptq, HandMadeWordsOfFourBits) {
  // Output 0 has codes 1 to 8 along the inputs, output 7 has 15 down to 8.
  const std::vector<uint32_t> qweight{0x87654321, 0, 0, 0, 0, 0, 0, 0x89abcdef};
  const std::vector<uint32_t> qzeros{0xf7654320};
  const std::vector<uint16_t> scales(8, 0x3c00);
  GptqTensors tensors{.name = "l",
                      .out = 8,
                      .in = 8,
                      .bits = 4,
                      .group = -1,
                      .version = GptqVersion::v2,
                      .qweight = as_bytes(qweight),
                      .qzeros = as_bytes(qzeros),
                      .scales = as_bytes(scales),
                      .g_idx = {}};
  PlanarWeights planar = canonicalise(tensors);
  EXPECT_EQ(planar.group, 8);
  const auto codes = ints(planar.codes);
  EXPECT_THAT(std::vector(codes.begin(), codes.begin() + 4), ElementsAre(0x21, 0x43, 0x65, 0x87));
  EXPECT_THAT(std::vector(codes.end() - 4, codes.end()), ElementsAre(0xef, 0xcd, 0xab, 0x89));
  EXPECT_THAT(ints(planar.zeros), ElementsAre(0, 2, 3, 4, 5, 6, 7, 15));
  // v1 adds one and does not wrap: the stored 15 means 16.
  tensors.version = GptqVersion::v1;
  EXPECT_THAT(ints(canonicalise(tensors).zeros), ElementsAre(1, 3, 4, 5, 6, 7, 8, 16));
}

TEST(Gptq, HandMadeWordsOfEightBits) {
  const std::vector<uint32_t> qweight{0x04030201, 0, 0, 0xfffefdfc};  // in 4, out 4
  const std::vector<uint32_t> qzeros{0xfe807f00};
  const std::vector<uint16_t> scales{0x3c00, 0x4000, 0x4200, 0x4400};
  GptqTensors tensors{.name = "l",
                      .out = 4,
                      .in = 4,
                      .bits = 8,
                      .group = 4,
                      .version = GptqVersion::v1,
                      .qweight = as_bytes(qweight),
                      .qzeros = as_bytes(qzeros),
                      .scales = as_bytes(scales),
                      .g_idx = {}};
  const PlanarWeights planar = canonicalise(tensors);
  EXPECT_THAT(ints(planar.codes), ElementsAre(1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0xfc, 0xfd, 0xfe, 0xff));
  EXPECT_THAT(ints(planar.zeros), ElementsAre(1, 128, 129, 255));
  const std::vector<uint32_t> wrapped{0xff807f00};
  tensors.qzeros = as_bytes(wrapped);
  EXPECT_EQ(test::error_of([&] { canonicalise(tensors); }), "l.qzeros: found zero point 256 in group 0 of output 3, expected at most 255");
  tensors.version = GptqVersion::v2;
  EXPECT_THAT(ints(canonicalise(tensors).zeros), ElementsAre(0, 127, 128, 255));
}

TEST(Gptq, RandomLayersReadBackInBothVersions) {
  for (const int bits : {4, 8}) {
    for (const auto version : {GptqVersion::v1, GptqVersion::v2}) {
      Layer layer(16, 64, bits, 16, 1234);
      if (version == GptqVersion::v1)  // v1 holds 1 .. 2^bits; the last only fits u8 for 4 bits
        for (int& zero : layer.zeros) zero = bits == 4 ? zero + 1 : std::max(zero, 1);
      const GptqWords words = gptq_words(layer, version == GptqVersion::v1 ? -1 : 0);
      expect_values(layer, canonicalise(gptq_tensors(layer, words, version)));
    }
  }
}

TEST(Gptq, ActOrderSortsColumnsByGroup) {
  for (const int bits : {4, 8}) {
    Layer layer(8, 32, bits, 8, 77);
    std::shuffle(layer.g_idx.begin(), layer.g_idx.end(), std::mt19937_64(5));
    const GptqWords words = gptq_words(layer, 0);
    const PlanarWeights planar = canonicalise(gptq_tensors(layer, words));
    ASSERT_EQ(planar.perm.size(), 32u);
    for (size_t k = 0; k < 32; ++k) {
      EXPECT_EQ(layer.g_idx[static_cast<size_t>(planar.perm[k])], static_cast<int>(k) / 8) << k;
      if (k % 8 != 0) {
        EXPECT_LT(planar.perm[k - 1], planar.perm[k]);  // stable: within a group the original order stays
      }
    }
    expect_values(layer, planar);
  }
}

struct GptqCase {
  std::vector<uint32_t> qweight = std::vector<uint32_t>(1 * 16), qzeros = std::vector<uint32_t>(2 * 2);
  std::vector<uint16_t> scales = std::vector<uint16_t>(2 * 16);
  std::vector<int32_t> g_idx{0, 0, 0, 0, 1, 1, 1, 1};
  std::string error(const auto& breakage) {
    GptqTensors tensors{.name = "l", .out = 16, .in = 8, .bits = 4, .group = 4};
    tensors.qweight = as_bytes(qweight);
    tensors.qzeros = as_bytes(qzeros);
    tensors.scales = as_bytes(scales);
    tensors.g_idx = as_bytes(g_idx);
    breakage(tensors);
    return test::error_of([&] { canonicalise(tensors); });
  }
};

TEST(Gptq, RefusesWhatDoesNotFit) {
  GptqCase c;
  EXPECT_EQ(c.error([](GptqTensors& t) { t.bits = 3; }), "l: found 3 bits, expected 4 or 8");
  EXPECT_EQ(c.error([](GptqTensors& t) { t.bits = 0; }), "l: found 0 bits, expected 4 or 8");
  EXPECT_EQ(c.error([](GptqTensors& t) { t.qweight = t.qweight.first(32); }), "l.qweight: found 32 bytes, expected 64 of i32 [1, 16]");
  EXPECT_EQ(c.error([](GptqTensors& t) { t.scales = t.scales.first(32); }), "l.scales: found 32 bytes, expected 64 of f16 [2, 16]");
  EXPECT_EQ(c.error([](GptqTensors& t) { t.g_idx = t.g_idx.first(28); }), "l.g_idx: found 28 bytes, expected 32 of i32 [8]");
  EXPECT_EQ(c.error([](GptqTensors& t) { t.group = 16; }), "l: group size 16, expected -1 or at most 8 input columns");
  const std::vector<uint32_t> unpacked(2 * 16);
  EXPECT_THAT(c.error([&](GptqTensors& t) { t.qzeros = as_bytes(unpacked); }), HasSubstr("unpacked zero points are not supported"));
  EXPECT_THAT(c.error([&](GptqTensors& t) { t.qzeros = as_bytes(unpacked).first(32); }), HasSubstr("unpacked zero points"));
}

TEST(Gptq, RefusesBrokenGroupIndices) {
  GptqCase c;
  const auto nothing = [](GptqTensors&) {};
  c.g_idx[2] = 2;
  EXPECT_EQ(c.error(nothing), "l.g_idx: found group 2, expected 0 to 1");
  c.g_idx[2] = -1;
  EXPECT_EQ(c.error(nothing), "l.g_idx: found group -1, expected 0 to 1");
  c.g_idx[2] = 1;
  EXPECT_EQ(c.error(nothing), "l.g_idx: found 3 columns in group 0, expected 4");
}

// The last group has fewer columns: 20 = 8 + 8 + 4 here. All are cut into groups of 4.
TEST(Gptq, TheLastGroupMayBeShorter) {
  for (const bool ordered : {false, true}) {
    Layer whole(8, 24, 8, 8, 11);  // codes and scales of three groups, of which only 20 columns are used
    Layer layer = whole;
    layer.in = 20;
    layer.codes.clear();
    for (int o = 0; o < 8; ++o)
      for (int k = 0; k < 20; ++k) layer.codes.push_back(whole.code(o, k));
    layer.g_idx.resize(20);
    if (ordered) std::shuffle(layer.g_idx.begin(), layer.g_idx.end(), std::mt19937_64(3));
    GptqWords words = gptq_words(layer, 0);
    words.qzeros = gptq_words(whole, 0).qzeros;
    const PlanarWeights planar = canonicalise(gptq_tensors(layer, words));
    EXPECT_EQ(planar.group, 4);
    expect_values(layer, planar);
  }
}

// Columns as in GPTQ, but rows of words, scales by row, and zero points packed along the outputs.
TEST(PackQuantized, ReadsCodesScalesAndZeroPoints) {
  for (const int bits : {4, 8})
    for (const bool symmetric : {false, true}) {
      Layer layer(16, 64, bits, 16, 21);
      if (symmetric) std::fill(layer.zeros.begin(), layer.zeros.end(), 1 << (bits - 1));
      std::shuffle(layer.g_idx.begin(), layer.g_idx.end(), std::mt19937_64(9));
      const int n = 32 / bits;
      std::vector<uint32_t> codes, zeros;
      for (int o = 0; o < 16; ++o)
        for (int w = 0; w < 64 / n; ++w) {
          uint32_t word = 0;
          for (int j = 0; j < n; ++j) word |= static_cast<uint32_t>(layer.code(o, w * n + j)) << (j * bits);
          codes.push_back(word);
        }
      for (int r = 0; r < 16 / n; ++r)
        for (int g = 0; g < 4; ++g) {
          uint32_t word = 0;
          for (int j = 0; j < n; ++j) word |= static_cast<uint32_t>(layer.zeros[static_cast<size_t>(g * 16 + r * n + j)]) << (j * bits);
          zeros.push_back(word);
        }
      std::vector<uint16_t> scales;
      for (int o = 0; o < 16; ++o)
        for (int g = 0; g < 4; ++g) scales.push_back(layer.scales[static_cast<size_t>(g * 16 + o)]);
      PackQuantizedTensors tensors{.name = "l",
                                   .out = 16,
                                   .in = 64,
                                   .bits = bits,
                                   .group = 16,
                                   .weight_packed = as_bytes(codes),
                                   .weight_scale = as_bytes(scales),
                                   .weight_zero_point = as_bytes(zeros),
                                   .weight_g_idx = as_bytes(layer.g_idx)};
      if (symmetric) tensors.weight_zero_point = {};
      expect_values(layer, canonicalise(tensors));
      tensors.weight_scale = tensors.weight_scale.first(8);
      EXPECT_THAT(test::error_of([&] { canonicalise(tensors); }), HasSubstr("l.weight_scale: found 8 bytes, expected 128 of f16 [16, 4]"));
    }
}

// The packers of src give the words of the packers above.
TEST(PackWords, AreTheWordsOfTheFormats) {
  for (const int bits : {4, 8}) {
    Layer layer(16, 64, bits, 16, 31);
    for (int& zero : layer.zeros) zero = std::max(zero, 1);
    const GptqWords words = gptq_words(layer, 0), less_one = gptq_words(layer, -1);
    GptqTensors tensors = gptq_tensors(layer, words);
    tensors.g_idx = {};
    const LinearSource source = planar_source("l", {canonicalise(tensors)});
    const auto equal = [](const std::vector<std::byte>& found, const auto& values) {
      const auto wanted = as_bytes(values);
      return std::equal(found.begin(), found.end(), wanted.begin(), wanted.end());
    };
    const cachalot::GptqWords v1 = pack_gptq(source, 0, GptqVersion::v1), v2 = pack_gptq(source, 0, GptqVersion::v2);
    EXPECT_TRUE(equal(v1.qweight, words.qweight) && equal(v1.qzeros, less_one.qzeros) && equal(v1.scales, layer.scales));
    EXPECT_TRUE(equal(v2.qweight, words.qweight) && equal(v2.qzeros, words.qzeros) && equal(v2.g_idx, layer.g_idx));
    const PackQuantizedWords packed = pack_quantized(source, 0, false);
    expect_values(layer, canonicalise(PackQuantizedTensors{.name = "l",
                                                           .out = 16,
                                                           .in = 64,
                                                           .bits = bits,
                                                           .group = 16,
                                                           .weight_packed = packed.weight_packed,
                                                           .weight_scale = packed.weight_scale,
                                                           .weight_zero_point = packed.weight_zero_point,
                                                           .weight_g_idx = {}}));
    EXPECT_THAT(test::error_of([&] { pack_quantized(source, 0, true); }), HasSubstr("of symmetric weights"));
    if (bits == 8) {
      EXPECT_THAT(test::error_of([&] { pack_awq(source, 0); }), HasSubstr("found codes of 8 bits, expected 4 for AWQ"));
      continue;
    }
    const AwqWords awq = pack_awq(source, 0);
    EXPECT_TRUE(equal(awq.qweight, awq_words(64, 16, [&](int k, int o) { return layer.code(o, k); })));
    EXPECT_TRUE(equal(awq.qzeros, awq_words(4, 16, [&](int g, int o) { return layer.zeros[static_cast<size_t>(g * 16 + o)]; })));
  }
}

TEST(PackWords, RefuseZeroPointsThatHaveNoPlace) {
  PlanarWeights planar{.out = 8, .in = 8, .bits = 4, .group = 8};
  planar.codes.resize(32);
  planar.scales.resize(16);
  planar.zeros.assign(8, std::byte{16});  // as GPTQ v1 has them
  const LinearSource high = planar_source("l", {planar});
  EXPECT_NO_THROW(pack_gptq(high, 0, GptqVersion::v1));
  EXPECT_EQ(test::error_of([&] { pack_gptq(high, 0, GptqVersion::v2); }),
            "l: found the zero point 16 in group 0 of output 0, expected 0 to 15 for GPTQ v2");
  EXPECT_THAT(test::error_of([&] { pack_awq(high, 0); }), HasSubstr("expected 0 to 15 for AWQ"));
  planar.zeros.assign(8, std::byte{0});
  EXPECT_THAT(test::error_of([&] { pack_gptq(planar_source("l", {planar}), 0, GptqVersion::v1); }),
              HasSubstr("expected 1 to 16 for GPTQ v1"));
}

TEST(PlanarSource, StacksEqualLayersOnly) {
  const auto planar = [](int out, uint64_t seed, bool shuffled) {
    Layer layer(out, 32, 4, 8, seed);
    if (shuffled) std::shuffle(layer.g_idx.begin(), layer.g_idx.end(), std::mt19937_64(seed));
    const GptqWords words = gptq_words(layer, 0);
    return canonicalise(gptq_tensors(layer, words));
  };
  const LinearSource stack = planar_source("experts", {planar(8, 1, false), planar(8, 2, false)});
  EXPECT_EQ(stack.n_matrices(), 2);
  const Layer second(8, 32, 4, 8, 2);
  std::vector<float> row(32);
  dequant_row(stack, 1, 5, row.data());
  for (int k = 0; k < 32; ++k) EXPECT_EQ(row[static_cast<size_t>(k)], second.value(5, k));
  EXPECT_THAT(test::error_of([&] {
                planar_source("experts", {planar(8, 1, false), planar(16, 2, false)});
              }),
              HasSubstr("experts: found [16, 32] of 4 bits in groups of 8 beside [8, 32]"));
  const PlanarWeights ordered[2] = {planar(8, 1, true), planar(8, 2, true)};
  const LinearSource halves = planar_source("experts", {ordered[0], ordered[1]});
  EXPECT_EQ(halves.format, Format::f16);
  for (int m = 0; m < 2; ++m) {
    const LinearSource one = planar_source("expert", {ordered[m]});
    std::vector<float> by_input(32);
    for (int r = 0; r < 8; ++r) {
      dequant_row(halves, m, r, row.data());
      dequant_row_by_input(one, 0, r, by_input.data());
      for (size_t k = 0; k < 32; ++k) EXPECT_EQ(row[k], f16_to_f32(f32_to_f16(by_input[k])));
    }
  }
  EXPECT_EQ(test::error_of([&] { planar_source("experts", {}); }), "experts: no layer, expected at least one");
}

}  // namespace
}  // namespace cachalot
