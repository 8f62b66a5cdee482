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

#include "cli/xml_text.h"

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

std::string traffic_picture(const std::vector<TrafficPoint>& points, const std::string& title, const std::string& latency_name) {
  constexpr double kWidth = 720, kHeight = 420, kLeft = 80, kRight = 40, kTop = 50, kBottom = 60;
  double most_x = 0.0, most_y = 0.0;
  for (const TrafficPoint& p : points) {
    most_x = std::max(most_x, p.throughput);
    most_y = std::max(most_y, p.latency);
  }
  most_x = most_x > 0.0 ? 1.15 * most_x : 1.0;
  most_y = most_y > 0.0 ? 1.15 * most_y : 1.0;
  const auto x = [&](double v) { return kLeft + v / most_x * (kWidth - kLeft - kRight); };
  const auto y = [&](double v) { return kHeight - kBottom - v / most_y * (kHeight - kTop - kBottom); };
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" font-family=\"system-ui, "
      "sans-serif\" font-size=\"12\">\n"
      "<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n<text x=\"{2}\" y=\"28\" font-size=\"15\">{3}</text>\n",
      kWidth, kHeight, kLeft, xml_escaped(title));
  for (int i = 0; i <= 5; ++i) {
    const double vx = most_x * i / 5, vy = most_y * i / 5;
    out += fmt::format(
        "<line x1=\"{0:.1f}\" y1=\"{1:.1f}\" x2=\"{0:.1f}\" y2=\"{2:.1f}\" stroke=\"#ddd\"/><text x=\"{0:.1f}\" y=\"{3:.1f}\" "
        "text-anchor=\"middle\">{4:.4g}</text>\n",
        x(vx), y(0), y(most_y), y(0) + 18, vx);
    out += fmt::format(
        "<line x1=\"{0:.1f}\" y1=\"{1:.1f}\" x2=\"{2:.1f}\" y2=\"{1:.1f}\" stroke=\"#ddd\"/><text x=\"{3:.1f}\" y=\"{4:.1f}\" "
        "text-anchor=\"end\">{5:.4g}</text>\n",
        x(0), y(vy), x(most_x), x(0) - 8, y(vy) + 4, 1e3 * vy);
  }
  out +=
      fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">output tokens/s</text>\n", (x(0) + x(most_x)) / 2, kHeight - 16);
  out += fmt::format("<text transform=\"translate(20 {:.1f}) rotate(-90)\" text-anchor=\"middle\">{}, ms</text>\n", (y(0) + y(most_y)) / 2,
                     xml_escaped(latency_name));
  for (const TrafficPoint& p : points)
    out += fmt::format("<circle cx=\"{0:.1f}\" cy=\"{1:.1f}\" r=\"4.5\" fill=\"#0b5c7d\"/><text x=\"{2:.1f}\" y=\"{3:.1f}\">{4}</text>\n",
                       x(p.throughput), y(p.latency), x(p.throughput) + 8, y(p.latency) - 6, xml_escaped(p.name));
  return out + "</svg>\n";
}

}  // namespace cachalot
