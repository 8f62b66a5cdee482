// The stand-in: repeats the prompt, then ends the text; what a request forbids, it does not say.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <thread>

#include "runtime/step_model.h"

namespace cachalot {
namespace {

class StubModel final : public StepModel {
 public:
  explicit StubModel(StubOptions options) : options_(std::move(options)) {
    const int per_request = blocks_for(options_.max_context, options_.block_tokens);
    facts_ = {.name = options_.name,
              .vocab = options_.vocab,
              .eos_ids = {options_.eos_id},
              .max_context = options_.max_context,
              .n_blocks = options_.n_blocks > 0 ? options_.n_blocks : per_request * options_.max_requests,
              .block_tokens = options_.block_tokens,
              .max_requests = options_.max_requests,
              .max_step_tokens = options_.max_step_tokens,
              .runs_ahead = options_.follows,
              .follows = options_.follows};
    if (!options_.sleep) options_.sleep = [](double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); };
  }

  [[nodiscard]] const ModelFacts& facts() const override { return facts_; }
  void copy_page(const PageCopy&) override {}

  void begin(std::span<const StepItem> items) override {
    double seconds = options_.step_seconds;
    rows_.clear();
    for (const StepItem& item : items) {
      seconds += item.n_new == 1 ? options_.decode_row_seconds : item.n_new * options_.row_seconds;
      const int first = item.n_logits();
      for (int left = first; left > 0; --left) rows_.push_back({item.sequence, item.sequence->n_computed + item.n_new - left});
      item.sequence->n_computed += item.n_new;
    }
    if (options_.follows)
      seconds_ = seconds;
    else
      sleep(seconds);
  }

  void draw(std::span<const SampleParams> params) override {
    Drawn& drawn = drawn_.emplace_back();
    drawn.seconds = seconds_;
    for (size_t i = 0; i < rows_.size(); ++i) drawn.tokens.push_back(draw(*rows_[i].sequence, rows_[i].position, params[i]));
  }

  void follow(std::span<const Follower> items) override {
    rows_.clear();
    for (const Follower& item : items) rows_.push_back({item.sequence, item.sequence->n_computed});
    seconds_ = options_.step_seconds + static_cast<double>(items.size()) * options_.decode_row_seconds;
  }

  void finish(std::span<Sampled> out) override {
    const Drawn drawn = std::move(drawn_.front());
    drawn_.pop_front();
    sleep(drawn.seconds);
    std::copy(drawn.tokens.begin(), drawn.tokens.end(), out.begin());
  }

 private:
  struct Row {
    const Sequence* sequence;
    int position;
  };
  struct Drawn {
    double seconds = 0.0;  // that the step takes until its tokens are there
    std::vector<Sampled> tokens;
  };

  void sleep(double seconds) const {
    if (seconds > 0.0) options_.sleep(seconds);
  }

  [[nodiscard]] Sampled draw(const Sequence& s, int position, const SampleParams& params) const {
    const auto n_output = static_cast<int>(params.step), n_prompt = position + 1 - n_output;
    const int length = options_.answer_tokens >= 0 ? options_.answer_tokens : n_prompt;
    int token = n_output >= length || n_prompt <= 0 ? options_.eos_id : s.tokens[static_cast<size_t>(n_output % n_prompt)];
    if (token == options_.eos_id && n_output < length) token = (token + 1) % options_.vocab;  // of the prompt: the text would end early
    for (const TokenBias& bias : params.bias)
      if (bias.bias == INFINITY) token = bias.token;
    int n_tried = 0;
    for (; n_tried < options_.vocab && !may_come(token, params); ++n_tried) token = (token + 1) % options_.vocab;
    Sampled sampled{.token = token, .logprob = -0.5f};
    if (n_tried == options_.vocab) return {.token = -1, .finite = false};
    for (int t = 0; t < params.n_logprobs; ++t) sampled.top.push_back({(token + t) % options_.vocab, -0.5f - static_cast<float>(t)});
    return sampled;
  }
  static bool may_come(int token, const SampleParams& params) {
    const auto word = static_cast<size_t>(token) / 32;
    if (!params.allowed.empty() && (word >= params.allowed.size() || (params.allowed[word] >> (token % 32) & 1u) == 0)) return false;
    return std::none_of(params.bias.begin(), params.bias.end(),
                        [&](const TokenBias& b) { return b.token == token && b.bias == -INFINITY; });
  }

  StubOptions options_;
  ModelFacts facts_;
  std::vector<Row> rows_;  // of the step that was started last
  double seconds_ = 0.0;
  std::deque<Drawn> drawn_;  // of steps that were not finished yet
};

}  // namespace

std::unique_ptr<StepModel> make_stub_model(StubOptions options) { return std::make_unique<StubModel>(std::move(options)); }

}  // namespace cachalot
