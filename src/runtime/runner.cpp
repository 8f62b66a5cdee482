// Runner: sorting of sequences, index arrays, one upload, one forward.
#include "runtime/runner.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"

namespace cachalot {

bool prefers_expanded(const MlaDims& d, int n_q, int n_cached) {
  const double saved = 2.0 * d.kv_rank - d.nope - d.v_dim;
  if (saved <= 0.0) return false;  // a latent narrower than the heads: absorbed never costs more
  const double threshold = static_cast<double>(d.kv_rank) * (d.nope + d.v_dim) / saved;
  return n_q * (n_cached + n_q / 2.0) > threshold * n_cached;
}

namespace {

// Offsets of the index arrays within one i32 buffer.
struct Offsets {
  size_t tokens, positions, slots, q_start, kv_len, logit_rows, block_table, end;
  Offsets(const RunnerLimits& l, int max_blocks) {
    const auto T = static_cast<size_t>(l.max_tokens), S = static_cast<size_t>(l.max_seqs);
    tokens = 0;
    positions = tokens + T;
    slots = positions + T;
    q_start = slots + T;
    kv_len = q_start + S + 1;
    logit_rows = kv_len + S;
    block_table = logit_rows + static_cast<size_t>(l.max_logits);
    end = block_table + S * static_cast<size_t>(max_blocks);
  }
};

}  // namespace

Runner::Runner(Ops& ops, const Decoder& decoder, KvCache& cache, const RunnerLimits& limits, MlaForm form)
    : ops_(ops), decoder_(decoder), cache_(cache), limits_(limits), form_(form) {
  CACHALOT_CHECK(limits.max_tokens > 0 && limits.max_seqs > 0 && limits.max_logits > 0 && limits.max_sequence > 0);
  CACHALOT_CHECK(limits.max_sequence <= decoder.max_positions(), "{} tokens, {} positions", limits.max_sequence, decoder.max_positions());
  max_blocks_ = (limits.max_sequence + cache.block_tokens() - 1) / cache.block_tokens();
  host_.assign(Offsets(limits_, max_blocks_).end, -1);
  device_ = ops.alloc(host_.size() * sizeof(int));
  logits_ = ops.alloc(static_cast<size_t>(limits.max_logits) * static_cast<size_t>(decoder.config().vocab) * sizeof(float));
}

bool Runner::short_queries(const StepItem& item) const {
  if (!decoder_.config().mla) return item.n_new == 1;
  if (form_ != MlaForm::automatic) return form_ == MlaForm::absorbed;
  return !prefers_expanded(decoder_.config().mla_dims(), item.n_new, item.sequence->n_computed);
}

// Writes host_ and batch_ (whose Views point at the device copy).
void Runner::lay_out(std::span<const StepItem> items, StepResult& result) {
  std::vector<size_t> order(items.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_partition(order.begin(), order.end(), [&](size_t i) { return short_queries(items[i]); });

  const Offsets at(limits_, max_blocks_);
  int* const host = host_.data();
  int row = 0, n_logits = 0, n_seqs = 0;
  batch_ = {};
  for (const size_t i : order) {
    const StepItem& item = items[i];
    const Sequence& s = *item.sequence;
    const int begin = s.n_computed, end = begin + item.n_new, block_tokens = cache_.block_tokens();
    CACHALOT_CHECK(item.n_new > 0 && end <= s.n_tokens() && end <= limits_.max_sequence, "tokens {} to {} of {}", begin, end, s.n_tokens());
    CACHALOT_CHECK(static_cast<int>(s.blocks.size()) * block_tokens >= end, "{} blocks for {} tokens", s.blocks.size(), end);
    CACHALOT_CHECK(row + item.n_new <= limits_.max_tokens && n_seqs < limits_.max_seqs, "the step is larger than the runner's limits");
    Rows& part = short_queries(item) ? batch_.decode : batch_.prefill;
    if (part.n_seqs == 0) part = {row, 0, n_seqs, 0};
    part.n_rows += item.n_new;
    part.n_seqs += 1;
    host[at.q_start + static_cast<size_t>(n_seqs)] = row;
    host[at.kv_len + static_cast<size_t>(n_seqs)] = end;
    int* table = host + at.block_table + static_cast<size_t>(n_seqs) * static_cast<size_t>(max_blocks_);
    std::fill(std::copy(s.blocks.begin(), s.blocks.begin() + std::min<int64_t>(max_blocks_, std::ssize(s.blocks)), table),
              table + max_blocks_, -1);
    const int n_wanted = item.want == WantLogits::all ? item.n_new : item.want == WantLogits::last ? 1 : 0;
    CACHALOT_CHECK(n_logits + n_wanted <= limits_.max_logits, "more logit rows than the runner's limit of {}", limits_.max_logits);
    result.first_row[i] = n_wanted > 0 ? n_logits : -1;
    for (int p = begin; p < end; ++p, ++row) {
      host[at.tokens + static_cast<size_t>(row)] = s.tokens[static_cast<size_t>(p)];
      host[at.positions + static_cast<size_t>(row)] = p;
      host[at.slots + static_cast<size_t>(row)] = table[p / block_tokens] * block_tokens + p % block_tokens;
      if (p >= end - n_wanted) host[at.logit_rows + static_cast<size_t>(n_logits++)] = row;
    }
    batch_.max_q = std::max(batch_.max_q, item.n_new);
    batch_.max_kv = std::max(batch_.max_kv, end);
    ++n_seqs;
  }
  host[at.q_start + static_cast<size_t>(n_seqs)] = row;

  int* const device = static_cast<int*>(device_.get());
  batch_.n_tokens = row;
  batch_.n_seqs = n_seqs;
  batch_.tokens = View::vector(device + at.tokens, DType::i32, row);
  batch_.positions = View::vector(device + at.positions, DType::i32, row);
  batch_.slots = View::vector(device + at.slots, DType::i32, row);
  batch_.q_start = View::vector(device + at.q_start, DType::i32, n_seqs + 1);
  batch_.kv_len = View::vector(device + at.kv_len, DType::i32, n_seqs);
  batch_.block_table = View::matrix(device + at.block_table, DType::i32, n_seqs, max_blocks_);
  batch_.logit_rows = View::vector(device + at.logit_rows, DType::i32, n_logits);
  batch_.host_q_start = {host + at.q_start, static_cast<size_t>(n_seqs) + 1};
  batch_.host_kv_len = {host + at.kv_len, static_cast<size_t>(n_seqs)};
}

StepResult Runner::step(std::span<const StepItem> items) {
  StepResult result;
  result.first_row.assign(items.size(), -1);
  if (items.empty()) return result;
  lay_out(items, result);
  const size_t used = Offsets(limits_, max_blocks_).block_table + static_cast<size_t>(batch_.n_seqs) * static_cast<size_t>(max_blocks_);
  ops_.upload(device_.get(), host_.data(), used * sizeof(int));
  result.logits = View::matrix(logits_.get(), DType::f32, batch_.logit_rows.n_cols(), decoder_.config().vocab);
  decoder_.forward(ops_, batch_, cache_.layers(), result.logits);
  for (const StepItem& item : items) item.sequence->n_computed += item.n_new;
  return result;
}

}  // namespace cachalot
