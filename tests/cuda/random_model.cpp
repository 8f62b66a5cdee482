// Random models: see random_model.h.
#include "cuda/random_model.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "base/check.h"
#include "base/float_formats.h"
#include "ops/random_weights.h"
#include "quant/scheme.h"

namespace cachalot::test {

std::string shape_config(const std::string& name) {
  const std::string common =
      R"("architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400, "kv_lora_rank": 512,
      "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-06, "rope_theta": 10000,
      "max_position_embeddings": 163840, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_shared_experts": 2, "num_experts_per_tok": 6,
      "norm_topk_prob": false, "scoring_func": "softmax", "hidden_act": "silu", "attention_bias": false, "tie_word_embeddings": false,
      "bos_token_id": 100000, "eos_token_id": 100001, "torch_dtype": "bfloat16")";
  if (name == "v2-lite")
    return "{" + common +
           R"(, "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": null,
      "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "topk_method": "greedy", "n_group": 1,
      "topk_group": 1, "routed_scaling_factor": 1.0})";
  CACHALOT_CHECK(name == "v2", "{}", name);
  return "{" + common +
         R"(, "hidden_size": 5120, "num_hidden_layers": 60, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
      "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160, "topk_method": "group_limited_greedy",
      "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0})";
}

bool RandomCheckpoint::has(std::string_view canonical) const {
  return canonical.find("attn_k_b") == std::string_view::npos && canonical.find("exp_probs_b") == std::string_view::npos;
}

// 512 random rows, again and again.
RandomCheckpoint::Rows RandomCheckpoint::repeated_rows(Format format, int out, int in) const {
  Rows rows;
  const int n = std::min(out, 512);
  rows.source = random_source({.format = format, .out = n, .in = in}, 3);
  const auto repeat = [&](std::span<const std::byte> bytes, int some, int all) {
    std::vector<std::byte> to(bytes.size() / static_cast<size_t>(some) * static_cast<size_t>(all));
    for (size_t i = 0; i < to.size(); i += bytes.size())
      std::copy_n(bytes.begin(), std::min(bytes.size(), to.size() - i), to.begin() + static_cast<ptrdiff_t>(i));
    return to;
  };
  const auto scale_rows = [&](int r) { return format == Format::fp8_block ? (r + 127) / 128 : r; };
  const WeightBytes& w = rows.source.matrices[0];
  rows.data = repeat(w.data, n, out);
  rows.scales = repeat(w.scales, scale_rows(n), scale_rows(out));
  rows.zeros = repeat(w.zeros, n, out);
  return rows;
}

// Rows that all differ, the same 512 turned by 8 numbers more each time, and large.
RandomCheckpoint::Rows RandomCheckpoint::embedding_rows(int out, int in) {
  constexpr float kLarge = 0x1p24f;  // root mean square 370,000 at 2,048 columns; 27 layers add hundreds
  Rows rows;
  const int n = std::min(out, 512);
  rows.source = random_source({.format = Format::bf16, .out = n, .in = in}, 3);
  const auto columns = static_cast<size_t>(in);
  std::vector<uint16_t> some(static_cast<size_t>(n) * columns), all(static_cast<size_t>(out) * columns);
  std::memcpy(some.data(), rows.source.matrices[0].data.data(), some.size() * sizeof(uint16_t));
  for (uint16_t& v : some) v = f32_to_bf16(bf16_to_f32(v) * kLarge);
  for (size_t r = 0; r < static_cast<size_t>(out); ++r) {
    const auto from = some.begin() + static_cast<ptrdiff_t>(r % static_cast<size_t>(n) * columns);
    std::rotate_copy(from, from + static_cast<ptrdiff_t>(r / static_cast<size_t>(n) * 8 % columns), from + in,
                     all.begin() + static_cast<ptrdiff_t>(r * columns));
  }
  rows.data.resize(all.size() * sizeof(uint16_t));
  std::memcpy(rows.data.data(), all.data(), rows.data.size());
  return rows;
}

LinearSource RandomCheckpoint::linear(std::string_view canonical, int n_matrices, int out, int in) const {
  const auto contains = [&](std::string_view part) { return canonical.find(part) != std::string_view::npos; };
  const bool router = contains("gate_inp"), embedding = contains("token_embd"), exact = router || embedding || contains("kv_b");
  const Format format = exact ? Format::bf16 : is_planar(format_) ? format_ : fallback({format_}, in).format;
  LinearSource s;
  if (router) {
    s = random_source({.format = format, .out = out, .in = in}, std::hash<std::string_view>{}(canonical));
  } else {
    Rows& rows = shapes_[{static_cast<int>(format), out, in, embedding}];
    if (rows.data.empty()) rows = embedding ? embedding_rows(out, in) : repeated_rows(format, out, in);
    s = rows.source;
    s.matrices.assign(static_cast<size_t>(n_matrices), {rows.data, rows.scales, rows.zeros});
  }
  s.name = std::string(canonical);
  s.out = out;
  return s;
}

}  // namespace cachalot::test
