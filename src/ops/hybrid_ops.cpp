// Hands calls to the device, but for the experts that lie with the host.
#include "ops/hybrid_ops.h"

#include <algorithm>

#include "base/check.h"
#include "base/float_formats.h"

namespace cachalot {
namespace {

// A weight of the host's in a model of the device's.
class OnHost final : public Packed {
 public:
  explicit OnHost(Linear w) : weight(std::move(w)) {}
  [[nodiscard]] size_t bytes() const override { return weight.packed->bytes(); }
  const Linear weight;
};

class HybridOpsImpl final : public HybridOps {
 public:
  HybridOpsImpl(std::unique_ptr<Ops> device, std::unique_ptr<Ops> host)
      : device_(std::move(device)), host_(std::move(host)), name_(std::string(device_->name()) + "+" + host_->name()) {
    CACHALOT_CHECK(host_->host_memory() && host_->activation() == DType::f32, "{}", host_->name());
  }

  Linear pack_on_host(std::span<const LinearSource> row_segments) override {
    Linear w = host_->pack(row_segments);
    w.packed = std::make_shared<OnHost>(w);
    ++n_on_host_;
    return w;
  }

  // Only the results cross the bus again: the shared expert's first product is the device's work meanwhile, its second one adds them up.
  void moe(View x, const Experts& experts, const Routing& routing, View y) override {
    const auto* const gate_up = dynamic_cast<const OnHost*>(experts.gate_up.packed.get());
    const auto* const down = dynamic_cast<const OnHost*>(experts.down.packed.get());
    CACHALOT_CHECK((gate_up == nullptr) == (down == nullptr), "half of the experts lie with the host");
    if (gate_up == nullptr) return device_->moe(x, experts, routing, y);
    if (x.n_rows() == 0) return;
    const Scope scope(*this), host_scope(*host_);
    const View rows = fetch(x), ids = fetch(routing.ids), weights = fetch(routing.weights);
    View h;
    if (experts.shared_gate_up) {
      h = temp(activation(), x.n_rows(), experts.shared_down.in);
      device_->linear_swiglu(x, experts.shared_gate_up, h);
    }
    const View result = host_->temp(DType::f32, y.n_rows(), y.n_cols());
    host_->moe(rows, {.gate_up = gate_up->weight, .down = down->weight, .shared_gate_up = {}, .shared_down = {}}, {ids, weights}, result);
    store(result, y);
    if (h) device_->linear(h, experts.shared_down, y, 1.0f);
  }
  void moe_add_rmsnorm(View x, const Experts& experts, const Routing& routing, const AddNorm& then) override {
    if (dynamic_cast<const OnHost*>(experts.gate_up.packed.get()) != nullptr) return Ops::moe_add_rmsnorm(x, experts, routing, then);
    device_->moe_add_rmsnorm(x, experts, routing, then);
  }
  std::unique_ptr<Graph> capture(const std::function<void()>& step) override { return n_on_host_ == 0 ? device_->capture(step) : nullptr; }

  // ---- the device's ----
  [[nodiscard]] const char* name() const override { return name_.c_str(); }
  [[nodiscard]] DType activation() const override { return device_->activation(); }
  [[nodiscard]] bool host_memory() const override { return device_->host_memory(); }
  Linear pack(std::span<const LinearSource> row_segments) override { return device_->pack(row_segments); }
  Buffer alloc(size_t bytes) override { return device_->alloc(bytes); }
  void upload(void* device, const void* host, size_t bytes) override { device_->upload(device, host, bytes); }
  void download(void* host, const void* device, size_t bytes) override { device_->download(host, device, bytes); }
  MemorySize memory() override { return device_->memory(); }
  void copy(void* to, const void* from, size_t bytes) override { device_->copy(to, from, bytes); }
  View temp(DType dtype, int rows, int cols) override { return device_->temp(dtype, rows, cols); }
  size_t temp_mark() const override { return device_->temp_mark(); }
  void temp_release(size_t mark) override { device_->temp_release(mark); }

  void embed(const Linear& table, View ids, View x) override { device_->embed(table, ids, x); }
  void rmsnorm(View x, View w, float eps, View y) override { device_->rmsnorm(x, w, eps, y); }
  void add_rmsnorm(View residual, View delta, View w, float eps, View y) override { device_->add_rmsnorm(residual, delta, w, eps, y); }
  void linear(View x, const Linear& w, View y, float beta) override { device_->linear(x, w, y, beta); }
  void linear_swiglu(View x, const Linear& gate_up, View h) override { device_->linear_swiglu(x, gate_up, h); }
  void swiglu_ffn(View x, const Linear& gate_up, const Linear& down, View y) override { device_->swiglu_ffn(x, gate_up, down, y); }
  void head_linear(View x, const Linear& w, View y) override { device_->head_linear(x, w, y); }
  void rope(View qk, View pos, const Rope& rope) override { device_->rope(qk, pos, rope); }
  void mla_prologue(const MlaPrologue& p) override { device_->mla_prologue(p); }
  void mla_absorbed(const MlaAbsorbed& a, View context) override { device_->mla_absorbed(a, context); }
  void gqa_prologue(const GqaPrologue& p) override { device_->gqa_prologue(p); }
  void kv_write(const KvLayer& kv, const Batch& batch, View k, View v) override { device_->kv_write(kv, batch, k, v); }
  void attend(const Attn& attn, View q, View out) override { device_->attend(attn, q, out); }
  void attend_expanded(const Attn& attn, const MlaDims& dims, View q, const Linear& kv_b, View out) override {
    device_->attend_expanded(attn, dims, q, kv_b, out);
  }
  void gather_rows(View x, View ids, View y) override { device_->gather_rows(x, ids, y); }
  void route(View logits, View bias, const Router& router, const Routing& out) override { device_->route(logits, bias, router, out); }
  void moe_prologue(const MoePrologue& p) override { device_->moe_prologue(p); }
  void sample(View logits, std::span<const SampleParams> params, std::span<Sampled> out) override { device_->sample(logits, params, out); }
  std::unique_ptr<Draw> draw(View logits, std::span<const SampleParams> params, View tokens) override {
    return device_->draw(logits, params, tokens);
  }
  void upload_drawn(int* device, std::span<const int> words, View drawn) override { device_->upload_drawn(device, words, drawn); }
  void scatter_add_rows(View x, View ids, View weights, View y) override { device_->scatter_add_rows(x, ids, weights, y); }
  void kv_gather(const Attn& attn, int seq, int begin, int n, View out) override { device_->kv_gather(attn, seq, begin, n, out); }
  void attend_ragged(const RaggedChunk& chunk, View q, View latent, View kv, View out, View lse) override {
    device_->attend_ragged(chunk, q, latent, kv, out, lse);
  }

 private:
  // Rows of the device in the host's temporary memory; bf16 as f32.
  View fetch(const View& v) {
    const View rows = beside(v);
    device_->download(rows.data, v.data, bytes_of(v));
    if (v.dtype != DType::bf16) return rows;
    const View out = host_->temp(DType::f32, v.n_rows(), v.n_cols());
    const auto* const from = static_cast<const uint16_t*>(rows.data);
    std::transform(from, from + bytes_of(v) / sizeof(uint16_t), static_cast<float*>(out.data), bf16_to_f32);
    return out;
  }
  // f32 of the host's to rows of the device, in their dtype.
  void store(const View& from, const View& to) {
    if (to.dtype == DType::f32) return device_->upload(to.data, from.data, bytes_of(to));
    CACHALOT_CHECK(to.dtype == DType::bf16, "{}", name_of(to.dtype));
    const View rows = beside(to);
    const auto* const values = static_cast<const float*>(from.data);
    std::transform(values, values + bytes_of(to) / sizeof(uint16_t), static_cast<uint16_t*>(rows.data), f32_to_bf16);
    device_->upload(to.data, rows.data, bytes_of(to));
  }
  // Memory of the host's for the device's rows.
  View beside(const View& v) { return host_->temp(v.dtype, v.n_rows(), v.n_cols()); }
  static size_t bytes_of(const View& v) {
    CACHALOT_CHECK(v.row_stride() == v.n_cols(), "rows of {} that lie {} apart", v.n_cols(), v.row_stride());
    return static_cast<size_t>(v.n_rows()) * static_cast<size_t>(v.n_cols()) * size_of(v.dtype);
  }

  std::unique_ptr<Ops> device_, host_;
  std::string name_;
  int n_on_host_ = 0;
};

}  // namespace

std::unique_ptr<HybridOps> make_hybrid_ops(std::unique_ptr<Ops> device, std::unique_ptr<Ops> host) {
  return std::make_unique<HybridOpsImpl>(std::move(device), std::move(host));
}

}  // namespace cachalot
