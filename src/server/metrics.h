// Counters and histograms in Prometheus' text form: under the names that dashboards and gateways read (vllm:*), and by class with finer
// edges (cachalot:*). Recording takes no lock: it happens for every token.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cachalot/engine.h"
#include "server/http_server.h"
#include "server/job.h"

namespace cachalot::server {

class Histogram {
 public:
  explicit Histogram(std::span<const double> edges) : edges_(edges.begin(), edges.end()), buckets_(edges.size() + 1) {}
  void observe(double value);
  // Lines of one series: `labels` without braces.
  void append(std::string& out, std::string_view name, std::string_view labels) const;
  [[nodiscard]] int64_t count() const;

 private:
  std::vector<double> edges_;
  std::vector<std::atomic<int64_t>> buckets_;
  std::atomic<double> sum_{0.0};
};

class Metrics {
 public:
  Metrics();
  void on_first_token(Priority priority, double seconds);
  void on_token_gap(Priority priority, double seconds);
  void on_end(const JobReport& report);
  void on_http(int status);

  // `engine` may be null while the model loads.
  [[nodiscard]] std::string text(const Engine* engine, const std::string& model, int block_tokens, const HttpCounts& http, bool live) const;

 private:
  struct PerClass {
    PerClass();
    Histogram first_token, token_gap, queue;
    std::atomic<int64_t> requests{0}, prompt_tokens{0}, output_tokens{0};
  };
  static constexpr std::array<const char*, 5> kReasons = {"stop", "length", "abort", "error", "tool_calls"};

  std::array<PerClass, kPriorities> classes_;
  Histogram first_token_, token_gap_, time_per_token_, total_, queue_, inference_, prefill_, decode_, prompt_tokens_, output_tokens_,
      max_tokens_, n_;
  std::array<std::atomic<int64_t>, kReasons.size()> finished_{};
  std::array<std::atomic<int64_t>, 6> http_{};  // by hundreds
  std::atomic<int64_t> rejected_{0};
};

}  // namespace cachalot::server
