// The list as a whole, and the comparison of a candidate with the reference.
#include "ops/op_cases.h"

#include <algorithm>
#include <cmath>

#include "ops/case_support.h"

namespace cachalot::test {
namespace {

// The largest relative error and the largest NMSE allowed. Sums of thousands of f32 products and short approximations of exp stay well
// under 1e-5; in bf16, whose unit is 2^-8, results pass through two or three roundings. Activations rounded to 32639 steps of the largest
// of 256 have a relative error of about 3e-5 (a few outliers more), which passes through a product, or two and a gate.
struct Limits {
  double relative, nmse;
};
Limits limits_for(const OpCase& c, DType activation, const CaseOptions& options) {
  double relative = activation == DType::f32 ? 1e-5 : activation == DType::f16 ? 4e-3 : 2.5e-2;
  double nmse = std::pow(relative / 5.0, 2);
  if (c.quantised && options.activations_in_16_bits) {
    relative = std::max(relative, 1e-3);
    nmse = std::max(nmse, 1e-7);
  }
  if (c.quantised && options.fp8_activations) {
    relative = std::max(relative, 0.12);
    nmse = std::max(nmse, 5e-4);
  }
  if (options.bf16_products) {
    relative = std::max(relative, 8e-2);  // the worst of 10^5 outputs
    nmse = std::max(nmse, 3e-5);
  }
  if (c.bf16_cache && options.bf16_attention) {  // about the error that the rounding of the cache itself has
    relative = std::max(relative, 2.5e-2);
    nmse = std::max(nmse, 1e-5);
  }
  return {relative * c.slack, nmse * c.slack * c.slack};
}

// Adds one output's errors to the result; a text when the output fails by itself.
std::string compare(const CaseOutput& candidate, const CaseOutput& reference, CaseResult& result) {
  if (!candidate.tensor->guards_intact()) return fmt::format("{}: bytes outside the output were written", candidate.name);
  const auto got = candidate.tensor->values(), want = reference.tensor->values();
  if (got.size() != want.size()) return fmt::format("{}: {} values, expected {}", candidate.name, got.size(), want.size());
  double squares = 0.0, errors = 0.0;
  for (const float w : want) squares += static_cast<double>(w) * static_cast<double>(w);
  const double rms = want.empty() ? 0.0 : std::sqrt(squares / static_cast<double>(want.size()));
  const auto cols = static_cast<size_t>(std::max(1, candidate.tensor->view().n_cols()));
  for (size_t i = 0; i < want.size(); ++i) {
    const auto g = static_cast<double>(got[i]), w = static_cast<double>(want[i]);
    if (g == w) continue;
    const auto where = [&] { return fmt::format("{}[{}, {}]: {} instead of {}", candidate.name, i / cols, i % cols, g, w); };
    if (!std::isfinite(g) || !std::isfinite(w) || candidate.exact) return where();
    const double error = std::abs(g - w), relative = error / (rms + std::abs(w));
    errors += error * error;
    result.max_error = std::max(result.max_error, error);
    if (relative > result.relative) {
      result.relative = relative;
      result.text = where();
    }
  }
  if (errors > 0.0) result.nmse = std::max(result.nmse, errors / squares);
  return {};
}

}  // namespace

CaseResult run_case(const OpCase& c, Ops& candidate, Ops& reference, const CaseOptions& options) {
  const Limits limits = limits_for(c, candidate.activation(), options);
  CaseResult result{.tolerance = limits.relative, .nmse_limit = limits.nmse};
  const SharedSources sources;
  const CaseInstance ours = c.prepare(candidate, candidate.activation()), theirs = c.prepare(reference, candidate.activation());
  ours.call();
  theirs.call();
  std::string failure;
  for (size_t i = 0; i < ours.outputs.size() && failure.empty(); ++i) failure = compare(ours.outputs[i], theirs.outputs[i], result);
  result.ok = failure.empty() && result.relative <= limits.relative && result.nmse <= limits.nmse;
  result.text = fmt::format("{}: relative error {:.2e} of {:.2e}, NMSE {:.2e} of {:.2e}; {}", c.name, result.relative, limits.relative,
                            result.nmse, limits.nmse, failure.empty() ? result.text : failure);
  return result;
}

std::vector<OpCase> op_cases(const CaseFilter& filter) {
  std::vector<OpCase> cases;
  add_row_cases(cases);
  add_linear_cases(cases);
  add_attention_cases(cases);
  add_moe_cases(cases);
  std::erase_if(cases, [&](const OpCase& c) {
    const auto& names = filter.without_names;
    return c.name.find(filter.contains) == std::string::npos ||
           std::any_of(names.begin(), names.end(), [&](const std::string& part) { return c.name.find(part) != std::string::npos; }) ||
           std::find(filter.without_ops.begin(), filter.without_ops.end(), c.op) != filter.without_ops.end();
  });
  return cases;
}

}  // namespace cachalot::test
