// Hand-made bad GGUF files: each is refused with the file and the field named.
#include <gtest/gtest.h>

#include "byte_builder.h"
#include "io/gguf.h"

namespace cachalot {
namespace {

using namespace test;

// A sound file with one change.
BadFile changed(std::string name, std::function<void(GgufImage&)> change, std::vector<std::string> fragments) {
  auto bytes = [change = std::move(change)] {
    GgufImage image = sound_gguf();
    change(image);
    return image.build();
  };
  return {std::move(name), std::move(bytes), std::move(fragments)};
}
BadFile cut(std::string name, size_t keep, std::vector<std::string> fragments) {
  return {std::move(name), [keep] { return sound_gguf().build().substr(0, keep); }, std::move(fragments)};
}
BadFile with_key(std::string name, std::string key, int32_t type, std::string value, std::vector<std::string> fragments) {
  fragments.push_back(key);
  return changed(
      std::move(name), [=](GgufImage& image) { image.set(key, type, value); }, std::move(fragments));
}
// A file with only this tensor and `n_data` bytes of data.
BadFile with_tensor(std::string name, GgufImage::Tensor tensor, size_t n_data, std::vector<std::string> fragments) {
  return changed(
      std::move(name),
      [=](GgufImage& image) {
        image.tensors = {tensor};
        image.data = std::string(n_data, '\0');
      },
      std::move(fragments));
}

std::vector<BadFile> bad_headers() {
  return {
      {"empty", [] { return std::string(); }, {"magic", "expected \"GGUF\""}},
      cut("three_bytes", 3, {"magic: found \"GGU\""}),
      changed("old_ggml_magic", [](GgufImage& g) { g.magic = "ggjt"; }, {"magic: found \"ggjt\""}),
      changed("lower_case_magic", [](GgufImage& g) { g.magic = "gguf"; }, {"magic"}),
      {"zip", [] { return std::string("PK\x03\x04") + std::string(100, '\0'); }, {"magic: found \"PK\\x03\\x04\""}},
      {"safetensors_inside", [] { return safetensors_image("{}", ""); }, {"magic"}},
      cut("magic_only", 4, {"version: needs 4 bytes at byte 4, but 0 are left"}),
      changed("version_0", [](GgufImage& g) { g.version = 0; }, {"version: found 0, expected 3"}),
      changed("version_1", [](GgufImage& g) { g.version = 1; }, {"version: found 1, expected 3"}),
      changed("version_2", [](GgufImage& g) { g.version = 2; }, {"version: found 2, expected 3"}),
      changed("version_4", [](GgufImage& g) { g.version = 4; }, {"version: found 4, expected 3"}),
      changed("big_endian", [](GgufImage& g) { g.version = 3u << 24; }, {"version", "big-endian"}),
      cut("cut_in_tensor_count", 12, {"tensor count: needs 8 bytes"}),
      cut("cut_in_key_count", 20, {"key count: needs 8 bytes"}),
      changed("tensor_count_2_61", [](GgufImage& g) { g.n_tensors = int64_t{1} << 61; }, {"tensor count: found 2305843009213693952"}),
      changed("tensor_count_negative", [](GgufImage& g) { g.n_tensors = -1; }, {"tensor count: found"}),
      changed("tensor_count_past_limit", [](GgufImage& g) { g.n_tensors = (1 << 20) + 1; },
              {"tensor count: found 1048577, expected at most 1048576"}),
      changed("tensor_count_past_file", [](GgufImage& g) { g.n_tensors = 1000; }, {"1000 tensors need at least"}),
      changed("tensor_count_one_too_many", [](GgufImage& g) { g.n_tensors = 3; }, {"tensor"}),
      changed("tensor_count_one_too_few", [](GgufImage& g) { g.n_tensors = 1; }, {"bytes after the last tensor"}),
      changed("key_count_2_63", [](GgufImage& g) { g.n_keys = INT64_MAX; }, {"key count: found 9223372036854775807"}),
      changed("key_count_negative", [](GgufImage& g) { g.n_keys = INT64_MIN; }, {"key count: found"}),
      changed("key_count_past_limit", [](GgufImage& g) { g.n_keys = (1 << 16) + 1; }, {"key count: found 65537, expected at most 65536"}),
      changed("key_count_past_file", [](GgufImage& g) { g.n_keys = 60'000; }, {"60000 keys"}),
      changed("key_count_one_too_many", [](GgufImage& g) { g.n_keys = 6; }, {}),
      changed("key_count_one_too_few", [](GgufImage& g) { g.n_keys = 4; }, {"tensor"}),
  };
}

std::vector<BadFile> bad_keys() {
  const auto raw_key = [](std::string name, std::string bytes, std::vector<std::string> fragments) {
    return BadFile{std::move(name),
                   [bytes] { return Bytes().raw("GGUF").number(3u).number(int64_t{0}).number(int64_t{1}).raw(bytes).str(); },
                   std::move(fragments)};
  };
  std::string many_strings;
  for (int i = 0; i < 17; ++i) many_strings += packed_text(std::string(1 << 20, 'x'));
  return {
      raw_key("key_length_2_63", Bytes().number(uint64_t{1} << 63).raw("a").number(kU8).raw(std::string(8, '\0')).str(),
              {"key 0: a string of 9223372036854775808 bytes"}),
      raw_key("key_length_past_file", Bytes().number(uint64_t{100}).raw("abc").number(kU8).raw(std::string(8, '\0')).str(),
              {"key 0: a string of 100 bytes, but"}),
      raw_key("key_cut_before_type", Bytes().text("abcdefghij").raw("\0").str(), {"abcdefghij: needs 4 bytes"}),
      raw_key("value_cut", Bytes().text("general.size").number(kU64).number(1u).str(), {"general.size: needs 8 bytes, but 4 are left"}),
      with_key("key_empty", "", kU8, packed(uint8_t{1}), {"key 5: found the name \"\""}),
      changed("key_not_utf8", [](GgufImage& g) { g.set("a\xc0\x80", kU8, packed(uint8_t{1})); }, {"key 5: found the name"}),
      changed("key_with_newline", [](GgufImage& g) { g.set("general\nname", kU8, packed(uint8_t{1})); },
              {"key 5: found the name \"general\\x0aname\""}),
      changed("key_too_long", [](GgufImage& g) { g.set(std::string(65'536, 'k'), kU8, packed(uint8_t{1})); },
              {"key 5: a string of 65536 bytes, expected at most 65535"}),
      changed("key_twice", [](GgufImage& g) { g.keys.push_back(g.keys[0]); }, {"the key \"general.architecture\" appears twice"}),
      with_key("type_13", "x.y", 13, packed(uint64_t{0}), {"found value type 13, expected 0 to 12"}),
      with_key("type_negative", "x.y", -1, packed(uint64_t{0}), {"found value type -1"}),
      with_key("type_max", "x.y", INT32_MAX, packed(uint64_t{0}), {"found value type 2147483647"}),
      with_key("string_length_max", "x.y", kString, packed(UINT64_MAX), {"a string of 18446744073709551615 bytes"}),
      with_key("string_past_file", "x.y", kString, packed(uint64_t{100'000}) + "abc", {"a string of 100000 bytes, but"}),
      with_key("string_too_long", "x.y", kString, packed_text(std::string((16 << 20) + 1, 'a')), {"expected at most 16777216"}),
      with_key("bool_2", "x.y", kBool, packed(uint8_t{2}), {"found 2 for a bool"}),
      with_key("u64_past_i64", "x.y", kU64, packed(uint64_t{1} << 63), {"found 9223372036854775808, expected at most 2^63-1"}),
      with_key("array_of_arrays", "x.y", kArray, packed_array(kArray, 1, packed_array(kU8, 1, "a")), {"array of arrays"}),
      with_key("array_type_99", "x.y", kArray, packed_array(99, 1, "aaaaaaaa"), {"found value type 99"}),
      with_key("array_type_negative", "x.y", kArray, packed_array(-2, 1, "aaaaaaaa"), {"found value type -2"}),
      with_key("array_u8_2_63", "x.y", kArray, packed_array(kU8, uint64_t{1} << 63, "a"), {"an array of 9223372036854775808 x u8"}),
      with_key("array_u64_wraps", "x.y", kArray, packed_array(kU64, uint64_t{1} << 61, "a"), {"an array of 2305843009213693952 x u64"}),
      with_key("array_u32_wraps", "x.y", kArray, packed_array(kU32, (uint64_t{1} << 62) + 1, "a"), {"x u32"}),
      with_key("array_cut", "x.y", kArray, packed_array(kF64, 100'000, std::string(80, 'a')), {"an array of 100000 x f64"}),
      with_key("array_100m_strings", "x.y", kArray, packed_array(kString, 100'000'000, packed_text("a")),
               {"an array of 100000000 x string"}),
      with_key("array_string_length", "x.y", kArray, packed_array(kString, 2, packed_text("a") + packed(uint64_t{1} << 62)),
               {"a string of 4611686018427387904 bytes"}),
      with_key("array_bool_7", "x.y", kArray, packed_array(kBool, 3, std::string("\1\0\7", 3)), {"found 7 for a bool"}),
      with_key("array_u64_past_i64", "x.y", kArray, packed_array(kU64, 1, packed(UINT64_MAX)), {"found 18446744073709551615"}),
      with_key("array_too_many_numbers", "x.y", kArray, packed_array(kU8, (1 << 21) + 1, std::string((1 << 21) + 1, 'a')),
               {"an array of 2097153 numbers, expected at most 2097152"}),
      with_key("array_too_many_strings", "x.y", kArray, packed_array(kString, 1'500'001, std::string(8 * 1'500'001, '\0')),
               {"an array of 1500001 strings, expected at most 1500000"}),
      with_key("strings_too_long_together", "x.y", kArray, packed_array(kString, 17, many_strings), {"pass 16777216 bytes"}),
      with_key("alignment_0", "general.alignment", kU32, packed(0u), {"found 0, expected a power of two from 8 to 1048576"}),
      with_key("alignment_3", "general.alignment", kU32, packed(3u), {"found 3, expected a power of two"}),
      with_key("alignment_4", "general.alignment", kU32, packed(4u), {"found 4, expected a power of two"}),
      with_key("alignment_48", "general.alignment", kU32, packed(48u), {"found 48, expected a power of two"}),
      with_key("alignment_2_21", "general.alignment", kU32, packed(1u << 21), {"found 2097152, expected a power of two"}),
      with_key("alignment_2_31", "general.alignment", kU32, packed(1u << 31), {"found 2147483648, expected a power of two"}),
      with_key("alignment_i32", "general.alignment", kI32, packed(32), {"found type i32, expected u32"}),
      with_key("alignment_u64", "general.alignment", kU64, packed(uint64_t{32}), {"found type u64, expected u32"}),
      with_key("alignment_string", "general.alignment", kString, packed_text("32"), {"found type string, expected u32"}),
  };
}

std::vector<BadFile> bad_known_keys() {
  const std::string two = packed(uint8_t{1}) + packed(uint8_t{2});
  return {
      with_key("scores_u8", "tokenizer.ggml.scores", kArray, packed_array(kU8, 2, two), {"found an array of u8, expected an array of f32"}),
      with_key("scores_scalar", "tokenizer.ggml.scores", kF32, packed(1.0f), {"found f32, expected an array of f32"}),
      with_key("token_type_i8", "tokenizer.ggml.token_type", kArray, packed_array(kI8, 2, two),
               {"found an array of i8, expected an array of i32"}),
      with_key("token_type_f32", "tokenizer.ggml.token_type", kArray, packed_array(kF32, 2, packed(1.0f) + packed(1.0f)),
               {"found an array of f32, expected an array of i32"}),
      with_key("merges_u32", "tokenizer.ggml.merges", kArray, packed_array(kU32, 1, packed(1u)),
               {"found an array of u32, expected an array of string"}),
      with_key("tokens_u8", "tokenizer.ggml.tokens", kArray, packed_array(kU8, 2, two),
               {"found an array of u8, expected an array of string"}),
      with_key("tokens_string", "tokenizer.ggml.tokens", kString, packed_text("ab"), {"found string, expected an array of string"}),
      with_key("scores_count", "tokenizer.ggml.scores", kArray, packed_array(kF32, 1, packed(1.0f)), {"found 1 elements, expected 2"}),
      with_key("token_type_count", "tokenizer.ggml.token_type", kArray, packed_array(kI32, 3, std::string(12, '\0')),
               {"found 3 elements, expected 2"}),
      with_key("split_count_0", "split.count", kU16, packed(uint16_t{0}), {"found 0, expected 1 to 65535"}),
      with_key("split_count_65536", "split.count", kU32, packed(65'536u), {"found 65536, expected 1 to 65535"}),
      with_key("split_count_string", "split.count", kString, packed_text("3"), {"found type string, expected an integer"}),
      with_key("split_no_past_count", "split.no", kU16, packed(uint16_t{1}), {"found 1, expected 0 to 0"}),
      with_key("split_no_negative", "split.no", kI16, packed(int16_t{-1}), {"found -1, expected 0 to 0"}),
      with_key("split_tensors_count", "split.tensors.count", kI32, packed(7), {"found 7, expected 2"}),
      with_key("split_of_3_in_another_name", "split.count", kU16, packed(uint16_t{3}), {"part 1 of 3", "-00001-of-00003.gguf"}),
  };
}

std::vector<BadFile> bad_tensors() {
  std::vector<BadFile> out = {
      with_tensor("name_empty", {"", {8}}, 32, {"a name of 0 bytes, expected 1 to 63"}),
      with_tensor("name_64", {std::string(64, 'n'), {8}}, 32, {"a name of 64 bytes, expected 1 to 63"}),
      with_tensor("name_2_40", {.name = "w", .ne = {8}, .name_size = uint64_t{1} << 40}, 32, {"a string of 1099511627776 bytes"}),
      with_tensor("name_with_nul", {std::string("a\0b", 3), {8}}, 32, {"a\\x00b", "printable"}),
      with_tensor("name_not_utf8", {"a\xff", {8}}, 32, {"printable"}),
      with_tensor("name_with_escape", {"a\x1b[31mb", {8}}, 32, {"a\\x1b[31mb"}),
      changed("name_twice", [](GgufImage& g) { g.tensors[1].name = g.tensors[0].name; }, {"tensor \"token_embd.weight\" appears twice"}),
      with_tensor("dims_0", {.name = "w", .ne = {}}, 32, {"\"w\": found 0 dimensions, expected 1 to 4"}),
      with_tensor("dims_5", {"w", {2, 2, 2, 2, 2}}, 128, {"\"w\": found 5 dimensions"}),
      with_tensor("dims_max", {.name = "w", .ne = {8}, .n_dims = UINT32_MAX}, 32, {"\"w\": found 4294967295 dimensions"}),
      with_tensor("ne_0", {"w", {8, 0}}, 32, {"\"w\": dimension 1: found 0, expected at least 1"}),
      with_tensor("ne_negative", {"w", {-8}}, 32, {"\"w\": dimension 0: found -8"}),
      with_tensor("ne_both_negative", {"w", {-8, -1}}, 32, {"\"w\": dimension 0: found -8"}),
      with_tensor("ne_2_62_f32", {"w", {int64_t{1} << 62}}, 32, {"\"w\": its size overflows 63 bits"}),
      with_tensor("ne_i64_max_bf16", {"w", {INT64_MAX}, 30}, 32, {"\"w\": its size overflows"}),
      with_tensor("ne_size_max_by_4", {"w", {INT64_MAX / 4}}, 32, {"\"w\": its data ends at byte"}),
      with_tensor("ne_product_2_64", {"w", {int64_t{1} << 32, int64_t{1} << 32}}, 32, {"\"w\": its dimensions overflow"}),
      with_tensor("ne_product_wraps_to_4", {"w", {4194305, 4194305, 211106198978564}}, 32, {"\"w\": its dimensions overflow"}),
      with_tensor("ne_product_2_64_four", {"w", {65536, 65536, 65536, 65536}}, 32, {"\"w\": its dimensions overflow"}),
      with_tensor("quantized_wraps", {"w", {32, int64_t{1} << 57}, 2}, 32, {"\"w\": its data ends at byte"}),
      with_tensor("quantized_overflows", {"w", {256, int64_t{1} << 54, 2}, 0}, 32, {"\"w\""}),
      with_tensor("row_33_of_q4_0", {"w", {33, 2}, 2}, 64, {"\"w\": rows of 33 elements, expected a multiple of 32 for Q4_0"}),
      with_tensor("row_128_of_q4_k", {"w", {128, 2}, 12}, 160, {"\"w\": rows of 128 elements, expected a multiple of 256 for Q4_K"}),
      with_tensor("row_16_of_mxfp4", {"w", {16, 2}, 39}, 64, {"multiple of 32 for MXFP4"}),
      with_tensor("first_offset_32", {"w", {8}, 0, 32}, 64, {"\"w\": offset: found 32, expected 0"}),
      with_tensor("first_offset_max", {"w", {8}, 0, UINT64_MAX}, 64, {"\"w\": offset: found 18446744073709551615"}),
      changed("offset_overlap", [](GgufImage& g) { g.tensors[1].offset = 0; }, {"\"output_norm.weight\": offset: found 0, expected 128"}),
      changed("offset_gap", [](GgufImage& g) { g.tensors[1].offset = 160; }, {"\"output_norm.weight\": offset: found 160, expected 128"}),
      changed("offset_unaligned", [](GgufImage& g) { g.tensors[1].offset = 129; }, {"offset: found 129, expected 128"}),
      changed("offset_2_63", [](GgufImage& g) { g.tensors[1].offset = uint64_t{1} << 63; }, {"offset: found 9223372036854775808"}),
      changed("wrong_alignment",
              [](GgufImage& g) {
                g.set("general.alignment", kU32, packed(256u));
                g.data.resize(4096);
              },
              {"\"output_norm.weight\": offset: found 128, expected 256"}),
      {"cut_in_dimensions",
       [] {
         const std::string t = sound_gguf().table();
         return t.substr(0, t.size() - 20);
       },
       {"output_norm.weight"}},
      {"cut_in_offset",
       [] {
         const std::string t = sound_gguf().table();
         return t.substr(0, t.size() - 1);
       },
       {"output_norm.weight"}},
      {"no_data", [] { return sound_gguf().table(); }, {"\"token_embd.weight\"", "but the file has"}},
      changed("data_1_byte_short", [](GgufImage& g) { g.data.pop_back(); },
              {"\"output_norm.weight\": its data ends at byte", "but the file has", "download"}),
      with_tensor("data_1_mib_short", {"w", {1024, 1024}}, 3u << 20, {"\"w\": its data ends at byte", "but the file has"}),
      changed("bytes_after_the_end", [](GgufImage& g) { g.data += std::string(32, 'x'); }, {"32 bytes after the last tensor"}),
      {"two_files_joined", [] { return sound_gguf().build() + sound_gguf().build(); }, {"bytes after the last tensor"}},
  };
  const std::vector<std::pair<int, std::string>> refused_types = {
      {4, "unknown (4)"}, {9, "Q8_1"}, {15, "Q8_K"},  {16, "IQ2_XXS"}, {19, "IQ1_S"},        {21, "IQ3_S"},       {24, "I8"},
      {26, "I32"},        {28, "F64"}, {34, "TQ1_0"}, {40, "NVFP4"},   {99, "unknown (99)"}, {-1, "unknown (-1)"}};
  for (const auto& [type, word] : refused_types) {
    const std::string found = word.find('(') == std::string::npos ? fmt::format("{} ({})", type, word) : fmt::format("{} (unknown)", type);
    out.push_back(with_tensor(fmt::format("type_{}", type < 0 ? "negative" : fmt::to_string(type)), {"blk.0.w", {256}, type}, 1024,
                              {"\"blk.0.w\": found type " + found + ", which is not supported"}));
  }
  return out;
}

class BadGguf : public ::testing::TestWithParam<BadFile> {};

TEST_P(BadGguf, IsRefused) {
  const TempDir dir;
  const auto path = dir.write("bad.gguf", GetParam().bytes());
  expect_refused("bad.gguf", GetParam().fragments, [&] { static_cast<void>(GgufFile::open(path)); });
}

const auto kCaseName = [](const auto& param) { return param.param.name; };
INSTANTIATE_TEST_SUITE_P(Header, BadGguf, ::testing::ValuesIn(bad_headers()), kCaseName);
INSTANTIATE_TEST_SUITE_P(Key, BadGguf, ::testing::ValuesIn(bad_keys()), kCaseName);
INSTANTIATE_TEST_SUITE_P(KnownKey, BadGguf, ::testing::ValuesIn(bad_known_keys()), kCaseName);
INSTANTIATE_TEST_SUITE_P(Tensor, BadGguf, ::testing::ValuesIn(bad_tensors()), kCaseName);

TEST(GgufFile, EveryCutIsRefused) {
  const std::string whole = sound_gguf().build();
  for (size_t n = 0; n < whole.size(); ++n) {
    const std::string part = whole.substr(0, n);
    EXPECT_THROW(static_cast<void>(GgufFile::from_bytes(std::as_bytes(std::span(part)), "cut")), Error) << n;
  }
}

// Any byte may be wrong: the file then reads as another sound one or is refused, never anything else.
TEST(GgufFile, EveryFlippedBitIsReadOrRefused) {
  const std::string whole = sound_gguf().build();
  int n_refused = 0;
  for (size_t bit = 0; bit < whole.size() * 8; ++bit) {
    std::string changed_file = whole;
    changed_file[bit / 8] = static_cast<char>(changed_file[bit / 8] ^ (1 << (bit % 8)));
    try {
      static_cast<void>(GgufFile::from_bytes(std::as_bytes(std::span(changed_file)), "flipped"));
    } catch (const Error&) {
      ++n_refused;
    }
  }
  EXPECT_GT(n_refused, 1000);
}

}  // namespace
}  // namespace cachalot
