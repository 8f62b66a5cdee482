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

void ShadowModel::begin(std::span<const StepItem> items) {
  ++step_;
  logits_.clear();
  int n_rows_of_step = 0;
  const double stretch = 1.0 + costs_.spread * std::uniform_real_distribution<double>()(rng_);
  *clock_ += stretch * costs_.step;
  CACHALOT_CHECK(static_cast<int>(items.size()) <= facts_.max_requests);
  if (fail_in >= 0 && fail_in-- == 0) throw std::runtime_error("the device is gone");
  for (const StepItem& item : items) {
    Sequence& s = *item.sequence;
    uint64_t expected = 0;
    for (int p = 0; p < s.n_computed; ++p) {
      expected = extended(expected, s.tokens[static_cast<size_t>(p)]);
      if (check_all_rows_ || p == s.n_computed - 1) CACHALOT_CHECK(row(s, p) == expected, "row {} belongs to another text", p);
    }
    for (int i = 0; i < item.n_new; ++i, ++s.n_computed) {
      const int p = s.n_computed;
      uint64_t& slot = row(s, p);
      int64_t& stamp = written_[static_cast<size_t>(&slot - rows_.data())];
      CACHALOT_CHECK(stamp != step_, "two texts write one row");
      stamp = step_;
      slot = extended(p == 0 ? 0 : row(s, p - 1), s.tokens.at(static_cast<size_t>(p)));
      if (item.want == WantLogits::all || (item.want == WantLogits::last && i == item.n_new - 1)) logits_.push_back(slot);
    }
    n_rows_of_step += item.n_new;
    *clock_ += stretch * (item.n_new == 1 ? costs_.decode_row : costs_.prompt_row * item.n_new);
  }
  n_rows += n_rows_of_step;
  CACHALOT_CHECK(n_rows_of_step <= facts_.max_step_tokens);
  CACHALOT_CHECK(static_cast<int>(logits_.size()) <= facts_.max_requests + facts_.max_scored_rows);
}

void ShadowModel::finish(std::span<const SampleParams> params, std::span<Sampled> out) {
  CACHALOT_CHECK(params.size() == logits_.size() && out.size() == params.size());
  for (size_t i = 0; i < out.size(); ++i) {
    if (not_finite_in >= 0 && not_finite_in-- == 0) {
      out[i] = {.token = -1, .finite = false};
      continue;
    }
    out[i] = {.token = next_token(logits_[i], facts_.vocab), .logprob = -1.0f};
    for (const TokenBias& bias : params[i].bias) {
      if (bias.bias > 1e30f) out[i] = {.token = bias.token, .logprob = -2.0f};
      while (bias.bias < -1e30f && out[i].token == bias.token) out[i].token = (out[i].token + 1) % facts_.vocab;
    }
    if (const auto allowed = params[i].allowed; !allowed.empty()) {
      const auto may_come = [&](int t) {
        return (allowed[static_cast<size_t>(t) / 32] >> (t % 32) & 1u) != 0 &&
               std::none_of(params[i].bias.begin(), params[i].bias.end(),
                            [&](const TokenBias& b) { return b.token == t && b.bias < -1e30f; });
      };
      int token = 0;
      while (token < facts_.vocab && !may_come(token)) ++token;
      if (token == facts_.vocab) {
        out[i] = {.token = -1, .finite = false};
        continue;
      }
      out[i].token = token;
    }
    for (int t = 0; t < params[i].n_logprobs; ++t) out[i].top.push_back({t, -3.0f});
  }
}

}  // namespace cachalot::test
