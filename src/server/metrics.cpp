// Metrics.
#include "server/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace cachalot::server {
namespace {

constexpr double kFirstToken[] = {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560};
constexpr double kGap[] = {.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80};
constexpr double kLong[] = {.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680};
constexpr double kCount[] = {1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000};
constexpr double kN[] = {1, 2, 5, 10, 20};
// Fine enough to read limits of 15 ms a token and of 1.5 and 2 s to the first.
constexpr double kFineFirstToken[] = {.001, .002, .005, .01, .02, .03, .05, .075, .1, .15, .2, .3, .4, .5,
                                      .75,  1,    1.25, 1.5, 2,   3,   5,   7.5,  10, 20,  40, 80, 160};
constexpr double kFineGap[] = {.002, .004, .006, .008, .01, .0125, .015, .02, .025, .03, .04, .05, .06,
                               .08,  .1,   .125, .15,  .2,  .3,    .5,   .75, 1,    2,   5,   10};

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\' || c == '"') out += '\\';
    if (c == '\n')
      out += "\\n";
    else
      out += c;
  }
  return out;
}

class Page {
 public:
  explicit Page(const std::string& model) : base_(fmt::format("model_name=\"{}\",engine=\"0\"", escaped(model))) {}

  void head(std::string_view name, std::string_view type, std::string_view help) {
    out_ += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
  }
  void line(std::string_view name, double value, std::string_view more = {}) {
    out_ += fmt::format("{}{{{}{}{}}} {}\n", name, base_, more.empty() ? "" : ",", more, value);
  }
  void gauge(std::string_view name, std::string_view help, double value, std::string_view more = {}) {
    head(name, "gauge", help);
    line(name, value, more);
  }
  void counter(std::string_view name, std::string_view help, double value) {
    head(name, "counter", help);
    line(name, value);
  }
  void histogram(std::string_view name, std::string_view help, const Histogram& h) {
    head(name, "histogram", help);
    h.append(out_, name, base_);
  }
  void series(std::string_view name, const Histogram& h, std::string_view more) { h.append(out_, name, base_ + "," + std::string(more)); }
  std::string take() { return std::move(out_); }

 private:
  std::string base_, out_;
};

std::string class_label(int c) { return fmt::format("class=\"P{}\"", c); }

}  // namespace

void Histogram::observe(double value) {
  const auto at = static_cast<size_t>(std::lower_bound(edges_.begin(), edges_.end(), value) - edges_.begin());
  buckets_[at].fetch_add(1, std::memory_order_relaxed);
  sum_.fetch_add(value, std::memory_order_relaxed);
}

int64_t Histogram::count() const {
  int64_t n = 0;
  for (const auto& bucket : buckets_) n += bucket.load(std::memory_order_relaxed);
  return n;
}

void Histogram::append(std::string& out, std::string_view name, std::string_view labels) const {
  int64_t n = 0;
  for (size_t i = 0; i < edges_.size(); ++i) {
    n += buckets_[i].load(std::memory_order_relaxed);
    fmt::format_to(std::back_inserter(out), "{}_bucket{{{},le=\"{}\"}} {}\n", name, labels, edges_[i], n);
  }
  n += buckets_.back().load(std::memory_order_relaxed);
  fmt::format_to(std::back_inserter(out), "{}_bucket{{{},le=\"+Inf\"}} {}\n{}_sum{{{}}} {}\n{}_count{{{}}} {}\n", name, labels, n, name,
                 labels, sum_.load(std::memory_order_relaxed), name, labels, n);
}

Metrics::PerClass::PerClass() : first_token(kFineFirstToken), token_gap(kFineGap), queue(kFineFirstToken) {}

Metrics::Metrics()
    : first_token_(kFirstToken),
      token_gap_(kGap),
      time_per_token_(kGap),
      total_(kLong),
      queue_(kLong),
      inference_(kLong),
      prefill_(kLong),
      decode_(kLong),
      prompt_tokens_(kCount),
      output_tokens_(kCount),
      max_tokens_(kCount),
      n_(kN) {}

void Metrics::on_first_token(Priority priority, double seconds) {
  first_token_.observe(seconds);
  classes_[static_cast<size_t>(priority)].first_token.observe(seconds);
}

void Metrics::on_token_gap(Priority priority, double seconds) {
  token_gap_.observe(seconds);
  classes_[static_cast<size_t>(priority)].token_gap.observe(seconds);
}

void Metrics::on_end(const JobReport& report) {
  if (report.reason == "refused") {
    if (report.status == 429 || report.status == 503) rejected_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  PerClass& own = classes_[static_cast<size_t>(report.priority)];
  for (const std::string& reason : report.reasons) {
    const auto at = std::find(kReasons.begin(), kReasons.end(), reason);
    if (at != kReasons.end()) finished_[static_cast<size_t>(at - kReasons.begin())].fetch_add(1, std::memory_order_relaxed);
  }
  own.requests.fetch_add(1, std::memory_order_relaxed);
  own.prompt_tokens.fetch_add(report.use.prompt, std::memory_order_relaxed);
  own.output_tokens.fetch_add(report.use.completion, std::memory_order_relaxed);
  total_.observe(report.seconds);
  prompt_tokens_.observe(report.use.prompt);
  output_tokens_.observe(report.use.completion);
  if (report.max_tokens >= 0) max_tokens_.observe(report.max_tokens);
  n_.observe(report.n);
  // What the engine tells only of a request that ran to its end.
  if (report.first_token_seconds <= 0.0) return;
  queue_.observe(report.queued_seconds);
  own.queue.observe(report.queued_seconds);
  inference_.observe(report.seconds - report.queued_seconds);
  prefill_.observe(report.first_token_seconds - report.queued_seconds);
  decode_.observe(report.seconds - report.first_token_seconds);
  if (report.n == 1 && report.use.completion > 1)
    time_per_token_.observe((report.seconds - report.first_token_seconds) / (report.use.completion - 1));
}

void Metrics::on_http(int status) { http_[static_cast<size_t>(std::clamp(status / 100, 0, 5))].fetch_add(1, std::memory_order_relaxed); }

std::string Metrics::text(const Engine* engine, const std::string& model, int block_tokens, const HttpCounts& http, bool live) const {
  Page page(model);
  const EngineStats stats = engine != nullptr ? engine->stats() : EngineStats{};
  int running = 0, waiting = 0;
  int64_t preempted = 0;
  for (const ClassStats& c : stats.classes) {
    running += c.running;
    waiting += c.waiting;
    preempted += c.preempted;
  }
  const double total = stats.blocks_total > 0 ? stats.blocks_total : 1.0;
  page.gauge("vllm:num_requests_running", "Requests in the running batch.", running);
  page.gauge("vllm:num_requests_waiting", "Requests waiting for a place.", waiting);
  page.gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", stats.blocks_used / total);
  page.gauge("vllm:cache_config_info", "Shape of the KV cache, in labels.", 1,
             fmt::format("block_size=\"{}\",num_gpu_blocks=\"{}\",enable_prefix_caching=\"True\"", block_tokens, stats.blocks_total));
  page.gauge("vllm:engine_sleep_state", "1 for the state that the engine is in.", 1, "sleep_state=\"awake\"");
  const auto prompt = static_cast<double>(stats.prompt_tokens), cached = static_cast<double>(stats.cached_prompt_tokens);
  page.counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", prompt);
  page.counter("vllm:prefix_cache_hits_total", "Prompt tokens found there.", cached);
  page.counter("vllm:prompt_tokens_total", "Prompt tokens read.", prompt);
  page.counter("vllm:prompt_tokens_cached_total", "Prompt tokens that came from the cache.", cached);
  page.counter("vllm:generation_tokens_total", "Tokens generated.", static_cast<double>(stats.output_tokens));
  page.counter("vllm:num_preemptions_total", "Times that a request lost its place.", static_cast<double>(preempted));
  page.counter("vllm:spec_decode_num_draft_tokens_total", "Tokens proposed by speculation.", static_cast<double>(stats.drafted_tokens));
  page.counter("vllm:spec_decode_num_accepted_tokens_total", "Proposed tokens that were right.",
               static_cast<double>(stats.accepted_tokens));
  page.counter("vllm:admission_rejections_total", "Requests refused for want of room.", static_cast<double>(rejected_.load()));
  page.head("vllm:request_success_total", "counter", "Answers by the reason of their end.");
  for (size_t i = 0; i < kReasons.size(); ++i)
    page.line("vllm:request_success_total", static_cast<double>(finished_[i].load()), fmt::format("finished_reason=\"{}\"", kReasons[i]));
  page.histogram("vllm:time_to_first_token_seconds", "From the request to its first token.", first_token_);
  page.histogram("vllm:inter_token_latency_seconds", "From one token to the next.", token_gap_);
  page.histogram("vllm:request_time_per_output_token_seconds", "Mean of a request's gaps.", time_per_token_);
  page.histogram("vllm:e2e_request_latency_seconds", "From the request to its end.", total_);
  page.histogram("vllm:request_queue_time_seconds", "Waiting for a place.", queue_);
  page.histogram("vllm:request_inference_time_seconds", "From the place to the end.", inference_);
  page.histogram("vllm:request_prefill_time_seconds", "From the place to the first token.", prefill_);
  page.histogram("vllm:request_decode_time_seconds", "From the first token to the last.", decode_);
  page.histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", prompt_tokens_);
  page.histogram("vllm:request_generation_tokens", "Tokens generated for a request.", output_tokens_);
  page.histogram("vllm:request_params_max_tokens", "The limit that a request set.", max_tokens_);
  page.histogram("vllm:request_params_n", "Answers of a request.", n_);

  const auto by_class = [&](std::string_view name, std::string_view type, std::string_view help, const auto& value) {
    page.head(name, type, help);
    for (int c = 0; c < kPriorities; ++c)
      page.line(name, static_cast<double>(value(stats.classes[c], classes_[static_cast<size_t>(c)])), class_label(c));
  };
  by_class("cachalot:requests_waiting", "gauge", "Requests waiting for a place.",
           [](const ClassStats& c, const PerClass&) { return c.waiting; });
  by_class("cachalot:requests_running", "gauge", "Requests in the running batch.",
           [](const ClassStats& c, const PerClass&) { return c.running; });
  by_class("cachalot:requests_total", "counter", "Requests answered.",
           [](const ClassStats&, const PerClass& p) { return p.requests.load(); });
  by_class("cachalot:requests_refused_total", "counter", "Requests that found the queue full.",
           [](const ClassStats& c, const PerClass&) { return c.refused; });
  by_class("cachalot:requests_cancelled_total", "counter", "Requests cancelled.",
           [](const ClassStats& c, const PerClass&) { return c.cancelled; });
  by_class("cachalot:requests_failed_total", "counter", "Requests that failed.",
           [](const ClassStats& c, const PerClass&) { return c.failed; });
  by_class("cachalot:preemptions_total", "counter", "Times that a request lost its place.",
           [](const ClassStats& c, const PerClass&) { return c.preempted; });
  by_class("cachalot:promises_kept_total", "counter", "First tokens and gaps within the class's targets.",
           [](const ClassStats& c, const PerClass&) { return c.promises_kept; });
  by_class("cachalot:promises_broken_total", "counter", "First tokens and gaps past the class's targets.",
           [](const ClassStats& c, const PerClass&) { return c.promises_broken; });
  by_class("cachalot:prompt_tokens_total", "counter", "Prompt tokens of answered requests.",
           [](const ClassStats&, const PerClass& p) { return p.prompt_tokens.load(); });
  by_class("cachalot:output_tokens_total", "counter", "Tokens generated for answered requests.",
           [](const ClassStats&, const PerClass& p) { return p.output_tokens.load(); });
  const auto histograms = [&](std::string_view name, std::string_view help, const auto& member) {
    page.head(name, "histogram", help);
    for (size_t c = 0; c < classes_.size(); ++c) page.series(name, classes_[c].*member, class_label(static_cast<int>(c)));
  };
  histograms("cachalot:time_to_first_token_seconds", "From the request to its first token.", &PerClass::first_token);
  histograms("cachalot:token_gap_seconds", "From one token to the next.", &PerClass::token_gap);
  histograms("cachalot:queue_seconds", "Waiting for a place.", &PerClass::queue);
  page.counter("cachalot:engine_steps_total", "Steps of the engine.", static_cast<double>(stats.steps));
  page.gauge("cachalot:last_step_age_seconds", "Since the last step ended; 0 when nothing runs.", stats.last_step_age_seconds);
  page.gauge("cachalot:kv_pages_used", "KV pages held by requests.", stats.blocks_used);
  page.gauge("cachalot:kv_pages_cached", "Free KV pages that hold a known prefix.", stats.blocks_cached);
  page.gauge("cachalot:kv_pages_total", "KV pages.", stats.blocks_total);
  page.gauge("cachalot:live", "1 while the engine makes progress.", live ? 1 : 0);
  page.gauge("cachalot:http_connections", "Open connections.", static_cast<double>(http.connections));
  page.counter("cachalot:http_connections_total", "Connections accepted.", static_cast<double>(http.accepted));
  page.counter("cachalot:http_connections_lost_total", "Clients that went away before their answer's end.", static_cast<double>(http.lost));
  page.counter("cachalot:http_slow_readers_total", "Clients given up for reading too slowly.", static_cast<double>(http.slow_readers));
  page.gauge("cachalot:http_body_bytes", "Bytes of requests that are being received or read.", static_cast<double>(http.body_bytes));
  page.head("cachalot:http_responses_total", "counter", "Answers by status.");
  for (size_t i = 1; i < http_.size(); ++i)
    page.line("cachalot:http_responses_total", static_cast<double>(http_[i].load() + http.answers[i]), fmt::format("status=\"{}xx\"", i));
  return page.take();
}

}  // namespace cachalot::server
