// Uploads and downloads around every call.
#include "ops/staged_ops.h"

#include <cstring>
#include <map>
#include <vector>

#include "ops/arena.h"

namespace cachalot {
namespace {

class StagedOps final : public Ops {
 public:
  explicit StagedOps(Ops& inner)
      : inner_(inner), arena_([](size_t bytes) -> std::shared_ptr<void> {
          return {::operator new (bytes, std::align_val_t{256}), [](void* p) { ::operator delete (p, std::align_val_t{256}); }};
        }) {}

  [[nodiscard]] const char* name() const override { return inner_.name(); }
  [[nodiscard]] DType activation() const override { return inner_.activation(); }
  [[nodiscard]] bool host_memory() const override { return true; }
  Linear pack(std::span<const LinearSource> row_segments) override { return inner_.pack(row_segments); }
  Buffer alloc(size_t bytes) override {
    const Buffer memory = inner_.alloc(bytes);
    const auto begin = reinterpret_cast<uintptr_t>(memory.get());
    (*device_)[begin] = begin + std::max<size_t>(bytes, 1);
    return {memory.get(), [memory, begin, ranges = device_](void*) { ranges->erase(begin); }};
  }
  void upload(void* device, const void* host, size_t bytes) override {
    if (is_on_device(device))
      inner_.upload(device, host, bytes);
    else if (bytes > 0)
      std::memcpy(device, host, bytes);
  }
  void download(void* host, const void* device, size_t bytes) override {
    if (is_on_device(device))
      inner_.download(host, device, bytes);
    else if (bytes > 0)
      std::memcpy(host, device, bytes);
  }
  void copy(void* to, const void* from, size_t bytes) override { inner_.copy(to, from, bytes); }
  MemorySize memory() override { return inner_.memory(); }
  View temp(DType dtype, int rows, int cols) override {
    return View::matrix(arena_.take(static_cast<size_t>(rows) * static_cast<size_t>(cols) * size_of(dtype)), dtype, rows, cols);
  }
  size_t temp_mark() const override { return arena_.mark(); }
  void temp_release(size_t mark) override { arena_.release(mark); }

  void embed(const Linear& table, View ids, View x) override {
    run([&](Call& call) { inner_.embed(table, call.in(ids), call.out(x)); });
  }
  void rmsnorm(View x, View w, float eps, View y) override {
    run([&](Call& call) { inner_.rmsnorm(call.in(x), call.in(w), eps, call.out(y)); });
  }
  void add_rmsnorm(View residual, View delta, View w, float eps, View y) override {
    run([&](Call& call) { inner_.add_rmsnorm(call.in_out(residual), call.in(delta), call.in(w), eps, call.out(y)); });
  }
  void linear(View x, const Linear& w, View y, float beta) override {
    run([&](Call& call) {
      const View from = call.in(x);
      inner_.linear(from, w, beta == 0.0f ? call.out(y) : call.in_out(y), beta);
    });
  }
  void linear_swiglu(View x, const Linear& gate_up, View h) override {
    run([&](Call& call) { inner_.linear_swiglu(call.in(x), gate_up, call.out(h)); });
  }
  void head_linear(View x, const Linear& w, View y) override {
    run([&](Call& call) { inner_.head_linear(call.in(x), w, call.out(y)); });
  }
  void rope(View qk, View pos, const Rope& rope) override {
    run([&](Call& call) { inner_.rope(call.in_out(qk), call.in(pos), call.in(rope)); });
  }
  void mla_prologue(const MlaPrologue& p) override {
    run([&](Call& call) {
      MlaPrologue q = p;
      q.batch = call.in(*p.batch);
      q.q = call.in_out(p.q);
      q.row = call.in_out(p.row);
      q.norm = call.in(p.norm);
      q.rope = call.in(p.rope);
      inner_.mla_prologue(q);
    });
  }
  void kv_write(const KvLayer& kv, const Batch& batch, View k, View v) override {
    run([&](Call& call) { inner_.kv_write(kv, *call.in(batch), call.in(k), call.in(v)); });
  }
  void attend(const Attn& attn, View q, View out) override {
    run([&](Call& call) { inner_.attend(call.in(attn), call.in(q), call.out(out)); });
  }
  void attend_expanded(const Attn& attn, const MlaDims& dims, View q, const Linear& kv_b, View out) override {
    run([&](Call& call) { inner_.attend_expanded(call.in(attn), dims, call.in(q), kv_b, call.out(out)); });
  }
  void gather_rows(View x, View ids, View y) override {
    run([&](Call& call) { inner_.gather_rows(call.in(x), call.in(ids), call.out(y)); });
  }
  void route(View logits, View bias, const Router& router, const Routing& out) override {
    run([&](Call& call) { inner_.route(call.in(logits), call.in(bias), router, {call.out(out.ids), call.out(out.weights)}); });
  }
  void moe(View x, const Experts& experts, const Routing& routing, View y) override {
    run([&](Call& call) { inner_.moe(call.in(x), experts, {call.in(routing.ids), call.in(routing.weights)}, call.out(y)); });
  }
  void sample(View logits, std::span<const SampleParams> params, std::span<Sampled> out) override {
    run([&](Call& call) { inner_.sample(call.in(logits), params, out); });
  }
  void scatter_add_rows(View x, View ids, View weights, View y) override {
    run([&](Call& call) { inner_.scatter_add_rows(call.in(x), call.in(ids), call.in(weights), call.in_out(y)); });
  }
  void kv_gather(const Attn& attn, int seq, int begin, int n, View out) override {
    run([&](Call& call) { inner_.kv_gather(call.in(attn), seq, begin, n, call.out(out)); });
  }
  void attend_ragged(const RaggedChunk& chunk, View q, View latent, View kv, View out, View lse) override {
    run([&](Call& call) { inner_.attend_ragged(chunk, call.in(q), call.in(latent), call.in(kv), call.in_out(out), call.in_out(lse)); });
  }

 private:
  // The arrays of one call, on the device.
  class Call {
   public:
    explicit Call(StagedOps& ops) : ops_(ops), scope_(ops.inner_) {}
    void finish() {  // downloads what the call wrote
      for (const auto& [host, device] : written_) ops_.bring_back(host, device);
    }

    View in(const View& host) {
      const View device = out_only(host);
      if (device.data != host.data) ops_.send(host, device);
      return device;
    }
    View out(const View& host) {
      const View device = out_only(host);
      if (device.data != host.data) written_.emplace_back(host, device);
      return device;
    }
    View in_out(const View& host) {
      const View device = out(host);
      if (device.data != host.data) ops_.send(host, device);
      return device;
    }
    Rope in(const Rope& rope) { return {rope.dim, rope.interleaved, in(rope.cos_sin)}; }
    const Batch* in(const Batch& batch) {
      batch_ = batch;
      for (View Batch::*const member :
           {&Batch::tokens, &Batch::positions, &Batch::slots, &Batch::q_start, &Batch::kv_len, &Batch::block_table, &Batch::logit_rows})
        batch_.*member = in(batch.*member);
      return &batch_;
    }
    Attn in(const Attn& attn) { return {attn.kv, in(*attn.batch), attn.rows, attn.scale}; }

   private:
    View out_only(const View& host) {
      if (!host || ops_.is_on_device(host.data)) return host;
      View device = ops_.inner_.temp(host.dtype, host.n_rows(), host.n_cols());
      return host.n_dims == 3 ? device.heads(host.shape[1], host.shape[2]) : device;
    }

    StagedOps& ops_;
    Scope scope_;
    Batch batch_;
    std::vector<std::pair<View, View>> written_;
  };
  template <typename F>
  void run(F&& f) {
    Call call(*this);
    f(call);
    call.finish();
  }

  [[nodiscard]] bool is_on_device(const void* address) const {
    const auto at = reinterpret_cast<uintptr_t>(address);
    const auto after = device_->upper_bound(at);
    return after != device_->begin() && at < std::prev(after)->second;
  }
  // Runs of bytes without a gap in a host array: whole rows where they lie close, or heads.
  static bool dense(const View& v) {
    return (v.n_dims == 2 || v.stride[1] == v.shape[2]) && (v.n_rows() <= 1 || v.row_stride() == v.n_cols());
  }
  // Calls f(bytes of the host's array, bytes of a dense one) for each piece of a view with gaps, and how long it is.
  template <typename F>
  static void for_each_piece(const View& v, std::byte* packed, F&& f) {
    const size_t element = size_of(v.dtype);
    const int n_heads = v.n_dims == 3 ? v.shape[1] : 1, width = v.n_dims == 3 ? v.shape[2] : v.shape[1];
    const size_t bytes = static_cast<size_t>(width) * element;
    for (int r = 0; r < v.n_rows(); ++r)
      for (int h = 0; h < n_heads; ++h, packed += bytes)
        f(static_cast<std::byte*>(v.data) + (r * v.stride[0] + (v.n_dims == 3 ? h * v.stride[1] : 0)) * static_cast<int64_t>(element),
          packed, bytes);
  }
  static size_t size_in_bytes(const View& v) { return static_cast<size_t>(v.n_rows()) * v.row_bytes(); }

  void send(const View& host, const View& device) {
    const size_t bytes = size_in_bytes(host);
    if (bytes == 0) return;
    if (dense(host)) return inner_.upload(device.data, host.data, bytes);
    std::vector<std::byte> packed(bytes);
    for_each_piece(host, packed.data(), [](std::byte* from, std::byte* to, size_t n) { std::memcpy(to, from, n); });
    inner_.upload(device.data, packed.data(), bytes);
  }
  void bring_back(const View& host, const View& device) {
    const size_t bytes = size_in_bytes(host);
    if (bytes == 0) return;
    if (dense(host)) return inner_.download(host.data, device.data, bytes);
    std::vector<std::byte> packed(bytes);
    inner_.download(packed.data(), device.data, bytes);
    for_each_piece(host, packed.data(), [](std::byte* to, std::byte* from, size_t n) { std::memcpy(to, from, n); });
  }

  Ops& inner_;
  Arena arena_;
  std::shared_ptr<std::map<uintptr_t, uintptr_t>> device_ = std::make_shared<std::map<uintptr_t, uintptr_t>>();  // begin -> end
};

}  // namespace

std::unique_ptr<Ops> make_staged_ops(Ops& inner) { return std::make_unique<StagedOps>(inner); }

}  // namespace cachalot
