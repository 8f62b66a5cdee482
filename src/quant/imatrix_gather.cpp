// Watching the linears of one layer after the other.
#include "quant/imatrix_gather.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "quant/layer_runner.h"
#include "quant/observe_ops.h"

namespace cachalot {
namespace {

// Squares summed in double: a long text adds small numbers to large ones.
struct Sums {
  std::vector<double> squares;  // [n_rows * width]
  std::vector<int64_t> counts;  // [n_rows], or one for all
};

// Tensors that share an input, and which of their rows it is.
struct Target {
  std::vector<std::string> names;
  int width = 0;            // of one matrix's input
  int n_heads = 1;          // matrices that see their own part of x each
  int n_rows = 1, row = 0;  // experts
};

class Gatherer {
 public:
  Gatherer(const Checkpoint& checkpoint, const Config& config, Ops& ops, int window)
      : checkpoint_(checkpoint), c_(config), ops_(ops), observe_(ops), runner_(ops, config, window, /*absorbed=*/true) {
    observe_.set_sink([this](int id, View x) { add(targets_[static_cast<size_t>(id)], x); });
    observe_.set_latent_sink([this](View latent) { add({{prefix_ + "attn_kv_b.weight"}, latent.n_cols()}, latent); });
  }

  void embed(TokenStream& stream) {
    const LinearSource table = checkpoint_.linear("token_embd.weight", 1, c_.vocab, c_.hidden);
    runner_.embed(ops_.pack({&table, 1}), stream);
  }

  void layer(int l, TokenStream& stream) {
    prefix_ = "blk." + std::to_string(l) + ".";
    {
      const AttentionWeights w = load_attention(checkpoint_, c_, ops_, l);
      if (const auto* mla = std::get_if<MlaWeights>(&w)) {
        watch(mla->qkv_a, {c_.q_rank > 0 ? "attn_q_a.weight" : "attn_q.weight", "attn_kv_a_mqa.weight"});
        if (mla->q_b) watch(mla->q_b, {"attn_q_b.weight"});
        watch(mla->uk_t, {"attn_k_b.weight"});
        watch(mla->uv, {"attn_v_b.weight"});
        watch(mla->o, {"attn_output.weight"});
      } else {
        const auto& gqa = std::get<GqaWeights>(w);
        watch(gqa.qkv, {"attn_q.weight", "attn_k.weight", "attn_v.weight"});
        watch(gqa.o, {"attn_output.weight"});
      }
      const Constant norm = norm_of("attn_norm.weight");
      runner_.for_each_chunk(stream, [&](int, View x) { runner_.attention(observe_, w, norm.view, x); });
      forget();
    }
    const FfnWeights w = load_ffn(checkpoint_, c_, ops_, l);
    if (const auto* moe = std::get_if<MoeFfn>(&w)) {
      watch(moe->router, {"ffn_gate_inp.weight"});
      const int n = c_.n_experts;
      for (int e = 0; e < n; ++e) {
        watch(moe->experts.gate_up.matrix(e), {"ffn_gate_exps.weight", "ffn_up_exps.weight"}, n, e);
        watch(moe->experts.down.matrix(e), {"ffn_down_exps.weight"}, n, e);
      }
      if (moe->experts.shared_gate_up) {
        watch(moe->experts.shared_gate_up, {"ffn_gate_shexp.weight", "ffn_up_shexp.weight"});
        watch(moe->experts.shared_down, {"ffn_down_shexp.weight"});
      }
    } else {
      const auto& dense = std::get<DenseFfn>(w);
      watch(dense.gate_up, {"ffn_gate.weight", "ffn_up.weight"});
      watch(dense.down, {"ffn_down.weight"});
    }
    const Constant norm = norm_of("ffn_norm.weight");
    runner_.for_each_chunk(stream, [&](int, View x) { runner_.ffn(observe_, w, norm.view, x); });
    forget();
  }

  void head(TokenStream& stream) {
    const Constant norm = ops_.constant(checkpoint_.vector("output_norm.weight", c_.hidden), 1, c_.hidden);
    runner_.for_each_chunk(stream, [&](int, View x) {
      const Scope scope(ops_);
      const View xn = ops_.temp(DType::f32, x.n_rows(), x.n_cols());
      ops_.rmsnorm(x, norm.view, c_.rms_eps, xn);
      add({{"output.weight"}, c_.hidden}, xn);
    });
  }

  // Throws Error naming what is not finite.
  [[nodiscard]] std::map<std::string, ImportanceMatrix::Entry> take() const {
    std::map<std::string, ImportanceMatrix::Entry> out;
    for (const auto& [name, sums] : sums_) {
      ImportanceMatrix::Entry entry{.sums = {sums.squares.begin(), sums.squares.end()}, .counts = sums.counts};
      for (const float v : entry.sums)
        if (!std::isfinite(v)) fail("{}: the inputs of {} are not finite on this text", checkpoint_.name(), name);
      out.emplace(name, std::move(entry));
    }
    return out;
  }

 private:
  Constant norm_of(const char* name) { return ops_.constant(checkpoint_.vector(prefix_ + name, c_.hidden), 1, c_.hidden); }

  void watch(const Linear& w, std::vector<std::string> names, int n_rows = 1, int row = 0) {
    for (std::string& name : names) name = prefix_ + name;
    const Target target{std::move(names), w.in, w.n_matrices, n_rows, row};
    for (const std::string& name : target.names) sums_of(name, target);  // an expert that no token reaches has its row of zeros
    observe_.watch(w, static_cast<int>(targets_.size()));
    targets_.push_back(target);
  }
  void forget() {
    observe_.forget();
    targets_.clear();
  }

  Sums& sums_of(const std::string& name, const Target& target) {
    Sums& sums = sums_[name];
    sums.squares.resize(static_cast<size_t>(target.n_rows * target.n_heads) * static_cast<size_t>(target.width));
    sums.counts.resize(static_cast<size_t>(target.n_rows));
    return sums;
  }
  void add(const Target& target, View x) {
    const int stride = x.n_cols() / target.n_heads;
    std::vector<double> squares(static_cast<size_t>(target.n_heads) * static_cast<size_t>(target.width));
    for (int r = 0; r < x.n_rows(); ++r) {
      double* to = squares.data();
      for (int h = 0; h < target.n_heads; ++h, to += target.width) {
        const float* const from = x.row<float>(r) + h * stride;
        for (int k = 0; k < target.width; ++k) to[k] += static_cast<double>(from[k]) * static_cast<double>(from[k]);
      }
    }
    for (const std::string& name : target.names) {
      Sums& sums = sums_of(name, target);
      double* const to = sums.squares.data() + static_cast<size_t>(target.row) * squares.size();
      for (size_t i = 0; i < squares.size(); ++i) to[i] += squares[i];
      sums.counts[static_cast<size_t>(target.row)] += x.n_rows();
    }
  }

  const Checkpoint& checkpoint_;
  const Config& c_;
  Ops& ops_;
  ObserveOps observe_;
  LayerRunner runner_;
  std::string prefix_;
  std::vector<Target> targets_;
  std::map<std::string, Sums> sums_;
};

}  // namespace

ImportanceMatrix gather_importance(const Checkpoint& checkpoint, const Config& config, Ops& ops, std::span<const int> tokens,
                                   const GatherOptions& options) {
  const int window = options.window, available = static_cast<int>(tokens.size()) / window;
  if (window > config.max_positions) fail("the window is {} tokens, but the model runs at most {}", window, config.max_positions);
  if (available == 0) fail("the text has {} tokens, fewer than one window of {}", tokens.size(), window);
  const int n = options.max_windows > 0 ? std::min(options.max_windows, available) : available;
  TokenStream stream{.window = window};
  stream.inputs.assign(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(n) * window);
  for (size_t i = 0; i < stream.inputs.size(); ++i) {
    if (options.bos_id >= 0 && i % static_cast<size_t>(window) == 0) stream.inputs[i] = options.bos_id;
    if (stream.inputs[i] < 0 || stream.inputs[i] >= config.vocab)
      fail("token {} of the text is id {}, expected 0 to {}", i, stream.inputs[i], config.vocab - 1);
  }
  stream.domain.assign(static_cast<size_t>(n), 0);

  Gatherer gatherer(checkpoint, config, ops, window);
  gatherer.embed(stream);
  for (int l = 0; l < config.n_layers; ++l) {
    if (options.progress) options.progress(l, config.n_layers);
    gatherer.layer(l, stream);
  }
  if (options.head && !config.tied_head) gatherer.head(stream);
  ImportanceMatrix out;
  out.entries = gatherer.take();
  out.chunk_count = n;
  out.chunk_size = window;
  return out;
}

}  // namespace cachalot
