// Runner: sorting of sequences, index arrays, one upload, one forward or a replay of one.
#include "runtime/runner.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/error.h"

namespace cachalot {

bool prefers_expanded(const MlaDims& d, int n_q, int n_cached) {
  const double saved = 2.0 * d.kv_rank - d.nope - d.v_dim;
  if (saved <= 0.0) return false;  // a latent narrower than the heads: absorbed never costs more
  const double threshold = static_cast<double>(d.kv_rank) * (d.nope + d.v_dim) / saved;
  return n_q * (n_cached + n_q / 2.0) > threshold * n_cached;
}

// Few sequences: every number, since a padded row of a mixture of experts can read weights that no other row wants.
int padded_seqs(int n) {
  const int step = n <= 8 ? 1 : n <= 16 ? 2 : n <= 32 ? 4 : n <= 256 ? 8 : 32;
  return (n + step - 1) / step * step;
}

// Devices plan by this bound how they share a context among their units; fourfold too large costs them little.
int padded_context(int n) {
  int64_t bound = 1024;
  while (bound < n) bound *= 4;
  return static_cast<int>(std::min<int64_t>(bound, std::numeric_limits<int>::max()));
}

namespace {

// What rehearse() assumes of devices: from how many rows of a sequence on its pages are laid out in a row, and beyond which context the
// expanded form of latent attention is merged from parts.
constexpr int kTiledRows = 64, kLongContext = 16384;

}  // namespace

Runner::Runner(Ops& ops, const Decoder& decoder, KvCache& cache, const RunnerLimits& limits, MlaForm form, GraphUse graphs)
    : ops_(ops),
      decoder_(decoder),
      cache_(cache),
      limits_(limits),
      form_(form),
      pads_(graphs == GraphUse::padded || (graphs == GraphUse::automatic && !ops.host_memory())),
      replays_(pads_ && graphs == GraphUse::automatic) {
  CACHALOT_CHECK(limits.max_tokens > 0 && limits.max_seqs > 0 && limits.max_logits > 0 && limits.max_sequence > 0);
  CACHALOT_CHECK(limits.max_sequence <= decoder.max_positions(), "{} tokens, {} positions", limits.max_sequence, decoder.max_positions());
  max_blocks_ = (limits.max_sequence + cache.block_tokens() - 1) / cache.block_tokens();
  const Offsets largest(limits.max_tokens, limits.max_seqs, std::max(limits.max_seqs, limits.max_logits));
  host_.assign(largest.block_table + static_cast<size_t>(limits.max_seqs) * static_cast<size_t>(max_blocks_), -1);
  device_ = ops.alloc(host_.size() * sizeof(int));
  if (decoder.mtp()) {
    const size_t row = static_cast<size_t>(decoder.config().hidden) * sizeof(float);
    hidden_ = ops.alloc(static_cast<size_t>(limits.max_tokens) * row);
    for (Buffer& further : further_) further = ops.alloc(static_cast<size_t>(limits.max_seqs) * row);
  }
  logits_ = ops.alloc(static_cast<size_t>(limits.max_logits) * static_cast<size_t>(decoder.config().vocab) * sizeof(float));
}

bool Runner::short_queries(const StepItem& item) const {
  if (!decoder_.config().mla) return item.n_new == 1;
  if (form_ != MlaForm::automatic) return form_ == MlaForm::absorbed;
  return !prefers_expanded(decoder_.config().mla_dims(), item.n_new, item.sequence->n_computed);
}

Runner::Shape Runner::shape_of(std::span<const StepItem> items) const {
  if (!pads_) return {};
  const StepItem& first = items[0];
  int longest = 0;
  for (const StepItem& item : items) {
    if (item.n_new != first.n_new || item.want != first.want || !short_queries(item)) return {};
    longest = std::max(longest, item.sequence->n_computed + item.n_new);
  }
  Shape shape{.n_seqs = std::min(padded_seqs(static_cast<int>(items.size())), limits_.max_seqs),
              .n_new = first.n_new,
              .context = std::min(padded_context(longest), limits_.max_sequence),
              .all_logits = first.want == WantLogits::all && first.n_new > 1};
  const int n_logits = shape.n_seqs * (shape.all_logits ? shape.n_new : 1);
  const bool fits = shape.n_seqs >= static_cast<int>(items.size()) && shape.n_seqs * shape.n_new <= limits_.max_tokens &&
                    n_logits <= limits_.max_logits && longest <= shape.context;
  return fits && first.want != WantLogits::none && first.n_new <= kMaxPaddedRows ? shape : Shape{};
}

// Writes host_ and batch_ (whose Views point at the device copy).
void Runner::lay_out(std::span<const StepItem> items, const Shape& shape, bool writes, StepResult& result) {
  std::vector<size_t> order(items.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_partition(order.begin(), order.end(), [&](size_t i) { return short_queries(items[i]); });

  const int block_tokens = cache_.block_tokens();
  const auto blocks_for = [&](int n_tokens) { return (n_tokens + block_tokens - 1) / block_tokens; };
  int* const host = host_.data();
  int row = 0, n_logits = 0, n_seqs = 0, longest = shape.context;
  int all_rows = shape.n_seqs * shape.n_new, all_seqs = std::max(shape.n_seqs, static_cast<int>(items.size()));
  int all_logits = shape.n_seqs * (shape.all_logits ? shape.n_new : 1);
  for (const StepItem& item : items) {
    longest = std::max(longest, item.sequence->n_computed + item.n_new);
    if (shape.n_seqs > 0) continue;
    all_rows += item.n_new;
    all_logits += item.n_logits();
  }
  CACHALOT_CHECK(all_rows <= limits_.max_tokens && all_seqs <= limits_.max_seqs, "the step is larger than the runner's limits");
  CACHALOT_CHECK(all_logits <= limits_.max_logits, "more logit rows than the runner's limit of {}", limits_.max_logits);
  // predict() may want the logits of any sequence.
  const Offsets at = at_ = Offsets(all_rows, all_seqs, std::max(all_seqs, all_logits));
  CACHALOT_CHECK(longest <= limits_.max_sequence, "{} tokens of at most {}", longest, limits_.max_sequence);
  const int table_cols = blocks_for(longest);
  batch_ = {};
  batch_.max_kv = longest;
  batch_.scores_all = shape.n_seqs > 0 && (shape.all_logits || shape.n_new == 1);
  item_rows_.assign(items.size(), 0);
  for (const size_t i : order) {
    const StepItem& item = items[i];
    const Sequence& s = *item.sequence;
    const int begin = s.n_computed, end = begin + item.n_new;
    item_rows_[i] = row;
    CACHALOT_CHECK(item.n_new > 0 && end <= s.n_tokens() + (item.drawn >= 0), "tokens {} to {} of {}", begin, end, s.n_tokens());
    CACHALOT_CHECK(static_cast<int>(s.blocks.size()) >= blocks_for(end), "{} blocks for {} tokens", s.blocks.size(), end);
    Rows& part = short_queries(item) ? batch_.decode : batch_.prefill;
    if (part.n_seqs == 0) part = {row, 0, n_seqs, 0};
    part.n_rows += item.n_new;
    part.n_seqs += 1;
    host[at.q_start + static_cast<size_t>(n_seqs)] = row;
    host[at.kv_len + static_cast<size_t>(n_seqs)] = end;
    int* table = host + at.block_table + static_cast<size_t>(n_seqs) * static_cast<size_t>(table_cols);
    std::fill(std::copy(s.blocks.begin(), s.blocks.begin() + blocks_for(end), table), table + table_cols, -1);
    const int n_wanted = item.n_logits();
    result.first_row[i] = n_wanted > 0 ? n_logits : -1;
    for (int p = begin; p < end; ++p, ++row) {
      host[at.tokens + static_cast<size_t>(row)] = item.drawn >= 0 ? -2 - item.drawn : s.tokens[static_cast<size_t>(p)];
      host[at.positions + static_cast<size_t>(row)] = p;
      host[at.slots + static_cast<size_t>(row)] = writes ? table[p / block_tokens] * block_tokens + p % block_tokens : -1;
      if (p >= end - n_wanted) host[at.logit_rows + static_cast<size_t>(n_logits++)] = row;
    }
    batch_.max_q = std::max(batch_.max_q, item.n_new);
    ++n_seqs;
  }
  if (shape.n_seqs > 0) pad(shape, row, n_seqs, n_logits, table_cols);
  host[at.q_start + static_cast<size_t>(n_seqs)] = row;

  set_views(row, n_seqs, n_logits, table_cols);
}

void Runner::set_views(int n_rows, int n_seqs, int n_logits, int table_cols) {
  const Offsets& at = at_;
  const int* const host = host_.data();
  int* const device = static_cast<int*>(device_.get());
  batch_.n_tokens = n_rows;
  batch_.n_seqs = n_seqs;
  batch_.tokens = View::vector(device + at.tokens, DType::i32, n_rows);
  batch_.positions = View::vector(device + at.positions, DType::i32, n_rows);
  batch_.slots = View::vector(device + at.slots, DType::i32, n_rows);
  batch_.q_start = View::vector(device + at.q_start, DType::i32, n_seqs + 1);
  batch_.kv_len = View::vector(device + at.kv_len, DType::i32, n_seqs);
  batch_.block_table = View::matrix(device + at.block_table, DType::i32, n_seqs, table_cols);
  batch_.logit_rows = View::vector(device + at.logit_rows, DType::i32, n_logits);
  batch_.host_q_start = {host + at.q_start, static_cast<size_t>(n_seqs) + 1};
  batch_.host_kv_len = {host + at.kv_len, static_cast<size_t>(n_seqs)};
}

// Sequences without context, up to the shape's number of them.
void Runner::pad(const Shape& shape, int& row, int& n_seqs, int& n_logits, int table_cols) {
  const Offsets& at = at_;
  int* const host = host_.data();
  for (; n_seqs < shape.n_seqs; ++n_seqs) {
    host[at.q_start + static_cast<size_t>(n_seqs)] = row;
    host[at.kv_len + static_cast<size_t>(n_seqs)] = 0;
    std::fill_n(host + at.block_table + static_cast<size_t>(n_seqs) * static_cast<size_t>(table_cols), table_cols, -1);
    for (int i = 0; i < shape.n_new; ++i, ++row)
      for (const size_t array : {at.tokens, at.positions, at.slots}) host[array + static_cast<size_t>(row)] = -1;
    for (int i = 0; i < (shape.all_logits ? shape.n_new : 1); ++i) host[at.logit_rows + static_cast<size_t>(n_logits++)] = -1;
  }
  batch_.decode = {0, row, 0, n_seqs};
}

void Runner::upload(View drawn) {
  const size_t n = at_.block_table + static_cast<size_t>(batch_.n_seqs) * static_cast<size_t>(batch_.block_table.n_cols());
  if (drawn)
    ops_.upload_drawn(static_cast<int*>(device_.get()), std::span(host_).first(n), drawn);
  else
    ops_.upload(device_.get(), host_.data(), n * sizeof(int));
}

void Runner::forward() {
  decoder_.forward(ops_, batch_, cache_.layers(),
                   View::matrix(logits_.get(), DType::f32, batch_.logit_rows.n_cols(), decoder_.config().vocab), hidden());
}

View Runner::hidden() const {
  return hidden_ ? View::matrix(hidden_.get(), DType::f32, batch_.n_tokens, decoder_.config().hidden) : View{};
}

// Records the step that batch_ describes. A device that has no room for it is not asked again.
void Runner::record(const Shape& shape) {
  if (n_graphs_ >= kMaxGraphs) {
    auto oldest = recorded_.end();
    for (auto r = recorded_.begin(); r != recorded_.end(); ++r)
      if (r->second.graph && (oldest == recorded_.end() || r->second.last_used < oldest->second.last_used)) oldest = r;
    recorded_.erase(oldest);
    --n_graphs_;
  }
  try {
    Recorded& r = recorded_[shape];
    r.graph = ops_.capture([&] { forward(); });
    if (r.graph)
      ++n_graphs_;
    else
      replays_ = false;  // a device that records nothing
  } catch (const Error& error) {
    replays_ = false;
    graph_problem_ = error.what();
  }
}

void Runner::run(const Shape& shape) {
  ++n_steps_;
  const auto known = replays_ && shape.n_seqs > 0 ? recorded_.find(shape) : recorded_.end();
  if (known == recorded_.end()) {
    forward();
    if (replays_ && shape.n_seqs > 0) recorded_[shape].last_used = n_steps_;
    return;
  }
  if (!known->second.graph) record(shape);
  Recorded& r = recorded_[shape];
  r.last_used = n_steps_;
  if (!r.graph) return forward();
  r.graph->launch();
  ++n_replayed_;
}

StepResult Runner::step(std::span<const StepItem> items, View drawn) {
  StepResult result;
  result.first_row.assign(items.size(), -1);
  if (items.empty()) return result;
  const Shape shape = shape_of(items);
  lay_out(items, shape, true, result);
  upload(drawn);
  int n_logits = 0;
  for (const StepItem& item : items) n_logits += item.n_logits();
  result.logits = View::matrix(logits_.get(), DType::f32, n_logits, decoder_.config().vocab);
  run(shape);
  for (const StepItem& item : items) item.sequence->n_computed += item.n_new;
  return result;
}

void Runner::rehearse() {
  const auto run_all = [&](std::span<const StepItem> items) {
    StepResult result;
    result.first_row.assign(items.size(), -1);
    lay_out(items, shape_of(items), false, result);
    upload();
    forward();
  };
  const int most = limits_.max_sequence, rows = std::min(limits_.max_tokens, most);
  Sequence full, fresh;
  full.tokens.assign(static_cast<size_t>(most), 0);
  full.blocks.assign(static_cast<size_t>(max_blocks_), 0);
  fresh.tokens = full.tokens;
  fresh.blocks = full.blocks;
  // A chunk behind a context that is long enough to be taken in parts; one alone may be as long as there is.
  full.n_computed = (limits_.max_seqs > 1 ? std::min(most, std::max(rows, kLongContext)) : most) - rows;
  const StepItem chunk{&full, rows, WantLogits::last};
  run_all({&chunk, 1});
  if (const int few = std::min(kTiledRows, rows - 1); limits_.max_seqs > 1 && few > 0) {  // all of a context, in a step of all rows
    full.n_computed = most - few;
    const StepItem mixed[] = {{&full, few, WantLogits::none}, {&fresh, rows - few, WantLogits::last}};
    run_all(mixed);
  }
  // Prompts side by side, which devices may take together: as many rows as a step may have, which one sequence may be too short for.
  const int64_t all_rows = std::min<int64_t>(limits_.max_tokens, int64_t{most} * limits_.max_seqs);
  if (const int64_t n = std::max<int64_t>(2, (all_rows + most - 1) / most); limits_.max_seqs > 1 && all_rows >= n) {
    std::vector<StepItem> prompts;
    for (int64_t i = 0; i < n; ++i)
      prompts.push_back(
          {&fresh, static_cast<int>(all_rows * (i + 1) / n - all_rows * i / n), i + 1 < n ? WantLogits::none : WantLogits::last});
    run_all(prompts);
  }
  full.n_computed = most - 1;
  fresh.n_computed = std::min(1, most - 1);
  std::vector<StepItem> decode(static_cast<size_t>(std::min({limits_.max_seqs, limits_.max_tokens, limits_.max_logits})),
                               {&fresh, 1, WantLogits::last});
  decode[0].sequence = &full;
  run_all(decode);
}

int Runner::record_graphs(int at_most) {
  Sequence s;
  s.tokens.assign(2, 0);
  s.blocks.assign(1, 0);
  s.n_computed = 1;  // with nothing computed it would be a prompt
  for (int n = 1; n <= limits_.max_seqs && replays_ && n_graphs_ < std::min(at_most, kMaxGraphs);) {
    const std::vector<StepItem> items(static_cast<size_t>(n), {&s, 1, WantLogits::last});
    const Shape shape = shape_of(items);
    if (shape.n_seqs == 0) break;
    if (const auto known = recorded_.find(shape); known == recorded_.end() || !known->second.graph) {
      StepResult result;
      result.first_row.assign(items.size(), -1);
      lay_out(items, shape, false, result);
      upload();
      forward();
      record(shape);
    }
    n = shape.n_seqs + 1;
  }
  return n_graphs_;
}

}  // namespace cachalot
