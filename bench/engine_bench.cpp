// What the engine itself costs: CPU time per step beside the model, for many sequences that decode together on a model that costs nothing.
//   bench_engine [sequences [steps]]
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <vector>

#include "runtime/engine_core.h"

namespace {

double thread_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

struct Case {
  const char* name;
  cachalot::SamplingOptions sampling;
  bool prefix_cache;
};

void measure(const Case& c, int n_sequences, int n_steps) {
  using namespace cachalot;
  StubOptions stub{.vocab = 32000, .max_context = 16384, .max_requests = n_sequences, .max_step_tokens = n_sequences + 512};
  stub.answer_tokens = stub.max_context;
  double now = 0.0;
  EngineCore core(make_stub_model(stub), {.prefix_cache = c.prefix_cache}, [&] { return now += 1e-6; });
  int n_reading = n_sequences;
  for (int i = 0; i < n_sequences; ++i) {
    Request request{.sampling = c.sampling, .ignore_eos = true};
    for (int k = 0; k < 200; ++k) request.prompt.push_back(2 + (i * 7919 + k * 104729) % 30000);
    core.add(
        i + 1, std::move(request),
        [&n_reading, first = true](const TokenEvent&) mutable {
          n_reading -= first;
          first = false;
        },
        now);
  }
  while (n_reading > 0) core.step();
  std::vector<double> seconds;
  for (int s = 0; s < n_steps; ++s) {
    const double before = thread_seconds();
    core.step();
    seconds.push_back(thread_seconds() - before);
  }
  std::sort(seconds.begin(), seconds.end());
  const auto at = [&](double share) { return seconds[static_cast<size_t>(share * static_cast<double>(seconds.size() - 1))] * 1e6; };
  fmt::print("{:<24} {:5} sequences   median {:7.1f} us   p99 {:7.1f} us a step\n", c.name, n_sequences, at(0.5), at(0.99));
}

}  // namespace

int main(int argc, char** argv) {
  const int n_sequences = argc > 1 ? std::atoi(argv[1]) : 256, n_steps = argc > 2 ? std::atoi(argv[2]) : 2000;
  if (n_sequences < 1 || n_steps < 1 || n_steps > 10000) {
    fmt::print(stderr, "usage: bench_engine [sequences [steps, at most 10000]]\n");
    return 2;
  }
  measure({"plain", {}, true}, n_sequences, n_steps);
  measure({"no prefix cache", {}, false}, n_sequences, n_steps);
  measure({"penalties", {.frequency = 0.5f}, true}, n_sequences, n_steps);
  measure({"5 logprobs", {.n_logprobs = 5}, true}, n_sequences, n_steps);
}
