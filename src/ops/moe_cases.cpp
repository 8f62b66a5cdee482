// Cases of the router, of the mixture of experts and of sampling.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "ops/case_support.h"

namespace cachalot::test {
namespace {

struct RouteShape {
  std::string label;
  Router router;
  bool with_bias = false;
  bool ties = false;  // logits from a few levels only
};

// What RefOps chooses for one row of logits.
std::vector<int> chosen(const RouteShape& s, std::vector<float> logits, std::span<const float> bias) {
  static const auto ref = make_ref_ops();
  std::vector<int> ids(static_cast<size_t>(s.router.top_k));
  std::vector<float> weights(ids.size()), held(bias.begin(), bias.end());
  ref->route(View::vector(logits.data(), DType::f32, s.router.n_experts),
             held.empty() ? View{} : View::vector(held.data(), DType::f32, s.router.n_experts), s.router,
             {View::vector(ids.data(), DType::i32, s.router.top_k), View::vector(weights.data(), DType::f32, s.router.top_k)});
  return ids;
}

// Logits whose choice does not turn on rounding: rows are drawn again until the choice is the same after small changes of them.
std::vector<float> settled_logits(CaseBuilder& b, const RouteShape& s, std::span<const float> bias, int rows) {
  const auto n = static_cast<size_t>(s.router.n_experts);
  const auto choose = [&](std::vector<float> row, float change) {
    for (size_t i = 0; i < n; ++i) row[i] += (i * 2654435761u >> 7) % 2 == 0 ? change : -change;
    return chosen(s, row, bias);
  };
  std::vector<float> logits;
  for (int t = 0; t < rows; ++t) {
    std::vector<float> row;
    for (int attempt = 0; attempt < 100; ++attempt) {
      row = b.normals(n, 1.5f);
      if (s.ties)
        for (float& l : row) l = l > 1.0f ? 1.0f : l > 0.0f ? 0.0f : -1.0f;
      const auto ids = choose(row, 0.0f);
      if (s.ties || (choose(row, 1e-5f) == ids && choose(row, -1e-5f) == ids)) break;
    }
    logits.insert(logits.end(), row.begin(), row.end());
  }
  return logits;
}

OpCase route_case(const RouteShape& s, int rows) {
  OpCase c{.name = fmt::format("route/{}/top{}of{}/T{}", s.label, s.router.top_k, s.router.n_experts, rows), .op = "route"};
  c.bytes = 4.0 * rows * (s.router.n_experts + 2 * s.router.top_k);
  c.prepare = [=, name = c.name](Ops& ops, DType rounding) {
    CaseBuilder b(ops, rounding, name);
    const int n = s.router.n_experts, k = s.router.top_k;
    std::vector<float> bias;
    if (s.with_bias) bias = b.normals(static_cast<size_t>(n), s.ties ? 0.0f : 0.2f);
    const auto logits = b.f32(rows, n, settled_logits(b, s, bias, rows));
    const auto bias_tensor = bias.empty() ? nullptr : b.f32(1, n, bias);
    const auto ids = b.unset(DType::i32, rows, k), weights = b.unset(DType::f32, rows, k);
    b.output("ids", ids, true);
    b.output("weights", weights);
    return b.finish([&ops, router = s.router, logits, bias_tensor, ids, weights] {
      ops.route(logits->view(), bias_tensor ? bias_tensor->view() : View{}, router, {ids->view(), weights->view()});
    });
  };
  return c;
}

// A residual stream whose choice does not turn on whether the router reads the normed row as it is or rounded to bf16: rows are drawn
// again until it is the same.
std::vector<float> settled_residual(CaseBuilder& b, const RouteShape& s, std::span<const float> delta, std::span<const float> norm,
                                    std::span<const float> router, std::span<const float> bias) {
  const size_t n = norm.size();
  const auto choose = [&](const std::vector<float>& y) {
    std::vector<float> logits;
    for (size_t at = 0; at < router.size(); at += n)
      logits.push_back(static_cast<float>(std::inner_product(y.begin(), y.end(), router.begin() + static_cast<ptrdiff_t>(at), 0.0)));
    return chosen(s, logits, bias);
  };
  std::vector<float> residual;
  for (size_t at = 0; at < delta.size(); at += n) {
    std::vector<float> row;
    for (int attempt = 0; attempt < 100; ++attempt) {
      row = b.normals(n);
      std::vector<float> exact(n), rough(n);
      double squares = 0.0;
      for (size_t i = 0; i < n; ++i) exact[i] = row[i] + delta[at + i], squares += static_cast<double>(exact[i]) * exact[i];
      const auto factor = static_cast<float>(1.0 / std::sqrt(squares / static_cast<double>(n) + 1e-6));
      for (size_t i = 0; i < n; ++i) exact[i] *= factor * norm[i], rough[i] = rounded(exact[i], DType::bf16);
      if (choose(exact) == choose(rough)) break;
    }
    residual.insert(residual.end(), row.begin(), row.end());
  }
  return residual;
}

OpCase moe_prologue_case(const RouteShape& s, int hidden, int rows) {
  OpCase c{.name = fmt::format("route/moe_prologue/{}/top{}of{}/{}/T{}", s.label, s.router.top_k, s.router.n_experts, hidden, rows),
           .op = "route"};
  c.slack = 3.0;
  c.prepare = [=, name = c.name](Ops& ops, DType rounding) {
    CaseBuilder b(ops, rounding, name);
    const int n = s.router.n_experts, k = s.router.top_k;
    const auto delta = b.activations(rows, hidden), norm = b.f32(1, hidden), y = b.unset(ops.activation(), rows, hidden);
    const auto bias = s.with_bias ? b.f32(1, n, 0.2f) : nullptr;
    const LinearSource source = b.source({.format = Format::f32, .out = n, .in = hidden});
    const auto router = std::make_shared<Linear>(ops.pack({&source, 1}));
    std::vector<float> router_rows(static_cast<size_t>(n) * static_cast<size_t>(hidden));
    std::memcpy(router_rows.data(), source.matrices[0].data.data(), router_rows.size() * sizeof(float));
    const auto residual = b.f32(
        rows, hidden, settled_residual(b, s, delta->values(), norm->values(), router_rows, bias ? bias->values() : std::vector<float>{}));
    const auto ids = b.unset(DType::i32, rows, k), weights = b.unset(DType::f32, rows, k);
    b.output("residual", residual);
    b.output("y", y);
    b.output("ids", ids, true);
    b.output("weights", weights);
    b.keep(router);
    return b.finish([&ops, how = s.router, residual, delta, norm, y, bias, router = router.get(), ids, weights] {
      ops.moe_prologue({.residual = residual->view(),
                        .delta = delta->view(),
                        .norm = norm->view(),
                        .eps = 1e-6f,
                        .y = y->view(),
                        .router = router,
                        .bias = bias ? bias->view() : View{},
                        .how = how,
                        .out = {ids->view(), weights->view()}});
    });
  };
  return c;
}

// A routing of `rows` rows with distinct experts per row; some rows are padding.
void random_routing(CaseBuilder& b, const MoeCase& s, std::vector<int>& ids, std::vector<float>& weights) {
  std::vector<int> experts(static_cast<size_t>(s.n_experts));
  for (int t = 0; t < s.rows; ++t) {
    std::iota(experts.begin(), experts.end(), 0);
    std::shuffle(experts.begin(), experts.end(), b.engine());
    if (s.all_to >= 0) std::swap(experts[0], *std::find(experts.begin(), experts.end(), s.all_to));
    const bool padding = s.rows > 3 && t % 11 == 5 && s.all_to < 0;
    for (int k = 0; k < s.top_k; ++k) {
      ids.push_back(padding ? -1 : experts[static_cast<size_t>(k)]);
      weights.push_back(0.1f + 0.01f * static_cast<float>(b.uniform(0, 100)));
    }
  }
}

OpCase sample_case(int rows, int vocab) {
  OpCase c{.name = fmt::format("sample/{}/rows{}", vocab, rows), .op = "sample"};
  c.bytes = 4.0 * rows * vocab;
  struct Inputs {
    std::vector<SampleParams> params;
    std::vector<std::vector<TokenCount>> history;
    std::vector<TokenBias> bias;
    std::vector<Sampled> out;
  };
  c.prepare = [=, name = c.name](Ops& ops, DType rounding) {
    CaseBuilder b(ops, rounding, name);
    const auto logits = b.f32(rows, vocab, 2.5f);
    const auto tokens = b.f32(rows, 1, 0.0f), logprobs = b.f32(rows, 3, 0.0f);
    auto in = std::make_shared<Inputs>();
    in->bias = {{3, -std::numeric_limits<float>::infinity()}, {vocab / 2, 4.0f}};
    for (int r = 0; r < rows; ++r) {
      in->history.push_back({{r, 1, 0}, {vocab - 1 - r, 2, 3}, {(r * 37) % vocab, 0, 1}});
      SampleParams p{.temperature = 0.8f, .seed = 1000u + static_cast<uint64_t>(r), .step = static_cast<uint64_t>(r) * 5, .n_logprobs = 2};
      if (r % 7 == 0) p.temperature = 0.0f;
      if (r % 7 == 2) p.top_k = 5;
      if (r % 7 == 3) p.top_p = 0.7f;
      if (r % 7 == 4) p.min_p = 0.1f;
      if (r % 7 == 5) p.top_k = 50, p.top_p = 0.9f, p.min_p = 0.05f;
      if (r % 7 == 6) p.temperature = 1.5f;
      if (r % 2 == 1) p.repetition = 1.2f, p.presence = 0.3f, p.frequency = 0.2f;
      in->params.push_back(p);
    }
    for (size_t r = 0; r < in->params.size(); ++r) {
      if (r % 2 == 1) in->params[r].history = in->history[r];
      if (r % 3 == 1) in->params[r].bias = in->bias;
    }
    in->out.resize(in->params.size());
    b.output("tokens", tokens, true);
    b.output("logprobs", logprobs);
    b.keep(in);
    return b.finish([&ops, logits, tokens, logprobs, in = in.get()] {
      ops.sample(logits->view(), in->params, in->out);
      std::vector<float> chosen, values;
      for (const Sampled& s : in->out) {
        chosen.push_back(static_cast<float>(s.token));
        values.insert(values.end(), {s.logprob, s.top.at(0).logprob, s.top.at(1).logprob});
      }
      tokens->set(chosen);
      logprobs->set(values);
    });
  };
  return c;
}

void add_route_cases(std::vector<OpCase>& cases) {
  for (const int rows : {1, 3, 9, 16, 25, 33}) {
    cases.push_back(moe_prologue_case({"softmax", {.n_experts = 8, .top_k = 2}}, 64, rows));
    cases.push_back(moe_prologue_case({"softmax", {.n_experts = 64, .top_k = 6}}, 2048, rows));
    cases.push_back(moe_prologue_case({"sigmoid_bias", {.n_experts = 60, .top_k = 4, .scoring = Scoring::sigmoid, .normalise = true}, true},
                                      384, rows));
  }
  for (const int rows : {1, 7, 33}) {
    for (const int n : {8, 60, 64, 160, 384}) {
      cases.push_back(route_case({"softmax", {.n_experts = n, .top_k = 6, .scale = 1.0f}}, rows));
      cases.push_back(route_case({"softmax_normalised", {.n_experts = n, .top_k = 4, .normalise = true, .scale = 2.0f}}, rows));
      cases.push_back(route_case(
          {"sigmoid_bias", {.n_experts = n, .top_k = 8, .scoring = Scoring::sigmoid, .normalise = true, .scale = 1.5f}, true}, rows));
    }
    const auto v2 = [](int n, int groups, int kept, int k) {
      return Router{.n_experts = n, .top_k = k, .group_score = GroupScore::max, .n_group = groups, .topk_group = kept, .scale = 16.0f};
    };
    const auto v3 = [](int n, int groups, int kept, int k) {
      return Router{.n_experts = n,
                    .top_k = k,
                    .scoring = Scoring::sigmoid,
                    .group_score = GroupScore::top2_sum,
                    .n_group = groups,
                    .topk_group = kept,
                    .normalise = true,
                    .scale = 2.5f};
    };
    cases.push_back(route_case({"v2", v2(8, 4, 2, 3)}, rows));
    cases.push_back(route_case({"v2", v2(160, 8, 3, 6)}, rows));
    cases.push_back(route_case({"v2_few_left", v2(16, 8, 1, 4)}, rows));  // more experts wanted than the kept group has
    cases.push_back(route_case({"v3", v3(8, 4, 2, 3), true}, rows));
    cases.push_back(route_case({"v3", v3(256, 8, 4, 8), true}, rows));
    cases.push_back(route_case({"v3_no_bias", v3(256, 8, 4, 8)}, rows));
    cases.push_back(route_case({"ties", {.n_experts = 64, .top_k = 6}, false, true}, rows));
    cases.push_back(route_case({"v2_ties", v2(160, 8, 3, 6), false, true}, rows));
    cases.push_back(route_case({"v3_ties", v3(256, 8, 4, 8), true, true}, rows));
  }
}

}  // namespace

OpCase moe_case(const MoeCase& s) {
  const Format shared_down = s.shared_down.value_or(s.shared);
  OpCase c{.name = fmt::format("moe/{}{}+{}/top{}of{}/{}x{}{}/T{}", s.label.empty() ? "" : s.label + "/", format_name(s.gate_up),
                               format_name(s.down), s.top_k, s.n_experts, s.hidden, s.inner,
                               s.shared_inner != 0 ? "/shared_" + format_name(s.shared) : "", s.rows) +
                   (s.shared_inner != 0 && shared_down != s.shared ? "/down_" + format_name(shared_down) : "") +
                   (s.add_norm ? "/add_rmsnorm" : ""),
           .op = "moe",
           .quantised = !is_float(s.gate_up) || !is_float(s.down) || (s.shared_inner != 0 && !is_float(s.shared))};
  const WeightShape half{.format = s.gate_up, .out = s.inner, .in = s.hidden, .n_matrices = s.n_experts};
  const WeightShape down{.format = s.down, .out = s.hidden, .in = s.inner, .n_matrices = s.n_experts};
  const double used = std::min(1.0, static_cast<double>(s.rows) * s.top_k / s.n_experts);
  c.bytes = used * (2.0 * weight_bytes(half) + weight_bytes(down)) + 8.0 * s.rows * s.hidden;
  c.flops = 6.0 * s.rows * s.hidden * (static_cast<double>(s.top_k) * s.inner + s.shared_inner);
  c.prepare = [=, name = c.name](Ops& ops, DType rounding) {
    CaseBuilder b(ops, rounding, name);
    const auto gate_up = [&](WeightShape shape) {
      const LinearSource parts[2] = {b.source(shape, "gate"), b.source(shape, "up")};
      return ops.pack(parts);
    };
    Experts experts{.gate_up = gate_up(half), .down = b.weights(down)};
    if (s.shared_inner != 0) {
      experts.shared_gate_up = gate_up({.format = s.shared, .out = s.shared_inner, .in = s.hidden});
      experts.shared_down = b.weights({.format = shared_down, .out = s.hidden, .in = s.shared_inner});
    }
    std::vector<int> ids;
    std::vector<float> weights;
    random_routing(b, s, ids, weights);
    const auto id_tensor = b.ints(s.rows, s.top_k, ids), weight_tensor = b.f32(s.rows, s.top_k, weights);
    const auto x = b.activations(s.rows, s.hidden, s.x_scale), y = b.unset(ops.activation(), s.rows, s.hidden);
    b.output("y", y);
    if (s.add_norm) {
      const auto residual = b.f32(s.rows, s.hidden), norm = b.f32(1, s.hidden);
      b.output("residual", residual);
      return b.finish([&ops, experts, id_tensor, weight_tensor, x, y, residual, norm] {
        ops.moe_add_rmsnorm(x->view(), experts, {id_tensor->view(), weight_tensor->view()},
                            {.residual = residual->view(), .norm = norm->view(), .eps = 1e-6f, .y = y->view()});
      });
    }
    return b.finish([&ops, experts, id_tensor, weight_tensor, x, y] {
      ops.moe(x->view(), experts, {id_tensor->view(), weight_tensor->view()}, y->view());
    });
  };
  return c;
}

void add_moe_cases(std::vector<OpCase>& cases) {
  add_route_cases(cases);
  for (const Format f : all_formats()) {
    const int dim = info(f).block_elems == 256 ? 256 : 64;
    for (const int rows : {1, 4, 37})
      cases.push_back(moe_case({.gate_up = f, .down = f, .n_experts = 6, .top_k = 3, .hidden = 2 * dim, .inner = dim, .rows = rows}));
    cases.push_back(
        moe_case({.gate_up = f, .down = f, .shared = f, .n_experts = 4, .hidden = dim, .inner = 2 * dim, .shared_inner = dim, .rows = 6}));
  }
  cases.push_back(moe_case({.gate_up = Format::q4_k,
                            .down = Format::q6_k,
                            .shared = Format::q8_0,
                            .hidden = 256,
                            .inner = 256,
                            .shared_inner = 256,
                            .rows = 9}));
  // Prompts: experts of several tiles of rows, beside a shared one of another width.
  const auto prompt = [&](Format gate_up, Format down, Format shared, int hidden, int rows) {
    cases.push_back(moe_case({.label = "prompt",
                              .gate_up = gate_up,
                              .down = down,
                              .shared = shared,
                              .n_experts = 5,
                              .top_k = 2,
                              .hidden = hidden,
                              .inner = 96,
                              .shared_inner = 160,
                              .rows = rows}));
  };
  prompt(Format::q4_k, Format::q5_0, Format::q8_0, 256, 83);
  prompt(Format::q6_k, Format::q8_0, Format::q5_1, 512, 170);
  prompt(Format::q8_0, Format::q4_0, Format::q8_0, 352, 40);
  prompt(Format::int4_planar, Format::int4_planar, Format::int4_planar, 128, 300);
  cases.push_back(moe_case({.n_experts = 4, .top_k = 2, .hidden = 33, .inner = 19, .shared_inner = 7, .rows = 12}));
  cases.push_back(
      moe_case({.gate_up = Format::bf16, .down = Format::bf16, .n_experts = 384, .top_k = 8, .hidden = 32, .inner = 16, .rows = 50}));
  for (const Format f : {Format::f32, Format::bf16, Format::q8_0, Format::fp8_block, Format::int4_planar})
    for (const int rows : {64, 129, 2049})
      cases.push_back(
          moe_case({.label = "one_expert", .gate_up = f, .down = f, .top_k = 1, .hidden = 64, .inner = 32, .rows = rows, .all_to = 3}));
  cases.push_back(moe_case(
      {.label = "one_expert", .gate_up = Format::q4_k, .down = Format::q4_k, .hidden = 256, .inner = 256, .rows = 300, .all_to = 7}));
  for (const Format f : {Format::f32, Format::bf16, Format::int4_planar})
    for (const int rows : {1, 8, 70, 400})
      for (const int shared : {0, 128})
        cases.push_back(moe_case({.gate_up = f,
                                  .down = f,
                                  .shared = f,
                                  .top_k = rows == 8 ? 7 : 3,
                                  .hidden = rows == 8 ? 2176 : 256,
                                  .inner = 128,
                                  .shared_inner = shared,
                                  .rows = rows,
                                  .add_norm = true}));
  // So many rows that the sum and norm have a form for them.
  cases.push_back(moe_case({.gate_up = Format::int4_planar,
                            .down = Format::int4_planar,
                            .shared = Format::int4_planar,
                            .top_k = 3,
                            .hidden = 256,
                            .inner = 128,
                            .shared_inner = 128,
                            .rows = 1100,
                            .add_norm = true}));
  cases.push_back(sample_case(1, 512));
  cases.push_back(sample_case(14, 1001));
  cases.push_back(sample_case(7, 129280));
}

}  // namespace cachalot::test
