// CpuOps: the router (DeepSeek-V2 section 2.1.2, DeepSeek-V3 section 2.1.2) and the mixture of experts.
//
// moe sorts the (token, slot) pairs by expert; each expert with rows, and the shared one with all of them, is a job of the two products.
// The parts of a token are then added in the order of its slots, so that its sum does not depend on its neighbours.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/cpu_ops_impl.h"

namespace cachalot::cpu {
namespace {

// Tokens that pass through the experts together: bounds the memory for their parts.
constexpr int kMoeTokens = 1024;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// The n largest of `values` by falling value, lowest index first among equals. Taken values are overwritten; NaN counts as smallest.
void take_largest(float* values, int size, int n, int* chosen) {
  for (int i = 0; i < n; ++i) {
    int best = -1;
    for (int e = 0; e < size; ++e)
      if (values[e] > (best < 0 ? kLowest : values[best])) best = e;
    if (best < 0) {  // only -inf and NaN are left: the first index that is not chosen yet
      best = 0;
      while (std::find(chosen, chosen + i, best) != chosen + i) ++best;
    }
    chosen[i] = best;
    values[best] = kLowest;
  }
}

// Takes the experts outside the best topk_group groups out of the choice: V2 sets them to 0, V3 to -inf.
void limit_to_groups(float* choice, const Router& router, float* work, int* chosen) {
  const int size = router.n_experts / router.n_group;
  float* const group_scores = work;
  for (int g = 0; g < router.n_group; ++g) {
    float first = kLowest, second = kLowest;
    for (int e = g * size; e < (g + 1) * size; ++e) {
      second = std::max(second, std::min(first, choice[e]));
      first = std::max(first, choice[e]);
    }
    group_scores[g] = router.group_score == GroupScore::max ? first : first + second;
  }
  take_largest(group_scores, router.n_group, router.topk_group, chosen);
  const float out_of_choice = router.group_score == GroupScore::max ? 0.0f : kLowest;
  for (int g = 0; g < router.n_group; ++g)
    if (std::find(chosen, chosen + router.topk_group, g) == chosen + router.topk_group) std::fill_n(choice + g * size, size, out_of_choice);
}

void check_router(const Router& router) {
  const int n = router.n_experts;
  CACHALOT_CHECK(router.top_k > 0 && router.top_k <= n, "top {} of {} experts", router.top_k, n);
  if (router.group_score == GroupScore::none) return;
  const int least = router.group_score == GroupScore::max ? 1 : 2;
  CACHALOT_CHECK(router.n_group > 0 && n % router.n_group == 0 && n / router.n_group >= least, "{} groups of {} experts", router.n_group,
                 n);
  CACHALOT_CHECK(router.topk_group > 0 && router.topk_group <= router.n_group, "{} of {} groups", router.topk_group, router.n_group);
}

}  // namespace

void CpuOps::route(View logits, View bias, const Router& router, const Routing& out) {
  const int n = router.n_experts;
  check_router(router);
  CACHALOT_CHECK(logits.n_cols() == n && logits.dtype == DType::f32);
  CACHALOT_CHECK(out.ids.n_rows() == logits.n_rows() && out.ids.n_cols() == router.top_k && out.ids.dtype == DType::i32);
  CACHALOT_CHECK(out.weights.n_rows() == logits.n_rows() && out.weights.n_cols() == router.top_k && out.weights.dtype == DType::f32);
  const auto size = static_cast<size_t>(n);
  const auto task = [&](int t, int worker) {
    float* const scores = scratch(worker, 4 * size);
    float *const choice = scores + size, *const work = scores + 2 * size;
    int* const chosen = reinterpret_cast<int*>(scores + 3 * size);
    const float* const row = logits.row<float>(t);
    if (router.scoring == Scoring::sigmoid) {
      kernels_.sigmoid(row, n, scores);
    } else {
      float largest = kLowest;
      for (int e = 0; e < n; ++e) largest = std::max(largest, row[e]);
      for (int e = 0; e < n; ++e) scores[e] = row[e] - largest;
      kernels_.exp(scores, n, scores);
      float sum = 0.0f;
      for (int e = 0; e < n; ++e) sum += scores[e];
      for (int e = 0; e < n; ++e) scores[e] /= sum;
    }
    for (int e = 0; e < n; ++e) choice[e] = scores[e] + (bias ? bias.row<float>(0)[e] : 0.0f);
    if (router.group_score != GroupScore::none) limit_to_groups(choice, router, work, chosen);
    take_largest(choice, n, router.top_k, chosen);
    float sum = 0.0f;
    for (int k = 0; k < router.top_k; ++k) sum += scores[chosen[k]];
    const float factor = router.scale / (router.normalise ? sum + 1e-20f : 1.0f);
    for (int k = 0; k < router.top_k; ++k) {
      out.ids.row<int>(t)[k] = chosen[k];
      out.weights.row<float>(t)[k] = scores[chosen[k]] * factor;
    }
  };
  parallel(logits.n_rows(), logits.n_rows() < 8, task);
}

ExpertSlots CpuOps::sort_slots(const Routing& routing, int n_experts) {
  const int top_k = routing.ids.n_cols();
  const auto n_slots = static_cast<size_t>(routing.ids.n_rows()) * static_cast<size_t>(top_k);
  int* const begin = take<int>(static_cast<size_t>(n_experts) + 2);
  int* const order = take<int>(n_slots);
  std::fill_n(begin, n_experts + 2, 0);
  const auto expert_of = [&](size_t slot) {
    const int e = routing.ids.row<int>(static_cast<int>(slot) / top_k)[static_cast<int>(slot) % top_k];
    CACHALOT_CHECK(e >= -1 && e < n_experts, "expert {} of {}", e, n_experts);
    return e;
  };
  for (size_t s = 0; s < n_slots; ++s)
    if (expert_of(s) >= 0) ++begin[expert_of(s) + 2];
  for (int e = 0; e < n_experts; ++e) begin[e + 2] += begin[e + 1];
  for (size_t s = 0; s < n_slots; ++s)
    if (expert_of(s) >= 0) order[begin[expert_of(s) + 1]++] = static_cast<int>(s);
  return {begin, order, top_k};
}

void CpuOps::moe(View x, const Experts& experts, const Routing& routing, View y) {
  CACHALOT_CHECK(experts.gate_up.out == 2 * experts.down.in && experts.down.out == y.n_cols() && x.n_cols() == experts.gate_up.in);
  CACHALOT_CHECK(!experts.shared_gate_up ||
                 (experts.shared_gate_up.out == 2 * experts.shared_down.in && experts.shared_down.out == y.n_cols()));
  CACHALOT_CHECK(routing.ids.n_rows() == x.n_rows() && y.n_rows() == x.n_rows() && x.dtype == DType::f32 && y.dtype == DType::f32);
  if (experts_fit_tiles(experts, x.n_rows())) return moe_on_tiles(x, experts, routing, y);
  for (int begin = 0; begin < x.n_rows(); begin += kMoeTokens) {
    const int n = std::min(kMoeTokens, x.n_rows() - begin);
    moe_tokens(x.rows(begin, n), experts, {routing.ids.rows(begin, n), routing.weights.rows(begin, n)}, y.rows(begin, n));
  }
}

void CpuOps::moe_tokens(View x, const Experts& experts, const Routing& routing, View y) {
  const Scope scope(*this);
  const int n_tokens = x.n_rows(), n_experts = experts.gate_up.n_matrices, hidden = y.n_cols();
  const auto n_slots = static_cast<size_t>(n_tokens) * static_cast<size_t>(routing.ids.n_cols());
  const CpuPacked &gate_up = packed_of(experts.gate_up), &down = packed_of(experts.down);

  const ExpertSlots slots = sort_slots(routing, n_experts);
  const int *const begin = slots.begin, *const order = slots.order, top_k = slots.top_k;
  const bool shared = static_cast<bool>(experts.shared_gate_up);
  const size_t n_rows = n_slots + (shared ? static_cast<size_t>(n_tokens) : 0);
  const int inner = experts.down.in, shared_inner = shared ? experts.shared_down.in : 0;
  float* const h = take<float>(n_slots * static_cast<size_t>(inner) + static_cast<size_t>(n_tokens) * static_cast<size_t>(shared_inner));
  float* const parts = take<float>(n_rows * static_cast<size_t>(hidden));  // of slot s at row s; of the shared expert behind
  const auto** const in = take<const float*>(n_rows);
  auto **const mid = take<float*>(n_rows), **const out = take<float*>(n_rows);
  Job* const first = take<Job>(static_cast<size_t>(n_experts) + 1);
  Job* const second = take<Job>(static_cast<size_t>(n_experts) + 1);
  size_t n_jobs = 0;
  // Rows of x are rounded once, not once per expert that sees them.
  const bool rounds = gate_up.any_rounds || (shared && packed_of(experts.shared_gate_up).any_rounds);
  const QuantisedRow* const rounded = rounds ? quantise(rows_of(x), n_tokens, gate_up.padded_in) : nullptr;
  auto* const rounded_in = take<QuantisedRow>(n_rows);
  const auto add_job = [&](const CpuPacked& up, int up_matrix, const CpuPacked& back, int back_matrix, size_t at, int n) {
    first[n_jobs] = {
        .w = &up, .matrix = up_matrix, .n_tokens = n, .x = inputs_of(up, in + at, n, rounds ? rounded_in + at : nullptr), .y = mid + at};
    second[n_jobs] = {.w = &back, .matrix = back_matrix, .n_tokens = n, .x = nullptr, .y = out + at};
    ++n_jobs;
  };
  if (shared) {  // first, as it has the most rows
    for (size_t t = 0; t < static_cast<size_t>(n_tokens); ++t) {
      in[n_slots + t] = x.row<float>(static_cast<int>(t));
      if (rounds) rounded_in[n_slots + t] = rounded[t];
      mid[n_slots + t] = h + n_slots * static_cast<size_t>(inner) + t * static_cast<size_t>(shared_inner);
      out[n_slots + t] = parts + (n_slots + t) * static_cast<size_t>(hidden);
    }
    add_job(packed_of(experts.shared_gate_up), experts.shared_gate_up.first, packed_of(experts.shared_down), experts.shared_down.first,
            n_slots, n_tokens);
  }
  for (int e = 0; e < n_experts; ++e) {
    if (begin[e] == begin[e + 1]) continue;
    for (int i = begin[e]; i < begin[e + 1]; ++i) {
      in[i] = x.row<float>(order[i] / top_k);
      if (rounds) rounded_in[i] = rounded[order[i] / top_k];
      mid[i] = h + static_cast<size_t>(i) * static_cast<size_t>(inner);
      out[i] = parts + static_cast<size_t>(order[i]) * static_cast<size_t>(hidden);
    }
    add_job(gate_up, experts.gate_up.first + e, down, experts.down.first + e, static_cast<size_t>(begin[e]), begin[e + 1] - begin[e]);
  }
  if (n_jobs > 0) {
    run_swiglu_jobs({first, n_jobs});
    const bool any_rounded = std::any_of(second, second + n_jobs, [&](const Job& job) { return job.w == &down && !in_bf16(job.n_tokens); });
    const QuantisedRow* const rounded_mid = down.any_rounds && any_rounded ? quantise(mid, begin[n_experts], down.padded_in) : nullptr;
    for (size_t j = 0; j < n_jobs; ++j) {
      const auto at = static_cast<size_t>(first[j].y - mid);
      const bool known = rounded_mid != nullptr && second[j].w == &down && at < n_slots;
      second[j].x = inputs_of(*second[j].w, first[j].y, second[j].n_tokens, known ? rounded_mid + at : nullptr);
    }
    run_products({second, n_jobs}, 0.0f);
  }
  const auto add_up = [&](int t, int) {
    float* const to = y.row<float>(t);
    std::fill_n(to, hidden, 0.0f);
    for (int k = 0; k < top_k; ++k) {
      if (routing.ids.row<int>(t)[k] < 0) continue;
      const auto slot = static_cast<size_t>(t) * static_cast<size_t>(top_k) + static_cast<size_t>(k);
      kernels_.axpy(routing.weights.row<float>(t)[k], parts + slot * static_cast<size_t>(hidden), hidden, to);
    }
    if (shared) kernels_.axpy(1.0f, parts + (n_slots + static_cast<size_t>(t)) * static_cast<size_t>(hidden), hidden, to);
  };
  parallel(n_tokens, n_tokens < 4, add_up);
}

}  // namespace cachalot::cpu
