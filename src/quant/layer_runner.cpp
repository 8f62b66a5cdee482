// A fixed batch of whole sequences in one layer's pages.
#include "quant/layer_runner.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"

namespace cachalot {
namespace {

constexpr int kBlockTokens = 32;
constexpr int kChunkRows = 2048;

}  // namespace

LayerRunner::LayerRunner(Ops& ops, const Config& config, int window, bool absorbed)
    : ops_(ops), config_(config), window_(window), max_seqs_(std::max(1, kChunkRows / window)), absorbed_(absorbed) {
  CACHALOT_CHECK(ops.host_memory(), "{} has no host memory", ops.name());
  CACHALOT_CHECK(window > 0 && window <= config.max_positions, "windows of {} tokens", window);
  rope_table_ = ops.constant(rope_table(config.rope, window), window, config.rope.dim);
  kv_.layout = config.kv_layout(KvFormat::f32, kBlockTokens);
  const int blocks = (window + kBlockTokens - 1) / kBlockTokens;
  const auto rows = static_cast<size_t>(max_seqs_) * static_cast<size_t>(blocks * kBlockTokens);
  k_ = ops.alloc(rows * kv_.layout.k_row_bytes());
  kv_.k = k_.get();
  if (kv_.layout.v_row_bytes() > 0) {
    v_ = ops.alloc(rows * kv_.layout.v_row_bytes());
    kv_.v = v_.get();
  }
  const auto T = static_cast<size_t>(chunk_rows()), S = static_cast<size_t>(max_seqs_);
  index_.resize(2 * T + 2 * S + 1 + S * static_cast<size_t>(blocks));
  int *const positions = index_.data(), *const slots = positions + T, *const q_start = slots + T, *const kv_len = q_start + S + 1,
             *const table = kv_len + S;
  for (int s = 0; s < max_seqs_; ++s) {
    q_start[s] = s * window;
    kv_len[s] = window;
    for (int i = 0; i < window; ++i) {
      positions[s * window + i] = i;
      slots[s * window + i] = s * blocks * kBlockTokens + i;
    }
    std::iota(table + s * blocks, table + (s + 1) * blocks, s * blocks);
  }
  q_start[max_seqs_] = max_seqs_ * window;
}

const Batch& LayerRunner::batch(int n_seqs) {
  const auto T = static_cast<size_t>(chunk_rows()), S = static_cast<size_t>(max_seqs_);
  int *const positions = index_.data(), *const slots = positions + T, *const q_start = slots + T, *const kv_len = q_start + S + 1,
             *const table = kv_len + S;
  const int n_tokens = n_seqs * window_, blocks = (window_ + kBlockTokens - 1) / kBlockTokens;
  batch_ = {.n_tokens = n_tokens, .n_seqs = n_seqs, .max_q = window_, .max_kv = window_};
  (absorbed_ ? batch_.decode : batch_.prefill) = {0, n_tokens, 0, n_seqs};
  batch_.positions = View::vector(positions, DType::i32, n_tokens);
  batch_.slots = View::vector(slots, DType::i32, n_tokens);
  batch_.q_start = View::vector(q_start, DType::i32, n_seqs + 1);
  batch_.kv_len = View::vector(kv_len, DType::i32, n_seqs);
  batch_.block_table = View::matrix(table, DType::i32, n_seqs, blocks);
  batch_.host_q_start = {q_start, static_cast<size_t>(n_seqs) + 1};
  batch_.host_kv_len = {kv_len, static_cast<size_t>(n_seqs)};
  return batch_;
}

void LayerRunner::for_each_chunk(TokenStream& stream, const std::function<void(int begin, View x)>& f) const {
  CACHALOT_CHECK(stream.window == window_);
  const View all = View::matrix(stream.x.data(), DType::f32, stream.n_tokens(), config_.hidden);
  for (int begin = 0; begin < stream.n_tokens(); begin += chunk_rows())
    f(begin, all.rows(begin, std::min(chunk_rows(), stream.n_tokens() - begin)));
}

void LayerRunner::embed(const Linear& table, TokenStream& stream) {
  stream.x.resize(static_cast<size_t>(stream.n_tokens()) * static_cast<size_t>(config_.hidden));
  for_each_chunk(stream,
                 [&](int begin, View x) { ops_.embed(table, View::vector(stream.inputs.data() + begin, DType::i32, x.n_rows()), x); });
}

template <typename Half>
void LayerRunner::run(Ops& through, View norm, View x, bool add, Half&& half) {
  CACHALOT_CHECK(x.n_rows() % window_ == 0 && x.n_rows() <= chunk_rows(), "{} rows", x.n_rows());
  const Scope scope(ops_);
  const View xn = ops_.temp(ops_.activation(), x.n_rows(), x.n_cols()), y = ops_.temp(ops_.activation(), x.n_rows(), x.n_cols());
  ops_.rmsnorm(x, norm, config_.rms_eps, xn);
  const Step step{through, config_, batch(x.n_rows() / window_), {config_.rope.dim, config_.rope.interleaved, rope_table_.view}};
  half(step, xn, y);
  if (add) ops_.add_rmsnorm(x, y, norm, config_.rms_eps, xn);
}

void LayerRunner::attention(Ops& through, const AttentionWeights& w, View norm, View x) {
  run(through, norm, x, true, [&](const Step& step, View xn, View y) {
    std::visit([&](const auto& weights) { cachalot::attention(step, weights, kv_, xn, y); }, w);
  });
}
void LayerRunner::watch_attention(Ops& through, const AttentionWeights& w, View norm, View x) {
  run(through, norm, x, false, [&](const Step& step, View xn, View y) {
    std::visit([&](const auto& weights) { cachalot::attention(step, weights, kv_, xn, y); }, w);
  });
}
void LayerRunner::ffn(Ops& through, const FfnWeights& w, View norm, View x) {
  run(through, norm, x, true,
      [&](const Step& step, View xn, View y) { std::visit([&](const auto& weights) { cachalot::ffn(step, weights, xn, y); }, w); });
}
void LayerRunner::watch_ffn(Ops& through, const FfnWeights& w, View norm, View x) {
  run(through, norm, x, false,
      [&](const Step& step, View xn, View y) { std::visit([&](const auto& weights) { cachalot::ffn(step, weights, xn, y); }, w); });
}

void compare_streams(Ops& ops, const Config& config, View base_norm, View norm, const Linear& base_head, const Linear& head,
                     const TokenStream& base, const TokenStream& stream, std::vector<DivergenceMeter>& meters) {
  constexpr size_t kLogitBytes = size_t{32} << 20;
  const int vocab = config.vocab;
  const int rows = std::clamp(static_cast<int>(kLogitBytes / (static_cast<size_t>(vocab) * sizeof(float))), 1, 512);
  const auto view = [&](const TokenStream& s, int begin, int n) {
    auto* const from = const_cast<float*>(s.x.data()) + static_cast<size_t>(begin) * static_cast<size_t>(config.hidden);
    return View::matrix(from, DType::f32, n, config.hidden);
  };
  for (int begin = 0; begin < stream.n_tokens(); begin += rows) {
    const int n = std::min(rows, stream.n_tokens() - begin);
    const Scope scope(ops);
    const View xn = ops.temp(ops.activation(), n, config.hidden);
    const View base_logits = ops.temp(DType::f32, n, vocab), logits = ops.temp(DType::f32, n, vocab);
    ops.rmsnorm(view(base, begin, n), base_norm, config.rms_eps, xn);
    ops.linear(xn, base_head, base_logits);
    ops.rmsnorm(view(stream, begin, n), norm, config.rms_eps, xn);
    ops.linear(xn, head, logits);
    for (int r = 0; r < n; ++r) {
      const auto at = static_cast<size_t>(begin + r);
      const auto domain = static_cast<size_t>(stream.domain[at / static_cast<size_t>(stream.window)]);
      meters[domain].add({base_logits.row<float>(r), static_cast<size_t>(vocab)}, {logits.row<float>(r), static_cast<size_t>(vocab)},
                         stream.targets[at]);
    }
  }
}

}  // namespace cachalot
