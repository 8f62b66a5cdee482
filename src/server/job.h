// A request under way: its choices run in the engine, their tokens become text here, and the writer makes the answer of it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/answer_writer.h"
#include "server/event_hub.h"
#include "server/exchange.h"
#include "server/service.h"

namespace cachalot::server {

// What became of a request, for the log, the metrics and the client's limits.
class Job;
struct JobReport {
  const Job* job;
  const Exchange* exchange;
  Priority priority;
  bool streamed;
  int status;          // of the HTTP answer
  std::string reason;  // finish reason of the first choice, or "error"
  TokenUse use;        // of all choices
  int n = 1, max_tokens = -1;
  int requested = 1;  // choices that the request asked for, whether or not all were submitted
  double queued_seconds, first_token_seconds, seconds;
  std::vector<std::string> reasons;  // of every choice
};

class JobObserver {
 public:
  virtual ~JobObserver() = default;
  virtual void on_first_token(Priority priority, double seconds) = 0;
  virtual void on_token_gap(Priority priority, double seconds) = 0;
  virtual void on_end(const JobReport& report) = 0;
};

class Job : public EventSink, public std::enable_shared_from_this<Job> {
 public:
  Job(const Service& service, EventHub& hub, JobObserver& observer, std::shared_ptr<Exchange> exchange, Prepared prepared,
      std::unique_ptr<AnswerWriter> writer);

  // Submits every choice. Throws ApiError when the engine refuses: nothing of the request then runs on, and nothing was sent.
  void start();
  void on_event(int choice, const TokenEvent& event) override;
  // Ends with what there is: streams get finish_reason "abort" and a proper end.
  void abort();
  void post_abort();  // the same, from any thread
  // Ends with an error, which is made on its own thread; a stream with an error event. Any thread.
  void post_failure(ApiError (*make)());

 private:
  void take_token(Choice& choice, const TokenEvent& event);
  void settle(Choice& choice, FinishReason reason, const RequestUsage& usage);
  void send(Choice& choice);
  void complete();
  void fail(const ApiError& error);
  [[noreturn]] void give_up(const ApiError& error);  // before anything was sent
  void cancel_all();
  void report(int status, const std::string& reason);
  [[nodiscard]] TokenUse total() const;

  const Service& service_;
  EventHub& hub_;
  JobObserver& observer_;
  std::shared_ptr<Exchange> exchange_;    // null once the answer is complete or the client is gone
  const std::shared_ptr<Exchange> home_;  // the same, for its I/O thread
  Prepared prepared_;
  std::unique_ptr<AnswerWriter> writer_;
  std::vector<Choice> choices_;
  size_t n_done_ = 0;
  bool ended_ = false;
  Priority priority_ = Priority::interactive;
  Clock::time_point started_, last_token_;
  bool any_token_ = false;
  Delta delta_;
  std::string out_;
};

}  // namespace cachalot::server
