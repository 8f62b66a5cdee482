// Markdown, JSON and SVG of a comparison.
#include "cli/compare_output.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/svg_plot.h"
#include "cli/text_units.h"

namespace cachalot {
namespace {

using Json = nlohmann::ordered_json;

std::string speed_text(const ComparedModel& m) {
  if (m.prefill_rate <= 0.0) return "";
  return fmt::format(" {} | {:.1f} | {:.1f} |", seconds_text(m.ttft_seconds), m.prefill_rate, m.decode_rate);
}

Json domain_json(const ComparedDomain& d) {
  return {{"domain", d.domain}, {"tokens", d.tokens},     {"ppl", d.ppl},       {"ppl_ratio", d.ppl_ratio},
          {"kl", d.kl},         {"kl_error", d.kl_error}, {"kl_p99", d.kl_p99}, {"top1", d.top1}};
}

// The plot's area in pixels, and where figures lie in it.
struct Plot {
  static constexpr double kLeft = 70, kRight = 700, kTop = 40, kBottom = 360;
  double x_low = 0.0, x_high = 1.0;   // bytes
  double y_low = -3.0, y_high = 0.0;  // log10 of KL

  [[nodiscard]] double x(double bytes) const { return kLeft + (bytes - x_low) / (x_high - x_low) * (kRight - kLeft); }
  [[nodiscard]] double y(double kl) const { return kBottom - (std::log10(kl) - y_low) / (y_high - y_low) * (kBottom - kTop); }
};

// Mean KL as it is drawn: a model that hardly differs is put at the lower edge.
constexpr double kLeastKl = 1e-7;
double drawn_kl(const ComparedModel& m) { return std::max(m.all.kl, kLeastKl); }

Plot plot_of(const Comparison& c) {
  Plot plot;
  double most = 0.0, least = 1e300, low = 1e300, high = 0.0;
  for (const ComparedModel& m : c.models) {
    most = std::max(most, m.file_bytes);
    least = std::min(least, m.file_bytes);
    if (m.is_base) continue;
    low = std::min(low, drawn_kl(m));
    high = std::max(high, drawn_kl(m));
  }
  const double margin = std::max(0.08 * (most - least), 0.02 * most);
  plot.x_low = std::max(0.0, least - margin);
  plot.x_high = most + margin;
  if (high > 0.0) {
    plot.y_low = std::floor(std::log10(low) - 0.1);
    plot.y_high = std::max(plot.y_low + 1.0, std::ceil(std::log10(high) + 0.1));
  }
  return plot;
}

}  // namespace

std::string comparison_markdown(const Comparison& c) {
  const bool timed = std::any_of(c.models.begin(), c.models.end(), [](const ComparedModel& m) { return m.prefill_rate > 0.0; });
  std::string out = fmt::format("Against {}; text: {}", c.base, c.method);
  if (timed) out += fmt::format("; speed: {} tokens read, {} generated, one request on {}", c.prompt, c.generated, c.device);
  out += ".\n\n| model | type | file | memory | bits/weight |";
  if (timed) out += " TTFT | prefill t/s | decode t/s |";
  out += " perplexity | ratio | mean KL | 99% KL | same top 1 |\n| --- | --- | ---: | ---: | ---: |";
  if (timed) out += " ---: | ---: | ---: |";
  out += " ---: | ---: | ---: | ---: | ---: |\n";
  for (const ComparedModel& m : c.models) {
    out += fmt::format("| {} | {} | {} | {} | {:.3f} |{} {:.4f} |", m.name, m.type, bytes_text(m.file_bytes), bytes_text(m.memory_bytes),
                       m.bits_per_weight, speed_text(m), m.all.ppl);
    out += m.is_base ? " 1 | base | | |\n"
                     : fmt::format(" {:.4f} | {:.5f} ± {:.5f} | {:.4f} | {:.2f}% |\n", m.all.ppl_ratio, m.all.kl, m.all.kl_error,
                                   m.all.kl_p99, 100.0 * m.all.top1);
  }
  if (c.models[0].domains.size() < 2) return out;
  out += "\nMean KL, and perplexity ratio, by domain:\n\n| model |";
  for (const ComparedDomain& d : c.models[0].domains) out += fmt::format(" {} |", d.domain);
  out += "\n| --- |";
  for (size_t i = 0; i < c.models[0].domains.size(); ++i) out += " ---: |";
  out += "\n";
  for (const ComparedModel& m : c.models) {
    if (m.is_base) continue;
    out += fmt::format("| {} |", m.name);
    for (const ComparedDomain& d : m.domains) out += fmt::format(" {:.5f}, {:.4f} |", d.kl, d.ppl_ratio);
    out += "\n";
  }
  return out;
}

Json comparison_json(const Comparison& c) {
  Json out{{"base", c.base},     {"method", c.method},       {"device", c.device},
           {"prompt", c.prompt}, {"generated", c.generated}, {"models", Json::array()}};
  for (const ComparedModel& m : c.models) {
    Json model{{"name", m.name},
               {"path", m.path},
               {"is_base", m.is_base},
               {"type", m.type},
               {"file_bytes", m.file_bytes},
               {"memory_bytes", m.memory_bytes},
               {"bits_per_weight", m.bits_per_weight}};
    if (m.prefill_rate > 0.0) {
      model["ttft_seconds"] = m.ttft_seconds;
      model["prefill_tokens_per_second"] = m.prefill_rate;
      model["decode_tokens_per_second"] = m.decode_rate;
    }
    model.update(domain_json(m.all));
    model.erase("domain");
    for (const ComparedDomain& d : m.domains) model["domains"].push_back(domain_json(d));
    out["models"].push_back(std::move(model));
  }
  return out;
}

std::string comparison_svg(const Comparison& c) {
  using Anchor = SvgPlot::Anchor;
  const Plot plot = plot_of(c);
  SvgPlot out(720, 410, "File size against mean KL divergence");
  out.left = Plot::kLeft, out.right = Plot::kRight, out.top = Plot::kTop, out.bottom = Plot::kBottom;
  for (double decade = plot.y_low; decade <= plot.y_high + 1e-9; decade += 1.0) {
    const double kl = std::pow(10.0, decade), y = plot.y(kl);
    out.line("grid", out.left, y, out.right, y);
    out.text(out.left - 8, y + 4, Anchor::end, fmt::format("{:g}", kl));
  }
  const double step = tick_step(plot.x_high - plot.x_low, 6);
  for (double bytes = std::ceil(plot.x_low / step) * step; bytes <= plot.x_high; bytes += step) {
    out.line("grid", plot.x(bytes), out.top, plot.x(bytes), out.bottom);
    out.text(plot.x(bytes), out.bottom + 18, Anchor::middle, bytes_text(bytes));
  }
  out.line("axis", out.left, out.top, out.left, out.bottom);
  out.line("axis", out.left, out.bottom, out.right, out.bottom);
  out.text(out.left, 20, Anchor::start, "Mean KL divergence from " + c.base + ", nats (lower is better)");
  out.text((out.left + out.right) / 2, 402, Anchor::middle, "file size (smaller is better)");

  std::vector<const ComparedModel*> shown;
  for (const ComparedModel& m : c.models) {
    if (!m.is_base) {
      shown.push_back(&m);
      continue;
    }
    const double x = plot.x(m.file_bytes);
    out.line("base", x, out.top, x, out.bottom);
    const bool right = x > (out.left + out.right) / 2;
    out.text(x + (right ? -6 : 6), out.bottom - 8, right ? Anchor::end : Anchor::start, m.name);
  }
  std::sort(shown.begin(), shown.end(), [](const ComparedModel* a, const ComparedModel* b) { return drawn_kl(*a) < drawn_kl(*b); });
  for (const ComparedModel* m : shown) out.point(plot.x(m->file_bytes), plot.y(drawn_kl(*m)), m->name);
  return out.finish();
}

}  // namespace cachalot
