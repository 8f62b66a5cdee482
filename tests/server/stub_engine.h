// An Engine without a model, for tests and load measurements: every running request gets its next scripted token in each step.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "cachalot/engine.h"

namespace cachalot::test {

constexpr int kImpossible = -2;  // as a scripted token: the request turns out to ask for what cannot be

struct StubOptions {
  EngineInfo info{.model = "stub", .vocab = 512, .max_context = 4096, .max_requests = 64, .eos_ids = {}};
  int max_waiting = 1024;                    // of each class
  std::chrono::microseconds step_period{0};  // 0: as fast as it goes
  bool held = false;                         // no step until release()
  // The i-th token of the answer to a request, -1 where it ends, or kImpossible.
  std::function<int(const Request&, int i)> script = [](const Request&, int i) { return i < 8 ? 'a' + i : -1; };
};

class StubEngine : public Engine {
 public:
  explicit StubEngine(StubOptions options);
  ~StubEngine() override;

  RequestId submit(Request request, OnEvent on_event) override;
  void cancel(RequestId request) override;
  void close() override;
  void after_step(std::function<void()> hook) override { hook_ = std::move(hook); }
  [[nodiscard]] EngineStats stats() const override;
  [[nodiscard]] const EngineInfo& info() const override { return options_.info; }

  void hold();     // after this no step begins ...
  void release();  // ... until this
  // How many requests wait or run now, and how many were ever cancelled.
  [[nodiscard]] int open_requests() const;
  [[nodiscard]] int64_t cancelled() const {
    return stats().classes[0].cancelled + stats().classes[1].cancelled + stats().classes[2].cancelled;
  }
  [[nodiscard]] std::vector<Request> seen() const;  // all that was submitted, when options allow to keep it

  bool keep_seen = false;

 private:
  struct Running {
    Request request;
    OnEvent on_event;
    int n_output = 0;
    std::atomic<bool> cancelled = false;  // set under the lock, read by the loop without it
    std::chrono::steady_clock::time_point submitted, first;
  };
  void loop();
  void step(std::unique_lock<std::mutex>& lock);

  StubOptions options_;
  std::function<void()> hook_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::map<RequestId, std::shared_ptr<Running>> running_;
  std::deque<std::pair<RequestId, std::shared_ptr<Running>>> waiting_[kPriorities];
  EngineStats stats_;
  std::vector<Request> seen_;
  std::chrono::steady_clock::time_point last_step_ = std::chrono::steady_clock::now();
  RequestId next_ = 1;
  bool closed_ = false, stopping_ = false;
  std::thread thread_;
};

}  // namespace cachalot::test
