// Decoder: a model's weights on a device, and its forward pass, written once for every family and every device.
// Weight structs hold what a layer has; which fields exist is decided by the file, never by the device.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "model/config.h"
#include "ops/ops.h"

namespace cachalot {

// Grouped-query attention (Ainslie et al. 2023): llama, qwen2, qwen3.
struct GqaWeights {
  Linear qkv;               // [(n_heads + 2 * n_kv_heads) * head_dim, hidden], with qwen2's bias
  Constant q_norm, k_norm;  // [head_dim], qwen3
  Linear o;                 // [hidden, n_heads * head_dim]
};

// Multi-head latent attention (DeepSeek-V2, section 2.1).
struct MlaWeights {
  Linear qkv_a;        // [q | latent | k_rope, hidden]: q is q_a (q_rank) when the model has one, else n_heads * (nope + rope_dim)
  Constant q_a_norm;   // [q_rank]
  Linear q_b;          // [n_heads * (nope + rope_dim), q_rank]
  Constant kv_a_norm;  // [kv_rank]
  Linear kv_b;         // [n_heads * (nope + v_dim), kv_rank]: the expanded form
  Linear uk_t;         // n_heads matrices [kv_rank, nope]: queries into the latent space
  Linear uv;           // n_heads matrices [v_dim, kv_rank]: latent results to values
  Linear o;            // [hidden, n_heads * v_dim]
};

struct DenseFfn {
  Linear gate_up;  // [2 * intermediate, hidden]
  Linear down;     // [hidden, intermediate]
};

struct MoeFfn {
  Linear router;         // [n_experts, hidden], kept in f32
  Constant router_bias;  // [n_experts], or absent
  Experts experts;
};

using AttentionWeights = std::variant<GqaWeights, MlaWeights>;
using FfnWeights = std::variant<DenseFfn, MoeFfn>;

struct Layer {
  Constant attn_norm, ffn_norm;  // [hidden]
  AttentionWeights attn;
  FfnWeights ffn;
};

// The multi-token-prediction layer of DeepSeek-V3 (section 2.2): from what the model knows at a position and the token behind it, the token
// after that one. Embedding and head are the model's own.
struct MtpLayer {
  Constant token_norm, hidden_norm;  // [hidden]
  Linear combine;                    // [hidden, 2 * hidden]: over normed embedding | normed hidden state
  Layer layer;
  Constant norm;  // [hidden], before the head
};

// The KV pages of every layer.
using KvLayers = std::span<const KvLayer>;

struct LoadOptions {
  int max_positions = 0;       // rows of the rope table; 0 takes the model's own limit
  bool mtp = false;            // the prediction layer too, when the checkpoint has one
  bool exact_derived = false;  // keep weights derived from quantized ones (MLA's uk_t) in f32 instead of f16
  std::function<void(size_t done_bytes, size_t total_bytes)> progress;
  std::function<Linear(std::span<const LinearSource>)> pack;  // takes the place of pack_linear()
  // Takes the place of both for the routed experts of layers below n_host_experts: HybridOps::pack_on_host().
  std::function<Linear(std::span<const LinearSource>)> pack_on_host;
  int n_host_experts = 0;
};

// One weight on the device: Ops::pack, or for a packed model its bytes. Throws Error when the pack is for another kind of device.
Linear pack_linear(const Checkpoint& checkpoint, Ops& ops, std::span<const LinearSource> row_segments);

class Decoder {
 public:
  // Packs every weight onto `ops`; the checkpoint may be closed afterwards. Throws Error naming the tensor that is missing or misshapen.
  static Decoder load(const Checkpoint& checkpoint, const Config& config, Ops& ops, const LoadOptions& options = {});

  // Runs one step and leaves the logits of batch.logit_rows in `logits`, f32 [n_logits, vocab]. `hidden`, when given, f32 [n_tokens,
  // hidden], receives what predict() wants of each row. kv: one for each layer; further ones are not touched.
  void forward(Ops& ops, const Batch& batch, KvLayers kv, View logits, View hidden = {}) const;
  // Runs the prediction layer on rows whose hidden states are known. batch.tokens: for each row the token at its position + 1; positions
  // and slots are the rows' own. Row r's logits are about the token at its position + 2. hidden f32 [n_tokens, hidden] is replaced by the
  // layer's own output, from which the token after may be guessed in the same way. `of_text`: the hidden states are those of
  // forward(), not the layer's own, and pass the final norm first where the layer was trained so (Config::mtp_input_normed).
  void predict(Ops& ops, const Batch& batch, const KvLayer& kv, bool of_text, View hidden, View logits) const;

  [[nodiscard]] const Config& config() const { return config_; }
  [[nodiscard]] const Linear& embedding() const { return embed_; }
  [[nodiscard]] const Linear& head() const { return lm_head_; }
  [[nodiscard]] const std::vector<Layer>& layers() const { return layers_; }
  [[nodiscard]] const std::optional<MtpLayer>& mtp() const { return mtp_; }
  [[nodiscard]] int n_kv_layers() const { return static_cast<int>(layers_.size()) + (mtp_ ? 1 : 0); }  // the prediction layer's is the last
  [[nodiscard]] int max_positions() const { return max_positions_; }
  [[nodiscard]] size_t weight_bytes() const;  // device memory of all packed weights, shared ones once

 private:
  Config config_;
  int max_positions_ = 0;
  Linear embed_, lm_head_;
  Constant final_norm_, rope_table_;
  Rope rope_;
  std::vector<Layer> layers_;
  std::optional<MtpLayer> mtp_;
};

// The halves of one layer, for tools that go through a model that they cannot hold. Errors as for Decoder::load.
AttentionWeights load_attention(const Checkpoint& checkpoint, const Config& config, Ops& ops, int layer, const LoadOptions& options = {});
FfnWeights load_ffn(const Checkpoint& checkpoint, const Config& config, Ops& ops, int layer, const LoadOptions& options = {});

// What one layer's attention and FFN run on.
struct Step {
  Ops& ops;
  const Config& config;
  const Batch& batch;
  Rope rope;
};
// y has a row for each of x, or only those of batch.logit_rows.
void attention(const Step& step, const GqaWeights& w, const KvLayer& kv, View x, View y);  // attention_gqa.cpp
void attention(const Step& step, const MlaWeights& w, const KvLayer& kv, View x, View y);  // attention_mla.cpp
// The end of either: y = W_o of the rows of `context` that y has.
void attention_output(const Step& step, View context, const Linear& w, View y);
void ffn(const Step& step, const DenseFfn& w, View x, View y);  // ffn.cpp
void ffn(const Step& step, const MoeFfn& w, View x, View y);
// x += y; y = FFN(xn), where xn becomes the norm of x.
void add_ffn(const Step& step, const Constant& norm, const FfnWeights& w, const Constant& next_norm, View x, View xn, View y);

}  // namespace cachalot
