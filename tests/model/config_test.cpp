// Config: values derived from config.json, and bad ones refused by name.
#include "model/config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "support/config_only.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

using Json = nlohmann::json;

Json v3_config() {
  return Json::parse(R"({"model_type":"deepseek_v3","vocab_size":129280,"hidden_size":7168,"num_hidden_layers":61,"num_attention_heads":128,
    "num_key_value_heads":128,"intermediate_size":18432,"moe_intermediate_size":2048,"n_routed_experts":256,"n_shared_experts":1,
    "num_experts_per_tok":8,"n_group":8,"topk_group":4,"norm_topk_prob":true,"routed_scaling_factor":2.5,"scoring_func":"sigmoid",
    "topk_method":"noaux_tc","first_k_dense_replace":3,"moe_layer_freq":1,"q_lora_rank":1536,"kv_lora_rank":512,"qk_nope_head_dim":128,
    "qk_rope_head_dim":64,"v_head_dim":128,"max_position_embeddings":163840,"rope_theta":10000,"rms_norm_eps":1e-6,
    "num_nextn_predict_layers":1,"bos_token_id":0,"eos_token_id":1,"hidden_act":"silu","attention_bias":false,
    "rope_scaling":{"type":"yarn","factor":40,"original_max_position_embeddings":4096,"beta_fast":32,"beta_slow":1,"mscale":1.0,"mscale_all_dim":1.0}})");
}

Config read(const Json& json, const std::string& generation = {}) { return read_config(ConfigOnly(json.dump(), generation)); }

TEST(Config, DeepSeekV3) {
  const Config c = read(v3_config());
  EXPECT_EQ(c.family, Family::deepseek_v3);
  EXPECT_TRUE(c.mla);
  EXPECT_EQ(c.max_positions, 163840);  // already the extended length: not multiplied again
  EXPECT_EQ(c.router.scoring, Scoring::sigmoid);
  EXPECT_EQ(c.router.group_score, GroupScore::top2_sum);
  EXPECT_TRUE(c.router.normalise);
  EXPECT_FLOAT_EQ(c.router.scale, 2.5f);
  EXPECT_EQ(c.n_mtp_layers, 1);
  EXPECT_TRUE(c.mtp_input_normed);
  Json before_norm = v3_config();
  before_norm["mtp_input_normed"] = false;
  EXPECT_FALSE(read(before_norm).mtp_input_normed);
  EXPECT_TRUE(c.rope.interleaved);
  EXPECT_DOUBLE_EQ(c.rope.magnitude, 1.0);
  EXPECT_NEAR(c.softmax_scale, 1.8739 / std::sqrt(192.0), 1e-5);
}

TEST(Config, DeepSeekV2LiteScale) {
  Json json = v3_config();
  json["model_type"] = "deepseek_v2";
  json["rope_scaling"]["mscale"] = json["rope_scaling"]["mscale_all_dim"] = 0.707;
  json["q_lora_rank"] = nullptr;
  json["topk_method"] = "greedy";
  json["scoring_func"] = "softmax";
  json["norm_topk_prob"] = false;
  const Config c = read(json);
  EXPECT_EQ(c.q_rank, 0);
  EXPECT_NEAR(c.softmax_scale, 1.5896 / std::sqrt(192.0), 1e-5);
  EXPECT_EQ(c.router.group_score, GroupScore::none);
}

TEST(Config, EndTokensAreTheUnionOfBothFiles) {
  const Config c = read(v3_config(), R"({"eos_token_id":[1,128009]})");
  EXPECT_EQ(c.eos_ids, (std::vector<int>{1, 128009}));
}

TEST(Config, NewerRopeSpelling) {
  Json json = Json::parse(
      R"({"model_type":"qwen3","vocab_size":100,"hidden_size":64,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,
    "head_dim":32,"intermediate_size":128,"max_position_embeddings":512,"rms_norm_eps":1e-6,"rope_parameters":{"rope_type":"default","rope_theta":1000000}})");
  const Config c = read(json);
  EXPECT_DOUBLE_EQ(c.rope.theta, 1e6);
  EXPECT_EQ(c.head_dim, 32);
  EXPECT_TRUE(c.qk_norm);
  EXPECT_FALSE(c.rope.interleaved);
}

struct BadConfig {
  const char* name;
  std::function<void(Json&)> spoil;
  std::vector<std::string> message;  // fragments
};

const std::vector<BadConfig>& bad_configs() {
  static const std::vector<BadConfig> cases = {
      {"no_model_type", [](Json& j) { j.erase("model_type"); }, {"model_type", "missing"}},
      {"v32", [](Json& j) { j["model_type"] = "deepseek_v32"; }, {"deepseek_v32", "not supported"}},
      {"v4", [](Json& j) { j["model_type"] = "deepseek_v4"; }, {"deepseek_v4", "not supported"}},
      {"model_type_number", [](Json& j) { j["model_type"] = 3; }, {"model_type", "an integer", "a string"}},
      {"no_hidden", [](Json& j) { j.erase("hidden_size"); }, {"hidden_size", "missing"}},
      {"hidden_text", [](Json& j) { j["hidden_size"] = "7168"; }, {"hidden_size", "a string", "an integer"}},
      {"hidden_negative", [](Json& j) { j["hidden_size"] = -1; }, {"hidden size", "-1"}},
      {"hidden_2_40", [](Json& j) { j["hidden_size"] = 1LL << 40; }, {"hidden_size", "32-bit"}},
      {"layers_zero", [](Json& j) { j["num_hidden_layers"] = 0; }, {"layers", "0"}},
      {"layers_many", [](Json& j) { j["num_hidden_layers"] = 1 << 30; }, {"layers"}},
      {"heads_zero", [](Json& j) { j["num_attention_heads"] = 0; }, {"num_attention_heads", "0"}},
      {"vocab_fraction", [](Json& j) { j["vocab_size"] = 100.5; }, {"vocab_size", "fraction"}},
      {"eps_zero", [](Json& j) { j["rms_norm_eps"] = 0; }, {"epsilon"}},
      {"eps_text", [](Json& j) { j["rms_norm_eps"] = "small"; }, {"rms_norm_eps", "a string"}},
      {"theta_zero", [](Json& j) { j["rope_theta"] = 0; }, {"theta"}},
      {"rope_odd", [](Json& j) { j["qk_rope_head_dim"] = 63; }, {"63", "odd"}},
      {"rope_type", [](Json& j) { j["rope_scaling"]["type"] = "longrope"; }, {"longrope", "not supported"}},
      {"rope_scaling_list", [](Json& j) { j["rope_scaling"] = Json::array(); }, {"rope_scaling", "an array", "an object"}},
      {"yarn_factor_zero", [](Json& j) { j["rope_scaling"]["factor"] = 0; }, {"factor"}},
      {"yarn_no_original", [](Json& j) { j["rope_scaling"].erase("original_max_position_embeddings"); }, {"original"}},
      {"yarn_beta", [](Json& j) { j["rope_scaling"]["beta_fast"] = -1; }, {"beta_fast"}},
      {"experts_negative", [](Json& j) { j["n_routed_experts"] = -8; }, {"experts", "-8"}},
      {"top_k_zero", [](Json& j) { j["num_experts_per_tok"] = 0; }, {"experts used per token", "0"}},
      {"top_k_many", [](Json& j) { j["num_experts_per_tok"] = 1000; }, {"experts used per token", "1000"}},
      {"groups_do_not_divide", [](Json& j) { j["n_group"] = 7; }, {"256", "7"}},
      {"groups_too_few", [](Json& j) { j["topk_group"] = 9; }, {"groups used", "9"}},
      {"scoring", [](Json& j) { j["scoring_func"] = "sqrtsoftplus"; }, {"sqrtsoftplus"}},
      {"topk_method", [](Json& j) { j["topk_method"] = "lottery"; }, {"lottery"}},
      {"moe_freq", [](Json& j) { j["moe_layer_freq"] = 2; }, {"moe_layer_freq", "2"}},
      {"kv_rank_zero", [](Json& j) { j["kv_lora_rank"] = 0; }, {"kv_lora_rank", "0"}},
      {"first_dense", [](Json& j) { j["first_k_dense_replace"] = 62; }, {"dense", "62"}},
      {"act", [](Json& j) { j["hidden_act"] = "gelu"; }, {"gelu", "silu"}},
      {"eos_text", [](Json& j) { j["eos_token_id"] = "end"; }, {"eos_token_id", "a string"}},
      {"eos_out_of_range", [](Json& j) { j["eos_token_id"] = 129280; }, {"129280"}},
      {"eos_negative",
       [](Json& j) {
         j["eos_token_id"] = Json::array({1, -2});
       },
       {"-2"}},
      {"bias_with_mla", [](Json& j) { j["attention_bias"] = true; }, {"attention_bias"}},
  };
  return cases;
}

TEST(Config, BadValuesAreRefusedByName) {
  for (const BadConfig& bad : bad_configs()) {
    SCOPED_TRACE(bad.name);
    Json json = v3_config();
    bad.spoil(json);
    const std::string message = error_of([&] { (void)read(json); });
    for (const std::string& part : bad.message) EXPECT_NE(message.find(part), std::string::npos) << message;
    EXPECT_NE(message.find("dir"), std::string::npos) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
}

TEST(Config, BadJsonIsRefused) {
  for (const std::string text : {"", "{", "[]", "null", "{\"model_type\":\"llama\",\"model_type\":\"qwen2\"}", "\xff\xfe"})
    EXPECT_NE(error_of([&] { (void)read_config(ConfigOnly(text)); }).find("dir"), std::string::npos) << text;
  const std::string deep(100000, '[');
  EXPECT_NE(error_of([&] { (void)read_config(ConfigOnly(deep)); }).find("dir/config.json"), std::string::npos);
}

TEST(Rope, TableIsExactAtLargePositions) {
  RopeConfig r;
  r.dim = 64;
  const std::vector<float> table = rope_table(r, 100001);
  const std::vector<double> freq = rope_frequencies(r);
  const float* last = table.data() + size_t{100000} * 64;
  for (size_t i = 0; i < 32; ++i) {
    EXPECT_NEAR(last[i], std::cos(100000.0 * freq[i]), 1e-7);
    EXPECT_NEAR(last[32 + i], std::sin(100000.0 * freq[i]), 1e-7);
  }
}

}  // namespace
}  // namespace cachalot::test
