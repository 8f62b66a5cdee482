// Config from GGUF metadata, with the defaults that older files need (each is noted for the log).
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "io/gguf.h"
#include "model/config_sources.h"

namespace cachalot {
namespace {

class Reader {
 public:
  explicit Reader(const GgufFile& file) : file_(file), arch_(file.string("general.architecture").value_or("")) {
    if (arch_.empty()) fail("{}: the key general.architecture is missing", file.name());
  }
  [[nodiscard]] const std::string& arch() const { return arch_; }
  [[nodiscard]] const GgufFile& file() const { return file_; }
  [[nodiscard]] std::string key(std::string_view name) const { return arch_ + "." + std::string(name); }

  [[nodiscard]] int integer(std::string_view name) const {
    const auto value = file_.integer(key(name));
    if (!value) fail("{}: the key {} is missing", file_.name(), key(name));
    return narrow(name, *value);
  }
  [[nodiscard]] int integer(std::string_view name, int fallback) const {
    const auto value = file_.integer(key(name));
    return value ? narrow(name, *value) : fallback;
  }
  [[nodiscard]] double number(std::string_view name, double fallback) const { return file_.number(key(name)).value_or(fallback); }
  [[nodiscard]] bool has(std::string_view name) const { return file_.find(key(name)) != nullptr; }

 private:
  [[nodiscard]] int narrow(std::string_view name, int64_t value) const {
    if (value < std::numeric_limits<int>::min() || value > std::numeric_limits<int>::max())
      fail("{}: {}: found {}, expected a 32-bit integer", file_.name(), key(name), value);
    return static_cast<int>(value);
  }
  const GgufFile& file_;
  std::string arch_;
};

Family family_of(const Reader& in, const Checkpoint& checkpoint) {
  if (in.arch() == "llama") {
    if (in.integer("expert_count", 0) > 0) fail("{}: a llama file with experts (Mixtral) is not supported", checkpoint.name());
    return Family::llama;
  }
  if (in.arch() == "qwen2") return Family::qwen2;
  if (in.arch() == "qwen3") return Family::qwen3;
  if (in.arch() == "deepseek2")
    return checkpoint.has("blk." + std::to_string(in.integer("leading_dense_block_count", 0)) + ".exp_probs_b.bias") ? Family::deepseek_v3
                                                                                                                     : Family::deepseek_v2;
  fail("{}: architecture \"{}\" is not supported; supported are llama, qwen2, qwen3 and deepseek2", checkpoint.name(),
       printable(in.arch()));
}

void read_rope(const Reader& in, const Checkpoint& checkpoint, Config& c) {
  RopeConfig& r = c.rope;
  r.theta = in.number("rope.freq_base", 10000.0);
  const std::string type = in.file().string(in.key("rope.scaling.type")).value_or("none");
  r.factor = in.number("rope.scaling.factor", 1.0);
  r.original_positions = in.integer("rope.scaling.original_context_length", 0);
  double softmax_factor = 1.0;
  if (type == "linear") {
    r.scaling = RopeConfig::Scaling::linear;
  } else if (type == "yarn") {
    r.scaling = RopeConfig::Scaling::yarn;
    r.beta_fast = in.number("rope.scaling.yarn_beta_fast", 32.0);
    r.beta_slow = in.number("rope.scaling.yarn_beta_slow", 1.0);
    if (c.mla) {
      // The file stores 0.1 * mscale_all_dim; its mscale is taken as equal, so cos and sin keep magnitude 1.
      const double all_dim = in.number("rope.scaling.yarn_log_multiplier", 0.0) / 0.1;
      const double magnitude = all_dim != 0.0 ? yarn_magnitude(r.factor, all_dim) : 1.0;
      r.mscale_all_dim = all_dim;
      softmax_factor = magnitude * magnitude;
      if (all_dim == 0.0) c.notes.push_back("rope.scaling.yarn_log_multiplier is missing: the softmax scale carries no YaRN factor");
    } else {
      r.magnitude = yarn_magnitude(r.factor, 1.0) * in.number("rope.scaling.attn_factor", 1.0);
    }
  } else if (type != "none") {
    fail("{}: {} is \"{}\"; supported are none, linear and yarn", in.file().name(), in.key("rope.scaling.type"), printable(type));
  }
  if (r.scaling == RopeConfig::Scaling::none) r.factor = 1.0;
  if (checkpoint.has("rope_freqs.weight")) {
    r.freq_factors = checkpoint.vector("rope_freqs.weight", r.dim / 2);
    for (const float f : r.freq_factors)
      if (!(f > 0.0f) || !std::isfinite(f)) fail("{}: rope_freqs.weight holds {}, expected positive factors", in.file().name(), f);
  }
  c.softmax_scale = static_cast<float>(softmax_factor / std::sqrt(static_cast<double>(c.head_dim)));
}

void read_moe(const Reader& in, Config& c) {
  c.n_experts = in.integer("expert_count", 0);
  if (c.n_experts == 0) return;
  c.n_shared = in.integer("expert_shared_count", 0);
  c.moe_intermediate = in.integer("expert_feed_forward_length");
  c.first_dense = in.integer("leading_dense_block_count", 0);
  Router& r = c.router;
  r.n_experts = c.n_experts;
  r.top_k = in.integer("expert_used_count");
  const int gating = in.integer("expert_gating_func", 0);
  if (gating == 0) {
    r.scoring = c.family == Family::deepseek_v3 ? Scoring::sigmoid : Scoring::softmax;
    c.notes.push_back(fmt::format("expert_gating_func is missing: assuming {}", r.scoring == Scoring::sigmoid ? "sigmoid" : "softmax"));
  } else if (gating == 1 || gating == 2) {
    r.scoring = gating == 1 ? Scoring::softmax : Scoring::sigmoid;
  } else {
    fail("{}: {} is {}; supported are 1 (softmax) and 2 (sigmoid)", in.file().name(), in.key("expert_gating_func"), gating);
  }
  const auto norm = in.file().boolean(in.key("expert_weights_norm"));
  r.normalise = norm.value_or(r.scoring == Scoring::sigmoid);
  if (!norm) c.notes.push_back(fmt::format("expert_weights_norm is missing: assuming {}", r.normalise));
  r.scale = static_cast<float>(in.number("expert_weights_scale", 0.0));
  if (r.scale == 0.0f) {
    r.scale = 1.0f;
    c.notes.push_back("expert_weights_scale is missing or zero: assuming 1");
  }
  r.n_group = in.integer("expert_group_count", 1);
  r.topk_group = in.integer("expert_group_used_count", r.n_group);
  if (r.n_group > 1) r.group_score = r.scoring == Scoring::sigmoid ? GroupScore::top2_sum : GroupScore::max;
}

void read_mla(const Reader& in, Config& c) {
  c.mla = true;
  c.q_rank = in.integer("attention.q_lora_rank", 0);
  c.kv_rank = in.integer("attention.kv_lora_rank");
  c.rope.dim = in.integer("rope.dimension_count");
  c.rope.interleaved = true;
  // Files made before the latent layout (head_count_kv = 1) store the per-head sizes in the plain keys.
  const bool latent = in.has("attention.key_length_mla");
  c.head_dim = in.integer(latent ? "attention.key_length_mla" : "attention.key_length");
  c.v_dim = in.integer(latent ? "attention.value_length_mla" : "attention.value_length");
  c.nope = c.head_dim - c.rope.dim;
}

}  // namespace

Config read_gguf_config(const Checkpoint& checkpoint) {
  const Reader in(*checkpoint.gguf());
  const GgufFile& file = in.file();
  Config c;
  c.architecture = in.arch();
  c.family = family_of(in, checkpoint);
  c.n_layers = in.integer("block_count");
  c.n_mtp_layers = in.integer("nextn_predict_layers", 0);
  c.n_layers -= c.n_mtp_layers;
  c.hidden = in.integer("embedding_length");
  c.n_heads = in.integer("attention.head_count");
  if (c.n_heads <= 0) fail("{}: {} is {}, expected at least 1", file.name(), in.key("attention.head_count"), c.n_heads);
  c.n_kv_heads = in.integer("attention.head_count_kv", c.n_heads);
  c.intermediate = in.integer("feed_forward_length", 0);
  c.max_positions = in.integer("context_length", 4096);
  c.rms_eps = static_cast<float>(in.number("attention.layer_norm_rms_epsilon", 1e-6));
  if (c.family == Family::deepseek_v2 || c.family == Family::deepseek_v3) {
    read_mla(in, c);
    read_moe(in, c);
  } else {
    c.head_dim = in.integer("attention.key_length", c.hidden / c.n_heads);
    c.rope.dim = in.integer("rope.dimension_count", c.head_dim);
    c.rope.interleaved = c.family == Family::llama;  // GGUF stores llama's q and k rows permuted for adjacent pairs
  }
  read_rope(in, checkpoint, c);
  c.qkv_bias = checkpoint.has("blk.0.attn_q.bias");
  c.qk_norm = c.family == Family::qwen3;
  c.tied_head = !checkpoint.has("output.weight");
  const auto* tokens = file.strings("tokenizer.ggml.tokens");
  c.vocab = in.integer("vocab_size", tokens != nullptr ? static_cast<int>(tokens->size()) : 0);
  for (const TensorInfo& tensor : checkpoint.tensors())
    if (tensor.name == "token_embd.weight" && tensor.shape.size() == 2 && tensor.shape[0] <= std::numeric_limits<int>::max())
      c.vocab = static_cast<int>(tensor.shape[0]);
  c.bos_id = static_cast<int>(file.integer("tokenizer.ggml.bos_token_id").value_or(-1));
  for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"})
    if (const auto id = file.integer(key); id && std::find(c.eos_ids.begin(), c.eos_ids.end(), *id) == c.eos_ids.end())
      c.eos_ids.push_back(static_cast<int>(*id));
  return c;
}

}  // namespace cachalot
