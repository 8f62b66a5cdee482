// Pictures: names of points do not cover each other and stay on the page; ticks are round.
#include "cli/svg_plot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace cachalot::test {
namespace {

using testing::HasSubstr;

struct Name {
  double x, y;
  bool right_of_point;
};

// The texts of a picture that begin with "point".
std::vector<Name> names_of(const std::string& svg) {
  std::vector<Name> out;
  for (size_t at = svg.find("<text"); at != std::string::npos; at = svg.find("<text", at + 1)) {
    const std::string element = svg.substr(at, svg.find("</text>", at) - at);
    if (element.find(">point") == std::string::npos) continue;
    out.push_back({std::stod(element.substr(element.find("x=\"") + 3)), std::stod(element.substr(element.find("y=\"") + 3)),
                   element.find("\"start\"") != std::string::npos});
  }
  return out;
}

TEST(SvgPlot, NamesKeepOutOfEachOthersWay) {
  SvgPlot plot(720, 410, "a < b");
  for (int i = 0; i < 4; ++i) plot.point(100 + 3 * i, 300 - i, "point with a long name");
  plot.point(500, 300, "point");
  plot.point(690, 200, "point at the edge");
  const std::string svg = plot.finish();
  EXPECT_THAT(svg, HasSubstr("a &lt; b"));
  const std::vector<Name> names = names_of(svg);
  ASSERT_EQ(names.size(), 6u);
  for (size_t i = 0; i < 4; ++i)
    for (size_t j = 0; j < i; ++j) EXPECT_GE(std::fabs(names[i].y - names[j].y), 12.0) << i << ' ' << j;
  EXPECT_EQ(names[4].y, 304.0);  // far from the others
  EXPECT_TRUE(names[4].right_of_point);
  EXPECT_FALSE(names[5].right_of_point);
}

TEST(SvgPlot, TicksAreRound) {
  EXPECT_EQ(tick_step(9.0, 6), 2.0);
  EXPECT_EQ(tick_step(1200.0, 6), 200.0);
  EXPECT_DOUBLE_EQ(tick_step(0.29, 6), 0.05);
}

}  // namespace
}  // namespace cachalot::test
