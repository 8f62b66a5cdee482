// Scheduler: which requests run, and how many rows of a step each of them gets. Integers only: no View, no stream, no clock of its own.
//
// Every step has one budget of rows. Requests that are generating get theirs first, prompts are read in chunks beside them. The order is
// class (P0 first), then arrival; whoever lost its place comes before those of its class that never had one. A request takes the place of
// the newest one of a lower class when there is no room; equals never do. When pages run out, the newest request of the lowest class
// yields, so the oldest of the highest class always moves. A request that has waited long counts as more urgent, is let in before the
// others and then keeps its place for a while, so the lowest class always moves too.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "cachalot/engine.h"
#include "runtime/block_pool.h"
#include "runtime/pace.h"
#include "runtime/sequence.h"

namespace cachalot {

struct SchedulerOptions {
  int max_requests = 16;      // running at the same time
  int max_step_tokens = 512;  // rows of a step; at least max_requests
  int max_scored_rows = 64;   // of them, prompt rows whose logits are wanted
  bool prefix_cache = true;
  ClassTargets targets[kPriorities];
  int n_host_blocks = 0;         // pages in host memory, for those that lose their place
  double move_seconds = 0.0;     // that moving a page to the host takes, and back again
  double ageing_seconds = 20.0;  // a request that waited so long counts as one class more urgent
  double ageing_quantum = 1.0;   // seconds for which it then keeps its place
};

// A request as the scheduler sees it.
struct Task {
  // Set by the owner before add().
  RequestId id = 0;
  Priority priority = Priority::interactive;
  double submitted = 0.0;
  Sequence sequence;  // the prompt; the owner appends the tokens that are drawn
  int n_prompt = 0;   // tokens
  int max_total = 0;  // tokens of prompt and answer; never more than the pool holds
  bool use_prefix_cache = true;
  bool scores_prompt = false;  // the logits of all rows are wanted; the owner clears it once it has those of the prompt
  std::string salt;
  std::vector<int> draft;  // guesses of the tokens behind the last one; a step may run them too
  bool leaves = false;     // takes part in no further step; to be removed when n_steps is 0

  // Set by the scheduler.
  enum class State : uint8_t { outside, waiting, running };
  State state = State::outside;
  int64_t arrival = 0;
  int n_steps = 0;      // planned steps that it is part of, and that were neither committed nor abandoned
  int n_cached = 0;     // of the prompt, tokens that came from the prefix cache when it first got a place
  int n_preempted = 0;  // times that it lost its place
  double first_step = -1.0, last_step = -1.0, last_token = -1.0;  // when
  double waiting_since = 0.0, protected_until = 0.0;
  int n_published = 0;  // blocks that the prefix cache knows
  bool publishes = true;
  std::vector<int> host_blocks;  // where its first n_swapped rows are while it has no place
  int n_swapped = 0;
  int n_lost = 0;  // rows that it had when it lost its place

  [[nodiscard]] int n_output() const { return sequence.n_tokens() - n_prompt; }
  [[nodiscard]] int n_left() const { return sequence.n_tokens() - sequence.n_computed; }  // rows to run
};

// Rows of a page that are to be copied before the step runs, in this order: from block to block, or to and from pages in host memory.
struct PageCopy {
  enum class Kind : uint8_t { within, to_host, from_host };
  int from = 0, to = 0, n_rows = 0;
  Kind kind = Kind::within;
};

struct StepPlan {
  struct Item {
    Task* task = nullptr;
    int n_new = 0;           // the task's next rows; when it generates: its last token, and some of its draft
    bool is_prompt = false;  // not its last row alone
  };
  std::vector<Item> items;
  std::vector<PageCopy> copies;
  int n_decode_rows = 0, n_prompt_rows = 0;
  int n_draft_rows = 0;  // of the first
};

class Scheduler {
 public:
  Scheduler(BlockPool& pool, const SchedulerOptions& options);

  void add(Task& task, double now);
  // Takes a task out, wherever it is; its rows stay known to the prefix cache. Not while a step has it.
  void remove(Task& task);
  [[nodiscard]] bool has_work() const { return n_waiting_ > 0 || !running_.empty(); }

  // Decides on a step, and takes pages for its rows. commit() or abandon() must follow.
  const StepPlan& plan(double now);
  // While that step runs: the one behind it, when it is certain to be one more row of each task of the running step that has tokens left,
  // however those tokens turn out. Otherwise, as when others wait or pages are short, null; commit() comes first then. At most one.
  const StepPlan* follow(double now);
  // The step ran, and n_computed of its tasks has grown. One that follows it is the running one now.
  void commit(double step_seconds);
  // The step failed. The plan is forgotten; its tasks are to be removed.
  void abandon() { close_plan(); }
  // A token came at that time: a promise was kept or broken.
  void count_token(Task& task, double now);

  struct ClassCounts {
    int waiting = 0, running = 0;
    int64_t preempted = 0, promises_kept = 0, promises_broken = 0;
  };
  [[nodiscard]] const ClassCounts& counts(Priority priority) const { return counts_[index(priority)]; }
  [[nodiscard]] int n_waiting() const { return n_waiting_; }
  [[nodiscard]] int n_running() const { return static_cast<int>(running_.size()); }
  // Rows of tasks that lost their place: those to be computed again, since no cache had them, and those that came back from the host.
  [[nodiscard]] int64_t n_recomputed() const { return n_recomputed_; }
  [[nodiscard]] int64_t n_swapped() const { return n_swapped_; }
  [[nodiscard]] const SchedulerOptions& options() const { return options_; }
  [[nodiscard]] const Pace& pace() const { return pace_; }

  // Slow: looks at every page.
  void check_invariants() const;

 private:
  struct Match {  // what the prefix cache has of a task
    std::vector<int> blocks;
    BlockPool::Partial partial;
    int n_revived = 0;  // of these, free ones
  };

  static constexpr double kLargestAim = 0.9;  // of a target, since costs are estimates

  struct Aim {
    double share = kLargestAim;  // of the target between tokens: how long steps beside this class may be expected to take
    double lowered = -1.0;       // when
  };

  static size_t index(Priority priority) { return static_cast<size_t>(priority); }
  [[nodiscard]] int blocks_of(int n_tokens) const { return blocks_for(n_tokens, pool_.block_tokens()); }
  [[nodiscard]] bool caches(const Task& task) const { return options_.prefix_cache && task.use_prefix_cache; }

  void admit(double now);
  bool try_admit(Task& task, bool may_take_free_place, double now);
  [[nodiscard]] Priority effective_priority(const Task& task, double now) const;
  [[nodiscard]] int expected_total(const Task& task) const;
  [[nodiscard]] Match match(const Task& task) const;
  void start(Task& task, const Match& match, double now);
  enum class Why : uint8_t { place, pages };  // what somebody else needs
  void preempt(Task& task, Why why, double now);
  // The cost model: whether rows are better kept in host memory than computed again.
  [[nodiscard]] bool swap_is_cheaper(const Task& task, Why why) const;
  void swap_out(Task& task);
  void swap_in(Task& task);
  void forget_swapped(Task& task);
  void give_back_pages(Task& task);
  void publish(Task& task);
  void enqueue(Task& task);
  void leave(Task& task);  // waiting queue or running list

  void close_plan();
  void plan_decodes(double now);
  void plan_drafts();
  void plan_prompts(double now);
  [[nodiscard]] int prompt_rows_beside_decodes(Priority priority) const;
  static void learn_aim(Aim& aim, bool kept, double now);
  bool take_pages(Task& task, int n_new, double now);
  [[nodiscard]] Task* memory_victim(double now) const;

  BlockPool& pool_;
  SchedulerOptions options_;
  Pace pace_;
  std::deque<Task*> waiting_[kPriorities];  // in order
  std::vector<Task*> running_;              // in order
  std::vector<Task*> order_;                // a copy of it, while it changes
  StepPlan plan_, next_plan_;
  bool plan_is_open_ = false;       // between plan() and commit()
  bool next_plan_is_open_ = false;  // follow() gave it
  ClassCounts counts_[kPriorities];
  Aim aims_[kPriorities];
  double output_estimate_[kPriorities];  // tokens of an answer
  int n_waiting_ = 0;
  int64_t next_arrival_ = 0, n_recomputed_ = 0, n_swapped_ = 0;
  std::vector<int> free_host_blocks_;
};

}  // namespace cachalot
