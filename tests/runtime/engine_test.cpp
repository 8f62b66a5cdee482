// The engine's thread: queues with limits, cancellation, callbacks that call back, and an orderly end. No test waits for a time to pass.
#include "runtime/engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <latch>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

// Steps of the stub wait here until they are let through.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  // Returns once a step has come to the gate.
  void await_step() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return n_steps_ > 0; });
  }
  std::function<void(double)> sleep() {
    return [this](double) {
      std::unique_lock lock(mutex_);
      ++n_steps_;
      changed_.notify_all();
      changed_.wait(lock, [&] { return open_; });
    };
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int n_steps_ = 0;
  bool open_ = false;
};

// Collects events; wait() returns once `n` requests have ended.
class Receiver {
 public:
  Engine::OnEvent callback() {
    return [this](const TokenEvent& e) {
      const std::lock_guard lock(mutex_);
      events.push_back(e);
      n_ended_ += e.finish != FinishReason::none;
      changed_.notify_all();
    };
  }
  void wait(int n) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return n_ended_ >= n; });
  }
  [[nodiscard]] int count(FinishReason reason) const {
    return static_cast<int>(std::count_if(events.begin(), events.end(), [&](const TokenEvent& e) { return e.finish == reason; }));
  }
  std::vector<TokenEvent> events;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int n_ended_ = 0;
};

Refused::Reason refusal(Engine& engine, Request request) {
  try {
    engine.submit(std::move(request), {});
  } catch (const Refused& refused) {
    EXPECT_FALSE(std::string(refused.what()).empty());
    return refused.reason;
  }
  ADD_FAILURE() << "the request was taken";
  return {};
}

// On a model that runs one step at a time, and on one that starts a step before the one before has ended.
class EngineTest : public testing::TestWithParam<bool> {
 protected:
  static std::unique_ptr<Engine> make(const EngineOptions& options, StubOptions stub = {}) {
    stub.follows = GetParam();
    return make_stub_engine(options, std::move(stub));
  }
};

TEST_P(EngineTest, StubRepeatsThePromptAndCountsItsTokens) {
  Receiver receiver;
  const auto engine = make({.max_requests = 2});
  std::atomic<int> n_steps = 0;
  engine->after_step([&] { ++n_steps; });
  engine->submit({.prompt = {7, 8, 9}}, receiver.callback());
  receiver.wait(1);
  ASSERT_EQ(receiver.events.size(), 4u);
  EXPECT_EQ(receiver.events[1].token, 8);
  EXPECT_TRUE(receiver.events[3].is_end_token);
  EXPECT_EQ(receiver.events[3].finish, FinishReason::stop);
  EXPECT_EQ(receiver.events[3].usage.n_prompt, 3);
  EXPECT_EQ(receiver.events[3].usage.n_output, 4);
  EXPECT_EQ(engine->info().eos_ids, std::vector<int>{1});
  EXPECT_GE(n_steps, 3);
}

TEST_P(EngineTest, RefusesWhatCannotRun) {
  const auto engine = make({.max_context = 16});
  EXPECT_EQ(refusal(*engine, {}), Refused::Reason::invalid);
  EXPECT_EQ(refusal(*engine, {.prompt = {1, 2000}}), Refused::Reason::invalid);
  EXPECT_EQ(refusal(*engine, {.prompt = {-1}}), Refused::Reason::invalid);
  EXPECT_EQ(refusal(*engine, {.prompt = std::vector<int>(16, 5)}), Refused::Reason::too_long);
  engine->close();
  EXPECT_EQ(refusal(*engine, {.prompt = {5}}), Refused::Reason::shutting_down);
}

TEST_P(EngineTest, AFullQueueRefusesAtOnce) {
  Gate gate;
  Receiver receiver;
  EngineOptions options{.max_requests = 1};
  options.targets[0].max_waiting = 4;
  const auto engine = make(options, {.step_seconds = 1.0, .sleep = gate.sleep()});
  int n_taken = 0, n_refused = 0;
  for (int i = 0; i < 20; ++i) {
    try {
      engine->submit({.prompt = {5, 6}}, receiver.callback());
      ++n_taken;
    } catch (const Refused& refused) {
      EXPECT_EQ(refused.reason, Refused::Reason::queue_full);
      EXPECT_GE(refused.retry_after_seconds, 1.0);
      ++n_refused;
    }
  }
  EXPECT_EQ(n_taken, 5);
  EXPECT_EQ(n_refused, 15);
  engine->submit({.prompt = {5}, .priority = Priority::batch}, receiver.callback());  // a queue of its own
  gate.await_step();
  const EngineStats stats = engine->stats();
  EXPECT_EQ(stats.classes[0].refused, 15);
  EXPECT_GT(stats.last_step_age_seconds, 0.0);
  gate.open();
  receiver.wait(6);
  EXPECT_EQ(receiver.count(FinishReason::stop), 6);
}

TEST_P(EngineTest, CancelEndsARequestWhereverItIs) {
  Gate gate;
  Receiver receiver;
  const auto engine = make({.max_requests = 1}, {.step_seconds = 1.0, .sleep = gate.sleep()});
  const RequestId running = engine->submit({.prompt = {5, 6, 7}}, receiver.callback());
  gate.await_step();
  const RequestId waiting = engine->submit({.prompt = {5, 6, 7}}, receiver.callback());
  engine->cancel(waiting);
  engine->cancel(running);
  engine->cancel(12345);
  gate.open();
  receiver.wait(2);
  EXPECT_EQ(receiver.count(FinishReason::cancelled), 2);
  engine->cancel(running);  // has ended: nothing happens
  const RequestId third = engine->submit({.prompt = {9}}, receiver.callback());
  receiver.wait(3);
  EXPECT_EQ(receiver.events.back().request, third);
  EXPECT_EQ(receiver.events.back().finish, FinishReason::stop);
}

TEST_P(EngineTest, CallbacksMaySubmitAndCancel) {
  Receiver receiver;
  std::atomic<int> n_tokens = 0;
  const auto engine = make({.max_requests = 2});
  engine->submit({.prompt = {5, 6, 7, 8, 9}, .ignore_eos = true}, [&](const TokenEvent& e) {
    if (e.finish != FinishReason::none) {
      EXPECT_EQ(e.finish, FinishReason::cancelled);
      engine->submit({.prompt = {3}}, receiver.callback());
    } else if (++n_tokens == 3) {
      engine->cancel(e.request);
    }
  });
  receiver.wait(1);
  EXPECT_EQ(receiver.events.back().finish, FinishReason::stop);
}

TEST_P(EngineTest, AReceiverThatThrowsLosesItsRequestOnly) {
  Receiver receiver;
  const auto engine = make({.max_requests = 2});
  engine->submit({.prompt = {5, 6, 7, 8, 9}}, [](const TokenEvent&) { throw std::runtime_error("the client is gone"); });
  engine->submit({.prompt = {5, 6, 7, 8, 9}}, receiver.callback());
  receiver.wait(1);
  EXPECT_EQ(receiver.events.back().finish, FinishReason::stop);
}

TEST_P(EngineTest, TheDestructorEndsEveryRequest) {
  Gate gate;
  Receiver receiver;
  auto engine = make({.max_requests = 2}, {.step_seconds = 1.0, .sleep = gate.sleep()});
  for (int i = 0; i < 5; ++i) engine->submit({.prompt = {5, 6}, .ignore_eos = true}, receiver.callback());
  gate.await_step();
  std::thread end([&] { engine.reset(); });
  gate.open();
  end.join();
  // Those that were quick enough may have come to their end.
  EXPECT_EQ(receiver.count(FinishReason::cancelled) + receiver.count(FinishReason::length), 5);
}

TEST_P(EngineTest, ManyThreadsSubmitAndCancel) {
  Receiver receiver;
  constexpr int kThreads = 4, kEach = 200;
  const auto engine = make({.max_requests = 8, .max_step_tokens = 32});
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < kEach; ++i) {
        const RequestId id = engine->submit(
            {.prompt = std::vector<int>(static_cast<size_t>(1 + (i * 7 + t) % 40), 2 + i % 5), .max_tokens = 20}, receiver.callback());
        if (i % 5 == 0) engine->cancel(id);
        (void)engine->stats();
      }
    });
  for (std::thread& t : threads) t.join();
  receiver.wait(kThreads * kEach);
  EXPECT_EQ(receiver.count(FinishReason::stop) + receiver.count(FinishReason::length) + receiver.count(FinishReason::cancelled),
            kThreads * kEach);
}

INSTANTIATE_TEST_SUITE_P(Steps, EngineTest, testing::Values(false, true),
                         [](const auto& param) { return param.param ? "ahead" : "one_by_one"; });

}  // namespace
}  // namespace cachalot::test
