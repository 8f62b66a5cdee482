// RefOps: the router (DeepSeek-V2 section 2.1.2, DeepSeek-V3 section 2.1.2) and the mixture of experts, token by token.
#include <cmath>
#include <limits>

#include "ops/ref_detail.h"
#include "ops/ref_ops.h"

namespace cachalot {
namespace {
using namespace ref;

// The index of the largest value that is not taken yet, lowest index first; a NaN counts as smallest, so that an index always comes out.
int largest_free(std::span<const double> values, const std::vector<bool>& taken) {
  int best = -1;
  for (size_t i = 0; i < values.size(); ++i) {
    if (taken[i]) continue;
    if (best < 0 || values[i] > values[static_cast<size_t>(best)] ||
        (std::isnan(values[static_cast<size_t>(best)]) && !std::isnan(values[i])))
      best = static_cast<int>(i);
  }
  return best;
}

// The indices of the n largest values, by falling value.
std::vector<int> largest(std::span<const double> values, int n) {
  std::vector<bool> taken(values.size());
  std::vector<int> found;
  for (int i = 0; i < n; ++i) {
    found.push_back(largest_free(values, taken));
    taken[static_cast<size_t>(found.back())] = true;
  }
  return found;
}

std::vector<double> scores_of(const float* logits, int n, Scoring scoring) {
  std::vector<double> scores(logits, logits + n);
  if (scoring == Scoring::sigmoid) {
    for (double& s : scores) s = 1.0 / (1.0 + std::exp(-s));
    return scores;
  }
  double highest = -std::numeric_limits<double>::infinity(), sum = 0.0;
  for (const double s : scores) highest = std::max(highest, s);
  for (double& s : scores) sum += s = std::exp(s - highest);
  for (double& s : scores) s /= sum;
  return scores;
}

// Takes the experts outside the best topk_group groups out of the choice: V2 sets them to 0, V3 to -inf.
void limit_to_groups(std::vector<double>& choice, const Router& router) {
  const auto size = static_cast<size_t>(router.n_experts / router.n_group);
  std::vector<double> group_scores;
  for (size_t begin = 0; begin < choice.size(); begin += size) {
    const std::span<const double> group(choice.data() + begin, size);
    const auto best = largest(group, router.group_score == GroupScore::max ? 1 : 2);
    double score = 0.0;
    for (const int i : best) score += group[static_cast<size_t>(i)];
    group_scores.push_back(score);
  }
  std::vector<bool> kept(group_scores.size());
  for (const int g : largest(group_scores, router.topk_group)) kept[static_cast<size_t>(g)] = true;
  const double out_of_choice = router.group_score == GroupScore::max ? 0.0 : -std::numeric_limits<double>::infinity();
  for (size_t e = 0; e < choice.size(); ++e)
    if (!kept[e / size]) choice[e] = out_of_choice;
}

}  // namespace

void RefOps::route(View logits, View bias, const Router& router, const Routing& out) {
  const int n = router.n_experts;
  CACHALOT_CHECK(logits.n_cols() == n && router.top_k > 0 && router.top_k <= n, "top {} of {} experts", router.top_k, n);
  CACHALOT_CHECK(out.ids.n_rows() == logits.n_rows() && out.ids.n_cols() == router.top_k && out.ids.dtype == DType::i32);
  CACHALOT_CHECK(out.weights.n_rows() == logits.n_rows() && out.weights.n_cols() == router.top_k);
  const bool grouped = router.group_score != GroupScore::none;
  if (grouped) {
    const int least = router.group_score == GroupScore::max ? 1 : 2;
    CACHALOT_CHECK(router.n_group > 0 && n % router.n_group == 0 && n / router.n_group >= least, "{} groups of {} experts", router.n_group,
                   n);
    CACHALOT_CHECK(router.topk_group > 0 && router.topk_group <= router.n_group, "{} of {} groups", router.topk_group, router.n_group);
  }
  for (int t = 0; t < logits.n_rows(); ++t) {
    const auto scores = scores_of(row_of(logits, t), n, router.scoring);
    auto choice = scores;
    if (bias)
      for (size_t e = 0; e < choice.size(); ++e) choice[e] += static_cast<double>(floats(bias)[e]);
    if (grouped) limit_to_groups(choice, router);
    const auto chosen = largest(choice, router.top_k);
    double sum = 0.0;
    for (const int e : chosen) sum += scores[static_cast<size_t>(e)];
    const double factor = static_cast<double>(router.scale) / (router.normalise ? sum + 1e-20 : 1.0);
    for (int k = 0; k < router.top_k; ++k) {
      const int e = chosen[static_cast<size_t>(k)];
      out.ids.row<int>(t)[k] = e;
      row_of(out.weights, t)[k] = static_cast<float>(scores[static_cast<size_t>(e)] * factor);
    }
  }
}

void RefOps::moe(View x, const Experts& experts, const Routing& routing, View y) {
  const int hidden = y.n_cols(), inner = experts.down.in;
  const RefPacked &gate_up = packed_of(experts.gate_up), &down = packed_of(experts.down);
  CACHALOT_CHECK(experts.gate_up.out == 2 * inner && experts.down.out == hidden && x.n_cols() == experts.gate_up.in);
  CACHALOT_CHECK(routing.ids.n_rows() == x.n_rows() && y.n_rows() == x.n_rows());
  std::vector<float> h(static_cast<size_t>(inner));
  std::vector<double> sum(static_cast<size_t>(hidden));
  for (int t = 0; t < x.n_rows(); ++t) {
    std::fill(sum.begin(), sum.end(), 0.0);
    for (int k = 0; k < routing.ids.n_cols(); ++k) {
      const int e = routing.ids.row<int>(t)[k];
      if (e < 0) continue;
      CACHALOT_CHECK(e < experts.gate_up.n_matrices && e < experts.down.n_matrices, "expert {}", e);
      swiglu_row(gate_up, experts.gate_up.first + e, row_of(x, t), h.data());
      const double weight = row_of(routing.weights, t)[k];
      for (int r = 0; r < hidden; ++r) sum[static_cast<size_t>(r)] += weight * dot(down.row(experts.down.first + e, r), h.data(), inner);
    }
    if (experts.shared_gate_up) {
      const RefPacked &shared = packed_of(experts.shared_gate_up), &shared_down = packed_of(experts.shared_down);
      std::vector<float> hs(static_cast<size_t>(experts.shared_down.in));
      CACHALOT_CHECK(experts.shared_gate_up.out == 2 * experts.shared_down.in && experts.shared_down.out == hidden);
      swiglu_row(shared, experts.shared_gate_up.first, row_of(x, t), hs.data());
      for (int r = 0; r < hidden; ++r)
        sum[static_cast<size_t>(r)] += dot(shared_down.row(experts.shared_down.first, r), hs.data(), experts.shared_down.in);
    }
    for (int r = 0; r < hidden; ++r) row_of(y, t)[r] = static_cast<float>(sum[static_cast<size_t>(r)]);
  }
}

void RefOps::scatter_add_rows(View x, View ids, View weights, View y) {
  const auto rows = ints(ids);
  const auto factor = floats(weights);
  CACHALOT_CHECK(x.n_rows() == static_cast<int>(rows.size()) && factor.size() == rows.size() && x.n_cols() == y.n_cols());
  for (int i = 0; i < x.n_rows(); ++i) {
    const int to = rows[static_cast<size_t>(i)];
    CACHALOT_CHECK(to >= -1 && to < y.n_rows(), "row {} of {}", to, y.n_rows());
    if (to < 0) continue;
    const float* from = row_of(x, i);
    for (int c = 0; c < x.n_cols(); ++c)
      row_of(y, to)[c] = static_cast<float>(static_cast<double>(row_of(y, to)[c]) +
                                            static_cast<double>(factor[static_cast<size_t>(i)]) * static_cast<double>(from[c]));
  }
}

}  // namespace cachalot
