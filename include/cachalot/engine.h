// Cachalot's C++ interface: an engine runs many requests on one model, on a thread of its own.
//
//   auto engine = cachalot::open_engine("model.gguf", {});
//   engine->submit({.prompt = ids, .max_tokens = 100}, [](const cachalot::TokenEvent& e) { ... });
//
// Tokens in, tokens out: text is the caller's affair. All calls may come from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cachalot/sampling.h"

namespace cachalot {

// Classes of requests, most urgent first. A class takes the place of a lower one when there is no room; equals never do.
enum class Priority : uint8_t { interactive, batch, best_effort };  // P0, P1, P2
constexpr int kPriorities = 3;

using RequestId = int64_t;

struct Request {
  std::vector<int> prompt;
  SamplingOptions sampling;
  int max_tokens = -1;  // -1: until the context is full
  int min_tokens = 0;   // before them, neither an end token nor a stop token is drawn, unless the constraint allows nothing else
  bool ignore_eos = false;
  std::vector<int> stop_tokens;  // end the text like the model's own end tokens do
  Priority priority = Priority::interactive;
  double timeout_seconds = 0.0;                 // from submit() to the last token; 0: none
  bool use_prefix_cache = true;                 // read and feed the cache of prompt prefixes
  std::string cache_salt;                       // prefixes are shared among requests with equal salts only
  int prompt_logprobs = -1;                     // as n_logprobs, for the prompt's own tokens
  std::shared_ptr<TokenConstraint> constraint;  // or none
};

enum class FinishReason : uint8_t { none, stop, length, cancelled, timeout, error };
const char* name_of(FinishReason reason);

// What a request used; complete in its last event.
struct RequestUsage {
  int n_prompt = 0, n_cached = 0, n_output = 0;     // tokens; n_cached of the prompt came from the prefix cache
  int n_drafted = 0, n_accepted = 0;                // tokens proposed by speculation, and those that were right
  int n_preempted = 0;                              // times that the request lost its place
  double queued_seconds = 0.0;                      // from submit() to its first step
  double first_token_seconds = 0.0, seconds = 0.0;  // from submit()
};

struct TokenEvent {
  RequestId request = 0;
  int token = -1;  // -1: the request ended without one
  float logprob = 0.0f;
  std::vector<TokenLogprob> top;
  bool is_end_token = false;                 // the token ends the text and is not part of it
  FinishReason finish = FinishReason::none;  // not none: this is the request's last event
  std::string error;                         // when finish is error: what went wrong
  bool request_at_fault = false;             // the error lies in what the request asked for, not in the engine
  RequestUsage usage;
  // With the first token, when Request::prompt_logprobs >= 0: one entry per prompt token but the first, each headed by the token itself.
  std::vector<std::vector<TokenLogprob>> prompt_logprobs;
};

// Thrown by submit(): the request was not taken. Nothing else happens to it.
class Refused : public std::runtime_error {
 public:
  enum class Reason : uint8_t { invalid, too_long, queue_full, shutting_down };
  Refused(Reason why, const std::string& message, double retry_after = 0.0)
      : std::runtime_error(message), reason(why), retry_after_seconds(retry_after) {}
  Reason reason;
  double retry_after_seconds;  // a guess, for queue_full; 0: unknown
};

struct ClassStats {
  int waiting = 0, running = 0;                                                 // requests now
  int64_t finished = 0, refused = 0, preempted = 0, cancelled = 0, failed = 0;  // since the start
  int64_t promises_kept = 0, promises_broken = 0;  // first tokens and gaps between tokens, against the class's targets
};

struct EngineStats {
  ClassStats classes[kPriorities];
  int64_t steps = 0, prompt_tokens = 0, cached_prompt_tokens = 0, output_tokens = 0, drafted_tokens = 0, accepted_tokens = 0;
  int64_t recomputed_tokens = 0, swapped_tokens = 0;         // rows of requests that lost their place: thrown away, and kept in host memory
  int blocks_total = 0, blocks_used = 0, blocks_cached = 0;  // KV pages: held by requests; free but holding a known prefix
  double last_step_age_seconds = 0.0;                        // since the last step ended; 0 when nothing is running
};

struct EngineInfo {
  std::string model;               // name, for people
  int vocab = 0, max_context = 0;  // tokens
  int max_requests = 0;            // running at the same time
  std::vector<int> eos_ids;
};

class Engine {
 public:
  using OnEvent = std::function<void(const TokenEvent&)>;

  virtual ~Engine() = default;  // cancels what still runs, and waits for the thread
  // on_event is called on the engine's thread, which it must not block; it may call submit() and cancel(). Throws Refused.
  virtual RequestId submit(Request request, OnEvent on_event) = 0;
  // The request gets one last event, unless it had it already.
  virtual void cancel(RequestId request) = 0;
  // From now on submit() refuses with shutting_down; what was taken before goes on.
  virtual void close() = 0;
  // Called on the engine's thread after the events of each step, so that a receiver can pass them on together. Set before the first
  // submit().
  virtual void after_step(std::function<void()> hook) = 0;
  [[nodiscard]] virtual EngineStats stats() const = 0;
  [[nodiscard]] virtual const EngineInfo& info() const = 0;
};

// Targets that the engine works to keep, per class; 0: none.
struct ClassTargets {
  double first_token_seconds = 0.0, token_gap_seconds = 0.0;
  int max_waiting = 1024;  // requests in the queue; more are refused
};

struct EngineOptions {
  std::string device = "cpu";
  int n_threads = 0;                // 0: one per physical core
  int n_cpu_experts = 0;            // on a GPU: the routed experts of layers below this stay with the CPU
  int max_context = 0;              // tokens of one request; 0: the model's own limit, 4,096 at most
  int max_requests = 0;             // running at the same time; 0: 16 on the CPU, 256 on a GPU
  int max_step_tokens = 0;          // rows of a step; 0: 512 on the CPU, 4,096 on a GPU
  int block_tokens = 16;            // 8, 16, 32 or 64
  double kv_bytes = 0.0;            // memory for KV pages; 0: as much as max_requests of max_context need, or what the device has left
  double memory_utilization = 0.9;  // share of a GPU's memory to use, weights included
  double swap_bytes = 0.0;          // host memory for the KV pages of requests that lost their place; 0: they are always computed again
  std::string kv_cache_dtype = "auto";
  bool prefix_cache = true;
  bool batch_invariant = false;     // a request's tokens do not depend on what runs beside it, nor on chunking and cache hits; CPU only
  std::string speculation = "off";  // off, ngram, mtp
  int max_draft_tokens = 4;
  ClassTargets targets[kPriorities];
};

// Throws std::runtime_error (cachalot's Error) naming what is missing or wrong with the model.
std::unique_ptr<Engine> open_engine(const std::string& model, const EngineOptions& options);

}  // namespace cachalot
