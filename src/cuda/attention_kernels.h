// The launchers of the kernels of attention and of its cache: plain structs and a stream in, an error code out.
#pragma once

#include "cuda/kernels.h"
#include "ops/kv_layout.h"

namespace cachalot::cuda {

// ---- kv_cache.cu ----
constexpr int kPrologueThreads = 256;  // per row; each turns a pair of the key at most
struct PrologueArgs {
  Mat q, row;  // see MlaPrologue
  int heads = 0, head_dim = 0, rank = 0, rope_dim = 0;
  const float* norm = nullptr;
  float eps = 0.0f;
  const float* cos_sin = nullptr;
  int64_t cos_sin_stride = 0;
  bool interleaved = false;
  const int* positions = nullptr;
  const int* slots = nullptr;
  void* pages = nullptr;
  KvFormat format = KvFormat::bf16;
};
cudaError_t launch_mla_prologue(const PrologueArgs& args, cudaStream_t stream);
struct GqaPrologueArgs {
  Mat q, k, v;  // see GqaPrologue
  int heads = 0, kv_heads = 0, dim = 0, rope_dim = 0;
  const float *q_norm = nullptr, *k_norm = nullptr;  // [dim], or null
  float eps = 0.0f;
  const float* cos_sin = nullptr;
  int64_t cos_sin_stride = 0;
  bool interleaved = false;
  const int* positions = nullptr;
  const int* slots = nullptr;
  void *k_pages = nullptr, *v_pages = nullptr;
  KvFormat format = KvFormat::bf16;  // not fp8
};
constexpr int kMostGqaDim = 256;
cudaError_t launch_gqa_prologue(const GqaPrologueArgs& args, cudaStream_t stream);
// pages: of K, or of V in another format than fp8. Rows of as many numbers as `rows` and `out` have columns.
cudaError_t launch_kv_write(void* pages, const KvLayout& layout, const int* slots, Mat rows, cudaStream_t stream);

// One sequence's part of a launch over several.
struct ContextRun {
  int seq = 0;                      // row of the block table
  int q_begin = 0, n_q = 0;         // query rows
  int q_position = 0;               // of the first of them
  int kv_position = 0, n_keys = 0;  // rows of context that are laid out
  int kv_begin = 0;                 // where they lie in the buffers; a multiple of kFlashKeys
};
constexpr int kContextRuns = 16;
constexpr int kFlashKeys = 128;  // what a run's rows are rounded up to, with zeros
struct ContextRuns {
  int n = 0;
  ContextRun run[kContextRuns];
  [[nodiscard]] __host__ __device__ int most_q() const {
    int most = 0;
    for (int i = 0; i < n; ++i) most = run[i].n_q > most ? run[i].n_q : most;
    return most;
  }
};
// The runs' rows of `table`'s pages to their places in `out`, whose other rows become zero.
cudaError_t launch_kv_gather(const void* pages, const KvLayout& layout, const int* table, int64_t table_stride, const ContextRuns& runs,
                             Mat out, cudaStream_t stream);

// ---- attention over the cache ----
constexpr int kMaxSplits = 64;  // parts of a context
struct AttendArgs {
  KvLayout layout;
  const void* k = nullptr;
  const void* v = nullptr;
  const int* q_start = nullptr;  // [n_seqs + 1]
  const int* kv_len = nullptr;   // [n_seqs]
  const int* block_table = nullptr;
  int64_t table_stride = 0;
  int seq_begin = 0, n_seqs = 0, row_begin = 0, n_rows = 0;
  int heads = 0;  // query heads
  float scale = 1.0f;
  Mat q, out;
  int n_splits = 1;
  // Of MlaKernel::heads16 only:
  int part_keys = 0;           // keys of a part, at most
  bool q_as_operands = false;  // q is laid out as operand_at() says
  bool half_parts = false;     // the first of `partial` in bf16
  float* partial = nullptr;    // [n_splits, n_rows, heads, v_dim], then lse2 [n_splits, n_rows, heads]; when n_splits > 1
};
cudaError_t launch_attend_generic(const AttendArgs& args, cudaStream_t stream);
// The sum over the parts, when n_splits > 1 (mla_plan.cu): v_dim 64, 128 or 512.
cudaError_t launch_attend_combine(const AttendArgs& args, cudaStream_t stream);
// Separate keys and values in bf16, of 64 or 128 numbers per head; max_kv: the longest context.
bool gqa_decode_supports(const AttendArgs& args);
int gqa_decode_splits(const AttendArgs& args, int max_kv);
cudaError_t launch_gqa_decode(const AttendArgs& args, cudaStream_t stream);
// Absorbed MLA with rows of 512 + 64: 16 heads per block over bf16 rows, the same over fp8 rows (all sm_90), and 64 heads per block over
// either on wgmma (sm_90a).
constexpr int kOperandHeads = 16;  // see AttendArgs::q_as_operands
enum class MlaKernel : uint8_t { none, heads16, fp8, heads64 };
MlaKernel mla_decode_kernel_for(const AttendArgs& args, bool hopper);
int mla_decode_splits(MlaKernel kernel, int n_rows, int heads, int max_kv);
// How many of n_keys a part has, at most; of heads16, which cuts contexts by 8 keys.
__host__ __device__ constexpr int mla_part_keys(int n_keys, int n_splits) { return (n_keys + 8 * n_splits - 1) / (8 * n_splits) * 8; }
cudaError_t launch_mla_decode(const AttendArgs& args, MlaKernel kernel, cudaStream_t stream);

// One chunk of expanded context of one sequence. Scores use q [n_q, H * (nope + rope)], keys [nope of kv | rope tail of latent].
struct RaggedArgs {
  int heads = 0, nope = 0, rope = 0, v_dim = 0;
  float scale = 1.0f;
  int q_position = 0, kv_position = 0;
  Mat q, latent, kv;  // latent [n, kv_rank + rope], kv [n, H * (nope + v)]
  int latent_rope_at = 0;
  Mat out;               // [n_q, H * v]
  float* lse = nullptr;  // [n_q, H]; null: this is the only chunk and `out` is final
};
cudaError_t launch_attend_ragged(const RaggedArgs& args, cudaStream_t stream);

// Many query rows of sequences whose context rows are laid out, causal. The key of head h is [k of h's KV head | k_rope, shared].
struct FlashArgs {
  int heads = 0, share = 1;  // query heads, and how many of them share a KV head
  int k_dim = 0, rope = 0, v_dim = 0;
  float scale = 1.0f;
  ContextRuns runs;
  Mat q;                                                     // [n_q of all, heads * (k_dim + rope)]
  const void *k = nullptr, *k_rope = nullptr, *v = nullptr;  // bf16, n_kv_rows rows
  int n_kv_rows = 0;
  int64_t k_stride = 0, k_rope_stride = 0, v_stride = 0;  // from row to row
  int k_head = 0, v_head = 0;                             // from KV head to KV head
  Mat out;                                                // [n_q of all, heads * v_dim], bf16 or f32
  float* lse = nullptr;                                   // [n_q of all, heads]; null: this is the only chunk
};
bool flash_supports(const FlashArgs& args);
cudaError_t launch_flash(const FlashArgs& args, cudaStream_t stream);
// flash_wgmma.cu (sm_90a): shapes of 128 columns (and 64 rotated ones) that flash_supports() as well.
bool flash_wgmma_supports(const FlashArgs& args);
cudaError_t launch_flash_wgmma(const FlashArgs& args, int n_multiprocessors, cudaStream_t stream);

}  // namespace cachalot::cuda
