// Arrivals on this thread, events on the engine's.
#include "cli/bench_traffic.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <random>
#include <thread>

#include "cli/svg_plot.h"

namespace cachalot {
namespace {

using Clock = std::chrono::steady_clock;

double seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

struct Watched {
  Priority priority = Priority::interactive;
  Clock::time_point arrival, last;
  bool started = false;
};

Priority draw_class(const std::array<double, kPriorities>& mix, std::mt19937_64& rng) {
  double at = std::uniform_real_distribution<double>(0.0, mix[0] + mix[1] + mix[2])(rng);
  for (int c = 0; c + 1 < kPriorities; ++c) {
    if (at < mix[static_cast<size_t>(c)]) return static_cast<Priority>(c);
    at -= mix[static_cast<size_t>(c)];
  }
  return Priority::best_effort;
}

}  // namespace

ClassTraffic TrafficResult::all() const {
  ClassTraffic out;
  for (const ClassTraffic& c : classes) {
    out.n_finished += c.n_finished;
    out.n_failed += c.n_failed;
    out.first_token.insert(out.first_token.end(), c.first_token.begin(), c.first_token.end());
    out.gaps.insert(out.gaps.end(), c.gaps.begin(), c.gaps.end());
  }
  std::sort(out.first_token.begin(), out.first_token.end());
  std::sort(out.gaps.begin(), out.gaps.end());
  return out;
}

TrafficResult run_traffic(Engine& engine, const TrafficOptions& options) {
  std::mt19937_64 rng(options.seed);
  // Ordinary tokens: the first and last few of a vocabulary are often control tokens.
  const int vocab = engine.info().vocab, low = std::min(vocab / 2, 256);
  std::uniform_int_distribution<int> any_token(low, std::max(low, vocab - vocab / 8 - 1));
  std::vector<int> shared(static_cast<size_t>(options.n_shared));
  for (int& t : shared) t = any_token(rng);

  TrafficResult result;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Watched> watched(static_cast<size_t>(options.n_requests));
  int n_left = options.n_requests;
  Clock::time_point end{};
  const auto start = Clock::now();
  double due = 0.0;
  for (int i = 0; i < options.n_requests; ++i) {
    Request request;
    request.prompt = shared;
    while (static_cast<int>(request.prompt.size()) < options.n_prompt) request.prompt.push_back(any_token(rng));
    request.sampling.temperature = 0.0f;
    request.max_tokens = options.n_output;
    request.ignore_eos = true;
    request.priority = draw_class(options.mix, rng);
    if (options.rate > 0.0) {
      due += std::exponential_distribution<double>(options.rate)(rng);
      std::this_thread::sleep_until(start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(due)));
    }
    Watched& w = watched[static_cast<size_t>(i)];
    ClassTraffic& load = result.classes[static_cast<size_t>(request.priority)];
    w.priority = request.priority;
    w.arrival = Clock::now();
    try {
      engine.submit(std::move(request), [&](const TokenEvent& event) {
        const auto now = Clock::now();
        const std::lock_guard lock(mutex);
        if (event.token >= 0) {
          (w.started ? load.gaps : load.first_token).push_back(seconds(now - (w.started ? w.last : w.arrival)));
          w.started = true;
          w.last = now;
          ++result.output_tokens;
        }
        if (event.finish == FinishReason::none) return;
        const bool failed = event.finish == FinishReason::error || event.finish == FinishReason::timeout;
        ++(failed ? load.n_failed : load.n_finished);
        result.prompt_tokens += event.usage.n_prompt;
        result.cached_tokens += event.usage.n_cached;
        end = now;
        --n_left;
        changed.notify_one();
      });
    } catch (const Refused&) {
      const std::lock_guard lock(mutex);
      ++load.n_failed;
      --n_left;
    }
  }
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return n_left == 0; });
  result.seconds = seconds(end - start);
  for (ClassTraffic& c : result.classes) {
    std::sort(c.first_token.begin(), c.first_token.end());
    std::sort(c.gaps.begin(), c.gaps.end());
  }
  return result;
}

double quantile(const std::vector<double>& sorted, double q) {
  if (sorted.empty()) return 0.0;
  const auto at = static_cast<size_t>(std::ceil(q * static_cast<double>(sorted.size())));
  return sorted[std::min(sorted.size(), std::max<size_t>(at, 1)) - 1];
}

std::string traffic_picture(std::vector<TrafficPoint> points, const std::string& title, const std::string& latency_name) {
  using Anchor = SvgPlot::Anchor;
  SvgPlot out(720, 410, title);
  double most_x = 0.0, most_y = 0.0;
  for (const TrafficPoint& p : points) {
    most_x = std::max(most_x, p.throughput);
    most_y = std::max(most_y, 1e3 * p.latency);
  }
  most_x = most_x > 0.0 ? 1.1 * most_x : 1.0;
  most_y = most_y > 0.0 ? 1.1 * most_y : 1.0;
  const auto x = [&](double v) { return out.left + v / most_x * (out.right - out.left); };
  const auto y = [&](double v) { return out.bottom - v / most_y * (out.bottom - out.top); };
  const double step_x = tick_step(most_x, 6), step_y = tick_step(most_y, 6);
  for (int i = 0; i * step_x <= most_x; ++i) {
    out.line("grid", x(i * step_x), out.top, x(i * step_x), out.bottom);
    out.text(x(i * step_x), out.bottom + 18, Anchor::middle, fmt::format("{:g}", i * step_x));
  }
  for (int i = 0; i * step_y <= most_y; ++i) {
    out.line("grid", out.left, y(i * step_y), out.right, y(i * step_y));
    out.text(out.left - 8, y(i * step_y) + 4, Anchor::end, fmt::format("{:g}", i * step_y));
  }
  out.line("axis", out.left, out.top, out.left, out.bottom);
  out.line("axis", out.left, out.bottom, out.right, out.bottom);
  out.text(out.left, 20, Anchor::start, title);
  out.text((out.left + out.right) / 2, 402, Anchor::middle, "output tokens/s");
  out.upright_text(16, (out.top + out.bottom) / 2, latency_name + ", ms");
  std::sort(points.begin(), points.end(), [](const TrafficPoint& a, const TrafficPoint& b) { return a.latency < b.latency; });
  for (const TrafficPoint& p : points) out.point(x(p.throughput), y(1e3 * p.latency), p.name);
  return out.finish();
}

}  // namespace cachalot
