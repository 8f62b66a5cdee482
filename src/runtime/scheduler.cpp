// Scheduler: queues, admission, pre-emption, and what the prefix cache gives and gets. scheduler_plan.cpp fills a step.
#include "runtime/scheduler.h"

#include <algorithm>
#include <limits>

#include "base/check.h"

namespace cachalot {
namespace {

constexpr double kFirstOutputEstimate = 256.0;  // tokens, until answers have been seen
constexpr double kEstimateWeight = 0.1;
constexpr int kMinPartialTokens = 4;  // fewer rows are not worth a copy

bool runs_before(const Task* a, const Task* b) { return a->priority != b->priority ? a->priority < b->priority : a->arrival < b->arrival; }
// Within a class.
bool waits_before(const Task* a, const Task* b) {
  const bool a_new = a->n_preempted == 0, b_new = b->n_preempted == 0;
  return a_new != b_new ? b_new : a->arrival < b->arrival;
}

}  // namespace

Scheduler::Scheduler(BlockPool& pool, const SchedulerOptions& options) : pool_(pool), options_(options) {
  CACHALOT_CHECK(options.max_requests > 0 && options.max_step_tokens >= options.max_requests, "{} rows for {} requests",
                 options.max_step_tokens, options.max_requests);
  for (int b = options.n_host_blocks - 1; b >= 0; --b) free_host_blocks_.push_back(b);
  std::fill(std::begin(output_estimate_), std::end(output_estimate_), kFirstOutputEstimate);
}

void Scheduler::add(Task& task, double now) {
  CACHALOT_CHECK(task.state == Task::State::outside && task.sequence.n_tokens() > 0);
  CACHALOT_CHECK(task.max_total >= task.sequence.n_tokens() && blocks_of(task.max_total) <= pool_.n_blocks(), "{} tokens can never fit",
                 task.max_total);
  task.arrival = next_arrival_++;
  task.waiting_since = task.last_step = now;
  enqueue(task);
}

void Scheduler::enqueue(Task& task) {
  auto& queue = waiting_[index(task.priority)];
  queue.insert(std::upper_bound(queue.begin(), queue.end(), &task, waits_before), &task);
  task.state = Task::State::waiting;
  ++n_waiting_;
  ++counts_[index(task.priority)].waiting;
}

void Scheduler::leave(Task& task) {
  if (task.state == Task::State::waiting) {
    auto& queue = waiting_[index(task.priority)];
    queue.erase(std::find(queue.begin(), queue.end(), &task));
    --n_waiting_;
    --counts_[index(task.priority)].waiting;
  } else if (task.state == Task::State::running) {
    CACHALOT_CHECK(task.n_steps == 0, "request {} is part of a step", task.id);
    running_.erase(std::find(running_.begin(), running_.end(), &task));
    --counts_[index(task.priority)].running;
    std::erase_if(plan_.items, [&](const StepPlan::Item& item) {
      if (item.task != &task) return false;
      (item.is_prompt ? plan_.n_prompt_rows : plan_.n_decode_rows) -= item.n_new;
      return true;
    });
  }
  task.state = Task::State::outside;
}

void Scheduler::remove(Task& task) {
  if (task.state == Task::State::running && task.n_output() > 0) {
    double& estimate = output_estimate_[index(task.priority)];
    estimate += kEstimateWeight * (task.n_output() - estimate);
  }
  leave(task);
  give_back_pages(task);
  forget_swapped(task);
}

// Makes full blocks known. An equal block that is known already takes the place of the task's own, so that equal prefixes are kept once.
void Scheduler::publish(Task& task) {
  const int block_tokens = pool_.block_tokens();
  Sequence& s = task.sequence;
  while (task.publishes && (task.n_published + 1) * block_tokens <= s.n_computed) {
    const auto i = static_cast<size_t>(task.n_published);
    const BlockPool::Parent parent = i == 0 ? pool_.make_root(task.salt) : s.blocks[i - 1];
    const auto known = pool_.publish(parent, s.blocks[i],
                                     std::span(s.tokens).subspan(i * static_cast<size_t>(block_tokens), static_cast<size_t>(block_tokens)));
    task.publishes = known.has_value();
    if (!known) return;
    if (*known != s.blocks[i]) {
      pool_.share(*known);
      pool_.drop(s.blocks[i]);
      s.blocks[i] = *known;
    }
    ++task.n_published;
  }
}

void Scheduler::give_back_pages(Task& task) {
  const int block_tokens = pool_.block_tokens();
  Sequence& s = task.sequence;
  if (caches(task)) {
    publish(task);
    // The last, incomplete page: the next turn of a conversation goes on from it.
    const int begin = task.n_published * block_tokens, n_rows = std::min(s.n_computed - begin, block_tokens);
    if (task.publishes && n_rows >= kMinPartialTokens && n_rows < block_tokens) {
      const auto rows = std::span(s.tokens).subspan(static_cast<size_t>(begin), static_cast<size_t>(n_rows));
      const auto i = static_cast<size_t>(task.n_published);
      const BlockPool::Parent parent = i == 0 ? pool_.make_root(task.salt) : s.blocks[i - 1];
      if (pool_.find_partial(parent, rows).n_same < n_rows) pool_.publish(parent, s.blocks[i], rows);
    }
  }
  for (; !s.blocks.empty(); s.blocks.pop_back()) pool_.drop(s.blocks.back());
  s.n_computed = 0;
  task.n_published = 0;
}

Scheduler::Match Scheduler::match(const Task& task) const {
  Match m;
  if (!caches(task) || task.scores_prompt) return m;
  const auto block_tokens = static_cast<size_t>(pool_.block_tokens());
  // The last token is always run, since its logits are wanted.
  const auto tokens = std::span(task.sequence.tokens).first(task.sequence.tokens.size() - 1);
  BlockPool::Parent parent = pool_.find_root(task.salt);
  size_t begin = 0;
  for (; begin + block_tokens <= tokens.size(); begin += block_tokens) {
    const auto block = pool_.find(parent, tokens.subspan(begin, block_tokens));
    if (!block) break;
    m.blocks.push_back(*block);
    m.n_revived += pool_.holders(*block) == 0;
    parent = *block;
  }
  m.partial = pool_.find_partial(parent, tokens.subspan(begin));
  if (m.partial.n_same < kMinPartialTokens) m.partial = {};
  return m;
}

Priority Scheduler::effective_priority(const Task& task, double now) const {
  const auto steps = static_cast<int>(std::max(0.0, now - task.waiting_since) / options_.ageing_seconds);
  if (steps == 0) return task.priority;
  for (const Task* r : running_)
    if (r->protected_until > now) return task.priority;  // one at a time
  return static_cast<Priority>(std::max(0, static_cast<int>(task.priority) - steps));
}

int Scheduler::expected_total(const Task& task) const {
  const int expected = std::max(static_cast<int>(output_estimate_[index(task.priority)]), task.n_output() + pool_.block_tokens());
  return std::min(task.max_total, task.n_prompt + expected);
}

void Scheduler::admit(double now) {
  bool tried[kPriorities] = {};
  bool blocked = false;  // somebody in front waits for room: what is free is kept for it
  for (;;) {
    Task* best = nullptr;
    Priority best_priority = Priority::best_effort;
    for (size_t c = 0; c < kPriorities; ++c) {
      if (tried[c] || waiting_[c].empty()) continue;
      Task* head = waiting_[c].front();
      const Priority priority = effective_priority(*head, now);
      if (best == nullptr || priority < best_priority || (priority == best_priority && head->arrival < best->arrival))
        best = head, best_priority = priority;
    }
    if (best == nullptr) return;
    if (try_admit(*best, !blocked, now)) {
      if (best_priority < best->priority) best->protected_until = now + options_.ageing_quantum;
    } else {
      tried[index(best->priority)] = true;
      blocked = true;
    }
  }
}

bool Scheduler::try_admit(Task& task, bool may_take_free_place, double now) {
  const auto may_yield = [&](const Task* r) { return r->priority > task.priority && r->protected_until <= now; };
  const bool place_is_free = may_take_free_place && n_running() < options_.max_requests;
  if (!place_is_free && std::none_of(running_.begin(), running_.end(), may_yield)) return false;

  // Pages: those that this task is expected to need, beside what tasks at least as urgent are expected to grow by.
  const Match m = match(task);
  const int needed = blocks_of(expected_total(task)) - static_cast<int>(m.blocks.size()) + pool_.n_blocks() / 100;
  int available = pool_.n_free() - m.n_revived;
  for (const Task* r : running_)
    if (r->priority <= task.priority) available -= std::max(0, blocks_of(expected_total(*r)) - static_cast<int>(r->sequence.blocks.size()));

  const int available_at_first = available;
  std::vector<Task*> victims;
  const auto has_room = [&] {
    const int n_left = n_running() - static_cast<int>(victims.size());
    return (place_is_free || !victims.empty()) && n_left < options_.max_requests && (available >= needed || n_left == 0);
  };
  for (auto r = running_.rbegin(); r != running_.rend() && !has_room(); ++r) {
    if (!may_yield(*r)) continue;
    victims.push_back(*r);
    for (const int block : (*r)->sequence.blocks)
      available += pool_.holders(block) == 1 && std::find(m.blocks.begin(), m.blocks.end(), block) == m.blocks.end();
  }
  if (!has_room()) return false;
  // Whoever makes room in a full pool will not find its pages again.
  const Why why = available_at_first >= needed ? Why::place : Why::pages;
  for (Task* victim : victims) preempt(*victim, why, now);
  leave(task);
  start(task, victims.empty() ? m : match(task), now);
  return true;
}

void Scheduler::start(Task& task, const Match& m, double now) {
  task.state = Task::State::running;
  running_.insert(std::upper_bound(running_.begin(), running_.end(), &task, runs_before), &task);
  ++counts_[index(task.priority)].running;
  task.last_step = now;
  task.publishes = caches(task);
  Sequence& s = task.sequence;
  for (const int block : m.blocks) pool_.share(block);
  s.blocks = m.blocks;
  task.n_published = static_cast<int>(m.blocks.size());
  s.n_computed = task.n_published * pool_.block_tokens();
  if (m.partial.n_same > 0) {
    pool_.share(m.partial.block);  // not to be taken for the copy
    if (const auto copy = pool_.take()) {
      plan_.copies.push_back({m.partial.block, *copy, m.partial.n_same});
      s.blocks.push_back(*copy);
      s.n_computed += m.partial.n_same;
    }
    pool_.drop(m.partial.block);
  }
  swap_in(task);
  if (task.first_step < 0.0) {
    task.first_step = now;
    task.n_cached = std::min(s.n_computed, task.n_prompt);
  }
  n_recomputed_ += std::max(0, task.n_lost - s.n_computed);
  task.n_lost = 0;
}

bool Scheduler::swap_is_cheaper(const Task& task, Why why) const {
  const int n_rows = task.sequence.n_computed, n_blocks = blocks_of(n_rows);
  if (n_rows == 0 || n_blocks > static_cast<int>(free_host_blocks_.size())) return false;
  if (why == Why::place && caches(task)) return false;  // its pages stay where they are for a while
  return n_blocks * options_.move_seconds < n_rows * pace_.row_seconds();
}

void Scheduler::swap_out(Task& task) {
  const Sequence& s = task.sequence;
  const int block_tokens = pool_.block_tokens();
  forget_swapped(task);
  for (int begin = 0; begin < s.n_computed; begin += block_tokens) {
    const int to = free_host_blocks_.back(), from = s.blocks[static_cast<size_t>(begin / block_tokens)];
    free_host_blocks_.pop_back();
    task.host_blocks.push_back(to);
    plan_.copies.push_back({from, to, std::min(block_tokens, s.n_computed - begin), PageCopy::Kind::to_host});
  }
  task.n_swapped = s.n_computed;
}

// After the prefix cache gave what it has.
void Scheduler::swap_in(Task& task) {
  Sequence& s = task.sequence;
  const int block_tokens = pool_.block_tokens();
  if (task.n_swapped > s.n_computed) {
    if (s.n_computed % block_tokens != 0) {  // the copy of a page that is begun anew
      pool_.drop(s.blocks.back());
      s.blocks.pop_back();
    }
    const auto n_kept = static_cast<int>(s.blocks.size());
    s.n_computed = n_kept * block_tokens;
    for (int i = n_kept; i < static_cast<int>(task.host_blocks.size()); ++i) {
      const auto block = pool_.take();
      if (!block) break;
      const int n_rows = std::min(block_tokens, task.n_swapped - i * block_tokens);
      plan_.copies.push_back({task.host_blocks[static_cast<size_t>(i)], *block, n_rows, PageCopy::Kind::from_host});
      s.blocks.push_back(*block);
      s.n_computed += n_rows;
      n_swapped_ += n_rows;
    }
  }
  forget_swapped(task);
}

void Scheduler::forget_swapped(Task& task) {
  free_host_blocks_.insert(free_host_blocks_.end(), task.host_blocks.begin(), task.host_blocks.end());
  task.host_blocks.clear();
  task.n_swapped = 0;
}

void Scheduler::preempt(Task& task, Why why, double now) {
  task.n_lost = std::max(task.n_lost, task.sequence.n_computed);
  if (swap_is_cheaper(task, why)) swap_out(task);
  leave(task);
  give_back_pages(task);
  ++task.n_preempted;
  ++counts_[index(task.priority)].preempted;
  task.waiting_since = now;
  enqueue(task);
}

void Scheduler::count_token(Task& task, double now) {
  const ClassTargets& targets = options_.targets[index(task.priority)];
  const bool is_first = task.last_token < 0.0;
  const double target = is_first ? targets.first_token_seconds : targets.token_gap_seconds;
  if (target > 0.0) {
    ClassCounts& counts = counts_[index(task.priority)];
    const bool kept = now - (is_first ? task.submitted : task.last_token) <= target;
    ++(kept ? counts.promises_kept : counts.promises_broken);
    if (!is_first) learn_aim(aims_[index(task.priority)], kept, now);
  }
  task.last_token = now;
}

// Steps take longer than expected now and then, on some machines more than on others. A broken promise outweighs 8,000 kept ones, so about
// one in as many is broken, unless the machine pauses whatever it is given to do: hence a least aim.
void Scheduler::learn_aim(Aim& aim, bool kept, double now) {
  constexpr double kLeastAim = 0.4, kLower = 0.85, kRaise = 1.00002;
  if (kept) {
    aim.share = std::min(kLargestAim, kRaise * aim.share);
  } else if (now > aim.lowered) {  // once for all the tokens of a step
    aim = {std::max(kLeastAim, kLower * aim.share), now};
  }
}

void Scheduler::check_invariants() const {
  pool_.check_invariants();
  std::vector<int> held(static_cast<size_t>(pool_.n_blocks()), 0);
  CACHALOT_CHECK(n_running() <= options_.max_requests && std::is_sorted(running_.begin(), running_.end(), runs_before));
  for (const Task* r : running_) {
    const Sequence& s = r->sequence;
    CACHALOT_CHECK(r->state == Task::State::running && s.n_computed <= s.n_tokens() && s.n_tokens() <= r->max_total);
    CACHALOT_CHECK(blocks_of(s.n_computed) <= static_cast<int>(s.blocks.size()) &&
                   static_cast<int>(s.blocks.size()) <= blocks_of(r->max_total));
    for (const int block : s.blocks) ++held[static_cast<size_t>(block)];
    for (int i = 0; i < r->n_published; ++i) CACHALOT_CHECK(pool_.published(s.blocks[static_cast<size_t>(i)]));
  }
  int n_waiting = 0, n_host = static_cast<int>(free_host_blocks_.size());
  for (const auto& queue : waiting_) {
    CACHALOT_CHECK(std::is_sorted(queue.begin(), queue.end(), waits_before));
    for (const Task* w : queue)
      CACHALOT_CHECK(w->state == Task::State::waiting && w->sequence.blocks.empty() && w->sequence.n_computed == 0);
    for (const Task* w : queue) n_host += static_cast<int>(w->host_blocks.size());
    n_waiting += static_cast<int>(queue.size());
  }
  CACHALOT_CHECK(n_waiting == n_waiting_);
  CACHALOT_CHECK(n_host == options_.n_host_blocks, "{} pages in host memory, of {}", n_host, options_.n_host_blocks);
  for (int b = 0; b < pool_.n_blocks(); ++b)
    CACHALOT_CHECK(pool_.holders(b) >= held[static_cast<size_t>(b)], "block {} has {} holders and is in {} tables", b, pool_.holders(b),
                   held[static_cast<size_t>(b)]);
  for (const StepPlan* plan : {plan_is_open_ ? &plan_ : nullptr, next_plan_is_open_ ? &next_plan_ : nullptr}) {
    if (plan == nullptr) continue;
    int n_rows = 0;
    for (const StepPlan::Item& item : plan->items) {
      n_rows += item.n_new;
      CACHALOT_CHECK(item.task->state == Task::State::running && item.n_new > 0 && item.task->n_steps > 0);
    }
    CACHALOT_CHECK(n_rows <= options_.max_step_tokens && n_rows == plan->n_decode_rows + plan->n_prompt_rows, "{} rows", n_rows);
  }
}

}  // namespace cachalot
