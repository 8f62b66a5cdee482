// The engine's real model: KV pages, runner, and one draw for all logit rows of a step.
#include <algorithm>
#include <deque>

#include "base/check.h"
#include "runtime/step_model.h"

namespace cachalot {
namespace {

// What the scheduler expects of transfers between host and device, pageable memory and a wait for each included.
constexpr double kHostBytesPerSecond = 8e9, kSecondsPerTransfer = 1.5e-5;

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
               .n_host_blocks = options.n_host_blocks,
               .max_requests = options.max_requests,
               .max_step_tokens = options.max_step_tokens,
               .max_scored_rows = options.max_scored_rows,
               .runs_ahead = !ops.host_memory(),
               .follows = options.follow == DecoderModelOptions::Follow::automatic ? !ops.host_memory()
                                                                                   : options.follow == DecoderModelOptions::Follow::always},
        cache_(ops, decoder.config(), options.kv_format, options.block_tokens, options.n_blocks, decoder.n_kv_layers()),
        runner_(ops, decoder, cache_, runner_limits(options), options.form),
        guesses_(options.guesses) {
    CACHALOT_CHECK(!guesses_ || decoder.mtp());
    drawn_ = ops.alloc(static_cast<size_t>(runner_.limits().max_logits) * sizeof(int));
    for (const KvLayer& layer : cache_.layers()) page_bytes_ += layer.layout.token_bytes() * static_cast<size_t>(options.block_tokens);
    host_pages_.resize(page_bytes_ * static_cast<size_t>(options.n_host_blocks));
    facts_.move_seconds = 2.0 * static_cast<double>(page_bytes_) / kHostBytesPerSecond +
                          2.0 * static_cast<double>(cache_.layers().size()) * kSecondsPerTransfer;
    // On a device of its own memory the first requests should not wait for what any step needs.
    if (ops.host_memory()) return;
    runner_.rehearse();
    runner_.record_graphs();
  }

  [[nodiscard]] const ModelFacts& facts() const override { return facts_; }

  void copy_page(const PageCopy& copy) override {
    size_t host_offset = 0;  // of this part of a page within a page in host memory
    for (const KvLayer& layer : cache_.layers()) {
      for (const auto& [pages, row_bytes] :
           {std::pair(layer.k, layer.layout.k_row_bytes()), std::pair(layer.v, layer.layout.v_row_bytes())}) {
        if (row_bytes == 0) continue;
        copy_rows(static_cast<std::byte*>(pages), row_bytes, host_offset, copy);
        host_offset += row_bytes * static_cast<size_t>(facts_.block_tokens);
      }
    }
  }

  void begin(std::span<const StepItem> items) override {
    items_.assign(items.begin(), items.end());
    first_.clear();
    for (const StepItem& item : items) first_.push_back(item.sequence->n_computed);
    result_ = runner_.step(items);
  }

  void draw(std::span<const SampleParams> params) override {
    // The runner sorts sequences by their form of attention, so logit rows come in another order than items.
    logit_rows_.clear();
    for (size_t i = 0; i < items_.size(); ++i)
      for (int r = 0; r < items_[i].n_logits(); ++r) logit_rows_.push_back(result_.first_row[i] + r);
    CACHALOT_CHECK(logit_rows_.size() == params.size(), "{} logit rows, {} parameters", logit_rows_.size(), params.size());
    row_params_.resize(params.size());
    for (size_t at = 0; at < params.size(); ++at) row_params_[static_cast<size_t>(logit_rows_[at])] = params[at];
    const View tokens = View::vector(drawn_.get(), DType::i32, result_.logits.n_rows());
    draws_.push_back({logit_rows_, params.empty() ? nullptr : ops_.draw(result_.logits, row_params_, tokens)});
  }

  void follow(std::span<const Follower> items) override {
    const View drawn = View::vector(drawn_.get(), DType::i32, result_.logits.n_rows());
    items_.clear();
    for (const Follower& item : items)
      items_.push_back({item.sequence, 1, WantLogits::last, logit_rows_.at(static_cast<size_t>(item.row))});
    result_ = runner_.step(items_, drawn);
    for (const Follower& item : items) --item.sequence->n_computed;
  }

  void finish(std::span<Sampled> out) override {
    const Drawn drawn = std::move(draws_.front());
    draws_.pop_front();
    if (!drawn.draw) return;
    row_sampled_.resize(out.size());
    drawn.draw->wait(row_sampled_);
    for (size_t at = 0; at < out.size(); ++at) out[at] = std::move(row_sampled_[static_cast<size_t>(drawn.rows[at])]);
  }

  [[nodiscard]] bool guesses() const override { return guesses_; }

  void guess(std::span<const GuessItem> items, std::span<std::vector<int>> out) override {
    predicted_.clear();
    for (size_t i = 0; i < items.size(); ++i) {
      predicted_.push_back({items_[i].sequence, first_[i], items_[i].n_new, items[i].n_valid, items[i].n_wanted > 0});
      out[i].clear();
    }
    StepResult result = runner_.predict(predicted_);
    std::vector<Runner::Guessed> chain;  // rows that have logits
    std::vector<size_t> item;            // whose row it is
    for (size_t i = 0; i < items.size(); ++i) {
      if (result.first_row[i] < 0) continue;
      chain.push_back({items_[i].sequence, first_[i] + items[i].n_valid - 1});
      item.push_back(i);
    }
    while (!chain.empty()) {
      row_params_.assign(chain.size(), {.temperature = 0.0f});
      row_sampled_.assign(chain.size(), {});
      ops_.sample(result.logits, row_params_, row_sampled_);
      size_t n = 0;  // rows that are followed by another
      for (size_t r = 0; r < chain.size(); ++r) {
        const int token = row_sampled_[r].token;
        if (token < 0) continue;
        std::vector<int>& guesses = out[item[r]];
        guesses.push_back(token);
        const Runner::Guessed next{chain[r].sequence, chain[r].position + 1, token, static_cast<int>(r)};
        if (static_cast<int>(guesses.size()) >= items[item[r]].n_wanted || !runner_.has_place(next)) continue;
        chain[n] = next;
        item[n++] = item[r];
      }
      chain.resize(n);
      item.resize(n);
      if (n > 0) result = runner_.predict_further(chain);
    }
  }

 private:
  void copy_rows(std::byte* pages, size_t row_bytes, size_t host_offset, const PageCopy& copy) {
    const size_t bytes = static_cast<size_t>(copy.n_rows) * row_bytes;
    const auto device = [&](int block) {
      return pages + static_cast<size_t>(block) * static_cast<size_t>(facts_.block_tokens) * row_bytes;
    };
    const auto host = [&](int block) { return host_pages_.data() + static_cast<size_t>(block) * page_bytes_ + host_offset; };
    switch (copy.kind) {
      case PageCopy::Kind::within: return ops_.copy(device(copy.to), device(copy.from), bytes);
      case PageCopy::Kind::to_host: return ops_.download(host(copy.to), device(copy.from), bytes);
      case PageCopy::Kind::from_host: return ops_.upload(device(copy.to), host(copy.from), bytes);
    }
  }

  Ops& ops_;
  ModelFacts facts_;
  KvCache cache_;
  Runner runner_;
  size_t page_bytes_ = 0;  // of all layers
  std::vector<std::byte> host_pages_;
  bool guesses_;
  std::vector<StepItem> items_;  // of the step that was started last
  std::vector<int> first_;       // position of each item's first row
  std::vector<Runner::Predicted> predicted_;
  StepResult result_;
  std::vector<int> logit_rows_;  // of each draw, in the order of items
  Buffer drawn_;                 // i32 [max_logits]: the tokens of the step that was started last, by logit row
  struct Drawn {
    std::vector<int> rows;
    std::unique_ptr<Draw> draw;  // null: no row was wanted
  };
  std::deque<Drawn> draws_;  // of steps that were not finished yet
  std::vector<SampleParams> row_params_;
  std::vector<Sampled> row_sampled_;
};

}  // namespace

std::unique_ptr<StepModel> make_decoder_model(Ops& ops, const Decoder& decoder, const DecoderModelOptions& options) {
  return std::make_unique<DecoderModel>(ops, decoder, options);
}

}  // namespace cachalot
