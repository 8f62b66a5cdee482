// Generator: produces text for several requests at once, on one thread: each step gives every running request its next token and fills
// the rest of the row budget with prompt chunks of those that are still reading.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "cachalot/engine.h"
#include "runtime/runner.h"

namespace cachalot {

struct GenerationRequest {
  std::vector<int> prompt;
  SamplingOptions sampling;
  int max_tokens = -1;  // -1: until the context is full
  bool ignore_eos = false;
  std::vector<int> stop_tokens;  // end the text like the model's own end tokens do
  std::optional<int> reuse;      // an ended request whose cached rows may serve as a prefix of this one
};

struct GenerationEvent {
  int request = 0;
  Sampled sampled;                           // the token drawn; its id is -1 when the request ended without one
  bool is_end_token = false;                 // the token ends the text and is not part of it
  FinishReason finish = FinishReason::none;  // not none: this is the request's last event
};

struct GeneratorOptions {
  int max_context = 4096;  // tokens of one request, prompt included
  int max_requests = 1;    // at the same time
  int chunk = 512;         // rows of a step
  int block_tokens = 16;
  KvFormat kv_format = KvFormat::f32;
  MlaForm form = MlaForm::automatic;
};

class Generator {
 public:
  Generator(Ops& ops, const Decoder& decoder, const GeneratorOptions& options);
  ~Generator();

  // Throws Error when the prompt is empty, holds an id outside the vocabulary, does not fit the context, or all places are taken.
  int add(GenerationRequest request);
  // Runs one step. False when nothing is running.
  bool step(const std::function<void(const GenerationEvent&)>& on_event);
  // Ends a request; it gives one last event in the next step.
  void cancel(int request);
  // Frees the cached rows of an ended request.
  void forget(int request);

  [[nodiscard]] const Sequence& sequence(int request) const;
  [[nodiscard]] int prompt_reused(int request) const;  // prompt tokens that were already in the cache
  [[nodiscard]] const KvCache& cache() const { return cache_; }

 private:
  struct Running;
  [[nodiscard]] Running* find(int request);
  [[nodiscard]] const Running* find(int request) const;
  void take_token(Running& r, Sampled sampled, const std::function<void(const GenerationEvent&)>& on_event);

  Ops& ops_;
  const Decoder& decoder_;
  GeneratorOptions options_;
  KvCache cache_;
  Runner runner_;
  std::vector<std::unique_ptr<Running>> requests_;
  int next_id_ = 0;
};

}  // namespace cachalot
