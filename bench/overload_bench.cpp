// Promises under overload, on a real model and real time: urgent requests (P0) among batch (P1) and best-effort ones (P2) at twice what
// the machine can do, once with classes, once first come, first served, and urgent ones alone. What is promised with classes is twice the
// 99th percentile of urgent ones alone, for first tokens and for gaps between tokens.
//   bench_overload MODEL [seconds [device]]
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <random>
#include <thread>

#include "cachalot/engine.h"

namespace {

using namespace cachalot;
using Clock = std::chrono::steady_clock;

constexpr int kUrgentPrompt = 48, kUrgentTokens = 16, kOtherPrompt = 96, kOtherTokens = 32;  // an urgent one is half the work
constexpr double kPromise = 2.0;

EngineOptions engine_options(const std::string& device, const ClassTargets& urgent) {
  EngineOptions options{.device = device, .max_context = 512, .max_requests = 8, .max_step_tokens = 256};
  options.targets[0] = urgent;
  for (ClassTargets& t : options.targets) t.max_waiting = 1 << 20;
  return options;
}

struct Outcome {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<double> first_token, gap;  // seconds, of urgent requests; those without a token yet count when it comes
  int n_done[kPriorities] = {};
  EngineStats stats;
};

double quantile(std::vector<double>& values, double share) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0.0 : values[static_cast<size_t>(share * static_cast<double>(values.size() - 1))];
}

class Load {
 public:
  explicit Load(Engine& engine) : engine_(engine) {}
  // `kind`: what the request is; `priority`: what the engine is told.
  void submit(Priority kind, Priority priority, Outcome& outcome) {
    const bool urgent = kind == Priority::interactive;
    Request request{.max_tokens = urgent ? kUrgentTokens : kOtherTokens, .ignore_eos = true, .priority = priority};
    for (int n = urgent ? kUrgentPrompt : kOtherPrompt; n > 0; --n)
      request.prompt.push_back(2 + static_cast<int>(random_() % static_cast<unsigned>(engine_.info().vocab - 2)));
    engine_.submit(std::move(request), [&outcome, kind, urgent, before = Clock::now(), first = true](const TokenEvent& e) mutable {
      const std::lock_guard lock(outcome.mutex);
      const auto now = Clock::now();
      if (urgent && e.token >= 0)
        (first ? outcome.first_token : outcome.gap).push_back(std::chrono::duration<double>(now - before).count());
      before = now;
      first = false;
      outcome.n_done[static_cast<int>(kind)] += e.finish == FinishReason::length;
      if (e.finish != FinishReason::none) outcome.changed.notify_one();
    });
  }

 private:
  Engine& engine_;
  std::mt19937 random_{7};
};

double capacity(const std::string& model, const std::string& device) {
  constexpr int kRequests = 48;
  Outcome outcome;
  const auto engine = open_engine(model, engine_options(device, {}));
  Load load(*engine);
  const auto start = Clock::now();
  for (int i = 0; i < kRequests; ++i) load.submit(Priority::batch, Priority::batch, outcome);
  std::unique_lock lock(outcome.mutex);
  outcome.changed.wait(lock, [&] { return outcome.n_done[1] == kRequests; });
  return kRequests / std::chrono::duration<double>(Clock::now() - start).count();
}

// Share of first tokens and of gaps that a promise would have been kept for.
double share_within(const Outcome& outcome, const ClassTargets& promise) {
  const auto within = [](const std::vector<double>& values, double most) {
    return std::count_if(values.begin(), values.end(), [&](double v) { return v <= most; });
  };
  const auto kept = within(outcome.first_token, promise.first_token_seconds) + within(outcome.gap, promise.token_gap_seconds);
  return static_cast<double>(kept) / static_cast<double>(outcome.first_token.size() + outcome.gap.size());
}

// Returns the 99th percentiles.
ClassTargets run(const char* name, const std::string& model, const std::string& device, double seconds, double urgent_rate,
                 double other_rate, bool classes, const ClassTargets& targets, Outcome& outcome) {
  auto engine = open_engine(model, engine_options(device, targets));
  Load load(*engine);
  std::mt19937 random(3);
  std::exponential_distribution<double> wait;
  const auto next = [&](double rate) { return rate > 0.0 ? wait(random) / rate : 1e9; };
  double urgent_at = next(urgent_rate), other_at = next(other_rate);
  const auto start = Clock::now();
  for (int n = 0; std::min(urgent_at, other_at) < seconds; ++n) {
    const bool urgent = urgent_at < other_at;
    std::this_thread::sleep_until(
        start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(urgent_at, other_at))));
    const Priority kind = urgent ? Priority::interactive : n % 2 == 0 ? Priority::batch : Priority::best_effort;
    load.submit(kind, classes ? kind : Priority::interactive, outcome);
    (urgent ? urgent_at : other_at) += next(urgent ? urgent_rate : other_rate);
  }
  outcome.stats = engine->stats();
  engine.reset();
  const ClassStats& c = outcome.stats.classes[0];
  const ClassTargets p99{.first_token_seconds = quantile(outcome.first_token, 0.99), .token_gap_seconds = quantile(outcome.gap, 0.99)};
  fmt::print(
      "{:<12} P0 first token p50 {:8.1f} p99 {:8.1f} ms of {:4}, gap p50 {:6.1f} p99 {:6.1f} ms   promises kept {:6} broken {:4}   done P0 "
      "{:4} P1 {:4} P2 {:4}   pre-empted {}\n",
      name, quantile(outcome.first_token, 0.5) * 1e3, p99.first_token_seconds * 1e3, outcome.first_token.size(),
      quantile(outcome.gap, 0.5) * 1e3, p99.token_gap_seconds * 1e3, c.promises_kept, c.promises_broken, outcome.n_done[0],
      outcome.n_done[1], outcome.n_done[2], outcome.stats.classes[1].preempted + outcome.stats.classes[2].preempted);
  return p99;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    fmt::print(stderr, "usage: bench_overload MODEL [seconds [device]]\n");
    return 2;
  }
  const std::string model = argv[1], device = argc > 3 ? argv[3] : "cpu";
  const double seconds = argc > 2 ? std::atof(argv[2]) : 20.0;
  const double rate = capacity(model, device);
  fmt::print("capacity {:.2f} requests/s of {} + {} tokens; P0 takes a fifth of it, P1 and P2 together nine fifths\n", rate, kOtherPrompt,
             kOtherTokens);
  Outcome undisturbed, mixed, ordered;
  const ClassTargets alone = run("P0 alone", model, device, seconds, 0.4 * rate, 0.0, true, {}, undisturbed);
  const ClassTargets promise{.first_token_seconds = kPromise * alone.first_token_seconds,
                             .token_gap_seconds = kPromise * alone.token_gap_seconds};
  const ClassTargets classes = run("classes", model, device, seconds, 0.4 * rate, 1.8 * rate, true, promise, mixed);
  const ClassTargets in_order = run("first come", model, device, seconds, 0.4 * rate, 1.8 * rate, false, {}, ordered);
  fmt::print(
      "promised: first token {:.1f} ms, gap {:.1f} ms; p99 of first tokens {:.2f} times that of P0 alone, in order of arrival {:.1f} "
      "times\n",
      promise.first_token_seconds * 1e3, promise.token_gap_seconds * 1e3, classes.first_token_seconds / alone.first_token_seconds,
      in_order.first_token_seconds / alone.first_token_seconds);
  // What the machine itself breaks, by pausing: nothing that classes could keep.
  fmt::print("within that promise: P0 alone {:.2f}%, with classes {:.2f}%, in order of arrival {:.2f}%\n",
             100.0 * share_within(undisturbed, promise), 100.0 * share_within(mixed, promise), 100.0 * share_within(ordered, promise));
}
