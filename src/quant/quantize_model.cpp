// The walk through the layers.
#include "quant/quantize_model.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>

#include "base/error.h"

namespace cachalot {
namespace {

// "VmHWM" and the like of /proc/self/status, in bytes; 0 when it is not there.
int64_t process_status(std::string_view key) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(key)) return std::strtoll(line.c_str() + key.size() + 1, nullptr, 10) * 1024;
  return 0;
}

// Pages of a file that holds this layer may go; they come back when they are read again. The advice does no harm elsewhere.
void page_out(const Checkpoint& file, const std::string& prefix) {
#ifdef MADV_PAGEOUT
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  for (const TensorInfo& tensor : file.tensors()) {
    // Hugging Face names have "layers.3.", GGUF's "blk.3.".
    const std::string number = prefix.substr(4);
    if (!tensor.name.starts_with(prefix) && tensor.name.find("layers." + number) == std::string::npos) continue;
    const auto begin = (reinterpret_cast<uintptr_t>(tensor.data.data()) + page - 1) / page * page;
    const auto end = reinterpret_cast<uintptr_t>(tensor.data.data() + tensor.data.size()) / page * page;
    if (end > begin) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_PAGEOUT);
  }
#else
  (void)file, (void)prefix;
#endif
}

class Walk {
 public:
  Walk(LayerQuantizer& quantizer, const Checkpoint& base, const Config& config, Ops& ops)
      : q_(quantizer), base_(base), c_(config), ops_(ops) {}

  void embed(TokenStream& stream) {
    if (stream.n_windows() == 0) return;
    const LinearSource table = base_.linear("token_embd.weight", 1, c_.vocab, c_.hidden);
    if (!table_) table_ = ops_.pack({&table, 1});
    q_.runner().embed(table_, stream);
  }
  void forget_embedding() { table_ = {}; }

  void attention(const Checkpoint& model, int layer, std::initializer_list<TokenStream*> streams) {
    const AttentionWeights w = load_attention(model, c_, ops_, layer);
    const Constant norm = norm_of(model, layer, "attn_norm.weight");
    for (TokenStream* stream : streams)
      if (stream->n_windows() > 0) q_.runner().for_each_chunk(*stream, [&](int, View x) { q_.runner().attention(ops_, w, norm.view, x); });
  }
  void ffn(const Checkpoint& model, int layer, std::initializer_list<TokenStream*> streams) {
    const FfnWeights w = load_ffn(model, c_, ops_, layer);
    const Constant norm = norm_of(model, layer, "ffn_norm.weight");
    for (TokenStream* stream : streams)
      if (stream->n_windows() > 0) q_.runner().for_each_chunk(*stream, [&](int, View x) { q_.runner().ffn(ops_, w, norm.view, x); });
  }

  std::vector<DivergenceMeter> compare(const TokenStream& original, const TokenStream& stream, size_t n_domains) {
    const auto head_of = [&](const Checkpoint& model) {
      const LinearSource rows = model.linear(c_.tied_head ? "token_embd.weight" : "output.weight", 1, c_.vocab, c_.hidden);
      return ops_.pack({&rows, 1});
    };
    const auto norm_of_head = [&](const Checkpoint& model) {
      return ops_.constant(model.vector("output_norm.weight", c_.hidden), 1, c_.hidden);
    };
    const Checkpoint& quantized = q_.quantized();
    std::vector<DivergenceMeter> meters(n_domains);
    const Constant before = norm_of_head(base_), after = norm_of_head(quantized);
    compare_streams(ops_, c_, before.view, after.view, head_of(base_), head_of(quantized), original, stream, meters);
    return meters;
  }

 private:
  Constant norm_of(const Checkpoint& model, int layer, const char* name) {
    return ops_.constant(model.vector("blk." + std::to_string(layer) + "." + name, c_.hidden), 1, c_.hidden);
  }

  LayerQuantizer& q_;
  const Checkpoint& base_;
  const Config& c_;
  Ops& ops_;
  Linear table_;
};

}  // namespace

QuantizeReport quantize_model(LayerQuantizer& quantizer, const Checkpoint& base, const Config& config, Ops& ops, const Recipe& recipe,
                              TokenStream& calibration, TokenStream& held_out, const std::vector<std::string>& domain_names,
                              const std::vector<QuantizeSink*>& sinks, const QuantizeOptions& options) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  const bool calibrates = quantizer.needs_calibration(), measures = held_out.n_windows() > 0;
  if (calibrates && calibration.n_windows() == 0) fail("{} needs calibration text, and there is none", name_of(recipe.method));
  const bool follows_original = calibrates && recipe.method != Method::rtn && recipe.meet_earlier_errors;

  QuantizeReport report;
  report.calibration_tokens = calibrates ? calibration.n_tokens() : 0;
  report.held_out_tokens = held_out.n_tokens();
  LayerResult result;
  for (QuantizeSink* sink : sinks) sink->start(config, quantizer.planned());
  quantizer.globals(result);
  const auto saved = [&](int layers_done) {
    if (options.saved) options.saved(layers_done, result);
  };
  if (options.layers_done < 0) {
    for (QuantizeSink* sink : sinks) sink->globals(quantizer.quantized());
    saved(0);
  } else {
    result = options.done;
  }

  Walk walk(quantizer, base, config, ops);
  TokenStream original, held_out_original, nothing;
  if (calibrates) walk.embed(calibration);
  if (follows_original) original = calibration;
  walk.embed(held_out);
  held_out_original = held_out;
  walk.forget_embedding();
  TokenStream* const seen = calibrates ? &calibration : nullptr;
  TokenStream* const other = follows_original ? &original : nullptr;
  TokenStream& moved = calibrates ? calibration : nothing;
  for (int l = 0; l < config.n_layers; ++l) {
    const auto begin = Clock::now();
    if (l < options.layers_done) {
      if (options.progress) options.progress(l, config.n_layers, "read again");
      const bool moves = measures || calibrates;
      if (measures || follows_original) walk.attention(base, l, {&original, &held_out_original});
      if (moves) walk.attention(options.written(), l, {&moved, &held_out});
      if (measures || follows_original) walk.ffn(base, l, {&original, &held_out_original});
      if (moves) walk.ffn(options.written(), l, {&moved, &held_out});
      report.layer_seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
      continue;
    }
    if (options.progress) options.progress(l, config.n_layers, "attention");
    quantizer.attention(l, seen, other, result);
    if (measures || follows_original) walk.attention(base, l, {&original, &held_out_original});
    if (measures || calibrates) walk.attention(quantizer.quantized(), l, {&moved, &held_out});
    if (options.progress) options.progress(l, config.n_layers, "ffn");
    quantizer.ffn(l, seen, other, result);
    if (measures || follows_original) walk.ffn(base, l, {&original, &held_out_original});
    if (measures || calibrates) walk.ffn(quantizer.quantized(), l, {&moved, &held_out});
    for (QuantizeSink* sink : sinks) sink->layer(l, quantizer.quantized());
    saved(l + 1);
    report.peak_anonymous_bytes = std::max(report.peak_anonymous_bytes, process_status("RssAnon:"));
    if (!options.keep) quantizer.drop_layer(l);
    page_out(base, "blk." + std::to_string(l) + ".");
    if (options.written) page_out(options.written(), "blk." + std::to_string(l) + ".");
    report.layer_seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  if (options.progress) options.progress(config.n_layers, config.n_layers, "measuring");
  if (measures) {
    const auto meters = walk.compare(held_out_original, held_out, domain_names.size());
    DivergenceMeter all;
    for (size_t d = 0; d < meters.size(); ++d) {
      all.merge(meters[d]);
      if (meters[d].result().tokens > 0) report.domains.push_back({domain_names[d], meters[d].result()});
    }
    report.domains.push_back({"all", all.result()});
  }
  for (QuantizeSink* sink : sinks) sink->finish();
  report.matrices = std::move(result.matrices);
  report.experts = std::move(result.experts);
  report.bits_per_weight = mean_bits(quantizer.planned(), false);
  report.bits_per_linear_weight = mean_bits(quantizer.planned(), true);
  for (const PlannedMatrix& p : quantizer.planned())
    report.bytes += static_cast<int64_t>(static_cast<double>(p.matrix.n_weights()) * bits_per_weight(p.scheme, p.matrix.in) / 8.0);
  report.peak_resident_bytes = process_status("VmHWM:");
  report.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return report;
}

}  // namespace cachalot
