// Matrices of a model, and which scheme each gets.
#include "quant/recipe.h"

namespace cachalot {

const char* name_of(Method method) {
  switch (method) {
    case Method::rtn: return "rtn";
    case Method::awq: return "awq";
    case Method::gptq: return "gptq";
    case Method::awq_gptq: return "awq+gptq";
  }
  return "?";
}

std::vector<ModelMatrix> model_matrices(const Config& c, bool split_kv_b) {
  std::vector<ModelMatrix> out;
  const auto add = [&](const std::string& name, int rows, int cols, int n = 1) { out.push_back({name, n, rows, cols}); };
  add("token_embd.weight", c.vocab, c.hidden);
  if (!c.tied_head) add("output.weight", c.vocab, c.hidden);
  for (int l = 0; l < c.n_layers; ++l) {
    const std::string prefix = "blk." + std::to_string(l) + ".";
    const auto ffn = [&](const std::string& suffix, int inner, int n) {
      add(prefix + "ffn_gate" + suffix + ".weight", inner, c.hidden, n);
      add(prefix + "ffn_up" + suffix + ".weight", inner, c.hidden, n);
      add(prefix + "ffn_down" + suffix + ".weight", c.hidden, inner, n);
    };
    if (c.mla) {
      const int d_q = c.n_heads * (c.nope + c.rope.dim);
      if (c.q_rank > 0) {
        add(prefix + "attn_q_a.weight", c.q_rank, c.hidden);
        add(prefix + "attn_q_b.weight", d_q, c.q_rank);
      } else {
        add(prefix + "attn_q.weight", d_q, c.hidden);
      }
      add(prefix + "attn_kv_a_mqa.weight", c.kv_rank + c.rope.dim, c.hidden);
      if (split_kv_b) {
        add(prefix + "attn_k_b.weight", c.kv_rank, c.nope, c.n_heads);
        add(prefix + "attn_v_b.weight", c.v_dim, c.kv_rank, c.n_heads);
      } else {
        add(prefix + "attn_kv_b.weight", c.n_heads * (c.nope + c.v_dim), c.kv_rank);
      }
      add(prefix + "attn_output.weight", c.hidden, c.n_heads * c.v_dim);
    } else {
      add(prefix + "attn_q.weight", c.n_heads * c.head_dim, c.hidden);
      add(prefix + "attn_k.weight", c.n_kv_heads * c.head_dim, c.hidden);
      add(prefix + "attn_v.weight", c.n_kv_heads * c.head_dim, c.hidden);
      add(prefix + "attn_output.weight", c.hidden, c.n_heads * c.head_dim);
    }
    if (c.is_moe_layer(l)) {
      ffn("_exps", c.moe_intermediate, c.n_experts);
      if (c.n_shared > 0) ffn("_shexp", c.n_shared * c.moe_intermediate, 1);
    } else {
      ffn("", c.intermediate, 1);
    }
  }
  return out;
}

bool glob_matches(std::string_view pattern, std::string_view text) {
  // Greedy with one point to return to: the last star, which then takes one character more.
  size_t p = 0, t = 0, star = std::string_view::npos, taken = 0;
  while (t < text.size()) {
    if (p < pattern.size() && (pattern[p] == '?' || (pattern[p] != '*' && pattern[p] == text[t]))) {
      ++p;
      ++t;
    } else if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      taken = t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++taken;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

std::vector<PlannedMatrix> plan(const Recipe& recipe, const Config& config) {
  const auto wanted = [&](const std::string& name) -> Scheme {
    if (const auto found = recipe.exact.find(name); found != recipe.exact.end()) return found->second;
    for (const SchemeRule& rule : recipe.rules)
      if (glob_matches(rule.pattern, name)) return rule.scheme;
    if (name == "token_embd.weight" || name == "output.weight") return {Format::bf16};
    if (name.ends_with("attn_k_b.weight") && !is_float(recipe.scheme.format)) return {Format::q8_0};
    return recipe.scheme;
  };
  std::vector<PlannedMatrix> out;
  for (ModelMatrix& matrix : model_matrices(config, recipe.split_kv_b)) {
    const Scheme scheme = wanted(matrix.name), stored = fallback(scheme, matrix.in);
    out.push_back({std::move(matrix), scheme, stored});
  }
  return out;
}

double mean_bits(const std::vector<PlannedMatrix>& planned, bool linears_only) {
  double bits = 0.0, weights = 0.0;
  for (const PlannedMatrix& p : planned) {
    if (linears_only && !p.matrix.name.starts_with("blk.")) continue;
    const auto n = static_cast<double>(p.matrix.n_weights());
    bits += n * bits_per_weight(p.scheme, p.matrix.in);
    weights += n;
  }
  return weights > 0.0 ? bits / weights : 0.0;
}

}  // namespace cachalot
