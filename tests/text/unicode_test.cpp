// UTF-8, the byte alphabet, NFC and the streaming decoder.
#include "text/unicode.h"

#include <gtest/gtest.h>

#include <random>

#include "text/detokenizer.h"
#include "text/tokenizer_support.h"

namespace cachalot::test {
namespace {

using namespace std::string_literals;

TEST(Unicode, InvalidPartsAreReplacedAsPythonDoes) {
  const std::string r(unicode::kReplacement);
  // Each expectation is bytes(...).decode('utf-8', errors='replace') of Python 3.
  const std::pair<std::string, std::string> cases[] = {
      {"abc", "abc"},
      {"\xff\xfe", r + r},
      {"\xe4\xb8", r},
      {"\xe4\xb8X", r + "X"},
      {"\xf0\x9f\x98", r},
      {"\xf0\x9f\x98\xf0\x9f\x98\x80", r + "😀"},
      {"\xc0\x80", r + r},
      {"\xed\xa0\x80", r + r + r},
      {"\xf4\x90\x80\x80", r + r + r + r},
      {"\xe0\x80\x80", r + r + r},
      {"\x80\xe4\xb8\xad\x80", r + "中" + r},
      {"a\0b"s, "a\0b"s},
  };
  for (const auto& [bytes, text] : cases) EXPECT_EQ(unicode::replace_invalid(bytes), text);
}

TEST(Unicode, AlphabetIsABijection) {
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(byte);
  const std::string text = unicode::bytes_to_alphabet(all);
  EXPECT_EQ(unicode::alphabet_to_bytes(text), all);
  EXPECT_EQ(unicode::bytes_to_alphabet(" \n\xad"), "ĠĊŃ");
  EXPECT_EQ(unicode::alphabet_to_bytes("▁"), std::nullopt);
  EXPECT_EQ(unicode::alphabet_to_bytes(" "), std::nullopt);
  EXPECT_EQ(unicode::alphabet_to_bytes("\xff"), std::nullopt);
}

TEST(Unicode, Flags) {
  using unicode::Flag;
  const uint8_t* const table = unicode::flag_table();
  EXPECT_EQ(table['a'], Flag::kLetter | Flag::kCased);
  EXPECT_EQ(table['7'], Flag::kNumber);
  EXPECT_EQ(table['$'], Flag::kSymbol);
  EXPECT_EQ(table['-'], Flag::kPunctuation);
  EXPECT_EQ(table[0x4E2D], Flag::kLetter);
  EXPECT_EQ(table[0x85], Flag::kSpace);
  EXPECT_EQ(table[0x180E], 0);
  EXPECT_EQ(table[0x301], Flag::kMark | Flag::kUnsettled);
  EXPECT_EQ(table[0x10FFFF], 0);
  EXPECT_EQ(table[unicode::kInvalidByte], 0);
}

TEST(Unicode, Nfc) {
  const std::pair<std::string, std::string> cases[] = {
      {"plain", "plain"},
      {"e\u0301", "é"},
      {"é", "é"},
      {"u\u0308\u0323", "ụ\u0308"},      // marks reorder: the dot below composes first
      {"a\u0301\u0301", "á\u0301"},      // the second of equal class is blocked
      {"\u1112\u1161\u11ab", "한"},      // jamo
      {"하\u11ab", "한"},                // syllable and final
      {"한\u11ab", "한\u11ab"},          // has a final already
      {"\u212b\u2126\u212a", "ÅΩK"},     // singletons
      {"\u0958", "\u0915\u093c"},        // excluded from composition
      {"\u0344", "\u0308\u0301"},        // decomposes to two marks
      {"\u1e9b\u0323", "\u1e9b\u0323"},  // canonical only: long s stays
      {"\u0301a", "\u0301a"},            // a mark without a base
      {"\ufb1d", "\u05d9\u05b4"},
      {"a\xff\u0301", "a\xff\u0301"},  // invalid bytes are bases that nothing joins
      {"\xff", "\xff"},
  };
  for (const auto& [text, expected] : cases) {
    EXPECT_EQ(unicode::nfc(text), expected) << text;
    EXPECT_EQ(unicode::nfc(expected), expected) << text;
  }
  EXPECT_TRUE(unicode::is_surely_nfc("Grüße 中文 한국"));
  EXPECT_FALSE(unicode::is_surely_nfc("u\u0308"));
}

TEST(Unicode, NfcOfLongRuns) {
  std::string marks = "a";
  for (int i = 0; i < 60000; ++i) marks += i % 2 ? "\u0323" : "\u0301";
  const std::string out = unicode::nfc(marks);
  EXPECT_EQ(out.substr(0, 3), "ạ");
  EXPECT_EQ(unicode::nfc(out), out);
}

// Any bytes in any cut.
TEST(Utf8Stream, EqualsTheWholeHoweverCut) {
  std::mt19937 random(21);
  const std::string fragments[] = {"a", "é", "中", "😀", "\xff", "\xe4", "\xe4\xb8", "\xf0\x9f", "\x80", "\xed\xa0\x80", "\xc0", "\xf4\x90"};
  for (int round = 0; round < 3000; ++round) {
    std::string bytes;
    for (size_t i = random() % 12; i > 0; --i) bytes += fragments[random() % std::size(fragments)];
    Utf8Stream stream;
    std::string text;
    for (size_t at = 0; at < bytes.size();) {
      const size_t n = 1 + random() % 3;
      const std::string part = stream.push(std::string_view(bytes).substr(at, n));
      ASSERT_EQ(unicode::replace_invalid(part), part);
      text += part;
      at += n;
    }
    text += stream.finish();
    ASSERT_EQ(text, unicode::replace_invalid(bytes));
    ASSERT_EQ(stream.finish(), "");
  }
}

TEST(Utf8Stream, HoldsOnlyWhatMayStillBecomeACharacter) {
  Utf8Stream stream;
  EXPECT_EQ(stream.push("\xf0\x9f"), "");
  EXPECT_EQ(stream.push("\x98"), "");
  EXPECT_EQ(stream.push("\x80!"), "😀!");
  EXPECT_EQ(stream.push("\xff"), "\uFFFD");  // at once
  EXPECT_EQ(stream.push("\xe4"), "");
  EXPECT_EQ(stream.push("x"), "\uFFFDx");
  EXPECT_EQ(stream.push("\xe4\xb8"), "");
  EXPECT_EQ(stream.finish(), "\uFFFD");
  EXPECT_EQ(stream.push("ok"), "ok");
}

TEST(Detokenizer, NeverHalfACharacter) {
  // One token a byte: ids are the bytes.
  const Tokenizer tokenizer = Tokenizer::from_json(small_tokenizer_json({"Ł Ń"}), "t");
  const auto run = [&tokenizer](const std::vector<int>& ids) {
    Detokenizer stream(tokenizer);
    std::vector<std::string> parts;
    for (const int id : ids) parts.push_back(stream.push(id));
    parts.push_back(stream.finish());
    return parts;
  };
  using Parts = std::vector<std::string>;
  EXPECT_EQ(run({0xF0, 0x9F, 0x98, 0x80}), (Parts{"", "", "", "😀", ""}));
  EXPECT_EQ(run({0xE4, 0xB8, 0xAD}), (Parts{"", "", "中", ""}));
  EXPECT_EQ(run({'a', 0xFF, 'b'}), (Parts{"a", "\uFFFD", "b", ""}));
  EXPECT_EQ(run({'a', 0xE4, 0xB8}), (Parts{"a", "", "", "\uFFFD"}));
  EXPECT_EQ(run({-1, 100000, 'a'}), (Parts{"", "", "a", ""}));
}

}  // namespace
}  // namespace cachalot::test
