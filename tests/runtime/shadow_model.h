// A model without weights that checks what the engine feeds it. Each row of a page holds a hash of the whole text up to it, made from the
// row before as it finds it in the page, so a page that holds another text's rows, or none, is noticed; and the token that comes next is
// a function of that hash, so that every answer can be foretold.
#pragma once

#include <cstdint>
#include <deque>
#include <random>
#include <vector>

#include "runtime/step_model.h"

namespace cachalot::test {

// The hash of a text with one more token; of no text: 0.
inline uint64_t extended(uint64_t hash, int token) {
  uint64_t h = (hash ^ static_cast<uint64_t>(token + 1)) * 0x9E3779B97F4A7C15u;
  h ^= h >> 29;
  return (h * 0xBF58476D1CE4E5B9u) ^ (h >> 32);
}
inline int next_token(uint64_t hash, int vocab) { return static_cast<int>((hash >> 20) % static_cast<uint64_t>(vocab)); }

struct ShadowCosts {
  double step = 1e-3, decode_row = 1e-4, prompt_row = 1e-4;  // seconds
  double spread = 0.0;                                       // a step takes up to this share longer, at random
};

class ShadowModel : public StepModel {
 public:
  // `clock` advances with each step by what it costs.
  ShadowModel(ModelFacts facts, double* clock, const ShadowCosts& costs, bool check_all_rows = true);

  [[nodiscard]] const ModelFacts& facts() const override { return facts_; }
  void copy_page(const PageCopy& copy) override;
  void begin(std::span<const StepItem> items) override;
  void draw(std::span<const SampleParams> params) override;
  void follow(std::span<const Follower> items) override;
  void finish(std::span<Sampled> out) override;

  int fail_in = -1;         // steps until one throws
  int fail_finish_in = -1;  // the same, when its tokens are asked for
  int not_finite_in = -1;   // logit rows until one has no token
  int64_t n_rows = 0, n_copied = 0, n_to_host = 0, n_from_host = 0, n_followed = 0;

 private:
  [[nodiscard]] uint64_t& row(const Sequence& s, int position);
  void begin_step(size_t n_items);
  void check_rows(const Sequence& s, int n);
  void write(const Sequence& s, int position, int token);
  [[nodiscard]] Sampled draw_one(uint64_t hash, const SampleParams& params);

  ModelFacts facts_;
  double* clock_;
  ShadowCosts costs_;
  bool check_all_rows_;
  std::vector<uint64_t> host_rows_;  // [n_host_blocks, block_tokens]
  std::vector<uint64_t> rows_;       // [n_blocks, block_tokens]
  std::vector<int64_t> written_;     // [n_blocks, block_tokens]: in which step
  std::vector<uint64_t> logits_;     // of the step that was started last, and what was drawn from them
  std::vector<Sampled> drawn_;
  struct Started {
    double seconds;  // that pass until its tokens are there
    std::vector<Sampled> tokens;
  };
  std::deque<Started> started_;  // and not finished yet
  double seconds_ = 0.0;
  int64_t step_ = 0;
  std::mt19937_64 rng_{5};
};

}  // namespace cachalot::test
