// The name map, both ways.
#include "io/name_map.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace cachalot {
namespace {

TEST(NameMap, MapsHuggingFaceNames) {
  const std::vector<std::pair<std::string, MappedName>> cases = {
      {"model.embed_tokens.weight", {"token_embd.weight"}},
      {"embed_tokens.weight", {"token_embd.weight"}},
      {"model.norm.weight", {"output_norm.weight"}},
      {"lm_head.weight", {"output.weight"}},
      {"model.layers.0.input_layernorm.weight", {"blk.0.attn_norm.weight"}},
      {"model.layers.31.post_attention_layernorm.weight", {"blk.31.ffn_norm.weight"}},
      {"model.layers.7.self_attn.q_proj.weight", {"blk.7.attn_q.weight"}},
      {"model.layers.7.self_attn.k_proj.bias", {"blk.7.attn_k.bias"}},
      {"model.layers.7.self_attn.v_proj.weight", {"blk.7.attn_v.weight"}},
      {"model.layers.7.self_attn.o_proj.weight", {"blk.7.attn_output.weight"}},
      {"model.layers.7.self_attn.q_norm.weight", {"blk.7.attn_q_norm.weight"}},
      {"model.layers.7.self_attn.k_norm.weight", {"blk.7.attn_k_norm.weight"}},
      {"model.layers.60.self_attn.q_a_proj.weight", {"blk.60.attn_q_a.weight"}},
      {"model.layers.60.self_attn.q_a_layernorm.weight", {"blk.60.attn_q_a_norm.weight"}},
      {"model.layers.60.self_attn.q_b_proj.weight", {"blk.60.attn_q_b.weight"}},
      {"model.layers.60.self_attn.kv_a_proj_with_mqa.weight", {"blk.60.attn_kv_a_mqa.weight"}},
      {"model.layers.60.self_attn.kv_a_layernorm.weight", {"blk.60.attn_kv_a_norm.weight"}},
      {"model.layers.60.self_attn.kv_b_proj.weight", {"blk.60.attn_kv_b.weight"}},
      {"model.layers.0.mlp.gate_proj.weight", {"blk.0.ffn_gate.weight"}},
      {"model.layers.0.mlp.up_proj.weight", {"blk.0.ffn_up.weight"}},
      {"model.layers.0.mlp.down_proj.weight", {"blk.0.ffn_down.weight"}},
      {"model.layers.3.mlp.gate.weight", {"blk.3.ffn_gate_inp.weight"}},
      {"model.layers.3.mlp.gate.e_score_correction_bias", {"blk.3.exp_probs_b.bias"}},
      {"model.layers.3.mlp.shared_experts.gate_proj.weight", {"blk.3.ffn_gate_shexp.weight"}},
      {"model.layers.3.mlp.shared_experts.up_proj.weight", {"blk.3.ffn_up_shexp.weight"}},
      {"model.layers.3.mlp.shared_experts.down_proj.weight", {"blk.3.ffn_down_shexp.weight"}},
      {"model.layers.3.mlp.experts.0.gate_proj.weight", {"blk.3.ffn_gate_exps.weight", 0}},
      {"model.layers.3.mlp.experts.255.up_proj.weight", {"blk.3.ffn_up_exps.weight", 255}},
      {"model.layers.3.mlp.experts.12.down_proj.weight", {"blk.3.ffn_down_exps.weight", 12}},
      {"model.layers.61.enorm.weight", {"blk.61.nextn.enorm.weight"}},
      {"model.layers.61.hnorm.weight", {"blk.61.nextn.hnorm.weight"}},
      {"model.layers.61.eh_proj.weight", {"blk.61.nextn.eh_proj.weight"}},
      {"model.layers.61.shared_head.norm.weight", {"blk.61.nextn.shared_head_norm.weight"}},
      {"model.layers.61.shared_head.head.weight", {"blk.61.nextn.shared_head_head.weight"}},
      {"model.layers.61.embed_tokens.weight", {"blk.61.nextn.embed_tokens.weight"}},
  };
  for (const auto& [hf, expected] : cases) {
    const auto mapped = map_hf_name(hf);
    ASSERT_TRUE(mapped.has_value()) << hf;
    EXPECT_EQ(mapped->canonical, expected.canonical) << hf;
    EXPECT_EQ(mapped->expert, expected.expert) << hf;
    EXPECT_TRUE(is_canonical_name(mapped->canonical)) << hf;
    if (hf != "embed_tokens.weight") {
      EXPECT_EQ(hf_name_of(mapped->canonical, mapped->expert), hf);
    }
  }
  EXPECT_EQ(hf_name_of("blk.3.ffn_up_exps.weight"), "model.layers.3.mlp.experts.*.up_proj.weight");
}

TEST(NameMap, LeavesOtherNames) {
  for (const char* name :
       {"", "model.", "model.layers.", "model.layers.3", "model.layers.3.", "model.layers..input_layernorm.weight",
        "model.layers.-1.input_layernorm.weight", "model.layers.03.input_layernorm.weight", "model.layers.100000.input_layernorm.weight",
        "model.layers.99999999999999999999.input_layernorm.weight", "model.layers.3.input_layernorm.weight ",
        "model.layers.3.self_attn.indexer.wk.weight", "model.layers.3.mlp.experts.1.gate_proj",
        "model.layers.3.mlp.experts.01.gate_proj.weight", "model.layers.3.self_attn.q_proj.weight_scale_inv",
        "model.layers.3.self_attn.rotary_emb.inv_freq", "blk.3.attn_q.weight", "model.model.norm.weight"}) {
    EXPECT_FALSE(map_hf_name(name).has_value()) << name;
  }
  for (const char* name : {"", "blk.", "blk.3", "blk.3.", "blk.03.attn_q.weight", "blk.3.attn_q", "blk.3.attn_q_weight", "token_embd",
                           "model.norm.weight", "blk.3.indexer.k_norm.weight"})
    EXPECT_FALSE(is_canonical_name(name)) << name;
  for (const char* name : {"rope_freqs.weight", "blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight"}) {
    EXPECT_TRUE(is_canonical_name(name)) << name;
    EXPECT_EQ(hf_name_of(name), "");
  }
}

}  // namespace
}  // namespace cachalot
