// Ops: the seam between the model text and a device. A model is written once as calls on this interface; RefOps, CpuOps and CudaOps
// implement it. Rules: calls marked "load time" may allocate and wait; every other call only enqueues work: no allocation in the steady
// state, no wait, no host read of device data. To fuse more, add a wider call with a default body made of narrower ones
// (ops_default.cpp); never add a flag that only one backend reads.
//
// Shapes: T = rows (tokens), H = heads. Activations are matrices [T, cols] of dtype activation(); the residual stream, router logits and
// final logits are f32 on every device. Scores, softmax, router, norms and the sum over experts are computed in f32 (or wider).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/system_memory.h"
#include "ops/batch.h"
#include "ops/kv_layout.h"
#include "ops/sampling.h"
#include "tensor/linear_source.h"
#include "tensor/view.h"

namespace cachalot {

// Memory on the device; freed with its last holder.
using Buffer = std::shared_ptr<void>;

// A device's own form of a weight matrix or stack. Only the Ops that packed it looks inside.
class Packed {
 public:
  virtual ~Packed() = default;
  [[nodiscard]] virtual size_t bytes() const = 0;  // device memory held
};

// A packed linear map y = W x (+ bias), or a stack of n_matrices of them.
struct Linear {
  int out = 0, in = 0;
  int n_matrices = 0;
  int first = 0;  // index of the first matrix within `packed`
  std::shared_ptr<const Packed> packed;

  explicit operator bool() const { return packed != nullptr; }
  // One matrix of the stack.
  [[nodiscard]] Linear matrix(int i) const { return {out, in, 1, first + i, packed}; }
};

// A Linear's packed form as plain bytes, for files that hold it: a small opaque description and the large buffers that it speaks of.
struct PackedImage {
  std::vector<std::byte> description;
  std::vector<std::span<const std::byte>> buffers;  // valid while the Linear lives
};
// Writes the whole content of buffer `index` of a packed form to `memory`.
using FillBuffer = std::function<void(size_t index, std::span<std::byte> memory)>;

// A small constant on the device (a norm weight, a rope table) with its owner.
struct Constant {
  View view;
  Buffer memory;
  explicit operator bool() const { return static_cast<bool>(view); }
};

// Rotary embedding of the last `dim` numbers of each head.
struct Rope {
  int dim = 0;
  bool interleaved = false;  // pairs (2i, 2i + 1) as in GPT-J and MLA; otherwise (i, i + dim / 2) as in GPT-NeoX
  View cos_sin;              // f32 [n_positions, dim]: cos of the dim / 2 angles, then sin, both times the YaRN magnitude
};

enum class Scoring : uint8_t { softmax, sigmoid };
enum class GroupScore : uint8_t { none, max, top2_sum };

// How a MoE layer chooses (DeepSeek-V2 section 2.1.2, DeepSeek-V3 section 2.1.2).
struct Router {
  int n_experts = 0, top_k = 0;
  Scoring scoring = Scoring::softmax;
  GroupScore group_score = GroupScore::none;  // max: V2's group-limited; top2_sum: V3's
  int n_group = 1, topk_group = 1;
  bool normalise = false;  // divide the chosen weights by their sum + 1e-20
  float scale = 1.0f;
};

// The result of route().
struct Routing {
  View ids;      // i32 [T, top_k], by falling score; -1 where the row is padding
  View weights;  // f32 [T, top_k]
};

// The FFNs of a MoE layer. Every token also passes the shared expert when there is one.
struct Experts {
  Linear gate_up;         // n_experts matrices [2 * inner, hidden]: gate rows, then up rows
  Linear down;            // n_experts matrices [hidden, inner]
  Linear shared_gate_up;  // one matrix, or absent
  Linear shared_down;
};

// What attend() and attend_expanded() work on: the rows of `rows`, causal against their sequences' pages.
struct Attn {
  KvLayer kv;
  const Batch* batch = nullptr;
  Rows rows;
  float scale = 1.0f;  // of the scores, before softmax
};

// Dimensions of MLA per head: nope + rope numbers of query and key, v_dim of value; kv_rank numbers of the shared latent.
struct MlaDims {
  int n_heads = 0, nope = 0, rope_dim = 0, v_dim = 0, kv_rank = 0;
};

// What MLA does between its first projection and attention.
struct MlaPrologue {
  KvLayer kv;
  const Batch* batch = nullptr;
  MlaDims dims;
  View q;     // [T, n_heads * (nope + rope_dim)]
  View row;   // [T, kv_rank + rope_dim]: latent, then the rope key that all heads share
  View norm;  // f32 [kv_rank]
  float eps = 0.0f;
  Rope rope;
};

// The absorbed form of MLA for the rows of `rows`, its prologue for all rows.
struct MlaAbsorbed {
  MlaPrologue prologue;
  Rows rows;
  float scale = 1.0f;
  const Linear* uk = nullptr;  // n_heads matrices [kv_rank, nope]
  const Linear* uv = nullptr;  // n_heads matrices [v_dim, kv_rank]
};

// What attention with separate keys and values does between its first projection and itself.
struct GqaPrologue {
  KvLayer kv;
  const Batch* batch = nullptr;
  View q, k, v;         // [T, n_heads * k_dim], [T, kv heads * k_dim], [T, kv heads * v_dim]
  View q_norm, k_norm;  // f32 [k_dim], or empty
  float eps = 0.0f;
  Rope rope;
};

// What a layer does between attention and its experts.
struct MoePrologue {
  View residual, delta;  // f32 and activation, [T, hidden]: residual += delta
  View norm;             // f32 [hidden]
  float eps = 0.0f;
  View y;                          // activation [T, hidden]: rmsnorm(residual), which the router reads
  const Linear* router = nullptr;  // [n_experts, hidden]
  View bias;                       // f32 [n_experts], or empty; see route()
  Router how;
  Routing out;
};

// What a layer does with the result of its last product: residual += result, whose norm is what the next layer reads.
struct AddNorm {
  View residual;  // f32 [T, hidden]
  View norm;      // f32 [hidden]
  float eps = 0.0f;
  View y;  // activation [T, hidden]: rmsnorm(residual)
};

// One chunk of context of one sequence in the expanded form.
struct RaggedChunk {
  MlaDims dims;
  float scale = 1.0f;
  int q_position = 0;   // position of the first query row
  int kv_position = 0;  // position of the first context row
};

// A recorded run of calls, to be run again on what its arrays then hold. Temporary memory that they used stays theirs.
class Graph {
 public:
  virtual ~Graph() = default;
  virtual void launch() = 0;  // enqueues
};

// Tokens that are being drawn.
class Draw {
 public:
  virtual ~Draw() = default;
  virtual void wait(std::span<Sampled> out) = 0;  // once
};

class Ops {
 public:
  virtual ~Ops() = default;
  [[nodiscard]] virtual const char* name() const = 0;
  // dtype of activations between calls: f32 on the CPU, bf16 on a GPU.
  [[nodiscard]] virtual DType activation() const = 0;
  // True when Views may be read and written by the host directly, calls having finished when they return.
  [[nodiscard]] virtual bool host_memory() const = 0;

  // ---- load time ----
  // Turns row segments that are applied to the same input (fused q | k | v, gate | up) into one Linear; formats may differ per segment,
  // `in` and the number of matrices may not. The sources' bytes are not needed afterwards.
  virtual Linear pack(std::span<const LinearSource> row_segments) = 0;
  virtual Buffer alloc(size_t bytes) = 0;  // zeroed, aligned to 256 bytes
  virtual void upload(void* device, const void* host, size_t bytes) = 0;
  virtual void download(void* host, const void* device, size_t bytes) = 0;  // waits for everything enqueued before
  Constant constant(std::span<const float> values, int rows, int cols);     // f32 matrix
  // Waits for everything enqueued before, where calls only enqueue.
  virtual MemorySize memory() { return system_memory(); }
  // Records the calls that `step` makes, without running them; null where a device runs calls at once. `step` must have run before, and be
  // made of calls that only enqueue. Throws Error when the device has no room for it.
  virtual std::unique_ptr<Graph> capture(const std::function<void()>& step);

  // Copies within the device's memory. Unlike the calls above, only enqueued; not inside a forward pass. The ranges do not overlap.
  virtual void copy(void* to, const void* from, size_t bytes);

  // ---- load time, packed files ----
  // Names the form that pack() gives weights here; what one device wrote, every device that names the same form can read. "": none, and
  // the two calls below throw Error.
  [[nodiscard]] virtual std::string packed_layout() const { return {}; }
  [[nodiscard]] virtual PackedImage packed_image(const Linear& w) const;
  // The Linear whose packed_image() had this description and buffers of these sizes. Throws Error when they do not belong together.
  virtual Linear from_image(std::span<const std::byte> description, std::span<const size_t> buffer_bytes, const FillBuffer& fill);

  // ---- temporary memory: a bump arena, released by Scope ----
  virtual View temp(DType dtype, int rows, int cols) = 0;
  virtual size_t temp_mark() const = 0;
  virtual void temp_release(size_t mark) = 0;

  // ---- the model's operations ----
  // x[t] = row ids[t] of the table. x f32 [T, hidden].
  virtual void embed(const Linear& table, View ids, View x) = 0;
  // y = x / sqrt(mean(x^2) + eps) * w over the last dimension: [T, n], or [T, H, n] per head. y may be x. w f32 [n].
  virtual void rmsnorm(View x, View w, float eps, View y) = 0;
  // residual += delta; y = rmsnorm(residual). residual f32 [T, n], delta and y activations.
  virtual void add_rmsnorm(View residual, View delta, View w, float eps, View y) = 0;
  // y = W x + bias + beta * y. x [T, in]; y [T, out], f32 or activation.
  virtual void linear(View x, const Linear& w, View y, float beta = 0.0f) = 0;
  // h = silu(G x) * (U x), where w's first half of rows is G and the second U. h [T, out / 2].
  virtual void linear_swiglu(View x, const Linear& gate_up, View h) = 0;
  // y = D h of linear_swiglu's h.
  virtual void swiglu_ffn(View x, const Linear& gate_up, const Linear& down, View y);
  // y[t, h] = W[h] x[t, h] for each head h = matrix of w. x [T, H * (in + tail)], y [T, H * (out + tail)]: the tail numbers that follow
  // in's in each head are copied behind out's. tail is derived from the widths.
  virtual void head_linear(View x, const Linear& w, View y) = 0;
  // Rotates the last rope.dim numbers of each head in place. qk [T, H, d] or [T, d]; pos i32 [T].
  virtual void rope(View qk, View pos, const Rope& rope) = 0;
  // latent = rmsnorm(latent) within `row`; the rope parts of q and row are rotated; row is written to the cache.
  virtual void mla_prologue(const MlaPrologue& p);
  // mla_prologue; then context [rows.n_rows, H * v_dim] = W_UV attend([W_UK q_n | q_r]). Afterwards `row`, and q's rows among `rows`, hold
  // anything.
  virtual void mla_absorbed(const MlaAbsorbed& a, View context);
  // q and k = rope(rmsnorm(each head)), the norm where there is one; k and v are written to the cache. Afterwards k holds anything.
  virtual void gqa_prologue(const GqaPrologue& p);
  // Writes rows into the pages named by batch.slots. k [T, heads * k_dim], v [T, heads * v_dim] or empty.
  virtual void kv_write(const KvLayer& kv, const Batch& batch, View k, View v) = 0;
  // Causal softmax attention of rows.n_rows query rows over their sequences' pages; query heads share KV heads evenly.
  // q [n_rows, H * k_dim], out [n_rows, H * v_dim]. Row i of q is row rows.row_begin + i of the batch.
  virtual void attend(const Attn& attn, View q, View out) = 0;
  // MLA for many new tokens: latent pages are expanded through kv_b to per-head K and V. q and out as in attend, with query heads
  // of nope + rope_dim and value heads of v_dim. kv_b: [H * (nope + v_dim), kv_rank].
  virtual void attend_expanded(const Attn& attn, const MlaDims& dims, View q, const Linear& kv_b, View out);
  // y[i] = x[ids[i]]
  virtual void gather_rows(View x, View ids, View y) = 0;
  // Chooses experts from router logits f32 [T, n_experts]; bias f32 [n_experts] steers the choice only (or is empty).
  virtual void route(View logits, View bias, const Router& router, const Routing& out) = 0;
  // add_rmsnorm, the router's linear map and route().
  virtual void moe_prologue(const MoePrologue& p);
  // y[t] = sum_k weights[t,k] * E_{ids[t,k]}(x[t]) + shared(x[t]). y [T, hidden] activation.
  virtual void moe(View x, const Experts& experts, const Routing& routing, View y);
  // moe(), then add_rmsnorm of its result. then.y may be x.
  virtual void moe_add_rmsnorm(View x, const Experts& experts, const Routing& routing, const AddNorm& then);
  // Draws one token per row of logits f32 [n, vocab]; see ops/sampling.h. Waits: this is the end of a step.
  virtual void sample(View logits, std::span<const SampleParams> params, std::span<Sampled> out);
  // The same without the wait, where the device can do so: `tokens` i32 [n] receives the tokens (-1: none) on the device, for a step that
  // is enqueued meanwhile.
  virtual std::unique_ptr<Draw> draw(View logits, std::span<const SampleParams> params, View tokens);
  // upload() of words of which those below -1 stand for drawn tokens: w for drawn[-2 - w]. drawn i32.
  virtual void upload_drawn(int* device, std::span<const int> words, View drawn);

  // ---- narrower steps used by the default bodies above; a backend that overrides all of those may refuse them ----
  // y[ids[i]] += weights[i] * x[i]. y f32.
  virtual void scatter_add_rows(View x, View ids, View weights, View y);
  // Rows [begin, begin + n) of sequence `seq` from the pages, as f32 or activation: out [n, heads * k_dim].
  virtual void kv_gather(const Attn& attn, int seq, int begin, int n, View out);
  // Folds one chunk of expanded context into the running result. q [n_q, H * (nope + rope)], latent [n, kv_rank + rope] (its tail is the
  // shared rope key), kv [n, H * (nope + v)], out f32 [n_q, H * v], lse f32 [n_q, H]: log of the sum of exponentials so far, -inf at first.
  virtual void attend_ragged(const RaggedChunk& chunk, View q, View latent, View kv, View out, View lse);
};

// Releases the temporary memory taken since it was made.
class Scope {
 public:
  explicit Scope(Ops& ops) : ops_(ops), mark_(ops.temp_mark()) {}
  ~Scope() { ops_.temp_release(mark_); }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  Ops& ops_;
  size_t mark_;
};

// The slow, obvious implementation: f32 storage, sums in double. The oracle for every other backend.
std::unique_ptr<Ops> make_ref_ops();

}  // namespace cachalot
