// Scheduler: how the rows of a step are shared out, and what happens when pages run out on the way.
#include <algorithm>
#include <limits>
#include <utility>

#include "base/check.h"
#include "runtime/scheduler.h"

namespace cachalot {
namespace {

constexpr int kMinChunk = 16;  // prompt rows that a step takes in any case, so that prompts move
// Tokens of a stream without a target of its own come at most this many times slower than without prompts beside it, unless so few rows
// would waste more than half of a step: where decoding is very fast, as on a GPU, prompts would hardly move.
constexpr double kDefaultSlowdown = 5.0;
// No step of a lower class may be longer than this part of the time that a first token of a higher one has.
constexpr double kShareOfFirstToken = 0.15;

}  // namespace

const StepPlan& Scheduler::plan(double now) {
  CACHALOT_CHECK(!plan_is_open_, "the step before is not committed");
  plan_.items.clear();
  plan_.copies.clear();
  plan_.n_decode_rows = plan_.n_prompt_rows = plan_.n_draft_rows = 0;
  if (n_waiting_ > 0) admit(now);
  order_ = running_;
  plan_decodes(now);
  if (plan_.n_decode_rows == 0 || !pace_.wants_decode_step()) plan_prompts(now);
  for (const StepPlan::Item& item : plan_.items) item.task->last_step = now, ++item.task->n_steps;
  plan_is_open_ = true;
  return plan_;
}

// Nobody is let in and nobody yields here: both may need to take pages from a task of the running step.
const StepPlan* Scheduler::follow(double now) {
  CACHALOT_CHECK(plan_is_open_ && !next_plan_is_open_, "there is no step to be followed");
  next_plan_.items.clear();
  if (n_waiting_ > 0) return nullptr;
  int n_pages = 0;
  for (Task* task : running_) {
    const Sequence& s = task->sequence;
    if (task->leaves || s.n_tokens() + 1 >= task->max_total) continue;  // its next token, if any, is the last
    if (task->n_left() > 0) return nullptr;                             // a prompt that is read, or whoever was left out
    n_pages += blocks_of(s.n_computed + 1) - static_cast<int>(s.blocks.size());
    next_plan_.items.push_back({task, 1, false});
  }
  if (next_plan_.items.empty() || n_pages > pool_.n_free()) return nullptr;
  for (const StepPlan::Item& item : next_plan_.items) {
    Sequence& s = item.task->sequence;
    while (static_cast<int>(s.blocks.size()) < blocks_of(s.n_computed + 1)) s.blocks.push_back(*pool_.take());
    item.task->last_step = now;
    ++item.task->n_steps;
  }
  next_plan_.n_decode_rows = static_cast<int>(next_plan_.items.size());
  next_plan_.n_prompt_rows = next_plan_.n_draft_rows = 0;
  next_plan_is_open_ = true;
  return &next_plan_;
}

void Scheduler::commit(double step_seconds) {
  pace_.record(plan_.n_decode_rows, plan_.n_prompt_rows, step_seconds);
  for (const StepPlan::Item& item : plan_.items)
    if (caches(*item.task)) publish(*item.task);
  close_plan();
}

void Scheduler::close_plan() {
  for (const StepPlan::Item& item : plan_.items) --item.task->n_steps;
  std::swap(plan_, next_plan_);
  plan_is_open_ = std::exchange(next_plan_is_open_, false);
}

Task* Scheduler::memory_victim(double now) const {
  for (auto r = running_.rbegin(); r != running_.rend(); ++r)
    if ((*r)->protected_until <= now) return *r;
  return running_.empty() ? nullptr : running_.back();
}

// False: the task itself had to yield.
bool Scheduler::take_pages(Task& task, int n_new, double now) {
  Sequence& s = task.sequence;
  const auto wanted = static_cast<size_t>(blocks_of(s.n_computed + n_new));
  while (wanted > s.blocks.size() && static_cast<int>(wanted - s.blocks.size()) > pool_.n_free()) {
    Task* victim = memory_victim(now);
    CACHALOT_CHECK(victim != &task || n_running() > 1, "one request does not fit the pool: {} blocks", wanted);
    preempt(*victim, Why::pages, now);
    if (victim == &task) return false;
  }
  while (s.blocks.size() < wanted) s.blocks.push_back(*pool_.take());
  return true;
}

void Scheduler::plan_decodes(double now) {
  for (Task* task : order_) {
    if (task->state != Task::State::running || task->n_left() != 1) continue;
    if (!take_pages(*task, 1, now)) continue;
    plan_.items.push_back({task, 1, false});
    ++plan_.n_decode_rows;
  }
  plan_drafts();
}

// Guesses take what is left of rows and free pages: nobody yields for them.
void Scheduler::plan_drafts() {
  int rows = options_.max_step_tokens - plan_.n_decode_rows, scored = options_.max_scored_rows;
  for (StepPlan::Item& item : plan_.items) {
    Sequence& s = item.task->sequence;
    // The last token of an answer needs no guess behind it.
    int n = std::min({static_cast<int>(item.task->draft.size()), rows, scored, item.task->max_total - s.n_tokens() - 1});
    while (n > 0 && blocks_of(s.n_computed + 1 + n) > static_cast<int>(s.blocks.size()) + pool_.n_free()) --n;
    if (n <= 0) continue;
    const auto wanted = static_cast<size_t>(blocks_of(s.n_computed + 1 + n));
    while (s.blocks.size() < wanted) s.blocks.push_back(*pool_.take());
    item.n_new += n;
    plan_.n_decode_rows += n;
    plan_.n_draft_rows += n;
    rows -= n;
    scored -= n;
  }
}

// Prompt rows of this class that keep the gaps between tokens of the streams that are at least as urgent, and the first tokens of those to
// come.
int Scheduler::prompt_rows_beside_decodes(Priority priority) const {
  int rows = options_.max_step_tokens;
  const auto keep = [&](double seconds) { rows = std::min(rows, pace_.prompt_rows_within(seconds)); };
  for (size_t c = 0; c <= index(priority); ++c) {
    const bool decodes = std::any_of(plan_.items.begin(), plan_.items.end(),
                                     [&](const StepPlan::Item& item) { return !item.is_prompt && index(item.task->priority) == c; });
    const ClassTargets& targets = options_.targets[c];
    // Whoever comes during a step waits for its end.
    if (c < index(priority) && targets.first_token_seconds > 0.0) keep(kShareOfFirstToken * targets.first_token_seconds);
    if (!decodes) continue;
    if (targets.token_gap_seconds > 0.0)
      keep(aims_[c].share * targets.token_gap_seconds);
    else if (c == index(Priority::interactive))
      rows =
          std::min(rows, std::max(pace_.prompt_rows_at_half_speed(), pace_.prompt_rows_within(kDefaultSlowdown * pace_.decode_seconds())));
  }
  return std::max(kMinChunk, rows);
}

void Scheduler::plan_prompts(double now) {
  int limit = options_.max_step_tokens;  // of prompt rows in this step, for the class at hand and those below
  int n_scored = plan_.n_draft_rows;     // their logits are wanted too
  Priority at = Priority::interactive;
  bool limit_is_set = false;
  for (Task* task : order_) {
    if (task->state != Task::State::running || task->n_left() <= 1) continue;
    if (!limit_is_set || task->priority != at) {
      at = task->priority;
      limit = std::min(limit, prompt_rows_beside_decodes(at));
      limit_is_set = true;
    }
    const int budget = options_.max_step_tokens - plan_.n_decode_rows - plan_.n_prompt_rows;
    int n_new = std::min(limit - plan_.n_prompt_rows, budget);
    // Whoever got nothing for long gets a little: others may keep promises for ever.
    if (n_new <= 0 && now - task->last_step > options_.ageing_seconds) n_new = std::min(kMinChunk, budget);
    n_new = std::min(n_new, task->n_left());
    if (task->scores_prompt) n_new = std::min(n_new, options_.max_scored_rows - n_scored);
    if (n_new <= 0) continue;
    // A chunk that is not the last ends on a multiple of kMinChunk rows, which kernels like.
    if (n_new > kMinChunk && n_new < task->n_left()) n_new -= (task->sequence.n_computed + n_new) % kMinChunk;
    if (!take_pages(*task, n_new, now)) continue;
    if (task->scores_prompt) n_scored += n_new;
    plan_.items.push_back({task, n_new, true});
    plan_.n_prompt_rows += n_new;
    // While this prompt is read, those of lower classes only get the time that its first token can spare.
    const double target = options_.targets[index(task->priority)].first_token_seconds;
    if (target > 0.0 && task->last_token < 0.0 && pace_.row_seconds() > 0.0) {
      const double spare = task->submitted + kLargestAim * target - now - task->n_left() * pace_.row_seconds();
      const double rows = std::clamp(spare / 2.0 / pace_.row_seconds(), 0.0, double{1 << 20});
      limit = std::min(limit, plan_.n_prompt_rows + static_cast<int>(rows));
    }
  }
}

}  // namespace cachalot
