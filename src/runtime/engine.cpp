// The engine's thread: requests and cancellations come in through one queue, events go out through callbacks.
#include "runtime/engine.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "runtime/memory_plan.h"

namespace cachalot {

const char* name_of(FinishReason reason) {
  switch (reason) {
    case FinishReason::none: return "none";
    case FinishReason::stop: return "stop";
    case FinishReason::length: return "length";
    case FinishReason::cancelled: return "cancelled";
    case FinishReason::timeout: return "timeout";
    case FinishReason::error: return "error";
  }
  return "?";
}

namespace {

double steady_seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

CoreOptions::Speculation speculation_of(const EngineOptions& options) {
  using Speculation = CoreOptions::Speculation;
  if (options.max_draft_tokens < 1 || options.max_draft_tokens > 32)
    fail("engine: found {} guessed tokens at most, expected 1 to 32", options.max_draft_tokens);
  if (options.speculation == "off") return Speculation::off;
  if (options.speculation == "ngram") return Speculation::ngram;
  if (options.speculation == "mtp") return Speculation::mtp;
  fail("engine: speculation \"{}\" is unknown, expected off, ngram or mtp", printable(options.speculation));
}

class ThreadedEngine final : public Engine {
 public:
  ThreadedEngine(std::unique_ptr<StepModel> model, const EngineOptions& options, std::shared_ptr<void> owner)
      : owner_(std::move(owner)),
        core_(std::move(model),
              {.prefix_cache = options.prefix_cache,
               .targets = {options.targets[0], options.targets[1], options.targets[2]},
               .speculation = speculation_of(options),
               .max_draft_tokens = options.max_draft_tokens},
              steady_seconds) {
    for (size_t c = 0; c < kPriorities; ++c) max_waiting_[c] = options.targets[c].max_waiting;
    snapshot_ = core_.stats();
    thread_ = std::thread([this] { loop(); });
  }
  ~ThreadedEngine() override {
    {
      const std::lock_guard lock(mutex_);
      closed_ = stopping_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }

  RequestId submit(Request request, OnEvent on_event) override {
    check_request(request, core_.info());
    const auto c = static_cast<size_t>(request.priority);
    RequestId id = 0;
    {
      const std::lock_guard lock(mutex_);
      if (closed_) throw Refused(Refused::Reason::shutting_down, "the engine takes no more requests");
      // Places that are free are taken by the next step, so they count as room.
      int running = 0;
      for (const ClassStats& counts : snapshot_.classes) running += counts.running;
      const int waiting = snapshot_.classes[c].waiting + arriving_[c] + taken_[c];
      if (waiting >= max_waiting_[c] + std::max(0, core_.info().max_requests - running)) {
        ++refused_[c];
        const double guess = seconds_per_request_ * std::max(1, waiting);
        throw Refused(Refused::Reason::queue_full,
                      fmt::format("{} requests of this class are waiting already, which is the limit", waiting),
                      std::clamp(guess, 1.0, 60.0));
      }
      ++arriving_[c];
      id = next_id_++;
      if (!busy_) last_step_ = steady_seconds();
      busy_ = true;
      inbox_.push_back({.id = id, .request = std::move(request), .on_event = std::move(on_event), .submitted = steady_seconds()});
    }
    wake_.notify_one();
    return id;
  }

  void cancel(RequestId request) override {
    {
      const std::lock_guard lock(mutex_);
      inbox_.push_back({.id = request, .is_cancel = true});
    }
    wake_.notify_one();
  }

  void close() override {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }

  void after_step(std::function<void()> hook) override {
    const std::lock_guard lock(mutex_);
    core_.after_step(std::move(hook));
  }

  [[nodiscard]] EngineStats stats() const override {
    const std::lock_guard lock(mutex_);
    EngineStats s = snapshot_;
    for (size_t c = 0; c < kPriorities; ++c) {
      s.classes[c].refused = refused_[c];
      s.classes[c].waiting += arriving_[c] + taken_[c];
    }
    if (busy_) s.last_step_age_seconds = std::max(0.0, steady_seconds() - last_step_);
    return s;
  }
  [[nodiscard]] const EngineInfo& info() const override { return core_.info(); }

 private:
  struct Message {
    RequestId id = 0;
    bool is_cancel = false;
    Request request;
    OnEvent on_event;
    double submitted = 0.0;
  };

  void loop() {
    std::vector<Message> messages;
    for (bool stop = false; !stop;) {
      {
        std::unique_lock lock(mutex_);
        snapshot_ = core_.stats();
        seconds_per_request_ = core_.seconds_per_request();
        last_step_ = steady_seconds();
        std::fill(std::begin(taken_), std::end(taken_), 0);
        busy_ = core_.has_work() || !inbox_.empty();
        wake_.wait(lock, [&] { return stopping_ || !inbox_.empty() || core_.has_work(); });
        messages.swap(inbox_);
        std::swap(taken_, arriving_);
        stop = stopping_;
      }
      for (Message& m : messages) {
        if (m.is_cancel)
          core_.cancel(m.id);
        else
          core_.add(m.id, std::move(m.request), std::move(m.on_event), m.submitted);
      }
      messages.clear();
      if (stop) core_.cancel_all();
      core_.step();
    }
  }

  std::shared_ptr<void> owner_;  // goes last
  EngineCore core_;              // only info() is touched outside the thread, and after_step() before it has work
  int max_waiting_[kPriorities];

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Message> inbox_;
  EngineStats snapshot_;
  int arriving_[kPriorities] = {};  // in the inbox
  int taken_[kPriorities] = {};     // out of the inbox, not yet in the snapshot
  int64_t refused_[kPriorities] = {};
  double seconds_per_request_ = 0.0, last_step_ = 0.0;
  bool busy_ = false, closed_ = false, stopping_ = false;
  RequestId next_id_ = 1;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Engine> make_engine(std::unique_ptr<StepModel> model, const EngineOptions& options, std::shared_ptr<void> owner) {
  return std::make_unique<ThreadedEngine>(std::move(model), options, std::move(owner));
}

KvFormat kv_format_of(std::string_view dtype, const Ops& ops) {
  if (dtype == "auto") return ops.activation() == DType::bf16 ? KvFormat::bf16 : KvFormat::f32;
  for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16, KvFormat::fp8})
    if (dtype == name_of(format)) return format;
  fail("KV cache dtype: found \"{}\", expected auto, f32, f16, bf16 or fp8", printable(dtype));
}

DecoderModelOptions decoder_model_options(Ops& ops, const Decoder& decoder, const EngineOptions& options) {
  constexpr int kDefaultContext = 4096;
  constexpr double kShareOfFree = 0.85;  // the rest is for the activations of a step
  DecoderModelOptions m;
  if (options.max_requests < 0 || options.max_step_tokens < 0)
    fail("engine: found {} requests and {} rows of a step, expected 0 or more", options.max_requests, options.max_step_tokens);
  (void)speculation_of(options);
  m.max_context = options.max_context > 0 ? options.max_context : std::min(kDefaultContext, decoder.max_positions());
  if (m.max_context > decoder.max_positions())
    fail("engine: found a context of {}, expected at most {} tokens", m.max_context, decoder.max_positions());
  m.max_requests = options.max_requests > 0 ? options.max_requests : ops.host_memory() ? 16 : 256;
  m.max_step_tokens = std::max(options.max_step_tokens > 0 ? options.max_step_tokens : ops.host_memory() ? 512 : 4096, m.max_requests);
  m.guesses = speculation_of(options) == CoreOptions::Speculation::mtp;
  if (m.guesses && !decoder.mtp())
    fail("engine: speculation mtp needs a model with a prediction layer, which this one has not, or which was not loaded");
  if (speculation_of(options) != CoreOptions::Speculation::off)
    m.max_scored_rows = std::max(m.max_scored_rows, m.max_requests * options.max_draft_tokens);
  m.block_tokens = options.block_tokens;
  m.kv_format = kv_format_of(options.kv_cache_dtype, ops);
  // The absorbed form gives a row the same sums whatever chunk it came in.
  m.form = options.batch_invariant ? MlaForm::absorbed : MlaForm::automatic;

  const double block_bytes =
      static_cast<double>(decoder.config().kv_layout(m.kv_format, m.block_tokens).token_bytes()) * m.block_tokens * decoder.n_kv_layers();
  double bytes = options.kv_bytes;
  if (bytes <= 0.0) {
    bytes = block_bytes * blocks_for(m.max_context, m.block_tokens) * m.max_requests;
    if (!ops.host_memory()) {
      const MemoryPlan plan = plan_memory(ops, decoder, runner_limits(m), m.kv_format, m.block_tokens, options.memory_utilization);
      bytes = std::min(bytes, static_cast<double>(plan.kv));
    } else if (const size_t free = ops.memory().free; free > 0) {
      bytes = std::min(bytes, kShareOfFree * static_cast<double>(free));
    }
  }
  if (const size_t total = ops.memory().total; total > 0 && bytes > static_cast<double>(total))
    fail("engine: the KV cache gets {:.0f} bytes, but the device has {} in all", bytes, total);
  m.n_blocks = static_cast<int>(std::min(bytes / block_bytes, double{1 << 26}));
  m.n_host_blocks = static_cast<int>(std::clamp(options.swap_bytes / block_bytes, 0.0, double{1 << 26}));
  if (m.n_blocks < 1) fail("engine: the KV cache gets {:.0f} bytes, expected at least {:.0f}, one page", bytes, block_bytes);
  m.max_context = static_cast<int>(std::min<int64_t>(m.max_context, int64_t{m.n_blocks} * m.block_tokens));
  return m;
}

std::unique_ptr<Engine> make_engine(Ops& ops, const Decoder& decoder, const EngineOptions& options, const std::string& name,
                                    std::shared_ptr<void> owner) {
  DecoderModelOptions m = decoder_model_options(ops, decoder, options);
  m.name = name;
  return make_engine(make_decoder_model(ops, decoder, m), options, std::move(owner));
}

std::unique_ptr<Engine> make_stub_engine(const EngineOptions& options, StubOptions stub) {
  if (options.max_context > 0) stub.max_context = options.max_context;
  if (options.max_requests > 0) stub.max_requests = options.max_requests;
  stub.max_step_tokens = std::max(options.max_step_tokens > 0 ? options.max_step_tokens : stub.max_step_tokens, stub.max_requests);
  stub.block_tokens = options.block_tokens;
  return make_engine(make_stub_model(std::move(stub)), options);
}

}  // namespace cachalot
