// JsonScanner: strings, numbers and what it refuses.
#include "io/json_scanner.h"

#include <gmock/gmock.h>

#include "support/support.h"

namespace cachalot {
namespace {

using test::error_of;
using ::testing::HasSubstr;

std::string unescaped(std::string_view json) { return JsonScanner::unescape(JsonScanner(json, "t").string("x")); }

TEST(JsonScanner, Unescapes) {
  EXPECT_EQ(unescaped(R"("plain é")"), "plain é");
  EXPECT_EQ(unescaped(R"("\"\\\/\b\f\n\r\t")"), "\"\\/\b\f\n\r\t");
  EXPECT_EQ(unescaped(R"("A\u0041\u00e9\u4e2d\ud83d\ude00z")"), "AAé中😀z");
  EXPECT_EQ(unescaped(R"("\ud83d")"), "\xef\xbf\xbd");  // lone surrogates
  EXPECT_EQ(unescaped(R"("\ud83d\u0041\ude00\ud83d\n")"),
            "\xef\xbf\xbd"
            "A"
            "\xef\xbf\xbd\xef\xbf\xbd\n");
  EXPECT_EQ(unescaped(R"("\u0000")"), std::string(1, '\0'));
}

TEST(JsonScanner, ReadsWholeNumbers) {
  const auto number = [](std::string_view json) { return JsonScanner(json, "t").whole_number("n"); };
  EXPECT_EQ(number("0"), 0U);
  EXPECT_EQ(number(" 12,"), 12U);
  EXPECT_EQ(number("9223372036854775807"), static_cast<uint64_t>(INT64_MAX));
  for (const char* bad :
       {"9223372036854775808", "18446744073709551615", "18446744073709551616", "-1", "-0", "1.0", "1e3", "100000000000000000000000"})
    EXPECT_THAT(error_of([&] { number(bad); }), HasSubstr(std::string("t: n: found ") + bad)) << bad;
  for (const char* bad : {"", "x", "\"1\"", "01", "1.", "1e", "-", "+1", ".5", "null"})
    EXPECT_THAT(error_of([&] { number(bad); }), HasSubstr("t: byte")) << bad;
}

TEST(JsonScanner, SkipsValuesUpToTheDepth) {
  const auto skip = [](std::string_view json, int depth) {
    JsonScanner scanner(json, "t");
    scanner.skip_value(depth);
    scanner.expect_end();
  };
  skip(R"( {"a":[1,-2.5e+3,{"b":null}],"c":true,"d":false,"e":"x\n"} )", 3);
  skip("[]", 1);
  skip("1", 0);
  EXPECT_THAT(error_of([&] { skip("[[]]", 1); }), HasSubstr("no deeper nesting"));
  EXPECT_THAT(error_of([&] { skip("[1,]", 1); }), HasSubstr("expected a value"));
  EXPECT_THAT(error_of([&] { skip("{1:2}", 1); }), HasSubstr("a key"));
  EXPECT_THAT(error_of([&] { skip("[1 2]", 1); }), HasSubstr("expected ']'"));
  EXPECT_THAT(error_of([&] { skip("truth", 1); }), HasSubstr("expected"));
  EXPECT_THAT(error_of([&] { skip("1 x", 1); }), HasSubstr("expected the end"));
  EXPECT_THAT(error_of([&] { skip(std::string_view("1\0", 2), 1); }), HasSubstr("expected the end"));
}

}  // namespace
}  // namespace cachalot
