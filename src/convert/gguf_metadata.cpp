// GGUF keys of models and tokenizers, as llama.cpp reads them.
#include "convert/gguf_metadata.h"

#include "base/error.h"
#include "text/tokenizer.h"

namespace cachalot {
namespace {

uint32_t file_type(Format format) {
  switch (format) {
    case Format::f32: return 0;
    case Format::f16: return 1;
    case Format::q8_0: return 7;
    case Format::bf16: return 32;
    default: fail("format {} cannot be written yet; f32, f16, bf16 and q8_0 can", info(format).name);
  }
}

const char* gguf_architecture(Family family) {
  switch (family) {
    case Family::llama: return "llama";
    case Family::qwen2: return "qwen2";
    case Family::qwen3: return "qwen3";
    case Family::deepseek_v2:
    case Family::deepseek_v3: return "deepseek2";
  }
  return "?";
}

class Keys {
 public:
  Keys(GgufWriter& out, std::string arch) : out_(out), arch_(std::move(arch)) {}
  void u32(const char* key, int value) { out_.set_u32(arch_ + "." + key, static_cast<uint32_t>(value)); }
  void f32(const char* key, double value) { out_.set_f32(arch_ + "." + key, static_cast<float>(value)); }
  void boolean(const char* key, bool value) { out_.set_bool(arch_ + "." + key, value); }
  void string(const char* key, std::string value) { out_.set_string(arch_ + "." + key, std::move(value)); }

 private:
  GgufWriter& out_;
  std::string arch_;
};

void write_rope(Keys& keys, const RopeConfig& r) {
  keys.u32("rope.dimension_count", r.dim);
  keys.f32("rope.freq_base", r.theta);
  if (r.scaling == RopeConfig::Scaling::linear) {
    keys.string("rope.scaling.type", "linear");
    keys.f32("rope.scaling.factor", r.factor);
  } else if (r.scaling == RopeConfig::Scaling::yarn) {
    keys.string("rope.scaling.type", "yarn");
    keys.f32("rope.scaling.factor", r.factor);
    keys.u32("rope.scaling.original_context_length", r.original_positions);
    keys.f32("rope.scaling.yarn_beta_fast", r.beta_fast);
    keys.f32("rope.scaling.yarn_beta_slow", r.beta_slow);
  }
}

void write_mla(Keys& keys, const Config& c) {
  if (c.q_rank > 0) keys.u32("attention.q_lora_rank", c.q_rank);
  keys.u32("attention.kv_lora_rank", c.kv_rank);
  keys.u32("attention.head_count_kv", 1);
  keys.u32("attention.key_length", c.kv_rank + c.rope.dim);
  keys.u32("attention.value_length", c.kv_rank);
  keys.u32("attention.key_length_mla", c.nope + c.rope.dim);
  keys.u32("attention.value_length_mla", c.v_dim);
  if (c.rope.scaling == RopeConfig::Scaling::yarn) keys.f32("rope.scaling.yarn_log_multiplier", 0.1 * c.rope.mscale_all_dim);
}

void write_moe(Keys& keys, const Config& c) {
  keys.u32("leading_dense_block_count", c.n_experts > 0 ? c.first_dense : c.n_layers);
  if (c.n_experts == 0) return;
  keys.u32("expert_feed_forward_length", c.moe_intermediate);
  keys.u32("expert_count", c.n_experts);
  keys.u32("expert_used_count", c.router.top_k);
  keys.u32("expert_shared_count", c.n_shared);
  if (c.router.n_group > 1) {
    keys.u32("expert_group_count", c.router.n_group);
    keys.u32("expert_group_used_count", c.router.topk_group);
  }
  keys.f32("expert_weights_scale", c.router.scale);
  keys.boolean("expert_weights_norm", c.router.normalise);
  keys.u32("expert_gating_func", c.router.scoring == Scoring::softmax ? 1 : 2);
}

}  // namespace

void write_model_metadata(GgufWriter& out, const Config& c, const std::string& name, Format format) {
  const std::string arch = gguf_architecture(c.family);
  out.set_string("general.architecture", arch);
  out.set_string("general.name", name);
  out.set_u32("general.file_type", file_type(format));
  out.set_u32("general.quantization_version", 2);
  Keys keys(out, arch);
  keys.u32("block_count", c.n_layers);
  keys.u32("context_length", c.max_positions);
  keys.u32("embedding_length", c.hidden);
  keys.u32("feed_forward_length", c.intermediate);
  keys.u32("attention.head_count", c.n_heads);
  keys.f32("attention.layer_norm_rms_epsilon", c.rms_eps);
  keys.u32("vocab_size", c.vocab);
  write_rope(keys, c.rope);
  if (c.mla) {
    write_mla(keys, c);
    write_moe(keys, c);
  } else {
    keys.u32("attention.head_count_kv", c.n_kv_heads);
    keys.u32("attention.key_length", c.head_dim);
    keys.u32("attention.value_length", c.head_dim);
  }
}

void write_tokenizer_metadata(GgufWriter& out, const Checkpoint& checkpoint, const Config& c) {
  const std::string json = checkpoint.tokenizer_json();
  if (json.empty()) {
    out.set_string("tokenizer.ggml.model", "no_vocab");
    return;
  }
  const std::string config = checkpoint.tokenizer_config_json(), generation = checkpoint.generation_config_json();
  const Tokenizer tokenizer =
      Tokenizer::from_json(json, checkpoint.name() + "/tokenizer.json",
                           {.tokenizer_config = config, .generation_config = generation, .eos_ids = c.eos_ids, .add_bos = {}});
  VocabData vocab = tokenizer.vocab(c.vocab);
  out.set_string("tokenizer.ggml.model", vocab.model);
  if (!vocab.pre.empty()) out.set_string("tokenizer.ggml.pre", vocab.pre);
  out.set_strings("tokenizer.ggml.tokens", std::move(vocab.tokens));
  out.set_i32s("tokenizer.ggml.token_type", {vocab.types.begin(), vocab.types.end()});
  out.set_strings("tokenizer.ggml.merges", std::move(vocab.merges));
  const auto id = [&](const char* key, std::optional<int64_t> value) {
    if (value) out.set_u32(std::string("tokenizer.ggml.") + key, static_cast<uint32_t>(*value));
  };
  id("bos_token_id", vocab.bos ? vocab.bos : c.bos_id >= 0 ? std::optional<int64_t>(c.bos_id) : std::nullopt);
  id("eos_token_id", vocab.eos ? vocab.eos : c.eos_ids.empty() ? std::nullopt : std::optional<int64_t>(c.eos_ids[0]));
  id("eot_token_id", vocab.eot);
  id("eom_token_id", vocab.eom);
  id("padding_token_id", vocab.pad);
  id("unknown_token_id", vocab.unknown);
  if (vocab.add_bos) out.set_bool("tokenizer.ggml.add_bos_token", *vocab.add_bos);
  if (!vocab.chat_template.empty())
    out.set_string("tokenizer.chat_template", vocab.chat_template);
  else if (const std::string file = checkpoint.chat_template_file(); !file.empty())
    out.set_string("tokenizer.chat_template", file);
}

}  // namespace cachalot
