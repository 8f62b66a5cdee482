// The class behind make_cpu_ops, and the jobs that its products are made of. Private to src/cpu.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "cpu/cpu_ops.h"
#include "cpu/huge_memory.h"
#include "cpu/isa/kernels.h"
#include "cpu/pack.h"
#include "ops/arena.h"
#include "ops/ops.h"

namespace cachalot::cpu {

struct AttentionShape;
struct AttentionTask;
struct ExpertRun;

// What a segment multiplies.
struct Input {
  const float* const* rows = nullptr;       // [n_tokens] rows of padded_in
  const QuantisedRow* quantised = nullptr;  // [n_tokens] for wide segments of integers
  const float* packed = nullptr;            // for wide segments of floats; see WideKernels::pack_tokens
  // For products on tiles; see TileKernels.
  const uint8_t* tiles = nullptr;  // null: not on tiles
  const float* sums = nullptr;     // of tiles of bytes
  bool bf16 = false;               // tiles of bf16, or of pairs of them for segments that are not wide
};

// One matrix applied to some rows: y[t] = W x[t]. Several jobs are cut into tasks together, so that the experts of a step, or the heads of
// a head_linear, fill all workers.
struct Job {
  const CpuPacked* w = nullptr;
  int matrix = 0;
  int n_tokens = 0;
  const Input* x = nullptr;   // [n_segments]
  float* const* y = nullptr;  // [n_tokens] rows of w->out, or of half of it
};

// The (token, slot) pairs of a routing by expert: those of expert e are order[begin[e], begin[e + 1]), numbered token * top_k + slot.
struct ExpertSlots {
  const int *begin, *order;
  int top_k;
};

class CpuOps : public Ops {
 public:
  explicit CpuOps(const CpuOptions& options);
  [[nodiscard]] const char* name() const override { return name_.c_str(); }
  [[nodiscard]] DType activation() const override { return DType::f32; }
  [[nodiscard]] bool host_memory() const override { return true; }

  Linear pack(std::span<const LinearSource> row_segments) override;
  [[nodiscard]] std::string packed_layout() const override;
  [[nodiscard]] PackedImage packed_image(const Linear& w) const override;
  Linear from_image(std::span<const std::byte> description, std::span<const size_t> buffer_bytes, const FillBuffer& fill) override;
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
  void swiglu_ffn(View x, const Linear& gate_up, const Linear& down, View y) override;
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
  // Those of pack(): null keeps every weight in rows of four.
  [[nodiscard]] const WideKernels* wide_kernels() const { return rounds_activations_ ? &kernels_.wide : nullptr; }
  // Uninitialised memory for n values until the enclosing Scope ends.
  template <typename T>
  T* take(size_t n) {
    return static_cast<T*>(arena_.take(n * sizeof(T)));
  }
  // At least n floats that belong to one worker until its task ends.
  float* scratch(int worker, size_t n);
  // Runs task(index, worker) for all indices, on the calling thread alone when the work is too small to share. A worker takes several
  // indices at a time: to claim one costs as much as the norm of a short row.
  template <typename Task>
  void parallel(int n_tasks, bool small, const Task& task) {
    constexpr int kClaimsPerWorker = 16;
    const auto run = [&](int begin, int end, int worker) {
      for (int i = begin; i < end; ++i) task(i, worker);
    };
    if (small) return run(0, n_tasks, 0);
    const int step = n_tasks / (pool_->size() * kClaimsPerWorker) + 1;
    const auto claim = [&](int index, int worker) { run(index * step, std::min((index + 1) * step, n_tasks), worker); };
    pool_->run((n_tasks + step - 1) / step, std::cref(claim));
  }

  // Row `row` of a segment as f32, in the worker's scratch.
  const float* table_row(const CpuPacked& w, const Segment& s, int matrix, int row, int worker);
  float* const* rows_of(const View& x);  // [n_rows]
  // The rows that each segment of w multiplies: x itself, or copies that are padded and permuted; and for wide segments the rounded ones,
  // which are `known` when the caller has them for x.
  const Input* inputs_of(const CpuPacked& w, const float* const* x, int n_tokens, const QuantisedRow* known = nullptr);
  const QuantisedRow* quantise(const float* const* x, int n_tokens, int n);
  // Whether products of so many rows with weights other than f32 are in bf16.
  bool in_bf16(int n_tokens) const;
  const float* pack_tokens(const float* const* x, int n_tokens, int n);
  void lay_out_tiles(const Segment& s, int n_tokens, int n, Input& input);
  size_t panel_floats(const CpuPacked& w) const;    // scratch for decoded or opened weights
  size_t product_floats(const CpuPacked& w) const;  // all scratch that multiply() may take
  void run_products(std::span<const Job> jobs, float beta);
  void run_swiglu_jobs(std::span<const Job> jobs);
  void run_swiglu(std::span<const Job> jobs);
  template <typename Task>
  void run_jobs(std::span<const Job> jobs, bool halves, const Task& task);
  void multiply(const Job& job, const Segment& s, int segment, int row, int n, float* const* y, int y_col, float beta, int worker);
  ExpertSlots sort_slots(const Routing& routing, int n_experts);
  void moe_tokens(View x, const Experts& experts, const Routing& routing, View y);
  bool fits_tiles(const Linear& gate_up, const Linear& down, int n_tokens) const;
  bool experts_fit_tiles(const Experts& experts, int n_tokens) const;
  ExpertRun expert_run(const Linear& up, const Linear& down, int expert, int n_rows);
  ExpertRun run_of_all(const Linear& up, const Linear& down, View x, View y);  // whose results are stored
  void moe_on_tiles(View x, const Experts& experts, const Routing& routing, View y);
  void run_experts(std::span<const ExpertRun> runs, int hidden);
  // As attend, through the kernels for rows of `element`.
  void attend_rows(const Attn& attn, Element element, View q, View out);
  void attend_split(const Attn& attn, const AttentionShape& shape, std::span<const AttentionTask> tasks, int most_queries, View q,
                    View out);
  // As attend_ragged, through the kernels for rows of `element`.
  void attend_chunk(const RaggedChunk& chunk, Element element, View q, View latent, View kv, View out, View lse);

  std::string name_;
  const KernelTable& kernels_;
  std::shared_ptr<ThreadPool> pool_;
  Arena arena_;
  HugeMemory weights_;
  bool rounds_activations_, bf16_prompts_;
  struct alignas(64) Scratch {
    std::shared_ptr<std::byte> memory;
    size_t floats = 0;
  };
  std::vector<Scratch> scratch_;
};

const CpuPacked& packed_of(const Linear& w);

// What rows of the cache are to the kernels of attention; fp8 rows are converted first.
inline Element element_of(KvFormat format) {
  switch (format) {
    case KvFormat::f32: return Element::f32;
    case KvFormat::f16: return Element::f16;
    case KvFormat::bf16: return Element::bf16;
    case KvFormat::fp8: return Element::bf16;
  }
  CACHALOT_CHECK(false, "KV format {}", static_cast<int>(format));
}

// n_rows rows of K as numbers, n of each.
inline void load_kv_rows(const KernelTable& kernels, const KvLayout& layout, const std::byte* rows, size_t stride, int n_rows, int n,
                         float* to, int64_t to_stride) {
  if (layout.format == KvFormat::fp8) return kernels.load_fp8_rows(rows, stride, n_rows, layout.v_dim, n, to, to_stride);
  kernels.load_rows(element_of(layout.format), rows, stride, n_rows, n, to, to_stride);
}

}  // namespace cachalot::cpu
