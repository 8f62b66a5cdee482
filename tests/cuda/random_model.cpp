// Random models: see random_model.h.
#include "cuda/random_model.h"

#include <array>
#include <bit>
#include <numeric>
#include <random>

#include "base/check.h"
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

LinearSource RandomCheckpoint::linear(std::string_view canonical, int n_matrices, int out, int in) const {
  const bool exact = canonical.find("gate_inp") != std::string_view::npos || canonical.find("kv_b") != std::string_view::npos ||
                     canonical.find("token_embd") != std::string_view::npos;
  const Format format = exact ? Format::bf16 : is_planar(format_) ? format_ : fallback({format_}, in).format;
  Rows& rows = shapes_[{static_cast<int>(format), out, in}];
  if (rows.data.empty()) {
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
  }
  LinearSource s = rows.source;
  s.name = std::string(canonical);
  s.out = out;
  s.matrices.assign(static_cast<size_t>(n_matrices), {rows.data, rows.scales, rows.zeros});
  return s;
}

namespace {

class UniformRouting final : public Ops {
 public:
  UniformRouting(Ops& inner, int vocab, const Router& router, int n_layers) : inner_(inner), vocab_(vocab) {
    const int rows = vocab + kShift * n_layers;
    std::vector<float> words;  // the ids' bits: gather_rows copies f32
    words.reserve(static_cast<size_t>(rows) * static_cast<size_t>(router.top_k));
    std::mt19937 engine(1);
    std::vector<int> experts(static_cast<size_t>(router.n_experts));
    std::iota(experts.begin(), experts.end(), 0);
    for (int r = 0; r < rows; ++r)
      for (int k = 0; k < router.top_k; ++k) {
        std::swap(experts[static_cast<size_t>(k)],
                  experts[static_cast<size_t>(k) + engine() % static_cast<uint32_t>(router.n_experts - k)]);
        words.push_back(std::bit_cast<float>(experts[static_cast<size_t>(k)]));
      }
    table_ = inner.constant(words, rows, router.top_k);
  }
  const char* name() const override { return inner_.name(); }
  DType activation() const override { return inner_.activation(); }
  bool host_memory() const override { return inner_.host_memory(); }
  Linear pack(std::span<const LinearSource> s) override { return inner_.pack(s); }
  Buffer alloc(size_t bytes) override { return inner_.alloc(bytes); }
  void upload(void* device, const void* host, size_t bytes) override { inner_.upload(device, host, bytes); }
  void download(void* host, const void* device, size_t bytes) override { inner_.download(host, device, bytes); }
  MemorySize memory() override { return inner_.memory(); }
  std::unique_ptr<Graph> capture(const std::function<void()>& step) override { return inner_.capture(step); }
  View temp(DType dtype, int rows, int cols) override { return inner_.temp(dtype, rows, cols); }
  size_t temp_mark() const override { return inner_.temp_mark(); }
  void temp_release(size_t mark) override { inner_.temp_release(mark); }
  void embed(const Linear& table, View ids, View x) override {
    ids_ = ids;
    layer_ = 0;
    inner_.embed(table, ids, x);
  }
  void rmsnorm(View x, View w, float eps, View y) override { inner_.rmsnorm(x, w, eps, y); }
  void add_rmsnorm(View residual, View delta, View w, float eps, View y) override { inner_.add_rmsnorm(residual, delta, w, eps, y); }
  void linear(View x, const Linear& w, View y, float beta) override { inner_.linear(x, w, y, beta); }
  void linear_swiglu(View x, const Linear& w, View h) override { inner_.linear_swiglu(x, w, h); }
  void head_linear(View x, const Linear& w, View y) override { inner_.head_linear(x, w, y); }
  void rope(View qk, View pos, const Rope& rope) override { inner_.rope(qk, pos, rope); }
  void mla_prologue(const MlaPrologue& p) override { inner_.mla_prologue(p); }
  void gqa_prologue(const GqaPrologue& p) override { inner_.gqa_prologue(p); }
  void mla_absorbed(const MlaAbsorbed& a, View context) override { inner_.mla_absorbed(a, context); }
  void kv_write(const KvLayer& kv, const Batch& batch, View k, View v) override { inner_.kv_write(kv, batch, k, v); }
  void attend(const Attn& attn, View q, View out) override { inner_.attend(attn, q, out); }
  void attend_expanded(const Attn& attn, const MlaDims& dims, View q, const Linear& kv_b, View out) override {
    inner_.attend_expanded(attn, dims, q, kv_b, out);
  }
  void gather_rows(View x, View ids, View y) override { inner_.gather_rows(x, ids, y); }
  void route(View logits, View bias, const Router& router, const Routing& out) override {
    inner_.route(logits, bias, router, out);
    replace(out.ids);
  }
  void moe_prologue(const MoePrologue& p) override {
    inner_.moe_prologue(p);
    replace(p.out.ids);
  }
  void moe(View x, const Experts& experts, const Routing& routing, View y) override { inner_.moe(x, experts, routing, y); }
  void moe_add_rmsnorm(View x, const Experts& experts, const Routing& routing, const AddNorm& then) override {
    inner_.moe_add_rmsnorm(x, experts, routing, then);
  }
  void sample(View logits, std::span<const SampleParams> params, std::span<Sampled> out) override { inner_.sample(logits, params, out); }
  std::unique_ptr<Draw> draw(View logits, std::span<const SampleParams> params, View tokens) override {
    return inner_.draw(logits, params, tokens);
  }
  void upload_drawn(int* device, std::span<const int> words, View drawn) override { inner_.upload_drawn(device, words, drawn); }

 private:
  void replace(View ids) {
    ids.dtype = DType::f32;
    inner_.gather_rows(table_.view.rows(kShift * layer_++, vocab_), ids_, ids);
  }

  static constexpr int kShift = 131;
  Ops& inner_;
  int vocab_, layer_ = 0;
  Constant table_;
  View ids_;
};

}  // namespace

std::unique_ptr<Ops> make_uniform_routing(Ops& inner, int vocab, const Router& router, int n_layers) {
  return std::make_unique<UniformRouting>(inner, vocab, router, n_layers);
}

}  // namespace cachalot::test
