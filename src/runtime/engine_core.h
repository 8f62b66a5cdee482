// EngineCore: the engine without its thread. Each step() asks the scheduler for a plan, runs it on the model, and turns the drawn tokens
// into events. Where the model can do so and the plan is certain, the step behind it is started first, so that the model need not wait.
// Integers and host memory only, with the time given by a clock, so that it can be simulated.
#pragma once

#include <functional>
#include <memory>
#include <queue>
#include <string>
#include <unordered_map>
#include <vector>

#include "cachalot/engine.h"
#include "runtime/scheduler.h"
#include "runtime/step_model.h"

namespace cachalot {

struct CoreOptions {
  bool prefix_cache = true;
  ClassTargets targets[kPriorities];
  enum class Speculation : uint8_t { off, ngram, mtp };
  Speculation speculation = Speculation::off;
  int max_draft_tokens = 4;
  double ageing_seconds = 20.0, ageing_quantum = 1.0;
  bool check_invariants = false;  // in every step: slow
};

// What is wrong with a request, as an exception; otherwise nothing happens. For the caller of EngineCore::add().
void check_request(const Request& request, const EngineInfo& info);

class EngineCore {
 public:
  using Clock = std::function<double()>;  // seconds
  EngineCore(std::unique_ptr<StepModel> model, const CoreOptions& options, Clock clock);
  ~EngineCore();

  // The request has passed check_request(). `submitted` in the clock's time.
  void add(RequestId id, Request request, Engine::OnEvent on_event, double submitted);
  void cancel(RequestId id);
  void cancel_all();
  [[nodiscard]] bool has_work() const { return !live_.empty() || !pending_.empty() || running_.is_open; }
  // Passes on what has happened, and runs one step when there is something to run. Callbacks must not call back into this object.
  void step();
  void after_step(std::function<void()> hook) { after_step_ = std::move(hook); }

  [[nodiscard]] const EngineInfo& info() const { return info_; }
  [[nodiscard]] EngineStats stats() const;  // `refused` and last_step_age_seconds are the caller's to know
  [[nodiscard]] double seconds_per_request() const { return seconds_per_request_; }  // between ends of requests; 0: unknown
  [[nodiscard]] const BlockPool& pool() const { return pool_; }
  [[nodiscard]] const Scheduler& scheduler() const { return scheduler_; }

 private:
  struct Live;
  struct Pending {
    Live* live;
    TokenEvent event;
  };
  struct Deadline {
    double when;
    RequestId request;
    bool operator>(const Deadline& other) const { return when > other.when; }
  };

  void expire(double now);
  void start(double now);
  void follow(double now);
  void finish();
  void take_rows();
  [[nodiscard]] int draft_length(const Live& live) const;
  void propose_drafts();
  void want_rows(Live& live, const StepPlan::Item& item);
  void forget_drafts();
  void learn_guesses();
  [[nodiscard]] SampleParams params_of(Live& live, int ahead) const;
  void take_row(Live& live, int position, Sampled sampled, double now);
  void take_token(Live& live, Sampled sampled, double now);
  void end(Live& live, TokenEvent event, FinishReason reason, double now);
  void let_go(bool ran, double now);
  void fail_step(const char* why, double now);
  void flush();

  std::unique_ptr<StepModel> model_;
  CoreOptions options_;
  Clock clock_;
  EngineInfo info_;
  BlockPool pool_;
  Scheduler scheduler_;
  std::unordered_map<RequestId, std::unique_ptr<Live>> live_;
  std::vector<std::unique_ptr<Live>> ended_;  // until their events are passed on
  std::vector<Pending> pending_;
  std::vector<RequestId> unwanted_;  // to be cancelled before the next step
  std::priority_queue<Deadline, std::vector<Deadline>, std::greater<>> deadlines_;
  std::function<void()> after_step_;
  EngineStats stats_;
  double last_end_ = -1.0, seconds_per_request_ = 0.0;
  double further_guess_seconds_ = 0.0;  // that the prediction layer takes for one more guess of all requests

  // A step between its plan and its tokens.
  struct Flight {
    struct Item {
      Live* live;
      int first, n_rows, n_draft;  // position of the first row; rows, and guesses among them
    };
    struct Row {
      Live* live;
      int position;  // of the row; its logits are about the token after it
      int ahead;     // guessed tokens between the text's last one and this row, itself included
    };
    std::vector<Item> items;
    std::vector<Row> rows;  // those that a token is drawn from
    double started = 0.0;
    bool is_open = false;  // its plan was neither committed nor abandoned
    std::string error;     // why it could not be started

    void open(double now) {
      items.clear(), rows.clear(), error.clear();
      started = now;
      is_open = true;
    }
  };
  Flight running_, next_;  // next_: enqueued behind it
  double last_finish_ = 0.0;
  std::vector<StepItem> items_;
  std::vector<StepModel::Follower> followers_;
  std::vector<StepModel::GuessItem> guess_items_;
  std::vector<std::vector<int>> guesses_;
  std::vector<SampleParams> params_;
  std::vector<TokenBias> scored_;  // one per row of params_ that scores a prompt token
  std::vector<Sampled> sampled_;
};

}  // namespace cachalot
