// The engine's real model: KV pages, runner, and one draw for all logit rows of a step.
#include <algorithm>

#include "base/check.h"
#include "runtime/step_model.h"

namespace cachalot {
namespace {

class DecoderModel final : public StepModel {
 public:
  DecoderModel(Ops& ops, const Decoder& decoder, const DecoderModelOptions& options)
      : ops_(ops),
        facts_{.name = options.name,
               .vocab = decoder.config().vocab,
               .eos_ids = decoder.config().eos_ids,
               .max_context = options.max_context,
               .n_blocks = options.n_blocks,
               .block_tokens = options.block_tokens,
               .max_requests = options.max_requests,
               .max_step_tokens = options.max_step_tokens,
               .max_scored_rows = options.max_scored_rows,
               .runs_ahead = !ops.host_memory()},
        cache_(ops, decoder.config(), options.kv_format, options.block_tokens, options.n_blocks),
        runner_(ops, decoder, cache_,
                {.max_tokens = options.max_step_tokens,
                 .max_seqs = options.max_requests,
                 .max_logits = options.max_requests + options.max_scored_rows,
                 .max_sequence = options.max_context},
                options.form) {}

  [[nodiscard]] const ModelFacts& facts() const override { return facts_; }

  void copy_page(const PageCopy& copy) override {
    for (const KvLayer& layer : cache_.layers()) {
      copy_rows(layer.k, layer.layout.k_row_bytes(), copy);
      copy_rows(layer.v, layer.layout.v_row_bytes(), copy);
    }
  }

  void begin(std::span<const StepItem> items) override {
    items_.assign(items.begin(), items.end());
    result_ = runner_.step(items);
  }

  void finish(std::span<const SampleParams> params, std::span<Sampled> out) override {
    if (params.empty()) return;
    // The runner sorts sequences by their form of attention, so logit rows come in another order than items.
    row_params_.resize(params.size());
    row_sampled_.resize(params.size());
    const auto for_rows = [&](const auto& action) {
      size_t at = 0;
      for (size_t i = 0; i < items_.size(); ++i) {
        const int n = items_[i].want == WantLogits::all ? items_[i].n_new : items_[i].want == WantLogits::last ? 1 : 0;
        for (int r = 0; r < n; ++r, ++at) action(at, static_cast<size_t>(result_.first_row[i] + r));
      }
      CACHALOT_CHECK(at == params.size(), "{} logit rows, {} parameters", at, params.size());
    };
    for_rows([&](size_t at, size_t row) { row_params_[row] = params[at]; });
    ops_.sample(result_.logits, row_params_, row_sampled_);
    for_rows([&](size_t at, size_t row) { out[at] = std::move(row_sampled_[row]); });
  }

 private:
  void copy_rows(void* pages, size_t row_bytes, const PageCopy& copy) {
    if (row_bytes == 0) return;
    auto* const base = static_cast<std::byte*>(pages);
    const size_t page_bytes = row_bytes * static_cast<size_t>(facts_.block_tokens);
    ops_.copy(base + static_cast<size_t>(copy.to) * page_bytes, base + static_cast<size_t>(copy.from) * page_bytes,
              static_cast<size_t>(copy.n_rows) * row_bytes);
  }

  Ops& ops_;
  ModelFacts facts_;
  KvCache cache_;
  Runner runner_;
  std::vector<StepItem> items_;
  StepResult result_;
  std::vector<SampleParams> row_params_;
  std::vector<Sampled> row_sampled_;
};

}  // namespace

std::unique_ptr<StepModel> make_decoder_model(Ops& ops, const Decoder& decoder, const DecoderModelOptions& options) {
  return std::make_unique<DecoderModel>(ops, decoder, options);
}

}  // namespace cachalot
