// SVG text.
#include "cli/svg_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/xml_text.h"

namespace cachalot {
namespace {

constexpr double kLineHeight = 13.0, kLetter = 6.8;  // of text in 12 pixels, a little generous

}  // namespace

double tick_step(double span, int n) {
  const double raw = span / n, power = std::pow(10.0, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (raw <= factor * power) return factor * power;
  return 10.0 * power;
}

SvgPlot::SvgPlot(double width, double height, const std::string& title)
    : out_(fmt::format(
          "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" role=\"img\" font-family=\"sans-serif\" font-size=\"12\">\n"
          "<title>{2}</title>\n"
          "<style>\n"
          ":root{{--ink:#1b1f24;--faint:#d0d7de;--mark:#0b62c4;--page:#ffffff}}\n"
          "@media (prefers-color-scheme:dark){{:root{{--ink:#e6edf3;--faint:#3d444d;--mark:#5cb0ff;--page:#0d1117}}}}\n"
          ".page{{fill:var(--page)}}text{{fill:var(--ink)}}.grid{{stroke:var(--faint)}}.axis{{stroke:var(--ink)}}.mark{{fill:var(--mark)}}"
          "\n"
          ".base{{stroke:var(--mark);stroke-dasharray:4 4}}\n"
          "</style>\n<rect class=\"page\" width=\"{0}\" height=\"{1}\"/>\n",
          width, height, xml_escaped(title))) {}

void SvgPlot::text(double x, double y, Anchor anchor, std::string_view what) {
  constexpr const char* kNames[] = {"start", "middle", "end"};
  out_ += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", x, y, kNames[static_cast<int>(anchor)],
                      xml_escaped(what));
}

void SvgPlot::upright_text(double x, double y, std::string_view what) {
  out_ +=
      fmt::format("<text transform=\"translate({:.1f} {:.1f}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n", x, y, xml_escaped(what));
}

void SvgPlot::line(const char* style, double x1, double y1, double x2, double y2) {
  out_ += fmt::format("<line class=\"{}\" x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>\n", style, x1, y1, x2, y2);
}

void SvgPlot::point(double x, double y, std::string_view name) {
  out_ += fmt::format("<circle class=\"mark\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"5\"/>\n", x, y);
  const double width = kLetter * static_cast<double>(name.size());
  const bool fits = x + 9 + width <= right;
  const double x1 = fits ? x + 9 : x - 9 - width;
  double at = y + 4;
  for (bool moved = true; moved;) {
    moved = false;
    for (const Box& box : names_)
      if (x1 < box.x2 && box.x1 < x1 + width && std::fabs(at - box.y) < kLineHeight) {
        at = box.y - kLineHeight;
        moved = true;
      }
  }
  names_.push_back({x1, x1 + width, at});
  text(fits ? x + 9 : x - 9, at, fits ? Anchor::start : Anchor::end, name);
}

}  // namespace cachalot
