// What `quantize` found, for people (Markdown) and for programs (JSON).
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "quant/quantize_model.h"

namespace cachalot {

struct ReportContext {
  std::string model, out, type;  // as they were named
  Recipe recipe;
  std::vector<DomainStats> calibration;
};

nlohmann::ordered_json report_json(const QuantizeReport& report, const ReportContext& context);
std::string report_markdown(const QuantizeReport& report, const ReportContext& context);

// What the numbers ask for, a sentence each: domains that lost more than others and whether they were calibrated on, starved
// experts, fallbacks.
std::vector<std::string> advice(const QuantizeReport& report, const ReportContext& context);

}  // namespace cachalot
