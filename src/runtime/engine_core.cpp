// EngineCore: requests in, plans to the model, tokens to events.
#include "runtime/engine_core.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/check.h"
#include "runtime/ngram.h"

namespace cachalot {

struct EngineCore::Live : Task {
  Request request;  // its prompt has moved to sequence
  Engine::OnEvent on_event;
  bool ended = false;
  std::vector<TokenCount> history;  // only kept for those who want penalties
  std::unordered_map<int, size_t> history_index;
  std::vector<TokenBias> early_bias;  // the request's, and that no end token may come: before min_tokens
  std::vector<std::vector<TokenLogprob>> prompt_logprobs;
  RequestUsage usage;
  NgramGuesser ngrams;
  std::vector<int> guesses;  // the prediction layer's
  double hit_rate = 0.6;     // of recent guesses that were looked at
  int unguessed = 0;         // tokens drawn since the last guess
  bool on_track = false;     // within a step: all guesses so far were right
  int n_verified = 0;        // rows of this step that belong to the text

  int last_row = -1;  // of the running step's rows

  // Whether a token's parameters are known before the token before it is.
  [[nodiscard]] bool draws_without_last_token() const { return !counts_tokens() && !request.constraint; }
  [[nodiscard]] bool can_speculate() const { return draws_without_last_token() && !scores_prompt && usage.n_output >= request.min_tokens; }
  [[nodiscard]] bool counts_tokens() const {
    const SamplingOptions& s = request.sampling;
    return s.repetition != 1.0f || s.presence != 0.0f || s.frequency != 0.0f;
  }
  void count(int token, bool in_prompt) {
    const auto [entry, added] = history_index.try_emplace(token, history.size());
    if (added) history.push_back({token, 0, 0});
    ++(in_prompt ? history[entry->second].in_prompt : history[entry->second].in_output);
  }
};

namespace {

// Whether every token that a constraint allows is forbidden by a bias.
bool forbids_all(std::span<const TokenBias> bias, std::span<const uint32_t> allowed) {
  if (allowed.empty()) return false;  // any may come
  std::vector<uint32_t> left(allowed.begin(), allowed.end());
  for (const TokenBias& b : bias)
    if (const auto word = static_cast<size_t>(b.token) / 32; word < left.size() && b.bias == -std::numeric_limits<float>::infinity())
      left[word] &= ~(1u << (b.token % 32));
  return std::all_of(left.begin(), left.end(), [](uint32_t word) { return word == 0; });
}

}  // namespace

void check_request(const Request& request, const EngineInfo& info) {
  using Reason = Refused::Reason;
  const auto refuse = [](Reason reason, const std::string& message) { throw Refused(reason, message); };
  const auto n_prompt = std::ssize(request.prompt);
  if (n_prompt == 0) refuse(Reason::invalid, "the prompt holds no tokens");
  for (const int id : request.prompt)
    if (id < 0 || id >= info.vocab)
      refuse(Reason::invalid, fmt::format("the prompt holds token id {}, expected 0 to {}", id, info.vocab - 1));
  if (n_prompt >= info.max_context && (n_prompt > info.max_context || request.max_tokens != 0))
    refuse(Reason::too_long, fmt::format("the prompt has {} tokens, but the context holds {} with at least one left for the answer",
                                         n_prompt, info.max_context));
}

EngineCore::EngineCore(std::unique_ptr<StepModel> model, const CoreOptions& options, Clock clock)
    : model_(std::move(model)),
      options_(options),
      clock_(std::move(clock)),
      pool_(model_->facts().n_blocks, model_->facts().block_tokens),
      scheduler_(pool_, {.max_requests = model_->facts().max_requests,
                         .max_step_tokens = model_->facts().max_step_tokens,
                         .max_scored_rows = model_->facts().max_scored_rows,
                         .prefix_cache = options.prefix_cache,
                         .targets = {options.targets[0], options.targets[1], options.targets[2]},
                         .n_host_blocks = model_->facts().n_host_blocks,
                         .move_seconds = model_->facts().move_seconds,
                         .ageing_seconds = options.ageing_seconds,
                         .ageing_quantum = options.ageing_quantum}) {
  const ModelFacts& f = model_->facts();
  CACHALOT_CHECK(f.n_blocks >= blocks_for(f.max_context, f.block_tokens), "{} blocks for a context of {}", f.n_blocks, f.max_context);
  info_ = {.model = f.name, .vocab = f.vocab, .max_context = f.max_context, .max_requests = f.max_requests, .eos_ids = f.eos_ids};
}

EngineCore::~EngineCore() = default;

void EngineCore::add(RequestId id, Request request, Engine::OnEvent on_event, double submitted) {
  auto owned = std::make_unique<Live>();
  Live& live = *owned;
  live.id = id;
  live.priority = request.priority;
  live.submitted = submitted;
  live.n_prompt = static_cast<int>(request.prompt.size());
  live.max_total = request.max_tokens < 0
                       ? info_.max_context
                       : static_cast<int>(std::min<int64_t>(info_.max_context, int64_t{live.n_prompt} + request.max_tokens));
  live.use_prefix_cache = request.use_prefix_cache;
  live.scores_prompt = request.prompt_logprobs >= 0 && live.n_prompt > 1;
  live.salt = request.cache_salt;
  live.usage.n_prompt = live.n_prompt;
  live.sequence.tokens = std::move(request.prompt);
  live.request = std::move(request);
  live.on_event = std::move(on_event);
  if (live.counts_tokens())
    for (const int token : live.sequence.tokens) live.count(token, true);
  if (live.request.min_tokens > 0) {
    live.early_bias = live.request.sampling.bias;
    for (const auto* ends : {&live.request.stop_tokens, live.request.ignore_eos ? nullptr : &info_.eos_ids})
      for (const int token : ends != nullptr ? *ends : std::vector<int>{})
        live.early_bias.push_back({token, -std::numeric_limits<float>::infinity()});
  }
  if (live.request.timeout_seconds > 0.0) deadlines_.push({submitted + live.request.timeout_seconds, id});
  live_.emplace(id, std::move(owned));
  if (live.max_total == live.n_prompt && !live.scores_prompt)
    end(live, {}, FinishReason::length, clock_());
  else
    scheduler_.add(live, clock_());
}

void EngineCore::cancel(RequestId id) {
  if (const auto found = live_.find(id); found != live_.end()) end(*found->second, {}, FinishReason::cancelled, clock_());
}

void EngineCore::cancel_all() {
  while (!live_.empty()) cancel(live_.begin()->first);
}

void EngineCore::expire(double now) {
  for (; !deadlines_.empty() && deadlines_.top().when <= now; deadlines_.pop())
    if (const auto found = live_.find(deadlines_.top().request); found != live_.end()) end(*found->second, {}, FinishReason::timeout, now);
}

void EngineCore::step() {
  const double now = clock_();
  for (const RequestId id : unwanted_) cancel(id);
  unwanted_.clear();
  expire(now);
  if (!running_.is_open) {
    if (!scheduler_.has_work()) {
      flush();
      return;
    }
    start(now);
  }
  follow(now);
  flush();  // of the step before, when the model runs ahead
  finish();
  std::swap(running_, next_);
  ++stats_.steps;
  if (!model_->facts().runs_ahead || running_.is_open || !scheduler_.has_work()) flush();
}

void EngineCore::start(double now) {
  if (options_.speculation != CoreOptions::Speculation::off) propose_drafts();
  const StepPlan& plan = scheduler_.plan(now);
  CACHALOT_CHECK(!plan.items.empty(), "{} requests wait, {} run, and none moves", scheduler_.n_waiting(), scheduler_.n_running());
  if (options_.check_invariants) scheduler_.check_invariants();
  running_.open(now);
  items_.clear();
  params_.clear();
  scored_.clear();
  scored_.reserve(static_cast<size_t>(model_->facts().max_scored_rows));  // params_ points into it
  try {
    for (const StepPlan::Item& item : plan.items) want_rows(static_cast<Live&>(*item.task), item);
    for (const PageCopy& copy : plan.copies) model_->copy_page(copy);
    model_->begin(items_);
    model_->draw(params_);
  } catch (const std::exception& error) {
    running_.error = error.what();
  }
}

// Starts the step behind the running one when it is known: nobody comes or leaves in between, and every request's next token can be drawn
// without the host's having seen the one before. A request whose text ends in the running step has a row too many then, which nobody asks
// for: its place in a page lies behind the rows of the text, and the page is not given away before the step has ended.
void EngineCore::follow(double now) {
  next_.is_open = false;
  if (!model_->facts().follows || options_.speculation != CoreOptions::Speculation::off || !running_.error.empty()) return;
  for (const Flight::Item& item : running_.items)
    if (!item.live->ended && !item.live->draws_without_last_token()) return;
  const StepPlan* plan = scheduler_.follow(now);
  if (plan == nullptr) return;
  if (options_.check_invariants) scheduler_.check_invariants();
  next_.open(now);
  followers_.clear();
  params_.clear();
  for (size_t r = 0; r < running_.rows.size(); ++r) running_.rows[r].live->last_row = static_cast<int>(r);
  for (const StepPlan::Item& item : plan->items) {
    Live& live = static_cast<Live&>(*item.task);
    const int position = live.sequence.n_computed;
    next_.items.push_back({&live, position, 1, 0});
    next_.rows.push_back({&live, position, 0});
    followers_.push_back({&live.sequence, live.last_row});
    params_.push_back(params_of(live, 1));
  }
  try {
    model_->follow(followers_);
    model_->draw(params_);
  } catch (const std::exception& error) {
    next_.error = error.what();
  }
}

// Takes the running step's tokens.
void EngineCore::finish() {
  try {
    if (!running_.error.empty()) throw std::runtime_error(running_.error);
    sampled_.assign(running_.rows.size(), {});
    model_->finish(sampled_);
    take_rows();
  } catch (const std::exception& error) {
    fail_step(error.what(), clock_());
  }
  // What follows is the running step now, and its rows count like those of any.
  if (next_.is_open)
    for (const Flight::Item& item : next_.items)
      if (!item.live->ended) ++item.live->sequence.n_computed;
}

void EngineCore::take_rows() {
  forget_drafts();
  const double after = clock_();
  let_go(true, after);
  for (size_t r = 0; r < running_.rows.size(); ++r) {
    const Flight::Row& row = running_.rows[r];
    Live& live = *row.live;
    if (live.ended) continue;
    if (row.ahead > 0) {
      const int guessed = live.draft[static_cast<size_t>(row.ahead) - 1];
      if (!live.on_track) continue;
      live.on_track = live.sequence.tokens.back() == guessed;
      live.hit_rate += 0.1 * ((live.on_track ? 1.0 : 0.0) - live.hit_rate);
      if (!live.on_track) continue;
      ++live.sequence.n_computed;  // the guess's own row is right
      ++live.n_verified;
      ++live.usage.n_accepted;
      ++stats_.accepted_tokens;
    }
    take_row(live, row.position, std::move(sampled_[r]), after);
  }
  if (model_->guesses()) learn_guesses();
}

// The running step is over. Requests that ended while it, or the one before it, was running leave now.
void EngineCore::let_go(bool ran, double now) {
  if (!std::exchange(running_.is_open, false)) return;
  if (ran)
    scheduler_.commit(now - std::max(running_.started, last_finish_));
  else
    scheduler_.abandon();
  last_finish_ = now;
  for (const Flight::Item& item : running_.items)
    if (item.live->ended && item.live->n_steps == 0) scheduler_.remove(*item.live);
}

// How many tokens are worth guessing: the n-th guess is right with a probability of hit_rate^n, and costs a row. The prediction layer runs
// in any case, but once more for each guess behind the first.
int EngineCore::draft_length(const Live& live) const {
  constexpr int kProbe = 32;  // tokens after which guessing is tried again
  const Pace& pace = scheduler_.pace();
  const int n_running = std::max(1, scheduler_.n_running());
  const double token_seconds = pace.decode_seconds() / n_running;  // what a token costs without guessing
  double cost = pace.row_seconds();
  int n = 0;
  for (double worth = live.hit_rate * token_seconds; n < options_.max_draft_tokens && worth >= cost; worth *= live.hit_rate)
    if (++n == 1) cost += further_guess_seconds_ / n_running;
  return n == 0 && live.unguessed >= kProbe ? 1 : n;
}

void EngineCore::propose_drafts() {
  for (auto& entry : live_) {
    Live& live = *entry.second;
    live.draft.clear();
    if (live.state != Task::State::running || live.n_left() != 1 || live.n_output() == 0 || !live.can_speculate()) continue;
    const int n = draft_length(live);
    if (n == 0) continue;
    if (options_.speculation == CoreOptions::Speculation::ngram)
      live.draft = live.ngrams.guess(live.sequence.tokens, n);
    else
      live.draft.assign(live.guesses.begin(), live.guesses.begin() + std::min<std::ptrdiff_t>(n, std::ssize(live.guesses)));
  }
}

// Takes the guesses out of the texts again; those that prove right come back one by one.
void EngineCore::forget_drafts() {
  for (const Flight::Item& item : running_.items) {
    Live& live = *item.live;
    live.n_verified = item.n_rows - item.n_draft;
    if (item.n_draft == 0) continue;
    live.sequence.n_computed = item.first + 1;
    live.sequence.tokens.resize(static_cast<size_t>(item.first) + 1);
  }
}

// The prediction layer sees every row, so that its own cache has no holes.
void EngineCore::learn_guesses() {
  const std::vector<Flight::Item>& items = running_.items;
  guess_items_.clear();
  for (const Flight::Item& item : items) {
    const Live& live = *item.live;
    // Of a request that ended, what its last token would be followed by is of no interest; its rows may still serve others.
    const bool known = live.sequence.n_tokens() > item.first + live.n_verified;
    const bool wanted = known && !live.ended && live.n_output() > 0 && live.can_speculate();
    // One at least: a request without guesses would never be found to be easy.
    guess_items_.push_back({known ? live.n_verified : live.n_verified - 1, wanted ? std::max(1, draft_length(live)) : 0});
  }
  guesses_.resize(std::max(guesses_.size(), items.size()));
  const double before = clock_();
  model_->guess(guess_items_, std::span(guesses_).first(items.size()));
  size_t passes = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    passes = std::max(passes, guesses_[i].size());
    items[i].live->guesses = guesses_[i];
  }
  // The pass over all rows may have been one of a prompt; with more passes it counts for less.
  if (passes > 1) further_guess_seconds_ += 0.1 * ((clock_() - before) / static_cast<double>(passes) - further_guess_seconds_);
}

void EngineCore::want_rows(Live& live, const StepPlan::Item& item) {
  Sequence& s = live.sequence;
  const int begin = s.n_computed, end = begin + item.n_new;
  const int n_draft = item.is_prompt ? 0 : item.n_new - 1;
  running_.items.push_back({&live, begin, item.n_new, n_draft});
  if (n_draft > 0) {
    live.draft.resize(static_cast<size_t>(n_draft));
    s.tokens.insert(s.tokens.end(), live.draft.begin(), live.draft.end());
    items_.push_back({&s, item.n_new, WantLogits::all});
    live.on_track = true;
    live.unguessed = 0;
    live.usage.n_drafted += n_draft;
    stats_.drafted_tokens += n_draft;
    for (int i = 0; i <= n_draft; ++i) {
      running_.rows.push_back({&live, begin + i, i});
      params_.push_back(params_of(live, i));
    }
    return;
  }
  live.draft.clear();
  if (!item.is_prompt) ++live.unguessed;
  const WantLogits want = live.scores_prompt ? WantLogits::all : end == s.n_tokens() ? WantLogits::last : WantLogits::none;
  items_.push_back({&live.sequence, item.n_new, want});
  for (int p = want == WantLogits::all ? begin : want == WantLogits::last ? end - 1 : end; p < end; ++p) {
    running_.rows.push_back({&live, p, 0});
    if (p == s.n_tokens() - 1) {
      params_.push_back(params_of(live, 0));
    } else {
      // The draw is forced to the token that does come next, for its log probability.
      scored_.push_back({s.tokens[static_cast<size_t>(p) + 1], std::numeric_limits<float>::infinity()});
      params_.push_back({.temperature = 0.0f, .bias = {&scored_.back(), 1}, .n_logprobs = live.request.prompt_logprobs});
    }
  }
}

// Of the draw `ahead` tokens behind the next one.
SampleParams EngineCore::params_of(Live& live, int ahead) const {
  const SamplingOptions& s = live.request.sampling;
  SampleParams p{.temperature = s.temperature,
                 .top_k = s.top_k,
                 .top_p = s.top_p,
                 .min_p = s.min_p,
                 .repetition = s.repetition,
                 .presence = s.presence,
                 .frequency = s.frequency,
                 .seed = s.seed,
                 .step = static_cast<uint64_t>(live.usage.n_output + ahead),
                 .history = live.history,
                 .bias = live.n_output() + ahead < live.request.min_tokens ? live.early_bias : s.bias,
                 .n_logprobs = s.n_logprobs};
  if (!live.request.constraint) return p;
  p.allowed = live.request.constraint->allowed();
  // A text that can only end does so, though it is shorter than min_tokens.
  if (live.n_output() < live.request.min_tokens && forbids_all(live.early_bias, p.allowed)) p.bias = s.bias;
  return p;
}

void EngineCore::take_row(Live& live, int position, Sampled sampled, double now) {
  if (position < live.sequence.n_tokens() - 1) {
    if (!sampled.finite) return end(live, {.error = "the logits are not finite"}, FinishReason::error, now);
    // A prompt that was read again after a loss of its place was scored before.
    if (position < static_cast<int>(live.prompt_logprobs.size())) return;
    const int token = live.sequence.tokens[static_cast<size_t>(position) + 1];
    // Another token: this one has no probability at all.
    std::vector<TokenLogprob> entry{{token, sampled.token == token ? sampled.logprob : -std::numeric_limits<float>::infinity()}};
    entry.insert(entry.end(), sampled.top.begin(), sampled.top.end());
    live.prompt_logprobs.push_back(std::move(entry));
    return;
  }
  live.scores_prompt = false;
  if (live.max_total == live.n_prompt)
    end(live, {}, FinishReason::length, now);  // no token was wanted
  else
    take_token(live, std::move(sampled), now);
}

void EngineCore::take_token(Live& live, Sampled sampled, double now) {
  TokenEvent event{.token = sampled.token, .logprob = sampled.logprob, .top = std::move(sampled.top)};
  if (sampled.token < 0) {
    event.request_at_fault = true;
    if (live.request.constraint && forbids_all({}, live.request.constraint->allowed())) {
      event.error = "the request's constraint allows no token next";
    } else if (live.request.constraint && forbids_all(live.request.sampling.bias, live.request.constraint->allowed())) {
      event.error = "the request's logit_bias forbids every token that its constraint allows next";
    } else {
      event.error = "the logits are not finite";
      event.request_at_fault = false;
    }
    return end(live, std::move(event), FinishReason::error, now);
  }
  if (live.request.constraint) {
    bool accepted = false;
    try {
      accepted = live.request.constraint->accept(sampled.token);
    } catch (const std::exception& error) {
      event.error = error.what();
    }
    if (!accepted) {
      event.token = -1;
      if (event.error.empty()) event.error = fmt::format("token {} is not allowed by the request's constraint", sampled.token);
      return end(live, std::move(event), FinishReason::error, now);
    }
  }
  if (live.last_token < 0.0) live.usage.first_token_seconds = now - live.submitted;
  scheduler_.count_token(live, now);
  ++live.usage.n_output;
  ++stats_.output_tokens;
  const auto& own = live.request.stop_tokens;
  event.is_end_token =
      (!live.request.ignore_eos && std::find(info_.eos_ids.begin(), info_.eos_ids.end(), event.token) != info_.eos_ids.end()) ||
      std::find(own.begin(), own.end(), event.token) != own.end();
  if (event.is_end_token) return end(live, std::move(event), FinishReason::stop, now);
  live.sequence.tokens.push_back(event.token);
  if (live.counts_tokens()) live.count(event.token, false);
  if (live.sequence.n_tokens() >= live.max_total) return end(live, std::move(event), FinishReason::length, now);
  event.request = live.id;
  if (live.usage.n_output == 1) event.prompt_logprobs = std::move(live.prompt_logprobs);
  pending_.push_back({&live, std::move(event)});
}

void EngineCore::end(Live& live, TokenEvent event, FinishReason reason, double now) {
  live.ended = live.leaves = true;
  if (live.n_steps == 0) scheduler_.remove(live);
  event.request = live.id;
  event.finish = reason;
  if (live.usage.n_output <= 1) event.prompt_logprobs = std::move(live.prompt_logprobs);
  event.usage = live.usage;
  event.usage.n_cached = live.n_cached;
  event.usage.n_preempted = live.n_preempted;
  event.usage.queued_seconds = (live.first_step >= 0.0 ? live.first_step : now) - live.submitted;
  event.usage.seconds = now - live.submitted;
  pending_.push_back({&live, std::move(event)});

  ClassStats& counts = stats_.classes[static_cast<size_t>(live.priority)];
  ++(reason == FinishReason::cancelled                                ? counts.cancelled
     : reason == FinishReason::stop || reason == FinishReason::length ? counts.finished
                                                                      : counts.failed);
  if (live.first_step >= 0.0) {
    stats_.prompt_tokens += live.n_prompt;
    stats_.cached_prompt_tokens += live.n_cached;
    if (last_end_ >= 0.0) seconds_per_request_ += 0.2 * (now - last_end_ - seconds_per_request_);
    last_end_ = now;
  }
  const auto found = live_.find(live.id);
  ended_.push_back(std::move(found->second));
  live_.erase(found);
}

// The device failed: nothing is known of what the step wrote.
void EngineCore::fail_step(const char* why, double now) {
  for (const Flight::Item& item : running_.items) item.live->publishes = false;
  let_go(false, now);
  for (const Flight::Item& item : running_.items)
    if (!item.live->ended) end(*item.live, {.error = why}, FinishReason::error, now);
}

void EngineCore::flush() {
  const bool has_news = !pending_.empty();
  for (Pending& pending : pending_) {
    if (!pending.live->on_event) continue;
    try {
      pending.live->on_event(pending.event);
    } catch (...) {  // a receiver that fails wants no more
      pending.live->on_event = nullptr;
      unwanted_.push_back(pending.event.request);
    }
  }
  pending_.clear();
  std::erase_if(ended_, [](const auto& live) { return live->state == Task::State::outside; });  // others are part of a step still
  if (has_news && after_step_) after_step_();
}

EngineStats EngineCore::stats() const {
  EngineStats s = stats_;
  for (size_t c = 0; c < kPriorities; ++c) {
    const auto& counts = scheduler_.counts(static_cast<Priority>(c));
    s.classes[c].waiting = counts.waiting;
    s.classes[c].running = counts.running;
    s.classes[c].preempted = counts.preempted;
    s.classes[c].promises_kept = counts.promises_kept;
    s.classes[c].promises_broken = counts.promises_broken;
  }
  s.recomputed_tokens = scheduler_.n_recomputed();
  s.swapped_tokens = scheduler_.n_swapped();
  s.blocks_total = pool_.n_blocks();
  s.blocks_used = pool_.n_blocks() - pool_.n_free();
  s.blocks_cached = pool_.n_cached();
  return s;
}

}  // namespace cachalot
