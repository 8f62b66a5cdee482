// LayerRunner: runs one half of one layer at a time over many sequences of equal length, each from its first token, on a residual stream
// that the caller keeps. So a model goes by layer by layer, in memory for one layer and the streams.
#pragma once

#include <functional>
#include <vector>

#include "base/thread_pool.h"
#include "eval/divergence.h"
#include "model/decoder.h"

namespace cachalot {

// Token windows of equal length with the residual stream at the current place in the model.
struct TokenStream {
  int window = 0;
  std::vector<int> inputs;   // [n_windows * window] what the model reads
  std::vector<int> targets;  // [n_windows * window] the token after each
  std::vector<int> domain;   // [n_windows]
  std::vector<float> x;      // [n_windows * window, hidden]

  [[nodiscard]] int n_windows() const { return static_cast<int>(domain.size()); }
  [[nodiscard]] int n_tokens() const { return n_windows() * window; }
};

class LayerRunner {
 public:
  // `ops` must outlive this, and its memory be the host's. absorbed: MLA in its absorbed form, not in the expanded one.
  LayerRunner(Ops& ops, const Config& config, int window, bool absorbed = false);

  // Rows that the calls below take at once: whole windows.
  [[nodiscard]] int chunk_rows() const { return max_seqs_ * window_; }
  // Calls f(first row, the stream's rows as a View) for chunks of at most chunk_rows() rows.
  void for_each_chunk(TokenStream& stream, const std::function<void(int begin, View x)>& f) const;

  void embed(const Linear& table, TokenStream& stream);
  // x += attention(rmsnorm(x)); the calls go through `through`, which may decorate the runner's own Ops. x [whole windows, hidden].
  void attention(Ops& through, const AttentionWeights& w, View norm, View x);
  // x += ffn(rmsnorm(x))
  void ffn(Ops& through, const FfnWeights& w, View norm, View x);
  // The same without changing x; for watching what goes by.
  void watch_attention(Ops& through, const AttentionWeights& w, View norm, View x);
  void watch_ffn(Ops& through, const FfnWeights& w, View norm, View x);

 private:
  [[nodiscard]] const Batch& batch(int n_seqs);
  template <typename Half>
  void run(Ops& through, View norm, View x, bool add, Half&& half);

  Ops& ops_;
  const Config& config_;
  int window_, max_seqs_;
  bool absorbed_;
  Constant rope_table_;
  KvLayer kv_;
  Buffer k_, v_;
  std::vector<int> index_;  // positions, slots, q_start, kv_len, block table
  Batch batch_;
};

// Compares two models at the ends of their streams, domain by domain (meters[d] gets domain d): final norm, then head, in chunks.
void compare_streams(Ops& ops, const Config& config, View base_norm, View norm, const Linear& base_head, const Linear& head,
                     const TokenStream& base, const TokenStream& stream, std::vector<DivergenceMeter>& meters);

}  // namespace cachalot
