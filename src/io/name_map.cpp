// The name table. One table serves all families: none gives another meaning to a name of another one.
#include "io/name_map.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <unordered_map>
#include <unordered_set>

namespace cachalot {
namespace {

struct Pair {
  std::string_view hf, gguf;
};

constexpr std::array<Pair, 3> kGlobal = {{
    {"embed_tokens.weight", "token_embd.weight"},
    {"norm.weight", "output_norm.weight"},
    {"lm_head.weight", "output.weight"},
}};

// After "layers.N." and "blk.N.".
constexpr std::array<Pair, 37> kLayer = {{
    {"input_layernorm.weight", "attn_norm.weight"},
    {"post_attention_layernorm.weight", "ffn_norm.weight"},
    // Attention of llama and qwen.
    {"self_attn.q_proj.weight", "attn_q.weight"},
    {"self_attn.q_proj.bias", "attn_q.bias"},
    {"self_attn.k_proj.weight", "attn_k.weight"},
    {"self_attn.k_proj.bias", "attn_k.bias"},
    {"self_attn.v_proj.weight", "attn_v.weight"},
    {"self_attn.v_proj.bias", "attn_v.bias"},
    {"self_attn.o_proj.weight", "attn_output.weight"},
    {"self_attn.o_proj.bias", "attn_output.bias"},
    {"self_attn.q_norm.weight", "attn_q_norm.weight"},
    {"self_attn.k_norm.weight", "attn_k_norm.weight"},
    // Latent attention of DeepSeek.
    {"self_attn.q_a_proj.weight", "attn_q_a.weight"},
    {"self_attn.q_a_proj.bias", "attn_q_a.bias"},
    {"self_attn.q_a_layernorm.weight", "attn_q_a_norm.weight"},
    {"self_attn.q_b_proj.weight", "attn_q_b.weight"},
    {"self_attn.kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight"},
    {"self_attn.kv_a_proj_with_mqa.bias", "attn_kv_a_mqa.bias"},
    {"self_attn.kv_a_layernorm.weight", "attn_kv_a_norm.weight"},
    {"self_attn.kv_b_proj.weight", "attn_kv_b.weight"},
    // Feed-forward networks.
    {"mlp.gate_proj.weight", "ffn_gate.weight"},
    {"mlp.gate_proj.bias", "ffn_gate.bias"},
    {"mlp.up_proj.weight", "ffn_up.weight"},
    {"mlp.up_proj.bias", "ffn_up.bias"},
    {"mlp.down_proj.weight", "ffn_down.weight"},
    {"mlp.down_proj.bias", "ffn_down.bias"},
    {"mlp.gate.weight", "ffn_gate_inp.weight"},
    {"mlp.gate.e_score_correction_bias", "exp_probs_b.bias"},
    {"mlp.shared_experts.gate_proj.weight", "ffn_gate_shexp.weight"},
    {"mlp.shared_experts.up_proj.weight", "ffn_up_shexp.weight"},
    {"mlp.shared_experts.down_proj.weight", "ffn_down_shexp.weight"},
    // The multi-token prediction layer, which follows the last ordinary one.
    {"enorm.weight", "nextn.enorm.weight"},
    {"hnorm.weight", "nextn.hnorm.weight"},
    {"eh_proj.weight", "nextn.eh_proj.weight"},
    {"shared_head.norm.weight", "nextn.shared_head_norm.weight"},
    {"shared_head.head.weight", "nextn.shared_head_head.weight"},
    {"embed_tokens.weight", "nextn.embed_tokens.weight"},
}};

// After "layers.N.mlp.experts.E.".
constexpr std::array<Pair, 3> kExpert = {{
    {"gate_proj.weight", "ffn_gate_exps.weight"},
    {"up_proj.weight", "ffn_up_exps.weight"},
    {"down_proj.weight", "ffn_down_exps.weight"},
}};

// GGUF names that no Hugging Face tensor becomes as it stands.
constexpr std::array<std::string_view, 2> kLayerGgufOnly = {"attn_k_b.weight", "attn_v_b.weight"};
constexpr std::array<std::string_view, 1> kGlobalGgufOnly = {"rope_freqs.weight"};

constexpr int kMaxNumber = 99'999;  // of a layer or expert

bool strip(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

// Takes "<number>." off the front. Only the plain decimal form, so that no two names mean the same tensor.
std::optional<int> strip_number(std::string_view& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const auto digits = static_cast<size_t>(end - text.data());
  if (error != std::errc() || value < 0 || value > kMaxNumber || text[0] == '-' || (digits > 1 && text[0] == '0')) return std::nullopt;
  text.remove_prefix(digits);
  if (!strip(text, ".")) return std::nullopt;
  return value;
}

template <size_t N>
std::string_view lookup(const std::array<Pair, N>& table, std::string_view hf) {
  for (const Pair& pair : table) {
    if (pair.hf == hf) return pair.gguf;
  }
  return {};
}

std::unordered_set<std::string_view> make_layer_names() {
  std::unordered_set<std::string_view> out(kLayerGgufOnly.begin(), kLayerGgufOnly.end());
  for (const Pair& pair : kLayer) out.insert(pair.gguf);
  for (const Pair& pair : kExpert) out.insert(pair.gguf);
  return out;
}

}  // namespace

std::optional<MappedName> map_hf_name(std::string_view name) {
  strip(name, "model.");
  if (!strip(name, "layers.")) {
    const std::string_view canonical = lookup(kGlobal, name);
    return canonical.empty() ? std::nullopt : std::optional(MappedName{std::string(canonical)});
  }
  const auto layer = strip_number(name);
  if (!layer) return std::nullopt;
  MappedName out;
  std::string_view suffix;
  if (strip(name, "mlp.experts.")) {
    const auto expert = strip_number(name);
    if (!expert) return std::nullopt;
    out.expert = *expert;
    suffix = lookup(kExpert, name);
  } else {
    suffix = lookup(kLayer, name);
  }
  if (suffix.empty()) return std::nullopt;
  out.canonical = fmt::format("blk.{}.{}", *layer, suffix);
  return out;
}

std::string hf_name_of(std::string_view canonical, int expert) {
  for (const Pair& pair : kGlobal) {
    if (pair.gguf == canonical) return fmt::format("{}{}", canonical == "output.weight" ? "" : "model.", pair.hf);
  }
  if (!strip(canonical, "blk.")) return {};
  const auto layer = strip_number(canonical);
  if (!layer) return {};
  for (const Pair& pair : kLayer) {
    if (pair.gguf == canonical) return fmt::format("model.layers.{}.{}", *layer, pair.hf);
  }
  for (const Pair& pair : kExpert) {
    if (pair.gguf == canonical)
      return fmt::format("model.layers.{}.mlp.experts.{}.{}", *layer, expert < 0 ? "*" : fmt::to_string(expert), pair.hf);
  }
  return {};
}

bool is_canonical_name(std::string_view name) {
  static const std::unordered_set<std::string_view> kLayerNames = make_layer_names();
  if (strip(name, "blk.")) return strip_number(name).has_value() && kLayerNames.contains(name);
  for (const Pair& pair : kGlobal) {
    if (pair.gguf == name) return true;
  }
  return name == kGlobalGgufOnly[0];
}

}  // namespace cachalot
