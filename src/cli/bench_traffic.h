// Load on an engine: requests of random tokens, all at once or arriving at random times, and what became of them.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cachalot/engine.h"

namespace cachalot {

struct TrafficOptions {
  int n_requests = 64;
  int n_prompt = 256, n_output = 128;                  // tokens of each request
  int n_shared = 0;                                    // of the prompt, the same in all requests
  double rate = 0.0;                                   // arrivals a second, with exponentially distributed gaps; 0: all at once
  std::array<double, kPriorities> mix{1.0, 0.0, 0.0};  // shares of the classes
  uint64_t seed = 42;
};

struct ClassTraffic {
  int n_finished = 0, n_failed = 0;       // refused requests count as failed
  std::vector<double> first_token, gaps;  // seconds, sorted
};

struct TrafficResult {
  double seconds = 0.0;  // from the first arrival to the last token
  int64_t prompt_tokens = 0, cached_tokens = 0, output_tokens = 0;
  std::array<ClassTraffic, kPriorities> classes;
  [[nodiscard]] ClassTraffic all() const;
};
TrafficResult run_traffic(Engine& engine, const TrafficOptions& options);

// The value that a share q of the sorted values does not exceed; 0 when there are none.
double quantile(const std::vector<double>& sorted, double q);

// Points (throughput in tokens/s, latency in seconds) of named settings as an SVG picture.
struct TrafficPoint {
  std::string name;
  double throughput = 0.0, latency = 0.0;
};
std::string traffic_picture(std::vector<TrafficPoint> points, const std::string& title, const std::string& latency_name);

}  // namespace cachalot
