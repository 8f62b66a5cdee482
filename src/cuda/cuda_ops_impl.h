// The class behind make_cuda_ops. Its parts: cuda_ops.cpp (memory, rows), pack.cpp, linear.cpp, moe.cpp,
// moe_prompt.cpp, attention.cpp, attention_prompt.cpp, sample.cpp.
#pragma once

#include <vector>

#include "cuda/attention_kernels.h"
#include "cuda/context.h"
#include "cuda/cublas_lt.h"
#include "cuda/cuda_ops.h"
#include "cuda/kernels.h"
#include "cuda/moe_few.h"
#include "cuda/pinned_ring.h"
#include "cuda/weight_feed.h"
#include "ops/arena.h"

namespace cachalot::cuda {

struct CudaPacked final : Packed {
  const void* owner = nullptr;    // the Ops that packed it
  std::vector<Segment> segments;  // one after the other along y
  // Of a single f32 segment: its values as a bf16 part and a bf16 rest, for the tensor cores (17 bits of the 24).
  std::vector<Segment> halves;
  std::vector<Buffer> memory;
  size_t n_bytes = 0;
  Buffer bias;  // f32 [out], or null
  [[nodiscard]] size_t bytes() const override { return n_bytes; }
};

// Pinned memory through which small uploads go without a wait: the next ones take other parts of it.
class UploadRing {
 public:
  static constexpr size_t kMostBytes = size_t{1} << 20;
  // drawn: null, or what words below -1 stand for (Ops::upload_drawn); a kernel fetches them then.
  void upload(void* device, const void* host, size_t bytes, const int* drawn, cudaStream_t stream);

 private:
  PinnedRing ring_{kMostBytes};
};

struct SampleLists;
struct SampleSlot;

// What sample() and draw() keep from call to call: their lists, and memory for as many launches as are on their way at a time.
class Sampler {
 public:
  Sampler();
  ~Sampler();
  SampleLists& lists() { return *lists_; }
  SampleSlot& free_slot();

 private:
  std::unique_ptr<SampleLists> lists_;
  std::vector<std::unique_ptr<SampleSlot>> slots_;
};

class CudaOps final : public Ops {
 public:
  explicit CudaOps(const CudaOptions& options);
  ~CudaOps() override;

  [[nodiscard]] const char* name() const override { return "cuda"; }
  [[nodiscard]] DType activation() const override { return options_.activation; }
  [[nodiscard]] bool host_memory() const override { return false; }

  Linear pack(std::span<const LinearSource> row_segments) override;
  Buffer alloc(size_t bytes) override;
  void upload(void* device, const void* host, size_t bytes) override;
  void download(void* host, const void* device, size_t bytes) override;
  void copy(void* to, const void* from, size_t bytes) override;
  View temp(DType dtype, int rows, int cols) override;
  size_t temp_mark() const override { return arena_.mark(); }
  void temp_release(size_t mark) override { arena_.release(mark); }
  MemorySize memory() override;
  std::unique_ptr<Graph> capture(const std::function<void()>& step) override;

  void embed(const Linear& table, View ids, View x) override;
  void rmsnorm(View x, View w, float eps, View y) override;
  void add_rmsnorm(View residual, View delta, View w, float eps, View y) override;
  void linear(View x, const Linear& w, View y, float beta) override;
  void linear_swiglu(View x, const Linear& gate_up, View h) override;
  void head_linear(View x, const Linear& w, View y) override;
  void rope(View qk, View pos, const Rope& rope) override;
  void mla_prologue(const MlaPrologue& p) override;
  void gqa_prologue(const GqaPrologue& p) override;
  void mla_absorbed(const MlaAbsorbed& a, View context) override;
  void kv_write(const KvLayer& kv, const Batch& batch, View k, View v) override;
  void attend(const Attn& attn, View q, View out) override;
  void attend_expanded(const Attn& attn, const MlaDims& dims, View q, const Linear& kv_b, View out) override;
  void gather_rows(View x, View ids, View y) override;
  void route(View logits, View bias, const Router& router, const Routing& out) override;
  void moe_prologue(const MoePrologue& p) override;
  void moe(View x, const Experts& experts, const Routing& routing, View y) override;
  void moe_add_rmsnorm(View x, const Experts& experts, const Routing& routing, const AddNorm& then) override;
  void sample(View logits, std::span<const SampleParams> params, std::span<Sampled> out) override;
  std::unique_ptr<Draw> draw(View logits, std::span<const SampleParams> params, View tokens) override;
  void upload_drawn(int* device, std::span<const int> words, View drawn) override;
  void scatter_add_rows(View x, View ids, View weights, View y) override;
  void kv_gather(const Attn& attn, int seq, int begin, int n, View out) override;
  void attend_ragged(const RaggedChunk& chunk, View q, View latent, View kv, View out, View lse) override;

  [[nodiscard]] cudaStream_t stream() const { return stream_; }

 private:
  void done(cudaError_t error, const char* op);  // after each launch
  void not_in_forward(const char* what) const;
  const CudaPacked& packed_of(const Linear& w) const;

  // pack.cpp
  [[nodiscard]] Tile tile_for(const LinearSource& source) const;
  void pack_segment(const LinearSource& source, const Segment& segment);
  void pack_halves(std::span<const LinearSource> sources, CudaPacked& packed);
  void pack_dense(const LinearSource& source, const Segment& segment, int matrix);

  // linear.cpp
  // x as the kernels want it: f32, or bf16 with rows of `cols` aligned columns per head. May take temporary memory.
  struct Input {
    const void* data;
    int64_t stride;
    int head;  // columns from head to head
  };
  Input input_for(const Segment& segment, View x, int heads, int head_cols);
  void multiply(GemmArgs& args, const Segment& segment, const Linear& w, View x);
  // Few rows by a matrix of very many, in codes of 4 bits.
  bool multiply_few(const GemmArgs& args);
  // In fp8 through the library, when that is wanted and the shape fits.
  bool multiply_fp8(const GemmArgs& args, View x);
  // x into its blocked form, then the product on wgmma.
  void launch_blocked(GemmArgs args, const char* op);
  void launch_wgmma(const GemmArgs& args, const char* op);
  void multiply_halves(const GemmArgs& args, const CudaPacked& packed, View x);
  static GemmArgs output_of(View y, int col);
  static void set_output(GemmArgs& args, View y, int col);
  // The gate and up halves of a fused product, when one kernel can take both.
  static bool halves(const CudaPacked& packed, int out, Segment& gate, const uint8_t*& up);

  // sample.cpp
  // Of the call's lists, the rows from `begin` on; `logits` are theirs. tokens: null, or where they go beside the slot.
  SampleSlot& enqueue_sample(View logits, size_t begin, int* tokens);

  // attention.cpp
  bool mla_few(const MlaAbsorbed& a, View context);

  // attention_prompt.cpp
  bool attend_flash(const Attn& attn, const AttendArgs& args, View q, View out);
  void attend_rows(AttendArgs args, int max_kv);
  void launch_flash_any(const FlashArgs& args, const char* op);
  void gather(const Attn& attn, const ContextRuns& runs, View out, const char* op);
  // attend_ragged() of several sequences, each with its rows of q, latent, kv, out and lse.
  void attend_runs(const MlaDims& dims, float scale, const ContextRuns& runs, View q, View latent, View kv, View out, View lse);

  // moe.cpp
  struct ExpertSegments {
    Segment gate, down, shared_gate, shared_down;  // of shared ones no data: no shared expert
    const uint8_t *up = nullptr, *shared_up = nullptr;
  };
  bool expert_segments(View x, const Experts& experts, View y, ExpertSegments& s) const;
  bool moe_one(View x, const Experts& experts, const Routing& routing, View y);
  WholeRows whole_rows(int rows, int cols, bool fine);  // temporary
  bool moe_tokens(View x, const Experts& experts, const Routing& routing, View y, const AddNorm* then);
  bool moe_few(View x, const Experts& experts, const Routing& routing, View y, const AddNorm* then);
  bool moe_mid(View x, const Experts& experts, const Routing& routing, View y, const AddNorm* then);
  bool moe_many(View x, const Experts& experts, const Routing& routing, View y, const AddNorm* then);  // moe_prompt.cpp
  // Several rows. The sum goes to y, or where `then` says.
  void moe_rows(View x, const Experts& experts, const Routing& routing, View y, const AddNorm* then);
  // alone: as CombineArgs says.
  void sum_pairs(View pairs, View shared, const Routing& routing, View y, const AddNorm* then, bool alone);
  void plan_moe(MoePlan& plan, int rows);
  void launch_grouped(GemmArgs args);
  void grouped(const Linear& w, const GemmArgs& common, View y);
  bool join_shared_up(const Experts& experts, View hs, GemmArgs& args);
  bool join_shared_down(const Experts& experts, View hs, View shared, View pairs, GemmArgs& args);

  CudaOptions options_;
  cudaStream_t stream_ = nullptr;
  bool capturing_ = false;
  bool hopper_ = false;  // sm_90: wgmma
  int n_multiprocessors_ = 0;
  size_t most_shared_ = 0;  // dynamic shared memory that a block may have
  std::unique_ptr<CublasLt> cublas_;
  Arena arena_;
  UploadRing uploads_;
  WeightFeed feed_;
  Sampler sampler_;
  Buffer moe_barrier_;  // of moe_one_kernel: the barrier, then the count of drawn tasks; then what moe_tokens_kernel counts
};

// cudaMalloc, or an Error with what was asked for and what is there; and memory of the host that the device reads and writes by itself.
Buffer device_memory(size_t bytes);
Buffer pinned_memory(size_t bytes);

inline Mat mat_of(const View& v) { return {v.data, v.dtype, v.n_rows(), v.n_cols(), v.stride[0]}; }

}  // namespace cachalot::cuda
