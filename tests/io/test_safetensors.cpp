// Reading and writing sound safetensors files, and the oddities that are allowed.
#include "io/safetensors.h"

#include <gmock/gmock.h>

#include <fstream>

#include "byte_builder.h"

namespace cachalot {
namespace {

using namespace test;
using ::testing::ElementsAre;

std::shared_ptr<const SafetensorsFile> read(const std::string& bytes) {
  return SafetensorsFile::from_bytes(std::as_bytes(std::span(bytes)), "memory");
}

TEST(SafetensorsFile, ReadsTensorsInTheOrderOfTheirData) {
  const std::string file = safetensors_image(
      R"({"z":{"dtype":"I64","shape":[],"data_offsets":[12,20]},"a":{"shape":[3,2],"data_offsets":[0,12],"dtype":"F16"}}   )",
      "abcdefghijklmnopqrst");
  const auto tensors = read(file)->tensors();
  ASSERT_EQ(tensors.size(), 2U);
  EXPECT_EQ(tensors[0].name, "a");
  EXPECT_EQ(tensors[0].format, Format::f16);
  EXPECT_TRUE(tensors[0].has_format);
  EXPECT_THAT(tensors[0].shape, ElementsAre(3, 2));
  EXPECT_EQ(static_cast<char>(tensors[0].data[11]), 'l');
  EXPECT_EQ(tensors[1].name, "z");
  EXPECT_EQ(tensors[1].dtype, "I64");
  EXPECT_FALSE(tensors[1].has_format);
  EXPECT_TRUE(tensors[1].shape.empty());
  EXPECT_EQ(static_cast<char>(tensors[1].data[0]), 'm');
}

TEST(SafetensorsFile, AllowsTheOdditiesOfOtherWriters) {
  EXPECT_TRUE(read(safetensors_image("{}", ""))->tensors().empty());
  EXPECT_TRUE(read(safetensors_image("{\"__metadata__\":{}}  ", ""))->tensors().empty());
  EXPECT_TRUE(read(safetensors_image("{\"__metadata__\":null}", ""))->tensors().empty());
  EXPECT_TRUE(read(safetensors_image(R"({"__metadata__":{"a\n":"\u00e9 \ud83d\ude00 \"{["}})", ""))->tensors().empty());
  // A tensor without elements at either end and at a boundary.
  const auto file = read(
      safetensors_image(R"({"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                        R"("c":{"dtype":"F32","shape":[4,0],"data_offsets":[2,2]},"d":{"dtype":"BOOL","shape":[1],"data_offsets":[2,3]},)"
                        R"("e":{"dtype":"F4","shape":[0,7],"data_offsets":[3,3]}})",
                        "xyz"));
  EXPECT_EQ(file->tensors().size(), 5U);
  EXPECT_EQ(file->find("d")->data.size(), 1U);
  EXPECT_EQ(file->find("f"), nullptr);
}

TEST(SafetensorsWriter, WritesWhatTheReaderReads) {
  const TempDir dir;
  const auto path = dir.path() / "out.safetensors";
  const auto f32 = random_floats(12, 1);
  const std::vector<int32_t> ids = {1, -2, 3};
  const std::vector<uint16_t> bf16 = {0x3f80, 0xc000};
  const std::string odd = "xyz";
  write_safetensors(path, {{"ids", "I32", {3}, std::as_bytes(std::span(ids))},
                           {"odd \"name\" é", "U8", {3, 1}, std::as_bytes(std::span(odd))},
                           {"b.half", "BF16", {2}, std::as_bytes(std::span(bf16))},
                           {"logits", "F32", {3, 4}, std::as_bytes(std::span(f32))},
                           {"a.empty", "F32", {0, 4}, {}}});
  std::string bytes;
  {
    std::ifstream in(path, std::ios::binary);
    bytes.assign(std::istreambuf_iterator<char>(in), {});
  }
  uint64_t header_size = 0;
  std::memcpy(&header_size, bytes.data(), 8);
  EXPECT_EQ(header_size % 8, 0U);
  // A name with a quote can be written, but our own reader takes plain names only.
  EXPECT_THAT(error_of([&] { static_cast<void>(read(bytes)); }), ::testing::HasSubstr("the name has an escape"));
  write_safetensors(path, {{"ids", "I32", {3}, std::as_bytes(std::span(ids))},
                           {"odd", "U8", {3, 1}, std::as_bytes(std::span(odd))},
                           {"b.half", "BF16", {2}, std::as_bytes(std::span(bf16))},
                           {"logits", "F32", {3, 4}, std::as_bytes(std::span(f32))},
                           {"a.empty", "F32", {0, 4}, {}}});
  const auto file = SafetensorsFile::open(path);
  std::vector<std::string> names;
  for (const TensorInfo& tensor : file->tensors()) names.push_back(tensor.name);
  EXPECT_THAT(names, ElementsAre("a.empty", "logits", "ids", "b.half", "odd"));
  const TensorInfo& logits = *file->find("logits");
  EXPECT_THAT(logits.shape, ElementsAre(3, 4));
  EXPECT_EQ(std::memcmp(logits.data.data(), f32.data(), logits.data.size()), 0);
  EXPECT_EQ(file->find("ids")->dtype, "I32");
  EXPECT_EQ(std::memcmp(file->find("ids")->data.data(), ids.data(), 12), 0);
  EXPECT_EQ(logits.file, path.string());
}

TEST(SafetensorsWriter, NamesThePathItCannotWrite) {
  const TempDir dir;
  const auto path = dir.path() / "absent" / "out.safetensors";
  EXPECT_THAT(error_of([&] { write_safetensors(path, {}); }),
              ::testing::AllOf(::testing::HasSubstr("absent/out.safetensors"), ::testing::HasSubstr("cannot create")));
}

}  // namespace
}  // namespace cachalot
