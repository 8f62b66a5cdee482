// Copies, and config.json from a Config.
#include "convert/hf_config.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/error.h"
#include "base/mapped_file.h"
#include "io/atomic_file.h"

namespace cachalot {
namespace fs = std::filesystem;
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxCompanion = 256u << 20;

// The tokenizer's files, defaults of generation, and model code that config.json may name.
bool is_companion(const fs::path& path) {
  constexpr std::array<std::string_view, 12> kBeginnings = {
      "tokenizer",     "special_tokens_map", "added_tokens",  "vocab",          "merges",    "spiece",
      "sentencepiece", "generation_config",  "chat_template", "configuration_", "modeling_", "tokenization_"};
  constexpr std::array<std::string_view, 5> kEndings = {".json", ".jinja", ".txt", ".model", ".py"};
  const std::string name = path.filename().string();
  const auto begins = [&](std::string_view beginning) { return name.starts_with(beginning); };
  return std::find(kEndings.begin(), kEndings.end(), path.extension().string()) != kEndings.end() &&
         std::any_of(kBeginnings.begin(), kBeginnings.end(), begins);
}

void copy_companions(const fs::path& from, const fs::path& to) {
  std::error_code error;
  for (auto entry = fs::directory_iterator(from, error); !error && entry != fs::directory_iterator(); entry.increment(error))
    if (entry->is_regular_file() && is_companion(entry->path()))
      write_atomically(to / entry->path().filename(), read_text_file(entry->path(), kMaxCompanion));
  if (error) fail("{}: cannot list the folder: {}", from.string(), error.message());
}

// The double with the fewest digits that means this float: 1e-06, not 9.999999974752427e-07.
double shortest(float value) { return std::stod(fmt::format("{}", value)); }

Json rope_scaling(const RopeConfig& r, bool mla) {
  switch (r.scaling) {
    case RopeConfig::Scaling::none: return nullptr;
    case RopeConfig::Scaling::linear: return {{"rope_type", "linear"}, {"factor", r.factor}};
    case RopeConfig::Scaling::llama3:
      return {{"rope_type", "llama3"},
              {"factor", r.factor},
              {"low_freq_factor", r.low_freq_factor},
              {"high_freq_factor", r.high_freq_factor},
              {"original_max_position_embeddings", r.original_positions}};
    case RopeConfig::Scaling::yarn: break;
  }
  Json out{{"rope_type", "yarn"},      {"type", "yarn"},
           {"factor", r.factor},       {"original_max_position_embeddings", r.original_positions},
           {"beta_fast", r.beta_fast}, {"beta_slow", r.beta_slow}};
  // GGUF has one number for both; cos and sin then keep their magnitude.
  if (mla) out["mscale"] = out["mscale_all_dim"] = r.mscale_all_dim;
  return out;
}

}  // namespace

Json make_hf_config(const Config& c) {
  constexpr std::pair<Family, const char*> kClasses[] = {{Family::llama, "LlamaForCausalLM"},
                                                         {Family::qwen2, "Qwen2ForCausalLM"},
                                                         {Family::qwen3, "Qwen3ForCausalLM"},
                                                         {Family::deepseek_v2, "DeepseekV2ForCausalLM"},
                                                         {Family::deepseek_v3, "DeepseekV3ForCausalLM"}};
  Json out;
  for (const auto& [family, name] : kClasses)
    if (family == c.family) out["architectures"] = {name};
  out["model_type"] = name_of(c.family);
  out["hidden_act"] = "silu";
  out["vocab_size"] = c.vocab;
  out["hidden_size"] = c.hidden;
  out["intermediate_size"] = c.intermediate;
  out["num_hidden_layers"] = c.n_layers;
  out["num_attention_heads"] = c.n_heads;
  out["num_key_value_heads"] = c.mla ? c.n_heads : c.n_kv_heads;
  out["max_position_embeddings"] = c.max_positions;
  out["rms_norm_eps"] = shortest(c.rms_eps);
  out["tie_word_embeddings"] = c.tied_head;
  out["rope_theta"] = c.rope.theta;
  if (!c.rope.freq_factors.empty())
    fail("rope_freqs.weight: found frequency factors of the file's own, expected rotary parameters that config.json can name");
  out["rope_scaling"] = rope_scaling(c.rope, c.mla);
  if (c.bos_id >= 0) out["bos_token_id"] = c.bos_id;
  if (!c.eos_ids.empty()) out["eos_token_id"] = c.eos_ids.size() == 1 ? Json(c.eos_ids[0]) : Json(c.eos_ids);
  if (!c.mla) {
    out["head_dim"] = c.head_dim;
    out["attention_bias"] = c.qkv_bias;
    return out;
  }
  out["attention_bias"] = false;
  out["q_lora_rank"] = c.q_rank > 0 ? Json(c.q_rank) : Json(nullptr);
  out["kv_lora_rank"] = c.kv_rank;
  out["qk_nope_head_dim"] = c.nope;
  out["qk_rope_head_dim"] = c.rope.dim;
  out["v_head_dim"] = c.v_dim;
  out["rope_interleave"] = c.rope.interleaved;
  if (c.n_experts == 0) return out;
  const Router& r = c.router;
  out["n_routed_experts"] = c.n_experts;
  out["n_shared_experts"] = c.n_shared;
  out["moe_intermediate_size"] = c.moe_intermediate;
  out["first_k_dense_replace"] = c.first_dense;
  out["moe_layer_freq"] = 1;
  out["num_experts_per_tok"] = r.top_k;
  out["norm_topk_prob"] = r.normalise;
  out["routed_scaling_factor"] = shortest(r.scale);
  out["scoring_func"] = r.scoring == Scoring::sigmoid ? "sigmoid" : "softmax";
  out["n_group"] = r.n_group;
  out["topk_group"] = r.topk_group;
  out["topk_method"] = c.family == Family::deepseek_v3 ? "noaux_tc" : r.group_score == GroupScore::none ? "greedy" : "group_limited_greedy";
  return out;
}

void write_hf_companions(const fs::path& folder, const Checkpoint& original, const Config& config, const HfCompanions& what) {
  Json json;
  const std::string text = original.config_json();
  if (text.empty()) {
    json = make_hf_config(config);
  } else {
    try {
      json = Json::parse(text);
    } catch (const Json::exception& error) {
      fail("{}: config.json: {}", original.name(), printable(error.what(), 200));
    }
  }
  json.erase("quantization_config");
  if (!what.torch_dtype.empty()) json[json.contains("dtype") ? "dtype" : "torch_dtype"] = what.torch_dtype;
  json["quantization_config"] = what.quantization;

  fs::path from = what.companions;
  std::error_code ignored;
  if (from.empty() && !text.empty())
    from = fs::is_directory(original.name(), ignored) ? fs::path(original.name()) : fs::path(original.name()).parent_path();
  if (!from.empty() && !fs::is_directory(from, ignored)) from = from.parent_path();
  if (from.empty() && !text.empty()) from = ".";
  if (!from.empty()) copy_companions(from, folder);
  write_atomically(folder / "config.json", json.dump(2) + "\n");
  if (what.gptq_file) write_atomically(folder / "quantize_config.json", what.quantization.dump(2) + "\n");
}

}  // namespace cachalot
