// Hand-made bad safetensors files: each is refused with the file and the tensor or key named.
#include <gtest/gtest.h>

#include "byte_builder.h"
#include "io/safetensors.h"

namespace cachalot {
namespace {

using namespace test;

// One tensor entry of the header.
std::string entry(std::string_view name, std::string_view dtype, std::string_view shape, std::string_view offsets) {
  return fmt::format(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":{}}})", name, dtype, shape, offsets);
}
BadFile with_header(std::string name, std::string header, size_t n_data, std::vector<std::string> fragments) {
  return {std::move(name), [=] { return safetensors_image(header, std::string(n_data, '\0')); }, std::move(fragments)};
}
// A file with the tensor "w" and 8 bytes of data.
BadFile with_entry(std::string name, std::string_view dtype, std::string_view shape, std::string_view offsets,
                   std::vector<std::string> fragments) {
  fragments.insert(fragments.begin(), "\"w\"");
  return with_header(std::move(name), "{" + entry("w", dtype, shape, offsets) + "}", 8, std::move(fragments));
}
BadFile with_number(std::string name, std::string_view dtype, std::string_view shape, std::string_view offsets,
                    std::vector<std::string> fragments) {
  return with_header(std::move(name), "{" + entry("w", dtype, shape, offsets) + "}", 8, std::move(fragments));
}

std::vector<BadFile> bad_containers() {
  const std::string sound = "{" + entry("w", "F32", "[2]", "[0,8]") + "}";
  return {
      {"empty", [] { return std::string(); }, {"0 bytes, expected at least 8"}},
      {"seven_bytes", [] { return std::string(7, '\0'); }, {"7 bytes, expected at least 8"}},
      {"header_length_0", [] { return packed(uint64_t{0}); }, {"header: found \"\", expected '{'"}},
      {"header_past_file", [=] { return safetensors_image(sound, "", 1000); }, {"header length: found 1000, but only"}},
      {"header_2_63",
       [=] { return safetensors_image(sound, "", uint64_t{1} << 63); },
       {"header length: found 9223372036854775808, expected at most 100000000"}},
      {"header_max", [=] { return safetensors_image(sound, "", UINT64_MAX); }, {"header length: found 18446744073709551615"}},
      {"header_past_limit",
       [=] { return safetensors_image(sound, "", 100'000'001); },
       {"header length: found 100000001, expected at most 100000000"}},
      with_header("starts_with_space", " " + sound, 8, {"header: found", "expected '{'"}),
      with_header("starts_with_bom", "\xef\xbb\xbf" + sound, 8, {"expected '{'"}),
      with_header("array", "[" + sound + "]", 8, {"expected '{'"}),
      with_header("not_utf8", "{\"\xff\xfe\":{}}", 0, {"not valid UTF-8"}),
      with_header("surrogate_in_utf8", "{\"\xed\xa0\x80\":{}}", 0, {"not valid UTF-8"}),
      with_header("cut", sound.substr(0, sound.size() - 1), 8, {"the JSON text ends, expected '}'"}),
      with_header("cut_in_string", "{\"abc", 0, {"expected the end of a string"}),
      with_header("comma_at_end", "{" + entry("w", "F32", "[2]", "[0,8]") + ",}", 8, {"expected a key"}),
      with_header("no_comma", "{" + entry("a", "F32", "[1]", "[0,4]") + entry("b", "F32", "[1]", "[4,8]") + "}", 8, {"expected '}'"}),
      with_header("text_after_object", sound + "x", 8, {"expected the end of the text"}),
      with_header("nul_padding", sound + std::string(4, '\0'), 8, {"expected the end of the text"}),
      with_header("comment", "{/* */" + entry("w", "F32", "[2]", "[0,8]") + "}", 8, {"expected a key"}),
      with_header("single_quotes", "{'w':{}}", 0, {"expected a key"}),
      with_header("bad_escape", "{\"__metadata__\":{\"a\":\"\\x\"}}", 0, {"expected a known escape"}),
      with_header("bad_unicode_escape", "{\"__metadata__\":{\"a\":\"\\u12g4\"}}", 0, {"four hex digits"}),
      with_header("control_character", "{\"w\n\":{}}", 0, {"no control character"}),
      with_header("metadata_twice", R"({"__metadata__":{},"__metadata__":{}})", 0, {"\"__metadata__\" appears twice"}),
      with_header("metadata_key_twice", R"({"__metadata__":{"a":"x","a":"y"}})", 0, {"__metadata__: the key \"a\" appears twice"}),
      with_header("metadata_key_twice_by_escape", R"({"__metadata__":{"a":"x","\u0061":"y"}})", 0,
                  {"__metadata__: the key \"a\" appears twice"}),
      with_header("metadata_number", R"({"__metadata__":{"a":1}})", 0, {"a value of __metadata__ (a string)"}),
      with_header("metadata_nested", R"({"__metadata__":{"a":{"b":"c"}}})", 0, {"a value of __metadata__ (a string)"}),
      with_header("metadata_array", R"({"__metadata__":["a"]})", 0, {"expected '{'"}),
      with_header("metadata_false", R"({"__metadata__":false})", 0, {"expected '{'"}),
      with_header("metadata_long_key", "{\"__metadata__\":{\"" + std::string(1025, 'k') + "\":\"\"}}", 0, {"a key of 1025 bytes"}),
      {"bytes_after_the_end", [=] { return safetensors_image(sound, std::string(9, '\0')); }, {"1 bytes after the last tensor"}},
      {"data_without_tensors", [] { return safetensors_image("{}", "x"); }, {"1 bytes after the last tensor"}},
      {"one_byte_short",
       [=] { return safetensors_image(sound, std::string(7, '\0')); },
       {"\"w\": its data ends at byte 8 of the data, but the file has 7"}},
  };
}

std::vector<BadFile> bad_entries() {
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += '[';
  return {
      with_header("tensor_twice", "{" + entry("w", "F32", "[1]", "[0,4]") + "," + entry("w", "F32", "[1]", "[4,8]") + "}", 8,
                  {"tensor \"w\" appears twice"}),
      with_header("same_tensor_twice", "{" + entry("w", "F32", "[2]", "[0,8]") + "," + entry("w", "F32", "[2]", "[0,8]") + "}", 8,
                  {"tensor \"w\" appears twice"}),
      with_header("escape_in_name", "{" + entry("\\u0077", "F32", "[2]", "[0,8]") + "}", 8, {"the name has an escape"}),
      with_header("name_empty", "{" + entry("", "F32", "[2]", "[0,8]") + "}", 8, {"a tensor name of 0 bytes"}),
      with_header("name_1025", "{" + entry(std::string(1025, 'n'), "F32", "[2]", "[0,8]") + "}", 8,
                  {"a tensor name of 1025 bytes, expected 1 to 1024"}),
      with_header("entry_is_number", R"({"w":1})", 8, {"expected '{'"}),
      with_header("entry_is_null", R"({"w":null})", 8, {"expected '{'"}),
      with_header("entry_empty", R"({"w":{}})", 8, {"\"w\": the key \"dtype\" is missing"}),
      with_header("shape_missing", R"({"w":{"dtype":"F32","data_offsets":[0,8]}})", 8, {"\"w\": the key \"shape\" is missing"}),
      with_header("offsets_missing", R"({"w":{"dtype":"F32","shape":[2]}})", 8, {"\"w\": the key \"data_offsets\" is missing"}),
      with_header("dtype_twice", R"({"w":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8,
                  {"\"w\": the key \"dtype\" appears twice"}),
      with_header("shape_twice", R"({"w":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}})", 8,
                  {"\"w\": the key \"shape\" appears twice"}),
      with_header("offsets_twice", R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"data_offsets":[0,8]}})", 8,
                  {"\"w\": the key \"data_offsets\" appears twice"}),
      with_header("unknown_key", R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"strides":[1]}})", 8,
                  {"\"w\": found the key \"strides\""}),
      with_entry("dtype_unknown", "F13", "[2]", "[0,8]", {"found dtype \"F13\""}),
      with_entry("dtype_lower_case", "f32", "[2]", "[0,8]", {"found dtype \"f32\""}),
      with_header("dtype_number", R"({"w":{"dtype":32,"shape":[2],"data_offsets":[0,8]}})", 8, {"expected a dtype (a string)"}),
      with_number("shape_negative", "F32", "[-2]", "[0,8]", {"a dimension of a shape: found -2, expected a whole number"}),
      with_number("shape_fraction", "F32", "[2.0]", "[0,8]", {"found 2.0, expected a whole number"}),
      with_number("shape_exponent", "F32", "[2e0]", "[0,8]", {"found 2e0, expected a whole number"}),
      with_number("shape_2_64", "F32", "[18446744073709551616]", "[0,8]", {"found 18446744073709551616, expected a whole number"}),
      with_number("shape_string", "F32", "[\"2\"]", "[0,8]", {"expected a dimension of a shape"}),
      with_number("shape_nested", "F32", "[[2]]", "[0,8]", {"expected a dimension of a shape"}),
      with_number("shape_deep", "F32", deep, "[0,8]", {"expected a dimension of a shape"}),
      with_number("shape_object", "F32", "{}", "[0,8]", {"expected '['"}),
      with_number("shape_leading_zero", "F32", "[02]", "[0,8]", {"no digit after a leading zero"}),
      with_number("shape_hex", "F32", "[0x2]", "[0,8]", {"expected ']'"}),
      with_number("shape_nan", "F32", "[NaN]", "[0,8]", {"expected a dimension of a shape"}),
      with_entry("shape_17_dims", "F32", "[2,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", "[0,8]", {"more than 16 dimensions"}),
      with_entry("shape_wraps_to_4", "F32", "[4194305,4194305,211106198978564]", "[0,8]", {"overflows 64 bits"}),
      with_entry("shape_wraps_to_0", "F32", "[4294967296,4294967296]", "[0,0]", {"overflows 64 bits"}),
      with_entry("shape_times_bits_wraps", "F32", "[576460752303423489]", "[0,8]", {"overflows 64 bits"}),
      with_entry("shape_larger_than_offsets", "F32", "[1048576]", "[0,4]", {"data_offsets span 4 bytes, expected 4194304"}),
      with_entry("shape_smaller_than_offsets", "F32", "[1]", "[0,8]", {"data_offsets span 8 bytes, expected 4"}),
      with_entry("half_a_byte", "F4", "[15]", "[0,8]", {"60 bits of F4, expected whole bytes"}),
      with_entry("offsets_one", "F32", "[2]", "[0]", {"data_offsets: found 1 numbers, expected 2"}),
      with_entry("offsets_three", "F32", "[2]", "[0,8,8]", {"data_offsets: found 3 numbers, expected 2"}),
      with_entry("offsets_none", "F32", "[2]", "[]", {"data_offsets: found 0 numbers, expected 2"}),
      with_number("offsets_negative", "F32", "[2]", "[-8,0]", {"data_offsets: found -8"}),
      with_number("offsets_fraction", "F32", "[2]", "[0,8.5]", {"data_offsets: found 8.5"}),
      with_entry("offsets_backwards", "F32", "[2]", "[8,0]", {"data_offsets [8, 0] run backwards"}),
      with_entry("offsets_past_file", "F32", "[4]", "[0,16]", {"its data ends at byte 16 of the data, but the file has 8"}),
      with_entry("offsets_far", "F32", "[2]", "[9223372036854775799,9223372036854775807]", {"its data ends at byte 9223372036854775807"}),
      with_entry("gap_at_start", "F32", "[1]", "[4,8]", {"data_offsets begin at 4, expected 0", "no tensor covers"}),
      with_header("gap_between", "{" + entry("a", "F32", "[1]", "[0,4]") + "," + entry("b", "F32", "[1]", "[8,12]") + "}", 12,
                  {"\"b\": data_offsets begin at 8, expected 4"}),
      with_header("overlap", "{" + entry("a", "F32", "[2]", "[0,8]") + "," + entry("b", "F32", "[2]", "[4,12]") + "}", 12,
                  {"\"b\": data_offsets begin at 4, expected 8", "overlaps"}),
      with_header("two_on_one_place", "{" + entry("a", "F32", "[2]", "[0,8]") + "," + entry("b", "F32", "[2]", "[0,8]") + "}", 8,
                  {"\"b\": data_offsets begin at 0, expected 8"}),
      with_header("zero_size_inside_another", "{" + entry("a", "F32", "[2]", "[0,8]") + "," + entry("b", "F32", "[0]", "[4,4]") + "}", 8,
                  {"\"b\": data_offsets begin at 4, expected 8"}),
      with_header("zero_size_past_end", "{" + entry("a", "F32", "[2]", "[0,8]") + "," + entry("b", "F32", "[0]", "[12,12]") + "}", 8,
                  {"\"b\": its data ends at byte 12"}),
  };
}

class BadSafetensors : public ::testing::TestWithParam<BadFile> {};

TEST_P(BadSafetensors, IsRefused) {
  const TempDir dir;
  const auto path = dir.write("bad.safetensors", GetParam().bytes());
  expect_refused("bad.safetensors", GetParam().fragments, [&] { static_cast<void>(SafetensorsFile::open(path)); });
}

const auto kCaseName = [](const auto& param) { return param.param.name; };
INSTANTIATE_TEST_SUITE_P(Container, BadSafetensors, ::testing::ValuesIn(bad_containers()), kCaseName);
INSTANTIATE_TEST_SUITE_P(Entry, BadSafetensors, ::testing::ValuesIn(bad_entries()), kCaseName);

TEST(SafetensorsFile, EveryCutAndEveryFlippedBitIsReadOrRefused) {
  const std::string header =
      R"({"__metadata__":{"format":"pt"},)" + entry("a", "F32", "[2,1]", "[0,8]") + "," + entry("b", "BF16", "[0]", "[8,8]") + "}";
  const std::string whole = safetensors_image(header, "12345678");
  const auto open = [](const std::string& bytes) { return SafetensorsFile::from_bytes(std::as_bytes(std::span(bytes)), "changed"); };
  EXPECT_EQ(open(whole)->tensors().size(), 2U);
  for (size_t n = 0; n < whole.size(); ++n) EXPECT_THROW(static_cast<void>(open(whole.substr(0, n))), Error) << n;
  int n_refused = 0;
  for (size_t bit = 0; bit < whole.size() * 8; ++bit) {
    std::string changed = whole;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ (1 << (bit % 8)));
    try {
      static_cast<void>(open(changed));
    } catch (const Error&) {
      ++n_refused;
    }
  }
  EXPECT_GT(n_refused, 700);
}

}  // namespace
}  // namespace cachalot
