// Config: the facts of a model, each derived once from its file (config.json or GGUF metadata), so that nothing later has to guess.
#pragma once

#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "ops/ops.h"

namespace cachalot {

enum class Family : uint8_t { llama, qwen2, qwen3, deepseek_v2, deepseek_v3 };
const char* name_of(Family family);

// How rotary frequencies are made. YaRN: Peng et al. 2023; llama3: the frequency bands of Llama 3.1.
struct RopeConfig {
  enum class Scaling : uint8_t { none, linear, yarn, llama3 };
  int dim = 0;               // rotated numbers per head
  bool interleaved = false;  // see Rope
  double theta = 10000.0;
  Scaling scaling = Scaling::none;
  double factor = 1.0;
  int original_positions = 0;
  double beta_fast = 32.0, beta_slow = 1.0;              // yarn
  double mscale_all_dim = 0.0;                           // yarn with MLA: its magnitude, squared, is part of softmax_scale; 0: none
  double low_freq_factor = 1.0, high_freq_factor = 4.0;  // llama3
  std::vector<float> freq_factors;                       // [dim / 2] divisors stored in the file (GGUF rope_freqs.weight), or empty
  double magnitude = 1.0;                                // multiplies cos and sin
};

struct Config {
  Family family = Family::llama;
  std::string architecture;  // as the file names it
  int vocab = 0, hidden = 0, n_layers = 0, n_heads = 0, n_kv_heads = 0, head_dim = 0, intermediate = 0;
  int max_positions = 0;
  float rms_eps = 1e-6f;
  bool qkv_bias = false, qk_norm = false, tied_head = false;
  float softmax_scale = 1.0f;  // of the attention scores, YaRN's factor included
  RopeConfig rope;

  bool mla = false;
  int q_rank = 0;  // 0: a plain q projection
  int kv_rank = 0, nope = 0, v_dim = 0;

  int n_experts = 0, n_shared = 0, moe_intermediate = 0, first_dense = 0;
  Router router;
  int n_mtp_layers = 0;  // multi-token-prediction layers behind the last one; the first can guess tokens ahead
  // It takes hidden states from behind the final norm, as published checkpoints do; false ("mtp_input_normed"): from before it.
  bool mtp_input_normed = true;

  int bos_id = -1;
  std::vector<int> eos_ids;        // the union of what the configuration files name
  std::vector<std::string> notes;  // defaults that were assumed, for the log

  [[nodiscard]] bool is_moe_layer(int layer) const { return n_experts > 0 && layer >= first_dense; }
  [[nodiscard]] MlaDims mla_dims() const { return {n_heads, nope, rope.dim, v_dim, kv_rank}; }
  [[nodiscard]] KvLayout kv_layout(KvFormat format, int block_tokens) const;
  // Query columns per token: H * (nope + rope) or H * head_dim.
  [[nodiscard]] int q_cols() const { return mla ? n_heads * (nope + rope.dim) : n_heads * head_dim; }
};

// Throws Error for an unsupported architecture, a missing or impossible value; the message names file and key.
Config read_config(const Checkpoint& checkpoint);

// cos and sin for positions [0, n_positions): f32 [n_positions, dim] as Rope::cos_sin wants them; computed in double.
std::vector<float> rope_table(const RopeConfig& rope, int n_positions);
// The dim / 2 angular frequencies (radians per position).
std::vector<double> rope_frequencies(const RopeConfig& rope);

}  // namespace cachalot
