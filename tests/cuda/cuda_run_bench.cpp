// Whole runs on a GPU on random models of a published shape.
//   cuda_run_bench run SHAPE FORMAT BATCH IN OUT         through the engine, and step by step through the runner; SHAPE v2-lite, v2; FORMAT
//                                                        bf16, int4_planar, q4_k, fp8_block
//   cuda_run_bench run FILE file BATCH IN OUT            a model's own weights, for comparison with other programs
//   cuda_run_bench engine SHAPE FORMAT IN OUT BATCH...   the engine's steps, enqueued ahead and one by one, beside the same without it
//   cuda_run_bench sample                                what drawing tokens costs
#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#include "base/error.h"
#include "cuda/cuda_ops.h"
#include "cuda/random_model.h"
#include "ops/random_weights.h"
#include "runtime/engine.h"
#include "runtime/memory_plan.h"

namespace cachalot::test {
namespace {

using Clock = std::chrono::steady_clock;
double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

struct Loaded {
  std::unique_ptr<Ops> ops = make_cuda_ops();
  Config config;
  Decoder decoder;
};

Loaded load(const std::string& shape, const std::string& format) {
  Loaded m;
  std::unique_ptr<Checkpoint> checkpoint;
  if (format == "file") {
    checkpoint = Checkpoint::open(shape);
  } else {
    const auto found = format_of_name(format);
    if (!found) fail("format {}", format);
    checkpoint = std::make_unique<RandomCheckpoint>(shape_config(shape), *found);
  }
  m.config = read_config(*checkpoint);
  const auto start = Clock::now();
  m.decoder = Decoder::load(*checkpoint, m.config, *m.ops, {.max_positions = 8192});
  std::printf("%s in %s: %.2f GB of weights, loaded in %.1f s\n", shape.c_str(), format.c_str(),
              static_cast<double>(m.decoder.weight_bytes()) * 1e-9, since(start));
  return m;
}

int tokens_of(const Loaded& m) { return std::min(m.config.vocab, 100000); }  // ordinary ones

struct RunResult {
  double total = 0.0, first = 0.0;
  std::vector<double> steps;  // seconds of each later step, its sampling included
};

// Step by step: each waits for the tokens of the one before.
RunResult run_once(Loaded& m, Runner& runner, KvCache& cache, int batch, int n_in, int n_out, const SampleParams& params) {
  std::vector<Sequence> sequences(static_cast<size_t>(batch));
  // Every token is drawn here: those that a random model samples repeat, and with them the experts.
  auto next_token = [state = 7u, n = tokens_of(m)]() mutable {
    return static_cast<int>(((state = state * 1664525u + 1013904223u) >> 8) % static_cast<unsigned>(n));
  };
  for (Sequence& s : sequences) {
    for (int i = 0; i < n_in; ++i) s.tokens.push_back(next_token());
    if (!cache.reserve(s, n_in + n_out)) fail("the cache is too small");
  }
  RunResult result;
  std::vector<Sampled> sampled(sequences.size());
  const auto take = [&](const View& logits) {
    std::vector<SampleParams> all(sequences.size(), params);
    for (size_t i = 0; i < all.size(); ++i) all[i].step = static_cast<uint64_t>(sequences[i].n_tokens()), all[i].seed = i;
    m.ops->sample(logits, all, sampled);
    for (Sequence& s : sequences) s.tokens.push_back(next_token());
  };
  const auto start = Clock::now();
  // Prompts by the step's budget; a sequence that has read its prompt waits for the others.
  const int budget = runner.limits().max_tokens;
  for (size_t i = 0; i < sequences.size();) {
    std::vector<StepItem> items;
    int rows = 0;
    const size_t begin = i;
    while (i < sequences.size() && rows + n_in <= budget) rows += n_in, items.push_back({&sequences[i++], n_in, WantLogits::last});
    const StepResult step = runner.step(items);
    std::vector<SampleParams> all(items.size(), params);
    std::vector<Sampled> out(items.size());
    m.ops->sample(step.logits, all, out);
    for (size_t k = 0; k < items.size(); ++k) sequences[begin + k].tokens.push_back(next_token());
  }
  result.first = since(start);
  for (int n = 1; n < n_out; ++n) {
    const auto begin = Clock::now();
    std::vector<StepItem> items;
    for (Sequence& s : sequences) items.push_back({&s, 1, WantLogits::last});
    take(runner.step(items).logits);
    result.steps.push_back(since(begin));
  }
  result.total = since(start);
  for (Sequence& s : sequences) cache.release(s);
  return result;
}

// As the product runs: from submit() to the last token, each step started before the host has the tokens of the one before, and every token
// drawn. With equal seeds requests would draw equal tokens, and their rows meet equal experts.
RunResult run_engine(Engine& engine, int n_tokens, int batch, int n_in, int n_out, unsigned seed) {
  std::vector<Request> requests(static_cast<size_t>(batch));
  for (Request& r : requests) {
    r = {.sampling = {.seed = seed}, .max_tokens = n_out, .ignore_eos = true};
    for (int i = 0; i < n_in; ++i)
      r.prompt.push_back(static_cast<int>(((seed = seed * 1664525u + 1013904223u) >> 8) % static_cast<unsigned>(n_tokens)));
  }
  std::mutex mutex;
  std::condition_variable changed;
  RunResult result;
  std::string problem;
  int started = 0, ended = 0;
  Clock::time_point start, last;  // the latter of the first request
  const auto on_token = [&](const TokenEvent& e, bool is_first_request, bool is_first_token) {
    const std::lock_guard lock(mutex);
    if (is_first_token && ++started == batch) result.first = since(start);
    if (is_first_request) {
      if (!is_first_token) result.steps.push_back(since(last));
      last = Clock::now();
    }
    if (e.finish == FinishReason::none) return;
    if (e.finish != FinishReason::length) problem = name_of(e.finish) + (" " + e.error);
    if (++ended < batch) return;
    result.total = since(start);
    changed.notify_one();
  };
  // Submitted on the engine's thread, behind another request's token, so that one step reads as many prompts as it may.
  engine.submit({.prompt = {0}, .max_tokens = 1, .ignore_eos = true}, [&](const TokenEvent& opening) {
    if (opening.finish == FinishReason::none) return;
    start = Clock::now();
    for (size_t r = 0; r < requests.size(); ++r)
      engine.submit(std::move(requests[r]), [&on_token, r, n = 0](const TokenEvent& e) mutable { on_token(e, r == 0, n++ == 0); });
  });
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return ended == batch; });
  if (!problem.empty()) fail("batch {}: a request ended by {}", batch, problem);
  return result;
}

void report(RunResult r, const std::string& how, int batch, int n_in, int n_out) {
  std::sort(r.steps.begin(), r.steps.end());
  const double median = r.steps.empty() ? 0.0 : r.steps[r.steps.size() / 2], slowest = r.steps.empty() ? 0.0 : r.steps.back();
  std::printf(
      "batch %d, %d in, %d out, %s: %.3f s, %.0f output tok/s over the whole run; first tokens after %.1f ms, then %.3f ms a step "
      "(median; slowest %.2f), %.0f tok/s\n",
      batch, n_in, n_out, how.c_str(), r.total, batch * n_out / r.total, r.first * 1e3, median * 1e3, slowest * 1e3, batch / median);
}

void bench_run(const std::string& shape, const std::string& format, int batch, int n_in, int n_out) {
  Loaded m = load(shape, format);
  const RunnerLimits limits{
      .max_tokens = std::max(n_in, std::min(8192, batch * n_in)), .max_seqs = batch, .max_logits = batch, .max_sequence = n_in + n_out};
  auto start = Clock::now();
  const MemoryPlan plan = plan_memory(*m.ops, m.decoder, limits, KvFormat::bf16, 64, shape == "v2" ? 0.97 : 0.9);
  std::printf("planned in %.2f s: %s\n", since(start), plan.text().c_str());
  const int n_blocks = std::min(plan.n_blocks, batch * ((n_in + n_out + 63) / 64) + 1);
  {
    const DecoderModelOptions options{.name = shape,
                                      .max_context = n_in + n_out,
                                      .max_requests = batch,
                                      .max_step_tokens = limits.max_tokens,
                                      .block_tokens = 64,
                                      .n_blocks = n_blocks,
                                      .kv_format = KvFormat::bf16};
    const auto engine = make_engine(make_decoder_model(*m.ops, m.decoder, options), EngineOptions{.prefix_cache = false});
    for (const unsigned seed : {1u, 2u, 3u})
      report(run_engine(*engine, tokens_of(m), batch, n_in, n_out, seed), "engine", batch, n_in, n_out);
  }
  KvCache cache(*m.ops, m.config, KvFormat::bf16, 64, n_blocks);
  Runner runner(*m.ops, m.decoder, cache, limits);
  start = Clock::now();
  runner.rehearse();
  const size_t before = m.ops->memory().free;
  const int n_graphs = runner.record_graphs();
  std::printf("%d graphs in %.2f s, %.1f MB\n", n_graphs, since(start), static_cast<double>(before - m.ops->memory().free) * 1e-6);
  const SampleParams greedy{.temperature = 0.0f}, usual{.temperature = 0.6f, .top_p = 0.95f};
  for (const auto& [name, params] : {std::pair("greedy", greedy), std::pair("T 0.6, top-p 0.95", usual), std::pair("greedy", greedy)})
    report(run_once(m, runner, cache, batch, n_in, n_out, params), std::string("step by step, ") + name, batch, n_in, n_out);
  std::printf("%lld steps replayed %s\n", static_cast<long long>(runner.n_replayed()), runner.graph_problem().c_str());
  const MemorySize memory = m.ops->memory();
  std::printf("memory: %.2f of %.2f GB in use\n", static_cast<double>(memory.total - memory.free) * 1e-9,
              static_cast<double>(memory.total) * 1e-9);
}

// Seconds between the tokens of one request, while all `batch` requests generate.
std::vector<double> engine_gaps(Loaded& m, const DecoderModelOptions& options, int batch, int n_in, int n_out, const SampleParams& params) {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Clock::time_point> last_one;  // tokens of the request that began last
  int started = 0, ended = 0;
  Clock::time_point first_end;
  std::string problem;
  const auto engine = make_engine(make_decoder_model(*m.ops, m.decoder, options), EngineOptions{.prefix_cache = false});
  for (int r = 0; r < batch; ++r) {
    // With equal seeds requests would draw equal tokens, and their rows meet equal experts.
    Request request{
        .sampling = {.temperature = params.temperature, .seed = static_cast<uint64_t>(r)}, .max_tokens = n_out, .ignore_eos = true};
    for (int i = 0; i < n_in; ++i) request.prompt.push_back((r * 7919 + i * 104729) % tokens_of(m));
    engine->submit(std::move(request), [&, n = 0, last = false](const TokenEvent& e) mutable {
      const std::lock_guard lock(mutex);
      if (n++ == 0) last = ++started == batch;
      if (last) last_one.push_back(Clock::now());
      if (e.finish == FinishReason::none) return;
      if (e.finish != FinishReason::length) problem = name_of(e.finish) + (" " + e.error);
      if (ended++ == 0) first_end = Clock::now();
      changed.notify_one();
    });
  }
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return ended == batch; });
  if (!problem.empty()) fail("batch {}: a request ended by {}", batch, problem);
  std::vector<double> gaps;
  for (size_t i = 2; i < last_one.size() && last_one[i] < first_end; ++i)
    gaps.push_back(std::chrono::duration<double>(last_one[i] - last_one[i - 1]).count());
  return gaps;
}

void bench_engine(const std::string& shape, const std::string& format, int n_in, int n_out, std::span<char*> batches) {
  Loaded m = load(shape, format);
  // So hot that the next token, and with it the choice of experts, is any.
  const SampleParams params{.temperature = 100.0f};
  for (const char* word : batches) {
    const int batch = std::atoi(word), pages = (n_in + n_out + 63) / 64;
    const DecoderModelOptions options{.name = shape,
                                      .max_context = n_in + n_out,
                                      .max_requests = batch,
                                      .max_step_tokens = 8192,
                                      .block_tokens = 64,
                                      .n_blocks = batch * pages * 3 / 2 + 16,  // so that all are let in at once
                                      .kv_format = KvFormat::bf16};
    std::vector<double> raw;
    {
      KvCache cache(*m.ops, m.config, KvFormat::bf16, 64, batch * pages);
      Runner runner(*m.ops, m.decoder, cache, runner_limits(options));
      runner.rehearse();
      runner.record_graphs();
      raw = run_once(m, runner, cache, batch, n_in, n_out, params).steps;
    }
    DecoderModelOptions one_by_one = options;
    one_by_one.follow = DecoderModelOptions::Follow::never;
    std::vector<double> slow_gaps = engine_gaps(m, one_by_one, batch, n_in, n_out, params);
    std::vector<double> gaps = engine_gaps(m, options, batch, n_in, n_out, params);
    if (raw.empty() || gaps.empty()) fail("batch {}: {} output tokens are too few to see all requests generate", batch, n_out);
    // The engine's requests have read further than the others' while the last prompts were read, so the ends of both runs are compared.
    const auto tail = [](std::vector<double>& v) {
      v.erase(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2));
      std::sort(v.begin(), v.end());
      return std::pair(v[v.size() / 2], v[v.size() * 99 / 100]);
    };
    const size_t n_gaps = gaps.size();
    const auto [runner_step, runner_slow] = tail(raw);
    const auto [engine_step, engine_slow] = tail(gaps);
    const auto [single_step, single_slow] = tail(slow_gaps);
    std::printf(
        "engine batch %3d, %d in, %d out: %.3f ms a step (p99 %.3f, %zu steps), %.3f (%.3f) one by one; without the engine %.3f (%.3f)\n",
        batch, n_in, n_out, engine_step * 1e3, engine_slow * 1e3, n_gaps, single_step * 1e3, single_slow * 1e3, runner_step * 1e3,
        runner_slow * 1e3);
  }
}

void bench_sample() {
  const auto ops = make_cuda_ops();
  for (const int vocab : {102400, 129280})
    for (const int n : {1, 8, 64, 256}) {
      const LinearSource values = random_source({.format = Format::f32, .out = n, .in = vocab}, 5);
      const Buffer memory = ops->alloc(static_cast<size_t>(n) * static_cast<size_t>(vocab) * sizeof(float));
      std::vector<float> logits(static_cast<size_t>(n) * static_cast<size_t>(vocab));
      std::memcpy(logits.data(), values.matrices[0].data.data(), logits.size() * sizeof(float));
      double square = 0.0;
      for (const float l : logits) square += static_cast<double>(l) * static_cast<double>(l);
      const auto scale = static_cast<float>(2.5 / std::sqrt(square / static_cast<double>(logits.size())));
      for (float& l : logits) l *= scale;
      ops->upload(memory.get(), logits.data(), logits.size() * sizeof(float));
      const View view = View::matrix(memory.get(), DType::f32, n, vocab);
      std::vector<TokenCount> history;
      for (int i = 0; i < 500; ++i) history.push_back({i * 97, 1, i % 3});
      const std::vector<uint32_t> allowed(static_cast<size_t>(vocab / 32), 0xfffffff7u);
      const std::pair<const char*, SampleParams> cases[] = {
          {"greedy", {.temperature = 0.0f}},
          {"temperature 1", {}},
          {"T 0.6, top-p 0.95", {.temperature = 0.6f, .top_p = 0.95f}},
          {"T 1, top-p 0.95", {.top_p = 0.95f}},
          {"top-k 40, top-p 0.95, min-p 0.05", {.top_k = 40, .top_p = 0.95f, .min_p = 0.05f}},
          {"T 0.6, top-p 0.95, penalties", {.temperature = 0.6f, .top_p = 0.95f, .repetition = 1.1f, .history = history}},
          {"T 0.6, top-p 0.95, mask", {.temperature = 0.6f, .top_p = 0.95f, .allowed = allowed}},
          {"T 0.6, top-p 0.95, 5 logprobs", {.temperature = 0.6f, .top_p = 0.95f, .n_logprobs = 5}},
      };
      for (const auto& [name, base] : cases) {
        std::vector<SampleParams> params(static_cast<size_t>(n), base);
        for (size_t i = 0; i < params.size(); ++i) params[i].seed = i;
        std::vector<Sampled> out(params.size());
        std::vector<double> seconds;
        for (int i = 0; i < 12; ++i) {
          const auto start = Clock::now();
          ops->sample(view, params, out);
          seconds.push_back(since(start));
        }
        std::sort(seconds.begin(), seconds.end());
        int wrong = 0;
        for (size_t i = 0; i < params.size(); i += 16)
          wrong +=
              sample_token(std::span<const float>(logits).subspan(i * static_cast<size_t>(vocab), static_cast<size_t>(vocab)), params[i])
                  .token != out[i].token;
        std::printf("sample %3d x %6d %-34s %8.1f us%s\n", n, vocab, name, seconds[5] * 1e6, wrong != 0 ? "  WRONG" : "");
      }
    }
}

int run(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "run" && argc == 7)
    bench_run(argv[2], argv[3], std::atoi(argv[4]), std::atoi(argv[5]), std::atoi(argv[6]));
  else if (what == "engine" && argc >= 7)
    bench_engine(argv[2], argv[3], std::atoi(argv[4]), std::atoi(argv[5]), {argv + 6, static_cast<size_t>(argc - 6)});
  else if (what == "sample")
    bench_sample();
  else {
    std::printf(
        "cuda_run_bench run v2-lite|v2 FORMAT BATCH IN OUT | run FILE file BATCH IN OUT | engine v2-lite|v2 FORMAT IN OUT BATCH... | "
        "sample\n");
    return 2;
  }
  return 0;
}

}  // namespace
}  // namespace cachalot::test

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    return cachalot::test::run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
