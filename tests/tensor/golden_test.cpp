// Decoders and encoders against blocks and values made by an independent implementation (tests/tools/make_format_golden.py), bit by bit.
#include <gtest/gtest.h>

#include <bit>
#include <cstring>

#include "base/json.h"
#include "base/mapped_file.h"
#include "support/support.h"
#include "tensor/format.h"

namespace cachalot {
namespace {

class Golden {
 public:
  Golden() : file_(MappedFile::open(test::source_file("testdata/format_golden.safetensors"))) {
    uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, file_->bytes().data(), sizeof header_bytes);
    data_ = file_->bytes().subspan(sizeof header_bytes + header_bytes);
    header_.emplace(
        JsonDocument::parse({reinterpret_cast<const char*>(file_->bytes().data()) + sizeof header_bytes, header_bytes}, file_->path()));
  }
  [[nodiscard]] std::span<const std::byte> bytes(const std::string& name) const {
    const auto range = header_->root().at(name).at("data_offsets").array();
    const auto begin = static_cast<uint64_t>(range.at(0).get_uint64()), end = static_cast<uint64_t>(range.at(1).get_uint64());
    return data_.subspan(begin, end - begin);
  }
  [[nodiscard]] std::vector<float> floats(const std::string& name) const {
    const auto stored = bytes(name);
    std::vector<float> out(stored.size() / sizeof(float));
    std::memcpy(out.data(), stored.data(), stored.size());
    return out;
  }

 private:
  std::shared_ptr<const MappedFile> file_;
  std::span<const std::byte> data_;
  std::optional<JsonDocument> header_;
};

class GoldenDecode : public testing::TestWithParam<std::string> {};

TEST_P(GoldenDecode, EveryValueIsBitExact) {
  const Golden golden;
  const std::string name = GetParam();
  const Format format = format_of_name(name).value();
  const auto blocks = golden.bytes(name + ".blocks");
  const auto expected = golden.floats(name + ".values");
  const auto n = static_cast<int64_t>(expected.size());
  ASSERT_GE(n, 256);
  ASSERT_EQ(blocks.size(), row_bytes(format, n));
  std::vector<float> found(expected.size());
  dequant_row(format, blocks.data(), n, found.data());
  for (size_t i = 0; i < found.size(); ++i)
    ASSERT_EQ(std::bit_cast<uint32_t>(found[i]), std::bit_cast<uint32_t>(expected[i]))
        << name << " element " << i << ": found " << found[i] << ", expected " << expected[i];
}

INSTANTIATE_TEST_SUITE_P(Formats, GoldenDecode,
                         testing::Values("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k",
                                         "q6_k", "iq4_nl", "iq4_xs", "mxfp4"),
                         [](const auto& test) { return test.param; });

void expect_same_encoding(Format format, const std::vector<float>& input, std::span<const std::byte> expected) {
  std::vector<std::byte> found(row_bytes(format, static_cast<int64_t>(input.size())));
  ASSERT_EQ(found.size(), expected.size());
  quantize_row(format, input.data(), static_cast<int64_t>(input.size()), found.data());
  const FormatInfo& entry = info(format);
  for (size_t i = 0; i < found.size(); ++i)
    ASSERT_EQ(found[i], expected[i]) << entry.name << " block " << i / static_cast<size_t>(entry.block_bytes) << " byte "
                                     << i % static_cast<size_t>(entry.block_bytes);
}

class GoldenEncode : public testing::TestWithParam<std::string> {};

TEST_P(GoldenEncode, EveryByteIsExact) {
  const Golden golden;
  expect_same_encoding(format_of_name(GetParam()).value(), golden.floats("encode.input"), golden.bytes("encode." + GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Formats, GoldenEncode, testing::Values("f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"),
                         [](const auto& test) { return test.param; });

TEST(GoldenEncodeWide, OverflowSubnormalsAndInfinities) {
  const Golden golden;
  for (const std::string name : {"f16", "bf16"})
    expect_same_encoding(format_of_name(name).value(), golden.floats("encode.wide_input"), golden.bytes("encode.wide_" + name));
}

}  // namespace
}  // namespace cachalot
