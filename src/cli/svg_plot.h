// What the pictures of commands share: an SVG page for light and dark, its lines and texts, round ticks, and names of points that keep out
// of each other's way.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cachalot {

// A step of 1, 2 or 5 times a power of ten that cuts `span` into about `n` parts.
double tick_step(double span, int n);

class SvgPlot {
 public:
  enum class Anchor : uint8_t { start, middle, end };

  // The area of the plot lies `left` .. `right` and `top` .. `bottom` pixels into the page.
  SvgPlot(double width, double height, const std::string& title);
  double left = 70, right = 700, top = 40, bottom = 360;

  void text(double x, double y, Anchor anchor, std::string_view what);
  // Beside the plot, read from below.
  void upright_text(double x, double y, std::string_view what);
  void line(const char* style, double x1, double y1, double x2, double y2);  // "grid", "axis" or "base"
  // A point, and its name right of it where there is room, else left; above the names that are there already. From the lowest point up.
  void point(double x, double y, std::string_view name);
  [[nodiscard]] std::string finish() const { return out_ + "</svg>\n"; }

 private:
  struct Box {
    double x1, x2, y;  // y: the text's baseline
  };
  std::string out_;
  std::vector<Box> names_;
};

}  // namespace cachalot
