// Tables and sentences.
#include "quant/report.h"

#include <fmt/format.h>

#include <algorithm>

namespace cachalot {

std::vector<std::string> advice(const QuantizeReport& report, const ReportContext& context) {
  // English law loses 1.23 times what prose does when prose alone was calibrated on, and 0.7 of that with law of its own.
  constexpr double kWorthTelling = 1.15;
  std::vector<std::string> out;
  const DomainLoss* all = report.domains.empty() ? nullptr : &report.domains.back();
  for (const DomainLoss& d : report.domains) {
    if (&d == all || all == nullptr) continue;
    const auto calibrated = std::find_if(context.calibration.begin(), context.calibration.end(),
                                         [&](const DomainStats& s) { return s.domain == d.domain && s.used > 0; });
    const bool was = calibrated != context.calibration.end();
    double reference = all->divergence.kl;
    if (!was) {  // beside the domains that were calibrated on, when there are such
      double sum = 0.0, tokens = 0.0;
      for (const DomainLoss& o : report.domains)
        if (&o != all && std::any_of(context.calibration.begin(), context.calibration.end(),
                                     [&](const DomainStats& s) { return s.domain == o.domain && s.used > 0; })) {
          sum += o.divergence.kl * static_cast<double>(o.divergence.tokens);
          tokens += static_cast<double>(o.divergence.tokens);
        }
      if (tokens > 0.0) reference = sum / tokens;
    }
    if (!was && d.divergence.kl > kWorthTelling * reference)
      out.push_back(
          fmt::format("\"{}\" loses {:.1f} times as much (mean KL {:.4f} against {:.4f}) and was not calibrated on: add --domain {}=FILE "
                      "with text of its kind",
                      d.domain, d.divergence.kl / reference, d.divergence.kl, reference, d.domain));
    else if (d.divergence.kl > 2.0 * reference)
      out.push_back(
          fmt::format("\"{}\" loses {:.1f} times as much as the mean (KL {:.4f}) although it was calibrated on: give it more text, or "
                      "more bits to the model",
                      d.domain, d.divergence.kl / reference, d.divergence.kl));
  }
  const auto coarse = [](const MatrixRecord& m) {
    return m.method == "rtn" && !is_float(m.scheme.format) && m.scheme.format != Format::q8_0 && m.scheme.format != Format::int8_planar;
  };
  const bool has_text =
      std::any_of(context.calibration.begin(), context.calibration.end(), [](const DomainStats& d) { return d.used > 0; });
  if (!has_text && std::any_of(report.matrices.begin(), report.matrices.end(), coarse))
    out.emplace_back(
        "rounded to nearest, as there was no calibration text: with --domain NAME=FILE, GPTQ chooses the codes, which took away more than "
        "half of the loss (mean KL) of FP8 and of 4 bits on the models in docs/quality.md");
  const auto starved = std::count_if(report.experts.begin(), report.experts.end(), [](const ExpertLoad& e) { return e.starved; });
  if (starved > 0)
    out.push_back(
        fmt::format("{} of {} experts saw fewer than {} calibration tokens and were filled up with others' tokens: more or more varied "
                    "text would calibrate them on their own",
                    starved, report.experts.size(), context.recipe.min_expert_tokens));
  const auto fallbacks =
      std::count_if(report.matrices.begin(), report.matrices.end(), [](const MatrixRecord& m) { return !(m.scheme == m.wanted); });
  if (fallbacks > 0) out.push_back(fmt::format("{} matrices have widths that the type does not divide and took another one", fallbacks));
  return out;
}

nlohmann::ordered_json report_json(const QuantizeReport& report, const ReportContext& context) {
  using Json = nlohmann::ordered_json;
  Json out{{"model", context.model},
           {"out", context.out},
           {"type", context.type},
           {"method", name_of(context.recipe.method)},
           {"bits_per_weight", report.bits_per_weight},
           {"bits_per_linear_weight", report.bits_per_linear_weight},
           {"bytes", report.bytes},
           {"seconds", report.seconds},
           {"peak_resident_bytes", report.peak_resident_bytes},
           {"peak_anonymous_bytes", report.peak_anonymous_bytes},
           {"calibration_tokens", report.calibration_tokens},
           {"held_out_tokens", report.held_out_tokens},
           {"layer_seconds", report.layer_seconds}};
  for (const DomainStats& d : context.calibration)
    out["calibration"].push_back(Json{{"domain", d.domain},
                                      {"file", d.file},
                                      {"documents", d.documents},
                                      {"duplicate_paragraphs", d.duplicates},
                                      {"tokens", d.tokens},
                                      {"tokens_used", d.used},
                                      {"tokens_held_out", d.held_out}});
  for (const DomainLoss& d : report.domains) {
    const Divergence& v = d.divergence;
    out["loss"].push_back(Json{{"domain", d.domain},
                               {"tokens", v.tokens},
                               {"ppl_before", v.base_ppl},
                               {"ppl_after", v.ppl},
                               {"ppl_ratio", v.ppl_ratio},
                               {"kl_mean", v.kl},
                               {"kl_error", v.kl_error},
                               {"kl_median", v.kl_median},
                               {"kl_p99", v.kl_p99},
                               {"kl_max", v.kl_max},
                               {"top1_agreement", v.top1}});
  }
  for (const MatrixRecord& m : report.matrices)
    out["matrices"].push_back(Json{{"name", m.name},
                                   {"scheme", name_of(m.scheme)},
                                   {"wanted", name_of(m.wanted)},
                                   {"method", m.method},
                                   {"bits", m.bits},
                                   {"weights", m.n_weights},
                                   {"error", m.error},
                                   {"error_of", m.error_is_of_outputs ? "outputs" : "weights"},
                                   {"notes", m.notes}});
  for (const ExpertLoad& e : report.experts)
    out["experts"].push_back(Json{{"layer", e.layer}, {"expert", e.expert}, {"tokens", e.tokens}, {"starved", e.starved}});
  out["advice"] = advice(report, context);
  return out;
}

std::string report_markdown(const QuantizeReport& report, const ReportContext& context) {
  std::string out = fmt::format(
      "# {} as {}\n\nMethod {}; {:.3f} bits a weight ({:.3f} without embedding and head), {:.1f} MB; {:.1f} s, peak memory {:.0f} MB "
      "({:.0f} MB without mapped files); {} calibration tokens.\n\n",
      context.model, context.type, name_of(context.recipe.method), report.bits_per_weight, report.bits_per_linear_weight,
      static_cast<double>(report.bytes) / 1e6, report.seconds, static_cast<double>(report.peak_resident_bytes) / 1e6,
      static_cast<double>(report.peak_anonymous_bytes) / 1e6, report.calibration_tokens);
  for (const std::string& line : advice(report, context)) out += "- " + line + "\n";
  if (!report.domains.empty()) {
    out +=
        "\n## Loss on held-out text\n\n| domain | tokens | perplexity before | after | ratio | mean KL | 99% | same first choice |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n";
    for (const DomainLoss& d : report.domains)
      out += fmt::format("| {} | {} | {:.3f} | {:.3f} | {:.4f} | {:.4f} ± {:.4f} | {:.3f} | {:.1f}% |\n", d.domain, d.divergence.tokens,
                         d.divergence.base_ppl, d.divergence.ppl, d.divergence.ppl_ratio, d.divergence.kl, d.divergence.kl_error,
                         d.divergence.kl_p99, 100.0 * d.divergence.top1);
  }
  if (!context.calibration.empty()) {
    out +=
        "\n## Calibration text\n\n| domain | documents | repeated paragraphs dropped | tokens | used | held out |\n| --- | --- | --- | --- "
        "| --- | --- |\n";
    for (const DomainStats& d : context.calibration)
      out += fmt::format("| {} | {} | {} | {} | {} | {} |\n", d.domain, d.documents, d.duplicates, d.tokens, d.used, d.held_out);
  }
  if (!report.experts.empty()) {
    out += "\n## Experts\n\n| layer | fewest tokens | most tokens | starved |\n| --- | --- | --- | --- |\n";
    for (size_t i = 0; i < report.experts.size();) {
      const int layer = report.experts[i].layer;
      int64_t fewest = INT64_MAX, most = 0;
      std::string starved;
      for (; i < report.experts.size() && report.experts[i].layer == layer; ++i) {
        fewest = std::min(fewest, report.experts[i].tokens);
        most = std::max(most, report.experts[i].tokens);
        if (report.experts[i].starved)
          starved += fmt::format("{}{} ({})", starved.empty() ? "" : ", ", report.experts[i].expert, report.experts[i].tokens);
      }
      out += fmt::format("| {} | {} | {} | {} |\n", layer, fewest, most, starved.empty() ? "none" : starved);
    }
  }
  out += "\n## Matrices\n\n| name | type | bits | method | relative error of | | notes |\n| --- | --- | --- | --- | --- | --- | --- |\n";
  for (const MatrixRecord& m : report.matrices)
    out += fmt::format("| {} | {} | {:.3f} | {} | {} | {:.4f} | {} |\n", m.name, name_of(m.scheme), m.bits, m.method,
                       m.error_is_of_outputs ? "outputs" : "weights", m.error, fmt::join(m.notes, "; "));
  return out;
}

}  // namespace cachalot
