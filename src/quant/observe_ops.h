// ObserveOps: a decorator that shows the input of every watched linear before it is applied, those of experts and of the latent's expansion
// included, since it takes the default bodies of the wide calls, which are made of narrower ones.
#pragma once

#include <functional>
#include <map>
#include <utility>

#include "ops/ops.h"

namespace cachalot {

class ObserveOps final : public Ops {
 public:
  // x [rows, in], valid during the call.
  using Sink = std::function<void(int id, View x)>;

  // `inner` must outlive this, and its memory be the host's.
  explicit ObserveOps(Ops& inner) : inner_(inner) { CACHALOT_CHECK(inner.host_memory(), "{} has no host memory", inner.name()); }
  // Reports the inputs of this matrix (the first, when it is a stack) as `id`.
  void watch(const Linear& w, int id) { ids_[{w.packed.get(), w.first}] = id; }
  void forget() { ids_.clear(); }
  void set_sink(Sink sink) { sink_ = std::move(sink); }
  // Shows the normed latents of MLA as well: what kv_b reads. In the absorbed form it is never applied.
  void set_latent_sink(std::function<void(View latent)> sink) { latent_sink_ = std::move(sink); }

  [[nodiscard]] const char* name() const override { return inner_.name(); }
  [[nodiscard]] DType activation() const override { return inner_.activation(); }
  [[nodiscard]] bool host_memory() const override { return true; }
  Linear pack(std::span<const LinearSource> row_segments) override { return inner_.pack(row_segments); }
  Buffer alloc(size_t bytes) override { return inner_.alloc(bytes); }
  void upload(void* device, const void* host, size_t bytes) override { inner_.upload(device, host, bytes); }
  void download(void* host, const void* device, size_t bytes) override { inner_.download(host, device, bytes); }
  View temp(DType dtype, int rows, int cols) override { return inner_.temp(dtype, rows, cols); }
  size_t temp_mark() const override { return inner_.temp_mark(); }
  void temp_release(size_t mark) override { inner_.temp_release(mark); }

  void embed(const Linear& table, View ids, View x) override { inner_.embed(table, ids, x); }
  void rmsnorm(View x, View w, float eps, View y) override { inner_.rmsnorm(x, w, eps, y); }
  void add_rmsnorm(View residual, View delta, View w, float eps, View y) override { inner_.add_rmsnorm(residual, delta, w, eps, y); }
  void linear(View x, const Linear& w, View y, float beta) override {
    observe(x, w);
    inner_.linear(x, w, y, beta);
  }
  void linear_swiglu(View x, const Linear& gate_up, View h) override {
    observe(x, gate_up);
    inner_.linear_swiglu(x, gate_up, h);
  }
  void head_linear(View x, const Linear& w, View y) override {
    observe(x, w);
    inner_.head_linear(x, w, y);
  }
  void rope(View qk, View pos, const Rope& rope) override { inner_.rope(qk, pos, rope); }
  void mla_prologue(const MlaPrologue& p) override {
    inner_.mla_prologue(p);
    if (latent_sink_) latent_sink_(p.row.cols(0, p.dims.kv_rank));
  }
  void kv_write(const KvLayer& kv, const Batch& batch, View k, View v) override { inner_.kv_write(kv, batch, k, v); }
  void attend(const Attn& attn, View q, View out) override { inner_.attend(attn, q, out); }
  void gather_rows(View x, View ids, View y) override { inner_.gather_rows(x, ids, y); }
  void route(View logits, View bias, const Router& router, const Routing& out) override { inner_.route(logits, bias, router, out); }
  void scatter_add_rows(View x, View ids, View weights, View y) override { inner_.scatter_add_rows(x, ids, weights, y); }
  void kv_gather(const Attn& attn, int seq, int begin, int n, View out) override { inner_.kv_gather(attn, seq, begin, n, out); }
  void attend_ragged(const RaggedChunk& chunk, View q, View latent, View kv, View out, View lse) override {
    inner_.attend_ragged(chunk, q, latent, kv, out, lse);
  }

 private:
  void observe(const View& x, const Linear& w) {
    if (!sink_) return;
    const auto found = ids_.find({w.packed.get(), w.first});
    if (found != ids_.end()) sink_(found->second, x);
  }

  Ops& inner_;
  Sink sink_;
  std::function<void(View)> latent_sink_;
  std::map<std::pair<const Packed*, int>, int> ids_;
};

}  // namespace cachalot
