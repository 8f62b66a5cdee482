// The default bodies of Ops: wide calls made of narrower ones, for devices whose memory the host can reach. A device of which
// it cannot overrides them, as planning here reads routing ids and sets up running sums on the host.
#include <algorithm>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "base/float_formats.h"
#include "ops/ops.h"

namespace cachalot {
namespace {

// Context rows that are expanded at a time. With 128 heads of 256 numbers this bounds the expanded rows to 64 MiB in f32.
constexpr int kContextChunk = 512;

void fill(const View& view, float value) {
  CACHALOT_CHECK(view.dtype == DType::f32);
  for (int r = 0; r < view.n_rows(); ++r) std::fill_n(view.row<float>(r), view.n_cols(), value);
}

// y = x rounded to the dtype of y.
void convert(const View& x, const View& y) {
  for (int r = 0; r < x.n_rows(); ++r) {
    const float* from = x.row<float>(r);
    switch (y.dtype) {
      case DType::f32: std::copy_n(from, x.n_cols(), y.row<float>(r)); break;
      case DType::f16: std::transform(from, from + x.n_cols(), y.row<uint16_t>(r), f32_to_f16); break;
      case DType::bf16: std::transform(from, from + x.n_cols(), y.row<uint16_t>(r), f32_to_bf16); break;
      default: CACHALOT_CHECK(false, "activations of {}", name_of(y.dtype));
    }
  }
}

// The (token, weight) pairs of each expert, in the order of the tokens.
struct Buckets {
  std::vector<int> begin;  // [n_experts + 1]
  std::vector<int> token;
  std::vector<float> weight;
};
Buckets bucket_by_expert(const Routing& routing, int n_experts) {
  Buckets b;
  b.begin.assign(static_cast<size_t>(n_experts) + 1, 0);
  const auto for_each = [&](auto&& f) {
    for (int t = 0; t < routing.ids.n_rows(); ++t) {
      for (int k = 0; k < routing.ids.n_cols(); ++k) {
        const int e = routing.ids.row<int>(t)[k];
        CACHALOT_CHECK(e >= -1 && e < n_experts, "expert {} of {}", e, n_experts);
        if (e >= 0) f(t, static_cast<size_t>(e), routing.weights.row<float>(t)[k]);
      }
    }
  };
  for_each([&](int, size_t e, float) { ++b.begin[e + 1]; });
  for (size_t e = 0; e < static_cast<size_t>(n_experts); ++e) b.begin[e + 1] += b.begin[e];
  b.token.resize(static_cast<size_t>(b.begin.back()));
  b.weight.resize(b.token.size());
  std::vector<int> next(b.begin.begin(), b.begin.end() - 1);
  for_each([&](int t, size_t e, float w) {
    const auto at = static_cast<size_t>(next[e]++);
    b.token[at] = t;
    b.weight[at] = w;
  });
  return b;
}

}  // namespace

Constant Ops::constant(std::span<const float> values, int rows, int cols) {
  CACHALOT_CHECK(rows >= 0 && cols >= 0 && values.size() == static_cast<size_t>(rows) * static_cast<size_t>(cols), "{} values for {} x {}",
                 values.size(), rows, cols);
  Buffer memory = alloc(values.size_bytes());
  upload(memory.get(), values.data(), values.size_bytes());
  const View view = View::matrix(memory.get(), DType::f32, rows, cols);
  return {view, std::move(memory)};
}

void Ops::mla_prologue(const MlaPrologue& p) {
  const View latent = p.row.cols(0, p.dims.kv_rank);
  rmsnorm(latent, p.norm, p.eps, latent);
  rope(p.q.heads(p.dims.n_heads, p.dims.nope + p.dims.rope_dim), p.batch->positions, p.rope);
  rope(p.row.heads(1, p.dims.kv_rank + p.dims.rope_dim), p.batch->positions, p.rope);
  kv_write(p.kv, *p.batch, p.row, {});
}

void Ops::gqa_prologue(const GqaPrologue& p) {
  const int dim = p.kv.layout.k_dim;
  const View q = p.q.heads(p.q.n_cols() / dim, dim), k = p.k.heads(p.kv.layout.heads, dim);
  if (p.q_norm) rmsnorm(q, p.q_norm, p.eps, q);
  if (p.k_norm) rmsnorm(k, p.k_norm, p.eps, k);
  rope(q, p.batch->positions, p.rope);
  rope(k, p.batch->positions, p.rope);
  kv_write(p.kv, *p.batch, p.k, p.v);
}

void Ops::mla_absorbed(const MlaAbsorbed& a, View context) {
  const Scope scope(*this);
  const MlaPrologue& p = a.prologue;
  const int n = a.rows.n_rows, heads = p.dims.n_heads;
  mla_prologue(p);
  const View absorbed = temp(p.q.dtype, n, heads * (p.dims.kv_rank + p.dims.rope_dim)), result = temp(p.q.dtype, n, heads * p.dims.kv_rank);
  head_linear(p.q.rows(a.rows.row_begin, n), *a.uk, absorbed);
  attend({p.kv, p.batch, a.rows, a.scale}, absorbed, result);
  head_linear(result, *a.uv, context);
}

void Ops::swiglu_ffn(View x, const Linear& gate_up, const Linear& down, View y) {
  const Scope scope(*this);
  const View h = temp(x.dtype, x.n_rows(), down.in);
  linear_swiglu(x, gate_up, h);
  linear(h, down, y);
}

void Ops::moe_prologue(const MoePrologue& p) {
  const Scope scope(*this);
  const View logits = temp(DType::f32, p.y.n_rows(), p.how.n_experts);
  add_rmsnorm(p.residual, p.delta, p.norm, p.eps, p.y);
  linear(p.y, *p.router, logits);
  route(logits, p.bias, p.how, p.out);
}

void Ops::moe_add_rmsnorm(View x, const Experts& experts, const Routing& routing, const AddNorm& then) {
  const Scope scope(*this);
  const View sum = temp(x.dtype, x.n_rows(), then.y.n_cols());
  moe(x, experts, routing, sum);
  add_rmsnorm(then.residual, sum, then.norm, then.eps, then.y);
}

void Ops::attend_expanded(const Attn& attn, const MlaDims& dims, View q, const Linear& kv_b, View out) {
  CACHALOT_CHECK(host_memory(), "{} must override attend_expanded", name());
  const Batch& batch = *attn.batch;
  const Scope whole(*this);
  const View sum = out.dtype == DType::f32 ? out : temp(DType::f32, out.n_rows(), out.n_cols());
  const View lse = temp(DType::f32, out.n_rows(), dims.n_heads);
  fill(sum, 0.0f);
  fill(lse, -std::numeric_limits<float>::infinity());
  for (int s = attn.rows.seq_begin; s < attn.rows.seq_begin + attn.rows.n_seqs; ++s) {
    const int kv_len = batch.host_kv_len[static_cast<size_t>(s)], begin = batch.host_q_start[static_cast<size_t>(s)] - attn.rows.row_begin;
    const int n_q = batch.host_q_start[static_cast<size_t>(s) + 1] - attn.rows.row_begin - begin;
    if (kv_len <= 0 || n_q <= 0) continue;
    for (int context = 0; context < kv_len; context += kContextChunk) {
      const Scope chunk_scope(*this);
      const int n = std::min(kContextChunk, kv_len - context);
      const View latent = temp(activation(), n, dims.kv_rank + dims.rope_dim), kv = temp(activation(), n, kv_b.out);
      kv_gather(attn, s, context, n, latent);
      linear(latent.cols(0, dims.kv_rank), kv_b, kv);
      attend_ragged({.dims = dims, .scale = attn.scale, .q_position = kv_len - n_q, .kv_position = context}, q.rows(begin, n_q), latent, kv,
                    sum.rows(begin, n_q), lse.rows(begin, n_q));
    }
  }
  if (sum.data != out.data) convert(sum, out);
}

void Ops::moe(View x, const Experts& experts, const Routing& routing, View y) {
  CACHALOT_CHECK(host_memory(), "{} must override moe", name());
  const Scope whole(*this);
  const View sum = y.dtype == DType::f32 ? y : temp(DType::f32, y.n_rows(), y.n_cols());
  if (experts.shared_gate_up) {
    const Scope shared_scope(*this);
    const View h = temp(activation(), x.n_rows(), experts.shared_down.in);
    linear_swiglu(x, experts.shared_gate_up, h);
    linear(h, experts.shared_down, sum);
  } else {
    fill(sum, 0.0f);
  }
  const Buckets buckets = bucket_by_expert(routing, experts.gate_up.n_matrices);
  for (int e = 0; e < experts.gate_up.n_matrices; ++e) {
    const int begin = buckets.begin[static_cast<size_t>(e)], n = buckets.begin[static_cast<size_t>(e) + 1] - begin;
    if (n == 0) continue;
    const Scope expert_scope(*this);
    const View ids = temp(DType::i32, 1, n), weights = temp(DType::f32, 1, n);
    std::copy_n(buckets.token.data() + begin, n, ids.row<int>(0));
    std::copy_n(buckets.weight.data() + begin, n, weights.row<float>(0));
    const View rows = temp(activation(), n, x.n_cols()), h = temp(activation(), n, experts.down.in),
               part = temp(activation(), n, y.n_cols());
    gather_rows(x, ids, rows);
    linear_swiglu(rows, experts.gate_up.matrix(e), h);
    linear(h, experts.down.matrix(e), part);
    scatter_add_rows(part, ids, weights, sum);
  }
  if (sum.data != y.data) convert(sum, y);
}

void Ops::copy(void* to, const void* from, size_t bytes) {
  CACHALOT_CHECK(host_memory(), "{} has no copy", name());
  if (bytes > 0) std::memcpy(to, from, bytes);
}

void Ops::sample(View logits, std::span<const SampleParams> params, std::span<Sampled> out) {
  const int n = logits.n_rows(), vocab = logits.n_cols();
  CACHALOT_CHECK(logits.dtype == DType::f32 && params.size() == static_cast<size_t>(n) && out.size() == params.size(),
                 "{} rows of {}, {} parameters, {} results", n, name_of(logits.dtype), params.size(), out.size());
  std::vector<float> row(static_cast<size_t>(vocab));
  for (int r = 0; r < n; ++r) {
    download(row.data(), logits.row<float>(r), logits.row_bytes());
    out[static_cast<size_t>(r)] = sample_token(row, params[static_cast<size_t>(r)]);
  }
}

std::unique_ptr<Draw> Ops::draw(View logits, std::span<const SampleParams> params, View tokens) {
  class Drawn final : public Draw {
   public:
    explicit Drawn(size_t n) : sampled(n) {}
    void wait(std::span<Sampled> out) override { std::move(sampled.begin(), sampled.end(), out.begin()); }
    std::vector<Sampled> sampled;
  };
  auto drawn = std::make_unique<Drawn>(params.size());
  sample(logits, params, drawn->sampled);
  std::vector<int> ids;
  for (const Sampled& s : drawn->sampled) ids.push_back(s.token);
  CACHALOT_CHECK(tokens.dtype == DType::i32 && tokens.n_cols() == logits.n_rows());
  upload(tokens.data, ids.data(), ids.size() * sizeof(int));
  return drawn;
}

void Ops::upload_drawn(int* device, std::span<const int> words, View drawn) {
  CACHALOT_CHECK(drawn.dtype == DType::i32);
  std::vector<int> tokens(static_cast<size_t>(drawn.n_cols())), placed(words.begin(), words.end());
  download(tokens.data(), drawn.data, tokens.size() * sizeof(int));
  for (int& word : placed)
    if (word < -1) word = tokens.at(static_cast<size_t>(-2 - word));
  upload(device, placed.data(), placed.size() * sizeof(int));
}

std::unique_ptr<Graph> Ops::capture(const std::function<void()>&) { return nullptr; }

void Ops::scatter_add_rows(View, View, View, View) { CACHALOT_CHECK(false, "{} has no scatter_add_rows", name()); }
void Ops::kv_gather(const Attn&, int, int, int, View) { CACHALOT_CHECK(false, "{} has no kv_gather", name()); }
void Ops::attend_ragged(const RaggedChunk&, View, View, View, View, View) { CACHALOT_CHECK(false, "{} has no attend_ragged", name()); }

PackedImage Ops::packed_image(const Linear& /*w*/) const { fail("{}: weights of this device cannot be written to packed files", name()); }

Linear Ops::from_image(std::span<const std::byte> /*description*/, std::span<const size_t> /*buffer_bytes*/, const FillBuffer& /*fill*/) {
  fail("{}: this device cannot read packed files", name());
}

}  // namespace cachalot
