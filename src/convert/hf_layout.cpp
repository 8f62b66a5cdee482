// The lists of tensors.
#include "convert/hf_layout.h"

namespace cachalot {
namespace {

class Layer {
 public:
  Layer(const Config& config, const Checkpoint& model, int layer)
      : c_(config), model_(model), layer_(layer), prefix_("blk." + std::to_string(layer) + ".") {}

  std::vector<HfEntry> entries() {
    vector("attn_norm.weight", c_.hidden);
    vector("ffn_norm.weight", c_.hidden);
    if (c_.mla)
      mla();
    else
      gqa();
    if (c_.is_moe_layer(layer_)) {
      matrix("ffn_gate_inp.weight", c_.n_experts, c_.hidden);
      optional_vector("exp_probs_b.bias", c_.n_experts);
      ffn("_exps", c_.moe_intermediate, c_.n_experts);
      if (c_.n_shared > 0) ffn("_shexp", c_.n_shared * c_.moe_intermediate, 1);
    } else {
      ffn("", c_.intermediate, 1);
    }
    return std::move(out_);
  }

  std::vector<HfEntry> with_prediction() {
    if (!model_.has(prefix_ + "nextn.eh_proj.weight")) return {};
    out_ = entries();
    vector("nextn.enorm.weight", c_.hidden);
    vector("nextn.hnorm.weight", c_.hidden);
    vector("nextn.shared_head_norm.weight", c_.hidden);
    matrix("nextn.eh_proj.weight", c_.hidden, 2 * c_.hidden);
    for (const char* copy : {"nextn.embed_tokens.weight", "nextn.shared_head_head.weight"})
      if (model_.has(prefix_ + copy)) matrix(copy, c_.vocab, c_.hidden);
    return std::move(out_);
  }

 private:
  void gqa() {
    const int n_q = c_.n_heads * c_.head_dim, n_kv = c_.n_kv_heads * c_.head_dim;
    projection("attn_q", n_q, c_.hidden);
    projection("attn_k", n_kv, c_.hidden);
    projection("attn_v", n_kv, c_.hidden);
    if (c_.qk_norm) {
      vector("attn_q_norm.weight", c_.head_dim);
      vector("attn_k_norm.weight", c_.head_dim);
    }
    projection("attn_output", c_.hidden, n_q);
  }

  void mla() {
    const int d_q = c_.n_heads * (c_.nope + c_.rope.dim);
    if (c_.q_rank > 0) {
      projection("attn_q_a", c_.q_rank, c_.hidden);
      vector("attn_q_a_norm.weight", c_.q_rank);
      matrix("attn_q_b.weight", d_q, c_.q_rank);
    } else {
      matrix("attn_q.weight", d_q, c_.hidden);
    }
    projection("attn_kv_a_mqa", c_.kv_rank + c_.rope.dim, c_.hidden);
    vector("attn_kv_a_norm.weight", c_.kv_rank);
    matrix("attn_kv_b.weight", c_.n_heads * (c_.nope + c_.v_dim), c_.kv_rank);
    matrix("attn_output.weight", c_.hidden, c_.n_heads * c_.v_dim);
  }

  void ffn(const std::string& suffix, int inner, int n) {
    for (const char* name : {"ffn_gate", "ffn_up"}) {
      matrix(name + suffix + ".weight", inner, c_.hidden, n);
      if (suffix.empty()) optional_vector(std::string(name) + ".bias", inner);
    }
    matrix("ffn_down" + suffix + ".weight", c_.hidden, inner, n);
    if (suffix.empty()) optional_vector("ffn_down.bias", c_.hidden);
  }

  void projection(const std::string& name, int out, int in) {
    matrix(name + ".weight", out, in);
    optional_vector(name + ".bias", out);
  }
  void matrix(const std::string& name, int out, int in, int n = 1) { out_.push_back({prefix_ + name, n, out, in}); }
  void vector(const std::string& name, int n) { out_.push_back({prefix_ + name, 0, n, 0}); }
  void optional_vector(const std::string& name, int n) {
    if (model_.has(prefix_ + name)) vector(name, n);
  }

  const Config& c_;
  const Checkpoint& model_;
  int layer_;
  std::string prefix_;
  std::vector<HfEntry> out_;
};

}  // namespace

std::vector<HfEntry> hf_globals(const Config& config) {
  std::vector<HfEntry> out{{"token_embd.weight", 1, config.vocab, config.hidden}, {"output_norm.weight", 0, config.hidden, 0}};
  if (!config.tied_head) out.push_back({"output.weight", 1, config.vocab, config.hidden});
  return out;
}

std::vector<HfEntry> hf_layer(const Config& config, const Checkpoint& model, int layer) { return Layer(config, model, layer).entries(); }

std::vector<HfEntry> hf_prediction_layer(const Config& config, const Checkpoint& model) {
  if (config.n_mtp_layers == 0) return {};
  return Layer(config, model, config.n_layers).with_prediction();
}

}  // namespace cachalot
