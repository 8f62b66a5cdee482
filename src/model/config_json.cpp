// Config from a Hugging Face config.json (key names as published; the renamed `rope_parameters` of transformers 5 is read too).
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/json.h"
#include "model/config_sources.h"

namespace cachalot {
namespace {

int read_int(const JsonValue& json, std::string_view key) {
  const int64_t value = json.at(key).integer();
  if (value < std::numeric_limits<int>::min() || value > std::numeric_limits<int>::max())
    fail("{}: {}: found {}, expected a 32-bit integer", json.where(), key, value);
  return static_cast<int>(value);
}
int read_int(const JsonValue& json, std::string_view key, int fallback) { return json.find(key) ? read_int(json, key) : fallback; }

Family read_family(const JsonValue& json, std::string& architecture) {
  architecture = json.string_or("model_type", "");
  if (architecture == "llama") return Family::llama;
  if (architecture == "qwen2") return Family::qwen2;
  if (architecture == "qwen3") return Family::qwen3;
  if (architecture == "deepseek_v2") return Family::deepseek_v2;
  if (architecture == "deepseek_v3") return Family::deepseek_v3;
  if (architecture.empty()) fail("{}: the key \"model_type\" is missing", json.where());
  fail("{}: model_type \"{}\" is not supported; supported are llama, qwen2, qwen3, deepseek_v2 and deepseek_v3", json.where(),
       printable(architecture));
}

// Fills scaling, and returns m(factor, mscale_all_dim), whose square multiplies MLA's softmax scale.
double read_rope_scaling(const JsonValue& scaling, bool mla, RopeConfig& rope) {
  const std::string type = scaling.string_or("rope_type", scaling.string_or("type", "default"));
  rope.factor = scaling.number_or("factor", 1.0);
  rope.original_positions = read_int(scaling, "original_max_position_embeddings", 0);
  if (type == "default") {
    rope.factor = 1.0;
    return 1.0;
  }
  if (type == "linear") {
    rope.scaling = RopeConfig::Scaling::linear;
    return 1.0;
  }
  if (type == "llama3") {
    rope.scaling = RopeConfig::Scaling::llama3;
    rope.low_freq_factor = scaling.at("low_freq_factor").number();
    rope.high_freq_factor = scaling.at("high_freq_factor").number();
    if (!(rope.high_freq_factor > rope.low_freq_factor && rope.low_freq_factor > 0.0))
      fail("{}: low_freq_factor {} and high_freq_factor {}: expected 0 < low < high", scaling.where(), rope.low_freq_factor,
           rope.high_freq_factor);
    return 1.0;
  }
  if (type != "yarn")
    fail("{}: rope type \"{}\" is not supported; supported are default, linear, yarn and llama3", scaling.where(), printable(type));
  rope.scaling = RopeConfig::Scaling::yarn;
  rope.beta_fast = scaling.number_or("beta_fast", 32.0);
  rope.beta_slow = scaling.number_or("beta_slow", 1.0);
  if (!(rope.beta_fast > 0.0 && rope.beta_slow > 0.0))
    fail("{}: beta_fast {} and beta_slow {} must be positive", scaling.where(), rope.beta_fast, rope.beta_slow);
  const double mscale = scaling.number_or("mscale", mla ? 1.0 : 0.0), all_dim = scaling.number_or("mscale_all_dim", 0.0);
  if (scaling.find("attention_factor"))
    rope.magnitude = scaling.at("attention_factor").number();
  else if (mscale != 0.0 && all_dim != 0.0)
    rope.magnitude = yarn_magnitude(rope.factor, mscale) / yarn_magnitude(rope.factor, all_dim);
  else
    rope.magnitude = yarn_magnitude(rope.factor, mscale != 0.0 ? mscale : 1.0);
  rope.mscale_all_dim = all_dim;
  return all_dim != 0.0 ? yarn_magnitude(rope.factor, all_dim) : 1.0;
}

void read_moe(const JsonValue& json, Config& c) {
  c.n_experts = read_int(json, "n_routed_experts", 0);
  if (c.n_experts == 0) return;
  c.n_shared = read_int(json, "n_shared_experts", 0);
  c.moe_intermediate = read_int(json, "moe_intermediate_size");
  c.first_dense = read_int(json, "first_k_dense_replace", 0);
  if (const int freq = read_int(json, "moe_layer_freq", 1); freq != 1)
    fail("{}: moe_layer_freq is {}, expected 1 (every layer after the dense ones)", json.where(), freq);
  Router& r = c.router;
  r.n_experts = c.n_experts;
  r.top_k = read_int(json, "num_experts_per_tok");
  r.normalise = json.boolean_or("norm_topk_prob", c.family == Family::deepseek_v3);
  r.scale = static_cast<float>(json.number_or("routed_scaling_factor", 1.0));
  const std::string scoring = json.string_or("scoring_func", c.family == Family::deepseek_v3 ? "sigmoid" : "softmax");
  if (scoring == "softmax")
    r.scoring = Scoring::softmax;
  else if (scoring == "sigmoid")
    r.scoring = Scoring::sigmoid;
  else
    fail("{}: scoring_func \"{}\" is not supported; supported are softmax and sigmoid", json.where(), printable(scoring));
  const std::string method = json.string_or("topk_method", c.family == Family::deepseek_v3 ? "noaux_tc" : "greedy");
  if (method == "greedy")
    r.group_score = GroupScore::none;
  else if (method == "group_limited_greedy")
    r.group_score = GroupScore::max;
  else if (method == "noaux_tc")
    r.group_score = GroupScore::top2_sum;
  else
    fail("{}: topk_method \"{}\" is not supported; supported are greedy, group_limited_greedy and noaux_tc", json.where(),
         printable(method));
  if (r.group_score != GroupScore::none) {
    r.n_group = read_int(json, "n_group", 1);
    r.topk_group = read_int(json, "topk_group", 1);
    if (r.n_group == 1) r.group_score = GroupScore::none;
  }
  // DeepSeek-V2's gate multiplies by the factor only where it does not renormalise.
  if (c.family == Family::deepseek_v2 && r.normalise && r.top_k > 1) r.scale = 1.0f;
}

void add_token_ids(const JsonValue& json, std::string_view key, std::vector<int>& ids) {
  const auto value = json.find(key);
  if (!value) return;
  const auto add = [&](const JsonValue& id) {
    const int64_t number = id.integer();
    if (number < 0 || number > std::numeric_limits<int>::max()) fail("{}: found {}, expected a token id", id.where(), number);
    if (std::find(ids.begin(), ids.end(), number) == ids.end()) ids.push_back(static_cast<int>(number));
  };
  if (value->is_array())
    for (const auto id : value->array()) add(JsonValue(id, value->where()));
  else
    add(*value);
}

}  // namespace

Config read_json_config(const Checkpoint& checkpoint) {
  const std::string text = checkpoint.config_json(), file = checkpoint.name() + "/config.json";
  if (text.empty()) fail("{}: no config.json beside the weights", checkpoint.name());
  const JsonDocument document = JsonDocument::parse(text, file, {.max_bytes = 4u << 20, .max_depth = 32, .unique_keys = true});
  const JsonValue& json = document.root();
  Config c;
  c.family = read_family(json, c.architecture);
  c.mla = c.family == Family::deepseek_v2 || c.family == Family::deepseek_v3;
  if (const std::string act = json.string_or("hidden_act", "silu"); act != "silu")
    fail("{}: hidden_act \"{}\" is not supported, expected silu", json.where(), printable(act));
  c.vocab = read_int(json, "vocab_size");
  c.hidden = read_int(json, "hidden_size");
  c.n_layers = read_int(json, "num_hidden_layers");
  c.n_heads = read_int(json, "num_attention_heads");
  c.n_kv_heads = read_int(json, "num_key_value_heads", c.n_heads);
  c.intermediate = read_int(json, "intermediate_size");
  c.max_positions = read_int(json, "max_position_embeddings", 4096);
  c.rms_eps = static_cast<float>(json.number_or("rms_norm_eps", 1e-6));
  c.tied_head = json.boolean_or("tie_word_embeddings", false);
  c.qkv_bias = c.family == Family::qwen2 || json.boolean_or("attention_bias", false);
  c.qk_norm = c.family == Family::qwen3;
  if (c.n_heads <= 0) fail("{}: num_attention_heads is {}, expected at least 1", json.where(), c.n_heads);
  if (c.mla) {
    c.q_rank = read_int(json, "q_lora_rank", 0);
    c.kv_rank = read_int(json, "kv_lora_rank");
    c.nope = read_int(json, "qk_nope_head_dim");
    c.rope.dim = read_int(json, "qk_rope_head_dim");
    c.v_dim = read_int(json, "v_head_dim");
    c.head_dim = c.nope + c.rope.dim;
    c.rope.interleaved = json.boolean_or("rope_interleave", true);
    c.n_mtp_layers = read_int(json, "num_nextn_predict_layers", 0);
    c.mtp_input_normed = json.boolean_or("mtp_input_normed", true);
    if (c.qkv_bias) fail("{}: attention_bias is not supported with multi-head latent attention", json.where());
    read_moe(json, c);
  } else {
    c.head_dim = read_int(json, "head_dim", c.hidden / c.n_heads);
    c.rope.dim = c.head_dim;
  }
  const auto parameters = json.find("rope_parameters");
  const auto scaling = parameters ? parameters : json.find("rope_scaling");
  c.rope.theta = json.number_or("rope_theta", parameters ? parameters->number_or("rope_theta", 10000.0) : 10000.0);
  const double all_dim = scaling ? read_rope_scaling(*scaling, c.mla, c.rope) : 1.0;
  c.softmax_scale = static_cast<float>((c.mla ? all_dim * all_dim : 1.0) / std::sqrt(static_cast<double>(c.head_dim)));
  add_token_ids(json, "eos_token_id", c.eos_ids);
  if (const std::string generation = checkpoint.generation_config_json(); !generation.empty()) {
    const JsonDocument extra =
        JsonDocument::parse(generation, checkpoint.name() + "/generation_config.json", {.max_bytes = 1u << 20, .max_depth = 32});
    add_token_ids(extra.root(), "eos_token_id", c.eos_ids);
  }
  c.bos_id = read_int(json, "bos_token_id", -1);
  return c;
}

}  // namespace cachalot
