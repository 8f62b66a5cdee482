// CpuOps in packed files: images of every format give the same products, and no changed description leads outside its buffers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "base/error.h"
#include "base/hash.h"
#include "cpu/cpu_ops.h"
#include "cpu/pack.h"
#include "ops/case_support.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

struct Image {
  std::vector<std::byte> description;
  std::vector<std::vector<std::byte>> buffers;

  [[nodiscard]] std::vector<size_t> sizes() const {
    std::vector<size_t> out;
    for (const auto& b : buffers) out.push_back(b.size());
    return out;
  }
  [[nodiscard]] Linear load(Ops& ops) const {
    return ops.from_image(description, sizes(), [&](size_t i, std::span<std::byte> memory) {
      ASSERT_EQ(memory.size(), buffers[i].size());
      std::memcpy(memory.data(), buffers[i].data(), memory.size());
    });
  }
};
Image image_of(const Ops& ops, const Linear& w) {
  const PackedImage image = ops.packed_image(w);
  Image out{image.description, {}};
  for (const auto& b : image.buffers) out.buffers.emplace_back(b.begin(), b.end());
  return out;
}

std::vector<float> product(Ops& ops, const Linear& w, int matrix) {
  CaseBuilder builder(ops, DType::f32, "packed image");
  const auto x = builder.activations(3, w.in), y = builder.activations(3, w.out, 0.0f);
  const CaseInstance keep = builder.finish({});
  ops.linear(x->view(), w.matrix(matrix), y->view());
  return y->values();
}

// Shapes whose rows do not fill their groups.
WeightShape shape_of(Format format) {
  WeightShape shape{.format = format, .out = 37, .in = rounded_to_blocks(format, 300), .n_matrices = 2};
  if (format == Format::int4_planar || format == Format::int8_planar) shape.in = 256;
  return shape;
}

TEST(PackedImage, OfEveryFormatGivesTheSameBits) {
  const auto ops = make_cpu_ops({.n_threads = 2});
  for (const Format format : all_formats()) {
    SCOPED_TRACE(format_name(format));
    const LinearSource source = random_source(shape_of(format), 5);
    const Linear w = ops->pack({&source, 1});
    const Linear again = image_of(*ops, w).load(*ops);
    EXPECT_EQ(again.packed->bytes(), w.packed->bytes());
    EXPECT_EQ(again.out, w.out);
    EXPECT_EQ(again.in, w.in);
    for (int m = 0; m < 2; ++m) EXPECT_EQ(product(*ops, w, m), product(*ops, again, m));
  }
}

// Packed files of an older build must not be taken for those of this one.
TEST(PackedImage, ItsBytesBelongToTheNumberOfTheLayout) {
  struct Known {
    int layout;
    uint64_t rows, wide;
  };
  constexpr Known kKnown{1, 0xf1017cd9e58fe317, 0x9ce64e0605a70168};
  const auto hash_of = [](Ops& ops) {
    Xxh3 hash;
    for (const Format format : all_formats()) {
      const LinearSource source = random_source(shape_of(format), 5);
      const Image image = image_of(ops, ops.pack({&source, 1}));
      hash.add(image.description);
      for (const auto& b : image.buffers) hash.add(b);
    }
    return hash.value();
  };
  const auto rows = make_cpu_ops({.n_threads = 1, .f32_products = true}), wide = make_cpu_ops({.n_threads = 1});
  EXPECT_EQ(cpu::kPackedLayout, kKnown.layout);
  EXPECT_EQ(hash_of(*rows), kKnown.rows) << "the packed form has changed: raise kPackedLayout, then put layout and hash here";
  if (wide->packed_layout() == rows->packed_layout()) GTEST_SKIP() << "no wide form on this machine";
  EXPECT_EQ(hash_of(*wide), kKnown.wide) << "the packed form has changed: raise kPackedLayout, then put layout and hash here";
}

TEST(PackedImage, KeepsSegmentsBiasAndColumnOrder) {
  const auto ops = make_cpu_ops({.n_threads = 1});
  const WeightShape shapes[] = {{.format = Format::q4_k, .out = 32, .in = 256, .with_bias = true},
                                {.format = Format::int4_planar, .out = 20, .in = 256, .permuted = true},
                                {.format = Format::bf16, .out = 5, .in = 256}};
  std::vector<LinearSource> sources;
  for (const WeightShape& shape : shapes) sources.push_back(random_source(shape, 9));
  const Linear w = ops->pack(sources);
  EXPECT_EQ(product(*ops, w, 0), product(*ops, image_of(*ops, w).load(*ops), 0));
}

TEST(PackedImage, ChangedDescriptionsAreRefusedOrHarmless) {
  const auto ops = make_cpu_ops({.n_threads = 1});
  std::mt19937 engine(3);
  int refused = 0;
  for (const Format format : {Format::q4_k, Format::int4_planar, Format::fp8_block, Format::bf16}) {
    const LinearSource source = random_source(shape_of(format), 5);
    const Image good = image_of(*ops, ops->pack({&source, 1}));
    for (int i = 0; i < 300; ++i) {
      Image bad = good;
      if (i % 3 == 0) {
        bad.description.resize(engine() % bad.description.size());
      } else {
        // Mostly in the numbers at its begin.
        const size_t at = engine() % std::min<size_t>(bad.description.size(), i % 3 == 1 ? 64 : 1 << 20);
        bad.description[at] ^= static_cast<std::byte>(1u << (engine() % 8));
      }
      try {
        const Linear w = bad.load(*ops);
        product(*ops, w, 0);
      } catch (const Error&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 600);
}

TEST(PackedImage, RefusalsNameWhatIsWrong) {
  const auto ops = make_cpu_ops({.n_threads = 1});
  const LinearSource source = random_source({.format = Format::q8_0, .out = 16, .in = 64}, 1);
  const Image good = image_of(*ops, ops->pack({&source, 1}));
  Image bad = good;
  bad.buffers[0].pop_back();
  EXPECT_THAT(error_of([&] { static_cast<void>(bad.load(*ops)); }), ::testing::HasSubstr("a buffer of"));
  bad = good;
  bad.buffers.emplace_back();
  EXPECT_THAT(error_of([&] { static_cast<void>(bad.load(*ops)); }), ::testing::HasSubstr("2 buffers, expected 1"));
  bad = good;
  bad.description.emplace_back();
  EXPECT_THAT(error_of([&] { static_cast<void>(bad.load(*ops)); }), ::testing::HasSubstr("behind"));
  EXPECT_THAT(make_ref_ops()->packed_layout(), "");
  EXPECT_THAT(error_of([&] { static_cast<void>(bad.load(*make_ref_ops())); }), ::testing::HasSubstr("ref"));
}

}  // namespace
}  // namespace cachalot::test
