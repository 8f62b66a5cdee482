// Stop strings over streams cut anywhere.
#include "text/stop.h"

#include <gtest/gtest.h>

#include <random>

#include "support/support.h"

namespace cachalot::test {
namespace {

// Everything shown for `pieces`, and whether a stop string ended it.
std::pair<std::string, bool> run(StopMatcher matcher, const std::vector<std::string>& pieces) {
  std::string text;
  for (const std::string& piece : pieces) text += matcher.push(piece).text;
  text += matcher.flush();
  return {text, matcher.stopped()};
}

using Outcome = std::pair<std::string, bool>;

TEST(StopMatcher, EndsTheTextBeforeTheStopString) {
  EXPECT_EQ(run(StopMatcher({"END"}), {"abc", "END", "def"}), Outcome("abc", true));
  EXPECT_EQ(run(StopMatcher({"END"}), {"abcE", "N", "Dx"}), Outcome("abc", true));
  EXPECT_EQ(run(StopMatcher({"END"}), {"abcE", "N", "X"}), Outcome("abcENX", false));
  EXPECT_EQ(run(StopMatcher({"END"}), {"abcEN"}), Outcome("abcEN", false));
  EXPECT_EQ(run(StopMatcher({"END"}), {"END"}), Outcome("", true));
  EXPECT_EQ(run(StopMatcher({"END"}, true), {"aEN", "Db"}), Outcome("aEND", true));
  EXPECT_EQ(run(StopMatcher({}), {"a", "b"}), Outcome("ab", false));
  EXPECT_EQ(run(StopMatcher({"</s>", "中文"}), {"x中", "文y"}), Outcome("x", true));
}

TEST(StopMatcher, HoldsBackNoMoreThanAPossibleBeginning) {
  StopMatcher matcher({"abcd", "xy"});
  EXPECT_EQ(matcher.push("hello ab").text, "hello ");
  EXPECT_EQ(matcher.push("c").text, "");
  EXPECT_EQ(matcher.push("abc").text, "abc");
  EXPECT_EQ(matcher.push("z").text, "abcz");
  EXPECT_EQ(matcher.push("x").text, "");
  EXPECT_EQ(matcher.flush(), "x");
  EXPECT_FALSE(matcher.push("y").stopped);
}

TEST(StopMatcher, SelfOverlap) {
  EXPECT_EQ(run(StopMatcher({"aab"}), {"a", "a", "a", "b"}), Outcome("a", true));
  EXPECT_EQ(run(StopMatcher({"abab"}), {"abaabab"}), Outcome("aba", true));
}

TEST(StopMatcher, FirstCompleteWinsLongestOfEquals) {
  StopMatcher matcher({"b", "abc"});
  const auto result = matcher.push("xabc");
  EXPECT_EQ(result.text, "xa");
  EXPECT_TRUE(result.stopped);
  EXPECT_EQ(matcher.matched(), "b");
  EXPECT_EQ(run(StopMatcher({"c", "abc"}), {"xabc"}), Outcome("x", true));
  // After the end nothing comes.
  EXPECT_EQ(matcher.push("more").text, "");
  EXPECT_TRUE(matcher.push("more").stopped);
  EXPECT_EQ(matcher.flush(), "");
}

TEST(StopMatcher, EmptyStopIsRefused) {
  EXPECT_EQ(error_of([] { StopMatcher({"a", ""}); }), "stop: found an empty string, expected text");
}

TEST(StopMatcher, CutsMakeNoDifference) {
  std::mt19937 random(31);
  const std::vector<std::string> stops = {"aba", "bb", "abcab", "ca"};
  for (int round = 0; round < 3000; ++round) {
    std::string text(random() % 20, 'a');
    for (char& c : text) c = static_cast<char>('a' + random() % 3);
    // The plain way: the first end at which any stop string fits.
    Outcome expected{text, false};
    for (size_t end = 1; end <= text.size() && !expected.second; ++end) {
      size_t longest = 0;
      for (const std::string& stop : stops)
        if (std::string_view(text).substr(0, end).ends_with(stop)) longest = std::max(longest, stop.size());
      if (longest > 0) expected = {text.substr(0, end - longest), true};
    }
    std::vector<std::string> pieces;
    for (size_t at = 0; at < text.size();) {
      const size_t n = 1 + random() % 4;
      pieces.push_back(text.substr(at, n));
      at += n;
    }
    ASSERT_EQ(run(StopMatcher(stops), pieces), expected) << text;
  }
}

}  // namespace
}  // namespace cachalot::test
