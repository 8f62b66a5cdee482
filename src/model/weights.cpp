// Decoder::load: names to layers. Fused inputs are packed as row segments, so each part keeps the format its file gave it.
#include <algorithm>

#include "base/error.h"
#include "io/pack_file.h"
#include "model/decoder.h"
#include "model/mla_weights.h"

namespace cachalot {
namespace {

class Loader {
 public:
  Loader(const Checkpoint& file, const Config& config, Ops& ops, const LoadOptions& options)
      : file_(file), c_(config), ops_(ops), options_(options) {
    for (const TensorInfo& tensor : file.tensors()) total_ += tensor.data.size();
    if (file.packed() != nullptr) total_ = file.packed()->data_bytes();
  }

  [[nodiscard]] LinearSource source(const std::string& name, int n_matrices, int out, int in) {
    LinearSource s = file_.linear(name, n_matrices, out, in);
    if (file_.packed() == nullptr) advance(s.bytes());
    return s;
  }
  [[nodiscard]] Linear linear(const std::string& name, int out, int in) { return pack({source(name, 1, out, in)}); }
  [[nodiscard]] Linear pack(std::vector<LinearSource> segments, bool on_host = false) {
    Linear w = on_host ? options_.pack_on_host(segments) : options_.pack ? options_.pack(segments) : pack_linear(file_, ops_, segments);
    for (const LinearSource& s : segments) file_.forget(s);  // otherwise the model would be in memory twice
    if (file_.packed() != nullptr) advance(w.packed->bytes());
    return w;
  }
  [[nodiscard]] Constant constant(const std::string& name, int n) { return ops_.constant(file_.vector(name, n), 1, n); }

  [[nodiscard]] Layer layer(int l) {
    prefix_ = "blk." + std::to_string(l) + ".";
    Layer out;
    out.attn_norm = constant(prefix_ + "attn_norm.weight", c_.hidden);
    out.ffn_norm = constant(prefix_ + "ffn_norm.weight", c_.hidden);
    out.attn = attention(l);
    out.ffn = ffn(l);
    return out;
  }
  [[nodiscard]] MtpLayer mtp() {
    MtpLayer out;
    out.layer = layer(c_.n_layers);
    out.token_norm = constant(prefix_ + "nextn.enorm.weight", c_.hidden);
    out.hidden_norm = constant(prefix_ + "nextn.hnorm.weight", c_.hidden);
    out.combine = linear(prefix_ + "nextn.eh_proj.weight", c_.hidden, 2 * c_.hidden);
    out.norm = constant(prefix_ + "nextn.shared_head_norm.weight", c_.hidden);
    return out;
  }
  [[nodiscard]] AttentionWeights attention(int l) {
    prefix_ = "blk." + std::to_string(l) + ".";
    if (c_.mla) return mla();
    return gqa();
  }
  [[nodiscard]] FfnWeights ffn(int l) {
    prefix_ = "blk." + std::to_string(l) + ".";
    if (c_.is_moe_layer(l)) return moe(l < options_.n_host_experts);
    return DenseFfn{gate_up("ffn_gate.weight", "ffn_up.weight", 1, c_.intermediate),
                    linear(prefix_ + "ffn_down.weight", c_.hidden, c_.intermediate)};
  }

 private:
  void advance(size_t bytes) {
    done_ += bytes;
    if (options_.progress) options_.progress(std::min(done_, total_), total_);
  }

  [[nodiscard]] Linear gate_up(const char* gate, const char* up, int n_matrices, int inner, bool on_host = false) {
    return pack({source(prefix_ + gate, n_matrices, inner, c_.hidden), source(prefix_ + up, n_matrices, inner, c_.hidden)}, on_host);
  }

  [[nodiscard]] GqaWeights gqa() {
    const int n_q = c_.n_heads * c_.head_dim, n_kv = c_.n_kv_heads * c_.head_dim;
    const auto projection = [&](const std::string& name, int out) {
      LinearSource s = source(prefix_ + name + ".weight", 1, out, c_.hidden);
      if (c_.qkv_bias) s.bias = file_.vector(prefix_ + name + ".bias", out);
      return s;
    };
    GqaWeights w;
    w.qkv = pack({projection("attn_q", n_q), projection("attn_k", n_kv), projection("attn_v", n_kv)});
    if (c_.qk_norm) {
      w.q_norm = constant(prefix_ + "attn_q_norm.weight", c_.head_dim);
      w.k_norm = constant(prefix_ + "attn_k_norm.weight", c_.head_dim);
    }
    w.o = linear(prefix_ + "attn_output.weight", c_.hidden, n_q);
    return w;
  }

  [[nodiscard]] MlaWeights mla() {
    const int d_q = c_.n_heads * (c_.nope + c_.rope.dim), latent = c_.kv_rank + c_.rope.dim;
    MlaWeights w;
    const std::string q = c_.q_rank > 0 ? "attn_q_a.weight" : "attn_q.weight";
    w.qkv_a = pack({source(prefix_ + q, 1, c_.q_rank > 0 ? c_.q_rank : d_q, c_.hidden),
                    source(prefix_ + "attn_kv_a_mqa.weight", 1, latent, c_.hidden)});
    if (c_.q_rank > 0) {
      w.q_a_norm = constant(prefix_ + "attn_q_a_norm.weight", c_.q_rank);
      w.q_b = linear(prefix_ + "attn_q_b.weight", d_q, c_.q_rank);
    }
    w.kv_a_norm = constant(prefix_ + "attn_kv_a_norm.weight", c_.kv_rank);
    MlaSources s = mla_sources(file_, prefix_, c_.mla_dims(), options_.exact_derived);
    w.kv_b = pack({std::move(s.kv_b)});
    w.uk_t = pack({std::move(s.uk_t)});
    w.uv = pack({std::move(s.uv)});
    w.o = linear(prefix_ + "attn_output.weight", c_.hidden, c_.n_heads * c_.v_dim);
    return w;
  }

  [[nodiscard]] static LinearSource in_f32(const LinearSource& s) {
    std::vector<float> rows(static_cast<size_t>(s.out) * static_cast<size_t>(s.in));
    for (int r = 0; r < s.out; ++r) dequant_row_by_input(s, 0, r, rows.data() + static_cast<size_t>(r) * static_cast<size_t>(s.in));
    return make_linear_source(s.name, Format::f32, rows, 1, s.out, s.in);
  }

  [[nodiscard]] MoeFfn moe(bool on_host) {
    MoeFfn w;
    // The router decides between experts whose scores may be close: its weights are kept in f32 whatever the file holds.
    LinearSource stored = source(prefix_ + "ffn_gate_inp.weight", 1, c_.n_experts, c_.hidden);
    if (stored.format == Format::f32) {
      w.router = pack({std::move(stored)});
    } else {
      w.router = pack({in_f32(stored)});
    }
    if (file_.has(prefix_ + "exp_probs_b.bias")) w.router_bias = constant(prefix_ + "exp_probs_b.bias", c_.n_experts);
    w.experts.gate_up = gate_up("ffn_gate_exps.weight", "ffn_up_exps.weight", c_.n_experts, c_.moe_intermediate, on_host);
    w.experts.down = pack({source(prefix_ + "ffn_down_exps.weight", c_.n_experts, c_.hidden, c_.moe_intermediate)}, on_host);
    if (c_.n_shared > 0) {
      const int inner = c_.n_shared * c_.moe_intermediate;
      w.experts.shared_gate_up = gate_up("ffn_gate_shexp.weight", "ffn_up_shexp.weight", 1, inner);
      w.experts.shared_down = linear(prefix_ + "ffn_down_shexp.weight", c_.hidden, inner);
    }
    return w;
  }

  const Checkpoint& file_;
  const Config& c_;
  Ops& ops_;
  const LoadOptions& options_;
  std::string prefix_;
  size_t done_ = 0, total_ = 0;
};

}  // namespace

AttentionWeights load_attention(const Checkpoint& checkpoint, const Config& config, Ops& ops, int layer, const LoadOptions& options) {
  return Loader(checkpoint, config, ops, options).attention(layer);
}
FfnWeights load_ffn(const Checkpoint& checkpoint, const Config& config, Ops& ops, int layer, const LoadOptions& options) {
  return Loader(checkpoint, config, ops, options).ffn(layer);
}

Decoder Decoder::load(const Checkpoint& checkpoint, const Config& config, Ops& ops, const LoadOptions& options) {
  Decoder d;
  d.config_ = config;
  Loader in(checkpoint, config, ops, options);
  d.embed_ = in.linear("token_embd.weight", config.vocab, config.hidden);
  if (config.tied_head)
    d.lm_head_ = d.embed_;
  else
    d.lm_head_ = in.linear("output.weight", config.vocab, config.hidden);
  d.final_norm_ = in.constant("output_norm.weight", config.hidden);
  for (int l = 0; l < config.n_layers; ++l) d.layers_.push_back(in.layer(l));
  const std::string combine = "blk." + std::to_string(config.n_layers) + ".nextn.eh_proj.weight";
  if (options.mtp && config.n_mtp_layers > 0 && checkpoint.has(combine)) d.mtp_ = in.mtp();
  d.max_positions_ = options.max_positions > 0 ? std::min(options.max_positions, config.max_positions) : config.max_positions;
  d.rope_table_ = ops.constant(rope_table(config.rope, d.max_positions_), d.max_positions_, config.rope.dim);
  d.rope_ = {config.rope.dim, config.rope.interleaved, d.rope_table_.view};
  return d;
}

}  // namespace cachalot
