// The hand-written splitters against the published regular expressions under PCRE2, and the limits of the latter.
#include "text/pretokenizer.h"

#include <gtest/gtest.h>

#include <random>

#include "support/support.h"
#include "text/tokenizer_support.h"
#include "text/unicode.h"

namespace cachalot::test {
namespace {

struct Collected final : PieceSink {
  std::vector<std::string> pieces;
  void piece(std::string_view text) override { pieces.emplace_back(text); }
};

std::vector<std::string> split(const PreTokenizer& pre, std::string_view text) {
  Collected sink;
  pre.split(text, sink);
  return sink.pieces;
}

constexpr PreFamily kFamilies[] = {PreFamily::kGpt2,        PreFamily::kSmollm,        PreFamily::kLlama3,    PreFamily::kQwen2,
                                   PreFamily::kDeepseekLlm, PreFamily::kDeepseekCoder, PreFamily::kDeepseekV3};

// Characters that Unicode 14 (PCRE2) and 16 (ours) class alike.
std::string random_text(std::mt19937& random) {
  static const std::vector<std::string> fragments = {" ",      "  ",
                                                     "   ",    "\n",
                                                     "\r\n",   "\n\n",
                                                     "\t",     "\u00a0",
                                                     "\u3000", "\u2028",
                                                     "\u0085", "'s",
                                                     "'S",     "'LL",
                                                     "'Re",    "'ve",
                                                     "'m",     "'D",
                                                     "'",      "'\u017f",
                                                     "\u017f", "a",
                                                     "Word",   "word",
                                                     "é",      "e\u0301",
                                                     "\u0301", "\u0323",
                                                     "ß",      "ǅ",
                                                     "1",      "23",
                                                     "456789", "\u0663",
                                                     "\u2167", "½",
                                                     "１",     "中",
                                                     "文字",   "かな",
                                                     "カナ",   "ー",
                                                     "한국",   "؟",
                                                     "·",      ".",
                                                     "...",    "!?",
                                                     "-",      "_",
                                                     "(",      ")",
                                                     "$",      "+",
                                                     "=",      "^",
                                                     "`",      "~",
                                                     "<",      "|",
                                                     "“",      "”",
                                                     "、",     "。",
                                                     "，",     "→",
                                                     "∑",      "😀",
                                                     "\u200d", "\u200b",
                                                     "\ufeff", "\x01",
                                                     "\x7f",   "ა",
                                                     "Ა",    "Ω",
                                                     "Ж",      "א",
                                                     "ع",      "ह",
                                                     "\u094d", "ไทย",
                                                     "\u0e49", "𐐀",
                                                     "𝒳",      "🏳️‍🌈",
                                                     "ꙮ",      "ﬁ",
                                                     "\ue000"};
  std::string text;
  const size_t n = random() % 30;
  for (size_t i = 0; i < n; ++i) text += fragments[random() % fragments.size()];
  return text;
}

TEST(PreTokenizer, HandWrittenEqualsTheRegexes) {
  std::mt19937 random(11);
  std::vector<std::pair<PreTokenizer, PreTokenizer>> pairs;
  for (const PreFamily family : kFamilies) {
    ASSERT_FALSE(PreTokenizer::steps_of(family).empty());
    pairs.emplace_back(PreTokenizer::of(family), PreTokenizer::compiled(PreTokenizer::steps_of(family), "twin"));
    ASSERT_EQ(PreTokenizer::from_steps(PreTokenizer::steps_of(family), "twin").family(), family);
  }
  for (int round = 0; round < 3000; ++round) {
    const std::string text = random_text(random);
    for (size_t i = 0; i < pairs.size(); ++i) {
      const auto pieces = split(pairs[i].first, text);
      ASSERT_EQ(pieces, split(pairs[i].second, text)) << "family " << i << ", text: " << text;
      std::string joined;
      for (const std::string& piece : pieces) joined += piece;
      ASSERT_EQ(joined, text);
    }
  }
}

TEST(PreTokenizer, PiecesOfKnownText) {
  using Pieces = std::vector<std::string>;
  const auto v3 = PreTokenizer::of(PreFamily::kDeepseekV3);
  EXPECT_EQ(split(v3, "rfid501234.go"), (Pieces{"rfid", "501", "234", ".go"}));
  EXPECT_EQ(split(v3, "  a  b\n\n c \n"), (Pieces{" ", " a", " ", " b", "\n\n", " c", " \n"}));
  EXPECT_EQ(split(v3, "x 中文かな1"), (Pieces{"x", " ", "中文かな", "1"}));
  EXPECT_EQ(split(v3, ""), Pieces{});
  EXPECT_EQ(split(PreTokenizer::of(PreFamily::kDeepseekLlm), "a 12中\n!"), (Pieces{"a", " ", "12", "中", "\n", "!"}));
  EXPECT_EQ(split(PreTokenizer::of(PreFamily::kDeepseekCoder), "a12"), (Pieces{"a", "1", "2"}));
  EXPECT_EQ(split(PreTokenizer::of(PreFamily::kGpt2), "don't DON'T"), (Pieces{"don", "'t", " DON", "'", "T"}));
  EXPECT_EQ(split(PreTokenizer::of(PreFamily::kQwen2), "DON'T 12"), (Pieces{"DON", "'T", " ", "1", "2"}));
  EXPECT_EQ(split(PreTokenizer::of(PreFamily::kLlama3), "1234"), (Pieces{"123", "4"}));
  EXPECT_EQ(split(PreTokenizer::of(PreFamily::kSmollm), "a 12"), (Pieces{"a", " ", "1", "2"}));
}

TEST(PreTokenizer, InvalidBytesArePieces) {
  std::mt19937 random(12);
  for (int round = 0; round < 2000; ++round) {
    std::string text = random_text(random);
    for (char& c : text)
      if (random() % 8 == 0) c = static_cast<char>(random());
    for (const PreFamily family : kFamilies) {
      for (const PreTokenizer& pre : {PreTokenizer::of(family), PreTokenizer::compiled(PreTokenizer::steps_of(family), "twin")}) {
        std::string joined;
        for (const std::string& piece : split(pre, text)) joined += piece;
        ASSERT_EQ(joined, text);
      }
    }
  }
}

TEST(PreTokenizer, RemovedAndInverted) {
  using Pieces = std::vector<std::string>;
  const auto pre = [](bool remove, bool invert) {
    return PreTokenizer::from_steps({{.regex = "[a-z]+", .remove_matches = remove, .invert = invert}}, "t");
  };
  EXPECT_EQ(split(pre(false, false), "ab1cd"), (Pieces{"ab", "1", "cd"}));
  EXPECT_EQ(split(pre(true, false), "ab1cd"), (Pieces{"1"}));
  EXPECT_EQ(split(pre(true, true), "ab1cd"), (Pieces{"ab", "cd"}));
  EXPECT_EQ(split(PreTokenizer::from_steps({{.regex = "a.", .literal = true}}, "t"), "aba.b"), (Pieces{"ab", "a.", "b"}));
}

// Patterns that explode or are quadratic end in an Error or in time, never in a hang or a crash.
TEST(PreTokenizer, HostilePatternsEnd) {
  int refused = 0;
  for (const char* pattern : {"(a+)+$", "(a|aa)+$", "(a*)*b", "\\s+$", "(?:a?){50}a{50}", "(.*)(.*)(.*)(.*)(.*)x", "(?R)?a", "(a)|(?1)b"}) {
    const auto pre = PreTokenizer::from_steps({{.regex = pattern}}, "t.json: pre_tokenizer");
    for (const std::string& text : {std::string(131072, 'a') + "!", std::string(131072, ' ') + "!"}) {
      const double begin = cpu_seconds();
      std::string error;
      try {
        std::string joined;
        for (const std::string& piece : split(pre, text)) joined += piece;
        EXPECT_EQ(joined, text);
      } catch (const Error& e) {
        error = e.what();
        ++refused;
        EXPECT_EQ(error.rfind("t.json: pre_tokenizer: the pattern \"", 0), 0u) << error;
      }
      EXPECT_LT(cpu_seconds() - begin, 10.0) << pattern << ' ' << error;
    }
  }
  EXPECT_GT(refused, 0);
}

TEST(PreTokenizer, BadPatternsAreNamed) {
  const auto error = [](const char* pattern) {
    return error_of([pattern] { (void)PreTokenizer::from_steps({{.regex = pattern}}, "t.json: pre_tokenizer"); });
  };
  EXPECT_EQ(error("(a"),
            "t.json: pre_tokenizer: found the pattern \"(a\", expected a valid regular expression: missing closing "
            "parenthesis at byte 2");
  for (const char* pattern : {"", "[", "*", "\\p{Nonsense}", "a{99999}", "(?<=a*)b", "\\C", "\xff"}) EXPECT_NE(error(pattern), "");
  EXPECT_NE(error(std::string(100000, 'a').c_str()), "");
  EXPECT_NE(error(std::string(20000, '(').c_str()), "");
}

}  // namespace
}  // namespace cachalot::test
