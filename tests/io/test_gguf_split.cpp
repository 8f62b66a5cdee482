// Split GGUF files: parts are found from any one, and whatever does not belong together is refused by name.
#include <gmock/gmock.h>

#include "byte_builder.h"
#include "io/checkpoint.h"
#include "io/gguf.h"

namespace cachalot {
namespace {

using namespace test;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Part `number` of 3: metadata only in the first, two tensors of 32 bytes in each.
GgufImage part(int number) {
  GgufImage out;
  if (number == 0) out = sound_gguf();
  out.set("split.no", kU16, packed(static_cast<uint16_t>(number)));
  out.set("split.count", kU16, packed(uint16_t{3}));
  out.set("split.tensors.count", kI32, packed(6));
  out.tensors = {{fmt::format("blk.{}.attn_norm.weight", number), {8}, 0, 0}, {fmt::format("blk.{}.ffn_norm.weight", number), {8}, 0, 32}};
  out.data.clear();
  for (int i = 0; i < 16; ++i) out.data += packed(static_cast<float>(100 * number + i));
  return out;
}
std::string part_file(int number) { return fmt::format("toy-{:05}-of-00003.gguf", number + 1); }

class GgufSplit : public ::testing::Test {
 protected:
  GgufSplit() {
    for (int i = 0; i < 3; ++i) put(i, part(i));
  }
  void put(int number, const GgufImage& image) const { static_cast<void>(dir_.write(part_file(number), image.build())); }
  [[nodiscard]] std::string path(int number) const { return (dir_.path() / part_file(number)).string(); }
  [[nodiscard]] std::string refusal(int given) const {
    return error_of([&] { static_cast<void>(GgufFile::open(path(given))); });
  }
  TempDir dir_;
};

TEST_F(GgufSplit, IsOpenedFromAnyPart) {
  for (int given = 0; given < 3; ++given) {
    const auto file = GgufFile::open(path(given));
    EXPECT_EQ(file->string("general.architecture"), "llama");
    ASSERT_EQ(file->tensors().size(), 6U);
    EXPECT_EQ(file->parts().size(), 3U);
    const TensorInfo& tensor = file->tensors()[3];
    EXPECT_EQ(tensor.name, "blk.1.ffn_norm.weight");
    EXPECT_EQ(tensor.file, path(1));
    float value = 0;
    std::memcpy(&value, tensor.data.data(), 4);
    EXPECT_EQ(value, 108.0f);
  }
  const auto checkpoint = Checkpoint::open(dir_.path());
  EXPECT_EQ(checkpoint->container(), Checkpoint::Container::gguf);
  EXPECT_THAT(checkpoint->vector("blk.2.attn_norm.weight", 8), ElementsAre(200, 201, 202, 203, 204, 205, 206, 207));
}

TEST_F(GgufSplit, MissingPartIsNamed) {
  std::filesystem::remove(path(1));
  EXPECT_THAT(refusal(0), AllOf(HasSubstr("part 2 of 3 is missing"), HasSubstr(path(1))));
  EXPECT_THAT(refusal(2), HasSubstr(path(1)));
  EXPECT_THAT(error_of([&] { static_cast<void>(Checkpoint::open(dir_.path())); }), HasSubstr(path(1)));
}

TEST_F(GgufSplit, PartOfAnotherModelIsNamed) {
  GgufImage foreign = part(1);
  foreign.set("split.tensors.count", kI32, packed(9));
  put(1, foreign);
  EXPECT_THAT(refusal(0), AllOf(HasSubstr(path(1)), HasSubstr("split.tensors.count: found 9, expected 6")));
  foreign = part(1);
  foreign.set("general.architecture", kString, packed_text("qwen2"));
  put(1, foreign);
  EXPECT_THAT(refusal(0), AllOf(HasSubstr(path(1)), HasSubstr("general.architecture: found \"qwen2\", expected \"llama\"")));
  foreign = part(1);
  foreign.set("split.count", kU16, packed(uint16_t{4}));
  put(1, foreign);
  EXPECT_THAT(refusal(0), AllOf(HasSubstr(path(1)), HasSubstr("split.count: found 4, expected 3")));
  put(1, sound_gguf());
  EXPECT_THAT(refusal(0), AllOf(HasSubstr(path(1)), HasSubstr("split.count: found 1, expected 3")));
}

TEST_F(GgufSplit, PartsInEachOthersPlaceAreNamed) {
  put(1, part(2));
  EXPECT_THAT(refusal(0), AllOf(HasSubstr(path(1)), HasSubstr("split.no: found 2, expected 1")));
  EXPECT_THAT(refusal(1), AllOf(HasSubstr(path(1)), HasSubstr("part 3 of 3"), HasSubstr("-00003-of-00003.gguf")));
}

TEST_F(GgufSplit, CutPartIsNamed) {
  static_cast<void>(dir_.write(part_file(2), part(2).build().substr(0, part(2).build().size() - 1)));
  EXPECT_THAT(refusal(0), AllOf(HasSubstr(path(2)), HasSubstr("blk.2.ffn_norm.weight"), HasSubstr("download")));
}

TEST_F(GgufSplit, TensorInTwoPartsIsNamed) {
  GgufImage twice = part(2);
  twice.tensors[0].name = "blk.0.attn_norm.weight";
  put(2, twice);
  EXPECT_THAT(refusal(0), HasSubstr("tensor \"blk.0.attn_norm.weight\" is in two parts"));
}

TEST_F(GgufSplit, TensorCountMustBeTheTotal) {
  for (int i = 0; i < 3; ++i) {
    GgufImage image = part(i);
    image.set("split.tensors.count", kI32, packed(7));
    put(i, image);
  }
  EXPECT_THAT(refusal(1), HasSubstr("split.tensors.count: found 7, but the 3 parts hold 6 tensors"));
}

TEST_F(GgufSplit, JoinedPartsAreRefused) {
  const std::string joined = part(0).build() + part(1).build() + part(2).build();
  static_cast<void>(dir_.write(part_file(0), joined));
  EXPECT_THAT(refusal(0), AllOf(HasSubstr(path(0)), HasSubstr("bytes after the last tensor")));
  const auto other_name = dir_.write("joined.gguf", part(0).build());
  EXPECT_THAT(error_of([&] { static_cast<void>(GgufFile::open(other_name)); }),
              AllOf(HasSubstr("joined.gguf"), HasSubstr("joined into one file")));
}

TEST_F(GgufSplit, TwoModelsInOneDirectoryAreRefused) {
  static_cast<void>(dir_.write("other.gguf", sound_gguf().build()));
  EXPECT_THAT(error_of([&] { static_cast<void>(Checkpoint::open(dir_.path())); }),
              AllOf(HasSubstr("several GGUF models"), HasSubstr("other.gguf")));
}

}  // namespace
}  // namespace cachalot
