#include "shadow_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

#include "base/check.h"

namespace cachalot::test {

ShadowModel::ShadowModel(ModelFacts facts, double* clock, const ShadowCosts& costs, bool check_all_rows)
    : facts_(std::move(facts)),
      clock_(clock),
      costs_(costs),
      check_all_rows_(check_all_rows),
      rows_(static_cast<size_t>(facts_.n_blocks) * static_cast<size_t>(facts_.block_tokens)),
      written_(rows_.size(), -1) {
  host_rows_.resize(static_cast<size_t>(facts_.n_host_blocks) * static_cast<size_t>(facts_.block_tokens));
}

uint64_t& ShadowModel::row(const Sequence& s, int position) {
  const int block = s.blocks.at(static_cast<size_t>(position / facts_.block_tokens));
  return rows_.at(static_cast<size_t>(block) * static_cast<size_t>(facts_.block_tokens) +
                  static_cast<size_t>(position % facts_.block_tokens));
}

void ShadowModel::copy_page(const PageCopy& copy) {
  using Kind = PageCopy::Kind;
  CACHALOT_CHECK(copy.n_rows > 0 && copy.n_rows <= facts_.block_tokens && (copy.kind != Kind::within || copy.from != copy.to));
  const auto at = [&](std::vector<uint64_t>& rows, int block) {
    CACHALOT_CHECK(block >= 0 && static_cast<size_t>((block + 1) * facts_.block_tokens) <= rows.size(), "page {}", block);
    return rows.begin() + static_cast<std::ptrdiff_t>(block) * facts_.block_tokens;
  };
  std::copy_n(at(copy.kind == Kind::from_host ? host_rows_ : rows_, copy.from), copy.n_rows,
              at(copy.kind == Kind::to_host ? host_rows_ : rows_, copy.to));
  ++(copy.kind == Kind::within ? n_copied : copy.kind == Kind::to_host ? n_to_host : n_from_host);
}

void ShadowModel::begin_step(size_t n_items) {
  ++step_;
  logits_.clear();
  CACHALOT_CHECK(static_cast<int>(n_items) <= facts_.max_requests);
  if (fail_in >= 0 && fail_in-- == 0) throw std::runtime_error("the device is gone");
}

void ShadowModel::check_rows(const Sequence& s, int n) {
  uint64_t expected = 0;
  for (int p = 0; p < n; ++p) {
    expected = extended(expected, s.tokens[static_cast<size_t>(p)]);
    if (check_all_rows_ || p == n - 1) CACHALOT_CHECK(row(s, p) == expected, "row {} belongs to another text", p);
  }
}

void ShadowModel::write(const Sequence& s, int position, int token) {
  uint64_t& slot = row(s, position);
  int64_t& stamp = written_[static_cast<size_t>(&slot - rows_.data())];
  CACHALOT_CHECK(stamp != step_, "two texts write one row");
  stamp = step_;
  slot = extended(position == 0 ? 0 : row(s, position - 1), token);
  ++n_rows;
}

void ShadowModel::begin(std::span<const StepItem> items) {
  CACHALOT_CHECK(started_.empty(), "{} steps are not finished", started_.size());
  const double stretch = 1.0 + costs_.spread * std::uniform_real_distribution<double>()(rng_);
  *clock_ += stretch * costs_.step;
  begin_step(items.size());
  seconds_ = 0.0;
  int n_rows_of_step = 0;
  for (const StepItem& item : items) {
    Sequence& s = *item.sequence;
    check_rows(s, s.n_computed);
    for (int i = 0; i < item.n_new; ++i, ++s.n_computed) {
      write(s, s.n_computed, s.tokens.at(static_cast<size_t>(s.n_computed)));
      if (item.want == WantLogits::all || (item.want == WantLogits::last && i == item.n_new - 1)) logits_.push_back(row(s, s.n_computed));
    }
    n_rows_of_step += item.n_new;
    *clock_ += stretch * (item.n_new == 1 ? costs_.decode_row : costs_.prompt_row * item.n_new);
  }
  CACHALOT_CHECK(n_rows_of_step <= facts_.max_step_tokens);
  CACHALOT_CHECK(static_cast<int>(logits_.size()) <= facts_.max_requests + facts_.max_scored_rows);
}

// The row before is of the step before, whose token is not part of the text yet.
void ShadowModel::follow(std::span<const Follower> items) {
  CACHALOT_CHECK(facts_.follows && started_.size() == 1, "{} steps are not finished", started_.size());
  begin_step(items.size());
  seconds_ = (1.0 + costs_.spread * std::uniform_real_distribution<double>()(rng_)) *
             (costs_.step + costs_.decode_row * static_cast<double>(items.size()));
  for (const Follower& item : items) {
    const Sequence& s = *item.sequence;
    CACHALOT_CHECK(s.n_computed == s.n_tokens(), "{} rows of {} tokens", s.n_computed, s.n_tokens());
    check_rows(s, s.n_computed);
    write(s, s.n_computed, drawn_.at(static_cast<size_t>(item.row)).token);
    logits_.push_back(row(s, s.n_computed));
  }
  ++n_followed;
}

void ShadowModel::draw(std::span<const SampleParams> params) {
  CACHALOT_CHECK(params.size() == logits_.size());
  drawn_.clear();
  for (size_t i = 0; i < params.size(); ++i) drawn_.push_back(draw_one(logits_[i], params[i]));
  started_.push_back({seconds_, drawn_});
}

void ShadowModel::finish(std::span<Sampled> out) {
  const Started step = std::move(started_.front());
  started_.pop_front();
  *clock_ += step.seconds;
  if (fail_finish_in >= 0 && fail_finish_in-- == 0) throw std::runtime_error("the device is gone");
  CACHALOT_CHECK(out.size() == step.tokens.size());
  std::copy(step.tokens.begin(), step.tokens.end(), out.begin());
}

Sampled ShadowModel::draw_one(uint64_t hash, const SampleParams& params) {
  if (not_finite_in >= 0 && not_finite_in-- == 0) return {.token = -1, .finite = false};
  Sampled drawn{.token = next_token(hash, facts_.vocab), .logprob = -1.0f};
  for (const TokenBias& bias : params.bias) {
    if (bias.bias > 1e30f) drawn = {.token = bias.token, .logprob = -2.0f};
    while (bias.bias < -1e30f && drawn.token == bias.token) drawn.token = (drawn.token + 1) % facts_.vocab;
  }
  if (const auto allowed = params.allowed; !allowed.empty()) {
    const auto may_come = [&](int t) {
      return (allowed[static_cast<size_t>(t) / 32] >> (t % 32) & 1u) != 0 &&
             std::none_of(params.bias.begin(), params.bias.end(), [&](const TokenBias& b) { return b.token == t && b.bias < -1e30f; });
    };
    int token = 0;
    while (token < facts_.vocab && !may_come(token)) ++token;
    if (token == facts_.vocab) return {.token = -1, .finite = false};
    drawn.token = token;
  }
  for (int t = 0; t < params.n_logprobs; ++t) drawn.top.push_back({t, -3.0f});
  return drawn;
}

}  // namespace cachalot::test
