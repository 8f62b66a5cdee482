// TraceOps: forwards every call, then reports it.
#include "ops/trace_ops.h"

#include <chrono>
#include <cmath>
#include <vector>

#include "base/float_formats.h"

namespace cachalot {
namespace {

class TraceOps final : public Ops {
 public:
  TraceOps(Ops& inner, TraceSink sink) : inner_(inner), sink_(std::move(sink)) {}

  [[nodiscard]] const char* name() const override { return inner_.name(); }
  [[nodiscard]] DType activation() const override { return inner_.activation(); }
  [[nodiscard]] bool host_memory() const override { return inner_.host_memory(); }
  Linear pack(std::span<const LinearSource> row_segments) override { return inner_.pack(row_segments); }
  Buffer alloc(size_t bytes) override { return inner_.alloc(bytes); }
  void upload(void* device, const void* host, size_t bytes) override { inner_.upload(device, host, bytes); }
  void download(void* host, const void* device, size_t bytes) override { inner_.download(host, device, bytes); }
  MemorySize memory() override { return inner_.memory(); }
  void copy(void* to, const void* from, size_t bytes) override { inner_.copy(to, from, bytes); }
  View temp(DType dtype, int rows, int cols) override { return inner_.temp(dtype, rows, cols); }
  size_t temp_mark() const override { return inner_.temp_mark(); }
  void temp_release(size_t mark) override { inner_.temp_release(mark); }

  void embed(const Linear& table, View ids, View x) override {
    index_ = 0;
    report("embed", x, [&] { inner_.embed(table, ids, x); });
  }
  void rmsnorm(View x, View w, float eps, View y) override {
    report("rmsnorm", y, [&] { inner_.rmsnorm(x, w, eps, y); });
  }
  void add_rmsnorm(View residual, View delta, View w, float eps, View y) override {
    report("add_rmsnorm", residual, [&] { inner_.add_rmsnorm(residual, delta, w, eps, y); });
  }
  void linear(View x, const Linear& w, View y, float beta) override {
    report("linear", y, [&] { inner_.linear(x, w, y, beta); });
  }
  void linear_swiglu(View x, const Linear& gate_up, View h) override {
    report("linear_swiglu", h, [&] { inner_.linear_swiglu(x, gate_up, h); });
  }
  void head_linear(View x, const Linear& w, View y) override {
    report("head_linear", y, [&] { inner_.head_linear(x, w, y); });
  }
  void rope(View qk, View pos, const Rope& rope) override {
    report("rope", qk, [&] { inner_.rope(qk, pos, rope); });
  }
  void kv_write(const KvLayer& kv, const Batch& batch, View k, View v) override {
    report("kv_write", k, [&] { inner_.kv_write(kv, batch, k, v); });
  }
  void attend(const Attn& attn, View q, View out) override {
    report("attend", out, [&] { inner_.attend(attn, q, out); });
  }
  void attend_expanded(const Attn& attn, const MlaDims& dims, View q, const Linear& kv_b, View out) override {
    report("attend_expanded", out, [&] { inner_.attend_expanded(attn, dims, q, kv_b, out); });
  }
  void gather_rows(View x, View ids, View y) override {
    report("gather_rows", y, [&] { inner_.gather_rows(x, ids, y); });
  }
  void route(View logits, View bias, const Router& router, const Routing& out) override {
    report("route", out.weights, [&] { inner_.route(logits, bias, router, out); });
  }
  void moe(View x, const Experts& experts, const Routing& routing, View y) override {
    report("moe", y, [&] { inner_.moe(x, experts, routing, y); });
  }
  void sample(View logits, std::span<const SampleParams> params, std::span<Sampled> out) override {
    report("sample", logits, [&] { inner_.sample(logits, params, out); });
  }
  void scatter_add_rows(View x, View ids, View weights, View y) override {
    report("scatter_add_rows", y, [&] { inner_.scatter_add_rows(x, ids, weights, y); });
  }
  void kv_gather(const Attn& attn, int seq, int begin, int n, View out) override {
    report("kv_gather", out, [&] { inner_.kv_gather(attn, seq, begin, n, out); });
  }
  void attend_ragged(const RaggedChunk& chunk, View q, View latent, View kv, View out, View lse) override {
    report("attend_ragged", out, [&] { inner_.attend_ragged(chunk, q, latent, kv, out, lse); });
  }

 private:
  template <typename Call>
  void report(const char* op, const View& out, Call&& call) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
    sink_({index_++, op, out, spent.count()});
  }

  Ops& inner_;
  TraceSink sink_;
  int index_ = 0;
};

bool is_finite_at(const std::vector<std::byte>& row, DType dtype, size_t i) {
  const auto half = [&] { return reinterpret_cast<const uint16_t*>(row.data())[i]; };
  switch (dtype) {
    case DType::f32: return std::isfinite(reinterpret_cast<const float*>(row.data())[i]);
    case DType::f16: return std::isfinite(f16_to_f32(half()));
    case DType::bf16: return std::isfinite(bf16_to_f32(half()));
    case DType::i32:
    case DType::u8: return true;
  }
  return true;
}

}  // namespace

std::unique_ptr<Ops> make_trace_ops(Ops& inner, TraceSink sink) { return std::make_unique<TraceOps>(inner, std::move(sink)); }

int64_t count_not_finite(Ops& ops, View out) {
  CACHALOT_CHECK(out.n_dims == 2 || out.stride[1] == out.shape[2], "heads with gaps between them");
  int64_t found = 0;
  std::vector<std::byte> row(out.row_bytes());
  for (int r = 0; r < out.n_rows(); ++r) {
    ops.download(row.data(), static_cast<const std::byte*>(out.data) + out.row_stride() * r * static_cast<int64_t>(size_of(out.dtype)),
                 row.size());
    for (size_t i = 0; i < static_cast<size_t>(out.n_cols()); ++i) found += is_finite_at(row, out.dtype, i) ? 0 : 1;
  }
  return found;
}

}  // namespace cachalot
