// GGUF: written files are read back whole, in every format and metadata type; the typed getters; oddities that are allowed.
#include "io/gguf.h"

#include <gmock/gmock.h>

#include <fstream>

#include "byte_builder.h"
#include "io/gguf_writer.h"

namespace cachalot {
namespace {

using namespace test;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::shared_ptr<const GgufFile> read(const std::string& bytes) { return GgufFile::from_bytes(std::as_bytes(std::span(bytes)), "memory"); }

std::vector<std::byte> random_bytes(size_t n, uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::vector<std::byte> out(n);
  for (auto& byte : out) byte = static_cast<std::byte>(engine());
  return out;
}

TEST(GgufWriter, EveryFormatIsReadBack) {
  const TempDir dir;
  const auto path = dir.path() / "all.gguf";
  std::vector<std::pair<Format, std::vector<std::byte>>> written;
  {
    GgufWriter writer(path);
    writer.set_string("general.architecture", "test");
    for (int i = 0; i < kNumFormats; ++i) {
      const auto format = static_cast<Format>(i);
      if (info(format).gguf_type < 0) continue;
      // 3 rows of 256: an odd number of blocks for most formats, so that padding is needed.
      writer.declare(fmt::format("blk.{}.w", i), format, {3, 256});
      written.emplace_back(format, random_bytes(3 * row_bytes(format, 256), static_cast<uint64_t>(i)));
    }
    for (const auto& [format, bytes] : written) {
      writer.write(std::span(bytes).first(bytes.size() / 3));
      writer.write(std::span(bytes).subspan(bytes.size() / 3));
    }
    EXPECT_FALSE(std::filesystem::exists(path));
    writer.commit();
  }
  const auto file = GgufFile::open(path);
  ASSERT_EQ(file->tensors().size(), written.size());
  EXPECT_EQ(written.size(), 16U);
  for (size_t i = 0; i < written.size(); ++i) {
    const TensorInfo& tensor = file->tensors()[i];
    const auto& [format, bytes] = written[i];
    EXPECT_EQ(tensor.format, format);
    EXPECT_THAT(tensor.shape, ElementsAre(3, 256));
    EXPECT_EQ(tensor.dtype, gguf_type_name(info(format).gguf_type));
    ASSERT_EQ(tensor.data.size(), bytes.size());
    EXPECT_EQ(std::memcmp(tensor.data.data(), bytes.data(), bytes.size()), 0) << info(format).name;
    EXPECT_EQ((tensor.data.data() - file->parts()[0]->bytes().data()) % 32, 0);
    EXPECT_EQ(tensor.file, path.string());
  }
}

TEST(GgufWriter, EncodedValuesAreReadBack) {
  const TempDir dir;
  const auto path = dir.path() / "values.gguf";
  const auto values = random_floats(4 * 64, 7);
  const std::vector<std::pair<Format, float>> formats = {
      {Format::f32, 0.0f}, {Format::f16, 2e-3f}, {Format::bf16, 2e-2f}, {Format::q8_0, 2e-2f}};
  GgufWriter writer(path);
  for (const auto& [format, tolerance] : formats) writer.declare(std::string(info(format).name), format, {4, 64});
  for (const auto& [format, tolerance] : formats) {
    std::vector<std::byte> row(row_bytes(format, 64));
    for (int r = 0; r < 4; ++r) {
      quantize_row(format, values.data() + r * 64, 64, row.data());
      writer.write(row);
    }
  }
  writer.commit();
  const auto file = GgufFile::open(path);
  for (size_t t = 0; t < formats.size(); ++t) {
    std::vector<float> decoded(values.size());
    for (size_t r = 0; r < 4; ++r) {
      const auto row = file->tensors()[t].data.subspan(r * row_bytes(formats[t].first, 64));
      dequant_row(formats[t].first, row.data(), 64, decoded.data() + r * 64);
    }
    for (size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(decoded[i], values[i], formats[t].second) << info(formats[t].first).name;
  }
}

TEST(GgufWriter, EveryMetadataTypeIsReadBack) {
  const TempDir dir;
  const auto path = dir.path() / "keys.gguf";
  const auto integers = [](GgufType element, std::vector<int64_t> values) {
    return GgufValue{GgufType::array, GgufArray{element, std::move(values)}};
  };
  const std::vector<std::pair<std::string, GgufValue>> keys = {
      {"u8", {GgufType::u8, int64_t{255}}},
      {"i8", {GgufType::i8, int64_t{-128}}},
      {"u16", {GgufType::u16, int64_t{65'535}}},
      {"i16", {GgufType::i16, int64_t{-32'768}}},
      {"u32", {GgufType::u32, int64_t{4'294'967'295}}},
      {"i32", {GgufType::i32, int64_t{INT32_MIN}}},
      {"u64", {GgufType::u64, INT64_MAX}},
      {"i64", {GgufType::i64, INT64_MIN}},
      {"f32", {GgufType::f32, 0.1f}},
      {"f64", {GgufType::f64, 0.1}},
      {"bool", {GgufType::boolean, true}},
      {"string", {GgufType::string, std::string("a\0b é", 6)}},
      {"u8s", integers(GgufType::u8, {0, 200})},
      {"i8s", integers(GgufType::i8, {-1, 1})},
      {"u16s", integers(GgufType::u16, {40'000})},
      {"i16s", integers(GgufType::i16, {-4, 4})},
      {"u32s", integers(GgufType::u32, {4'000'000'000})},
      {"i32s", integers(GgufType::i32, {-4, 4, 0})},
      {"u64s", integers(GgufType::u64, {INT64_MAX})},
      {"i64s", integers(GgufType::i64, {INT64_MIN, 3})},
      {"bools", integers(GgufType::boolean, {1, 0, 1})},
      {"f32s", {GgufType::array, GgufArray{GgufType::f32, std::vector<double>{0.5, -2.0}}}},
      {"f64s", {GgufType::array, GgufArray{GgufType::f64, std::vector<double>{0.1}}}},
      {"strings",
       {GgufType::array, GgufArray{GgufType::string, std::vector<std::string>{"", "long enough to leave the small buffer", "x"}}}},
      {"empty", {GgufType::array, GgufArray{GgufType::string, std::vector<std::string>{}}}},
  };
  GgufWriter writer(path);
  for (const auto& [key, value] : keys) writer.set(key, value);
  writer.set("u8", {GgufType::u8, int64_t{7}});  // replaces
  writer.commit();
  const auto file = GgufFile::open(path);
  ASSERT_EQ(file->metadata().size(), keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto& [key, value] = file->metadata()[i];
    EXPECT_EQ(key, keys[i].first);
    EXPECT_EQ(value.type, keys[i].second.type) << key;
    if (key == "u8") {
      EXPECT_EQ(std::get<int64_t>(value.value), 7);
    } else if (value.type == GgufType::array) {
      EXPECT_EQ(std::get<GgufArray>(value.value).element, std::get<GgufArray>(keys[i].second.value).element) << key;
      EXPECT_EQ(std::get<GgufArray>(value.value).values, std::get<GgufArray>(keys[i].second.value).values) << key;
    } else if (value.type == GgufType::f32) {
      EXPECT_EQ(std::get<double>(value.value), static_cast<double>(0.1f));
    } else {
      EXPECT_TRUE((value.value.index() == keys[i].second.value.index())) << key;
      if (value.value.index() == 0) {
        EXPECT_EQ(std::get<int64_t>(value.value), std::get<int64_t>(keys[i].second.value)) << key;
      }
      if (value.value.index() == 3) {
        EXPECT_EQ(std::get<std::string>(value.value), std::get<std::string>(keys[i].second.value)) << key;
      }
    }
  }
  EXPECT_EQ(file->number("f64"), 0.1);
  EXPECT_EQ(file->boolean("bool"), true);
}

TEST(GgufWriter, LeavesNothingWhenItIsNotFinished) {
  const TempDir dir;
  {
    GgufWriter writer(dir.path() / "half.gguf");
    writer.declare("w", Format::f32, {8});
    writer.write(random_bytes(16, 1));
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(GgufWriter, RefusesWhatNoReaderWouldTake) {
  const TempDir dir;
  GgufWriter writer(dir.path() / "out.gguf");
  EXPECT_THAT(error_of([&] { writer.declare(std::string(64, 'n'), Format::f32, {8}); }),
              AllOf(HasSubstr("out.gguf"), HasSubstr("a name of 64 bytes")));
  EXPECT_THAT(error_of([&] {
                writer.declare("w", Format::q4_k, {2, 128});
              }),
              AllOf(HasSubstr("\"w\""), HasSubstr("rows of 128 elements, expected a multiple of 256")));
  EXPECT_THAT(error_of([&] { writer.declare("w", Format::f32, {}); }), HasSubstr("shape: found []"));
  EXPECT_THAT(error_of([&] { writer.declare("w", Format::f32, {2, 0}); }), HasSubstr("shape: found [2, 0]"));
  writer.declare("w", Format::f32, {8});
  writer.declare("w", Format::f32, {8});
  EXPECT_THAT(error_of([&] { writer.write(random_bytes(32, 1)); }), HasSubstr("tensor \"w\" appears twice"));
  EXPECT_THAT(error_of([&] { GgufWriter(dir.path() / "absent" / "out.gguf"); }), HasSubstr("absent/out.gguf"));
}

TEST(GgufFile, ReadsAFileBuiltByHand) {
  const std::string bytes = sound_gguf().build();
  const auto file = read(bytes);
  EXPECT_EQ(file->string("general.architecture"), "llama");
  EXPECT_THAT(*file->strings("tokenizer.ggml.tokens"), ElementsAre("a", "b"));
  EXPECT_THAT(*file->numbers("tokenizer.ggml.scores"), ElementsAre(0.5, -1.0));
  EXPECT_THAT(*file->integers("tokenizer.ggml.token_type"), ElementsAre(1, 3));
  ASSERT_EQ(file->tensors().size(), 2U);
  EXPECT_THAT(file->tensors()[0].shape, ElementsAre(4, 8));  // ne = {8, 4}
  float values[2];
  std::memcpy(&values[0], file->tensors()[0].data.data() + 4 * 9, 4);
  std::memcpy(&values[1], file->tensors()[1].data.data(), 4);
  EXPECT_EQ(values[0], 9.0f);
  EXPECT_EQ(values[1], 32.0f);
}

TEST(GgufFile, AllowsTheOdditiesOfOtherWriters) {
  GgufImage image = sound_gguf();
  image.set("general.alignment", kU32, packed(64u));  // 128 and 160 are multiples of it or the end
  image.alignment = 64;
  EXPECT_EQ(read(image.build())->tensors().size(), 2U);
  image = sound_gguf();
  image.tensors[1].ne = {7};
  image.data.resize(128 + 28);  // the last tensor need not be padded, and may be
  EXPECT_EQ(read(image.build())->tensors()[1].data.size(), 28U);
  image.data.resize(128 + 32);
  EXPECT_EQ(read(image.build())->tensors().size(), 2U);
  image.tensors.clear();
  image.data.clear();
  EXPECT_TRUE(read(image.build())->tensors().empty());  // a vocabulary alone
  EXPECT_TRUE(read(image.table())->tensors().empty());
  image.set("split.count", kU16, packed(uint16_t{1}));
  EXPECT_TRUE(read(image.build())->tensors().empty());
}

TEST(GgufFile, GettersNameTheKeyOfAnotherType) {
  GgufImage image = sound_gguf();
  image.set("an.int", kI16, packed(int16_t{-5}));
  image.set("a.float", kF32, packed(2.5f));
  image.set("a.bool", kBool, packed(uint8_t{1}));
  image.set("bools", kArray, packed_array(kBool, 1, std::string(1, '\1')));
  const std::string bytes = image.build();
  const auto file = read(bytes);
  EXPECT_EQ(file->integer("an.int"), -5);
  EXPECT_EQ(file->number("an.int"), -5.0);
  EXPECT_EQ(file->number("a.float"), 2.5);
  EXPECT_EQ(file->boolean("a.bool"), true);
  EXPECT_EQ(file->integer("absent"), std::nullopt);
  EXPECT_EQ(file->number("absent"), std::nullopt);
  EXPECT_EQ(file->boolean("absent"), std::nullopt);
  EXPECT_EQ(file->string("absent"), std::nullopt);
  EXPECT_EQ(file->strings("absent"), nullptr);
  EXPECT_EQ(file->integers("absent"), nullptr);
  EXPECT_EQ(file->numbers("absent"), nullptr);
  const auto refusal = [&](auto&& get) { return error_of([&] { static_cast<void>(get()); }); };
  EXPECT_EQ(refusal([&] { return file->integer("a.float"); }), "memory: a.float: found f32, expected an integer");
  EXPECT_EQ(refusal([&] { return file->integer("a.bool"); }), "memory: a.bool: found bool, expected an integer");
  EXPECT_EQ(refusal([&] { return file->number("a.bool"); }), "memory: a.bool: found bool, expected a number");
  EXPECT_EQ(refusal([&] { return file->boolean("an.int"); }), "memory: an.int: found i16, expected a bool");
  EXPECT_EQ(refusal([&] { return file->string("tokenizer.ggml.tokens"); }),
            "memory: tokenizer.ggml.tokens: found an array of string, expected a string");
  EXPECT_EQ(refusal([&] { return file->strings("general.architecture"); }),
            "memory: general.architecture: found string, expected an array of strings");
  EXPECT_EQ(refusal([&] { return file->strings("tokenizer.ggml.scores"); }),
            "memory: tokenizer.ggml.scores: found an array of f32, expected an array of strings");
  EXPECT_EQ(refusal([&] { return file->integers("tokenizer.ggml.scores"); }),
            "memory: tokenizer.ggml.scores: found an array of f32, expected an array of integers");
  EXPECT_EQ(refusal([&] { return file->numbers("tokenizer.ggml.token_type"); }),
            "memory: tokenizer.ggml.token_type: found an array of i32, expected an array of numbers");
  EXPECT_EQ(refusal([&] { return file->integers("bools"); }), "memory: bools: found an array of bool, expected an array of integers");
}

}  // namespace
}  // namespace cachalot
