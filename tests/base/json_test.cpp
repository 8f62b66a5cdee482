// JsonDocument: typed getters, messages that name file and key, and the limits on hostile text.
#include "base/json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/support.h"

namespace cachalot {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

JsonDocument parse(std::string_view text, JsonLimits limits = {}) { return JsonDocument::parse(text, "config.json", limits); }
std::string error_of_parse(std::string_view text, JsonLimits limits = {}) {
  return test::error_of([&] { parse(text, limits); });
}

constexpr std::string_view kConfig =
    R"({"layers": 27, "eps": 1e-6, "tied": true, "name": "tiny", "rope": {"type": "yarn", "factor": 40}, "eos": [1, 2], "none": null})";

TEST(Json, ReadsEachType) {
  const auto document = parse(kConfig);
  const JsonValue& root = document.root();
  EXPECT_TRUE(root.is_object());
  EXPECT_EQ(root.at("layers").integer(), 27);
  EXPECT_EQ(root.at("layers").number(), 27.0);
  EXPECT_EQ(root.at("eps").number(), 1e-6);
  EXPECT_TRUE(root.at("tied").boolean());
  EXPECT_EQ(root.at("name").string(), "tiny");
  EXPECT_EQ(root.at("rope").at("factor").integer(), 40);
  EXPECT_EQ(root.at("eos").array().size(), 2u);
}

TEST(Json, DefaultsStandForAbsentAndNull) {
  const auto document = parse(kConfig);
  const JsonValue& root = document.root();
  EXPECT_EQ(root.integer_or("absent", 7), 7);
  EXPECT_EQ(root.integer_or("none", 7), 7);
  EXPECT_EQ(root.integer_or("layers", 7), 27);
  EXPECT_EQ(root.number_or("none", 0.5), 0.5);
  EXPECT_EQ(root.number_or("layers", 0.5), 27.0);
  EXPECT_FALSE(root.boolean_or("absent", false));
  EXPECT_EQ(root.string_or("absent", "x"), "x");
  EXPECT_FALSE(root.find("none").has_value());
  EXPECT_TRUE(root.find("rope").has_value());
}

TEST(Json, MessagesNameFileKeyAndType) {
  const auto document = parse(kConfig);
  const JsonValue& root = document.root();
  EXPECT_EQ(test::error_of([&] { (void)root.at("heads"); }), "config.json: the key \"heads\" is missing");
  EXPECT_EQ(test::error_of([&] { (void)root.at("none"); }), "config.json: the key \"none\" is missing");
  EXPECT_EQ(test::error_of([&] { (void)root.at("name").integer(); }), "config.json: name: found a string, expected an integer");
  EXPECT_EQ(test::error_of([&] { (void)root.at("eps").integer(); }),
            "config.json: eps: found a number with a fraction, expected an integer");
  EXPECT_EQ(test::error_of([&] { (void)root.at("rope").at("type").number(); }),
            "config.json: rope: type: found a string, expected a number");
  EXPECT_EQ(test::error_of([&] { (void)root.at("eos").at("x"); }), "config.json: eos: found an array, expected an object");
  EXPECT_EQ(test::error_of([&] { (void)root.integer_or("tied", 0); }), "config.json: tied: found a boolean, expected an integer");
}

TEST(Json, IntegersAreNotWrapped) {
  const auto document = parse(R"({"big": 18446744073709551615, "max": 9223372036854775807, "min": -9223372036854775808})");
  EXPECT_EQ(document.root().at("max").integer(), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(document.root().at("min").integer(), std::numeric_limits<int64_t>::min());
  EXPECT_THROW((void)document.root().at("big").integer(), Error);
}

// model_max_length of many Hugging Face configs.
TEST(Json, IntegersPast64BitsBecomeDoubles) {
  const auto document = JsonDocument::parse(
      R"({"a": 1000000000000000019884624838656, "b": "1000000000000000019884624838656\" 1", "c": [-100000000000000000000, 7]})",
      "big.json");
  EXPECT_DOUBLE_EQ(document.root().at("a").number(), 1e30);
  EXPECT_EQ(document.root().at("b").string(), "1000000000000000019884624838656\" 1");
  EXPECT_DOUBLE_EQ(JsonValue(document.root().at("c").array().at(0).value(), "c").number(), -1e20);
  EXPECT_EQ(JsonValue(document.root().at("c").array().at(1).value(), "c").integer(), 7);
}

TEST(Json, MalformedTextIsRefused) {
  for (const std::string_view text : {"", "   ", "{", "}", "[1,]", "{\"a\":1", "{\"a\" 1}", "{'a': 1}", "nul", "01", "[1] [2]", "\"\\x\"",
                                      "\"\xff\"", "\"\n\"", "{\"a\":1}}", "1e999", "NaN", "\"\\ud800\""})
    EXPECT_THAT(error_of_parse(text), StartsWith("config.json: not valid JSON: ")) << text;
  EXPECT_THAT(error_of_parse(std::string_view("{\"a\":1}\0", 8)), StartsWith("config.json: not valid JSON: "));
}

TEST(Json, SizeIsLimited) {
  EXPECT_EQ(error_of_parse("[1, 2, 3]", {.max_bytes = 8}), "config.json: 9 bytes of JSON, expected at most 8");
  EXPECT_EQ(parse("[1, 2, 3]", {.max_bytes = 9}).root().array().size(), 3u);
}

TEST(Json, DepthIsLimited) {
  const auto nested = [](size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_TRUE(parse(nested(10), {.max_depth = 16}).root().is_array());
  EXPECT_EQ(error_of_parse(nested(17), {.max_depth = 16}), "config.json: JSON nested deeper than 16 levels");
  EXPECT_EQ(error_of_parse(nested(100000)), "config.json: JSON nested deeper than 64 levels");
  EXPECT_THROW(parse(std::string(1u << 20, '[')), Error);
  EXPECT_THROW(parse(std::string(1u << 20, '{')), Error);
}

TEST(Json, RepeatedKeysAreRefusedWhenAsked) {
  EXPECT_EQ(parse(R"({"a": 1, "a": 2})").root().object().size(), 2u);
  const JsonLimits unique{.unique_keys = true};
  EXPECT_EQ(error_of_parse(R"({"a": 1, "b": 2, "a": 2})", unique), "config.json: the key \"a\" appears twice in one object");
  EXPECT_THAT(error_of_parse(R"([{"x": {"k": 1, "k": 1}}])", unique), HasSubstr("the key \"k\" appears twice"));
  EXPECT_THAT(error_of_parse(R"({"ab": 1, "\u0061b": 2})", unique), HasSubstr("the key \"ab\" appears twice"));  // the same key, escaped
  EXPECT_EQ(parse(R"([{"a": 1}, {"a": 2}, {"b": {"a": 1}}])", unique).root().array().size(), 3u);
}

TEST(Json, DocumentsMayBeMoved) {
  auto first = parse(kConfig);
  const JsonDocument second = std::move(first);
  EXPECT_EQ(second.root().at("rope").at("type").string(), "yarn");
}

}  // namespace
}  // namespace cachalot
