// Products on AMX tiles: those of bytes equal the ones of registers to the bit, those in bf16 keep their bound. Skipped without AMX.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "cpu/features.h"
#include "cpu/pack.h"
#include "ops/random_weights.h"
#include "support/support.h"

namespace cachalot::cpu {
namespace {

using test::random_floats;
using test::random_source;

class Tiles : public testing::Test {
 protected:
  void SetUp() override {
    const IsaLevel& best = isa_levels().front();
    if (best.table->tiles.bytes[static_cast<int>(Codec::q4_0)] == nullptr || (best.needs & ~detect_features()) != 0)
      GTEST_SKIP() << "no AMX here: " << feature_names(detect_features());
    table_ = best.table;
  }
  const KernelTable* table_ = nullptr;
};

std::vector<Format> wide_formats() {
  return {Format::q4_0, Format::q4_1,   Format::q5_0,   Format::q5_1,  Format::q8_0,        Format::q4_k,       Format::q5_k,
          Format::q6_k, Format::iq4_nl, Format::iq4_xs, Format::mxfp4, Format::int4_planar, Format::int8_planar};
}

// Activations of some tokens, in every form, and room for the results.
struct Tokens {
  int n, cols, out, tile_rows = kTileTokenRows;
  std::vector<float> x, y;
  std::vector<const float*> rows;
  std::vector<ActivationChunk> chunks;
  std::vector<float> scales, sums;
  std::vector<QuantisedRow> quantised;
  std::vector<float*> results;
  std::vector<uint8_t> tiles;
  std::shared_ptr<std::byte> scratch;

  Tokens(const KernelTable& table, int n_tokens, int n_cols, int n_out)
      : n(n_tokens), cols(n_cols), out(n_out), x(random_floats(static_cast<size_t>(n * cols), 5)), y(static_cast<size_t>(n * out)) {
    const int n_chunks = cols / kChunk, groups = (n_chunks + kScaleChunks - 1) / kScaleChunks;
    chunks.resize(static_cast<size_t>(n * n_chunks));
    scales.resize(static_cast<size_t>(n * groups));
    for (int t = 0; t < n; ++t) {
      rows.push_back(x.data() + t * cols);
      results.push_back(y.data() + t * out);
      table.wide.quantise(rows.back(), cols, chunks.data() + t * n_chunks, scales.data() + t * groups);
      quantised.push_back({.chunks = chunks.data() + t * n_chunks, .scale = scales.data() + t * groups});
    }
    const int n_tiles = tiles_of(n);
    tiles.resize(static_cast<size_t>(n_tiles * n_chunks * kTileBytes));
    sums.resize(static_cast<size_t>(n_tiles * n_chunks * kTileTokenRows));
    scratch = map_huge(table.tiles.scratch_bytes(cols));
  }
  // gather(first token, tokens, tiles of theirs, sums of theirs) for each row of tiles.
  template <typename Gather>
  void lay_out(const Gather& gather) {
    const int n_chunks = cols / kChunk;
    for (int t = 0, tile = 0; t < n; t += tile_rows, ++tile)
      gather(t, std::min(tile_rows, n - t), tiles.data() + tile * n_chunks * kTileBytes, sums.data() + tile * n_chunks * kTileTokenRows);
  }
  void lay_out_bf16(const KernelTable& table) {
    tile_rows = even_tile_rows(n);
    lay_out([&](int first, int count, uint8_t* to, float*) { table.tiles.gather_bf16(rows.data() + first, count, cols, to); });
  }
  WideProduct product(const std::vector<float>& bias) {
    return {.x = quantised.data(),
            .y = results.data(),
            .y_col = 0,
            .n_tokens = n,
            .bias = bias.data(),
            .beta = 0.5f,
            .tiles = tiles.data(),
            .tile_rows = tile_rows,
            .sums = sums.data(),
            .scratch = reinterpret_cast<uint8_t*>(scratch.get())};
  }
};

TEST_F(Tiles, ByteProductsAreThoseOfRegisters) {
  HugeMemory memory;
  ThreadPool pool(1);
  for (const Format format : wide_formats()) {
    constexpr int kOut = 75;
    const LinearSource s = random_source({.format = format, .out = kOut, .in = test::rounded_to_blocks(format, 1280)}, 3);
    const auto packed = pack_weights({&s, 1}, memory, pool, &table_->wide);
    const Segment& segment = packed->segments[0];
    const auto codec = static_cast<int>(segment.codec);
    const WideRows weights = packed->wide_rows(segment, 0, 0, kOut);
    const std::vector<float> bias = random_floats(kOut, 8);
    for (const int n_tokens : {1, 8, 9, 16, 23, 40, 700}) {
      Tokens on_tiles(*table_, n_tokens, s.in, kOut), in_registers(*table_, n_tokens, s.in, kOut);
      on_tiles.lay_out([&](int first, int n, uint8_t* tiles, float* sums) {
        table_->tiles.gather_bytes(on_tiles.quantised.data() + first, n, s.in, tiles, sums);
      });
      table_->tiles.bytes[codec](weights, on_tiles.product(bias));
      table_->wide.product[codec](weights, in_registers.product(bias));
      ASSERT_EQ(std::memcmp(on_tiles.y.data(), in_registers.y.data(), on_tiles.y.size() * sizeof(float)), 0)
          << info(format).name << " T" << n_tokens;
    }
  }
}

// |found - exact| for weights and activations that were each rounded to 8 bits; sums of several hundred products.
void expect_bf16(const LinearSource& s, const Tokens& tokens, const std::vector<float>& bias) {
  std::vector<float> w(static_cast<size_t>(s.in));
  for (int r = 0; r < s.out; ++r) {
    dequant_row(s, 0, r, w.data());
    for (int t = 0; t < tokens.n; ++t) {
      double sum = static_cast<double>(bias[static_cast<size_t>(r)]), squares = 0.0;
      for (size_t k = 0; k < w.size(); ++k) {
        const double term = static_cast<double>(w[k]) * static_cast<double>(tokens.rows[static_cast<size_t>(t)][k]);
        sum += term;
        squares += term * term;
      }
      ASSERT_NEAR(tokens.results[static_cast<size_t>(t)][r], sum, 0.012 * std::sqrt(squares) + 1e-6)
          << info(s.format).name << " row " << r << " token " << t << " of " << tokens.n;
    }
  }
}

TEST_F(Tiles, KeptExponentsChangeNothing) {
  HugeMemory memory;
  ThreadPool pool(1);
  std::vector<Format> formats = wide_formats();
  formats.push_back(Format::fp8_block);
  for (const Format format : formats) {
    constexpr int kOut = 75, kTokens = 40;
    const LinearSource s = random_source({.format = format, .out = kOut, .in = test::rounded_to_blocks(format, 1280)}, 3);
    const auto packed = pack_weights({&s, 1}, memory, pool, &table_->wide);
    const Segment& segment = packed->segments[0];
    WideRows weights = packed->wide_rows(segment, 0, 0, kOut);
    ASSERT_NE(weights.exponents, nullptr);
    EXPECT_EQ(weights.exponents[0], 0) << "known before any product";
    const std::vector<float> bias = random_floats(kOut, 8);
    Tokens found(*table_, kTokens, s.in, kOut), kept(*table_, kTokens, s.in, kOut), not_kept(*table_, kTokens, s.in, kOut);
    const auto multiply = [&](Tokens& tokens) {
      tokens.lay_out_bf16(*table_);
      table_->tiles.bf16[static_cast<int>(segment.codec)](weights, tokens.product(bias));
    };
    multiply(found);
    EXPECT_NE(weights.exponents[0], 0);
    multiply(kept);
    weights.exponents = nullptr;
    multiply(not_kept);
    ASSERT_EQ(std::memcmp(kept.y.data(), found.y.data(), found.y.size() * sizeof(float)), 0) << info(format).name;
    ASSERT_EQ(std::memcmp(not_kept.y.data(), found.y.data(), found.y.size() * sizeof(float)), 0) << info(format).name;
  }
}

TEST_F(Tiles, Bf16ProductsKeepTheirBound) {
  HugeMemory memory;
  ThreadPool pool(1);
  std::vector<Format> formats = wide_formats();
  for (const Format format : {Format::f16, Format::bf16, Format::fp8_block}) formats.push_back(format);
  for (const Format format : formats) {
    for (const int columns : {32, 1280}) {
      constexpr int kOut = 75;
      const LinearSource s = random_source({.format = format, .out = kOut, .in = test::rounded_to_blocks(format, columns)}, 3);
      const auto packed = pack_weights({&s, 1}, memory, pool, &table_->wide);
      const Segment& segment = packed->segments[0];
      ASSERT_TRUE(segment.wide) << info(format).name;
      const std::vector<float> bias = random_floats(kOut, 8);
      for (const int n_tokens : {9, 16, 52, 58, 135, 210}) {
        Tokens tokens(*table_, n_tokens, s.in, kOut);
        tokens.lay_out_bf16(*table_);
        table_->tiles.bf16[static_cast<int>(segment.codec)](packed->wide_rows(segment, 0, 0, kOut), tokens.product(bias));
        expect_bf16(s, tokens, bias);
      }
    }
  }
}

// The next product's weights are the identity.
TEST_F(Tiles, GatedProductsAreRowsOfTheNextTiles) {
  constexpr int kIn = 256, kInner = 64;
  HugeMemory memory;
  ThreadPool pool(1);
  std::vector<float> identity(size_t{kInner} * kInner);
  for (size_t i = 0; i < kInner; ++i) identity[i * (kInner + 1)] = 1.0f;
  const LinearSource sources[] = {random_source({.format = Format::q8_0, .out = kInner, .in = kIn}, 3),
                                  random_source({.format = Format::q8_0, .out = kInner, .in = kIn}, 4),
                                  make_linear_source("identity", Format::bf16, identity, 1, kInner, kInner)};
  std::vector<std::shared_ptr<const CpuPacked>> packed;
  for (const LinearSource& s : sources) packed.push_back(pack_weights({&s, 1}, memory, pool, &table_->wide));
  const auto rows = [&](size_t i) { return packed[i]->wide_rows(packed[i]->segments[0], 0, 0, kInner); };
  const std::vector<float> no_bias(kInner);
  for (const int n_tokens : {9, 52}) {
    Tokens x(*table_, n_tokens, kIn, kInner), h(*table_, n_tokens, kInner, kInner);
    x.lay_out_bf16(*table_);
    h.tile_rows = x.tile_rows;
    table_->tiles.swiglu[static_cast<int>(Codec::q8_0)](rows(0), rows(1), x.product(no_bias), h.tiles.data(), kInner / kChunk);
    table_->tiles.bf16[static_cast<int>(Codec::bf16)](rows(2), h.product(no_bias));
    for (int r = 0; r < kInner; ++r) {
      for (int t = 0; t < n_tokens; ++t) {
        double sum[2] = {}, error[2] = {};  // of gate and up
        for (size_t m = 0; m < 2; ++m) {
          std::vector<float> w(kIn);
          dequant_row(sources[m], 0, r, w.data());
          for (size_t k = 0; k < kIn; ++k) {
            const double term = static_cast<double>(w[k]) * static_cast<double>(x.rows[static_cast<size_t>(t)][k]);
            sum[m] += term;
            error[m] += term * term;
          }
          error[m] = 0.012 * std::sqrt(error[m]);
        }
        const double gate = sum[0] / (1.0 + std::exp(-sum[0])), expected = gate * sum[1];
        const double bound = 1.1 * error[0] * std::abs(sum[1]) + std::abs(gate) * error[1] + 0.005 * std::abs(expected) + 1e-5;
        ASSERT_NEAR(h.results[static_cast<size_t>(t)][r], expected, bound) << "row " << r << " token " << t << " of " << n_tokens;
      }
    }
  }
}

TEST_F(Tiles, Bf16ProductsOfDecodedRowsKeepTheirBound) {
  for (const int out : {1, 16, 37, 64}) {
    const LinearSource s = random_source({.format = Format::f32, .out = out, .in = 1280}, 3);
    std::vector<float> panel(static_cast<size_t>(out * s.in));
    for (int r = 0; r < out; ++r) dequant_row(s, 0, r, panel.data() + r * s.in);
    const std::vector<float> bias = random_floats(static_cast<size_t>(out), 8);
    for (const int n_tokens : {9, 16, 52}) {
      Tokens tokens(*table_, n_tokens, s.in, out);
      tokens.lay_out(
          [&](int first, int n, uint8_t* tiles, float*) { table_->tiles.gather_pairs(tokens.rows.data() + first, n, s.in, tiles); });
      table_->tiles.gemm_bf16({.data = panel.data(), .stride = 4 * s.in, .n_rows = out, .n_cols = s.in}, tokens.product(bias));
      expect_bf16(s, tokens, bias);
    }
  }
}

}  // namespace
}  // namespace cachalot::cpu
