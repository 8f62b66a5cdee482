// RefOps: the slow, obvious Ops. Host memory, f32 storage, sums in double; weights are held as dequantised f32. It is what the other
// backends are tested against, so each body is the plainest form of the definition in ops.h.
#pragma once

#include "ops/arena.h"
#include "ops/ops.h"

namespace cachalot {

class RefOps : public Ops {
 public:
  RefOps();
  [[nodiscard]] const char* name() const override { return "ref"; }
  [[nodiscard]] DType activation() const override { return DType::f32; }
  [[nodiscard]] bool host_memory() const override { return true; }

  // Throws Error when the segments do not fit together or a bias or permutation does not fit its matrix.
  Linear pack(std::span<const LinearSource> row_segments) override;
  Buffer alloc(size_t bytes) override;
  void upload(void* device, const void* host, size_t bytes) override;
  void download(void* host, const void* device, size_t bytes) override;

  View temp(DType dtype, int rows, int cols) override;
  size_t temp_mark() const override { return arena_.mark(); }
  void temp_release(size_t mark) override { arena_.release(mark); }

  void embed(const Linear& table, View ids, View x) override;
  void rmsnorm(View x, View w, float eps, View y) override;
  void add_rmsnorm(View residual, View delta, View w, float eps, View y) override;
  void linear(View x, const Linear& w, View y, float beta = 0.0f) override;
  void linear_swiglu(View x, const Linear& gate_up, View h) override;
  void head_linear(View x, const Linear& w, View y) override;
  void rope(View qk, View pos, const Rope& rope) override;
  void kv_write(const KvLayer& kv, const Batch& batch, View k, View v) override;
  void attend(const Attn& attn, View q, View out) override;
  void attend_expanded(const Attn& attn, const MlaDims& dims, View q, const Linear& kv_b, View out) override;
  void gather_rows(View x, View ids, View y) override;
  void route(View logits, View bias, const Router& router, const Routing& out) override;
  void moe(View x, const Experts& experts, const Routing& routing, View y) override;

  void scatter_add_rows(View x, View ids, View weights, View y) override;
  void kv_gather(const Attn& attn, int seq, int begin, int n, View out) override;
  void attend_ragged(const RaggedChunk& chunk, View q, View latent, View kv, View out, View lse) override;

 private:
  Arena arena_;
};

}  // namespace cachalot
