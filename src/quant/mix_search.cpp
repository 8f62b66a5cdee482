// Sensitivities, then a greedy fill: the step with the most KL saved per bit is taken next. With convex steps this is the optimum up to
// one.
#include "quant/mix_search.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace cachalot {
namespace {

struct Candidate {
  Format format;
  double error;  // root mean square of rounding normally distributed weights, relative
};
// As measured by tests/tensor/block_encoder_test.cpp's means.
constexpr Candidate kWide[] = {
    {Format::q3_k, 0.143}, {Format::q4_k, 0.070}, {Format::q5_k, 0.0346}, {Format::q6_k, 0.0164}, {Format::q8_0, 0.0045}};
constexpr Candidate kNarrow[] = {{Format::iq4_nl, 0.073}, {Format::q5_0, 0.040}, {Format::q5_1, 0.0334}, {Format::q8_0, 0.0045}};
constexpr Candidate kProbeWide = kWide[1], kProbeNarrow = kNarrow[0];

// exp of this share of the KL is the perplexity ratio that goes with it, on the models that were measured (0.45 to 0.65).
constexpr double kNllPerKl = 0.65;

std::span<const Candidate> candidates_for(int in) {
  if (in % 256 == 0) return kWide;
  return kNarrow;
}

struct Group {
  std::vector<const PlannedMatrix*> matrices;
  double kl = 0.0;    // when all take the probe type
  size_t choice = 0;  // index into the candidates
  double weights = 0.0;

  [[nodiscard]] int in() const { return matrices.front()->matrix.in; }
  [[nodiscard]] double kl_at(size_t i) const {
    const auto list = candidates_for(in());
    const double probe = in() % 256 == 0 ? kProbeWide.error : kProbeNarrow.error, ratio = list[i].error / probe;
    return kl * ratio * ratio;
  }
  [[nodiscard]] double bits_at(size_t i) const { return weights * bits_per_weight({candidates_for(in())[i].format}, in()); }
};

constexpr int kMaxWindows = 12;  // of held-out text, for a sensitivity

TokenStream sampled(const TokenStream& from) {
  TokenStream out{.window = from.window};
  const int n = std::min(kMaxWindows, from.n_windows());
  for (int i = 0; i < n; ++i) {
    const auto w = static_cast<ptrdiff_t>(int64_t{i} * from.n_windows() / n), begin = w * from.window, end = begin + from.window;
    out.inputs.insert(out.inputs.end(), from.inputs.begin() + begin, from.inputs.begin() + end);
    out.targets.insert(out.targets.end(), from.targets.begin() + begin, from.targets.begin() + end);
    out.domain.push_back(0);
  }
  return out;
}

}  // namespace

MixSearchResult search_mix(const Checkpoint& base, const Config& config, Ops& ops, ThreadPool& pool, const Recipe& recipe,
                           const CalibrationSet& set, const MixGoal& goal,
                           const std::function<void(int done, int total, const std::string& what)>& progress) {
  if (set.held_out.n_windows() == 0) fail("a search for a mix needs text to measure on: give --eval, or more calibration text");
  const std::vector<PlannedMatrix> planned = plan(recipe, config);
  std::map<std::string, Group> groups;
  const int per_group = std::max(1, config.n_layers / 12);
  double fixed_bits = 0.0, all_weights = 0.0;
  MixSearchResult result;
  for (const PlannedMatrix& p : planned) {
    const std::string& name = p.matrix.name;
    if (!name.starts_with("blk.")) continue;
    const auto n = static_cast<double>(p.matrix.n_weights());
    all_weights += n;
    const bool ruled =
        std::any_of(recipe.rules.begin(), recipe.rules.end(), [&](const SchemeRule& r) { return glob_matches(r.pattern, name); });
    if (ruled || name.ends_with("attn_k_b.weight") || p.matrix.in % 32 != 0) {
      fixed_bits += n * bits_per_weight(p.scheme, p.matrix.in);
      result.schemes[name] = p.wanted;
      continue;
    }
    const int layer = std::atoi(name.c_str() + 4);
    Group& group = groups[fmt::format("{}{}", layer / per_group, name.substr(name.find('.', 4)))];
    group.matrices.push_back(&p);
    group.weights += n;
  }

  int done = 0;
  for (auto& [label, group] : groups) {
    if (progress) progress(done++, static_cast<int>(groups.size()), "sensitivity of " + group.matrices.front()->matrix.name);
    Recipe alone;
    alone.method = Method::rtn;
    alone.importance = false;
    alone.split_kv_b = recipe.split_kv_b;
    alone.scheme = {Format::f32};
    for (const PlannedMatrix& p : planned) alone.exact[p.matrix.name] = {Format::f32};
    for (const PlannedMatrix* p : group.matrices)
      alone.exact[p->matrix.name] = {(group.in() % 256 == 0 ? kProbeWide : kProbeNarrow).format};
    LayerQuantizer quantizer(base, config, ops, pool, alone, set.held_out.window);
    TokenStream nothing{.window = set.held_out.window}, text = sampled(set.held_out);
    const QuantizeReport report = quantize_model(quantizer, base, config, ops, alone, nothing, text, {"all"}, {}, {});
    group.kl = report.domains.back().divergence.kl;
  }

  double bits = fixed_bits, kl = 0.0;
  for (auto& [label, group] : groups) {
    bits += group.bits_at(0);
    kl += group.kl_at(0);
  }
  const double budget = goal.bits > 0.0 ? goal.bits * all_weights : 1e300;
  const double wanted_kl = goal.ppl_ratio > 0.0 ? std::log(goal.ppl_ratio) / kNllPerKl : 0.0;
  if (bits > budget) fail("the smallest mix has {:.3f} bits a weight, more than the {:.3f} asked for", bits / all_weights, goal.bits);
  while (kl > wanted_kl) {
    Group* best = nullptr;
    size_t to = 0;
    double best_gain = 0.0;
    for (auto& [label, group] : groups)
      for (size_t i = group.choice + 1; i < candidates_for(group.in()).size(); ++i) {
        const double more = group.bits_at(i) - group.bits_at(group.choice), saved = group.kl_at(group.choice) - group.kl_at(i);
        if (bits + more > budget || more <= 0.0) continue;
        if (saved / more > best_gain) {
          best_gain = saved / more;
          best = &group;
          to = i;
        }
      }
    if (best == nullptr) break;
    bits += best->bits_at(to) - best->bits_at(best->choice);
    kl -= best->kl_at(best->choice) - best->kl_at(to);
    best->choice = to;
  }
  if (goal.ppl_ratio > 0.0 && kl > wanted_kl)
    fail("no mix is expected to keep perplexity within {:.4f} times the original's{}", goal.ppl_ratio,
         goal.bits > 0.0 ? " at these bits" : "");
  for (const auto& [label, group] : groups)
    for (const PlannedMatrix* p : group.matrices) result.schemes[p->matrix.name] = {candidates_for(group.in())[group.choice].format};
  result.bits = bits / all_weights;
  result.expected_kl = kl;
  result.expected_ppl_ratio = std::exp(kNllPerKl * kl);
  return result;
}

}  // namespace cachalot
