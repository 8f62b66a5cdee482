// Error, printable and CACHALOT_CHECK.
#include "base/error.h"

#include <gtest/gtest.h>

#include "base/check.h"
#include "support/support.h"

namespace cachalot {
namespace {

TEST(Fail, ThrowsTheFormattedText) {
  EXPECT_EQ(test::error_of([] { fail("{}: found {}, expected {}", "a.gguf", 3, "2"); }), "a.gguf: found 3, expected 2");
}

TEST(Printable, PlainTextIsKept) {
  EXPECT_EQ(printable(""), "");
  EXPECT_EQ(printable("blk.0.attn_q.weight"), "blk.0.attn_q.weight");
  EXPECT_EQ(printable("\xe9\xb2\xb8"), "\xe9\xb2\xb8");  // UTF-8 of more than one byte
}

TEST(Printable, ControlCharactersAreEscaped) {
  EXPECT_EQ(printable("a\nb\tc"), "a\\x0ab\\x09c");
  EXPECT_EQ(printable("a\xff\xe9\xb2z\xc2\x9b\xed\xa0\x80"),
            "a\\xff\\xe9\\xb2z\\xc2\\x9b\\xed\\xa0\\x80");  // no UTF-8, a C1 control, a surrogate
  EXPECT_EQ(printable(std::string_view("\0\x1b[2J\x7f", 6)), "\\x00\\x1b[2J\\x7f");
}

TEST(Printable, LongTextIsCut) {
  EXPECT_EQ(printable(std::string(80, 'x')), std::string(80, 'x'));
  EXPECT_EQ(printable(std::string(81, 'x')), std::string(80, 'x') + "...");
  EXPECT_EQ(printable("abcdef", 3), "abc...");
  EXPECT_EQ(printable("ab\xe9\xb2\xb8", 4), "ab...");  // no half character
  EXPECT_LE(printable(std::string(1u << 20, '\n')).size(), 80u + 3 + 3);
}

TEST(CheckDeathTest, SaysWhatFailedAndWhy) {
  const int n = 3;
  EXPECT_DEATH(CACHALOT_CHECK(n == 4), "error_test.cpp:[0-9]+: check failed: n == 4");
  EXPECT_DEATH(CACHALOT_CHECK(n == 4, "n is {}", n), "check failed: n == 4: n is 3");
  CACHALOT_CHECK(n == 3, "never formatted");
}

}  // namespace
}  // namespace cachalot
